"""The operations of a decoding step that have a kernel on a GPU, each with its fallback."""

import weakref
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.kernels.dispatch import HALF, TRITON, trusted
from manyheads.nn.arranged import Arrangement
from manyheads.nn.embedding import Head
from manyheads.nn.exact_attention import CHANNELS
from manyheads.nn.replaced import Separate, with_products_of

MAX_TOPK = 32  # up to here our kernel is faster
MAX_WRITES = 32  # hypotheses whose keys and values one program of our kernel holds
_PREPACKED: "weakref.WeakKeyDictionary[nn.Module, Arrangement]" = weakref.WeakKeyDictionary()


def logsumexp(logits: Float[Tensor, "rows v"]) -> Float[Tensor, "rows 1"]:
    """log Σ exp of each row, in float32 at least."""
    if has_fused_topk(logits):
        from manyheads.kernels.topk import log_mass

        total: Tensor = log_mass(logits)
        return total
    if logits.device.type == "cpu":  # a softmax has the faster exponentials there
        top, share = logits.amax(-1, keepdim=True), logits.log_softmax(-1).amax(-1, keepdim=True)
        return top - share
    return logits.logsumexp(-1, keepdim=True)


def topk(
    values: Float[Tensor, "rows v"], k: int
) -> tuple[Float[Tensor, "rows w"], Int[Tensor, "rows w"]]:
    """The k greatest of each row in order, and their indices; ties in any order."""
    if k <= MAX_TOPK and has_fused_topk(values):
        from manyheads.kernels.topk import foremost

        best, index = foremost(values, k)
        return best, index
    best, index = values.topk(k, dim=-1)
    return best, index


def argmax(logits: Float[Tensor, "rows v"]) -> Int[Tensor, " rows"]:
    """The index of the greatest of each row; of equal ones the first."""
    return topk(logits, 1)[1][:, 0] if has_fused_topk(logits) else logits.argmax(-1)


def has_fused_topk(values: Tensor) -> bool:
    """True if our kernels compute `logsumexp` and `topk` of these rows; they give float32."""
    return (
        values.device.type == "cuda"
        and values.dtype in (torch.float32, *HALF)
        and len(values) > 0
        and TRITON
        and trusted("topk", values.device.index)
    )


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """keys[:, :, slots] = k, values[:, :, slots] = v."""
    if (
        k.device.type == "cuda"
        and k.shape[2] <= MAX_WRITES
        and not torch.is_grad_enabled()
        and TRITON
        and trusted("kv_write", k.device.index)
    ):
        from manyheads.kernels.kv_write import place

        place(keys, values, slots, k, v)
        return
    keys.index_copy_(2, slots, k.to(keys.dtype))
    values.index_copy_(2, slots, v.to(values.dtype))


def append_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    counter: Tensor,
    scale: float,
) -> Tensor | None:
    """`write_kv` of one position and attention to all up to it; None where no kernel does both."""
    if (
        q.device.type != "cuda"
        or q.shape[2] != 1
        or q.dtype not in HALF
        or not q.dtype == k.dtype == v.dtype
        or q.shape[-1] not in CHANNELS
        or k.shape != v.shape
        or q.shape[-1] != k.shape[-1]
        or torch.is_grad_enabled()
        or not TRITON
    ):
        return None
    from manyheads.kernels.append_attention import newest, served

    if not served(q.shape[0], q.shape[1], keys.shape[2]):
        return None
    if not trusted("append_attention", q.device.index):
        return None
    out: Tensor = newest(q, k, v, keys, values, position, counter, scale)
    return out


def for_inference(model: nn.Module, *, rows: int, compiled: bool = False) -> nn.Module:
    """A copy that shares the weights, with the fastest linear layers to decode with.

    On a CPU they are prepacked, on a GPU products of one row have a kernel of their own. Autocast
    wants PyTorch's own products.
    """
    device, head = next(model.parameters()).device, model.head
    if torch.is_autocast_enabled(device.type) or not isinstance(head, Head):
        return model
    if device.type == "cpu":
        table: Any = getattr(model, "target_table", model.tokens)
        return _PREPACKED.setdefault(model, Arrangement()).of(model, table)
    if device.type == "cuda" and rows == 1:
        if TRITON and trusted("gemv", device.index):
            from manyheads.kernels.gemv import for_one_row

            return for_one_row(model)
        return with_products_of(model, Separate) if compiled else model
    return model
