"""FlashAttention's algorithm, written out: exact attention in blocks, memory linear in length.

Forward, for each block of queries, over the blocks of keys with a running maximum m and sum l:

    m' = max(m, max_j s_j),  p_j = exp(s_j − m')
    l' = e^(m−m') l + Σ_j p_j,  o' = e^(m−m') o + Σ_j p_j v_j,  at the end o / l

Only o and log-sum-exp L = m + log l are kept. Backward recomputes each block's scores and with
P = exp(S − L), D = rowsum(dO ∘ O) takes dS = P ∘ (dP − D) back through the score.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from manyheads.nn.cores import share_heads
from manyheads.nn.masks import Sight
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import Keys, Queries, Values

Mixed = Float[Tensor, "b h t c"]


@dataclass(frozen=True)
class Tiled:
    """Attention block by block; any score, rule and position, any device."""

    block: int = 512
    kind: ClassVar[str] = "tiled"

    def check(self, score: Score, position: Position) -> None:
        """Honours everything: it sees the scores, one block at a time."""

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: Sight,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed:
        seed = int(torch.randint(2**62, ())) if dropout else 0
        tiles = _Tiles(sight, score, position, dropout, seed, self.block)
        trained = [p for part in (score, position) for p in part.parameters() if p.requires_grad]
        heads = q.shape[1]
        return _TiledAttention.apply(  # type: ignore[no-untyped-call]
            tiles, q, share_heads(k, heads), share_heads(v, heads), *trained
        )


@dataclass(frozen=True)
class _Tiles:
    """What the forward and the backward pass compute alike for one block."""

    sight: Sight
    score: Score
    position: Position
    dropout: float
    seed: int
    block: int

    def rows(self) -> Iterator[slice]:
        length = self.sight.queries.shape[1]
        return (slice(i, min(i + self.block, length)) for i in range(0, length, self.block))

    def columns(self, rows: slice) -> Iterator[slice]:
        """The blocks of keys of which these queries see anything."""
        length = self.sight.keys.shape[1]
        for j in range(0, length, self.block):
            columns = slice(j, min(j + self.block, length))
            mask = self.sight.block(rows, columns).mask()
            if mask is None or bool(mask.any()):
                yield columns

    def scores(self, q: Tensor, k: Tensor, rows: slice, columns: slice) -> Tensor:
        sight = self.sight.block(rows, columns)
        scores: Tensor = self.score(q, k)
        bias = self.position.score(q, sight.queries, sight.keys)
        if bias is not None:
            scores = scores + bias
        mask = sight.mask()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)

    def mix(self, weights: Tensor, v: Tensor, rows: slice, columns: slice) -> Tensor:
        if self.dropout:
            # The same block drops the same weights when the backward pass recomputes it.
            generator = torch.Generator(weights.device)
            generator.manual_seed(self.seed + rows.start * 2**20 + columns.start)
            chance = torch.rand(weights.shape, generator=generator, device=weights.device)
            weights = weights * (chance >= self.dropout) / (1 - self.dropout)
        mixed = einsum(weights, v, "b h t s, b h s c -> b h t c")
        sight = self.sight.block(rows, columns)
        spread = self.position.value(weights, sight.queries, sight.keys)
        return mixed if spread is None else mixed + spread


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, *trained: Tensor
    ) -> Tensor:
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        log_sum = q.new_empty(*q.shape[:3], 1)
        for rows in tiles.rows():
            m = q.new_full((*q.shape[:2], rows.stop - rows.start, 1), -torch.inf)
            total = torch.zeros_like(m)
            o = torch.zeros_like(out[:, :, rows])
            for columns in tiles.columns(rows):
                scores = tiles.scores(q[:, :, rows], k[:, :, columns], rows, columns)
                highest = torch.maximum(m, scores.amax(-1, keepdim=True))
                # A row that has seen nothing yet keeps −∞; exp must not see ∞ − ∞.
                safe = highest.masked_fill(highest == -torch.inf, 0.0)
                p, shrink = (scores - safe).exp(), (m - safe).exp()
                total = shrink * total + p.sum(-1, keepdim=True)
                o = shrink * o + tiles.mix(p, v[:, :, columns], rows, columns)
                m = highest
            blind = total == 0
            out[:, :, rows] = o / total.masked_fill(blind, 1.0)
            log_sum[:, :, rows] = (m + total.log()).masked_fill(blind, torch.inf)
        ctx.tiles = tiles
        ctx.save_for_backward(q, k, v, out, log_sum, *trained)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tiles, (grad,) = ctx.tiles, grads
        q, k, v, out, log_sum, *trained = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_trained = [torch.zeros_like(p) for p in trained]
        inner = (grad * out).sum(-1, keepdim=True)
        for rows in tiles.rows():
            for columns in tiles.columns(rows):
                with torch.enable_grad():
                    qb, kb, vb = (
                        x[:, :, part].detach().requires_grad_()
                        for x, part in ((q, rows), (k, columns), (v, columns))
                    )
                    scores = tiles.scores(qb, kb, rows, columns)
                    p = (scores.detach() - log_sum[:, :, rows]).exp().requires_grad_()
                    mixed = tiles.mix(p, vb, rows, columns)
                dp, d_vb, *d_mix = torch.autograd.grad(
                    mixed, [p, vb, *trained], grad[:, :, rows], allow_unused=True
                )
                ds = p.detach() * (dp - inner[:, :, rows])
                d_qb, d_kb, *d_score = torch.autograd.grad(
                    scores, [qb, kb, *trained], ds, allow_unused=True
                )
                dq[:, :, rows] += d_qb
                dk[:, :, columns] += d_kb
                dv[:, :, columns] += d_vb
                for total, *parts in zip(d_trained, d_mix, d_score, strict=True):
                    for part in parts:
                        if part is not None:
                            total += part
        return None, dq, dk, dv, *d_trained
