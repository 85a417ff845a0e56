"""How tables of foreign names carry settings and tensors, in both directions.

A `Family` is one architecture of another program, written as tables: which of its settings is
which of ours, what it always is in our terms, and what each of our tensors is called there. A
model that a family's tables cannot express is refused with the first thing that differs.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.config import dump, nearest, parse
from manyheads.errors import BadData, Mistake
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.presets import ModelConfig

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

# What says how a model is trained or computed, not what it is.
FREE = re.compile(r"core\.|initial$|(.*[._])?dropout$|embed\.norm\.placement$")
# An activation that a head shares with the feed-forward parts.
SAME_ACTIVATION = "feedforward.activation"


@dataclass(frozen=True)
class Foreign:
    """A model of another program: its settings, tensors by canonical name, and its class."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same; one that is not stored is the other."""
        pair = [self.tensors[name] for name in (one, other) if name in self.tensors]
        return len(pair) < 2 or torch.equal(pair[0], pair[1])


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of another program, as tables.

    `fields` maps a foreign setting to ours (several, parted by spaces, that must agree), `fixed`
    says what all its models are, `only` which values of its settings we know, `heads` what each
    of its classes has on top. `read` and `write` do what no table can. `tensors` names what our
    modules and tensors are called there ({} is the layer), `apart` those of separate source and
    target tables, `tops` those of each kind of head, `gated` those
    of gated feed-forward parts; `same` are second names of a tensor, `unused` patterns of what nobody needs.
    """

    kind: str
    prefix: str
    model: type[ModelConfig]
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    heads: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
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
        if not hasattr(model, "target_tokens"):
            return self.same
        return {"lm_head.weight": f"{self.apart['target_tokens']}.weight"}

    def nobody_needs(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.unused)


def read_settings(family: Family, foreign: Foreign) -> ModelConfig:
    """Our settings of a foreign model; what we do not have is refused by its name."""
    known = {**family.defaults, **foreign.settings}
    if foreign.architecture not in family.heads:
        advice = nearest(foreign.architecture, family.heads)
        raise Mistake(
            f"{foreign.architecture} is not among the {family.kind} models read: {advice}"
        )
    for name, allowed in family.only.items():
        if known.get(name, allowed[0]) not in allowed:
            choices = " or ".join(map(str, allowed))
            raise Mistake(
                f"a {family.kind} model with {name}={known[name]} is not supported: only {choices}"
            )
    flat: Flat = {**family.fixed, **family.heads[foreign.architecture]}
    for theirs, ours in family.fields.items():
        if theirs not in known:
            raise BadData(f"config.json has no '{theirs}', which a {family.kind} model needs")
        for path in ours.split():
            flat[path] = _activation(known[theirs]) if _is_activation(path) else known[theirs]
    if flat.get("head.kind") in LABELLED:
        flat["head.labels"] = _labels(known)
    flat |= family.read(dataclasses.replace(foreign, settings=known))
    for path, value in flat.items():
        if value == SAME_ACTIVATION:
            flat[path] = flat[SAME_ACTIVATION]
    try:
        return parse(family.model, _nested(_tidy(flat)), "model")
    except BadData:
        raise
    except Mistake as error:
        raise BadData(
            f"config.json of a {family.kind} model does not hold together: {error}"
        ) from None


def write_settings(family: Family, config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The class and the settings that a model has in a family, or a Mistake: what differs."""
    if type(config) is not family.model:
        raise Mistake(f"{family.kind} is no {config.kind} model")
    flat = flatten(config)
    name = next((name for name in family.heads if _fits(flat, family.heads[name])), None)
    if name is None:
        raise Mistake(f"{family.kind} has no such head: {', '.join(family.heads)}")
    head = family.heads[name]
    for path, value in family.fixed.items():
        if not _holds(flat, path, value):
            raise Mistake(f"{family.kind} has {path}={value}, and this model {flat.get(path)}")
    settings = family.write(flat)
    if "head.labels" in flat:
        settings["id2label"] = dict(enumerate(flat.pop("head.labels")))
    for theirs, ours in family.fields.items():
        if any(path not in flat for path in ours.split()):
            raise Mistake(f"{family.kind} has {ours}, and this model none")
        values = [flat.pop(path) for path in ours.split()]
        if any(value != values[0] for value in values):
            raise Mistake(f"{family.kind} has one {theirs} for {ours}: this model has {values}")
        settings[theirs] = OWN_ACTIVATIONS[values[0]] if _is_activation(ours) else values[0]
    used = {*family.fixed, *head}
    for path, value in flat.items():
        if path not in used and not FREE.match(path) and not _implied(path, value, config):
            raise Mistake(f"{family.kind} cannot express {path}={value}")
    return name, settings


