"""Which kernel computes a call of attention.

`BIASED` computes a bias by distance inside the kernel, `DECODE` is for few queries over many keys,
`SHORT` for sequences that fit into one program. `SDPA` is PyTorch's own and supports every call.
Triton may not be installed, so that its kernels are imported when they run.
"""

import torch
from torch import Tensor

from manyheads.kernels.dispatch import HALF_PRECISION, Implementation
from manyheads.kernels.sdpa import SDPA, AttentionCall, Mask

# Head sizes that our kernels hold in one block, and the positions that one program of the
# short-sequence kernel holds: more would not fit into shared memory.
SHORT_LENGTHS = {16: 128, 32: 128, 64: 128, 128: 64}
MAX_DECODE_QUERIES = 32  # queries of the heads that share a key/value head


def fits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True in half precision with a head size that our kernels hold in one block."""
    return (
        q.dtype in HALF_PRECISION
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and q.shape[0] == k.shape[0] > 0
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] in SHORT_LENGTHS
    )


def _supports_biased(call: AttentionCall) -> bool:
    return (
        call.bias_table is not None
        and not call.dropout
        and call.mask.square
        and call.mask.pattern != "other"
        and fits_kernels(call.q, call.k, call.v)
    )


def _run_biased(call: AttentionCall) -> Tensor:
    from manyheads.kernels.biased_attention import biased_attention

    assert call.bias_table is not None
    padding_mask = call.mask.padding_mask
    if padding_mask is not None:
        padding_mask = padding_mask.expand(call.q.shape[0], -1)
    causal = call.mask.pattern == "causal"
    return biased_attention(
        *call.shared_heads(), call.bias_table(), padding_mask, causal, call.scale
    )


def _supports_decode(call: AttentionCall) -> bool:
    queries, keys = call.q.shape[2], call.k.shape[2]
    return (
        call.bias is None
        and not call.dropout
        and not torch.is_grad_enabled()
        and fits_kernels(call.q, call.k, call.v)
        and queries < keys
        and call.q.shape[1] // call.k.shape[1] * queries <= MAX_DECODE_QUERIES
    )


def _run_decode(call: AttentionCall) -> Tensor:
    from manyheads.kernels.decode_attention import decode_attention

    out: Tensor = decode_attention(call.q, call.k, call.v, call.mask.as_bool(), call.scale)
    return out


def fits_short(batch: int, queries: int, keys: int, head_dim: int, mask: Mask) -> bool:
    """True if a program of the short-sequence kernel holds a head, and knows the mask."""
    padding_mask = mask.padding_mask
    return (
        max(queries, keys) <= SHORT_LENGTHS.get(head_dim, 0)
        and mask.pattern != "other"
        and (padding_mask is None or padding_mask.shape[0] in (1, batch))
    )


def short_selftest(dropout: float) -> str:
    """The name of the self-test of the short-sequence kernel with this dropout."""
    return "short_attention_dropout" if dropout else "short_attention"


def short_settings(
    mask: Mask, scale: float, dropout: float, device: torch.device
) -> tuple[Tensor | None, bool, float, Tensor | None, float]:
    """The arguments of the short-sequence kernels after q, k and v."""
    seed = torch.randint(2**62, (1,), device=device) if dropout else None
    return mask.padding_mask, mask.pattern == "causal", scale, seed, dropout


def _supports_short(call: AttentionCall) -> bool:
    batch, _, queries, head_dim = call.q.shape
    return (
        call.bias is None
        and fits_kernels(call.q, call.k, call.v)
        and fits_short(batch, queries, call.k.shape[2], head_dim, call.mask)
    )


def _run_short(call: AttentionCall) -> Tensor:
    from manyheads.kernels.short_attention import short_attention

    settings = short_settings(call.mask, call.scale, call.dropout, call.q.device)
    out: Tensor = short_attention(*call.shared_heads(), *settings)
    return out


BIASED = Implementation("biased_attention", _supports_biased, _run_biased, "biased_attention")
DECODE = Implementation("decode_attention", _supports_decode, _run_decode, "decode_attention")
SHORT = Implementation(
    "short_attention",
    lambda call: not call.dropout and _supports_short(call),
    _run_short,
    short_selftest(0.0),
)
SHORT_DROPOUT = Implementation(
    "short_attention_dropout",
    lambda call: call.dropout > 0 and _supports_short(call),
    _run_short,
    short_selftest(0.1),
)
ATTENTION = (BIASED, DECODE, SHORT, SHORT_DROPOUT, SDPA)
