"""CUDA graphs generate what eager steps generate; run by hand with `make test-gpu`."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from test_beam import DEFINITIONS
from test_cuda_graphs import LINES, SAMPLES
from test_generate import LIMIT, PROMPTS, schemes, toy_gpt
from toys import END, same, toy_model, toy_tokenizer

from manyheads.decode.beam import Decode, SpecialTokens
from manyheads.decode.decoder import GraphCache
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.models.gpt import GptConfig
from manyheads.nn.residual import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KINDS = [torch.float32, torch.float64]


def generators(model: Any = None, **decode: Any) -> tuple[Generator, Generator]:
    """One that writes as it is, and one by recorded steps, as on a GPU unless told."""
    fixed = Generator((model or toy_gpt()).cuda(), toy_tokenizer(), Decode(**decode))
    return dataclasses.replace(fixed, graphs=GraphCache(False)), fixed


def is_recorded(writer: Any) -> None:
    """Each shape that came to more than two steps has a graph."""
    kept = writer.graphs.entries.values()
    assert kept
    assert all(one.graphed.graph is not None for one in kept if one.graphed.calls > 2)
    assert any(one.graphed.graph is not None for one in kept)
    readings = [
        reading
        for one in kept
        for reading in (
            *getattr(one.session, "readers", {}).values(),
            getattr(one.session, "reader", None),
        )
        if reading is not None
    ]
    assert all(reading.graph is not None for reading in readings if reading.calls > 2)


@pytest.mark.parametrize("dtype", KINDS)
@schemes
def test_a_recorded_language_model_writes_the_same(
    position: str, core: str, dtype: torch.dtype
) -> None:
    """Drawn, streamed and searched for, every position scheme, the same shape again and again."""
    plain, fixed = generators(toy_gpt(position, core).to(dtype), beam=3)
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1]):
        same(fixed.search(prompts, LIMIT), plain.search(prompts, LIMIT))
        for sample in SAMPLES:
            assert fixed.sample(prompts, LIMIT, sample) == plain.sample(prompts, LIMIT, sample)
    one = Sample(seed=6)
    assert list(fixed.stream(PROMPTS[2], LIMIT, one)) == list(plain.stream(PROMPTS[2], LIMIT, one))
    is_recorded(fixed)


@pytest.mark.parametrize("chosen", DEFINITIONS, ids=str)
def test_every_definition_of_a_search_is_recorded(chosen: dict[str, Any]) -> None:
    """And of drawing: what may come where hangs on a place that only the device knows."""
    decode = Decode(
        beam=4, suppress_tokens=(0, 1), max_length_ratio=1.5, max_length_extra=3, **chosen
    )
    fixed = Translator(toy_model().cuda(), toy_tokenizer(), decode)
    plain = dataclasses.replace(fixed, graphs=GraphCache(False))
    for lines in (LINES, ["b b b", "", "g h"], LINES):
        same(fixed.search(lines), plain.search(lines))
        assert fixed.sample(lines, SAMPLES[1]) == plain.sample(lines, SAMPLES[1])
    is_recorded(fixed)


def test_weights_that_change_at_their_place_are_those_that_write() -> None:
    """Also under autocast, where a weight that was cast must not be kept."""
    plain, fixed = generators(toy_gpt().float(), beam=2)
    for number in range(3):
        with torch.no_grad():
            for parameter in plain.model.parameters():
                parameter.mul_(1 - 0.2 * number)
        same(fixed.search(PROMPTS, LIMIT), plain.search(PROMPTS, LIMIT))
        with torch.autocast("cuda", torch.bfloat16):
            found = fixed.sample(PROMPTS, LIMIT, SAMPLES[0])
            wanted = plain.sample(PROMPTS, LIMIT, SAMPLES[0])
        # In half precision a near tie may fall the other way.
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= len(PROMPTS) - 1
    is_recorded(fixed)


def test_long_texts_and_two_streams_at_once() -> None:
    """Past the steps between two questions; recordings that are lent to two at a time."""
    plain, fixed = generators(toy_gpt("rotary"), min_length=70, at_limit="truncate")
    assert fixed.sample(PROMPTS, 75, SAMPLES[1]) == plain.sample(PROMPTS, 75, SAMPLES[1])
    pair = (PROMPTS[0], PROMPTS[3])
    streams = [fixed.stream(prompt, 30, SAMPLES[1]) for prompt in pair]
    both = [list(row) for row in zip(*zip(*streams, strict=True), strict=True)]
    assert both == [list(plain.stream(prompt, 30, SAMPLES[1])) for prompt in pair]


def test_a_compiled_step_is_recorded_too() -> None:
    plain, fixed = generators(toy_gpt("rotary").float(), beam=2)
    fast = dataclasses.replace(fixed, graphs=GraphCache(compiled=True))
    for _ in range(2):
        same(fast.search(PROMPTS[:2], LIMIT), plain.search(PROMPTS[:2], LIMIT))
    is_recorded(fast)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("norm", [Norm(), Norm(form="rms"), Norm(placement="post")], ids=str)
def test_in_half_precision_every_token_is_nearly_the_best(norm: Norm, compiled: bool) -> None:
    """By all kernels for writing: what one text is given, and what a search finds for several."""
    exact = toy_gpt("sinusoidal", dim=64, heads=2, ffn_dim=96, norm=norm)  # heads that they take
    half = copy.deepcopy(exact).bfloat16().cuda()
    decode = Decode(beam=3, at_limit="truncate", min_length=20)
    fixed = Generator(half, toy_tokenizer(), decode, graphs=GraphCache(compiled=compiled))
    texts = fixed.sample(PROMPTS[:1], 16, SAMPLES[0])
    is_recorded(fixed)
    [prompt], [text] = PROMPTS[:1], texts
    read = torch.tensor([[*prompt, *text[:-1]]])
    with torch.no_grad():
        logits, others = exact(read)[0], half(read.cuda())[0].cpu()
    wrong = float((logits - others).abs().max())  # what half precision costs by itself
    logits[:, [*SpecialTokens(toy_tokenizer(), decode).suppressed, END]] = -torch.inf
    written = logits[len(prompt) - 1 :].gather(-1, torch.tensor(text)[:, None])[:, 0]
    assert len(text) == 16
    assert float((logits[len(prompt) - 1 :].amax(-1) - written).max()) < 3 * wrong
    assert wrong < 0.5 * float(logits[logits > -torch.inf].std())
    plain = dataclasses.replace(fixed, model=exact, graphs=GraphCache(False))
    for ours, theirs in zip(fixed.search(PROMPTS, 12), plain.search(PROMPTS, 12), strict=True):
        assert ours[0].score == pytest.approx(theirs[0].score, abs=12 * wrong)


def test_a_recording_keeps_no_memory_that_others_may_free() -> None:
    """Scratch memory of matrix products is freed by whoever records by `torch.compile`."""
    sizes: Any = {"vocab_size": 9000, "dim": 512, "layers": 2, "heads": 8, "max_length": 64}
    for _ in range(2):  # what the first has recorded is gone when the second is recorded
        model = GptConfig(**sizes).build().cuda().eval()
        plain, fixed = generators(model, at_limit="truncate")
        wanted = plain.sample(PROMPTS[:1], 20, SAMPLES[0])
        assert fixed.sample(PROMPTS[:1], 20, SAMPLES[0]) == wanted
        is_recorded(fixed)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(64)]
        assert fixed.sample(PROMPTS[:1], 20, SAMPLES[0]) == wanted
        assert all(bool(x.isnan().all()) for x in others)  # nor writes to what is another's now
        del fixed, others
