"""Static steps generate what growing ones generate: samples, streams and searches."""

import dataclasses
from typing import Any

import pytest
import torch
from test_beam import DEFINITIONS, LIMITS, batch
from test_generate import LIMIT, PROMPTS, schemes, toy_gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from toys import CORES, END, LONGEST, SCHEMES, START, same, searched, toy_model, toy_tokenizer

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode import cuda_graphs, decoder
from manyheads.decode.beam import Decode
from manyheads.decode.cuda_graphs import (
    MAX_ENCODED,
    GraphedFunction,
    can_pad,
    padded_prompt,
    padded_rows,
    padded_size,
    padded_source,
)
from manyheads.decode.decoder import MAX_ENTRIES, GraphCache, supports_cuda_graph
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense
from manyheads.nn.experts import Experts
from manyheads.nn.local import Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Learned, Relative
from manyheads.nn.scores import Additive, Bilinear
from manyheads.tokenizer.tokenizer import SPECIALS

LINES = ["a b c", "h", "c d e f g h a b"]
SOME = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]  # two of them in one batch
SAMPLES = [
    Sample(temperature=0.0),
    Sample(seed=3),
    Sample(seed=4, temperature=2.0, top_k=5),
    Sample(seed=5, top_p=0.8, min_p=0.05),
]
GPT: dict[str, Any] = {"vocab_size": len(SPECIALS) + 8, "dim": 16, "layers": 1, "heads": 2}


def generators(model: Any = None, **decode: Any) -> tuple[Generator, Generator]:
    """One with growing caches, and one with static steps."""
    eager = Generator(model or toy_gpt(layers=1), toy_tokenizer(), Decode(**decode))
    return eager, dataclasses.replace(eager, graphs=GraphCache(True))


def translators(model: Any = None, **decode: Any) -> tuple[Translator, Translator]:
    eager = Translator(model or toy_model(layers=1), toy_tokenizer(), Decode(**decode))
    return eager, dataclasses.replace(eager, graphs=GraphCache(True))


