"""Which implementation computes a call of attention: o = softmax(q kᵀ · scale + bias) v.

`BIASED` computes a bias by distance inside the kernel, `DECODE` is for few queries over many keys.
`SDPA` is PyTorch's own and supports every call. Triton may not be installed, so that its kernels
are imported when they run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from einops import repeat
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyheads.kernels.dispatch import HALF_PRECISION, Implementation

HEAD_SIZES = (16, 32, 64, 128)  # channels of a head that our kernels hold in one block
MAX_DECODE_QUERIES = 32  # queries of the heads that share a key/value head
# In order of speed. cuDNN's is the fastest, but if there is a mask, it returns something other than
# zeros for a query without keys.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS_WITHOUT_MASK = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]


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

    def shared_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with as many heads each."""
        heads = self.q.shape[1]
        return self.q, share_heads(self.k, heads), share_heads(self.v, heads)


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads [b g s c] for the groups of query heads that share them [b h s c]."""
    if x.shape[1] == heads:
        return x
    return repeat(x, "b g s c -> b (g r) s c", r=heads // x.shape[1])


def fits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True in half precision with a head size that our kernels hold in one block."""
    return (
        q.dtype in HALF_PRECISION
        and q.dtype == k.dtype == v.dtype
        and k.shape == v.shape
        and q.shape[0] == k.shape[0] > 0
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] in HEAD_SIZES
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


def _run_sdpa(call: AttentionCall) -> Tensor:
    """PyTorch's fused attention, the fastest backend first."""
    q, k, v = call.shared_heads()
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


BIASED = Implementation(_supports_biased, _run_biased, "biased_attention")
DECODE = Implementation(_supports_decode, _run_decode, "decode_attention")
SDPA = Implementation[AttentionCall](lambda call: True, _run_sdpa)
ATTENTION = (BIASED, DECODE, SDPA)
