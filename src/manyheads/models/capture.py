"""Attention maps of any model, also with fused attention, which never computes them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from manyheads.baselines.baseline import LuongAttention
from manyheads.errors import UserError
from manyheads.nn.attention import AttentionFunction, AttentionInputs, CrossAttention, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import Weights

T = TypeVar("T")
Kind = Literal["self", "cross"]
Attention = SelfAttention | CrossAttention | LuongAttention


@dataclass
class Maps(Mapping[Kind, list[Weights]]):
    """The captured weights: by stack (encoder, decoder), kind (self, cross) and layer."""

    by_layer: dict[tuple[str, Kind, int], list[Tensor]] = field(default_factory=dict)

    def all(self, kind: Kind, stack: str | None = None) -> list[Weights]:
        """Maps of the last forward pass, [b, h, t, s] per layer.

        An encoder–decoder has self-attention in both stacks; the default is the encoder's.
        """
        keys = sorted(key for key, maps in self.by_layer.items() if key[1] == kind and maps)
        stacks = sorted({key[0] for key in keys})
        if not keys or (stack is not None and stack not in stacks):
            raise KeyError(f"no {kind}-attention of {stack or 'any stack'} was captured")
        chosen = stack or ("encoder" if "encoder" in stacks else stacks[0])
        return [self.by_layer[key][-1] for key in keys if key[0] == chosen]

    def __getitem__(self, kind: Kind) -> list[Weights]:
        return self.all(kind)

    def __iter__(self) -> Iterator[Kind]:
        return iter(sorted({kind for (_, kind, _), maps in self.by_layer.items() if maps}))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # a list would ask for the length first


class _Recorder(nn.Module):
    """An attention implementation that also records the weights of another."""

    def __init__(
        self,
        core: AttentionFunction,
        captured: list[Tensor],
        rows: Sequence[int] | None,
        heads: Sequence[int] | None,
        *,
        has_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.core, self.captured, self.rows, self.heads = core, captured, rows, heads
        self.has_gradient = has_gradient

    def check(self, score: Score, position: Position) -> None:
        self.core.check(score, position)

    def weights(self, inputs: AttentionInputs) -> Tensor:
        """The weights of the chosen queries and heads."""
        if self.rows is not None:
            rows, mask = _checked("rows", self.rows, inputs.q.shape[2]), inputs.mask
            queries = mask.query_positions[:, rows]
            mask = AttentionMask(mask.rule, queries, mask.key_positions, mask.padding_mask)
            inputs = replace(inputs, q=inputs.q[:, :, rows], mask=mask)
        weights = self.core.weights(inputs)
        if self.heads is None:
            return weights
        return weights[:, _checked("heads", self.heads, inputs.q.shape[1])]

    def forward(self, inputs: AttentionInputs) -> Tensor:
        with torch.set_grad_enabled(self.has_gradient and torch.is_grad_enabled()):
            self.captured.append(self.weights(inputs))
        return self.core(inputs)


def _checked(name: str, indices: Sequence[int], count: int) -> list[int]:
    if any(not 0 <= index < count for index in indices):
        raise UserError(f"{name}={list(indices)}: choose among 0 to {count - 1}")
    return list(indices)


@contextmanager
def capture(
    model: nn.Module, rows: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[Maps]:
    """Record the weights of every attention of the model in the yielded maps.

    `rows` and `heads` select queries and heads, so that no n × n matrix is held for a long text:
    the rows are computed again from q and k.
    """
    maps = Maps()
    swapped: list[tuple[Attention, AttentionFunction]] = []
    for stack, layer, attention in attentions(model):
        kind: Kind = "self" if isinstance(attention, SelfAttention) else "cross"
        captured = maps.by_layer.setdefault((stack, kind, layer), [])
        swapped.append((attention, attention.core))
        _swap(attention, _Recorder(attention.core, captured, rows, heads))
    try:
        yield maps
    finally:
        for attention, core in swapped:
            _swap(attention, core)


def alignment_layer(layers: Sequence[T]) -> T:
    """The layer of cross-attention that word links come from: the last but one.

    Guided alignment trains its first head (Garg et al. 2019).
    """
    return layers[max(0, len(layers) - 2)]


@contextmanager
def alignment_weights(model: nn.Module) -> Iterator[list[Weights]]:
    """Record the weights of the alignment layer, with their gradient."""
    crosses = [part for _, _, part in attentions(model) if not isinstance(part, SelfAttention)]
    if not crosses:
        raise UserError("train.guided_alignment needs a model with cross-attention: remove it")
    attention, recorded = alignment_layer(crosses), list[Tensor]()
    core = attention.core
    _swap(attention, _Recorder(core, recorded, None, None, has_gradient=True))
    try:
        yield recorded
    finally:
        _swap(attention, core)


def _swap(attention: Attention, core: AttentionFunction) -> None:
    del attention.core  # nn.Module refuses to replace a submodule by a non-module
    attention.core = core


def attentions(model: nn.Module) -> Iterator[tuple[str, int, Attention]]:
    """Every attention module of a model, with the name of its stack and its layer."""
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            for layer, block in enumerate(module.blocks):
                for part in block.modules():
                    if isinstance(part, (SelfAttention, CrossAttention)):
                        yield name, layer, part
    # A recurrent decoder has one, a convolutional decoder one per layer.
    older = [module for module in model.modules() if isinstance(module, LuongAttention)]
    for layer, module in enumerate(older):
        yield "decoder", layer, module


def has_cross_attention(model: nn.Module) -> bool:
    return any(not isinstance(module, SelfAttention) for _, _, module in attentions(model))