@schemes
def test_a_language_model_generates_the_same(
    position: str, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled and searched; prompts padded to several sizes in one cache, shorter after longer."""
    monkeypatch.setattr(cuda_graphs, "ENCODE_MULTIPLE", 4)
    eager, static = generators(toy_gpt(position, core, max_length=128), beam=3)
    long = [7 + number % 8 for number in range(20)]
    for prompts in (SOME, *([long[-length:]] for length in (6, 4, 20, 9, 3))):
        same(static.search(prompts, LIMIT), eager.search(prompts, LIMIT))
        samples = eager.sample(prompts, LIMIT, SAMPLES[1])
        assert static.sample(prompts, LIMIT, SAMPLES[1]) == samples
    sizes = {size for entry in static.graphs.entries.values() for size in entry.session.encoders}
    assert sizes == {4, 8, 20}


@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_a_translator_generates_the_same(position: str, core: str) -> None:
    """A limit for each sentence, sources of several lengths, more rows than sentences."""
    (source, padding), model = batch(), toy_model(position, core)
    expected = searched(model, source, padding, LIMITS, beam=3)
    _, static = translators(model, beam=3)
    for order in ([0, 1, 2, 3, 4, 5], [4, 1, 3, 0, 2]):  # the second time in the same tensors
        limits, texts = (
            torch.tensor([LIMITS[row] for row in order]),
            (source[order], padding[order]),
        )
        same(static._search(texts, START, limits, None), [expected[row] for row in order])
    assert len(static.graphs.entries) == 1


@pytest.mark.parametrize(
    "parts",
    [
        {"position": Relative(), "kv_heads": 1},
        {"score": Bilinear(), "attention": Dense()},
        {"score": Additive(key_size=5), "attention": Dense()},
    ],
    ids=["relative", "bilinear", "additive"],
)
def test_other_scores_generate_the_same(parts: dict[str, Any]) -> None:
    torch.manual_seed(6)
    model = GptConfig(**GPT, **parts, max_length=LONGEST).build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    eager, static = generators(model, beam=3)
    same(static.search(SOME, LIMIT), eager.search(SOME, LIMIT))


@pytest.mark.parametrize("definition", DEFINITIONS[::4], ids=str)  # each value of each setting
def test_every_definition_of_a_search_is_the_same(definition: dict[str, Any]) -> None:
    model, texts = toy_model(layers=1), batch()
    limits = torch.tensor([11, 1, 9, 2, 6, 11])
    for beam, n_best in ((4, 2), (1, None)):
        eager, static = translators(model, beam=beam, suppress_tokens=(0, 1), **definition)
        same(*(x._search(texts, START, limits, n_best) for x in (static, eager)))


@pytest.mark.parametrize(
    ("at_limit", "more"),
    [
        ("force-eos", {}),
        ("force-eos-free", {"min_length": 4}),
        ("truncate", {"forced_bos": 9}),
        ("force-eos", {"forced_bos": END}),
    ],
    ids=str,
)
def test_samples_are_the_same(at_limit: str, more: dict[str, Any]) -> None:
    """The same random numbers, for batches, streams and translations."""
    eager, static = generators(at_limit=at_limit, **more)
    lines, static_lines = translators(at_limit=at_limit, **more)
    for sample in SAMPLES:
        samples = eager.sample(SOME, LIMIT, sample, first=2)
        assert static.sample(SOME, LIMIT, sample, first=2) == samples
        assert list(static.stream(SOME[0], LIMIT, sample, 2)) == samples[0]
        assert static_lines.sample(LINES, sample) == lines.sample(LINES, sample)


def test_long_texts_are_generated_to_their_end() -> None:
    """Far beyond the steps between two checks, and not beyond the limit."""
    eager, static = generators(toy_gpt("rotary"), min_length=70, at_limit="truncate", beam=2)
    assert static.sample(SOME[:1], 75, Sample()) == eager.sample(SOME[:1], 75, Sample())
    same(static.search(SOME[:1], 33), eager.search(SOME[:1], 33))


def test_graphs_are_cached_by_shape_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed needs no other graph; entries and their bytes are bounded."""
    _, static = generators(beam=2)
    for seed in range(3):
        static.sample(PROMPTS[:1], LIMIT, Sample(seed=seed))
    assert len(static.graphs.entries) == 1
    static.search(PROMPTS[:1], LIMIT)
    assert len(static.graphs.entries) == 2
    for size in range(3, 3 + MAX_ENTRIES):
        decode = dataclasses.replace(static.decode, min_length=size)
        dataclasses.replace(static, decode=decode).sample(PROMPTS[:1], 2, SAMPLES[0])
    assert len(static.graphs.entries) == MAX_ENTRIES
    static.graphs.entries.clear()
    static.search(PROMPTS[:1], LIMIT)
    size = static.graphs.bytes()
    # Keys, values and ancestors of two beams in one layer.
    assert size == 8 * 2 * padded_size(LIMIT + 2) * (1 + 2 * 16)
    for most, left in ((2 * size, 2), (size, 1), (0, 1)):
        monkeypatch.setattr(decoder, "MAX_BYTES", most)
        static.search(PROMPTS[:1], LIMIT, n_best=1)
        static.search(PROMPTS[:1], LIMIT)
        assert len(static.graphs.entries) == left


def test_moved_weights_need_new_graphs_and_changed_ones_do_not() -> None:
    eager, static = generators(beam=2)
    static.search(PROMPTS, LIMIT)
    before = len(static.graphs.entries)
    with torch.no_grad():
        for parameter in eager.model.parameters():
            parameter.mul_(0.7)
    same(static.search(PROMPTS, LIMIT), eager.search(PROMPTS, LIMIT))
    assert len(static.graphs.entries) == before
    eager.model.float()
    static.search(PROMPTS[:1], LIMIT)
    assert len(static.graphs.entries) == before + 1


def test_two_streams_at_once_use_two_entries() -> None:
    eager, static = generators(toy_gpt("none"), min_length=LIMIT)
    streams = [static.stream(prompt, LIMIT, Sample(seed=1)) for prompt in PROMPTS[:2]]
    both = [list(row) for row in zip(*zip(*streams, strict=True), strict=True)]
    assert both == [list(eager.stream(p, LIMIT, Sample(seed=1))) for p in PROMPTS[:2]]


class Operations(TorchDispatchMode):
    """Every operation with its arguments: shapes of tensors, values of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        flat, _ = tree_flatten((args, kwargs or {}))
        shown = [f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in flat]
        self.lines.append(f"{func}({', '.join(shown)})")
        return func(*args, **(kwargs or {}))


# Operations that wait for the device or copy a number of the host: no graph can capture them.
HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique", "is_nonzero")


def operations(function: Any) -> list[str]:
    with Operations() as record, torch.no_grad():
        function()
    assert not [line for line in record.lines for name in HOST if f".{name}." in line]
    assert not [line for line in record.lines if ".index" in line and "torch.bool" in line]
    return record.lines


@schemes
def test_every_step_is_the_same_operations_without_the_host(position: str, core: str) -> None:
    """So that replaying one step is the next one; encoding too, whatever the texts."""
    more: dict[str, Any] = {"at_limit": "force-eos-free", "forced_bos": 9, "min_length": 3}
    decode = more if position in ("learned", "t5") else {}
    sizes: dict[str, Any] = {"layers": 1, "max_length": 128}
    _, static = generators(toy_gpt(position, core, **sizes), beam=3, **decode)
    _, lines = translators(toy_model(position, core, **sizes), beam=3, **decode)
    encodings: list[list[str]] = []
    for prompt, line in ((PROMPTS[0], "a b c"), (PROMPTS[2], "h g")):
        static.search([prompt], LIMIT)
        static.sample([prompt], LIMIT, SAMPLES[3])
        lines.search([line])
        lines.sample([line], SAMPLES[0])
        entries = [*static.graphs.entries.values(), *lines.graphs.entries.values()]
        assert len(entries) == 4
        encoders = [graph for entry in entries for graph in entry.session.encoders.values()]
        assert len(encoders) == 4
        encodings.append([line for graph in encoders for line in operations(graph.function)])
    assert encodings[0] == encodings[1]
    for entry in entries:
        entry.state.length.zero_()
        entry.session.cache.clear()
        steps = [operations(entry.step.function) for _ in range(5)]
        assert all(step == steps[0] for step in steps)


def test_a_model_in_training_mode_drops_nothing() -> None:
    eager, static = generators(toy_gpt(layers=1, dropout=0.5))
    expected = eager.sample(SOME, LIMIT, SAMPLES[0])
    for _ in range(3):
        static.model.train()
        assert static.sample(SOME, LIMIT, SAMPLES[0]) == expected


def test_which_stacks_can_pad() -> None:
    """Few positions, within a learned table, with exact attention and no experts."""
    sizes: dict[str, Any] = {"vocab_size": 9, "dim": 8, "layers": 1, "max_length": 100}
    stack = GptConfig(**sizes).build().decoder
    assert can_pad(stack, 4, MAX_ENCODED // 4)
    assert not can_pad(stack, 4, MAX_ENCODED // 4 + 1)
    learned = GptConfig(**sizes, position=Learned()).build().decoder
    assert can_pad(learned, 1, 100)
    assert not can_pad(learned, 1, 101)
    parts: list[dict[str, Any]] = [{"attention": Longformer()}, {"feedforward": Experts()}]
    for part in parts:
        assert not can_pad(GptConfig(**sizes, **part).build().decoder, 1, 10)


@pytest.mark.parametrize("core", [Longformer(), Performer(), CORES["tiled"]])
def test_approximate_attention_decodes_eagerly(core: AttentionFunctionConfig) -> None:
    model = GptConfig(**GPT, attention=core, max_length=LONGEST).build().double().eval()
    eager, static = generators(model)
    same(static.search(PROMPTS, LIMIT), eager.search(PROMPTS, LIMIT))
    assert not static.graphs.entries


def test_which_models_support_cuda_graphs() -> None:
    sizes: dict[str, Any] = {"vocab_size": 9, "dim": 8, "layers": 1}
    assert supports_cuda_graph(GptConfig(**sizes).build())
    assert not supports_cuda_graph(RnnConfig(**sizes).build())
    assert not supports_cuda_graph(DecoderOnlySeq2SeqConfig(**sizes).build())
    assert not supports_cuda_graph(GptConfig(**sizes, feedforward=Experts()).build())
    hooked = toy_model()
    handle = hooked.decoder.register_forward_hook(lambda *args: None)
    assert not supports_cuda_graph(hooked)  # a replayed step would call no hook
    handle.remove()
    assert supports_cuda_graph(hooked)
    eager, static = generators()
    assert static.graphs.serves(static.model)
    assert not eager.graphs.serves(eager.model)  # the default on a CPU
    assert not GraphCache(False).serves(eager.model)


def test_padded_sizes_are_large_enough_and_few() -> None:
    for padded, most, count in (
        (padded_size, 4096, 7),
        (padded_rows, 256, 13),
        (padded_source, 64, 4),
        (padded_prompt, MAX_ENCODED, 32),
    ):
        sizes = range(1, most + 1)
        assert all(size <= padded(size) < 2 * size + 64 for size in sizes)
        assert len({padded(size) for size in sizes}) <= count


def test_a_graphed_function_on_a_cpu_is_the_function() -> None:
    counter = torch.zeros(())
    add = GraphedFunction(lambda: counter.add_(1), counter.device)
    for _ in range(4):
        add()
    assert int(counter) == add.calls == 4
    assert add.graph is None
