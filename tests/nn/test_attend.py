"""`attend` against the textbook, the lectures' worked examples, and its own derivatives."""

import math
from typing import Any

import pytest
import torch
from textbook import POSITIONS, RULES, SCORES, Place, attention, refused, scaled_dot
from torch import Tensor
from torch.autograd import gradcheck

from manyheads.errors import UserError
from manyheads.nn.attention import attend, attention_weights
from manyheads.nn.exact_attention import AttentionFunction, Dense, Fused
from manyheads.nn.masks import Rule, causal, full, prefix, window
from manyheads.nn.positions import PositionSizes, Shaw
from manyheads.nn.scores import Additive, Bilinear
from manyheads.nn.tiled import Tiled

CORES: dict[str, AttentionFunction] = {"dense": Dense(), "fused": Fused(), "tiled": Tiled(block=2)}
REAL = torch.tensor([[True] * 6, [True, True, False, True, True, False]])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts(score: str, position: str, head_dim: int, causal: bool) -> tuple[Any, Any]:
    """A score and a position for two heads, in float64."""
    sizes = PositionSizes(dim=2 * head_dim, heads=2, head_dim=head_dim, max_length=6, causal=causal)
    scored = SCORES[score][0].build(2, head_dim).double()
    return scored, POSITIONS[position][0].build(sizes).double()


CELLS = [(s, p) for s in SCORES for p in POSITIONS if not refused(s, p, "dense")]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("score", "position"), CELLS)
def test_attend_is_the_textbook(score: str, position: str, rule: str) -> None:
    """Every score, rule and position gives the weights and the mixture of the plain loops."""
    scored, placed = parts(score, position, 4, rule == "causal")
    q, k, v = normal(2, 2, 4, 4), normal(2, 2, 6, SCORES[score][0].key_dim(4)), normal(2, 2, 6, 4)
    for real in (None, REAL):
        weights, mixed = attention(
            q, k, v, SCORES[score][1](scored), RULES[rule][1], POSITIONS[position][1](placed), real
        )
        given = {"score": scored, "rule": RULES[rule][0], "real": real, "position": placed}
        torch.testing.assert_close(attention_weights(q, k, **given), weights, rtol=0, atol=1e-10)
        torch.testing.assert_close(attend(q, k, v, **given), mixed, rtol=0, atol=1e-10)


@pytest.mark.parametrize("core", ["dense", "tiled"])
@pytest.mark.parametrize("score", SCORES)
def test_derivatives_are_right(score: str, core: str) -> None:
    """Finite differences agree with backward, for the inputs and all parameters."""
    for rule, position in (("full", "none"), ("window", "shaw"), ("causal", "t5")):
        scored, placed = parts(score, position, 2, rule == "causal")
        q, v = normal(1, 2, 2, 2).requires_grad_(), normal(1, 2, 3, 2).requires_grad_()
        k = normal(1, 2, 3, SCORES[score][0].key_dim(2)).requires_grad_()
        trained = [*scored.parameters(), *placed.parameters()]

        def mixed(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *trained: Tensor,
            settings: tuple[Any, Any, str] = (scored, placed, rule),
        ) -> Tensor:
            scored, placed, rule = settings
            return attend(
                q, k, v, score=scored, position=placed, rule=RULES[rule][0], core=CORES[core]
            )

        assert gradcheck(mixed, (q, k, v, *trained))


@pytest.mark.parametrize("core", ["dense", "tiled"])
@pytest.mark.parametrize("position", ["rotary", "rotary-interleaved", "alibi"])
def test_derivatives_through_positions_without_parameters(position: str, core: str) -> None:
    """Turned and biased scores have the right gradient too, with a padded key among them."""
    scored, placed = parts("scaled-dot", position, 2, True)
    inputs = [normal(1, 2, length, 2).requires_grad_() for length in (2, 3, 3)]
    real = torch.tensor([[True, False, True]])

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(
            q, k, v, score=scored, position=placed, rule=causal, real=real, core=CORES[core]
        )

    assert gradcheck(mixed, inputs)