ON_TOP = ("head.", "pooler.", "next_sentence.")
# What any head of its kind may have in its own way.
VARYING = {"head.labels", "head.dropout", "head.tie", "pooler.dim"}


def _fits(flat: Flat, head: Mapping[str, Any]) -> bool:
    """Whether a model has exactly this on top."""
    top = {path for path in flat if path.startswith(ON_TOP)} - VARYING
    return top <= head.keys() and all(_holds(flat, path, value) for path, value in head.items())


def _holds(flat: Flat, path: str, value: Any) -> bool:
    wanted = flat.get(SAME_ACTIVATION) if value == SAME_ACTIVATION else value
    return bool(flat.get(path) == wanted)


def _is_activation(path: str) -> bool:
    return path.endswith("activation")


def _activation(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise Mistake(f"the activation {name} is not supported: only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


LABELLED = ("classify", "tag")


def _labels(settings: Mapping[str, Any]) -> list[str]:
    named = settings.get("id2label")
    if named is None:
        return [f"LABEL_{number}" for number in range(settings.get("num_labels", 2))]
    try:
        return [str(named[number]) for number in sorted(named, key=int)]
    except (TypeError, ValueError):
        raise BadData(f"config.json has an id2label that is no numbered list: {named}") from None


SIDED = ("layers", "heads", "hidden")


def flatten(config: ModelConfig) -> Flat:
    """Settings as dotted paths, with every size that follows from another written out."""
    flat = dict(_leaves(dump(config)))
    flat.pop("kind")
    flat.setdefault("hidden", 4 * config.dim)
    flat.setdefault("kv_heads", config.heads)
    flat.setdefault("attention_bias", config.bias)
    flat.setdefault("qkv_bias", flat["attention_bias"])
    if isinstance(config, Seq2SeqConfig):
        for name in SIDED:
            whole = flat.pop(name)
            for side in ("encoder", "decoder"):
                flat.setdefault(f"{side}.{name}", whole)
    if flat.get("encoder.heads") == flat.get("decoder.heads"):
        flat.setdefault("head_dim", config.dim // flat.get("encoder.heads", config.heads))
    return flat


def _tidy(flat: Flat) -> Flat:
    """Without what goes without saying: sides that are alike, sizes that follow from others."""
    flat = {path: value for path, value in flat.items() if value is not None}
    for name in SIDED:
        if f"encoder.{name}" in flat:
            flat[name] = flat.pop(f"encoder.{name}")
            if flat.get(f"decoder.{name}") == flat[name]:
                del flat[f"decoder.{name}"]
    implied = {"kv_heads": flat.get("heads"), "attention_bias": flat.get("bias")}
    if isinstance(flat.get("dim"), int) and isinstance(flat.get("heads"), int):
        implied["head_dim"] = flat["dim"] / max(1, flat["heads"])
    return {path: value for path, value in flat.items() if implied.get(path) != value}


def _implied(path: str, value: Any, config: ModelConfig) -> bool:
    """Whether a setting says no more than others do."""
    follows: Flat = {
        "head_dim": config.dim // config.heads,
        "kv_heads": config.heads,
        "attention_bias": config.bias,
        "qkv_bias": config.attention_heads().bias,
        "target_vocab_size": config.vocab_size,
    }
    return path in follows and bool(follows[path] == value)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nested(flat: Flat) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split(".")
        inner = table
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return table


@dataclass(frozen=True)
class Move:
    """One tensor of ours, and the tensors that it is there: rows put together in this order."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool


def moves(family: Family, model: nn.Module) -> list[Move]:
    """Where every tensor of a model goes."""
    config: Any = model.config
    top = getattr(getattr(config, "head", None), "kind", "none")
    apart = family.apart if hasattr(model, "target_tokens") else {}
    gated = family.gated if config.feedforward.kind == "gated" else {}
    names = {**family.tensors, **family.tops.get(top, {}), **apart, **gated}
    found = []
    for ours in model.state_dict():
        layer = re.search(r"\.blocks\.(\d+)\.", ours)
        general = re.sub(r"\.blocks\.\d+\.", ".blocks.{}.", ours)
        module = general
        while module not in names:
            if "." not in module:
                raise Mistake(f"{family.kind} has no place for {ours}")
            module = module.rpartition(".")[0]
        leaf = general.removeprefix(module)
        named = names[module]
        parts = (named,) if isinstance(named, str) else named
        theirs = tuple(part.format(layer and layer[1]) + leaf for part in parts)
        turned = family.transposed and ".blocks." in ours and model.get_parameter(ours).ndim == 2
        found.append(Move(ours, theirs, turned))
    return found


def take(family: Family, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ours from theirs (by canonical name); none may be missing or left over."""
    given = dict(tensors)
    seconds = family.seconds(model)
    for second, first in seconds.items():
        if first not in given and second in given:
            given[first] = given[second]
    wanted = model.state_dict()
    taken: dict[str, Tensor] = {}
    used: set[str] = set()
    for move in moves(family, model):
        missing = [name for name in move.theirs if name not in given]
        if missing:
            raise BadData(f"the weights have no {missing[0]}, which config.json calls for")
        parts = [given[name] for name in move.theirs]
        whole = torch.cat([part.T if move.transposed else part for part in parts])
        shape = wanted[move.ours].shape
        if whole.squeeze().shape != torch.Size([size for size in shape if size != 1]):
            shapes = [list(part.shape) for part in parts]
            raise BadData(
                f"{move.theirs[0]} is {shapes[0]}, but config.json calls for "
                f"{_expected(parts, shape, move)}"
            )
        taken[move.ours] = whole.reshape(shape).contiguous()
        used.update(move.theirs)
    for name in sorted(given.keys() - used):
        if not family.nobody_needs(name) and name not in family.same.values():
            _refuse_other(name, seconds.get(name), given, used)
    return taken


def _expected(parts: list[Tensor], shape: torch.Size, move: Move) -> str:
    turned = list(reversed(shape)) if move.transposed else list(shape)
    return str(turned) + (f" for its {len(parts)} parts together" if len(parts) > 1 else "")


def _refuse_other(
    name: str, first: str | None, given: Mapping[str, Tensor], used: set[str]
) -> None:
    """A tensor that nothing is made from is the second name of one, or too much."""
    if first is None or first not in used:
        raise BadData(f"the weights hold {name}, which config.json does not call for")
    if not torch.equal(given[name], given[first]):
        raise BadData(f"{name} and {first} should be one tensor, and differ")


def give(family: Family, model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Their tensors (by canonical name, of these shapes) from ours."""
    own = model.state_dict()
    given: dict[str, Tensor] = {}
    for move in moves(family, model):
        whole = own[move.ours]
        rows = [shapes[name][-1 if move.transposed else 0] for name in move.theirs]
        parts = whole.split(rows) if len(move.theirs) > 1 else [whole]
        for name, part in zip(move.theirs, parts, strict=True):
            turned = part.T if move.transposed else part
            given[name] = turned.reshape(shapes[name]).clone()
    for second, first in family.seconds(model).items():
        if second in shapes and second not in given and first in given:
            given[second] = given[first]
    return given
