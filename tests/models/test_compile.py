"""Whole models compile to one graph, and the compiled model is the same model.

The shape-checking import hook cannot be traced, so these run in a pass without it:
`pytest -m compile`.
"""

from typing import Any, Literal

import pytest
import torch
from tiny import Model, tiny, words
from torch import Tensor, nn

from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import Norm, Residual
from manyheads.nn.masks import causal, make_mask
from manyheads.optimize import compile_blocks

CELLS: list[Any] = [
    (GptConfig, "rotary"),
    pytest.param(GptConfig, "alibi", marks=pytest.mark.slow),
    pytest.param(BertConfig, "learned", marks=pytest.mark.slow),
    (BertConfig, "t5"),
    (Seq2SeqConfig, "sinusoidal"),
]


@pytest.fixture(autouse=True)
def _unhooked(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("torch.compile cannot trace the shape checks: run without the hook")
    torch.compiler.reset()


def inputs(kind: Model, rows: int, length: int) -> list[Tensor]:
    real = torch.ones(rows, length, dtype=torch.bool)
    real[-1, length - 2 :] = False
    if kind is Seq2SeqConfig:
        return [words(rows, length), words(rows, length + 1), real]
    return [words(rows, length), real]


@pytest.mark.compile
@pytest.mark.parametrize(("kind", "position"), CELLS)
def test_compiled_is_eager(kind: Model, position: str) -> None:
    """One graph, with the logits and the parameters' gradients of the eager model."""
    model: Any = tiny(kind, position, "fused", layers=1).build().double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (5, 7):  # the second length must not need another kind of graph
        arguments = inputs(kind, 3, length)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            logits = run(*arguments)
            logits.square().sum().backward()
            actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            gradients.append({"": logits.detach(), **actual})
        assert len(gradients[0]) > 10
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-10)


class Precise(nn.Module):
    """A norm as a GPU's autocast computes it: in float32, and that is what it gives."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = self.norm(x.float())
        return actual


@pytest.mark.compile
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_compiled_blocks_pass_on_what_products_are_computed_in(
    placement: Literal["pre", "post"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 they hand each other bfloat16, from the first on, so that one graph serves for
    all; the outputs equal the eager ones up to rounding.
    """
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_(self, backend="aot_eager"))
    torch.manual_seed(1)
    model: Any = tiny(GptConfig, "rotary", "fused", layers=3, norm=Norm(placement=placement))
    model, tokens = model.build(), inputs(GptConfig, 3, 7)[0]
    for part in [item for item in model.modules() if isinstance(item, Residual)]:
        part.norm = Precise(part.norm)
    types: list[torch.dtype] = []
    model.decoder.blocks[1].register_forward_pre_hook(
        lambda block, arguments: types.append(arguments[0].dtype)
    )

    def logits(precise: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            actual: Tensor = model(tokens)
        return actual.float()

    eager = logits(True)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    rounded = logits(False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert types[-1] == torch.bfloat16
    scale = eager.abs().max()
    assert (rounded - eager).abs().max() < 0.03 * scale
    torch.testing.assert_close(logits(True), eager, rtol=0, atol=1e-5)
    assert types[-1] == torch.float32


@pytest.mark.slow
@pytest.mark.compile
def test_what_was_dropped_forward_is_dropped_backward() -> None:
    """The gradient of a compiled block is that of its loss: along it the loss grows as it says.

    With less kept, PyTorch's partitioner draws other dropout in the backward pass.
    """
    torch.manual_seed(1)
    model: Any = tiny(
        GptConfig, "none", "fused", dim=64, ffn_dim=256, layers=1, dropout=0.3
    ).build()
    compile_blocks(model)
    x, direction = torch.randn(2, 4, 16, 64)
    weight = model.decoder.blocks[0].feedforward.inner.weight

    def loss() -> Tensor:
        torch.manual_seed(2)
        actual: Tensor = model.decoder(x, make_mask(causal, 16))
        return (actual.float() * direction).sum()

    for precise in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            (slope,) = torch.autograd.grad(loss(), weight)
            step = (0.01 if precise else 0.3) * slope / slope.norm()
            ends = []
            for change in (step, -2 * step):  # with gradients on: the same graph, the same draws
                weight.data += change
                ends.append(loss().detach())
            weight.data += step
        grown = (ends[0] - ends[1]) / 2 / step.norm()
        assert abs(float(grown / slope.norm()) - 1) < (0.01 if precise else 0.1)
