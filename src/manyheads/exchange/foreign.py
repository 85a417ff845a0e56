"""How tables of foreign names carry tensors, in both directions; settings.py does the settings.

A `Family` is one architecture of another program, written as tables: which of its settings is
which of ours, what it always is in our terms, and what each of our tensors is called there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import DataError, UserError
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import SelfAttention
from manyheads.presets import TransformerConfig

ENCODER, HEAD, DECODER = "encoder.onnx", "head.onnx", "decoder.onnx"  # graphs, by what they hold
Flat = dict[str, Any]  # our settings as dotted paths and plain values

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
OWN_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# An activation that a head shares with the feed-forward parts.
SAME_ACTIVATION = "feedforward.activation"


def activation(name: str) -> str:
    """Ours by its foreign name."""
    if name not in ACTIVATIONS:
        raise UserError(f"the activation {name} is not supported: only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse_approximations(model: nn.Module) -> None:
    """Every program that models go out to computes attention in full."""
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention) and not module.config.core.exact:
            raise UserError(
                f"{_set_by(model.config, name)}={module.config.core.kind} is not known outside, "
                "where a query sees every key: export a model that was trained with a core that "
                "computes attention in full (model.core=fused)"
            )


def _set_by(config: Any, name: str) -> str:
    """The setting that the core of a module was chosen by: its side's own, or the model's."""
    side = name.split(".")[0]
    own = isinstance(config, Seq2SeqConfig) and getattr(config, side).core is not None
    return f"model.{side}.core" if own else "model.core"


@dataclass(frozen=True)
class Foreign:
    """A model of another program: settings, tensors by canonical name, its class, its head."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str
    head: str | None

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same; one that is not stored is the other."""
        pair = [self.tensors[name] for name in (one, other) if name in self.tensors]
        return len(pair) < 2 or torch.equal(pair[0], pair[1])


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of another program, as tables.

    `fields` maps a foreign setting to ours (several, parted by spaces, that must agree), `fixed`
    says what all its models are, `defaults` what goes without saying there, `only` which values
    of its settings we know, `squares` which may be given as two equal sides, `heads` what each
    of its classes has on top, `fuller` which class files of another are often really of,
    `unpooled` which may be without its pooler and the argument that says so. `read` and `write`
    do what no table can. `tensors` names what our modules and tensors are called there ({} is
    the layer), `apart` those of separate source and target tables, `tops` those of each kind of
    head, `gated` those of gated feed-forward parts; `same` are second names of a tensor,
    `unused` patterns of what nobody needs.
    """

    kind: str
    prefix: str
    model: type[TransformerConfig]
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    heads: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    squares: Sequence[str] = ()
    fuller: Mapping[str, str] = field(default_factory=dict)
    unpooled: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Foreign], Flat] = lambda foreign: {}
    write: Callable[[Flat], dict[str, Any]] = lambda flat: {}
    apart: Mapping[str, str] = field(default_factory=dict)
    tops: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gated: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    transposed: bool = False

    def canonical(self, name: str) -> str:
        """A tensor's name without the prefix of the bare model, in the newest spelling."""
        name = name.removeprefix(self.prefix)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def seconds(self, model: nn.Module) -> Mapping[str, str]:
        """Second names of tensors; where the tables are apart, a tied head is the target's."""
        if hasattr(model, "target_tokens"):
            return {f"{self.tensors['head']}.weight": f"{self.apart['target_tokens']}.weight"}
        own = self.top(model).values()
        others = {name for names in self.tops.values() for name in names.values()}
        return {
            second: first
            for second, first in self.same.items()
            if second in own or second not in others
        }

    def top(self, model: nn.Module) -> Mapping[str, str]:
        """What the parts of a model's head are called."""
        config: Any = model.config
        return self.tops.get(getattr(getattr(config, "head", None), "kind", "none"), {})

    def lacks_pooler(self, foreign: Foreign) -> bool:
        """Whether a model of a class that may be without a pooler is."""
        pooler = self.tensors.get("pooler.project")
        stored = {name.rpartition(".")[0] for name in foreign.tensors}
        return foreign.architecture in self.unpooled and pooler not in stored

    def nobody_needs(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.unused)


