"""The tiled core: exact like dense, its dropout sound, its memory linear in the length."""

import subprocess
import sys

import pytest
import torch
from textbook import POSITIONS, RULES, SCORES, refused
from torch import Tensor
from torch.autograd import gradcheck

from manyheads.errors import UserError
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import AttentionFunctionConfig, attend, attention_weights
from manyheads.nn.exact_attention import AttentionFunction, Dense
from manyheads.nn.feedforward import Plain
from manyheads.nn.masks import AttentionMask, causal, make_mask
from manyheads.nn.positions import Position, PositionSizes, Shaw, ShawPosition
from manyheads.nn.scores import Additive, Bilinear, InnerScore, ReducedRank, Score, ScoreConfig
from manyheads.nn.tiled import Tiled

CELLS = [(s, p) for s in SCORES for p in POSITIONS if not refused(s, p, "tiled")]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gradients(
    core: AttentionFunction,
    inputs: list[Tensor],
    sight: AttentionMask,
    score: Score,
    position: Position,
) -> list[Tensor]:
    """The output, then the gradients of the inputs and of every parameter that has one."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    score.zero_grad()
    position.zero_grad()
    out = core(*inputs, sight, score, position)
    # Sixteenths are exact in every precision.
    out.backward((torch.arange(out.numel()) % 33 - 16).to(out).view_as(out) / 16)
    found = [*inputs, *score.parameters(), *position.parameters()]
    return [out, *(torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in found)]


@pytest.mark.parametrize("block", [4, 7, 64])
@pytest.mark.parametrize(("score", "position"), CELLS)
def test_tiled_is_dense(score: str, position: str, block: int) -> None:
    """Forward, inputs' and parameters' gradients equal dense's, wherever the blocks end."""
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=13, causal=False)
    scored = SCORES[score][0].build(2, 4).double()
    placed = POSITIONS[position][0].build(sizes).double()
    inputs = [
        normal(2, 2, 9, 4),
        normal(2, 2, 13, SCORES[score][0].key_dim(4)),
        normal(2, 2, 13, 4),
    ]
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 3:6] = False
    for rule in ("causal", "window"):
        sight = make_mask(RULES[rule][0], 9, start=4, padding_mask=real)
        tiled = gradients(Tiled(block=block), inputs, sight, scored, placed)
        dense = gradients(Dense(), inputs, sight, scored, placed)
        for found, expected in zip(tiled, dense, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("score", "position"), [("bilinear", "shaw"), ("additive", "t5")])
def test_parameters_learn(score: str, position: str) -> None:
    """The parameters of score and position get a gradient at all (dense agrees elsewhere)."""
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=9, causal=True)
    scored = SCORES[score][0].build(2, 4).double()
    placed = POSITIONS[position][0].build(sizes).double()
    inputs = [normal(1, 2, 9, 4), normal(1, 2, 9, 3), normal(1, 2, 9, 4)]
    found = gradients(Tiled(block=4), inputs, make_mask(causal, 9), scored, placed)
    assert all((gradient != 0).any() for gradient in found)


def test_frozen_parameters_are_left_alone() -> None:
    """A score or position that is not trained asks for no gradient and gets none."""
    scored = SCORES["bilinear"][0].build(2, 4).double().requires_grad_(False)
    q, k, v = normal(1, 2, 5, 4).requires_grad_(), normal(1, 2, 5, 3), normal(1, 2, 5, 4)
    attend(q, k, v, score=scored, core=Tiled(block=2)).sum().backward()
    assert all(parameter.grad is None for parameter in scored.parameters())
    assert q.grad is not None


def dropped(seed: int, q: Tensor, k: Tensor, v: Tensor, position: Position | None = None) -> Tensor:
    torch.manual_seed(seed)
    sight = make_mask(causal, q.shape[2])
    return Tiled(block=4)(q, k, v, sight, InnerScore(0.5), position or Position(), 0.25)


def test_dropout_drops_or_scales_each_weight() -> None:
    """Each weight is gone or grown by 1/(1 − p), in a pattern of its own in each block."""
    q, k = normal(1, 2, 11, 11), normal(1, 2, 11, 11)
    seen = dropped(3, q, k, torch.eye(11, dtype=torch.float64).expand(1, 2, -1, -1))
    kept = seen / attention_weights(q, k, rule=causal, scale=0.5)
    kept = kept[:, :, *torch.tril_indices(11, 11)]
    assert ((kept == 0) | ((kept - 1 / 0.75).abs() < 1e-10)).all()
    assert 0.1 < (kept == 0).double().mean() < 0.4
    pattern = seen == 0
    blocks = [pattern[:, :, 8:11, 0:3], pattern[:, :, 8:11, 4:7], pattern[:, :, 4:7, 0:3]]
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[0], blocks[2])


def test_dropout_follows_the_seed() -> None:
    """The same seed drops the same weights, another seed others."""
    inputs = [normal(1, 2, 9, 4) for _ in range(3)]
    assert torch.equal(dropped(5, *inputs), dropped(5, *inputs))
    assert not torch.equal(dropped(5, *inputs), dropped(6, *inputs))


