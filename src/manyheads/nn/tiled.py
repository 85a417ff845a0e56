"""FlashAttention's algorithm, written out: exact attention in blocks, memory linear in length.

Forward, for each block of queries, over the blocks of keys with a running maximum m and sum l:

    m' = max(m, max_j s_j),  p_j = exp(s_j − m')
    l' = e^(m−m') l + Σ_j p_j,  o' = e^(m−m') o + Σ_j p_j v_j,  at the end o / l

Only o and log-sum-exp L = m + log l are kept. Backward recomputes each block's scores and with
P = exp(S − L), D = rowsum(dO ∘ O) takes dS = P ∘ (dP − D) back through the score.

Inputs and outputs may be in half precision: every block, sum and gradient is computed in at least
float32, under autocast too, and rounded once at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from einops import einsum
from torch import Tensor, nn
from torch.func import functional_call

from manyheads import ops
from manyheads.config import Count
from manyheads.nn.attention import AttentionInputs, ExactAttention
from manyheads.nn.shapes import HeadOutput


@dataclass(frozen=True)
class Tiled(ExactAttention):
    """Attention block by block; any score, mask rule and position, any device."""

    block: Annotated[Count, "Queries and keys of a block"] = 512
    kind: ClassVar[str] = "tiled"

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        tiles = _Tiles(inputs, self.block)
        k, v = (ops.share_heads(x, inputs.q.shape[1]) for x in (inputs.k, inputs.v))
        tensors = (
            x.to(torch.promote_types(x.dtype, torch.float32))
            for x in (inputs.q, k, v, *tiles.parameters())
        )
        out: Tensor = _TiledAttention.apply(tiles, *tensors)  # type: ignore[no-untyped-call]
        return out.to(inputs.q.dtype)


class _Tiles(nn.Module):
    """The computations of one block that the forward and the backward pass share."""

    def __init__(self, inputs: AttentionInputs, block: int) -> None:
        super().__init__()
        self.score, self.position = inputs.score, inputs.position
        self.mask, self.block, self.dropout = inputs.mask, block, inputs.dropout
        self.seed = int(torch.randint(2**62, ())) if inputs.dropout else 0

    def compute(self, function: Callable[..., Any], weights: list[Tensor], *tensors: Tensor) -> Any:
        """function(self, …) without autocast, with these weights of score and position."""
        names = [name for name, _ in self.named_parameters()]
        state = dict(zip(names, weights, strict=True))
        with ops.full_precision(tensors[0]):
            return functional_call(self, state, (function, *tensors))

    def forward(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        return function(self, *tensors)

    def rows(self) -> Iterator[slice]:
        length = self.mask.query_positions.shape[1]
        return (slice(i, min(i + self.block, length)) for i in range(0, length, self.block))

    def columns(self, rows: slice) -> Iterator[slice]:
        """The blocks of keys to which any of these queries attends."""
        length = self.mask.key_positions.shape[1]
        for j in range(0, length, self.block):
            columns = slice(j, min(j + self.block, length))
            allowed = self.mask.block(rows, columns).as_bool()
            if allowed is None or bool(allowed.any()):
                yield columns

    def scores(self, q: Tensor, k: Tensor, rows: slice, columns: slice) -> Tensor:
        mask = self.mask.block(rows, columns)
        scores: Tensor = self.score(q, k)
        bias = self.position.bias(q, mask)
        if bias is not None:
            scores = scores + bias
        allowed = mask.as_bool()
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def weigh(self, weights: Tensor, v: Tensor, rows: slice, columns: slice) -> Tensor:
        """weights · v, with dropout and what the position adds to values."""
        if self.dropout:
            # The same block drops the same weights when the backward pass recomputes it.
            generator = torch.Generator(weights.device)
            generator.manual_seed(self.seed + rows.start * 2**20 + columns.start)
            chance = torch.rand(weights.shape, generator=generator, device=weights.device)
            weights = weights * (chance >= self.dropout) / (1 - self.dropout)
        out = einsum(weights, v, "b h t s, b h s c -> b h t c")
        value_bias = self.position.value_bias(weights, self.mask.block(rows, columns))
        return out if value_bias is None else out + value_bias


def _forward(tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp L."""
    log_sum = q.new_empty(*q.shape[:3], 1)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows in tiles.rows():
        m = torch.full_like(log_sum[:, :, rows], -torch.inf)
        total = torch.zeros_like(m)
        o = torch.zeros_like(out[:, :, rows])
        for columns in tiles.columns(rows):
            scores = tiles.scores(q[:, :, rows], k[:, :, columns], rows, columns)
            highest = torch.maximum(m, scores.amax(-1, keepdim=True))
            # A row without an allowed key so far keeps −∞; exp must not get ∞ − ∞.
            safe = highest.masked_fill(highest == -torch.inf, 0.0)
            p, shrink = (scores - safe).exp(), (m - safe).exp()
            total = shrink * total + p.sum(-1, keepdim=True)
            o = shrink * o + tiles.weigh(p, v[:, :, columns], rows, columns)
            m = highest
        blind = total == 0
        out[:, :, rows] = o / total.masked_fill(blind, 1.0)
        log_sum[:, :, rows] = (m + total.log()).masked_fill(blind, torch.inf)
    return out, log_sum


def _backward(
    tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor
) -> list[Tensor]:
    """The gradients of q, k, v and of the weights of score and position."""
    weights = list(tiles.parameters())
    dq, dk, dv, *d_weights = (torch.zeros_like(x) for x in (q, k, v, *weights))
    for rows in tiles.rows():
        row_sum = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        for columns in tiles.columns(rows):
            with torch.enable_grad():
                q_block, k_block, v_block = (
                    x[:, :, part].detach().requires_grad_()
                    for x, part in ((q, rows), (k, columns), (v, columns))
                )
                scores = tiles.scores(q_block, k_block, rows, columns)
                p = (scores.detach() - log_sum[:, :, rows]).exp().requires_grad_()
                out_block = tiles.weigh(p, v_block, rows, columns)
            dp, dv_block, *d_values = torch.autograd.grad(
                out_block, [p, v_block, *weights], grad[:, :, rows], allow_unused=True
            )
            ds = p.detach() * (dp - row_sum)
            dq_block, dk_block, *d_scores = torch.autograd.grad(
                scores, [q_block, k_block, *weights], ds, allow_unused=True
            )
            dq[:, :, rows] += dq_block
            dk[:, :, columns] += dk_block
            dv[:, :, columns] += dv_block
            for total, *parts in zip(d_weights, d_values, d_scores, strict=True):
                for part in parts:
                    if part is not None:
                        total += part
    return [dq, dk, dv, *d_weights]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor
    ) -> Tensor:
        out: Tensor
        out, log_sum = tiles.compute(_forward, list(weights), q, k, v)
        ctx.tiles = tiles
        ctx.save_for_backward(q, k, v, out, log_sum, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, *weights = ctx.saved_tensors
        weights = [weight.detach().requires_grad_() for weight in weights]
        return None, *ctx.tiles.compute(_backward, weights, q, k, v, out, log_sum, *grads)
