"""Memory-compressed attention: queries meet a few neighbouring keys as one (Liu et al. 2018).

Each head has a convolution over its keys and one over its values, whose kernel is as long as its
stride, so that n positions become n / stride blocks:

    k'_j = Σ_i W^K_i k_(stride·j+i),  v'_j = Σ_i W^V_i v_(stride·j+i),  i = 0 … stride−1

A block stands where its last position stands. A causal query at p sees block j where
stride·j + stride − 1 ≤ p: never a part of what is to come, and of the newest positions nothing
until their block is whole. The layers between them, of local attention, see those.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import UserError, check_at_least
from manyheads.nn.exact_attention import (
    AttentionFunction,
    AttentionSizes,
    dense_weights,
    exact_attention,
)
from manyheads.nn.local import Local
from manyheads.nn.masks import AttentionMask, Causal, Full, causal
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import Keys, Queries, Values

AttentionOutput = Float[Tensor, "b h t c"]
Sequence = Float[Tensor, "b g s c"]
Kernel = Float[Tensor, "g c c k"]
Blocks = Float[Tensor, "b g blocks c"]
BlockWeights = Float[Tensor, "b h t blocks"]
HOOKS = ("rotate", "score", "value")  # those of a position that speak of single keys
NOISE = 0.1


class CompressedCore(nn.Module):
    """Exact attention over blocks of keys and values, each block a learned mix of its positions.

    What is padding counts as zeros. A query that sees no block gets zeros.
    """

    def __init__(self, stride: int, sizes: AttentionSizes) -> None:
        super().__init__()
        self.stride = stride
        self.causal = sizes.causal
        self.keys = nn.Parameter(_first_kernel(sizes.kv_heads, sizes.key_dim, stride))
        self.values = nn.Parameter(_first_kernel(sizes.kv_heads, sizes.head_dim, stride))

    def check(self, score: Score, position: Position) -> None:
        if any(getattr(type(position), hook) is not getattr(Position, hook) for hook in HOOKS):
            raise UserError(
                "memory-compressed attention joins keys of several positions, and this position "
                "speaks of each key's own: choose one that is added to the embeddings "
                "(model.position=sinusoidal or learned) or none"
            )

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> BlockWeights:
        """Over the blocks."""
        blocks = self._compress(k, self.keys, mask)
        return dense_weights(q, blocks, self._sight(mask, k), score, position)

    def forward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> AttentionOutput:
        core = exact_attention(score, position)
        keys, values = (
            self._compress(x, kernel, mask) for x, kernel in ((k, self.keys), (v, self.values))
        )
        return core(q, keys, values, self._sight(mask, k), score, position, dropout)

    def _sight(self, mask: AttentionMask, k: Tensor) -> AttentionMask:
        """Which blocks a query sees, each at its last position; real if one of its own is."""
        if not isinstance(mask.rule, Full | Causal):
            raise UserError(
                f"memory-compressed attention cannot keep the rule {mask.rule.kind}, whose edges "
                "may lie inside a block (of packed documents for one): choose another "
                "model.attention, or texts that are not packed"
            )
        # The newest position alone is said to see all there is; a block may not be whole yet.
        rule = causal if self.causal else mask.rule
        blocks = math.ceil(k.shape[2] / self.stride)
        last = torch.arange(blocks, device=k.device) * self.stride + self.stride - 1
        if mask.padding_mask is None:
            return AttentionMask(rule, mask.query_positions, last[None])
        real = self._in_place(rearrange(mask.padding_mask, "b s -> b 1 s 1"), mask)
        real = rearrange(self._filled(real), "b 1 (j i) 1 -> b j i", i=self.stride).any(-1)
        return AttentionMask(rule, mask.query_positions, last[None], real)

    def _compress(self, x: Sequence, kernel: Kernel, mask: AttentionMask) -> Blocks:
        """A convolution whose kernels do not overlap: a matrix for each place in a block."""
        if mask.padding_mask is not None:
            x = self._in_place(x, mask)
        blocks = rearrange(self._filled(x), "b g (j i) c -> b g j i c", i=self.stride)
        return einsum(blocks, kernel.to(x.dtype), "b g j i c, g o c i -> b g j o")

    def _in_place(self, x: Tensor, mask: AttentionMask) -> Tensor:
        """[b g s c] with each real key in the slot of its position, and zeros in all others.

        Padding in the middle of a row does not move what stands behind it into another block.
        """
        assert mask.padding_mask is not None
        length = x.shape[2]
        # One slot more than there is takes the padding, and is cut off again.
        slots = torch.where(mask.padding_mask, mask.key_positions, length)
        slots = rearrange(slots, "b s -> b 1 s 1").expand(x.shape)
        empty = x.new_zeros(*x.shape[:2], length + 1, x.shape[3])
        return empty.scatter(2, slots, x)[:, :, :length]

    def _filled(self, x: Tensor) -> Tensor:
        """With zeros behind it, so that the last block is as long as the others."""
        return F.pad(x, (0, 0, 0, -x.shape[2] % self.stride))


def _first_kernel(heads: int, channels: int, stride: int) -> Kernel:
    """The mean of a block, and a little noise, so that heads and places differ from the start."""
    mean = torch.eye(channels)[None, :, :, None].expand(heads, -1, -1, stride) / stride
    return mean + NOISE * (channels * stride) ** -0.5 * torch.randn(mean.shape)


@dataclass(frozen=True)
class MemoryCompressed:
    """Layers of local blocks (L) and of compressed memory (M) in turn.

    `layers` is the pattern, repeated as often as a stack needs: LM gives LMLML over five layers.
    `stride` positions become one where memory is compressed, `size` positions make a local block.
    """

    stride: int = 3
    size: int = 256
    layers: str = "LM"
    kind: ClassVar[str] = "memory-compressed"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_at_least("core.stride", self.stride, 1)
        check_at_least("core.size", self.size, 1)
        if not self.layers or {*self.layers} - {*"LM"}:
            raise UserError(
                f"core.layers={self.layers} is made of the letters L (local) and M (compressed): "
                "choose e.g. LM"
            )

    def build(self, sizes: AttentionSizes) -> AttentionFunction:
        if self.layers[sizes.layer % len(self.layers)] == "L":
            return Local(self.size).build(sizes)
        return CompressedCore(self.stride, sizes)