def test_dropout_backward_fits_its_forward() -> None:
    """Backward recomputes the very weights that forward dropped, relative values included."""
    inputs = [normal(1, 1, 5, 2).requires_grad_() for _ in range(3)]
    shaw = ShawPosition(2, 2).double()

    def mixed(q: Tensor, k: Tensor, v: Tensor, *trained: Tensor) -> Tensor:
        return dropped(7, q, k, v, shaw)

    assert gradcheck(mixed, (*inputs, *shaw.parameters()))


def test_dropout_keeps_the_mean() -> None:
    """Over many draws the mixture with dropout averages to the one without."""
    q, k, v = (normal(1, 1, 6, 4).expand(4000, -1, -1, -1) for _ in range(3))
    drawn = dropped(8, q, k, v)
    exact = attend(q[:1], k[:1], v[:1], rule=causal, scale=0.5)
    error = (drawn.mean(0) - exact[0]).abs()
    assert (error < 5 * drawn.std(0) / 4000**0.5 + 1e-12).all()
    assert (drawn.std(0) > 0).any()


def test_no_dropout_draws_no_random_number() -> None:
    """Without dropout the random state stays as it was."""
    inputs = [normal(1, 1, 5, 4) for _ in range(3)]
    before = torch.get_rng_state()
    attend(*inputs, core=Tiled(block=2))
    assert torch.equal(before, torch.get_rng_state())


BFLOAT = 2.0**-8  # rounding to bfloat16 changes a number by at most this share of it


@pytest.mark.parametrize(
    ("score", "position", "length", "block"),
    [*((*cell, 13, 4) for cell in CELLS), ("scaled-dot", "none", 256, 8)],
)
def test_bfloat16_is_rounded_once(score: str, position: str, length: int, block: int) -> None:
    """Output and gradients are the exact ones (dense in float64), rounded to bfloat16 once.

    Nothing that gives bfloat16 can promise less than that one rounding. Added to it is float32's
    own error: sums of at most 4 · length terms lose 4 · length · 2⁻²⁴ of the largest, and
    the softmax between them as much again.
    """
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=length, causal=True)
    scored = SCORES[score][0].build(2, 4).bfloat16()
    placed = POSITIONS[position][0].build(sizes).bfloat16()
    key_dim = SCORES[score][0].key_dim(4)
    inputs = [torch.randn(2, 2, length, c).bfloat16() for c in (4, key_dim, 4)]
    sight = make_mask(causal, length)
    found = gradients(Tiled(block=block), inputs, sight, scored, placed)
    assert all(x.dtype == torch.bfloat16 for x in found)
    exact = gradients(
        Dense(), [x.double() for x in inputs], sight, scored.double(), placed.double()
    )
    for one, other in zip(found, exact, strict=True):
        noise = 8 * length * 2.0**-24 * float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=BFLOAT, atol=noise)


def trained(core: AttentionFunctionConfig, score: ScoreConfig, autocast: bool) -> dict[str, Tensor]:
    """Loss and gradients of a small model with relative positions."""
    torch.manual_seed(1)
    config = GptConfig(
        vocab_size=20,
        dim=16,
        layers=1,
        heads=2,
        ffn_dim=16,
        dropout=0.0,
        bias=False,
        position=Shaw(max_distance=2),
        score=score,
        attention=core,
        feedforward=Plain(activation="gelu"),  # a kink would turn a rounding into a jump
    )
    model, tokens = config.build(), torch.randint(20, (4, 11))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": loss.detach().float(), **found}


@pytest.mark.parametrize("score", [Bilinear(), ReducedRank(rank=4), Additive()])
def test_autocast_trains_like_dense(score: ScoreConfig) -> None:
    """Under autocast the loss and every gradient are as near the exact ones as dense's are.

    A gradient passes seven matrix products forward and seven backward (project, score, mix,
    output, two of the feed-forward, head), each rounding two factors and a result: 42 roundings,
    which at worst add up.
    """
    exact = trained(Dense(), score, autocast=False)
    for core in (Dense(), Tiled(block=4)):
        for name, gradient in trained(core, score, autocast=True).items():
            error = (gradient - exact[name]).norm() / exact[name].norm()
            assert error < 42 * BFLOAT, (core.kind, name, float(error))


@pytest.mark.parametrize("block", [0, -4])
def test_a_block_holds_something(block: int) -> None:
    with pytest.raises(UserError, match=f"^core.block={block} must be at least 1$"):
        Tiled(block=block)


MEASURE = """
import torch
from pathlib import Path
from manyheads.nn.attention import attend

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1])

def step(core, length):
    q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
    attend(q, k, v, rule="causal", core=core).sum().backward()

torch.set_num_threads(1)
for core in ("tiled", "dense"):
    step(core, 16)
before = status("VmHWM")
for core in ("tiled", "dense"):
    step(core, 8192)
    print(status("VmHWM") - before)
"""


def peak_kilobytes() -> list[int]:
    """What forward and backward over 8,192 tokens add to a process' peak: tiled, then dense.

    The peak of a process only grows, so the one that needs less comes first.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_a_tenth_of_dense() -> None:
    """At 8,192 tokens tiled attention needs less than a tenth of dense's memory."""
    tiled, dense = peak_kilobytes()
    print(f"peak over 8,192 tokens: tiled {tiled / 1024:.0f} MiB, dense {dense / 1024:.0f} MiB")
    assert 0 < tiled < dense / 10
