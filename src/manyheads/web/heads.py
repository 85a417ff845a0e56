"""Attention heads: names, knock-out, recording, statistics of their maps and rollout."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.baselines.baseline import LuongAttention
from manyheads.errors import UserError
from manyheads.models.capture import Kind, Maps, attentions, capture
from manyheads.nn.attention import SelfAttention

LayerMaps = Float[Tensor, "layers h t s"]
SquareMaps = Float[Tensor, "layers h t t"]
Mixed = Float[Tensor, "b t hc"]
DIGITS = 9  # maximum digits of a layer or head: Python refuses to parse thousands of digits


@dataclass(frozen=True)
class HeadId:
    """A head as `encoder.self.0.1`: stack, kind, layer and head, counted from 0."""

    stack: str
    kind: Kind
    layer: int
    head: int

    @classmethod
    def parse(cls, text: str) -> "HeadId":
        parts = text.rsplit(".", 3)
        if len(parts) != 4 or parts[1] not in ("self", "cross"):
            raise UserError(f"'{text[:40]}' is not a head: write it like encoder.self.0.1")
        if not all(part.isdecimal() and len(part) <= DIGITS for part in parts[2:]):
            raise UserError(f"'{text[:40]}' is not a head: layer and head must be integers")
        kind: Kind = "self" if parts[1] == "self" else "cross"
        return cls(parts[0], kind, int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.stack}.{self.kind}.{self.layer}.{self.head}"


@contextmanager
def knocked_out(model: nn.Module, heads_off: Sequence[HeadId]) -> Iterator[None]:
    """While open, head_i = 0 in Concat(head_1, …, head_h) W^O for these heads.

    A forward pre-hook on W^O zeroes them, so that the weights stay unchanged and every attention
    implementation is covered, including cached decoding.
    """
    left = set(heads_off)
    handles = []
    try:
        for stack, layer, attention in attentions(model):
            if isinstance(attention, LuongAttention):
                continue
            kind: Kind = "self" if isinstance(attention, SelfAttention) else "cross"
            heads = attention.config.heads
            layer_heads = {
                head_id
                for head_id in left
                if (head_id.stack, head_id.kind, head_id.layer) == (stack, kind, layer)
            }
            layer_heads = {head_id for head_id in layer_heads if head_id.head < heads}
            left -= layer_heads
            if layer_heads:
                hook = _zero([head_id.head for head_id in layer_heads], heads)
                handles.append(attention.output.register_forward_pre_hook(hook))
        if left and any(isinstance(part, LuongAttention) for part in model.modules()):
            raise UserError("this model has no attention heads to knock out")
        if left:
            raise UserError(f"the model has no head {min(map(str, left))}")
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zero(heads: list[int], count: int) -> Callable[..., tuple[Mixed]]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Mixed]:
        mixed = rearrange(args[0], "b t (h c) -> b t h c", h=count).clone()
        mixed[:, :, heads] = 0.0
        return (rearrange(mixed, "b t h c -> b t (h c)"),)

    return hook


@dataclass(frozen=True)
class Recording:
    """The attention maps of a forward pass, with their queries and keys by (stack, kind, layer).

    Queries and keys are inputs of the score function: after rotary positions.
    """

    maps: Maps
    queries: dict[tuple[str, Kind, int], Tensor]
    keys: dict[tuple[str, Kind, int], Tensor]


@contextmanager
def record_attention(model: nn.Module) -> Iterator[Recording]:
    """`capture` plus queries and keys. `capture` makes every attention core a module with hooks."""
    with capture(model) as maps:
        record = Recording(maps, {}, {})
        handles = []
        for stack, layer, attention in attentions(model):
            kind: Kind = "self" if isinstance(attention, SelfAttention) else "cross"
            core: Any = attention.core
            handles.append(core.register_forward_pre_hook(_keep(record, (stack, kind, layer))))
        try:
            yield record
        finally:
            for handle in handles:
                handle.remove()


def _keep(record: Recording, key: tuple[str, Kind, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        record.queries[key], record.keys[key] = args[0].q.detach(), args[0].k.detach()

    return hook


def statistics(weights: LayerMaps, kind: Kind) -> dict[str, list[list[float]]]:
    """Statistics of each head's map: by name, [layers][heads].

    entropy: mean over queries of −Σ_s a_ts log₂ a_ts, in bits; first: mean of a_t0. If queries
    and keys are the same tokens also distance: mean of Σ_s a_ts |t − s|, and previous: mean of
    a_t,t−1 over t ≥ 1. For cross-attention coverage: mean over source tokens s of max_t a_ts.
    """
    # Layer by layer, to limit memory: intermediate tensors are as large as the maps.
    bits = torch.stack([torch.special.entr(layer).sum(-1).mean(-1) for layer in weights])
    result = {
        "entropy": bits / math.log(2),
        "first": weights[..., 0].mean(-1),
    }
    if kind == "cross":
        result["coverage"] = weights.amax(-2).mean(-1)
    queries, keys = weights.shape[-2:]
    if kind == "self" and queries == keys:
        positions = torch.arange(keys, dtype=weights.dtype)
        distances = (positions[:, None] - positions[None, :]).abs()
        mean_distances = [(layer * distances).sum(-1).mean(-1) for layer in weights]
        result["distance"] = torch.stack(mean_distances)
        before = weights.diagonal(-1, -2, -1)
        result["previous"] = before.mean(-1) if keys > 1 else torch.zeros_like(result["first"])
    return {name: values.tolist() for name, values in result.items()}


def rollout(weights: SquareMaps) -> Float[Tensor, "layers t t"]:
    """Attention rollout: the share of each input token in each position after each layer.

    R_0 = I,  R_l = ½ (mean over heads of A_l + I) · R_{l−1}    (Abnar and Zuidema 2020)

    I is the residual connection. Feed-forward layers, values and norms are ignored, so rollout
    summarises the maps, not the computation of the model.
    """
    mixed = reduce(weights, "layers h t s -> layers t s", "mean")
    rolled = torch.eye(weights.shape[-1], dtype=weights.dtype)
    layers = []
    for layer_map in mixed:
        rolled = 0.5 * (layer_map @ rolled + rolled)
        layers.append(rolled)
    return torch.stack(layers)
