"""Optimisation by class swap: the only package that knows both model parts and kernels.

`optimize` gives the modules of a model on a GPU fused subclasses (`module.__class__ = …`, as
`torch.distributed.fsdp.fully_shard` does it): parameters, `state_dict` names and `isinstance` stay.
A fused subclass (optimize/fused.py) checks the call and falls back to `super().forward`.
`compile_blocks` and `checkpoint_blocks` are swaps of the same kind. `with_gemv` (optimize/gemv.py)
returns a copy of a model for decoding one row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyheads.errors import UserError
from manyheads.kernels.dispatch import runs_triton
from manyheads.kernels.selftest import FUSED_ACTIVATIONS
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.shapes import Hidden
from manyheads.optimize.fused import (
    FUSED,
    FusedFeedForward,
    FusedLayerNorm,
    FusedResidual,
    compute_dtype,
)
from manyheads.optimize.gemv import has_gemv, with_gemv

__all__ = [
    "can_capture",
    "checkpoint_blocks",
    "compile_blocks",
    "has_gemv",
    "optimize",
    "with_gemv",
]

RECOMPILE_LIMIT = 32  # variants of a block: with and without padding, short and long sequences
ACTIVATION_BUDGET = 0.9  # fraction of activations kept: the feed-forward's are recomputed


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


def _stacks(model: nn.Module) -> Iterator[tuple[Stack, bool]]:
    """The stacks of a model, and whether they use dropout."""
    for stack in list(model.modules()):
        if isinstance(stack, Stack):
            yield (
                stack,
                any(
                    part.p or getattr(part, "rate", 0.0)  # of DropPath
                    if isinstance(part, nn.Dropout)
                    else part.config.dropout
                    for part in stack.modules()
                    if isinstance(part, nn.Dropout | SelfAttention | CrossAttention)
                ),
            )


class CompiledStack(Stack):
    """A stack whose blocks are compiled one by one: the first takes seconds and serves for all.

    Activations that are cheap to recompute are not kept, unless there is dropout (PyTorch 2.13
    would draw another mask when it recomputes) or our kernels run (they keep little already).
    """

    budget: float

    def forward(self, x: Hidden, *inputs: Any, **named: Any) -> Hidden:
        import torch._dynamo.config as dynamo_config  # takes seconds

        with (
            dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT),
            functorch_config.patch(activation_memory_budget=self.budget),
        ):
            # In the dtype in which every later block gets its input, so that one graph serves all.
            return super().forward(x.to(compute_dtype(x)), *inputs, **named)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of every stack, in place."""
    for stack, uses_dropout in _stacks(model):
        fused_mlp = any(
            isinstance(part, FusedFeedForward) and part.activation_name in FUSED_ACTIVATIONS
            for part in stack.modules()
        )
        stack.__class__ = CompiledStack
        stack.budget = 1.0 if fused_mlp or uses_dropout else ACTIVATION_BUDGET  # type: ignore[assignment]
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
        """The host reads the state of the random generator, to apply the same dropout again."""
        return self.preserve_rng_state


def _with_fresh_masks(block: Callable[..., Hidden], *inputs: Any) -> Hidden:
    """Masks without cached tensors, so that the second pass computes what the first one did."""
    return block(*(replace(x) if isinstance(x, AttentionMask) else x for x in inputs))


def checkpoint_blocks(model: nn.Module) -> None:
    """Activation checkpointing for every block of a model, in place."""
    stacks = list(_stacks(model))
    if not stacks:
        raise UserError(
            "train.activation_checkpointing needs a model with Transformer blocks: remove it"
        )
    for stack, uses_dropout in stacks:
        for block in stack.blocks:
            block.__class__ = CheckpointedBlock
            block.preserve_rng_state = uses_dropout  # type: ignore[assignment]


def can_capture(model: nn.Module) -> bool:
    """True if a pass can be captured as a CUDA graph: no module synchronises with the host."""
    parts = [(part, getattr(part, "core", None)) for part in model.modules()]
    return not any(getattr(x, "has_host_sync", False) for pair in parts for x in pair)
