"""Self-tests: every kernel compared with its formula in float64, on the device that will run it.

A case is a generator of pairs (result, reference) for given sizes. `SELFTESTS` lists the sizes with
which a kernel must pass before it is used on a device: the variants that are compiled separately,
with the smallest and the largest blocks. `tests/kernels/` runs the same cases with more sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels import gemv as gemv_module
from manyheads.kernels.append_attention import append_attention
from manyheads.kernels.attention import SHORT_LENGTHS
from manyheads.kernels.biased_attention import biased_attention
from manyheads.kernels.decode_attention import decode_attention
from manyheads.kernels.dispatch import ACTIVATION_KINDS, Comparison
from manyheads.kernels.gemv import gemv, norm_row
from manyheads.kernels.kv_write import write_kv
from manyheads.kernels.linear_cross_entropy import cross_entropy_grad_by_torch
from manyheads.kernels.mlp import fused_mlp
from manyheads.kernels.short_attention import short_attention, short_projected
from manyheads.kernels.softmax_grad import cross_entropy_grad
from manyheads.kernels.topk import logsumexp, topk

Lengths = tuple[int, ...] | None  # of padded sequences
SCALE, EPS = 0.2, 0.1  # of attention scores, of norms
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}


class Inputs:
    """Random tensors on a device; their sizes and order determine the values."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(1)

    def randn(self, *shapes: Sequence[int], dtype: torch.dtype | None = None) -> list[Tensor]:
        settings: Any = {"generator": self.generator, "device": self.device}
        return [torch.randn(*shape, dtype=dtype or self.dtype, **settings) for shape in shapes]


