"""How softmax(scores) · V is computed: the textbook, and PyTorch's best kernel.

A core takes queries [b h t c], keys and values of as many or fewer heads, a `AttentionMask`, a score
and a position, and gives the mixed values. Its settings `build` it for a layer; a core without
weights is its own settings. What it cannot honour it refuses in `check`, when the model is built.
The other exact core is nn/tiled.py; those that see less than everything have rooms of their own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyheads.errors import UserError
from manyheads.kernels.dispatch import HALF, SHORT, TRITON, trusted
from manyheads.nn.masks import AttentionMask, Causal, Full
from manyheads.nn.positions import Position, by_distance
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values, Weights

Mixed = Float[Tensor, "b h t c"]
E = TypeVar("E", bound="Exact")

CHANNELS = (16, 32, 64, 128)  # of a head, that a block of our own kernels can hold
FEW = 32  # queries of the heads that share their keys


@dataclass(frozen=True, kw_only=True)
class CoreSizes:
    """What a core may need to know of the attention that it is built for."""

    heads: int
    kv_heads: int
    head_dim: int
    key_dim: int
    max_length: int
    causal: bool = False
    dropout: float = 0.0
    layer: int = 0


@runtime_checkable
class Core(Protocol):
    """softmax(scores) · V or something like it, and a check at build of what it can honour."""

    def check(self, score: Score, position: Position) -> None: ...

    def weights(
        self, q: Queries, k: Keys, sight: AttentionMask, score: Score, position: Position
    ) -> Weights:
        """What the values are mixed with: over the keys, or over what the core makes of them."""
        ...

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed: ...


def share_heads(x: Float[Tensor, "b g s c"], heads: int) -> Float[Tensor, "b h s c"]:
    """Repeat key/value heads for the groups of query heads that share them."""
    if x.shape[1] == heads:
        return x
    return repeat(x, "b g s c -> b (g r) s c", r=heads // x.shape[1])


def dense_weights(
    q: Queries, k: Keys, sight: AttentionMask, score: Score, position: Position
) -> Weights:
    """softmax over the keys of score(q, k) + bias, −∞ where a query must not see.

    A query that sees no key at all gives no weight to any.
    """
    scores = score(q, share_heads(k, q.shape[1]))
    bias = position.bias(q, sight)
    if bias is not None:
        scores = scores + bias
    mask = sight.mask()
    if mask is None:
        return scores.softmax(-1)
    blind = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)


class Exact:
    """A core of softmax attention as it is defined: without weights, and its own settings."""

    exact: ClassVar[bool] = True

    def build(self: E, sizes: CoreSizes) -> E:
        return self

    def weights(
        self, q: Queries, k: Keys, sight: AttentionMask, score: Score, position: Position
    ) -> Weights:
        return dense_weights(q, k, sight, score, position)


@dataclass(frozen=True)
class Dense(Exact):
    """The textbook: holds every score and every weight."""

    kind: ClassVar[str] = "dense"

    def check(self, score: Score, position: Position) -> None:
        """Honours everything."""

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed:
        weights = F.dropout(dense_weights(q, k, sight, score, position), dropout)
        mixed = einsum(weights, share_heads(v, q.shape[1]), "b h t s, b h s c -> b h t c")
        spread = position.spread(weights, sight)
        return mixed if spread is None else mixed + spread


@dataclass(frozen=True)
class Fused(Exact):
    """PyTorch's fused kernels: no weights are held where the device has a kernel for it.

    For a bias by distance it has none, and on a GPU ours is used (kernels/biased_attention.py); so is ours for
    texts so short that PyTorch's would be idle most of the time (kernels/short_attention.py), and where a few
    queries look at a cache (kernels/decode_attention.py).
    """

    kind: ClassVar[str] = "fused"

    def check(self, score: Score, position: Position) -> None:
        if not isinstance(score, InnerScore):
            raise UserError(
                "the fused core computes inner products inside its kernel, and an additive score "
                "is none: choose the dense or the tiled core (model.core=dense)"
            )
        if type(position).value is not Position.value:
            raise UserError(
                "the fused core never holds the weights, and relative vectors on the values "
                "(shaw) need them: choose the dense or the tiled core (model.core=dense)"
            )

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed:
        assert isinstance(score, InnerScore)
        if not dropout and _ours(q, sight, score, position):
            return _by_our_kernel(q, k, v, sight, score, position)
        added = position.bias(q, sight)
        if added is None and not dropout and _is_glance(q, k, v, score):
            return _by_glance(q, k, v, sight, score)
        f, g, w = *score.factors(q, share_heads(k, q.shape[1])), share_heads(v, q.shape[1])
        if added is None and _is_short(f, g, w, sight, dropout):
            return _by_short_kernel(f, g, w, sight, score, dropout)
        triangle = added is None and sight.is_triangle()
        if added is None:
            added = None if triangle else sight.added(f.dtype)
        else:
            mask = sight.mask()
            added = added if mask is None else added.masked_fill(~mask, -torch.inf)
        return _kernel(f, g, w, added, dropout_p=dropout, is_causal=triangle, scale=score.scale)


def _ours(q: Tensor, sight: AttentionMask, score: Score, position: Position) -> bool:
    """Whether this is what our own kernel is for, and one that it can compute."""
    return (
        position.distance_alone
        and q.dtype in HALF
        and q.device.type == "cuda"
        and sight.square
        and isinstance(sight.rule, Full | Causal)
        and type(score) is InnerScore
        and q.shape[-1] in CHANNELS
        and TRITON
    )


def _is_short(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, dropout: float) -> bool:
    """Whether our kernel for short texts can compute this."""
    return (
        q.device.type == "cuda"
        and q.dtype in HALF
        and q.dtype == k.dtype == v.dtype
        and q.shape[0] > 0
        and q.shape[:2] == k.shape[:2]
        and k.shape == v.shape
        and q.shape[-1] in CHANNELS
        and q.shape[2] <= SHORT[q.shape[-1]]
        and k.shape[2] <= SHORT[q.shape[-1]]
        and q.shape[-1] == v.shape[-1]
        and (isinstance(sight.rule, Full) or (isinstance(sight.rule, Causal) and sight.square))
        and (sight.real is None or sight.real.shape[0] in (1, q.shape[0]))
        and TRITON
        and trusted("short_attention", q.device.index, "trial_of_dropout" if dropout else "trial")
    )


def _is_glance(q: Tensor, k: Tensor, v: Tensor, score: Score) -> bool:
    """Whether these are few queries, as a step of writing has them, and no gradient is wanted."""
    return (
        q.device.type == "cuda"
        and not torch.is_grad_enabled()
        and q.dtype in HALF
        and q.dtype == k.dtype == v.dtype
        and q.shape[0] > 0
        and k.shape == v.shape
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] in CHANNELS
        and q.shape[2] < k.shape[2]
        and q.shape[1] // k.shape[1] * q.shape[2] <= FEW
        and type(score) is InnerScore
        and TRITON
        and trusted("decode_attention", q.device.index)
    )


def _by_glance(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, score: InnerScore) -> Tensor:
    from manyheads.kernels.decode_attention import glance

    found: Tensor = glance(q, k, v, sight.mask(), float(score.scale))
    return found


def _by_our_kernel(
    q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, score: InnerScore, position: Position
) -> Tensor:
    from manyheads.kernels.biased_attention import (
        biased_attention,  # Triton comes with PyTorch for a GPU alone
    )

    # The table in full precision: each of its numbers is added to many scores.
    heads, bias = q.shape[1], by_distance(position, q.float(), q.shape[2])
    assert bias is not None
    real = None if sight.real is None else sight.real.expand(q.shape[0], -1)
    given = (q, share_heads(k, heads), share_heads(v, heads), bias, real)
    return biased_attention(*given, sight.rule.past_only, float(score.scale))


def _by_short_kernel(
    q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, score: InnerScore, dropout: float
) -> Tensor:
    from manyheads.kernels.short_attention import short_attention

    found: Tensor = short_attention(q, k, v, *_short_settings(q, sight, score, dropout))
    return found


def _short_settings(
    q: Tensor, sight: AttentionMask, score: InnerScore, dropout: float
) -> tuple[Tensor | None, bool, float, Tensor | None, float]:
    seed = torch.randint(2**62, (1,), device=q.device) if dropout else None
    return sight.real, sight.rule.past_only, float(score.scale), seed, dropout


def mix_projected(
    core: "Core",
    projected: Tensor,
    memory: Tensor | None,
    heads: tuple[Tensor, Tensor, Tensor],
    sight: AttentionMask,
    score: Score,
    position: Position,
    dropout: float,
) -> Tensor | None:
    """What the fused core mixes of projections as they lie, of which `heads` (q, k, v) are views.

    [b t (h c)], by our kernel for short texts; None where that cannot compute it.
    """
    if (
        type(core) is not Fused
        or type(score) is not InnerScore
        or not position.embeds_alone
        or not _is_short(*heads, sight, dropout)
    ):
        return None
    from manyheads.kernels.short_attention import short_projected

    given = _short_settings(projected, sight, score, dropout)
    mixed: Tensor = short_projected(projected, memory, heads[0].shape[1], *given)
    return mixed


def exact_core(score: Score, position: Position) -> "Dense | Fused":
    """The fastest exact core that takes this score and this position."""
    try:
        Fused().check(score, position)
    except UserError:
        return Dense()
    return Fused()


# In order of speed. cuDNN's kernel is the fastest, but with a mask it gives something else than
# zeros to a query that sees nothing.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KERNELS_WITHOUT_MASK = [SDPBackend.CUDNN_ATTENTION, *KERNELS]


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any) -> Tensor:
    """PyTorch's fused attention, with the best backend for the device tried first."""
    if q.device.type == "cpu" and q.dtype in HALF and torch.is_grad_enabled():
        # Their backward pass takes three times as long there in half precision.
        settings["attn_mask"] = None if mask is None else mask.float()
        with torch.autocast("cpu", enabled=False):
            mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **settings)
        return mixed.to(q.dtype)
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
    kernels = KERNELS_WITHOUT_MASK if mask is None else KERNELS
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
