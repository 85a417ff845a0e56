"""Exact attention with the best kernel for the call.

    o = softmax(q kᵀ · scale + bias) v

`BIASED` computes a bias by distance inside the kernel, `DECODE` is for few queries over many keys,
`SHORT` for sequences that fit into one program, `SDPA` is PyTorch's own for everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyheads.kernels.dispatch import (
    HALF_PRECISION,
    Comparison,
    Implementation,
    runs_triton,
    verified,
)

HEAD_DIMS = (16, 32, 64, 128)  # sizes of a head that our kernels hold in one block
# Positions that one program of the short-sequence kernel holds, by head size: more would not fit
# into shared memory.
SHORT_LENGTHS = {16: 128, 32: 128, 64: 128, 128: 64}
MAX_DECODE_QUERIES = 32  # queries of the heads that share a key/value head


@runtime_checkable
class Mask(Protocol):
    """What kernels need to know of an attention mask (nn.masks.AttentionMask)."""

    square: bool
    padding_mask: Tensor | None

    @property
    def pattern(self) -> str: ...

    def is_causal(self) -> bool: ...

    def as_bool(self) -> Tensor | None: ...

    def as_bias(self, dtype: torch.dtype) -> Tensor | None: ...


@dataclass(frozen=True)
class AttentionCall:
    """q [b h t c], k [b g s c], v [b g s c]; h heads share g key/value heads.

    `bias` computes what is added to the scores [b h t s]; `bias_table` the same by distance
    [h 2n−1], for biases that depend on the distance only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Callable[[], Tensor | None] | None
    bias_table: Callable[[], Tensor] | None
    scale: float
    dropout: float


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads [b g s c] for the groups of query heads that share them [b h s c]."""
    if x.shape[1] == heads:
        return x
    return repeat(x, "b g s c -> b (g r) s c", r=heads // x.shape[1])


def _supports_biased(call: AttentionCall) -> bool:
    q = call.q
    return (
        call.bias_table is not None
        and not call.dropout
        and runs_triton(q)
        and q.dtype in HALF_PRECISION
        and call.mask.square
        and call.mask.pattern != "other"
        and q.shape[-1] in HEAD_DIMS
        and call.k.shape[-1] == q.shape[-1]
    )


def _run_biased(call: AttentionCall) -> Tensor:
    from manyheads.kernels.biased_attention import biased_attention

    assert call.bias_table is not None
    heads, padding_mask = call.q.shape[1], call.mask.padding_mask
    if padding_mask is not None:
        padding_mask = padding_mask.expand(call.q.shape[0], -1)
    k, v = share_heads(call.k, heads), share_heads(call.v, heads)
    causal = call.mask.pattern == "causal"
    return biased_attention(call.q, k, v, call.bias_table(), padding_mask, causal, call.scale)


def _selftest_biased(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.biased_attention import selftest

    return selftest(device)


def _supports_decode(call: AttentionCall) -> bool:
    q, k, v = call.q, call.k, call.v
    return (
        call.bias is None
        and not call.dropout
        and runs_triton(q)
        and not torch.is_grad_enabled()
        and q.dtype in HALF_PRECISION
        and q.dtype == k.dtype == v.dtype
        and q.shape[0] > 0
        and k.shape == v.shape
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] in HEAD_DIMS
        and q.shape[2] < k.shape[2]
        and q.shape[1] // k.shape[1] * q.shape[2] <= MAX_DECODE_QUERIES
    )


def _run_decode(call: AttentionCall) -> Tensor:
    from manyheads.kernels.decode_attention import decode_attention

    out: Tensor = decode_attention(call.q, call.k, call.v, call.mask.as_bool(), call.scale)
    return out


def _selftest_decode(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.decode_attention import selftest

    return selftest(device)


def supports_short(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
    """True if the kernel for short sequences takes these heads; k and v have as many as q."""
    padding_mask = mask.padding_mask
    return (
        runs_triton(q)
        and q.dtype in HALF_PRECISION
        and q.dtype == k.dtype == v.dtype
        and q.shape[0] > 0
        and q.shape[0] == k.shape[0]
        and k.shape == v.shape
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] in HEAD_DIMS
        and max(q.shape[2], k.shape[2]) <= SHORT_LENGTHS[q.shape[-1]]
        and mask.pattern != "other"
        and (padding_mask is None or padding_mask.shape[0] in (1, q.shape[0]))
    )


def short_settings(
    q: Tensor, mask: Mask, scale: float, dropout: float
) -> tuple[Tensor | None, bool, float, Tensor | None, float]:
    """The arguments of the short-sequence kernels after q, k and v."""
    seed = torch.randint(2**62, (1,), device=q.device) if dropout else None
    return mask.padding_mask, mask.pattern == "causal", scale, seed, dropout


def _supports_short(call: AttentionCall) -> bool:
    return (
        call.bias is None and not call.dropout and supports_short(call.q, call.k, call.v, call.mask)
    )


def _supports_short_dropout(call: AttentionCall) -> bool:
    return (
        call.bias is None and call.dropout > 0 and supports_short(call.q, call.k, call.v, call.mask)
    )


def _run_short(call: AttentionCall) -> Tensor:
    from manyheads.kernels.short_attention import short_attention

    heads = call.q.shape[1]
    k, v = share_heads(call.k, heads), share_heads(call.v, heads)
    settings = short_settings(call.q, call.mask, call.scale, call.dropout)
    out: Tensor = short_attention(call.q, k, v, *settings)
    return out


def _selftest_short(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.short_attention import selftest

    return selftest(device)


def _selftest_short_dropout(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.short_attention import selftest_dropout

    return selftest_dropout(device)


# In order of speed. cuDNN's is the fastest, but gives a query that attends to nothing something
# other than zeros if there is a mask.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS_WITHOUT_MASK = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]


def _run_sdpa(call: AttentionCall) -> Tensor:
    """PyTorch's fused attention, the fastest backend first."""
    q, heads = call.q, call.q.shape[1]
    k, v = share_heads(call.k, heads), share_heads(call.v, heads)
    bias = None if call.bias is None else call.bias()
    is_causal = bias is None and call.mask.is_causal()
    if bias is None:
        mask = None if is_causal else call.mask.as_bias(q.dtype)
    else:
        allowed = call.mask.as_bool()
        mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    settings: dict[str, Any] = {
        "dropout_p": call.dropout,
        "is_causal": is_causal,
        "scale": call.scale,
    }
    if q.device.type == "cpu" and q.dtype in HALF_PRECISION and torch.is_grad_enabled():
        # The CPU's backward pass takes three times as long in half precision.
        settings["attn_mask"] = None if mask is None else mask.float()
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **settings)
        return out.to(q.dtype)
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
    backends = BACKENDS_WITHOUT_MASK if mask is None else BACKENDS
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