def compare(
    kernel: Callable[..., Any], formula: Callable[..., Any], inputs: Sequence[Tensor]
) -> Iterator[Comparison]:
    """Outputs and gradients of a kernel, and of its formula computed in float64."""
    rounded = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results, expected = kernel(*rounded), formula(*exact)
    if isinstance(results, Tensor):
        results, expected = [results], [expected]
    grads_out = [torch.linspace(-2, 1, x.numel()).sin().view(x.shape).to(x) for x in results]
    yield from zip(results, expected, strict=True)
    yield from zip(
        torch.autograd.grad(results, rounded, grads_out),
        torch.autograd.grad(expected, exact, [x.double() for x in grads_out]),
        strict=True,
    )


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Any = 0.0, dropout: Any = 1.0
) -> Tensor:
    """(softmax(q kᵀ · scale + bias) ∘ dropout) v over allowed pairs; 0 for a query without keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE + bias
    if allowed is None:
        return (scores.softmax(-1) * dropout) @ v
    empty = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
    return (weights.masked_fill(empty, 0.0) * dropout) @ v


def _masks(
    new: Inputs, shape: tuple[int, int], causal: bool, lengths: Lengths
) -> tuple[Tensor | None, Tensor]:
    """The padding mask [b s] of sequences of these lengths, and the allowed pairs [b 1 t s]."""
    allowed = torch.ones(shape, dtype=torch.bool, device=new.device)[None, None]
    allowed = allowed.tril() if causal else allowed
    if lengths is None:
        return None, allowed
    ends = torch.tensor(lengths, device=new.device)[:, None]
    padding_mask = torch.arange(shape[1], device=new.device) < ends
    return padding_mask, allowed & padding_mask[:, None, None]


def _merge_heads(x: Tensor) -> Tensor:
    """[b h n c] as [b n hc]."""
    return x.transpose(1, 2).flatten(2)


def dropout_mask(q: Tensor, k: Tensor, seed: Tensor, p: float) -> Tensor:
    """Of a call of `short_attention` [b h t s], found by scale 0 and unit vectors as values."""
    rows, heads, length, width = k.shape
    units = torch.eye(length, -(-length // width) * width, device=k.device, dtype=k.dtype)
    weights = [
        short_attention(q, k, unit.expand(rows, heads, -1, -1), None, False, 0.0, seed, p)
        for unit in units.split(width, -1)
    ]
    return (torch.cat(weights, -1)[..., :length] != 0).double() / (1 - p)


def _check_dropped(mask: Tensor, p: float) -> None:
    dropped, tolerance = (mask == 0).double().mean(), 0.05 + mask.numel() ** -0.5
    if not (dropped - p).abs() < tolerance:
        raise ValueError(f"dropout drops {dropped:.2f} instead of {p}")


def short_attention_case(
    new: Inputs, queries: int, keys: int, width: int, causal: bool, lengths: Lengths, p: float
) -> Iterator[Comparison]:
    """By heads, on the projections q and [k v], and on [q k v]."""
    q, k, v = (
        x.transpose(1, 2) for x in new.randn(*((2, n, 2, width) for n in (queries, keys, keys)))
    )
    padding_mask, allowed = _masks(new, (queries, keys), causal, lengths)
    dropout, seed = torch.ones((), device=new.device), None
    if p:
        seed = torch.ones(1, dtype=torch.int64, device=new.device)
        dropout = dropout_mask(q, k, seed, p)
        _check_dropped(dropout, p)
    settings = padding_mask, causal, SCALE, seed, p

    def by_heads(*qkv: Tensor) -> Any:
        return short_attention(*qkv, *settings)

    def separate(q: Tensor, k: Tensor, v: Tensor) -> Any:
        memory = torch.cat([_merge_heads(k), _merge_heads(v)], -1)
        out = short_projected(_merge_heads(q), memory, 2, *settings)
        return out.unflatten(-1, (2, -1)).transpose(1, 2)

    def joint(*qkv: Tensor) -> Any:
        out = short_projected(torch.cat([_merge_heads(x) for x in qkv], -1), None, 2, *settings)
        return out.unflatten(-1, (2, -1)).transpose(1, 2)

    for kernel in (by_heads, separate, joint) if queries == keys else (by_heads, separate):
        yield from compare(
            kernel, lambda q, k, v: attention_formula(q, k, v, allowed, dropout=dropout), (q, k, v)
        )


def biased_attention_case(
    new: Inputs, length: int, width: int, causal: bool, lengths: Lengths
) -> Iterator[Comparison]:
    """With the gradient of the table of biases."""
    q, k, v = new.randn(*[(2, 2, length, width)] * 3)
    [table] = new.randn((2, 2 * length - 1), dtype=torch.float32)
    padding_mask, allowed = _masks(new, (length, length), causal, lengths)
    at = torch.arange(length, device=new.device)
    distances = at - at[:, None] + length - 1

    def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attention_formula(q, k, v, allowed, bias=table[:, distances])

    yield from compare(
        lambda q, k, v, table: biased_attention(q, k, v, table, padding_mask, causal, SCALE),
        formula,
        (q, k, v, table),
    )


@torch.no_grad()
def decode_attention_case(
    new: Inputs, rows: int, heads: int, groups: int, queries: int, keys: int, mask_sizes: Lengths
) -> Iterator[Comparison]:
    """Over a part of a larger cache, with a mask for (1 or all rows, 1 or all queries) or none."""
    shapes = (rows, queries, heads, 32), *[(rows, groups, keys + 7, 32)] * 2
    q, k, v = new.randn(*shapes)
    q, k, v, mask = q.transpose(1, 2), k[:, :, :keys], v[:, :, :keys], None
    if mask_sizes is not None:
        mask = new.randn((mask_sizes[0], 1, mask_sizes[1], keys))[0] < 0.3
        mask[..., keys // 3 * 2 :] = False  # slots that are not filled
        mask[0, 0, 0] &= mask_sizes[0] == 1  # a query without keys
    expected = attention_formula(q.double(), k.double(), v.double(), mask)
    yield decode_attention(q, k, v, mask, SCALE), expected


@torch.no_grad()
def append_attention_case(
    new: Inputs, rows: int, heads: int, groups: int, width: int, slots: int
) -> Iterator[Comparison]:
    """Output, caches and counter at several positions, between two dependent launches."""
    channels, cache = heads * width, (rows, groups, slots, width)
    before, after, *caches = new.randn((channels, 64), (64, channels), cache, cache)
    counter = torch.zeros(rows * heads, device=new.device, dtype=torch.int32)
    for at in sorted({0, 1, 15, 16, 31, 40, slots - 60, slots - 1} & {*range(slots)}):
        for x in caches:
            x[:, :, at:] = torch.nan  # slots that are not filled are never read
        x, k, v = new.randn((1, 64), *[(rows, groups, 1, width)] * 2)
        position = torch.tensor([at], device=new.device)
        past = [
            torch.cat([x[:, :, :at], last], 2).double()
            for x, last in zip(caches, (k, v), strict=True)
        ]
        q = gemv(x / 8, before, None, -1, None).view(1, heads, 1, width).expand(rows, -1, -1, -1)
        out = append_attention(q, k, v, caches[0], caches[1], position, counter, SCALE)
        product = gemv(out[:1].flatten(1) / 8, after, None, -1, None)
        expected = attention_formula(q.double(), past[0], past[1], None)
        yield out, expected
        yield product, expected[:1].flatten(1) / 8 @ after.double().mT
        yield from ((x[:, :, : at + 1], y) for x, y in zip(caches, past, strict=True))
        for x in caches:
            x[:, :, at + 1 :] = new.randn(x[:, :, at + 1 :].shape)[0]
    yield counter + 1, torch.ones_like(counter)


def write_kv_case(
    new: Inputs, rows: int, groups: int, positions: int, *widths: int
) -> Iterator[Comparison]:
    """Both caches after a write."""
    k, v = (x.transpose(1, 2) for x in new.randn(*((rows, positions, groups, n) for n in widths)))
    caches = [torch.ones(rows, groups, 60, n, device=new.device, dtype=new.dtype) for n in widths]
    slots = (torch.arange(positions, device=new.device) * 37 + 20) % 60
    expected = [x.index_copy(2, slots, last) for x, last in zip(caches, (k, v), strict=True)]
    write_kv(caches[0], caches[1], slots, k, v)
    yield from zip(caches, expected, strict=True)


def mlp_case(new: Inputs, kind: str, *shape: int) -> Iterator[Comparison]:
    """One activation; 72 hidden channels."""

    def formula(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(ACTIVATIONS[kind](F.linear(x, w1, b1)), w2, b2)

    shapes = shape, (72, shape[-1]), (72,), (16, 72), (16,)
    yield from compare(lambda *x: fused_mlp(*x, kind)[0], formula, new.randn(*shapes))


@torch.no_grad()
def gemv_case(new: Inputs, outputs: int, inputs: int) -> Iterator[Comparison]:
    """Products with norms, activations and sums, and a chain of launches."""
    shapes = (1, 1, inputs), (outputs, inputs), (outputs,), (inputs,), (inputs,), (1, 1, outputs)
    x, weight, bias, gain, shift, residual = new.randn(*shapes)
    y, exact, norm_shape = x / inputs**0.5, weight.double().mT, (inputs,)
    yield gemv(x, weight, None, -1, None), x.double() @ exact
    for kind, name in enumerate(ACTIVATION_KINDS):
        product = ACTIVATIONS[name](y.double() @ exact + bias.double())
        yield gemv(y, weight, bias, kind, residual), product + residual.double()
    x = x + 100.0  # a mean far from zero must not cancel the deviation
    layer_norm = F.layer_norm(x.double(), norm_shape, gain.double(), shift.double(), EPS)
    rms_norm = F.rms_norm(x.double(), norm_shape, gain.double(), EPS)
    for expected, bias_or_none in ((layer_norm, shift), (rms_norm, None)):
        yield norm_row(x, gain, bias_or_none, EPS), expected
        if inputs <= gemv_module.MAX_COLUMNS:
            result = gemv(x, weight, None, -1, None, gain, bias_or_none, EPS)
            yield result, expected @ exact
    # A chain: each kernel reads what its predecessor wrote.
    size = min(outputs, inputs)
    row, weight, gain = residual[..., :size], weight[:size, :size].contiguous(), gain[:size]
    expected = row.double()
    for _ in range(5):
        row = gemv(norm_row(row, gain, None, EPS), weight, None, -1, None)
        expected = F.rms_norm(expected, (size,), gain.double(), EPS) @ weight.double().mT
    yield row, expected


def softmax_grad_case(
    new: Inputs, classes: int, padding: int, smoothing: float, scale: float, training: bool
) -> Iterator[Comparison]:
    """Both sums and the gradient; one label is ignored."""
    logits = scale * new.randn((5, classes + padding))[0].float()
    logits[:, classes:] = 5.0
    labels = torch.tensor([3, classes - 1, -1, 0, classes // 2], device=new.device)
    expected = cross_entropy_grad_by_torch(logits.double(), labels, classes, smoothing, training)
    results = cross_entropy_grad(logits.clone(), labels, classes, smoothing, training)
    yield from zip(results[:2], expected[:2], strict=True)
    yield results[2], expected[2] if training else logits


def topk_case(new: Inputs, rows: int, width: int, k: int, ties: bool) -> Iterator[Comparison]:
    """A third of the logits is −∞; rows are not contiguous."""
    z = new.randn((rows, width + 3), dtype=torch.float32)[0][:, :width]
    z = z.round() if ties else z
    z[:, 1::3] = -torch.inf
    values, indices = topk(z, k)
    ordered, order = z.double().sort(dim=-1, descending=True, stable=True)
    yield values.exp(), ordered[:, :k].exp()
    yield indices + 1, order[:, :k] + 1  # ties by the lowest index
    yield logsumexp(z), z.double().logsumexp(-1, keepdim=True)


LARGEST_SHORT = [(n, n, c, True, (n, 13)) for c, n in SHORT_LENGTHS.items() if c >= 64]
SHORT = [(14, 14, 32, True, (14, 13)), (20, 20, 16, True, (20, 13)), *LARGEST_SHORT]
SELFTESTS: dict[str, tuple[Callable[..., Iterator[Comparison]], list[tuple[Any, ...]]]] = {
    "append_attention": (append_attention_case, [(1, 12, 12, 64, 320), (2, 4, 2, 128, 100)]),
    "biased_attention": (
        biased_attention_case,
        [(70, 32, causal, (70, 41)) for causal in (False, True)],
    ),
    "decode_attention": (
        decode_attention_case,
        [(2, 4, 2, 3, 150, None), (2, 4, 2, 3, 150, (2, 3)), (2, 4, 2, 3, 40, None)],
    ),
    "gemv": (gemv_case, [(7, 40), (130, 1100), (60, 4600)]),
    "mlp": (mlp_case, [(kind, 40, 16) for kind in ACTIVATION_KINDS]),
    "short_attention": (short_attention_case, [(*sizes, 0.0) for sizes in SHORT]),
    "short_attention_dropout": (short_attention_case, [(*sizes, 0.25) for sizes in SHORT]),
    "softmax_grad": (softmax_grad_case, [(151, 41, x, 1.0, True) for x in (0.0, 0.1)]),
    "topk": (topk_case, [(5, 3000, 9, False), (20, 70, 9, False)]),
    "write_kv": (write_kv_case, [(3, 2, 5, 24, 40)]),
}


def run_selftest(name: str, device: torch.device) -> list[Comparison]:
    """The results of a kernel in bfloat16, with their references."""
    case, cases = SELFTESTS[name]
    return [comparison for sizes in cases for comparison in case(Inputs(device), *sizes)]
