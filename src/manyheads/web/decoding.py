"""Endpoints of the Decode page: the tree of beam search, and the next-token distribution."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manyheads.data.translation import PhrasebookData
from manyheads.decode.beam import Hypothesis
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.loading import LoadedRun
from manyheads.run import SETTINGS, read_run
from manyheads.web.beam_tree import TracedSearch, trace_search
from manyheads.web.generation import MOST_BEAM, Generation, generation_of
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.translating import HELD_OUT, LOADING, load_sentences

SAMPLES = 3  # sampled texts, shown side by side
TOP = 12
MOST_TOP = 50
SHORTEST, LEAST_CERTAIN = (
    800,
    48,
)  # sentences in which an example is searched: greedy, and with a beam
COLDEST, HOTTEST = 0.01, 100.0
LEAST_P = 1e-6


async def decode(request: Request) -> Response:
    """POST {run, text, beam?, limit?, prefix?, temperature?, top_k?, top_p?, min_p?, seed?}.

    The tree of beam search, and the texts of greedy search, beam search and sampling.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_decode, fields, state.library, state.limits)


def _decode(fields: Fields, library: Library, limits: Limits) -> Response:
    run, sample = fields.text("run"), sample_of(fields)
    with library.model(run) as opened, torch.inference_mode():
        generation = generation_of(opened, fields, limits.tokens)
        prefix = generation.prefix(fields)
        tree = trace_search(
            generation.search(prefix), generation.begin(), generation.start, generation.limits()
        )
        greedy = generation.search(prefix, beam=1)
        [best] = greedy(generation.begin(), generation.start, generation.limits())
        samples = generation.sample(sample, SAMPLES, prefix)
        answer = {
            "run": run,
            "continues": generation.continues,
            "root": generation.tokenizer.target.subwords([generation.start])[0],
            "limit": generation.limit,
            "vocabulary": generation.vocabulary,
            "prefix": prefix,
            **settings_of(generation),
            "nodes": nodes_of(tree, generation),
            "beam": [_hypothesis(hypothesis, generation) for hypothesis in tree.hypotheses],
            "greedy": [_hypothesis(hypothesis, generation) for hypothesis in best],
            "sampling": [_sample(tokens, generation) for tokens in samples],
        }
    return json_answer(answer)


def settings_of(generation: Generation) -> dict[str, Any]:
    decode = generation.decode
    base = "(5 + |y|) ⁄ 6" if decode.penalty == "gnmt" else "|y|"
    return {
        "width": decode.beam,
        "penalty": f"({base})^{decode.length_penalty:g}",
        "stopping": decode.stopping,
    }


def nodes_of(tree: TracedSearch, generation: Generation) -> list[dict[str, Any]]:
    """The tree as JSON; `place` is the rank of a finished hypothesis, 1 for the best."""
    ranks = {node: rank for rank, node in enumerate(tree.ends, start=1)}
    subwords = generation.tokenizer.target.subwords([node.token for node in tree.nodes])
    return [
        {**vars(node), "piece": subword, "place": ranks.get(number)}
        for number, (node, subword) in enumerate(zip(tree.nodes, subwords, strict=True))
    ]


def _hypothesis(hypothesis: Hypothesis, generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text(hypothesis.tokens),
        "tokens": hypothesis.tokens,
        "pieces": generation.tokenizer.target.subwords(hypothesis.tokens),
        "log_probability": hypothesis.log_probability,
        "score": hypothesis.score,
    }


def _sample(tokens: Sequence[int], generation: Generation) -> dict[str, Any]:
    """A sampled text with log P at temperature 1, including the end token.

    A text cut at the limit has no end token.
    """
    ended = (
        [*tokens, generation.special_tokens.end] if len(tokens) < generation.limit else list(tokens)
    )
    log_probs = generation.logits(ended[:-1]).log_softmax(-1)
    token_log_probs = [float(row[token]) for row, token in zip(log_probs, ended, strict=True)]
    search = generation.search()
    hypothesis = Hypothesis(
        list(tokens), sum(token_log_probs), sum(token_log_probs) / float(search.lp(len(ended)))
    )
    return _hypothesis(hypothesis, generation)


async def missed(request: Request) -> Response:
    """GET ?run: a sentence of its phrasebook in which greedy search misses the best translation.

    `text` is null for runs without a phrasebook.
    """
    name = Fields.of_query(request).text("run")
    library: Library = request.app.state.library
    return await run_in_threadpool(_missed, name, library)


def _missed(name: str, library: Library) -> Response:
    folder = library.find(name)
    data = read_run(folder).data if (folder / SETTINGS).is_file() else None
    if not isinstance(data, PhrasebookData):
        return json_answer({"text": None})
    return json_answer({"text": _example(library, name, library.version(name), data)})


