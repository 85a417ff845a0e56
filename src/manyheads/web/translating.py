"""Endpoints of the Translate page: hypotheses with alignment, and gold alignments."""

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
from manyheads.errors import UserError
from manyheads.evaluate.alignment import word_maps
from manyheads.loading import LoadedRun
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

MOST_SENTENCES = 20_000  # sentences per phrasebook split that are searched
HELD_OUT = ("test", "valid", "compositional")
EXAMPLES = 12
EXAMPLE_LETTERS = 60
LOADING = Lock()  # loading takes seconds; concurrent requests wait
LayerMaps = Float[Tensor, "layers h t s"]
Links = Float[Tensor, "w v"]


async def translate(request: Request) -> Response:
    """POST {run, text, beam?, prefix?, which?}: the hypotheses, and the alignment of one.

    `which` is the index of that hypothesis. All hypotheses start with the tokens of `prefix`.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_translate, fields, state.library, state.traces, state.limits)


def _translate(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run = fields.text("run")
    field_names = ("text", "beam", "prefix", "which")
    name = name_of("translate", run, library.version(run), *map(fields.values.get, field_names))
    trace = traces.find(name)
    if trace is None:
        limit = SizeLimit(limits.tokens, limits.trace_bytes)
        with library.model(run) as opened, torch.inference_mode():
            trace = _translated(opened, fields, limit, {"trace": name, "run": run})
        traces.keep(name, trace)
    return json_answer(trace.manifest)


def name_of(*key: Any) -> str:
    """The name of a trace: a hash of the request."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]


def _translated(
    opened: LoadedRun, fields: Fields, limit: SizeLimit, about: dict[str, Any]
) -> Trace:
    generation = generation_of(opened, fields, limit.tokens)
    if generation.continues:
        raise opened.unsupported("translates", "an encoder–decoder")
    prefix = generation.prefix(fields)
    [hypotheses] = generation.search(prefix)(
        generation.begin(), generation.start, generation.limits()
    )
    which = min(fields.number("which", MOST_BEAM) or 0, len(hypotheses) - 1)
    tokenizer = generation.tokenizer
    weights, log_probs = aligned(generation, hypotheses[which].tokens, limit)
    expected = [*hypotheses[which].tokens, generation.special_tokens.end][: len(log_probs)]
    columns = tokenizer.subwords(generation.read)
    tensors, alignment = {}, None
    if weights is not None:
        layers, heads, _, keys = weights.shape
        tensors = with_means("alignment", weights)
        if keys != len(columns):  # this attention changes the number of keys
            columns = [str(number) for number in range(1, keys + 1)]
        alignment = {"layers": layers, "heads": heads, "columns": columns}
        alignment["joined"] = isinstance(generation.model, DecoderOnlySeq2Seq)
    manifest = {
        **about,
        "prefix": prefix,
        "width": generation.decode.beam,
        "source": tokenizer.subwords(generation.read),
        "which": which,
        "hypotheses": [_hypothesis(hypothesis, generation) for hypothesis in hypotheses],
        "pieces": tokenizer.target.subwords(expected),
        "tokens": expected,
        "log_probabilities": log_probs,
        "alignment": alignment,
    }
    return Trace(manifest, tensors)


def _hypothesis(hypothesis: Hypothesis, generation: Generation) -> dict[str, Any]:
    text = generation.text(hypothesis.tokens)
    return {"text": text, "log_probability": hypothesis.log_probability, "score": hypothesis.score}


def aligned(
    generation: Generation, target_ids: list[int], limit: SizeLimit
) -> tuple[LayerMaps | None, list[float]]:
    """Attention to the source at each target position, and log P of each token with the end.

    Row t is the position that predicts token t. A decoder-only translator returns the source
    columns of its self-attention, whose rows sum to less than 1.
    """
    model, source = generation.model, generation.read
    joined = isinstance(model, DecoderOnlySeq2Seq)
    decoder_input = [generation.start, *target_ids][: generation.limit]
    limit.check_maps(
        model, len(source) + len(decoder_input) if joined else max(len(source), len(decoder_input))
    )
    with record_attention(model) as record:
        logits = generation.logits(decoder_input[1:])
    expected = [*target_ids, generation.special_tokens.end][: len(decoder_input)]
    token_log_probs = logits.log_softmax(-1)[torch.arange(len(expected)), expected]
    tensors = ForwardPass(record, {}).tensors()
    if not joined:
        return tensors.get("decoder.cross.weights"), token_log_probs.tolist()
    joint_maps = tensors.get("decoder.self.weights")
    if joint_maps is None or joint_maps.shape[-1] != len(source) + len(decoder_input):
        return None, token_log_probs.tolist()
    return joint_maps[:, :, len(source) :, : len(source)], token_log_probs.tolist()


