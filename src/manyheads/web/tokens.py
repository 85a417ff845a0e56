"""The Tokens page's question: how a text falls into pieces."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.errors import UserError
from manyheads.run import TOKENIZER, read_tokenizer
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem


async def tokens(request: Request) -> Response:
    """POST {run, text}: its pieces, their ids, and the states on the way where they are known."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_tokens, fields, state.library, state.limits)


def _tokens(fields: Fields, library: Library, limits: Limits) -> Response:
    folder, text = library.find(fields.text("run")), fields.text("text", "")
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder.name} has no {TOKENIZER}: it reads no text")
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(text)
    if len(ids) > limits.tokens:
        raise Problem(
            413, f"the text has {len(ids)} tokens, at most {limits.tokens} are shown: shorten it"
        )
    steps, reason = [], ""
    if len(text) > limits.replay_characters:
        reason = f"steps are shown of up to {limits.replay_characters} characters: shorten the text"
    elif text:
        try:
            steps = tokenizer.trace(text)
        except UserError as mistake:
            reason = str(mistake)
    return JSONResponse(
        {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "ids": ids,
            "pieces": tokenizer.subwords(ids),
            "steps": [
                {"pieces": s.subwords, "merged": s.merged, "rank": s.rank, "tried": s.tried}
                for s in steps
            ],
            "reason": reason,
        }
    )


ROUTES = [Route("/api/tokens", tokens, methods=["POST"])]
