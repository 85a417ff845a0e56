"""Attention by PyTorch, which supports every call.

o = softmax(q kᵀ · scale + bias) v
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


# In order of speed. cuDNN's is the fastest, but if there is a mask, it returns something other than
# zeros for a query without keys.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BACKENDS_WITHOUT_MASK = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]


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


SDPA = Implementation[AttentionCall]("sdpa", lambda call: True, _run_sdpa)