@pytest.mark.parametrize("core", CORES)
def test_lecture_scaled_dot_example(core: str) -> None:
    """q·k = 112 and 96 with 64 channels: scores 14 and 12, weights 0.88 and 0.12."""
    q = torch.ones(1, 1, 1, 64)
    k = torch.stack([torch.full((64,), 112 / 64), torch.full((64,), 96 / 64)])[None, None]
    assert (q @ k.mT).flatten().tolist() == [112, 96]
    weights = attention_weights(q, k).flatten()
    assert weights.tolist() == pytest.approx([0.881, 0.119], abs=5e-4)
    v = torch.randn(1, 1, 2, 64)
    mixed = attend(q, k, v, core=core)[0, 0, 0]
    torch.testing.assert_close(mixed, 0.88 * v[0, 0, 0] + 0.12 * v[0, 0, 1], rtol=0, atol=1e-2)
    torch.testing.assert_close(mixed, 0.881 * v[0, 0, 0] + 0.119 * v[0, 0, 1], rtol=0, atol=5e-3)


def test_lecture_causal_mask_example() -> None:
    """The row (1, 1, −1, 0) becomes (½, ½, 0, 0) once the second word may not look ahead."""
    scores = torch.tensor(
        [[2.0, 0.0, 1.0, -1.0], [1.0, 1.0, -1.0, 0.0], [0.0, 2.0, 1.0, 1.0], [1.0, 0.0, 0.0, 2.0]]
    )
    weights = attention_weights(torch.eye(4)[None, None], scores.T[None, None], score="dot")
    row = scores[1].exp() / scores[1].exp().sum()
    torch.testing.assert_close(weights[0, 0, 1], row)
    weights = attention_weights(
        torch.eye(4)[None, None], scores.T[None, None], score="dot", rule="causal"
    )
    assert weights[0, 0, 1].tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0])
    assert weights[0, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("core", CORES)
def test_soft_look_up(core: str) -> None:
    """At a low temperature a query that equals one of several orthogonal keys gets its value."""
    keys, values = torch.eye(5)[None, None], torch.randn(1, 1, 5, 5)
    for i in range(5):
        found = attend(keys[:, :, i : i + 1], keys, values, scale=200.0, core=core)
        torch.testing.assert_close(found[0, 0, 0], values[0, 0, i])
    blurred = attend(keys[:, :, :1], keys, values, scale=0.0, core=core)
    torch.testing.assert_close(blurred[0, 0, 0], values[0, 0].mean(0))


@pytest.mark.parametrize(
    ("core", "position"),
    [(c, p) for c in CORES for p in POSITIONS if not refused("scaled-dot", p, c)],
)
def test_blind_queries_give_zeros(core: str, position: str) -> None:
    """A query that sees no key gives zeros, and sends back zeros and never NaN."""
    scored, placed = parts("scaled-dot", position, 4, True)
    q, k, v = (normal(2, 2, 6, 4).requires_grad_() for _ in range(3))
    real = torch.tensor([[False, False, True, True, True, True], [False] * 6])
    mixed = attend(q, k, v, score=scored, position=placed, rule=causal, real=real, core=CORES[core])
    assert (mixed[0, :, :2] == 0).all()
    assert (mixed[1] == 0).all()
    assert (mixed[0, :, 2:] != 0).all()
    mixed.square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert (x.grad[1] == 0).all()
        assert (x.grad[0, :, :2] == 0).all()
        assert (x.grad[0, :, 3:] != 0).any()
    for parameter in placed.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_blind_queries_have_no_weights() -> None:
    """The weights of a query that sees nothing are zero, those of every other sum to one."""
    q, k = normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    real = torch.tensor([[False, True, True]])
    weights = attention_weights(q, k, rule="causal", real=real)
    assert weights.sum(-1).flatten().tolist() == pytest.approx([0.0, 1.0, 1.0])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_are_repeated_heads(core: str, groups: int) -> None:
    """Key/value heads that several query heads share equal those heads, copied."""
    q, k, v = normal(2, 4, 3, 4), normal(2, groups, 5, 4), normal(2, groups, 5, 4)
    shared = attend(q, k, v, rule=causal, core=CORES[core])
    copies = [x.repeat_interleave(4 // groups, dim=1) for x in (k, v)]
    torch.testing.assert_close(shared, attend(q, *copies, rule=causal), rtol=0, atol=1e-12)
    _, mixed = attention(q, k, v, scaled_dot(None), lambda row, i, j: j <= i, Place(None))
    torch.testing.assert_close(shared, mixed, rtol=0, atol=1e-10)


@pytest.mark.parametrize("core", CORES)
def test_more_queries_than_keys(core: str) -> None:
    """A query needs no key of its own: under the full rule five queries look at two keys."""
    q, k, v = normal(1, 1, 5, 4), normal(1, 1, 2, 4), normal(1, 1, 2, 4)
    one_by_one = [attend(q[:, :, i : i + 1], k, v) for i in range(5)]
    together = attend(q, k, v, core=CORES[core])
    torch.testing.assert_close(together, torch.cat(one_by_one, dim=2), rtol=0, atol=1e-12)


def test_scale_replaces_the_root() -> None:
    """`scale` stands in for 1/√c, and no other score has one."""
    q, k, v = normal(1, 1, 2, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    torch.testing.assert_close(attend(q, k, v, scale=0.5), attend(q, k, v))
    torch.testing.assert_close(attend(q, k, v, scale=1.0), attend(q, k, v, score="dot"))
    with pytest.raises(UserError, match="scale"):
        attend(q, k, v, score=Additive().build(1, 4).double(), scale=1.0)
    for scale in (math.nan, math.inf):
        with pytest.raises(UserError, match="scale"):
            attend(q, k, v, scale=scale)


def test_names_and_parts_mean_the_same() -> None:
    """A part given by its name equals the part itself; a wrong name offers the right one."""
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    by_name = attend(q, k, v, rule="causal", position="alibi", core="tiled")
    _, placed = parts("scaled-dot", "alibi", 4, True)
    torch.testing.assert_close(by_name, attend(q, k, v, rule=causal, position=placed, core=Tiled()))
    with pytest.raises(ValueError, match="did you mean 'tiled'"):
        attend(q, k, v, core="tilde")


@pytest.mark.parametrize(
    "part",
    [
        *({"score": name} for name in ("bilinear", "reduced-rank", "additive")),
        *({"position": name} for name in ("shaw", "t5", "learned")),
        {"score": Bilinear()},
        {"position": Shaw(max_distance=2)},
    ],
)
def test_parts_with_weights_are_given_built(part: dict[str, Any]) -> None:
    """Their weights would be others at each call: two calls would not speak of the same thing."""
    q, k, v = normal(1, 2, 3, 8), normal(1, 2, 3, 8), normal(1, 2, 3, 8)
    with pytest.raises(UserError, match=r"has weights.*build it once.*\(\)\.build\("):
        attend(q, k, v, **part)
    with pytest.raises(UserError, match="has weights"):
        attention_weights(q, k, **part)


def test_positions_that_embed_change_nothing_in_attention() -> None:
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    assert torch.equal(attend(q, k, v, position="sinusoidal"), attend(q, k, v))


def test_unseen_keys_do_not_matter() -> None:
    """What no rule lets a query see can be anything."""
    q, k, v = normal(1, 1, 4, 4), normal(1, 1, 4, 4), normal(1, 1, 4, 4)
    for rule, unseen in ((causal, 3), (window(1), 3), (prefix(2), 3)):
        before = attend(q, k, v, rule=rule)[:, :, 1]
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, unseen], other_v[:, :, unseen] = 9.0, 9.0
        assert torch.equal(before, attend(q, other_k, other_v, rule=rule)[:, :, 1])
        assert not torch.equal(before, attend(q, other_k, other_v, rule=full)[:, :, 1])


def test_a_core_that_differs_by_layer_is_built_first() -> None:
    """At the first layer memory-compressed attention is local: not what was asked for."""
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"another core in each layer.*layers='M'"):
        attend(q, q, q, core="memory-compressed")


@pytest.mark.parametrize("rule", [full, causal], ids=lambda one: one.kind)
def test_half_precision_on_a_cpu_is_as_near_as_its_numbers(rule: Rule) -> None:
    """Where gradients are wanted the fused core computes in float32, autocast or not."""
    torch.manual_seed(1)
    whole = [torch.randn(2, 4, 7, 16, dtype=torch.bfloat16) for _ in range(3)]
    real = torch.arange(7)[None] < torch.tensor([[7], [4]])
    found = []
    for core, dtype in (("fused", torch.bfloat16), ("dense", torch.float64)):
        given = [x.clone().to(dtype).requires_grad_() for x in whole]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            mixed = attend(*given, rule=rule, real=real, core=core)
        assert mixed.dtype == dtype
        (mixed.double() * torch.arange(1, 17)).sum().backward()
        found.append([mixed.detach(), *(x.grad for x in given)])
    for one, exact in zip(*found, strict=True):
        scale = float(exact.abs().max())
        assert float((one.double() - exact).abs().max()) < 2**-7 * scale
