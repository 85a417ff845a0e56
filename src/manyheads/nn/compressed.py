"""Memory-compressed attention: queries attend to a few neighbouring keys as one (Liu et al. 2018).

Each head has a convolution over its keys and one over its values, whose kernel is as long as its
stride, so that n positions become n / stride blocks:

    k'_j = Σ_i W^K_i k_(stride·j+i),  v'_j = Σ_i W^V_i v_(stride·j+i),  i = 0 … stride−1

A block has the position of its last key. A causal query at p attends to block j if
stride·j + stride − 1 ≤ p: never to a later key, and not to the newest keys until their block is
complete. The local attention of the layers in between attends to those.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count
from manyheads.errors import UserError
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    check_rule,
    dense_weights,
    exact_attention,
)
from manyheads.nn.local import Local
from manyheads.nn.masks import AttentionMask, Causal, Full, causal
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import HeadOutput

Kernel = Float[Tensor, "g c c k"]
NOISE = 0.1  # of initial kernels, relative to N(0, 1 / fan-in)


class CompressedAttention(nn.Module):
    """Exact attention to blocks of keys and values, each a learned average of its positions.

    Padding counts as zeros. The output of a query that attends to no block is zero.
    """

    initialises_itself = True

    def __init__(self, stride: int, sizes: AttentionSizes) -> None:
        super().__init__()
        self.stride = stride
        self.causal = sizes.causal
        self.keys = nn.Parameter(_initial_kernel(sizes.kv_heads, sizes.key_dim, stride))
        self.values = nn.Parameter(_initial_kernel(sizes.kv_heads, sizes.head_dim, stride))

    def check(self, score: Score, position: Position) -> None:
        if not position.is_absolute:
            raise UserError(
                "memory-compressed attention averages keys of several positions: set "
                "model.position=sinusoidal, learned or none"
            )

    def weights(self, inputs: AttentionInputs) -> Float[Tensor, "b h t blocks"]:
        """Over the blocks."""
        blocks = self._compress(inputs.k, self.keys, inputs.mask)
        mask = self._block_mask(inputs.mask, inputs.k)
        return dense_weights(inputs.q, blocks, mask, inputs.score, inputs.position)

    def forward(self, inputs: AttentionInputs) -> HeadOutput:
        mask = inputs.mask
        k, v = (
            self._compress(inputs.k, self.keys, mask),
            self._compress(inputs.v, self.values, mask),
        )
        attend = exact_attention(inputs.score, inputs.position)
        return attend(replace(inputs, k=k, v=v, mask=self._block_mask(mask, inputs.k)))

    def _block_mask(self, mask: AttentionMask, k: Tensor) -> AttentionMask:
        """The mask over blocks; a block is padding if all its positions are."""
        check_rule("memory-compressed", mask.rule, Full, Causal)
        # The mask of a single cached step is full, but its last block may be incomplete.
        rule = causal if self.causal else mask.rule
        blocks = math.ceil(k.shape[2] / self.stride)
        last = torch.arange(blocks, device=k.device) * self.stride + self.stride - 1
        if mask.padding_mask is None:
            return AttentionMask(rule, mask.query_positions, last[None])
        real = self._by_position(rearrange(mask.padding_mask, "b s -> b 1 s 1"), mask)
        real = rearrange(self._pad(real), "b 1 (j i) 1 -> b j i", i=self.stride).any(-1)
        return AttentionMask(rule, mask.query_positions, last[None], real)

    def _compress(
        self, x: Float[Tensor, "b g s c"], kernel: Kernel, mask: AttentionMask
    ) -> Float[Tensor, "b g blocks c"]:
        """A convolution whose kernels do not overlap: a matrix for each position in a block."""
        if mask.padding_mask is not None:
            x = self._by_position(x, mask)
        blocks = rearrange(self._pad(x), "b g (j i) c -> b g j i c", i=self.stride)
        return einsum(blocks, kernel.to(x.dtype), "b g j i c, g o c i -> b g j o")

    def _by_position(self, x: Tensor, mask: AttentionMask) -> Tensor:
        """x [b g s c] with each real key at the index of its position, and zeros elsewhere.

        So padding in the middle of a row does not shift later keys to another block.
        """
        assert mask.padding_mask is not None
        length = x.shape[2]
        # Padding goes to one extra index, which is cut off.
        index = torch.where(mask.padding_mask, mask.key_positions, length)
        index = rearrange(index, "b s -> b 1 s 1").expand(x.shape)
        zeros = x.new_zeros(*x.shape[:2], length + 1, x.shape[3])
        return zeros.scatter(2, index, x)[:, :, :length]

    def _pad(self, x: Tensor) -> Tensor:
        """Zeros at the end, so that the last block is complete."""
        return F.pad(x, (0, 0, 0, -x.shape[2] % self.stride))


def _initial_kernel(heads: int, channels: int, stride: int) -> Kernel:
    """The mean of a block plus noise, so that heads and positions differ from the start."""
    mean = torch.eye(channels)[None, :, :, None].expand(heads, -1, -1, stride) / stride
    return mean + NOISE * (channels * stride) ** -0.5 * torch.randn(mean.shape)


@dataclass(frozen=True)
class MemoryCompressed:
    """Local blocks (L) and compressed memory (M) in turn: LM is LMLML in five layers."""

    stride: Annotated[Count, "Positions that are compressed to one"] = 3
    size: Annotated[Count, "Positions of a local block"] = 256
    layers: Annotated[str, "L (local) and M (compressed), repeated over the layers"] = "LM"
    kind: ClassVar[str] = "memory-compressed"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.layers or {*self.layers} - {*"LM"}:
            raise UserError(
                f"attention.layers={self.layers} may have the letters L (local) and M "
                "(compressed): set e.g. LM"
            )

    def build(self, sizes: AttentionSizes) -> AttentionFunction:
        if self.layers[sizes.layer % len(self.layers)] == "L":
            return Local(self.size)
        return CompressedAttention(self.stride, sizes)
