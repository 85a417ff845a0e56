"""CUDA graphs generate what eager steps generate; run with `make test-gpu`."""

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
from manyheads.nn.layers import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def generators(model: Any, **decode: Any) -> tuple[Generator, Generator]:
    """One with eager steps, and one with CUDA graphs, the default on a GPU."""
    graphed = Generator(model.cuda(), toy_tokenizer(), Decode(**decode))
    return dataclasses.replace(graphed, graphs=GraphCache(False)), graphed


def assert_captured(decoder: Any) -> None:
    """Each shape that had more than two steps has a graph, and so have its encoders."""
    entries = decoder.graphs.entries.values()
    functions = [
        function for entry in entries for function in (entry.step, *entry.session.encoders.values())
    ]
    assert any(entry.step.graph is not None for entry in entries)
    assert all(function.graph is not None for function in functions if function.calls > 2)


@schemes
def test_graphed_language_models_generate_the_same(position: str, core: str) -> None:
    """Sampled, streamed and searched, with every position scheme; shapes repeat.

    Float32 has kernels for logits; float64 has none.
    """
    dtype = torch.float64 if position == "sinusoidal" else torch.float32
    eager, graphed = generators(toy_gpt(position, core).to(dtype), beam=3)
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1]):
        same(graphed.search(prompts, LIMIT), eager.search(prompts, LIMIT))
        for sample in SAMPLES[::3]:
            assert graphed.sample(prompts, LIMIT, sample) == eager.sample(prompts, LIMIT, sample)
    streams = [list(x.stream(PROMPTS[2], LIMIT, Sample(seed=6))) for x in (graphed, eager)]
    assert streams[0] == streams[1]
    assert_captured(graphed)


@pytest.mark.parametrize("settings", DEFINITIONS[::4], ids=str)
def test_graphed_translators_search_and_sample_the_same(settings: dict[str, Any]) -> None:
    """Constraints depend on a position that only the device knows."""
    decode = Decode(
        beam=4, suppress_tokens=(0, 1), max_length_ratio=1.5, max_length_extra=3, **settings
    )
    graphed = Translator(toy_model().cuda(), toy_tokenizer(), decode)
    eager = dataclasses.replace(graphed, graphs=GraphCache(False))
    for lines in (LINES, ["b b b", "", "g h"], LINES):
        same(graphed.search(lines), eager.search(lines))
        assert graphed.sample(lines, SAMPLES[1]) == eager.sample(lines, SAMPLES[1])
    assert_captured(graphed)


def test_graphs_use_weights_that_changed_in_place() -> None:
    """Also under autocast, where a weight that was cast must not be kept."""
    eager, graphed = generators(toy_gpt().float(), beam=2)
    for number in range(3):
        with torch.no_grad():
            for parameter in eager.model.parameters():
                parameter.mul_(1 - 0.2 * number)
        same(graphed.search(PROMPTS, LIMIT), eager.search(PROMPTS, LIMIT))
        with torch.autocast("cuda", torch.bfloat16):
            ours = graphed.sample(PROMPTS, LIMIT, SAMPLES[0])
            theirs = eager.sample(PROMPTS, LIMIT, SAMPLES[0])
        # In half precision a near tie may fall the other way.
        assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= len(PROMPTS) - 1
    assert_captured(graphed)


def test_long_texts_and_two_streams_at_once() -> None:
    """More steps than between two checks for the end; two streams borrow a graph in turn."""
    eager, graphed = generators(toy_gpt("rotary"), min_length=70, at_limit="truncate")
    assert graphed.sample(PROMPTS, 75, SAMPLES[1]) == eager.sample(PROMPTS, 75, SAMPLES[1])
    pair = (PROMPTS[0], PROMPTS[3])
    streams = [graphed.stream(prompt, 30, SAMPLES[1]) for prompt in pair]
    both = [list(row) for row in zip(*zip(*streams, strict=True), strict=True)]
    assert both == [list(eager.stream(prompt, 30, SAMPLES[1])) for prompt in pair]


@pytest.mark.parametrize("norm", [Norm(), Norm(form="rms"), Norm(placement="post")], ids=str)
def test_in_half_precision_every_token_is_nearly_the_best(norm: Norm) -> None:
    """With all decoding kernels: a greedy text of one prompt, and a search for several."""
    exact = toy_gpt("sinusoidal", dim=64, heads=2, ffn_dim=96, norm=norm)  # sizes kernels support
    half = copy.deepcopy(exact).bfloat16().cuda()
    decode = Decode(beam=3, at_limit="truncate", min_length=20)
    graphed = Generator(half, toy_tokenizer(), decode)
    [prompt] = PROMPTS[:1]
    [text] = graphed.sample([prompt], 16, SAMPLES[0])
    assert_captured(graphed)
    tokens = torch.tensor([[*prompt, *text[:-1]]])
    with torch.no_grad():
        logits, half_logits = exact(tokens)[0], half(tokens.cuda())[0].cpu()
    rounding = float((logits - half_logits).abs().max())
    logits[:, [*SpecialTokens(toy_tokenizer(), decode).suppressed, END]] = -torch.inf
    chosen = logits[len(prompt) - 1 :].gather(-1, torch.tensor(text)[:, None])[:, 0]
    assert len(text) == 16
    assert float((logits[len(prompt) - 1 :].amax(-1) - chosen).max()) < 3 * rounding
    assert rounding < 0.5 * float(logits[logits > -torch.inf].std())
    eager = dataclasses.replace(graphed, model=exact, graphs=GraphCache(False))
    for ours, theirs in zip(graphed.search(PROMPTS, 12), eager.search(PROMPTS, 12), strict=True):
        assert ours[0].score == pytest.approx(theirs[0].score, abs=12 * rounding)


def test_graphs_own_the_memory_that_they_use() -> None:
    """`torch.compile` frees the scratch memory of matrix products when it captures graphs."""
    sizes: Any = {"vocab_size": 9000, "dim": 512, "layers": 2, "heads": 8, "max_length": 64}
    for _ in range(2):  # the graphs of the first are freed when the second are captured
        eager, graphed = generators(GptConfig(**sizes).build().eval(), at_limit="truncate")
        expected = eager.sample(PROMPTS[:1], 20, SAMPLES[0])
        assert graphed.sample(PROMPTS[:1], 20, SAMPLES[0]) == expected
        assert_captured(graphed)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(64)]
        assert graphed.sample(PROMPTS[:1], 20, SAMPLES[0]) == expected
        assert all(bool(x.isnan().all()) for x in others)  # no replay wrote into them
        del graphed, others
