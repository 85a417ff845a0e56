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
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import HeadOutput


@dataclass(frozen=True)
class Tiled(ExactAttention):
    """Attention block by block; any score, mask rule and position, any device."""

    block: Annotated[Count, "Queries and keys of a block"] = 512
    kind: ClassVar[str] = "tiled"

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        seed = int(torch.randint(2**62, ())) if inputs.dropout else 0
        parts = _Parts(inputs.score, inputs.position)
        tiles = _Tiles(inputs.mask, parts, inputs.dropout, seed, self.block)
        k, v = (ops.share_heads(x, inputs.q.shape[1]) for x in (inputs.k, inputs.v))
        return _TiledAttention.apply(tiles, inputs.q, k, v, *parts.parameters())  # type: ignore[no-untyped-call]


def _precise(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


class _Parts(nn.Module):
    """Score and position in one module, so that `functional_call` can replace their weights."""

    def __init__(self, score: Score, position: Position) -> None:
        super().__init__()
        self.score = score
        self.position = position

    def forward(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        return compute(*inputs)


@dataclass(frozen=True)
class _Tiles:
    """The computations of one block that the forward and the backward pass share."""

    mask: AttentionMask
    parts: _Parts
    dropout: float
    seed: int
    block: int

    def precisely(
        self, compute: Callable[..., Any], weights: list[Tensor], q: Tensor, *inputs: Any
    ) -> Any:
        """compute(weights, q, …) without autocast, with these weights of score and position."""
        names = [name for name, _ in self.parts.named_parameters()]
        state = {name: _precise(buffer) for name, buffer in self.parts.named_buffers()}
        state |= zip(names, weights, strict=True)
        with ops.full_precision(q):
            return functional_call(self.parts, state, (compute, self, weights, q, *inputs))

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
        scores: Tensor = self.parts.score(q, k)
        bias = self.parts.position.bias(q, mask)
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
        value_bias = self.parts.position.value_bias(weights, self.mask.block(rows, columns))
        return out if value_bias is None else out + value_bias


def _forward(
    tiles: _Tiles, weights: list[Tensor], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp L, both in the precision of the sums."""
    log_sum = q.new_empty(*q.shape[:3], 1, dtype=torch.promote_types(q.dtype, torch.float32))
    out = log_sum.new_empty(*q.shape[:3], v.shape[-1])
    for rows in tiles.rows():
        q_block = _precise(q[:, :, rows])
        m = torch.full_like(log_sum[:, :, rows], -torch.inf)
        total = torch.zeros_like(m)
        o = torch.zeros_like(out[:, :, rows])
        for columns in tiles.columns(rows):
            k_block, v_block = _precise(k[:, :, columns]), _precise(v[:, :, columns])
            scores = tiles.scores(q_block, k_block, rows, columns)
            highest = torch.maximum(m, scores.amax(-1, keepdim=True))
            # A row without an allowed key so far keeps −∞; exp must not get ∞ − ∞.
            safe = highest.masked_fill(highest == -torch.inf, 0.0)
            p, shrink = (scores - safe).exp(), (m - safe).exp()
            total = shrink * total + p.sum(-1, keepdim=True)
            o = shrink * o + tiles.weigh(p, v_block, rows, columns)
            m = highest
        blind = total == 0
        out[:, :, rows] = o / total.masked_fill(blind, 1.0)
        log_sum[:, :, rows] = (m + total.log()).masked_fill(blind, torch.inf)
    return out, log_sum


def _backward(
    tiles: _Tiles,
    weights: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    grad: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of q, k, v and of the trained weights."""
    trained = [weight for weight in weights if weight.requires_grad]
    dq, dk, dv = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
    d_trained = [torch.zeros_like(weight) for weight in trained]
    for rows in tiles.rows():
        grad_block = _precise(grad[:, :, rows])
        row_sum = (grad_block * out[:, :, rows]).sum(-1, keepdim=True)
        for columns in tiles.columns(rows):
            with torch.enable_grad():
                q_block, k_block, v_block = (
                    _precise(x[:, :, part]).detach().requires_grad_()
                    for x, part in ((q, rows), (k, columns), (v, columns))
                )
                scores = tiles.scores(q_block, k_block, rows, columns)
                p = (scores.detach() - log_sum[:, :, rows]).exp().requires_grad_()
                out_block = tiles.weigh(p, v_block, rows, columns)
            dp, dv_block, *d_values = torch.autograd.grad(
                out_block, [p, v_block, *trained], grad_block, allow_unused=True
            )
            ds = p.detach() * (dp - row_sum)
            dq_block, dk_block, *d_scores = torch.autograd.grad(
                scores, [q_block, k_block, *trained], ds, allow_unused=True
            )
            dq[:, :, rows] += dq_block
            dk[:, :, columns] += dk_block
            dv[:, :, columns] += dv_block
            for total, *parts in zip(d_trained, d_values, d_scores, strict=True):
                for part in parts:
                    if part is not None:
                        total += part
    return [dq, dk, dv], d_trained


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor
    ) -> Tensor:
        precise = [_precise(weight) for weight in weights]
        out, log_sum = tiles.precisely(_forward, precise, q, k, v)
        ctx.tiles = tiles
        ctx.save_for_backward(q, k, v, out, log_sum, *weights)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, *weights = ctx.saved_tensors
        is_trained = ctx.needs_input_grad[4:]
        precise = [
            _precise(weight).detach().requires_grad_(trained)
            for weight, trained in zip(weights, is_trained, strict=True)
        ]
        d_inputs, d_trained = ctx.tiles.precisely(_backward, precise, q, k, v, out, log_sum, *grads)
        remaining = iter(d_trained)
        d_weights = [next(remaining) if trained else None for trained in is_trained]
        # Autograd expects each gradient in the dtype of its input.
        return None, *(
            None if gradient is None else gradient.to(x.dtype)
            for gradient, x in zip([*d_inputs, *d_weights], (q, k, v, *weights), strict=True)
        )
