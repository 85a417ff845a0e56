"""Tiled attention: its blocks, dropout, precision and memory. (test_attention.py: it is exact.)"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from textbook import POSITIONS, SCORES, refused
from torch import Tensor
from torch.autograd import gradcheck

from manyheads.models.gpt import GptConfig
from manyheads.nn.attend import attend
from manyheads.nn.attention import AttentionInputs, Dense
from manyheads.nn.layers import Plain
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import Position, PositionSizes, Shaw, ShawPosition
from manyheads.nn.scores import Additive, Bilinear, InnerScore, ReducedRank, ScoreConfig
from manyheads.nn.tiled import Tiled

CELLS = [
    (score, position)
    for score in SCORES
    for position in POSITIONS
    if score == "scaled-dot" or position in ("none", "shaw")
    if not refused(score, position, "tiled")
]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gradients(function: Any, inputs: AttentionInputs) -> list[Tensor]:
    """The output, then the gradients of q, k, v and all parameters."""
    tensors = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = function(AttentionInputs(*tensors, inputs.mask, inputs.score, inputs.position))
    # Sixteenths are exact in every precision.
    cotangent = (torch.arange(out.numel()) % 33 - 16).to(out).view_as(out) / 16
    weights = [*tensors, *inputs.score.parameters(), *inputs.position.parameters()]
    grads = torch.autograd.grad(out, weights, cotangent, allow_unused=True)
    pairs = zip(grads, weights, strict=True)
    return [out, *(torch.zeros_like(x) if grad is None else grad for grad, x in pairs)]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_may_end_anywhere(block: int) -> None:
    q, k, v = normal(2, 2, 9, 4), normal(2, 2, 13, 4), normal(2, 2, 13, 4)
    inputs = AttentionInputs(
        q, k, v, make_mask(causal, 9, start=4), InnerScore(0.5), ShawPosition(2, 4).double()
    )
    pairs = zip(gradients(Tiled(block=block), inputs), gradients(Dense(), inputs), strict=True)
    for result, expected in pairs:
        assert result.any()
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_frozen_parameters_get_no_gradient() -> None:
    score = SCORES["bilinear"][0].build(2, 4).double().requires_grad_(False)
    q, k, v = normal(1, 2, 5, 4).requires_grad_(), normal(1, 2, 5, 3), normal(1, 2, 5, 4)
    attend(q, k, v, score=score, implementation=Tiled(block=2)).sum().backward()
    assert all(parameter.grad is None for parameter in score.parameters())
    assert q.grad is not None


def dropped(q: Tensor, k: Tensor, v: Tensor, position: Position, rule: Any = causal) -> Tensor:
    torch.manual_seed(7)
    mask = make_mask(rule, q.shape[2])
    return Tiled(block=4)(AttentionInputs(q, k, v, mask, InnerScore(0.5), position, 0.25))


def test_every_block_has_its_own_dropout() -> None:
    """No two blocks drop the same weights, not even (i, j) and (j, i)."""
    v = torch.eye(12, dtype=torch.float64).expand(1, 2, -1, -1)
    zeros = dropped(normal(1, 2, 12, 12), normal(1, 2, 12, 12), v, Position(), full) == 0
    blocks = [zeros[:, :, i : i + 4, j : j + 4] for i in (0, 4, 8) for j in (0, 4, 8)]
    assert not any(torch.equal(a, b) for n, a in enumerate(blocks) for b in blocks[:n])


def test_dropout_backward_fits_its_forward() -> None:
    """Backward recomputes the weights that forward dropped, relative values included."""
    tensors = [normal(1, 1, 5, 2).requires_grad_() for _ in range(3)]
    shaw = ShawPosition(2, 2).double()
    assert gradcheck(lambda *x: dropped(*x[:3], shaw), (*tensors, *shaw.parameters()))


def test_no_dropout_draws_no_random_number() -> None:
    tensors = [normal(1, 1, 5, 4) for _ in range(3)]
    before = torch.get_rng_state()
    attend(*tensors, implementation=Tiled(block=2))
    assert torch.equal(before, torch.get_rng_state())


BFLOAT16 = 2.0**-8  # rounding to bfloat16 changes a number by at most this share of it


@pytest.mark.parametrize(
    ("score", "position", "length", "block"),
    [*((*cell, 13, 4) for cell in CELLS), ("scaled-dot", "none", 256, 8)],
)
def test_bfloat16_is_rounded_once(score: str, position: str, length: int, block: int) -> None:
    """Output and gradients are the exact ones (dense in float64), rounded to bfloat16 once.

    Float32's own error is added: sums of at most 4 · length terms lose 4 · length · 2⁻²⁴ of the
    largest, and the softmax between them as much again.
    """
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=length, causal=True)
    score_module = SCORES[score][0].build(2, 4).bfloat16()
    position_module = POSITIONS[position][0].build(sizes).bfloat16()
    channels = (4, SCORES[score][0].key_dim(4), 4)
    tensors = [torch.randn(2, 2, length, c).bfloat16() for c in channels]
    parts = make_mask(causal, length), score_module, position_module
    results = gradients(Tiled(block=block), AttentionInputs(*tensors, *parts))
    assert all(x.dtype == torch.bfloat16 for x in results)
    score_module.double(), position_module.double()
    exact = gradients(Dense(), AttentionInputs(*(x.double() for x in tensors), *parts))
    for result, expected in zip(results, exact, strict=True):
        noise = 8 * length * 2.0**-24 * float(expected.detach().abs().max())
        torch.testing.assert_close(result.double(), expected, rtol=BFLOAT16, atol=noise)


def train(attention: Any, score: ScoreConfig, autocast: bool) -> dict[str, Tensor]:
    """Loss and gradients of a small model with relative positions."""
    torch.manual_seed(1)
    sizes: Any = {"vocab_size": 20, "dim": 16, "layers": 1, "heads": 2, "ffn_dim": 16}
    config = GptConfig(
        **sizes,
        dropout=0.0,
        bias=False,
        position=Shaw(max_distance=2),
        score=score,
        attention=attention,
        feedforward=Plain(activation="gelu"),  # a kink would turn a rounding into a jump
    )
    model, tokens = config.build(), torch.randint(20, (4, 11))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return {"loss": loss.detach().float(), **grads}


@pytest.mark.parametrize("score", [Bilinear(), ReducedRank(rank=4), Additive()])
def test_autocast_trains_like_dense(score: ScoreConfig) -> None:
    """Under autocast the loss and every gradient are as near the exact ones as dense's are.

    A gradient passes seven matrix products forward and seven backward, each rounding two factors
    and a result: 42 roundings, which at worst add up.
    """
    exact = train(Dense(), score, autocast=False)
    for attention in (Dense(), Tiled(block=4)):
        for name, gradient in train(attention, score, autocast=True).items():
            error = (gradient - exact[name]).norm() / exact[name].norm()
            assert error < 42 * BFLOAT16, (attention.kind, name, float(error))


MEASURE = """
import torch
from pathlib import Path
from manyheads.nn.attend import attend

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1])

def step(implementation, length):
    q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
    attend(q, k, v, rule="causal", implementation=implementation).sum().backward()

torch.set_num_threads(1)
for implementation in ("tiled", "dense"):
    step(implementation, 16)
before = status("VmHWM")
for implementation in ("tiled", "dense"):  # the peak of a process only grows
    step(implementation, 8192)
    print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_a_tenth_of_dense() -> None:
    """At 8,192 tokens tiled attention needs less than a tenth of dense's memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    tiled, dense = map(int, done.stdout.split())
    assert 0 < tiled < dense / 10
