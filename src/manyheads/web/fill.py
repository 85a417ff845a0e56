"""The Fill page's question: which words a masked language model puts in the place of a mask."""

import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manyheads.errors import UserError
from manyheads.tasks.encode import MASKS, Guess, TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import Room
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer

TOP = 10  # words that are told of a mask
RANKED = 1000  # words among which that which was masked is looked for
MOST_MASKS = 16


async def fill(request: Request) -> Response:
    """POST {run, text, hidden?}: the likeliest words of each mask of the text.

    `hidden` are the words that stood where the masks are, in their order: each is told with how
    likely the model finds it, so far as it is one token there and among the likeliest. An empty
    one is of a mask that hides no word.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_fill, fields, state.library, state.limits)


def _fill(fields: Fields, library: Library, limits: Limits) -> Response:
    run, text = fields.text("run"), fields.text("text", "")
    hidden = fields.texts("hidden", MOST_MASKS)
    with library.model(run) as opened:
        model: Any = opened.model
        if "fill" not in opened.run.spec.pages(opened.run):
            raise opened.unsupported("fills masks", "one with a head for masked words")
        encoder = opened.encoder()
        own = str(encoder.tokenizer.content(encoder.tokenizer.mask))
        spelled = re.compile("|".join(map(re.escape, (*MASKS, own))), re.IGNORECASE)
        parts = spelled.split(text)
        if len(parts) - 1 > MOST_MASKS:
            raise Problem(413, f"the text has more than {MOST_MASKS} masks: take some away")
        [(ids, _)] = encoder.tokenizer.framed([own.join(parts)], specials=True)
        Room(limits.tokens, limits.trace_bytes).check(ids, model, "the text")
        return json_answer(filled(encoder, parts, hidden))


def filled(encoder: TextEncoder, parts: list[str], hidden: list[str]) -> dict[str, Any]:
    """The words of the mask after each part but the last, and the text with the likeliest."""
    text = str(encoder.tokenizer.content(encoder.tokenizer.mask)).join(parts)
    [masks] = encoder.fill([text], RANKED)
    if not masks:
        raise UserError("there is no mask in the text: write [MASK] for a word")
    words = [*hidden, *[""] * len(masks)]
    whole = [
        {
            "top": [{"piece": one.word, "probability": one.probability} for one in guesses[:TOP]],
            "hidden": _found(encoder, guesses, parts, at, words[at]) if words[at] else None,
        }
        for at, guesses in enumerate(masks)
    ]
    return {"masks": whole, "text": encoder.filled(text, masks)}


def _found(
    encoder: TextEncoder, guesses: list[Guess], parts: list[str], at: int, word: str
) -> dict[str, Any]:
    """Where the token of a word stands among those that were guessed; nowhere is rank None."""
    piece = _piece(encoder.tokenizer, parts, at, word)
    for rank, guess in enumerate(guesses, start=1):
        if guess.word == piece:
            told = {"rank": rank, "probability": guess.probability}
            return {"word": word, "piece": piece, **told}
    return {"word": word, "piece": piece, "rank": None, "probability": None}


def _piece(tokenizer: Tokenizer, parts: list[str], at: int, word: str) -> str | None:
    """The one token that a word is in the place of a mask; None where it is several, or none.

    Which token it is hangs on what is beside it: `small`, ` small` and `##small` are three.
    """
    own = str(tokenizer.content(tokenizer.mask))
    before, after = own.join(parts[: at + 1]), own.join(parts[at + 1 :])
    texts = (f"{before}{own}{after}", f"{before}{word}{after}")
    (masked, _), (whole, _) = tokenizer.framed(texts, specials=True)
    place = [number for number, token in enumerate(masked) if token == tokenizer.mask][at]
    alike = whole[:place] == masked[:place] and whole[place + 1 :] == masked[place + 1 :]
    one = alike and len(whole) == len(masked)
    return tokenizer.subwords([whole[place]])[0] if one else None


ROUTES = [Route("/api/fill", fill, methods=["POST"])]