def with_means(name: str, weights: LayerMaps) -> dict[str, Tensor]:
    """The maps of all heads, their mean per layer, and their mean over all layers."""
    return {
        f"{name}.weights": weights.contiguous(),
        f"{name}.mean": reduce(weights, "layers h t s -> layers t s", "mean"),
        f"{name}.all": reduce(weights, "layers h t s -> t s", "mean"),
    }


async def gold(request: Request) -> Response:
    """POST {run, text}: translation and word alignment of a phrasebook sentence."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_gold, fields, state.library, state.traces)


def _gold(fields: Fields, library: Library, traces: Traces) -> Response:
    run, text = fields.text("run"), fields.text("text", "")
    folder = library.find(run)
    data = read_run(folder).data if (folder / SETTINGS).is_file() else None
    if not isinstance(data, PhrasebookData):
        return json_answer({"phrasebook": False, "examples": [], "pair": None})
    with LOADING:
        pairs = load_sentences(data, HELD_OUT)
        looked, pair = len(pairs), pairs.get(text.strip())
        if pair is None:  # last, because the training split takes seconds
            trained = load_sentences(data, ("train",))
            looked, pair = looked + len(trained), trained.get(text.strip())
    examples = [source for source in pairs if len(source) <= EXAMPLE_LETTERS][:EXAMPLES]
    answer: dict[str, Any] = {"phrasebook": True, "looked": looked, "examples": examples}
    if pair is None:
        return json_answer({**answer, "pair": None})
    name = name_of("gold", run, library.version(run), text.strip())
    trace = traces.find(name)
    if trace is None:
        with library.model(run) as opened:
            trace = _word_by_word(opened, pair, name)
        traces.keep(name, trace)
    return json_answer({**answer, "pair": trace.manifest})


@lru_cache(maxsize=4)
def load_sentences(data: PhrasebookData, splits: tuple[str, ...]) -> dict[str, Pair]:
    """The sentences of some splits by source text, at most `MOST_SENTENCES` per split."""
    counts = {"test": data.test_pairs, "valid": data.valid_pairs}
    counts |= {"compositional": data.test_pairs, "train": data.train_pairs}
    pairs = (sentences(data.pair, split, min(counts[split], MOST_SENTENCES)) for split in splits)
    return {pair.source: pair for split_pairs in pairs for pair in split_pairs}


def load_phrasebooks(library: Library) -> None:
    """Load the sentences of the first phrasebook run, before a page requests them."""
    for folder in library.folders().values():
        try:
            data = read_run(folder).data if (folder / SETTINGS).is_file() else None
        except (UserError, OSError, RecursionError):  # the page reports broken runs
            continue
        if isinstance(data, PhrasebookData):
            for splits in (HELD_OUT, ("train",)):
                with LOADING:
                    load_sentences(data, splits)
            return


def _word_by_word(opened: LoadedRun, pair: Pair, name: str) -> Trace:
    """Gold links, and the attention maps of the model on the same pair."""
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
    # Decoder-only models have no cross-attention; pairs that are too long have no maps.
    maps = list(word_maps(model, opened.tokenizer, [pair])) if has_cross_attention(model) else []
    for _, weights in maps:
        tensors |= with_means("words", weights)
        manifest["errors"] = {
            kind: error_of(tensors[f"words.{kind}"], links).tolist()
            for kind in ("weights", "mean", "all")
        }
    return Trace(manifest, tensors)


def gold_links(pair: Pair) -> Links:
    """1 where a target word is aligned with a source word."""
    links = torch.zeros(len(pair.target_words), len(pair.source_words))
    for source, target in pair.alignment:
        links[target, source] = 1.0
    return links


def error_of(maps: Float[Tensor, "*n w v"], links: Links) -> Float[Tensor, "*n"]:
    """1 − 2 |A ∩ G| / (|A| + |G|), A = argmax of each target word."""
    hits = links.expand_as(maps).gather(-1, maps.argmax(-1, keepdim=True)).sum((-1, -2))
    return 1 - 2 * hits / (len(links) + links.sum())


ROUTES = [
    Route("/api/translate", translate, methods=["POST"]),
    Route("/api/gold", gold, methods=["POST"]),
]
