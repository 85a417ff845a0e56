"""Families of `transformers` models as tables that carry settings and tensors both ways.

A `Family` is one architecture: which of its settings is which of ours, what its models always
have in our terms, and the name of each of our tensors there. families.py has the tables.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.config import dump, parse
from manyheads.errors import DataError, UserError
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import AttentionConfig, SelfAttention
from manyheads.presets import TransformerConfig

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
HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
SAME_ACTIVATION = "feedforward.activation"  # of a head that shares it with the feed-forward parts
# Settings of training and of the implementation, which do not define a model.
FREE = re.compile(
    r"((encoder|decoder)\.)?attention\.|init$|(.*[._])?dropout$|embed\.norm\.placement$"
)
SIDED = ("layers", "heads", "ffn_dim")
LABELLED = ("classify", "tag")
ON_TOP = ("head.", "pooler.", "next_sentence.")
# Multi-label classification is not supported.
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "problem_type": (None, "single_label_classification", "regression"),
}
VARYING = {"head.labels", "head.dropout", "head.tie", "pooler.dim"}  # free for any head
LARGEST = 2**53  # of a size; integers up to there are exact as floats


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(f"the activation {name} is not supported: only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse_approximations(model: nn.Module) -> None:
    """Refuse cores that approximate attention: no other program has them."""
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention) and not module.config.core.exact:
            config, side = model.config, name.split(".")[0]
            own = isinstance(config, Seq2SeqConfig) and getattr(config, side).attention is not None
            raise UserError(
                f"model.{f'{side}.' if own else ''}attention={module.config.core.kind} cannot be "
                "exported: export a model trained with exact attention (model.attention=fused)"
            )


@dataclass(frozen=True)
class Foreign:
    """A model of another program: settings, tensors by canonical name, its class, its head."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str
    head: str | None

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same; one that is not stored is tied to the other."""
        pair = [self.tensors[name] for name in (one, other) if name in self.tensors]
        return len(pair) < 2 or torch.equal(pair[0], pair[1])


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of another program, as tables.

    - `fields`: a foreign setting → ours (several, separated by spaces, must agree), or a pair of
      ours and the foreign default; `defaults`: of settings that only `read` uses;
    - `fixed`: what all its models have; `only`: the supported values of other settings;
      `squares`: settings that may be two equal sides;
    - `architectures`: what each class has on top; `superset_of`: a class whose files are often
      really of another; `unpooled`: classes that may lack a pooler, and the argument for it;
    - `read` and `write`: what no table can express;
    - `tensors`: our module or tensor → theirs ({} is the layer); `apart`, `heads`, `gated`: the
      same for separate source and target tables, for each kind of head, and for gated
      feed-forward parts; `same`: second names of a tensor; `unused`: patterns to ignore.
    """

    kind: str
    prefix: str
    model: type[TransformerConfig]
    fields: Mapping[str, Any]
    fixed: Mapping[str, Any]
    architectures: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    squares: Sequence[str] = ()
    superset_of: Mapping[str, str] = field(default_factory=dict)
    unpooled: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Foreign], Flat] = lambda foreign: {}
    write: Callable[[Flat], dict[str, Any]] = lambda flat: {}
    apart: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gated: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    transposed: bool = False

    @property
    def paths(self) -> dict[str, list[str]]:
        return {n: (f if isinstance(f, str) else f[0]).split() for n, f in self.fields.items()}

    @property
    def known(self) -> dict[str, Any]:
        return {n: f[1] for n, f in self.fields.items() if not isinstance(f, str)} | dict(
            self.defaults
        )

    def canonical(self, name: str) -> str:
        """A tensor's name without the prefix of the bare model, in the newest spelling."""
        name = name.removeprefix(self.prefix)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def seconds(self, model: nn.Module) -> Mapping[str, str]:
        """Second names of tensors; with separate tables a tied head is the target's."""
        if hasattr(model, "target_tokens"):
            return {f"{self.tensors['head']}.weight": f"{self.apart['target_tokens']}.weight"}
        own = self.head(model).values()
        others = {name for names in self.heads.values() for name in names.values()}
        return {
            second: first
            for second, first in self.same.items()
            if second in own or second not in others
        }

    def head(self, model: nn.Module) -> Mapping[str, str]:
        config: Any = model.config
        return self.heads.get(getattr(getattr(config, "head", None), "kind", "none"), {})

    def lacks_pooler(self, foreign: Foreign) -> bool:
        stored = {name.rpartition(".")[0] for name in foreign.tensors}
        pooler = self.tensors.get("pooler.project")
        return foreign.architecture in self.unpooled and pooler not in stored

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.unused)


