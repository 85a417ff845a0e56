"""Optimisation by class swap: the only module that knows both model parts and kernels.

`optimize` gives the modules of a model on a GPU fused subclasses (`module.__class__ = …`, as
`torch.distributed.fsdp.fully_shard` does it): parameters, `state_dict` names and `isinstance` stay.
A fused subclass checks the call and falls back to `super().forward`. `compile_blocks` and
`checkpoint_blocks` are swaps of the same kind. `with_gemv` returns a copy of a model for decoding
one row.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch_config
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyheads.decode.linears import InferenceLinear, fuse_activations, replace_linears
from manyheads.errors import UserError
from manyheads.kernels.attention import SHORT_LENGTHS, has_short_kernel, short_settings
from manyheads.kernels.dispatch import (
    HALF_PRECISION,
    Comparison,
    has_hooks,
    register_selftest,
    runs_triton,
    verified,
)
from manyheads.nn.attention import Cache, CrossAttention, Fused, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import FeedForward, GatedFeedForward, Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import Hidden

M = TypeVar("M", bound=nn.Module)

MAX_NORM_WIDTH = 4096  # widest row that one program of the norm kernel holds
RECOMPILE_LIMIT = 32  # variants of a block: with and without padding, short and long sequences
ACTIVATION_BUDGET = 0.9  # share of activations kept: one kernel recomputes the feed-forward's
MLP_ACTIVATIONS = ("relu", "gelu", "gelu-tanh")  # that kernels/mlp.py computes


# ---------------------------------------------------------------------------------------------
# Fused modules


def _selftest_qkv(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.qkv import selftest

    return selftest(device)


def _selftest_layer_norm(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.layer_norm import selftest

    return selftest(device)


def _selftest_mlp(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.mlp import selftest

    return selftest(device)


def _selftest_gemv(device: torch.device) -> list[Comparison]:
    from manyheads.kernels.gemv import selftest

    return selftest(device)


register_selftest("qkv", _selftest_qkv)
register_selftest("layer_norm", _selftest_layer_norm)
register_selftest("mlp", _selftest_mlp)
register_selftest("gemv", _selftest_gemv)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _trains_in_half_precision(module: nn.Module, x: Tensor) -> bool:
    """True in training under autocast on a GPU, which is what the training kernels are for."""
    return (
        runs_triton(x)
        and module.training
        and torch.is_autocast_enabled(x.device.type)
        and _compute_dtype(x) in HALF_PRECISION
    )


def _is_plain_attention(module: SelfAttention | CrossAttention, position: Position) -> bool:
    """True for softmax(q kᵀ · scale) v with nothing added to the scores or rotated."""
    return type(module.core) is Fused and type(module.score) is InnerScore and position.is_absolute


def _scale(module: SelfAttention | CrossAttention) -> float:
    assert isinstance(module.score, InnerScore)
    return float(module.score.scale)


class FusedSelfAttention(SelfAttention):
    """Self-attention on the projection [q k v] as it lies in memory.

    Short sequences attend directly in that layout. For long ones a kernel packs the gradients of
    q, k and v into that layout and sums the gradient of the bias on the way.
    """

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        if cache is None and self._supports_packed_grad(x, position):
            q, k, v = self._split_with_packed_grad(x)
            out = self.attend(q, k, v, mask, position)
            return self.output(rearrange(out, "b h t c -> b t (h c)"))
        if cache is not None or not _is_plain_attention(self, position):
            return super().forward(x, mask, position, cache)
        qkv = self.project(x)
        q, k, v = self._heads(qkv)
        dropout = self.config.dropout if self.training else 0.0
        if q.shape[1] == k.shape[1] and has_short_kernel(q, k, v, mask, dropout):
            from manyheads.kernels.short_attention import short_projected

            settings = short_settings(qkv, mask, _scale(self), dropout)
            return self.output(short_projected(qkv, None, self.config.heads, *settings))
        out = self.attend(q, k, v, mask, position)
        return self.output(rearrange(out, "b h t c -> b t (h c)"))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split(self.config.sizes, dim=-1)
        return (
            rearrange(q, "b t (h c) -> b h t c", h=self.config.heads),
            rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads),
            rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads),
        )

    def _supports_packed_grad(self, x: Hidden, position: Position) -> bool:
        config = self.config
        return (
            _trains_in_half_precision(self, x)
            and torch.is_grad_enabled()
            and type(self.core) is Fused
            and position.is_absolute
            and x.shape[1] > SHORT_LENGTHS.get(config.head_dim, 0)
            and x.shape[0] > 0
            and all(size % 16 == 0 for size in (config.head_dim, *config.sizes))
            and config.sizes[1] == config.sizes[2]
            and type(self.project) is nn.Linear
            and self.project.bias is not None
            and not has_hooks(self.project)
            and verified("qkv", x.device.index)
        )

    def _split_with_packed_grad(self, x: Hidden) -> tuple[Tensor, Tensor, Tensor]:
        from manyheads.kernels.qkv import split_qkv

        bias = self.project.bias
        qkv = F.linear(x, self.project.weight, bias.detach())
        return split_qkv(qkv, bias, self.config.heads, self.config.kv_heads)


class FusedCrossAttention(CrossAttention):
    """Cross-attention on the projections q and [k v] as they lie in memory, if they are short."""

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        if cache is not None or not _is_plain_attention(self, self.position):
            return super().forward(x, memory, mask, cache)
        q_proj, kv_proj = self.query(x), self.project(memory)
        q = rearrange(q_proj, "b t (h c) -> b h t c", h=self.config.heads)
        k, v = self._heads(kv_proj)
        dropout = self.config.dropout if self.training else 0.0
        mask = mask.for_cross_attention(q.shape[2])
        if q.shape[1] == k.shape[1] and has_short_kernel(q, k, v, mask, dropout):
            from manyheads.kernels.short_attention import short_projected

            settings = short_settings(q_proj, mask, _scale(self), dropout)
            return self.output(short_projected(q_proj, kv_proj, self.config.heads, *settings))
        out = self.attend(q, k, v, mask)
        return self.output(rearrange(out, "b h t c -> b t (h c)"))

    def _heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.split(self.config.sizes[1:], dim=-1)
        return (
            rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads),
            rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads),
        )


class FusedFeedForward(FeedForward):
    """A feed-forward whose backward pass recomputes the activation in one kernel."""

    def forward(self, x: Hidden) -> Hidden:
        if not self._supports_kernel(x):
            return super().forward(x)
        from manyheads.kernels.mlp import fused_mlp

        dtype = _compute_dtype(x)
        weights = (self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias)
        y: Tensor = fused_mlp(
            x.to(dtype), *(weight.to(dtype) for weight in weights), self.activation_name
        )[0]
        return y

    def _supports_kernel(self, x: Hidden) -> bool:
        linears = (self.inner, self.outer)
        return (
            _trains_in_half_precision(self, x)
            and not (self.dropout.p and self.dropout.training)
            and self.activation_name in MLP_ACTIVATIONS
            and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
            and not has_hooks(*linears, self.dropout)
            and verified("mlp", x.device.index)
        )


def _supports_norm_kernel(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> bool:
    """True in training or eager inference on a GPU in half precision.

    A compiled inference step is left to PyTorch, which fuses more than the sum and the norm.
    """
    eager_inference = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return (
        runs_triton(x)
        and (norm.training or eager_inference)
        and dtype in HALF_PRECISION
        and (torch.is_autocast_enabled(x.device.type) or x.dtype == dtype)
        and x.numel() > 0
        and x.shape[-1] % 16 == 0
        and x.shape[-1] <= MAX_NORM_WIDTH
        and isinstance(norm, nn.LayerNorm)
        and norm.bias is not None
        and not has_hooks(norm)
        and verified("layer_norm", x.device.index)
    )


def _prenorm(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> tuple[Hidden, Hidden]:
    """(norm(x) in that dtype, x), with one kernel for the gradients of both."""
    if not (torch.is_grad_enabled() and _supports_norm_kernel(norm, x, _compute_dtype(x))):
        return norm(x), x
    from manyheads.kernels.layer_norm import prenorm

    assert isinstance(norm, nn.LayerNorm)
    return prenorm(x, norm.weight, norm.bias, norm.eps, dtype)


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm with our kernel for its gradients; the last one of a pre-norm stack."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and _supports_norm_kernel(self, x, _compute_dtype(x))):
            return super().forward(x)
        from manyheads.kernels.layer_norm import prenorm

        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        return prenorm(x, self.weight, self.bias, self.eps, dtype)[0]


class FusedResidual(Residual):
    """Dropout, sum and norm in one kernel, forward and backward.

    In compiled blocks the sum is written in the dtype of the matrix products, so that PyTorch
    need not convert back and forth.
    """

    def forward(self, x: Hidden, f: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            normed, x = _prenorm(self.norm, x, _compute_dtype(x))
            x = x + self.dropout(f(normed))
        else:
            update = f(x)
            if self._supports_kernel(x, update):
                return self._add_norm(x.to(_compute_dtype(x)), update)
            x = self.norm(x + self.dropout(update))
        return x.to(_compute_dtype(x)) if torch.compiler.is_compiling() else x

    def _supports_kernel(self, x: Hidden, update: Hidden) -> bool:
        return (
            x.shape == update.shape
            and not has_hooks(self.dropout)
            and _supports_norm_kernel(self.norm, x, update.dtype)
        )

    def _add_norm(self, x: Hidden, update: Hidden) -> Hidden:
        from manyheads.kernels.layer_norm import add_norm

        p = self.dropout.p if self.dropout.training else 0.0
        seed = torch.randint(2**62, (1,), device=x.device) if p else None
        y: Hidden = add_norm(x, update, self.norm.weight, self.norm.bias, seed, p, self.norm.eps)[0]
        return y


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedSelfAttention,
    CrossAttention: FusedCrossAttention,
    FeedForward: FusedFeedForward,
    Residual: FusedResidual,
}


def optimize(model: nn.Module) -> None:
    """Swap the classes of modules on a GPU for fused ones, in place; elsewhere do nothing."""
    weight = next(model.parameters(), None)
    if weight is None or not runs_triton(weight):
        return
    for module in model.modules():
        if type(module) in FUSED:
            module.__class__ = FUSED[type(module)]
        if isinstance(module, Stack) and type(module.last_norm) is nn.LayerNorm:
            module.last_norm.__class__ = FusedLayerNorm


# ---------------------------------------------------------------------------------------------
# Compilation and activation checkpointing


def _uses_dropout(stack: Stack) -> bool:
    return any(
        part.p if isinstance(part, nn.Dropout) else part.config.dropout
        for part in stack.modules()
        if isinstance(part, nn.Dropout | SelfAttention | CrossAttention)
    )


class CompiledStack(Stack):
    """A stack whose blocks are compiled one by one: the first takes seconds and serves for all.

    Activations that are cheap to recompute are not kept, unless there is dropout (PyTorch 2.13
    would draw another mask when it recomputes) or our kernels run (they keep little already).
    """

    budget: float | None

    def forward(self, x: Hidden, *inputs: Any, **named: Any) -> Hidden:
        import torch._dynamo.config as dynamo_config  # takes seconds

        budget = functorch_config.activation_memory_budget if self.budget is None else self.budget
        with (
            dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT),
            functorch_config.patch(activation_memory_budget=budget),
        ):
            # In the dtype in which every later block gets its input, so that one graph serves all.
            return super().forward(x.to(_compute_dtype(x)), *inputs, **named)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of every stack, in place."""
    for stack in list(model.modules()):
        if not isinstance(stack, Stack):
            continue
        fused_mlp = any(
            isinstance(part, FusedFeedForward) and part.activation_name in MLP_ACTIVATIONS
            for part in stack.modules()
        )
        stack.__class__ = CompiledStack
        stack.budget = None if fused_mlp or _uses_dropout(stack) else ACTIVATION_BUDGET  # type: ignore[assignment]
        for module in stack.modules():
            if type(module) is Residual:
                module.__class__ = FusedResidual
        for block in stack.blocks:
            block.compile()


