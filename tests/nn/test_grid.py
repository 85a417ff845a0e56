"""The grid: every score, rule, position, core and placement works like dense, or refuses."""

from functools import cache
from itertools import product
from typing import Literal, get_args

import pytest
import torch
from textbook import POSITIONS, RULES, SCORES, refused
from torch import Tensor

from manyheads.nn.attention import CoreConfig
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.cores import Dense, Fused
from manyheads.nn.masks import Rule, look
from manyheads.nn.positions import PositionConfig
from manyheads.nn.residual import Norm
from manyheads.nn.scores import ScoreConfig
from manyheads.nn.tiled import Tiled

LENGTH = 6
CORES: dict[str, CoreConfig] = {"dense": Dense(), "fused": Fused(), "tiled": Tiled(block=4)}
GRID_POSITIONS = [name for name in POSITIONS if name != "rotary-interleaved"]
CELLS = list(product(SCORES, GRID_POSITIONS, CORES))
WORKING = [cell for cell in CELLS if not refused(*cell)]
REFUSING = [cell for cell in CELLS if refused(*cell)]
Placement = Literal["pre", "post"]


def build(score: str, position: str, core: str, placement: Placement, *, causal: bool) -> Stack:
    """One block of two heads of four channels, in float64; the seed fixes its weights."""
    torch.manual_seed(1)
    config = Architecture(
        dim=8,
        layers=1,
        heads=2,
        hidden=8,
        max_length=2 * LENGTH,
        dropout=0.0,
        position=POSITIONS[position][0],
        score=SCORES[score][0],
        core=CORES[core],
        norm=Norm(placement=placement),
    )
    return Stack(config, causal=causal).double()


def run(stack: Stack, rule: Rule, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the gradient by the input of (row n, position n) alone for each row n."""
    x = x.clone().requires_grad_()
    sight = look(rule, x.shape[1], real=real)
    out = stack(stack.position.embed(x, sight.queries), sight)
    own = torch.arange(LENGTH)
    (out[own, own] * torch.linspace(-1, 2, 8, dtype=x.dtype)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@cache
def sentence() -> Tensor:
    """The same six vectors in each row: row n then shows what position n depends on."""
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(LENGTH, 8, dtype=torch.float64, generator=generator)
    return vectors.expand(LENGTH, -1, -1)


@cache
def by_dense(
    score: str, position: str, placement: Placement, rule: str, causal: bool
) -> tuple[Tensor, Tensor]:
    return run(
        build(score, position, "dense", placement, causal=causal), RULES[rule][0], sentence()
    )


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("score", "position", "core"), WORKING)
def test_cell_works(score: str, position: str, core: str, placement: Placement) -> None:
    """The cell agrees with dense, looks only where it may, and does not feel padding."""
    x = sentence()
    junk = torch.cat([x, 5 * torch.randn(LENGTH, 2, 8, dtype=torch.float64)], dim=1)
    real = (torch.arange(LENGTH + 2) < LENGTH).expand(LENGTH, -1)
    for causal, names in ((True, ("causal", "both")), (False, ("full", "window", "prefix"))):
        stack = build(score, position, core, placement, causal=causal)
        for name in names:
            rule, sees = RULES[name]
            out, gradient = run(stack, rule, x)
            expected, expected_gradient = by_dense(score, position, placement, name, causal)
            agree(out, expected)
            agree(gradient, expected_gradient)
            depends = (gradient != 0).any(-1).tolist()
            assert depends == [[sees(0, i, j) for j in range(LENGTH)] for i in range(LENGTH)]
            padded, padded_gradient = run(stack, rule, junk, real)
            agree(padded[:, :LENGTH], out)
            agree(padded_gradient[:, :LENGTH], gradient)
            assert (padded_gradient[:, LENGTH:] == 0).all()


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("score", "position", "core"), REFUSING)
def test_cell_refuses(score: str, position: str, core: str, placement: Placement) -> None:
    """A cell that cannot work says why when it is built."""
    with pytest.raises(ValueError, match=r"\w+ .*(choose|model\.)"):
        build(score, position, core, placement, causal=True)


def test_the_grid_is_whole() -> None:
    """Every score and position that can be configured stands in the grid, and most cells work."""
    assert {type(config) for config, _ in SCORES.values()} == set(get_args(ScoreConfig))
    assert {type(config) for config, _ in POSITIONS.values()} == set(get_args(PositionConfig))
    assert {type(core) for core in CORES.values()} == set(get_args(CoreConfig))
    assert len(GRID_POSITIONS) == len(get_args(PositionConfig))
    assert (len(WORKING), len(REFUSING)) == (86, 19)