# ---------------------------------------------------------------------------------------------
# Tensors


@dataclass(frozen=True)
class Move:
    """One tensor of ours, and the tensors it is there: so many rows of each, in this order."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool


def moves(family: Family, model: nn.Module) -> list[Move]:
    config: Any = model.config
    apart = family.apart if hasattr(model, "target_tokens") else {}
    gated = family.gated if config.feedforward.kind == "gated" else {}
    names = {**family.tensors, **family.head(model), **apart, **gated}
    result = []
    for ours, tensor in model.state_dict().items():
        layer = re.search(r"\.blocks\.(\d+)\.", ours)
        general = re.sub(r"\.blocks\.\d+\.", ".blocks.{}.", ours)
        module = general
        while module not in names:
            if "." not in module:
                raise UserError(f"{family.kind} has no place for {ours}")
            module = module.rpartition(".")[0]
        leaf = general.removeprefix(module)
        name = names[module]
        parts = (name,) if isinstance(name, str) else name
        theirs = tuple(part.format(layer and layer[1]) + leaf for part in parts)
        rows: tuple[int, ...] = (len(tensor),)
        if len(theirs) > 1:  # queries, keys and values; cross-attention has its queries apart
            attention: Any = model.get_submodule(ours.rpartition(".project.")[0])
            rows = tuple(attention.config.sizes[not isinstance(attention, SelfAttention) :])
        turned = family.transposed and ".blocks." in ours and tensor.ndim == 2
        result.append(Move(ours, theirs, rows, turned))
    return result


def from_hf_state(
    family: Family, model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our tensors from theirs (by canonical name); none may be missing or left over."""
    stored = dict(tensors)
    seconds = family.seconds(model)
    routes = moves(family, model)
    used = {name for move in routes for name in move.theirs}
    for second, first in seconds.items():
        if first not in stored and second in stored and second not in used:
            stored[first] = stored[second]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for move in routes:
        missing = [name for name in move.theirs if name not in stored]
        if missing:
            raise DataError(f"the weights have no {missing[0]}, which config.json calls for")
        rest, parts = shapes[move.ours][1:], []
        for name, rows in zip(move.theirs, move.rows, strict=True):
            shape = (*rest, rows) if move.transposed else (rows, *rest)
            if _without_ones(stored[name].shape) != _without_ones(shape):
                found = list(stored[name].shape)
                raise DataError(f"{name} is {found}, but config.json calls for {list(shape)}")
            part = stored[name].reshape(shape)
            parts.append(part.T if move.transposed else part)
        state[move.ours] = torch.cat(parts).contiguous()
    for name in sorted(stored.keys() - used):
        if not family.ignores(name) and name not in family.same.values():
            twin = seconds.get(name)
            if twin is None or twin not in used:
                raise DataError(f"the weights hold {name}, which config.json does not call for")
            if not torch.equal(stored[name], stored[twin]):
                raise DataError(f"{name} and {twin} should be one tensor, and differ")
    return state


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A shape without leading axes of size one, which some files have."""
    sizes = list(shape)
    while sizes[:1] == [1]:
        del sizes[0]
    return sizes


def to_hf_state(
    family: Family, model: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Their tensors (by canonical name, of these shapes) from ours."""
    own = model.state_dict()
    state: dict[str, Tensor] = {}
    for move in moves(family, model):
        for name, part in zip(move.theirs, own[move.ours].split(move.rows), strict=True):
            turned = part.T if move.transposed else part
            state[name] = turned.reshape(shapes[name]).clone()
    for second, first in family.seconds(model).items():
        if second in shapes and second not in state and first in state:
            state[second] = state[first]
    return state


# ---------------------------------------------------------------------------------------------
# Settings


