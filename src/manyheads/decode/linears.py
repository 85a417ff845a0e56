"""Linear layers for decoding: prepacked for a CPU, in int8, or in the form a compiler wants.

`for_inference` returns the model to decode with, a copy that shares all other tensors.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import UserError
from manyheads.nn.layers import ACTIVATIONS, FeedForward, LMHead

M = TypeVar("M", bound=nn.Module)
MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # weight, bias → module for x Wᵀ + b


class UntiedHead(nn.Module):
    """An output head with a linear layer of its own, whatever its weight was tied to."""

    def __init__(self, linear: nn.Module, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, hidden: Float[Tensor, "*n d"], table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return self.linear(hidden if self.scale == 1.0 else hidden * self.scale)


def replace_linears(model: M, make: MakeLinear) -> M:
    """A copy of a decoder that shares all tensors, with other linear layers and output head."""
    head: Any = model.head
    table: Any = getattr(model, "target_table", None) or model.tokens
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    replaced = copy.deepcopy(model, shared)
    for module in list(replaced.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear):
                setattr(module, name, make(part.weight, part.bias))
    replaced.head = UntiedHead(make(head.matrix(table), head.bias), head.scale)
    return replaced


class InferenceLinear(nn.Module):
    """act(x Wᵀ + b) with constant weights; subclasses compute it.

    `activation` is None until `fuse_activations` moves the one behind it inside.
    """

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.activation: str | None = None

    def reference(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


def fuse_activations(model: M, names: tuple[str, ...]) -> M:
    """Let linear layers compute these activations where they follow."""
    for part in model.modules():
        if isinstance(part, FeedForward) and part.activation_name in names:
            assert isinstance(part.inner, InferenceLinear)
            part.inner.activation, part.activation = part.activation_name, _identity
    return model


def _identity(x: Tensor) -> Tensor:
    return x


class UnfusedLinear(InferenceLinear):
    """x Wᵀ, then + b: for one row the compiler generates a kernel for the product and fuses
    what follows; a product with its bias it would leave to a library made for many rows.
    """

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        product = F.linear(x, self.weight)
        return product if self.bias is None else product + self.bias


PREPACK_ROWS = 64  # rows that a prepacked weight is laid out for
MIN_PREPACKED_ROWS, MAX_PREPACKED_ROWS = 32, 1024
LARGE_WEIGHT = 2**18  # elements for which any number of rows pays
MAX_PREPACKED_BYTES = 2**30  # of weights that are held twice
# Activations that oneDNN fuses into a product, and computes faster than PyTorch after it.
ONEDNN_ACTIVATIONS = {"relu": ("relu", ""), "gelu-tanh": ("gelu", "tanh")}


class PrepackedLinear(InferenceLinear):
    """act(x Wᵀ + b) with weights in oneDNN's blocked layout, for a CPU.

    PyTorch keeps one program for each number of rows, so rows are padded to one of few numbers.
    """

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__(weight, bias)
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(self.weight, PREPACK_ROWS)
        self.min_rows = 1 if weight.numel() >= LARGE_WEIGHT else MIN_PREPACKED_ROWS

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        rows = x.numel() // x.shape[-1]
        if not self.min_rows <= rows <= MAX_PREPACKED_ROWS:
            return self.reference(x)
        flat = x.reshape(rows, -1)
        missing = _padded_rows(rows) - rows
        if missing:
            flat = F.pad(flat, (0, 0, 0, missing))
        name, algorithm = ONEDNN_ACTIVATIONS.get(self.activation or "", ("none", ""))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self.blocks, self.bias, name, [], algorithm
        )
        return y[:rows].view(*x.shape[:-1], -1)


def _padded_rows(rows: int) -> int:
    unit = 1 if rows <= 4 else 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // unit) * unit


def _can_prepack(model: nn.Module) -> bool:
    """True in float32 on a CPU with oneDNN, if the weights are not too large to hold twice."""
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
    return (
        torch.backends.mkldnn.is_available()
        and all(x.device.type == "cpu" and x.dtype == torch.float32 for x in model.parameters())
        and sum(4 * x.numel() for x in weights) <= MAX_PREPACKED_BYTES
    )


class _PrepackedCopy:
    """The prepacked copy of a model, for as long as its weights stay the same."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.copy: Any = None

    def get(self, model: M) -> M:
        key = tuple((x.data_ptr(), x._version) for x in model.parameters())
        if key != self.key:
            self.key, self.copy = key, None
            if _can_prepack(model):
                prepacked = replace_linears(model, PrepackedLinear)
                self.copy = fuse_activations(prepacked, tuple(ONEDNN_ACTIVATIONS))
        return model if self.copy is None else self.copy


_PREPACKED: WeakKeyDictionary[nn.Module, _PrepackedCopy] = WeakKeyDictionary()


def for_inference(model: M, *, rows: int, compiled: bool = False) -> M:
    """The model to decode with: the model itself, or a copy with faster linear layers.

    On a CPU they are prepacked; on a GPU a step of one row (`rows`) has a kernel of its own, or
    is left to the compiler if steps are `compiled`.
    """
    device = next(model.parameters()).device
    if torch.is_autocast_enabled(device.type) or not isinstance(model.head, LMHead):
        return model  # autocast changes the dtype in PyTorch's own products only
    if device.type == "cpu":
        return _PREPACKED.setdefault(model, _PrepackedCopy()).get(model)
    if device.type != "cuda":
        return model
    from manyheads.optimize import has_gemv, optimize, with_gemv

    optimize(model)
    if rows != 1:
        return model
    if has_gemv(model):
        return with_gemv(model)
    return replace_linears(model, UnfusedLinear) if compiled else model


class Int8Linear(nn.Module):
    """x Wᵀ + b in int8 with one scale for each row of x and of W, for a CPU.

        x ≈ s_x x̂,  x̂ = round(x / s_x),  s_x = max|x| / 127,    x Wᵀ ≈ (x̂ Ŵᵀ) s_x s_W

    A row has its own scale, so results do not depend on the rest of the batch.
    """

    matrix: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        matrix, scale = quantize_int8(weight.detach())
        self.register_buffer("matrix", matrix.T.contiguous())  # column-major, as the kernel reads
        self.register_buffer("scale", scale[:, 0].contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        rows, scale = quantize_int8(x.flatten(0, -2))
        y = torch._int_mm(rows, self.matrix).to(x.dtype).mul_(scale).mul_(self.scale)
        if self.bias is not None:
            y.add_(self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def quantize_int8(x: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor]:
    """Integers from −127 to 127, and the scale of each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(127)
    return (x / scale).round_().to(torch.int8), scale


def to_int8(model: M) -> M:
    """A copy of a decoder with every linear layer and its output in int8."""
    table = getattr(model, "target_table", getattr(model, "tokens", None))
    if not isinstance(getattr(model, "head", None), LMHead) or not isinstance(table, nn.Embedding):
        raise UserError("--int8 needs a translator or a language model: remove --int8")
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise UserError(f"--int8 runs on a CPU, not on {device}: use --device cpu, or remove it")
    return replace_linears(model, Int8Linear)
