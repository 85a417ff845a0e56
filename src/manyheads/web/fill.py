"""Endpoint of the Fill page: the predictions of a masked language model for each mask."""

import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manyheads.errors import UserError
from manyheads.tasks.encode import MASKS, Guess, TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import SizeLimit
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer

TOP = 10  # predictions returned for a mask
RANKED = 1000  # predictions searched for the hidden word
MOST_MASKS = 16


async def fill(request: Request) -> Response:
    """POST {run, text, hidden?}: the most probable words for each mask of the text.

    `hidden` lists the words under the masks, in order. The response has the rank and probability of
    each one that is a single token and among the first 1,000. An empty string: no hidden word.
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
        mask = str(encoder.tokenizer.content(encoder.tokenizer.mask))
        mask_pattern = re.compile("|".join(map(re.escape, (*MASKS, mask))), re.IGNORECASE)
        parts = mask_pattern.split(text)
        if len(parts) - 1 > MOST_MASKS:
            raise Problem(413, f"the text has more than {MOST_MASKS} masks: remove some")
        [(ids, _)] = encoder.tokenizer.framed([mask.join(parts)], specials=True)
        SizeLimit(limits.tokens, limits.trace_bytes).check(ids, model, "the text")
        return json_answer(filled(encoder, parts, hidden))


def filled(encoder: TextEncoder, parts: list[str], hidden: list[str]) -> dict[str, Any]:
    """Predictions for the mask after each part but the last, and the text with the best ones."""
    text = str(encoder.tokenizer.content(encoder.tokenizer.mask)).join(parts)
    [masks] = encoder.fill([text], RANKED)
    if not masks:
        raise UserError("the text has no mask: write [MASK] for a word")
    words = [*hidden, *[""] * len(masks)]
    results = [
        {
            "top": [
                {"piece": guess.word, "probability": guess.probability} for guess in guesses[:TOP]
            ],
            "hidden": _ranked(encoder, guesses, parts, at, words[at]) if words[at] else None,
        }
        for at, guesses in enumerate(masks)
    ]
    return {"masks": results, "text": encoder.filled(text, masks)}


def _ranked(
    encoder: TextEncoder, guesses: list[Guess], parts: list[str], at: int, word: str
) -> dict[str, Any]:
    """The rank of a word among the predictions; None if it is not among them."""
    subword = _subword(encoder.tokenizer, parts, at, word)
    for rank, guess in enumerate(guesses, start=1):
        if guess.word == subword:
            return {
                "word": word,
                "piece": subword,
                "rank": rank,
                "probability": guess.probability,
            }
    return {"word": word, "piece": subword, "rank": None, "probability": None}


def _subword(tokenizer: Tokenizer, parts: list[str], at: int, word: str) -> str | None:
    """The single token of a word at a mask; None if the word is not exactly one token there.

    The token depends on its neighbours: `small`, ` small` and `##small` differ.
    """
    mask = str(tokenizer.content(tokenizer.mask))
    before, after = mask.join(parts[: at + 1]), mask.join(parts[at + 1 :])
    texts = (f"{before}{mask}{after}", f"{before}{word}{after}")
    (masked, _), (unmasked, _) = tokenizer.framed(texts, specials=True)
    position = [number for number, token in enumerate(masked) if token == tokenizer.mask][at]
    same_context = (
        unmasked[:position] == masked[:position]
        and unmasked[position + 1 :] == masked[position + 1 :]
    )
    is_single = same_context and len(unmasked) == len(masked)
    return tokenizer.subwords([unmasked[position]])[0] if is_single else None


ROUTES = [Route("/api/fill", fill, methods=["POST"])]