def read_settings(family: Family, foreign: Foreign) -> TransformerConfig:
    """Our settings of a foreign model; unsupported ones are refused by name."""
    known = {**family.known, **foreign.settings}
    only = {**family.only, **(PROBLEMS if foreign.head == "classify" else {})}
    for name, allowed in only.items():
        if known.get(name, allowed[0]) not in allowed:
            choices = " or ".join(map(str, allowed))
            raise UserError(
                f"a {family.kind} model with {name}={known[name]} is not supported: only {choices}"
            )
    for name in family.squares:
        known[name] = _side(family, name, known[name])
    for name in (*family.fields, *family.defaults):
        if name not in known:
            raise DataError(f"config.json has no '{name}', which a {family.kind} model needs")
        if expected := _expected(known[name], family.known.get(name, 1)):
            raise DataError(f"config.json has {name}={known[name]!r}, which should be {expected}")
    flat: Flat = {**family.fixed, **family.architectures[foreign.architecture]}
    for theirs, paths in family.paths.items():
        for path in paths:
            flat[path] = activation(known[theirs]) if _is_activation(path) else known[theirs]
    if flat.get("head.kind") in LABELLED:
        flat["head.labels"] = _labels(known, foreign)
    flat |= family.read(dataclasses.replace(foreign, settings=known))
    flat = _without_pooler(flat) if family.lacks_pooler(foreign) else flat
    for path, value in flat.items():
        if value == SAME_ACTIVATION:
            flat[path] = flat[SAME_ACTIVATION]
        # Each layer has its own tensors: no time is spent on layers they cannot fill.
        if path.endswith("layers") and value is not None and value > len(foreign.tensors):
            raise DataError(f"config.json calls for {value} layers, and the weights have far fewer")
    try:
        return parse(family.model, _nested(_tidy(flat)), "model")
    except UserError as error:
        raise DataError(f"config.json of a {family.kind} model is inconsistent: {error}") from None


def _side(family: Family, name: str, value: Any) -> Any:
    """One number for a square that is stored as two sides."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 2 or value[0] != value[1]:
        raise UserError(f"a {family.kind} model with {name}={value} is not supported: only squares")
    return value[0]


def _expected(value: Any, usual: Any) -> str:
    """What a value should be, judged by its default; empty if it is so."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(usual, str):
        return "" if isinstance(value, str) else "a word"
    if isinstance(usual, float):
        return "" if number else "a number"
    if usual is None:
        return "" if value is None or number else "a number or null"
    integer = number and isinstance(value, int) and abs(value) < LARGEST
    return "" if integer else "a whole number"


def _is_activation(path: str) -> bool:
    return path.endswith("activation")


