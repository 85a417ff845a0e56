"""Static steps generate what growing ones generate: samples, streams and searches."""

import dataclasses
from typing import Any

import pytest
import torch
from test_beam import DEFINITIONS, LIMITS, batch
from test_generate import LIMIT, PROMPTS, schemes, toy_gpt
from torch import Tensor
from torch._dynamo.testing import CompileCounter
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
from manyheads.decode.sample import Sample, Sampler
from manyheads.decode.translate import Translator
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import AttentionFunctionConfig
from manyheads.nn.exact_attention import Dense
from manyheads.nn.experts import Experts
from manyheads.nn.local import Longformer
from manyheads.nn.packed import Packed
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Learned
from manyheads.nn.relative import Relative
from manyheads.nn.scores import Additive, Bilinear
from manyheads.tokenizer.tokenizer import SPECIALS

LONG = 128  # positions: as much as is read at once
LINES = ["a b c", "h", "c d e f g h a b"]
SOME = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]  # two of them in one batch
SAMPLES = [
    Sample(temperature=0.0),
    Sample(seed=3),
    Sample(seed=4, temperature=2.0, top_k=5),
    Sample(seed=5, top_p=0.8, min_p=0.05),
]


def generators(model: Any = None, **decode: Any) -> tuple[Generator, Generator]:
    """One with growing caches, and one with static steps."""
    plain = Generator(model or toy_gpt(layers=1), toy_tokenizer(), Decode(**decode))
    return plain, dataclasses.replace(plain, graphs=GraphCache(True))


@schemes
def test_a_language_model_writes_the_same(position: str, core: str) -> None:
    """Every position scheme, drawn and searched for, in batches of several sizes."""
    plain, fixed = generators(toy_gpt(position, core), beam=3)
    same(fixed.search(SOME, LIMIT), plain.search(SOME, LIMIT))
    assert fixed.sample(SOME, LIMIT, SAMPLES[1]) == plain.sample(SOME, LIMIT, SAMPLES[1])


@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_a_translator_writes_the_same(position: str, core: str) -> None:
    """Limits of each sentence's own, sources of several lengths, rows beyond the sentences."""
    (source, real), beam = batch(), 3
    model, graphs = toy_model(position, core), GraphCache(True)
    wanted = searched(model, source, real, LIMITS, beam=beam)
    fixed = Translator(model, toy_tokenizer(), Decode(beam=beam), graphs)
    same(fixed._search((source, real), START, torch.tensor(LIMITS), None), wanted)
    # Again with the same tensors, in another order and fewer of them.
    order = [4, 1, 3, 0, 2]
    limits, texts = torch.tensor([LIMITS[row] for row in order]), (source[order], real[order])
    same(fixed._search(texts, START, limits, None), [wanted[row] for row in order])
    assert len(graphs.entries) == 1