def _always(call: AttentionCall) -> bool:
    return True


BIASED = Implementation("biased_attention", _supports_biased, _run_biased, _selftest_biased)
DECODE = Implementation("decode_attention", _supports_decode, _run_decode, _selftest_decode)
SHORT = Implementation("short_attention", _supports_short, _run_short, _selftest_short)
SHORT_DROPOUT = Implementation(
    "short_attention_dropout", _supports_short_dropout, _run_short, _selftest_short_dropout
)
SDPA = Implementation("sdpa", _always, _run_sdpa)
ATTENTION = (BIASED, DECODE, SHORT, SHORT_DROPOUT, SDPA)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, sizes: list[int], causal: bool,
    dropout: float, scale: float,
) -> Tensor:  # fmt: skip
    """Sequences of `sizes` one after another in one row [1 h n c], each attending to itself.

    One kernel on a GPU; one sequence after another elsewhere.
    """
    settings: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "scale": scale}
    if q.device.type != "cuda":
        sequences = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*qkv, **settings) for qkv in sequences], 2)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    jagged = [
        torch.nested.nested_tensor_from_jagged(
            rearrange(x, "1 h n c -> n h c").contiguous(), offsets, max_seqlen=max(sizes)
        ).transpose(1, 2)
        for x in (q, k, v)
    ]
    out = F.scaled_dot_product_attention(*jagged, **settings)
    return rearrange(out.transpose(1, 2).values(), "n h c -> 1 h n c")


def has_short_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """True if the short-sequence kernel takes these heads and passed its self-test here."""
    name = SHORT_DROPOUT.name if dropout else SHORT.name
    return supports_short(q, k, v, mask) and verified(name, q.device.index)
