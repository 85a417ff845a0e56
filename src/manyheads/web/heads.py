"""Heads one by one: which there are, what their maps are like, and the model without some."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.baselines.luong_attention import LuongAttention
from manyheads.errors import UserError
from manyheads.models.capture import Kind, Maps, attentions, capture
from manyheads.nn.attention import SelfAttention

LayerMaps = Float[Tensor, "layers h t s"]
SquareMaps = Float[Tensor, "layers h t t"]
Mixed = Float[Tensor, "b t hc"]
DIGITS = 9  # of the number of a layer or head: Python refuses to read thousands


@dataclass(frozen=True)
class Place:
    """A head, counted from 0; written `encoder.self.0.1`: stack, kind, layer, head."""

    stack: str
    kind: Kind
    layer: int
    head: int

    @classmethod
    def parse(cls, text: str) -> "Place":
        parts = text.rsplit(".", 3)
        if len(parts) != 4 or parts[1] not in ("self", "cross"):
            raise UserError(f"'{text[:40]}' names no head: write it like encoder.self.0.1")
        if not all(part.isdecimal() and len(part) <= DIGITS for part in parts[2:]):
            raise UserError(f"'{text[:40]}' names no head: layer and head are whole numbers")
        kind: Kind = "self" if parts[1] == "self" else "cross"
        return cls(parts[0], kind, int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.stack}.{self.kind}.{self.layer}.{self.head}"


@contextmanager
def knocked_out(model: nn.Module, places: Sequence[Place]) -> Iterator[None]:
    """While open, head_i = 0 in Concat(head_1, …, head_h) W^O for these heads.

    A hook before W^O does it, so that the model and its weights stay what they are, and every
    way of computing heads, cached ones too, is met.
    """
    left = set(places)
    handles = []
    try:
        for stack, layer, attention in attentions(model):
            if isinstance(attention, LuongAttention):
                continue
            kind: Kind = "self" if isinstance(attention, SelfAttention) else "cross"
            heads = attention.config.heads
            own = {p for p in left if (p.stack, p.kind, p.layer) == (stack, kind, layer)}
            own = {p for p in own if p.head < heads}
            left -= own
            if own:
                hook = _zero([p.head for p in own], heads)
                handles.append(attention.output.register_forward_pre_hook(hook))
        if left and any(isinstance(part, LuongAttention) for part in model.modules()):
            raise UserError(
                "a model without heads, as LSTMs with attention are, has none to knock out"
            )
        if left:
            raise UserError(f"the model has no head {min(map(str, left))}: look which it has")
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
class Recorded:
    """The maps of a pass, and the queries and keys that they were computed from.

    Both are by (stack, kind, layer); queries and keys are as the score saw them, rotated where
    the position rotates.
    """

    maps: Maps
    queries: dict[tuple[str, Kind, int], Tensor]
    keys: dict[tuple[str, Kind, int], Tensor]


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recorded]:
    """`capture`, with queries and keys. While it is open every core is a module: hooks see them."""
    with capture(model) as maps:
        record = Recorded(maps, {}, {})
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


def _keep(record: Recorded, key: tuple[str, Kind, int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        record.queries[key], record.keys[key] = args[0].q.detach(), args[0].k.detach()

    return hook


def statistics(weights: LayerMaps, kind: Kind) -> dict[str, list[list[float]]]:
    """What can be said of each head's map in a number: by name, [layers][heads].

    entropy: mean over queries of −Σ_s a_ts log₂ a_ts, in bits; first: mean of a_t0. Where queries
    and keys are the same tokens also distance: mean of Σ_s a_ts |t − s|, and previous: mean of
    a_t,t−1 over the queries that have one before them.
    """
    # Layer by layer: what is made on the way is as large as what it is made from.
    bits = torch.stack([torch.special.entr(layer).sum(-1).mean(-1) for layer in weights])
    found = {
        "entropy": bits / math.log(2),
        "first": weights[..., 0].mean(-1),
    }
    queries, keys = weights.shape[-2:]
    if kind == "self" and queries == keys:
        places = torch.arange(keys, dtype=weights.dtype)
        apart = (places[:, None] - places[None, :]).abs()
        far = [(layer * apart).sum(-1).mean(-1) for layer in weights]
        found["distance"] = torch.stack(far)
        before = weights.diagonal(-1, -2, -1)
        found["previous"] = before.mean(-1) if keys > 1 else torch.zeros_like(found["first"])
    return {name: values.tolist() for name, values in found.items()}


def rollout(weights: SquareMaps) -> Float[Tensor, "layers t t"]:
    """How much of each input token is in each position after each layer, by attention alone.

    R_0 = I,  R_l = ½ (mean over heads of A_l + I) · R_{l−1}    (Abnar and Zuidema 2020)

    The I stands for the residual connection. Feed-forward layers, values and norms are left out:
    it is a summary of maps, not of what the model computes.
    """
    mixed = reduce(weights, "layers h t s -> layers t s", "mean")
    rolled = torch.eye(weights.shape[-1], dtype=weights.dtype)
    layers = []
    for one in mixed:
        rolled = 0.5 * (one @ rolled + rolled)
        layers.append(rolled)
    return torch.stack(layers)