class CheckpointedBlock(Block):
    """Activation checkpointing: keep the input only and recompute the rest for the backward."""

    preserve_rng_state: bool

    def __call__(self, x: Hidden, *inputs: Any) -> Hidden:
        # Around the call and not inside `forward`, which may be compiled.
        if not torch.is_grad_enabled():
            return super().__call__(x, *inputs)
        return checkpoint(
            partial(_with_fresh_masks, super().__call__),
            x,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
        )

    @property
    def has_host_sync(self) -> bool:
        """The state of the random generator is read by the host to draw the same dropout again."""
        return self.preserve_rng_state


def _with_fresh_masks(block: Callable[..., Hidden], *inputs: Any) -> Hidden:
    """Masks without cached tensors, so that the second pass computes what the first one did."""
    return block(*(replace(x) if isinstance(x, AttentionMask) else x for x in inputs))


def checkpoint_blocks(model: nn.Module) -> None:
    """Activation checkpointing for every block of a model, in place."""
    stacks = [part for part in model.modules() if isinstance(part, Stack)]
    if not stacks:
        raise UserError(
            "train.activation_checkpointing needs a model with Transformer blocks, and this one "
            "has none: remove it"
        )
    for stack in stacks:
        preserve_rng_state = _uses_dropout(stack)
        for block in stack.blocks:
            block.__class__ = CheckpointedBlock
            block.preserve_rng_state = preserve_rng_state  # type: ignore[assignment]