@dataclass(frozen=True)
class Move:
    """One tensor of ours, and those that it is there: so many rows of each, in this order."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool


def moves(family: Family, model: nn.Module) -> list[Move]:
    """Where every tensor of a model goes."""
    config: Any = model.config
    apart = family.apart if hasattr(model, "target_tokens") else {}
    gated = family.gated if config.feedforward.kind == "gated" else {}
    names = {**family.tensors, **family.top(model), **apart, **gated}
    found = []
    for ours, tensor in model.state_dict().items():
        layer = re.search(r"\.blocks\.(\d+)\.", ours)
        general = re.sub(r"\.blocks\.\d+\.", ".blocks.{}.", ours)
        module = general
        while module not in names:
            if "." not in module:
                raise UserError(f"{family.kind} has no place for {ours}")
            module = module.rpartition(".")[0]
        leaf = general.removeprefix(module)
        named = names[module]
        parts = (named,) if isinstance(named, str) else named
        theirs = tuple(part.format(layer and layer[1]) + leaf for part in parts)
        rows = (len(tensor),) if len(theirs) == 1 else _rows(model, ours)
        turned = family.transposed and ".blocks." in ours and tensor.ndim == 2
        found.append(Move(ours, theirs, rows, turned))
    return found


def _rows(model: nn.Module, projection: str) -> tuple[int, ...]:
    """The rows of queries, keys and values; cross-attention has its queries by themselves."""
    attention: Any = model.get_submodule(projection.rpartition(".project.")[0])
    return tuple(attention.config.sizes[0 if isinstance(attention, SelfAttention) else 1 :])


def take(family: Family, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ours from theirs (by canonical name); none may be missing or left over."""
    given = dict(tensors)
    seconds = family.seconds(model)
    routes = moves(family, model)
    by_itself = {name for move in routes for name in move.theirs}
    for second, first in seconds.items():
        if first not in given and second in given and second not in by_itself:
            given[first] = given[second]
    wanted = model.state_dict()
    taken: dict[str, Tensor] = {}
    used: set[str] = set()
    for move in routes:
        missing = [name for name in move.theirs if name not in given]
        if missing:
            raise DataError(f"the weights have no {missing[0]}, which config.json calls for")
        shape = wanted[move.ours].shape
        parts = []
        for name, rows in zip(move.theirs, move.rows, strict=True):
            turned = (*shape[1:], rows) if move.transposed else (rows, *shape[1:])
            if _bare(given[name].shape) != _bare(turned):
                raise DataError(
                    f"{name} is {list(given[name].shape)}, but config.json calls for {list(turned)}"
                )
            part = given[name].reshape(turned)
            parts.append(part.T if move.transposed else part)
        taken[move.ours] = torch.cat(parts).contiguous()
        used.update(move.theirs)
    for name in sorted(given.keys() - used):
        if not family.nobody_needs(name) and name not in family.same.values():
            _refuse_other(name, seconds.get(name), given, used)
    return taken


def _bare(shape: Sequence[int]) -> list[int]:
    """A shape without the axes of one that some write before it."""
    sizes = list(shape)
    while sizes[:1] == [1]:
        del sizes[0]
    return sizes


def _refuse_other(
    name: str, first: str | None, given: Mapping[str, Tensor], used: set[str]
) -> None:
    """A tensor that nothing is made from is the second name of one, or too much."""
    if first is None or first not in used:
        raise DataError(f"the weights hold {name}, which config.json does not call for")
    if not torch.equal(given[name], given[first]):
        raise DataError(f"{name} and {first} should be one tensor, and differ")


def give(family: Family, model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Their tensors (by canonical name, of these shapes) from ours."""
    own = model.state_dict()
    given: dict[str, Tensor] = {}
    for move in moves(family, model):
        whole = own[move.ours]
        for name, part in zip(move.theirs, whole.split(move.rows), strict=True):
            turned = part.T if move.transposed else part
            given[name] = turned.reshape(shapes[name]).clone()
    for second, first in family.seconds(model).items():
        if second in shapes and second not in given and first in given:
            given[second] = given[first]
    return given
