"""The Translate page's questions: hypotheses with their alignment, and the phrasebook's own."""

import hashlib
import json
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from einops import reduce
from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from manyheads.data.translation import PhrasebookData
from manyheads.decode.beam import Hypothesis
from manyheads.evaluate.alignment import word_maps
from manyheads.loading import TorchRun
from manyheads.models.capture import has_cross_attention
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq
from manyheads.phrasebook import Pair, sentences
from manyheads.run import SETTINGS, read_run
from manyheads.web.forward import ForwardPass, SizeLimit
from manyheads.web.generation import MOST_BEAM, Generation, generation_of
from manyheads.web.guard import Limits
from manyheads.web.heads import record_attention
from manyheads.web.library import Library
from manyheads.web.responses import Fields, json_answer
from manyheads.web.traces import Trace, Traces

MOST_DRAWN = 20_000  # sentences of a split of the phrasebook that a text is looked for in
EXAMPLES = 12
EXAMPLE_LETTERS = 60
DRAWING = Lock()  # it takes seconds: whoever comes meanwhile waits for it
# A word attends to the source words, in every layer and head.
LayerMaps = Float[Tensor, "layers h t s"]
Links = Float[Tensor, "w v"]


async def translate(request: Request) -> Response:
    """POST {run, text, beam?, prefix?, which?}: the hypotheses, and the alignment of one.

    `which` counts them from 0. With a prefix they all begin with its tokens.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_translate, fields, state.library, state.traces, state.limits)


def _translate(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run = fields.text("run")
    names = ("text", "beam", "prefix", "which")
    name = name_of("translate", run, library.version(run), *map(fields.values.get, names))
    kept = traces.find(name)
    if kept is None:
        limit = SizeLimit(limits.tokens, limits.trace_bytes)
        with library.model(run) as opened, torch.inference_mode():
            kept = _translated(opened, fields, limit, {"trace": name, "run": run})
        traces.keep(name, kept)
    return json_answer(kept.manifest)


def name_of(*asked: Any) -> str:
    """The same for the same question."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:20]


def _translated(opened: TorchRun, fields: Fields, limit: SizeLimit, about: dict[str, Any]) -> Trace:
    generation = generation_of(opened, fields, limit.tokens)
    if generation.continues:
        raise opened.unsupported("translates", "an encoder–decoder")
    given = generation.given(fields)
    [found] = generation.search(given)(generation.begin(), generation.start, generation.limits())
    which = min(fields.number("which", MOST_BEAM) or 0, len(found) - 1)
    tokenizer = generation.tokenizer
    weights, chances = aligned(generation, found[which].tokens, limit)
    expected = [*found[which].tokens, generation.special_tokens.end][: len(chances)]
    columns = tokenizer.subwords(generation.read)
    tensors, alignment = {}, None
    if weights is not None:
        layers, heads, _, keys = weights.shape
        tensors = with_means("alignment", weights)
        if keys != len(columns):  # a core that makes something else of the keys
            columns = [str(number) for number in range(1, keys + 1)]
        alignment = {"layers": layers, "heads": heads, "columns": columns}
        alignment["joined"] = isinstance(generation.model, DecoderOnlySeq2Seq)
    manifest = {
        **about,
        "prefix": given,
        "width": generation.decode.beam,
        "source": tokenizer.subwords(generation.read),
        "which": which,
        "hypotheses": [_hypothesis(one, generation) for one in found],
        "pieces": tokenizer.subwords(expected),
        "tokens": expected,
        "log_probabilities": chances,
        "alignment": alignment,
    }
    return Trace(manifest, tensors)


def _hypothesis(one: Hypothesis, generation: Generation) -> dict[str, Any]:
    text = generation.text(one.tokens)
    return {"text": text, "log_probability": one.log_probability, "score": one.score}


def aligned(
    generation: Generation, written: list[int], limit: SizeLimit
) -> tuple[LayerMaps | None, list[float]]:
    """Where each written token's place looks in the source, and log P of each, the end included.

    Row t is the place at which token t is written: it has read those before. Source and target
    that are one sequence have that part of their self-attention; its rows are shares of 1.
    """
    model, read = generation.model, generation.read
    joined = isinstance(model, DecoderOnlySeq2Seq)
    given = [generation.start, *written][: generation.limit]
    limit.check_maps(model, len(read) + len(given) if joined else max(len(read), len(given)))
    with record_attention(model) as record:
        logits = generation.logits(given[1:])
    expected = [*written, generation.special_tokens.end][: len(given)]
    each = logits.log_softmax(-1)[torch.arange(len(expected)), expected]
    tensors = ForwardPass(record, {}).tensors()
    if not joined:
        return tensors.get("decoder.cross.weights"), each.tolist()
    both = tensors.get("decoder.self.weights")
    if both is None or both.shape[-1] != len(read) + len(given):
        return None, each.tolist()
    return both[:, :, len(read) :, : len(read)], each.tolist()


