"""Endpoint of the Tokens page: the subwords of a text."""

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
    """POST {run, text}: subwords, ids and, if the tokenizer supports it, each merge step."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_tokens, fields, state.library, state.limits)


def _tokens(fields: Fields, library: Library, limits: Limits) -> Response:
    folder, text = library.find(fields.text("run")), fields.text("text", "")
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder.name} has no {TOKENIZER}: it is not a text model")
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(text)
    if len(ids) > limits.tokens:
        raise Problem(413, f"the text has {len(ids)} tokens, more than {limits.tokens}: shorten it")
    steps, reason = [], ""
    if len(text) > limits.replay_characters:
        reason = (
            f"steps are shown for up to {limits.replay_characters} characters: shorten the text"
        )
    elif text:
        try:
            steps = tokenizer.trace(text)
        except UserError as error:
            reason = str(error)
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
