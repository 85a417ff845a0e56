"""Linformer: keys and values of all positions are first projected to `rank` of them.

    softmax(score(Q, E K)) E V,  E: rank × max_length

So a query is scored with `rank` keys however long the text is. A projected key has no position:
so it cannot be causal, and positions inside attention are impossible. Keys and values of all heads
share E (key-value sharing of Wang et al. 2020, Linformer: Self-Attention with Linear Complexity).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count
from manyheads.errors import UserError
from manyheads.nn.attention import AttentionInputs, AttentionSizes, check_rule
from manyheads.nn.masks import AttentionMask, Full
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import HeadOutput
from manyheads.ops import share_heads

RankWeights = Float[Tensor, "b h t r"]


@dataclass(frozen=True)
class Linformer:
    """Keys and values projected to `rank` positions; for encoders."""

    rank: Annotated[Count, "Projected positions"] = 256
    kind: ClassVar[str] = "linformer"
    exact: ClassVar[bool] = False
    REMOVED: ClassVar[dict[str, tuple[object, ...]]] = {"share": ("all",)}

    def build(self, sizes: AttentionSizes) -> "LinformerAttention":
        encoder = (
            "model.encoder.attention=linformer "
            f"model.encoder.attention.rank={max(1, min(64, sizes.max_length // 2))}"
        )
        if sizes.causal:
            raise UserError(
                "model.attention=linformer cannot be causal: choose another implementation "
                f"(model.attention=fused), or linformer for the encoder only ({encoder})"
            )
        if self.rank > sizes.max_length:
            raise UserError(
                f"attention.rank={self.rank} exceeds model.max_length={sizes.max_length}: lower "
                f"it, and use linformer for the encoder of an encoder–decoder only ({encoder})"
            )
        return LinformerAttention(self.rank, sizes)


class LinformerAttention(nn.Module):
    """softmax(score(Q, E K)) E V with a trained E, initially N(0, 1/rank).

    That is the distribution under which the paper's theorem proves the approximation.
    """

    initialises_itself = True

    def __init__(self, rank: int, sizes: AttentionSizes) -> None:
        super().__init__()
        self.rank, self.max_length = rank, sizes.max_length
        self.channels = sizes.kv_heads * (sizes.key_dim + sizes.head_dim)
        self.keys = nn.Parameter(torch.empty(rank, self.max_length))  # E, also of the values
        nn.init.normal_(self.keys, std=rank**-0.5)

    def check(self, score: Score, position: Position) -> None:
        if not position.is_absolute:
            raise UserError(
                "model.attention=linformer projects keys, which then have no position: set "
                "model.position=sinusoidal or learned"
            )

    def weights(self, inputs: AttentionInputs) -> RankWeights:
        """softmax(score(q, E k)), over the projected keys."""
        mask, length = inputs.mask, inputs.k.shape[2]
        check_rule("linformer", mask.rule, Full)
        if length > self.max_length:
            raise UserError(
                f"{length} positions, but linformer projects {self.max_length}: shorten the "
                "text, or train with a larger model.max_length"
            )
        keys = share_heads(self._project(inputs.k, mask), inputs.q.shape[1])
        return inputs.score(inputs.q, keys).softmax(-1)

    def forward(self, inputs: AttentionInputs) -> HeadOutput:
        weights = F.dropout(self.weights(inputs), inputs.dropout)
        values = share_heads(self._project(inputs.v, inputs.mask), inputs.q.shape[1])
        return einsum(weights, values, "b h t r, b h r c -> b h t c")

    def _project(
        self, x: Float[Tensor, "b g s c"], mask: AttentionMask
    ) -> Float[Tensor, "b g r c"]:
        """E x over the positions of the text; padding counts as zero."""
        if mask.padding_mask is not None:
            x = x.masked_fill(~rearrange(mask.padding_mask, "b s -> b 1 s 1"), 0.0)
        return einsum(self.keys[:, : x.shape[2]], x, "r s, b g s c -> b g r c")