def _labels(settings: Mapping[str, Any], foreign: Foreign) -> list[str]:
    """The labels by number; names of another count are ignored."""
    named = settings.get("id2label") or {}
    count = settings.get("num_labels", len(named) if isinstance(named, dict) and named else 2)
    most = max(tensor.numel() for tensor in foreign.tensors.values())
    if _expected(count, 1) or count > most:
        raise DataError(f"config.json has num_labels={count!r}, and the weights have not")
    try:
        labels = {int(number): str(label) for number, label in named.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError("config.json has an id2label that is no table of numbers") from None
    if sorted(labels) != list(range(len(named))):
        raise DataError("config.json has an id2label whose numbers do not count up from 0")
    if foreign.head == "classify" and settings.get("problem_type") == "regression" and count > 1:
        raise UserError(f"problem_type=regression of {count} numbers is not supported: only of one")
    exact = len(labels) == count
    return [labels[number] if exact else f"LABEL_{number}" for number in range(count)]


@dataclass(frozen=True)
class ExportPlan:
    """A model of ours in a family: its class with arguments and settings, and the obstacles."""

    family: Family
    architecture: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    obstacles: list[str]


def write_settings(family: Family, config: TransformerConfig) -> ExportPlan:
    """The class and the settings of a model in a family, and what it cannot express."""
    config = _merge_sides(config) if isinstance(config, Seq2SeqConfig) else config
    flat = flatten(config)
    obstacles = []
    heads = family.architectures
    fits = [name for name in heads if _fits(flat, heads[name])]
    bare = [name for name in family.unpooled if _fits(flat, _without_pooler(heads[name]))]
    arguments: dict[str, Any] = {} if fits else {family.unpooled[name]: False for name in bare[:1]}
    fits += bare
    if not fits:
        top = [f"{path}={flat[path]}" for path in flat if path.startswith(ON_TOP)]
        obstacles.append(f"has no class with {', '.join(top) or 'no head'} on top")
    architecture = fits[0] if fits else next(iter(heads))
    for path, value in family.fixed.items():
        if not _holds(flat, path, value) and not FREE.match(path):
            obstacles.append(f"has {path}={value}, and this model {flat.get(path, 'none')}")
            _suppose(flat, path, value)
    settings = family.write(flat)
    if "head.labels" in flat:
        settings["id2label"] = dict(enumerate(flat.pop("head.labels")))
        settings["label2id"] = {label: n for n, label in settings["id2label"].items()}
    for theirs, paths in family.paths.items():
        values = [flat.pop(path, None) for path in paths]
        if None in values:
            obstacles.append(f"needs {paths[values.index(None)]}, and this model has none")
        elif any(value != values[0] for value in values) and not FREE.match(paths[0]):
            obstacles.append(f"has one {theirs} for {' and '.join(paths)}, and this model {values}")
        settings[theirs] = HF_ACTIVATIONS.get(values[0]) if _is_activation(paths[-1]) else values[0]
    used = {*family.fixed, *heads[architecture]}
    for path, value in flat.items():
        on_top = not fits and path.startswith(ON_TOP)  # reported already
        if not (path in used or on_top or FREE.match(path) or _implied(path, config)):
            obstacles.append(f"cannot express {path}={value}")
    return ExportPlan(family, architecture, arguments, settings, obstacles)


def _merge_sides(config: Seq2SeqConfig) -> Seq2SeqConfig:
    """The same model, with what encoder and decoder share set once."""
    for name in ("position", "feedforward"):
        one, other = (getattr(s.of(config), name) for s in (config.encoder, config.decoder))
        if one == other:
            unset: dict[str, Any] = {name: None}
            shared: dict[str, Any] = {
                "encoder": dataclasses.replace(config.encoder, **unset),
                "decoder": dataclasses.replace(config.decoder, **unset),
                name: one,
            }
            config = dataclasses.replace(config, **shared)
    return config


def _suppose(flat: Flat, path: str, value: Any) -> None:
    """Go on as if a part were the family's: one obstacle for each kind is enough."""
    part, _, leaf = path.rpartition(".")
    if leaf == "kind":
        for name in [name for name in flat if name.startswith(f"{part}.")]:
            if not _is_activation(name) and not FREE.match(name):
                del flat[name]
    flat[path] = value


def _fits(flat: Flat, head: Mapping[str, Any]) -> bool:
    top = {path for path in flat if path.startswith(ON_TOP)} - VARYING
    return top <= head.keys() and all(_holds(flat, path, value) for path, value in head.items())


def _without_pooler(flat: Mapping[str, Any]) -> Flat:
    return {path: value for path, value in flat.items() if not path.startswith("pooler.")}


def _holds(flat: Flat, path: str, value: Any) -> bool:
    return bool(flat.get(path) == (flat.get(value) if value == SAME_ACTIVATION else value))


def flatten(config: TransformerConfig) -> Flat:
    """Settings as dotted paths, with every implied size written out."""
    flat = dict(_leaves(dump(config)))
    flat.pop("kind")
    flat.setdefault("ffn_dim", 4 * config.dim)
    flat.setdefault("kv_heads", config.heads)
    flat.setdefault("attention_bias", config.bias)
    flat.setdefault("qkv_bias", flat["attention_bias"])
    flat.setdefault("embed.dim", config.dim)
    if flat.get("pooler.over") == "first":
        del flat["pooler.over"]  # what every family does
    if isinstance(config, Seq2SeqConfig):
        for name in SIDED:
            shared = flat.pop(name)
            for side in ("encoder", "decoder"):
                flat.setdefault(f"{side}.{name}", shared)
    if flat.get("encoder.heads") == flat.get("decoder.heads"):
        flat.setdefault("head_dim", config.dim // flat.get("encoder.heads", config.heads))
    return flat


def _tidy(flat: Flat) -> Flat:
    """Without what is implied: equal sides, sizes that follow from others."""
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


def _implied(path: str, config: TransformerConfig) -> bool:
    if path == "embed.dim":
        return config.embed.dim is None
    if path == "target_vocab_size":
        return bool(getattr(config, path) in (None, config.vocab_size))
    if path not in ("head_dim", "kv_heads", "attention_bias", "qkv_bias"):
        return False
    unset: dict[str, Any] = {path: None}
    try:
        return _attentions(config) == _attentions(dataclasses.replace(config, **unset))
    except UserError:
        return False


def _attentions(config: TransformerConfig) -> list[AttentionConfig]:
    if not isinstance(config, Seq2SeqConfig):
        return [config.attention_config()]
    return [side.of(config).attention_config() for side in (config.encoder, config.decoder)]


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