@lru_cache(maxsize=8)
def _example(library: Library, name: str, version: str, data: PhrasebookData) -> str | None:
    """The example of a run, cached until its weights change."""
    with LOADING:
        pairs = load_sentences(data, HELD_OUT)
    short = sorted(pairs, key=len)[:SHORTEST]
    with library.model(name) as opened, torch.inference_mode():
        return missed_text(opened, {source: pairs[source].target for source in short})


def missed_text(opened: LoadedRun, references: dict[str, str]) -> str | None:
    """The first text that only beam search translates as its reference.

    If there is none: the first in which beam search finds a better score, or the one of which
    greedy search is least certain. Before all, a text in which the beam also finds the higher
    log P, so that the length penalty does not decide, and greedy search not the reference. A beam
    is worth its time only on texts of low greedy score.
    """

    model: Any = opened.model

    def best(texts: Sequence[str], beam: int) -> dict[str, Hypothesis]:
        decode = replace(opened.run.decode, beam=beam)
        results = Translator(model, opened.tokenizer, decode).search(texts, n_best=1)
        return {text: nbest[0] for text, nbest in zip(texts, results, strict=True) if nbest}

    greedy = best(list(references), 1)
    uncertain = sorted(greedy, key=lambda text: greedy[text].score)[:LEAST_CERTAIN]
    beam = best(uncertain, min(opened.run.decode.beam, MOST_BEAM))
    other = [text for text in greedy if text in beam and beam[text].tokens != greedy[text].tokens]
    better = [text for text in other if beam[text].score > greedy[text].score]

    def is_right(text: str, found: dict[str, Hypothesis]) -> bool:
        return opened.tokenizer.decode(found[text].tokens) == references[text]

    right = [text for text in better if is_right(text, beam)]
    likelier = [
        text
        for text in (*right, *better)
        if beam[text].log_probability > greedy[text].log_probability and not is_right(text, greedy)
    ]
    return next(iter([*likelier, *right, *better, *uncertain]), None)


async def next_token(request: Request) -> Response:
    """POST {run, text, prefix?, count?, temperature?, top_k?, top_p?, min_p?}: the next token.

    The most probable tokens after the prefix, before and after temperature, top-k and top-p.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_next_token, fields, state.library, state.limits)


def _next_token(fields: Fields, library: Library, limits: Limits) -> Response:
    sample, count = sample_of(fields), fields.number("count", MOST_TOP) or TOP
    with library.model(fields.text("run")) as opened, torch.inference_mode():
        generation = generation_of(opened, fields, limits.tokens)
        prefix = generation.prefix(fields)
        before, after = generation.after(prefix, sample)
        best, ids = before.topk(min(count, len(before)))
        left = after > 0
        top = [
            {"token": token, "piece": piece, "before": probability, "after": float(after[token])}
            for token, piece, probability in zip(
                ids.tolist(),
                generation.tokenizer.target.subwords(ids.tolist()),
                best.tolist(),
                strict=True,
            )
        ]
        answer = {
            "text": generation.text(prefix),
            "top": top,
            "tokens": len(before),
            "left": int(left.sum()),
            "mass": float(before[left].sum()),
            "bits": [float(torch.special.entr(p).sum()) / math.log(2) for p in (before, after)],
        }
    return json_answer(answer)


def sample_of(fields: Fields) -> Sample:
    """The sampling settings of a request, named as in `Sample`."""
    default = Sample()
    sample = Sample(
        temperature=_decimal(fields, "temperature", default.temperature),
        top_k=fields.number("top_k", 10**6) or 0,
        top_p=_decimal(fields, "top_p", default.top_p),
        min_p=_decimal(fields, "min_p", default.min_p),
        seed=fields.number("seed", 2**31) or 0,
    )
    return checked(sample)


def checked(sample: Sample) -> Sample:
    """Reject settings that overflow the logits or leave no token to sample."""
    if sample.temperature and not COLDEST <= sample.temperature <= HOTTEST:
        raise Problem(400, f"'temperature' must be 0, or from {COLDEST} to {HOTTEST:g}")
    if sample.top_p < LEAST_P:
        raise Problem(400, f"'top_p' must be at least {LEAST_P:f}")
    return sample


def _decimal(fields: Fields, name: str, default: float) -> float:
    value = fields.values.get(name)
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise Problem(400, f"'{name}' must be a number") from None


ROUTES = [
    Route("/api/decode", decode, methods=["POST"]),
    Route("/api/missed", missed),
    Route("/api/next", next_token, methods=["POST"]),
]
