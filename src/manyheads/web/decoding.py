"""The Decode page's questions: what a search went through, and what may come at a place."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manyheads.decode.beam import Hypothesis
from manyheads.decode.sample import Sample
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.watching import Watched, watched
from manyheads.web.writing import Writing, writing_of

DRAWS = 3  # texts that are drawn, to be seen side by side
TOP = 12
MOST_TOP = 50
COLDEST, HOTTEST = 0.01, 100.0
LEAST_P = 1e-6


async def decode(request: Request) -> Response:
    """POST {run, text, beam?, limit?, prefix?, temperature?, top_k?, top_p?, min_p?, seed?}.

    The tree of beam search, and what is written greedily, by the beam and by chance.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_decode, fields, state.library, state.limits)


def _decode(fields: Fields, library: Library, limits: Limits) -> Response:
    run, sample = fields.text("run"), sample_of(fields)
    with library.model(run) as opened, torch.inference_mode():
        writing = writing_of(opened, fields, limits.tokens)
        given = writing.given(fields)
        tree = watched(writing.search(given), writing.begin(), writing.start, writing.limits())
        greedy = writing.search(given, beam=1)
        [best] = greedy(writing.begin(), writing.start, writing.limits())
        drawn = writing.draw(sample, DRAWS, given)
        found = {
            "run": run,
            "continues": writing.continues,
            "root": writing.tokenizer.subwords([writing.start])[0],
            "limit": writing.limit,
            "prefix": given,
            **settings_of(writing),
            "nodes": nodes_of(tree, writing),
            "beam": [_hypothesis(one, writing) for one in tree.found],
            "greedy": [_hypothesis(one, writing) for one in best],
            "sampling": [_drawn(tokens, writing) for tokens in drawn],
        }
    return json_answer(found)


def settings_of(writing: Writing) -> dict[str, Any]:
    decode = writing.decode
    base = "(5 + |y|) ⁄ 6" if decode.penalty == "gnmt" else "|y|"
    return {
        "width": decode.beam,
        "penalty": f"({base})^{decode.length_penalty:g}",
        "stopping": decode.stopping,
    }


def nodes_of(tree: Watched, writing: Writing) -> list[dict[str, Any]]:
    """The tree as JSON; `place` counts the hypotheses that were found, the best is 1."""
    places = {node: place for place, node in enumerate(tree.ends, start=1)}
    pieces = writing.tokenizer.subwords([node.token for node in tree.nodes])
    return [
        {**vars(node), "piece": piece, "place": places.get(number)}
        for number, (node, piece) in enumerate(zip(tree.nodes, pieces, strict=True))
    ]


def _hypothesis(one: Hypothesis, writing: Writing) -> dict[str, Any]:
    return {
        "text": writing.text(one.tokens),
        "tokens": one.tokens,
        "pieces": writing.tokenizer.subwords(one.tokens),
        "log_probability": one.log_probability,
        "score": one.score,
    }


def _drawn(tokens: Sequence[int], writing: Writing) -> dict[str, Any]:
    """A text by chance: its log P is the model's, at temperature 1, the end included if it has one.

    Whoever is cut at the limit has none.
    """
    ended = [*tokens, writing.special_tokens.end] if len(tokens) < writing.limit else list(tokens)
    chances = writing.logits(ended[:-1]).log_softmax(-1)
    each = [float(row[token]) for row, token in zip(chances, ended, strict=True)]
    search = writing.search()
    one = Hypothesis(list(tokens), sum(each), sum(each) / float(search.lp(len(ended))))
    return _hypothesis(one, writing)


async def following(request: Request) -> Response:
    """POST {run, text, prefix?, count?, temperature?, top_k?, top_p?, min_p?}: the next token.

    The likeliest ones after the prefix, by the model and as they are drawn from.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_following, fields, state.library, state.limits)


def _following(fields: Fields, library: Library, limits: Limits) -> Response:
    sample, count = sample_of(fields), fields.number("count", MOST_TOP) or TOP
    with library.model(fields.text("run")) as opened, torch.inference_mode():
        writing = writing_of(opened, fields, limits.tokens)
        given = writing.given(fields)
        before, after = writing.after(given, sample)
        best, ids = before.topk(min(count, len(before)))
        left = after > 0
        top = [
            {"token": token, "piece": piece, "before": chance, "after": float(after[token])}
            for token, piece, chance in zip(
                ids.tolist(), writing.tokenizer.subwords(ids.tolist()), best.tolist(), strict=True
            )
        ]
        found = {
            "text": writing.text(given),
            "top": top,
            "tokens": len(before),
            "left": int(left.sum()),
            "mass": float(before[left].sum()),
            "bits": [float(torch.special.entr(p).sum()) / math.log(2) for p in (before, after)],
        }
    return json_answer(found)


def sample_of(fields: Fields) -> Sample:
    """How to draw, by the names and rules of `Sample`."""
    usual = Sample()
    sample = Sample(
        temperature=_decimal(fields, "temperature", usual.temperature),
        top_k=fields.number("top_k", 10**6) or 0,
        top_p=_decimal(fields, "top_p", usual.top_p),
        min_p=_decimal(fields, "min_p", usual.min_p),
        seed=fields.number("seed", 2**31) or 0,
    )
    return checked(sample)


def checked(sample: Sample) -> Sample:
    """Refuse what leaves nothing to draw from: logits by almost nothing are no numbers any more."""
    if sample.temperature and not COLDEST <= sample.temperature <= HOTTEST:
        raise Problem(400, f"'temperature' must be 0, or from {COLDEST} to {HOTTEST:g}")
    if sample.top_p < LEAST_P:
        raise Problem(400, f"'top_p' must be at least {LEAST_P:f}")
    return sample


def _decimal(fields: Fields, name: str, usual: float) -> float:
    value = fields.values.get(name)
    if value is None:
        return usual
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise Problem(400, f"'{name}' must be a number") from None


ROUTES = [
    Route("/api/decode", decode, methods=["POST"]),
    Route("/api/next", following, methods=["POST"]),
]