def can_capture(model: nn.Module) -> bool:
    """True if a pass can be captured as a CUDA graph: no module synchronises with the host."""
    parts = [(part, getattr(part, "core", None)) for part in model.modules()]
    return not any(getattr(x, "has_host_sync", False) for pair in parts for x in pair)


# ---------------------------------------------------------------------------------------------
# Decoding one row


class GemvLinear(InferenceLinear):
    """act(norm(x) Wᵀ + b) + residual by our kernel if x is one row.

    `norm` moves here from the residual connection; `residual` is lent by `FusedResidualAdd`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self.norm: nn.Module | None = None
        self.residual: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not _is_one_row(x, self.weight):
            y = self.reference(x if self.norm is None else self.norm(x))
            return y if self.residual is None else self.residual + y
        from manyheads.kernels.gemv import gemv
        from manyheads.kernels.mlp import ACTIVATION_KINDS

        fused_norm = self._fused_norm()
        if self.norm is not None and not fused_norm:
            x = _norm_one_row(self.norm, x)
        kind = -1 if self.activation is None else ACTIVATION_KINDS.index(self.activation)
        y = gemv(x, self.weight, self.bias, kind, self.residual, *fused_norm)
        return y

    def _fused_norm(self) -> tuple[Any, ...]:
        """Weight, bias and ε of the norm if the matrix is small enough to compute it inside."""
        from manyheads.kernels.gemv import MAX_COLUMNS, MAX_FUSED_NORM_ELEMENTS

        norm: Any = self.norm
        small = self.weight.numel() <= MAX_FUSED_NORM_ELEMENTS
        narrow = self.weight.shape[1] <= MAX_COLUMNS
        if norm is None or not (small and narrow) or norm.weight.dtype != self.weight.dtype:
            return ()
        return norm.weight, _norm_bias(norm), norm.eps


class FusedResidualAdd(nn.Module):
    """A residual connection whose sum the last linear layer of its part computes.

    The first linear layer computes the norm, unless there are several first ones (gated).
    """

    def __init__(self, last: GemvLinear, norm: nn.Module | None) -> None:
        super().__init__()
        self.last, self.norm = last, norm

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        self.last.residual = x
        try:
            return f(x if self.norm is None else _norm_one_row(self.norm, x))
        finally:
            self.last.residual = None


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    return x.numel() == x.shape[-1] and x.dtype == weight.dtype != torch.float64


def _norm_one_row(norm: Any, x: Tensor) -> Tensor:
    if not _is_one_row(x, norm.weight):
        return norm(x)
    from manyheads.kernels.gemv import norm_row

    y: Tensor = norm_row(x, norm.weight, _norm_bias(norm), norm.eps)
    return y


def _norm_bias(norm: nn.Module) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _has_norm_kernel(norm: Any) -> bool:
    from manyheads.kernels.gemv import MAX_ROW_NORM_WIDTH

    supported = isinstance(norm, nn.RMSNorm) or (
        isinstance(norm, nn.LayerNorm) and norm.bias is not None
    )
    return bool(
        supported
        and norm.weight is not None
        and norm.weight.numel() <= MAX_ROW_NORM_WIDTH
        and norm.eps is not None
    )


def has_gemv(model: nn.Module) -> bool:
    """True if the kernel for one row runs on the device of the model."""
    weight = next(model.parameters())
    return runs_triton(weight) and verified("gemv", weight.device.index)


def with_gemv(model: M) -> M:
    """A copy for one row, with norms, activations and sums inside the linear layers."""
    from manyheads.kernels.mlp import ACTIVATION_KINDS

    fused: Any = fuse_activations(replace_linears(model, GemvLinear), ACTIVATION_KINDS)
    for block in fused.modules():
        if not isinstance(block, Block):
            continue
        first_linears = {"attention": ["project"], "cross": ["query"]}
        if isinstance(block.feedforward, FeedForward):
            first_linears["feedforward"] = ["inner"]
        elif isinstance(block.feedforward, GatedFeedForward):
            first_linears["feedforward"] = ["inner", "gate"]
        for name, linears in first_linears.items():
            if name in block._modules:
                _fuse_residual(block, name, linears)
    stack, head = fused.decoder, fused.head
    if head.scale == 1.0 and _has_norm_kernel(stack.last_norm):
        head.linear.norm, stack.last_norm = stack.last_norm, nn.Identity()
    return fused


def _fuse_residual(block: Any, name: str, first_linears: list[str]) -> None:
    part, residual = getattr(block, name), getattr(block, f"{name}_residual")
    last = part.outer if name == "feedforward" else part.output
    if residual.placement != "pre" or not _has_norm_kernel(residual.norm):
        return
    single = len(first_linears) == 1
    if single:
        getattr(part, first_linears[0]).norm = residual.norm
    fused = FusedResidualAdd(last, None if single else residual.norm)
    setattr(block, f"{name}_residual", fused)