PARTS: dict[str, dict[str, Any]] = {
    "relative": {"position": Relative(period=2), "kv_heads": 1},
    "bilinear": {"score": Bilinear(key_size=4)},
    "additive": {"score": Additive(key_size=5), "attention": Dense()},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_other_parts_write_the_same(parts: dict[str, Any]) -> None:
    """Distances to slots that are to come, voices, shared heads, keys of another width."""
    torch.manual_seed(6)
    sizes: Any = {"vocab_size": len(SPECIALS) + 8, "dim": 16, "layers": 1, "heads": 2}
    config = GptConfig(**sizes, **parts, max_length=LONGEST)
    model = config.build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    plain, fixed = generators(model, beam=3)
    same(fixed.search(SOME, LIMIT), plain.search(SOME, LIMIT))


@pytest.mark.parametrize("chosen", DEFINITIONS, ids=str)
def test_every_definition_of_a_search_is_the_same(chosen: dict[str, Any]) -> None:
    """All stopping rules, penalties and limits; first tokens, shortest texts, n-best."""
    model, (source, real) = toy_model(layers=1), batch()
    limits = torch.tensor([11, 1, 9, 2, 6, 11])
    # A single hypothesis knows no rule of stopping.
    alone = chosen["stopping"] == "early"
    for beam, n_best in ((4, 2), (1, None))[: 1 + alone]:
        decode = Decode(beam=beam, suppress_tokens=(0, 1), **chosen)
        plain = Translator(model, toy_tokenizer(), decode)
        fixed = dataclasses.replace(plain, graphs=GraphCache(True))
        given = ((source, real), START, limits, n_best)
        same(fixed._search(*given), plain._search(*given))


@pytest.mark.parametrize("at_limit", ["force-eos", "force-eos-free", "truncate"])
@pytest.mark.parametrize(
    "more", [{}, {"min_length": 4}, {"forced_bos": 9}, {"forced_bos": END}], ids=str
)
def test_every_way_to_draw_is_the_same(at_limit: str, more: dict[str, Any]) -> None:
    """Bit by bit the same random numbers, for rows, for streams and for translations."""
    plain, fixed = generators(at_limit=at_limit, **more)
    lines = Translator(toy_model(layers=1), toy_tokenizer(), plain.decode)
    fixed_lines = dataclasses.replace(lines, graphs=GraphCache(True))
    for sample in SAMPLES[:: 1 if at_limit == "force-eos" and not more else 3]:
        wanted = plain.sample(SOME, LIMIT, sample, first=2)
        assert fixed.sample(SOME, LIMIT, sample, first=2) == wanted
        assert list(fixed.stream(SOME[0], LIMIT, sample, 2)) == wanted[0]
        assert fixed_lines.sample(LINES, sample) == lines.sample(LINES, sample)


def test_long_texts_are_written_to_their_end() -> None:
    """Far beyond the steps between two questions, and not beyond the limit."""
    plain, fixed = generators(toy_gpt("rotary"), min_length=70, at_limit="truncate", beam=2)
    assert fixed.sample(SOME[:1], 75, Sample()) == plain.sample(SOME[:1], 75, Sample())
    same(fixed.search(SOME[:1], 33), plain.search(SOME[:1], 33))


def test_random_numbers_ahead_are_those_of_the_steps() -> None:
    sample = Sample(seed=8)
    ahead = Sampler(sample, 3).uniforms(40)
    by_steps = Sampler(sample, 3)
    assert torch.equal(ahead, torch.cat([by_steps.uniforms(1) for _ in range(40)], dim=1))


def test_a_recording_serves_the_next_batch_of_its_shape() -> None:
    """One for each shape and way of writing, as many as are kept, and another seed is no other."""
    _, fixed = generators(beam=2)
    for seed in range(3):
        fixed.sample(PROMPTS[:1], LIMIT, Sample(seed=seed))
    assert len(fixed.graphs.entries) == 1
    fixed.search(PROMPTS[:1], LIMIT)
    assert len(fixed.graphs.entries) == 2
    for size in range(3, 3 + MAX_ENTRIES):
        changed = dataclasses.replace(
            fixed, decode=dataclasses.replace(fixed.decode, min_length=size)
        )
        changed.sample(PROMPTS[:1], 2, Sample(temperature=0.0))
    assert len(fixed.graphs.entries) == MAX_ENTRIES


def test_recordings_hold_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last one, which was needed."""
    _, fixed = generators(beam=2)
    fixed.search(PROMPTS[:1], LIMIT)
    one = fixed.graphs.bytes()
    room, wide = padded_size(LIMIT + 2), 2 * 16  # keys and values
    assert one == 8 * 2 * room * (1 + wide)  # of two beams in one layer, and ancestors
    for most, left in ((2 * one, 2), (one, 1), (0, 1)):
        monkeypatch.setattr(decoder, "MAX_BYTES", most)
        fixed.search(PROMPTS[:1], LIMIT, n_best=1)
        fixed.search(PROMPTS[:1], LIMIT)
        assert len(fixed.graphs.entries) == left


def test_weights_that_moved_are_recorded_anew() -> None:
    """And weights that changed at their place are those that write."""
    plain, fixed = generators(beam=2)
    fixed.search(PROMPTS, LIMIT)
    before = len(fixed.graphs.entries)
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.mul_(0.7)
    same(fixed.search(PROMPTS, LIMIT), plain.search(PROMPTS, LIMIT))
    assert len(fixed.graphs.entries) == before
    plain.model.float()
    fixed.search(PROMPTS[:1], LIMIT)
    assert len(fixed.graphs.entries) == before + 1


def test_two_streams_at_once_do_not_meet() -> None:
    """A recording is one stream's until it ends, or is left."""
    plain, fixed = generators(toy_gpt("none"), min_length=LIMIT)
    streams = [fixed.stream(prompt, LIMIT, Sample(seed=1)) for prompt in PROMPTS[:2]]
    both = [list(row) for row in zip(*zip(*streams, strict=True), strict=True)]
    assert both == [list(plain.stream(p, LIMIT, Sample(seed=1))) for p in PROMPTS[:2]]


class Watch(TorchDispatchMode):
    """Every operation with what it was given: of tensors the shapes, of numbers the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        flat, _ = tree_flatten((args, kwargs or {}))
        given = [f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in flat]
        self.done.append(f"{func}({', '.join(given)})")
        return func(*args, **(kwargs or {}))


# What waits for the device, or brings a number of the host's to it; neither can be recorded.
HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique", "is_nonzero")


@schemes
def test_every_step_is_the_same_operations_and_asks_nobody(position: str, core: str) -> None:
    """With the same numbers of the host's in them, so that replaying one step is the next one."""
    more: dict[str, Any] = {"at_limit": "force-eos-free", "forced_bos": 9, "min_length": 3}
    decode = more if position in ("learned", "t5") else {}
    plain, fixed = generators(toy_gpt(position, core, layers=1), beam=3, **decode)
    lines = Translator(toy_model(position, core, layers=1), toy_tokenizer(), plain.decode)
    lines = dataclasses.replace(lines, graphs=fixed.graphs)
    fixed.search(PROMPTS[:1], LIMIT)
    fixed.sample(PROMPTS[:1], LIMIT, SAMPLES[3])
    lines.search(["a b c"])
    lines.sample(["a b c"], SAMPLES[0])
    assert len(fixed.graphs.entries) == 4
    for recording in fixed.graphs.entries.values():
        recording.state.length.zero_()
        recording.session.cache.clear()
        steps = []
        for _ in range(5):
            with Watch() as watch, torch.no_grad():
                recording.graphed.function()
            steps.append(watch.done)
        assert all(step == steps[0] for step in steps)
        assert not [line for line in steps[0] for name in HOST if f".{name}." in line]
        by_truth = [line for line in steps[0] if ".index" in line and "torch.bool" in line]
        assert not by_truth


@schemes
def test_reading_is_the_same_operations_and_asks_nobody(position: str, core: str) -> None:
    """Whatever is read, and how much of the room it fills."""
    fixed = generators(toy_gpt(position, core, layers=1, max_length=LONG))[1]
    model = toy_model(position, core, layers=1, max_length=LONG)
    lines = Translator(model, toy_tokenizer(), fixed.decode, graphs=fixed.graphs)
    seen: list[list[str]] = []
    for prompt, line in ((PROMPTS[0], "a b c"), (PROMPTS[2], "h g")):
        fixed.sample([prompt], LIMIT, SAMPLES[0])
        lines.search([line])
        texts, sources = (one.session for one in fixed.graphs.entries.values())
        [reading] = texts.encoders.values()
        with Watch() as watch, torch.no_grad():
            reading.function()
            [own] = sources.encoders.values()
            own.function()
        seen.append(watch.done)
    assert seen[0] == seen[1]
    assert not [line for line in seen[0] for name in HOST if f".{name}." in line]
    assert not [line for line in seen[0] if ".index" in line and "torch.bool" in line]


@schemes
def test_whatever_room_is_read_the_text_is_the_same(
    position: str, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rooms of several sizes in one cache, filled to their end and not, shorter after longer."""
    monkeypatch.setattr(cuda_graphs, "ENCODE_MULTIPLE", 4)
    plain, fixed = generators(toy_gpt(position, core, layers=1, max_length=LONG), beam=2)
    long = [7 + number % 8 for number in range(20)]
    for length in (6, 5, 4, 20, 9, 3, 6):
        prompt = [long[-length:]]
        assert fixed.sample(prompt, LIMIT, SAMPLES[1]) == plain.sample(prompt, LIMIT, SAMPLES[1])
        same(fixed.search(prompt, LIMIT), plain.search(prompt, LIMIT))
    drawn, searched = (one.session for one in fixed.graphs.entries.values())
    assert sorted(drawn.encoders) == sorted(searched.encoders) == [4, 8, 20]


def test_a_model_in_training_drops_nothing_while_it_writes() -> None:
    plain, fixed = generators(toy_gpt(layers=1, dropout=0.5))
    wanted = plain.sample(SOME, LIMIT, SAMPLES[0])
    for _ in range(3):
        fixed.model.train()
        assert fixed.sample(SOME, LIMIT, SAMPLES[0]) == wanted


def test_what_is_read_filled_up() -> None:
    """Little, within the positions that there are, by parts that make nothing of empty places."""
    sizes: Any = {"vocab_size": 9, "dim": 8, "layers": 1, "max_length": 100}
    stack = GptConfig(**sizes).build().decoder
    assert can_pad(stack, 4, MAX_ENCODED // 4)
    assert not can_pad(stack, 4, MAX_ENCODED // 4 + 1)
    learned = GptConfig(**sizes, position=Learned()).build().decoder
    assert can_pad(learned, 1, 100)
    assert not can_pad(learned, 1, 101)
    for part in (
        {"attention": Longformer()},
        {"attention": Performer()},
        {"feedforward": Experts()},
    ):
        changes: Any = part
        assert not can_pad(GptConfig(**sizes, **changes).build().decoder, 1, 10)


@pytest.mark.parametrize("core", [Packed(), Longformer(), Performer(), CORES["tiled"]])
def test_what_has_no_steady_step_is_written_as_it_is(core: AttentionFunctionConfig) -> None:
    """Found out before anything is computed: nothing is recorded, and the text is the same."""
    sizes: Any = {"vocab_size": len(SPECIALS) + 8, "dim": 16, "layers": 1, "heads": 2}
    model = GptConfig(**sizes, attention=core, max_length=LONGEST).build().double().eval()
    plain, fixed = generators(model)
    assert not supports_cuda_graph(model)
    same(fixed.search(PROMPTS, LIMIT), plain.search(PROMPTS, LIMIT))
    assert not fixed.graphs.entries


@pytest.mark.compile
def test_a_compiled_step_is_one_graph_for_all_steps(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Nothing in it has to be left to Python, also in the choice of what is written, and no step
    asks for another graph.
    """
    if request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("torch.compile cannot trace the shape checks: run without the hook")
    counter = CompileCounter()
    compile_ = torch.compile

    def whole(step: Any, dynamic: bool, options: Any) -> Any:  # of which a counter knows nothing
        return compile_(step, dynamic=dynamic, backend=counter, fullgraph=True)

    monkeypatch.setattr(torch, "compile", whole)
    plain, _ = generators(toy_gpt("rotary", layers=1), beam=2)
    fast = dataclasses.replace(plain, graphs=GraphCache(True, compiled=True))
    for _ in range(2):
        same(fast.search(PROMPTS[:1], LIMIT), plain.search(PROMPTS[:1], LIMIT))
    assert counter.frame_count == 1
    for sample in (SAMPLES[0], SAMPLES[3]):
        for _ in range(2):
            wanted = plain.sample(PROMPTS[:1], LIMIT, sample)
            assert fast.sample(PROMPTS[:1], LIMIT, sample) == wanted
    assert counter.frame_count == 3
    before = counter.frame_count
    shapes = (2, 4, 8)
    with torch._dynamo.config.patch(recompile_limit=2):  # of one function
        for rows in shapes:
            fast.sample(PROMPTS[:1] * rows, 3, SAMPLES[0])
    assert counter.frame_count == before + len(shapes)
    before = counter.frame_count
    lines = Translator(toy_model(layers=1), toy_tokenizer(), Decode(beam=2))
    quick = dataclasses.replace(lines, graphs=GraphCache(True, compiled=True))
    for _ in range(2):
        same(quick.search(LINES[:1]), lines.search(LINES[:1]))
    assert counter.frame_count == before + 1


@pytest.mark.compile
def test_what_is_compiled_draws_the_same(request: pytest.FixtureRequest) -> None:
    """By the code that PyTorch makes of it."""
    if request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("torch.compile cannot trace the shape checks: run without the hook")
    plain, _ = generators(toy_gpt("rotary", layers=1), min_length=4)
    fast = dataclasses.replace(plain, graphs=GraphCache(True, compiled=True))
    wanted = plain.sample(PROMPTS[:3], LIMIT, SAMPLES[3])
    assert fast.sample(PROMPTS[:3], LIMIT, SAMPLES[3]) == wanted


def test_which_models_have_a_steady_step() -> None:
    sizes: Any = {"vocab_size": 9, "dim": 8, "layers": 1}
    assert supports_cuda_graph(GptConfig(**sizes).build())
    assert supports_cuda_graph(toy_model())
    assert not supports_cuda_graph(RnnConfig(**sizes).build())
    assert not supports_cuda_graph(DecoderOnlySeq2SeqConfig(**sizes).build())
    assert not supports_cuda_graph(GptConfig(**sizes, feedforward=Experts()).build())
    watched = toy_model()
    handle = watched.decoder.register_forward_hook(lambda *given: None)
    assert not supports_cuda_graph(watched)  # nobody would hear of a replayed step
    handle.remove()
    assert supports_cuda_graph(watched)


def test_nothing_is_recorded_unless_wanted() -> None:
    """On the CPU a step in fixed shapes gains nothing."""
    plain, fixed = generators()
    assert not plain.graphs.serves(plain.model)
    assert fixed.graphs.serves(plain.model)
    assert not GraphCache(False).serves(plain.model)


def test_sizes_are_few() -> None:
    """Each is room enough, and there are not many of them."""
    given = ((padded_size, 4096, 7), (padded_rows, 256, 13), (padded_source, 64, 8))
    for size_for, most, few in (*given, (padded_prompt, MAX_ENCODED, 32)):
        sizes = {size_for(size) for size in range(1, most + 1)}
        assert all(size <= size_for(size) < 2 * size + 64 for size in range(1, most + 1))
        assert len(sizes) <= few


def test_a_graphed_function_on_a_cpu_is_the_function() -> None:
    counter = torch.zeros(())
    add = GraphedFunction(lambda: counter.add_(1), counter.device)
    for _ in range(4):
        add()
    assert int(counter) == add.calls == 4
    assert add.graph is None