def with_means(name: str, weights: LayerMaps) -> dict[str, Tensor]:
    """Maps of all heads, the mean of each layer's, and the mean of all."""
    return {
        f"{name}.weights": weights.contiguous(),
        f"{name}.mean": reduce(weights, "layers h t s -> layers t s", "mean"),
        f"{name}.all": reduce(weights, "layers h t s -> t s", "mean"),
    }


async def gold(request: Request) -> Response:
    """POST {run, text}: the phrasebook's translation of a sentence of its own, word by word."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_gold, fields, state.library, state.traces)


def _gold(fields: Fields, library: Library, traces: Traces) -> Response:
    run, text = fields.text("run"), fields.text("text", "")
    folder = library.find(run)
    data = read_run(folder).data if (folder / SETTINGS).is_file() else None
    if not isinstance(data, PhrasebookData):
        return json_answer({"phrasebook": False, "examples": [], "pair": None})
    with DRAWING:
        known = drawn(data)
    examples = [source for source in known if len(source) <= EXAMPLE_LETTERS][:EXAMPLES]
    found: dict[str, Any] = {"phrasebook": True, "looked": len(known), "examples": examples}
    pair = known.get(text.strip())
    if pair is None:
        return json_answer({**found, "pair": None})
    name = name_of("gold", run, library.version(run), text.strip())
    kept = traces.find(name)
    if kept is None:
        with library.model(run) as opened:
            kept = _word_by_word(opened, pair, name)
        traces.keep(name, kept)
    return json_answer({**found, "pair": kept.manifest})


@lru_cache(maxsize=2)
def drawn(data: PhrasebookData) -> dict[str, Pair]:
    """The sentences that a run has, by their text; of a long split the first ones."""
    counts = {"test": data.test_pairs, "valid": data.valid_pairs}
    counts |= {"compositional": data.test_pairs, "train": data.train_pairs}
    pairs = (sentences(data.pair, split, min(n, MOST_DRAWN)) for split, n in counts.items())
    return {pair.source: pair for some in pairs for pair in some}


def _word_by_word(opened: TorchRun, pair: Pair, name: str) -> Trace:
    """Gold links, and beside them what the model attends to while it is given that target."""
    manifest: dict[str, Any] = {
        "trace": name,
        "target": pair.target,
        "rows": [pair.target[a:b] for a, b in pair.target_words],
        "columns": [pair.source[a:b] for a, b in pair.source_words],
        "errors": None,
    }
    links = gold_links(pair)
    tensors: dict[str, Tensor] = {"gold": links}
    model: Any = opened.model
    # One sequence has no cross-attention, and a pair that is too long for the model no maps.
    found = list(word_maps(model, opened.tokenizer, [pair])) if has_cross_attention(model) else []
    for _, weights in found:
        tensors |= with_means("words", weights)
        manifest["errors"] = {
            kind: error_of(tensors[f"words.{kind}"], links).tolist()
            for kind in ("weights", "mean", "all")
        }
    return Trace(manifest, tensors)


def gold_links(pair: Pair) -> Links:
    """1 where a target word and a source word belong together."""
    links = torch.zeros(len(pair.target_words), len(pair.source_words))
    for source, target in pair.alignment:
        links[target, source] = 1.0
    return links


def error_of(maps: Float[Tensor, "*n w v"], links: Links) -> Float[Tensor, "*n"]:
    """1 − 2 |A ∩ G| / (|A| + |G|), where A links each target word to its greatest weight."""
    hits = links.expand_as(maps).gather(-1, maps.argmax(-1, keepdim=True)).sum((-1, -2))
    return 1 - 2 * hits / (len(links) + links.sum())


ROUTES = [
    Route("/api/translate", translate, methods=["POST"]),
    Route("/api/gold", gold, methods=["POST"]),
]
