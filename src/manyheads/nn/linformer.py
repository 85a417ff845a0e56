"""Linformer: keys and values of all positions are first mixed into `rank` of them.

    softmax(score(Q, E K)) F V,  E and F: rank × max_length

So a query meets `rank` keys however long the text is. Such a key stands at no place: there is no
past to look at, and nothing inside attention can speak of positions.
(Wang et al. 2020, Linformer: Self-Attention with Linear Complexity.)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import UserError, check_at_least
from manyheads.nn.exact_attention import AttentionSizes
from manyheads.nn.masks import AttentionMask, Full
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import Keys, Queries, Values
from manyheads.ops import share_heads

OverRank = Float[Tensor, "b h t r"]
OfPositions = Float[Tensor, "b g s c"]
OfRank = Float[Tensor, "b g r c"]
AttentionOutput = Float[Tensor, "b h t c"]


@dataclass(frozen=True)
class Linformer:
    """Keys and values projected to `rank` positions; for what sees a whole text at once.

    `share`: `all`, one projection for the keys and values of all heads; `heads`, one for the keys
    and one for the values of all heads; `none`, two for each key/value head.
    """

    rank: int = 256
    share: Literal["all", "heads", "none"] = "all"
    kind: ClassVar[str] = "linformer"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_at_least("core.rank", self.rank, 1)

    def build(self, sizes: AttentionSizes) -> "LinformerCore":
        if sizes.causal:
            raise UserError(
                "the linformer core mixes all positions before a query meets them, and here a "
                "query must not see later ones: choose another core (model.attention=fused), "
                "or linformer for the encoder only (model.encoder.attention=linformer "
                f"model.encoder.attention.rank={_advised(sizes)})"
            )
        if self.rank > sizes.max_length:
            raise UserError(
                f"core.rank={self.rank} is no reduction: a text has at most "
                f"{sizes.max_length} positions (model.max_length), so choose a smaller rank, for "
                "the encoder of an encoder–decoder (model.encoder.attention=linformer "
                f"model.encoder.attention.rank={_advised(sizes)})"
            )
        return LinformerCore(self, sizes)


def _advised(sizes: AttentionSizes) -> int:
    """A rank to begin with: a reduction, however short texts are."""
    return max(1, min(64, sizes.max_length // 2))


class LinformerCore(nn.Module):
    """softmax(score(Q, E K)) F V with trained E and F, which begin as N(0, 1/rank).

    That is the distribution under which the paper's theorem proves the approximation.
    """

    def __init__(self, settings: Linformer, sizes: AttentionSizes) -> None:
        super().__init__()
        self.rank, self.max_length = settings.rank, sizes.max_length
        self.channels = sizes.kv_heads * (sizes.key_dim + sizes.head_dim)
        groups = [sizes.kv_heads] if settings.share == "none" else []
        shape = [*groups, self.rank, self.max_length]
        self.keys = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.keys, std=self.rank**-0.5)
        # A matrix under two names would be saved twice: keys and values may have one.
        self.values = None
        if settings.share != "all":
            self.values = nn.Parameter(torch.empty(shape))
            nn.init.normal_(self.values, std=self.rank**-0.5)

    def check(self, score: Score, position: Position) -> None:
        hooks = ("rotate", "score", "value")
        if any(getattr(type(position), hook) is not getattr(Position, hook) for hook in hooks):
            raise UserError(
                "the linformer core meets mixtures of keys, and a mixture stands at no position: "
                "choose positions that are added to the embeddings (model.position=sinusoidal "
                "or learned)"
            )

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> OverRank:
        """softmax(score(q, E k)): over the mixtures of keys, not over the keys."""
        if not isinstance(mask.rule, Full):
            raise UserError(
                "the linformer core mixes all positions before a query meets them and knows no "
                f"rule but full, not {mask.rule.kind}: choose another core (model.attention=fused)"
            )
        if k.shape[2] > self.max_length:
            raise UserError(
                f"{k.shape[2]} positions, but the linformer core projects {self.max_length}: "
                "shorten the text, or train with a larger model.max_length"
            )
        mixed = self._project(k, self.keys, mask)
        return score(q, share_heads(mixed, q.shape[1])).softmax(-1)

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
        weights = F.dropout(self.weights(q, k, mask, score, position), dropout)
        mixed = self._project(v, self.keys if self.values is None else self.values, mask)
        return einsum(weights, share_heads(mixed, q.shape[1]), "b h t r, b h r c -> b h t c")

    def _project(self, x: OfPositions, matrix: Tensor, mask: AttentionMask) -> OfRank:
        """E x over the positions that there are; what is padding counts as zero.

        So where nothing is real, values are zero and with them what a query gets.
        """
        if mask.padding_mask is not None:
            x = x.masked_fill(~rearrange(mask.padding_mask, "b s -> b 1 s 1"), 0.0)
        matrix = matrix[..., : x.shape[2]]
        if matrix.ndim == 2:
            return einsum(matrix, x, "r s, b g s c -> b g r c")
        return einsum(matrix, x, "g r s, b g s c -> b g r c")
