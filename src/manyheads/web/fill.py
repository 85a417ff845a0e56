"""The Fill page's question: which words a masked language model puts in the place of a mask."""

import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.encode import MASKS, Guess, TextEncoder
from manyheads.errors import Mistake
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.heads import Masked
from manyheads.run import Run
from manyheads.tokens import CONTINUATION
from manyheads.web.answers import Fields, Problem
from manyheads.web.fitting import fitting_runs
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.passes import Room

TOP = 10  # words that are told of a mask
RANKED = 1000  # words among which that which was masked is looked for
MOST_MASKS = 16


async def maskers(request: Request) -> Response:
    """GET: the names of the runs that have a head for masked words."""
    names = await run_in_threadpool(fitting_runs, request.app.state.library, _is_masker)
    return JSONResponse({"runs": names})


def _is_masker(run: Run) -> bool:
    return isinstance(run.model, BertConfig) and isinstance(run.model.head, Masked)


async def fill(request: Request) -> Response:
    """POST {run, text, hidden?}: the likeliest words of each mask of the text.

    `hidden` are the words that stood where the masks are, in their order: each is told with how
    likely the model finds it, so far as it is one token and among the likeliest.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_fill, fields, state.library, state.limits)


def _fill(fields: Fields, library: Library, limits: Limits) -> Response:
    run, text = fields.text("run"), fields.text("text", "")
    hidden = fields.texts("hidden", MOST_MASKS)
    with library.model(run) as opened:
        model: Any = opened.model
        if not isinstance(model, Bert) or not isinstance(model.config.head, Masked):
            raise opened.cannot("fills masks", "one with a head for masked words")
        encoder = opened.encoder()
        own = str(encoder.tokenizer.content(encoder.tokenizer.mask))
        spelled = re.compile("|".join(map(re.escape, MASKS)), re.IGNORECASE)
        if len(spelled.findall(text)) > MOST_MASKS:
            raise Problem(413, f"the text has more than {MOST_MASKS} masks: take some away")
        [(ids, _)] = encoder.tokenizer.framed([spelled.sub(own, text)], specials=True)
        Room(limits.tokens, limits.trace_bytes).check(ids, model, "the text")
        return JSONResponse(filled(encoder, text, hidden))


def filled(encoder: TextEncoder, text: str, hidden: list[str]) -> dict[str, Any]:
    """The words of each mask, and the text with the likeliest of them."""
    [masks] = encoder.fill([text], RANKED)
    if not masks:
        raise Mistake("there is no mask in the text: write [MASK] for a word")
    whole = [
        {
            "top": [{"piece": one.word, "probability": one.probability} for one in guesses[:TOP]],
            "hidden": _found(guesses, hidden[at]) if at < len(hidden) else None,
        }
        for at, guesses in enumerate(masks)
    ]
    return {"masks": whole, "text": encoder.filled(text, masks)}


def _found(guesses: list[Guess], word: str) -> dict[str, Any]:
    """Where a word stands among those that were guessed; nowhere is rank None."""
    words = [guess.word.strip().removeprefix(CONTINUATION) for guess in guesses]
    for spelled in (word, word.lower()):  # a vocabulary without capitals has it so
        if spelled in words:
            at = words.index(spelled)
            return {"word": word, "rank": at + 1, "probability": guesses[at].probability}
    return {"word": word, "rank": None, "probability": None}


ROUTES = [
    Route("/api/fill", maskers, methods=["GET"]),
    Route("/api/fill", fill, methods=["POST"]),
]
