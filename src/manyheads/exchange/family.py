"""Families of Hugging Face models as tables that convert settings and tensors in both directions.

A `Family` is one architecture: which of its settings is which of ours, what all its models have in
our terms, and the name of each of our tensors there. families.py has the tables.
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
from manyheads.nn.attention import SelfAttention
from manyheads.presets import TransformerConfig

Flat = dict[str, Any]  # our settings as dotted paths and plain values
Names = dict[str, str]  # our module or tensor → theirs

REQUIRED: Any = object()  # the default of a setting that every file must have
REMOVED: Any = object()  # the value of an entry that a derived family does not have
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
SAME_ACTIVATION = "feedforward.activation"  # a head has the activation of the feed-forward part
# Settings of training and of the implementation, which do not define a model.
FREE = re.compile(
    r"((encoder|decoder)\.)?attention\.|init$|(.*[._])?dropout$|embed\.norm\.placement$"
)
PER_STACK = ("layers", "heads", "ffn_dim")  # what encoder and decoder may have each
HEAD_PARTS = ("head.", "pooler.", "next_sentence.")
ANY_VALUE = {
    "head.labels",
    "head.dropout",
    "head.tie",
    "pooler.dim",
}  # settings that all classes have
# Multi-label classification is not supported.
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "problem_type": (None, "single_label_classification", "regression"),
}
NO_POOLER = "add_pooling_layer"  # the argument of a class that may be built without its pooler
MAX_INTEGER = 2**53  # integers up to there are exact as floats


def refuse_approximations(model: nn.Module) -> None:
    """Refuse attention implementations that approximate: no other program has them."""
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention) and not module.config.core.exact:
            config, side = model.config, name.split(".")[0]
            overridden = isinstance(config, Seq2SeqConfig) and getattr(config, side).attention
            raise UserError(
                f"model.{f'{side}.' if overridden else ''}attention={module.config.core.kind} "
                "cannot be exported: export a model trained with exact attention "
                "(model.attention=fused)"
            )


@dataclass(frozen=True)
class Foreign:
    """A model of another program: settings, tensors by canonical name, its class, its head."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    architecture: str
    head: str | None

    def equal(self, first: str, second: str) -> bool:
        """True if two tensors are equal; one that is not stored is tied to the other."""
        pair = [self.tensors[name] for name in (first, second) if name in self.tensors]
        return len(pair) < 2 or torch.equal(*pair)


@dataclass(frozen=True)
class Field:
    """One of their settings: our paths (separated by spaces, all equal), and their default.

    `values` maps theirs to ours if they differ. A path of a head applies to `heads` only.
    """

    paths: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    heads: tuple[str, ...] = ()

    def applies(self, flat: Flat) -> bool:
        part = self.paths.split(".")[0]
        if part == "head":
            return flat.get("head.kind") in self.heads
        return part != "pooler" or "pooler.activation" in flat


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of Hugging Face, as tables.

    - `fields`: their settings; `defaults`: further ones that only `read` uses; `only`: supported
      values of others; `squares`: settings that may be two equal sides;
    - `fixed`: our settings that all its models have; `architectures`: the head of each class;
      `superset_of`: a class whose files often are of another; `unpooled`: one that may lack its
      pooler;
    - `read` and `write`: what no table can express. `write` removes the settings it has expressed;
    - `tensors`: our module or tensor → theirs. A module of a block is in their `layer` number {n};
      {stack} is encoder or decoder; "q|k|v" are matrices that are one of ours; {last} is T5's
      number of a feed-forward part. `variants`: the same for models with a kind of head, a gated
      feed-forward part, or separate source and target tables;
    - `tied`: the output matrix and the token table; `same`: other second names of a tensor;
      `unused`: patterns of tensors to ignore; `renamed`: old spellings; `transposed`: all matrices.
    """

    kind: str
    prefix: str
    model: type[TransformerConfig]
    fields: Mapping[str, Field]
    fixed: Mapping[str, Any]
    architectures: Mapping[str, Mapping[str, Any]]
    layer: str
    tensors: Names
    tied: tuple[str, str] = ("", "")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    squares: Sequence[str] = ()
    superset_of: Mapping[str, str] = field(default_factory=dict)
    unpooled: str = ""
    read: Callable[[Foreign], Flat] = lambda foreign: {}
    write: Callable[[Flat], dict[str, Any]] = lambda flat: {}
    variants: Mapping[str, Names] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    transposed: bool = False

    def derive(self, replaced: Sequence[str] = (), **changes: Any) -> "Family":
        """A family that differs in these fields.

        A table is merged with the one of this family, except `architectures` and the `replaced`
        ones; `REMOVED` removes an entry.
        """
        for name, value in changes.items():
            if isinstance(value, dict) and name not in ("architectures", *replaced):
                merged = {**getattr(self, name), **value}
                changes[name] = {k: v for k, v in merged.items() if v is not REMOVED}
        return dataclasses.replace(self, **changes)

    @property
    def known(self) -> dict[str, Any]:
        """Their settings that have a default."""
        defaults = {name: f.default for name, f in self.fields.items() if f.default is not REQUIRED}
        return {**defaults, **self.defaults}

    @property
    def aliases(self) -> dict[str, str]:
        """Second names of tensors → first names."""
        return {self.tied[0]: self.tied[1], **self.same}

    def canonical(self, name: str) -> str:
        """A tensor's name without the prefix of the bare model, in the newest spelling."""
        name = name.removeprefix(self.prefix)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def names(self, model: nn.Module) -> Names:
        config: Any = model.config
        kinds = [getattr(getattr(config, "head", None), "kind", ""), config.feedforward.kind]
        kinds += ["separate"] if hasattr(model, "target_tokens") else []
        return self.tensors | {k: v for x in kinds for k, v in self.variants.get(x, {}).items()}

    def second_names(self, model: nn.Module) -> dict[str, str]:
        """Second names of tensors that the model has."""
        if hasattr(model, "target_tokens"):  # a tied head is tied to the target's table
            return {self.tied[0]: f"{self.variants['separate']['target_tokens']}.weight"}
        variants = [names for kind, names in self.variants.items() if kind != "separate"]
        absent = {module for names in variants for module in names.values()}
        absent -= {*self.names(model).values()}
        return {
            second: first
            for second, first in self.aliases.items()
            if second.rpartition(".")[0] not in absent
        }

    def lacks_pooler(self, foreign: Foreign) -> bool:
        stored = {name.rpartition(".")[0] for name in foreign.tensors}
        return (
            foreign.architecture == self.unpooled and self.tensors["pooler.project"] not in stored
        )

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
    """Where each of our tensors is in a model of the family."""
    names = family.names(model)
    result = []
    for ours, tensor in model.state_dict().items():
        block = re.match(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", ours)
        path = module = block[3] if block else re.sub(r"^(encoder|decoder)", "{stack}", ours)
        while module not in names:
            if "." not in module:
                raise UserError(f"{family.kind} has no tensor for {ours}")
            module = module.rpartition(".")[0]
        pattern = f"{family.layer}.{names[module]}" if block else names[module]
        stack = "decoder" if ours.startswith("decoder") else "encoder"
        last = 2 if stack == "decoder" else 1  # a decoder has cross-attention before it
        name = pattern.format(stack=stack, n=block and block[2], last=last)
        prefix, dot, matrices = name.rpartition(".")
        leaf = path.removeprefix(module)
        theirs = tuple(f"{prefix}{dot}{matrix}{leaf}" for matrix in matrices.split("|"))
        rows: tuple[int, ...] = (len(tensor),)
        if len(theirs) > 1:  # queries, keys and values; cross-attention has a matrix of queries
            attention: Any = model.get_submodule(ours.rpartition(".project.")[0])
            rows = tuple(attention.config.sizes[not isinstance(attention, SelfAttention) :])
        transposed = family.transposed and block is not None and tensor.ndim == 2
        result.append(Move(ours, theirs, rows, transposed))
    return result


def from_hf_state(
    family: Family, model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our tensors from theirs (by canonical name); none may be missing or left over."""
    stored = dict(tensors)
    seconds = family.second_names(model)
    routes = moves(family, model)
    used = {name for move in routes for name in move.theirs}
    for second, first in seconds.items():
        if first not in stored and second in stored and second not in used:
            stored[first] = stored[second]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for move in routes:
        rest, parts = shapes[move.ours][1:], []
        for name, rows in zip(move.theirs, move.rows, strict=True):
            if name not in stored:
                raise DataError(f"the weights have no {name}, which config.json calls for")
            shape = (*rest, rows) if move.transposed else (rows, *rest)
            actual = stored[name].shape  # some files have additional axes of size 1
            if [n for n in actual if n != 1] != [n for n in shape if n != 1]:
                raise DataError(
                    f"{name} is {list(actual)}, but config.json calls for {list(shape)}"
                )
            part = stored[name].reshape(shape)
            parts.append(part.T if move.transposed else part)
        state[move.ours] = torch.cat(parts).contiguous()
    for name in sorted(stored.keys() - used):
        if family.ignores(name) or name in family.aliases.values():
            continue
        twin = seconds.get(name)
        if twin not in used:
            raise DataError(f"the weights hold {name}, which config.json does not call for")
        if not torch.equal(stored[name], stored[str(twin)]):
            raise DataError(f"{name} and {twin} should be one tensor, and differ")
    return state


def to_hf_state(
    family: Family, model: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Their tensors (by canonical name, of these shapes) from ours."""
    tensors = model.state_dict()
    state: dict[str, Tensor] = {}
    for move in moves(family, model):
        for name, part in zip(move.theirs, tensors[move.ours].split(move.rows), strict=True):
            state[name] = (part.T if move.transposed else part).reshape(shapes[name]).clone()
    for second, first in family.second_names(model).items():
        if second in shapes and second not in state and first in state:
            state[second] = state[first]
    return state


# ---------------------------------------------------------------------------------------------
# Settings of theirs → ours


def read_settings(family: Family, foreign: Foreign) -> TransformerConfig:
    """Our settings of a foreign model; unsupported ones are refused by name."""
    settings = {**family.known, **foreign.settings}
    only = {**family.only, **(PROBLEMS if foreign.head == "classify" else {})}
    for name, allowed in only.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise _unsupported(family, name, settings[name], allowed)
    for name in family.squares:
        sides = settings[name]
        if isinstance(sides, list | tuple):
            if len(sides) != 2 or sides[0] != sides[1]:
                raise _unsupported(family, name, sides, ["squares"])
            settings[name] = sides[0]
    for name in (*family.fields, *family.defaults):
        if name not in settings:
            raise DataError(f"config.json has no '{name}', which a {family.kind} model needs")
        if expected := _expected(settings[name], family.known.get(name, 1)):
            raise DataError(f"config.json has {name}={settings[name]!r}: it must be {expected}")
    flat: Flat = {**family.fixed, **family.architectures[foreign.architecture]}
    for name, setting in family.fields.items():
        if setting.applies(flat):
            value = settings[name]
            if setting.values is not None:
                if value not in setting.values:
                    raise _unsupported(family, name, value, setting.values)
                value = setting.values[value]
            flat |= dict.fromkeys(setting.paths.split(), value)
    for path in ("tie", "head.tie"):
        if flat.get(path) == "all" and not foreign.equal(*family.tied):
            flat[path] = "none"
    if flat.get("head.kind") in ("classify", "tag"):
        flat["head.labels"] = _labels(settings, foreign)
    flat |= family.read(dataclasses.replace(foreign, settings=settings))
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


def _unsupported(family: Family, name: str, value: Any, allowed: Any) -> UserError:
    choices = " or ".join(map(str, allowed))
    return UserError(f"a {family.kind} model with {name}={value} is not supported: only {choices}")


def _expected(value: Any, default: Any) -> str:
    """The type that a value should have, that of its default; empty if it has it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return "" if isinstance(value, str) else "a word"
    if isinstance(default, float):
        return "" if is_number else "a number"
    if default is None:
        return "" if value is None or is_number else "a number or null"
    is_integer = is_number and isinstance(value, int) and abs(value) < MAX_INTEGER
    return "" if is_integer else "an integer"


def _labels(settings: Mapping[str, Any], foreign: Foreign) -> list[str]:
    """The labels by number; names are ignored if there are more or fewer than labels."""
    named = settings.get("id2label") or {}
    count = settings.get("num_labels", len(named) if isinstance(named, dict) and named else 2)
    most = max(tensor.numel() for tensor in foreign.tensors.values())
    if _expected(count, 1) or count > most:
        raise DataError(f"config.json has num_labels={count!r}, and the weights have not")
    try:
        labels = {int(number): str(label) for number, label in named.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError("config.json has an id2label that is not a table of numbers") from None
    if sorted(labels) != list(range(len(named))):
        raise DataError("config.json has an id2label whose numbers do not count up from 0")
    if foreign.head == "classify" and settings.get("problem_type") == "regression" and count > 1:
        raise UserError(f"problem_type=regression of {count} numbers is not supported: only of one")
    return [
        labels[number] if len(labels) == count else f"LABEL_{number}" for number in range(count)
    ]


# ---------------------------------------------------------------------------------------------
# Our settings → theirs


@dataclass(frozen=True)
class ExportPlan:
    """A model of ours in a family: its class with arguments and settings, and the obstacles."""

    family: Family
    architecture: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    obstacles: list[str]


def write_settings(family: Family, config: TransformerConfig) -> ExportPlan:
    """The class and the settings of a model in a family, and what the family cannot express."""
    flat = flatten(_merge_stacks(config) if isinstance(config, Seq2SeqConfig) else config)
    obstacles = []
    classes = family.architectures
    fits = [name for name in classes if _fits(flat, classes[name])]
    arguments = {}
    bare = _without_pooler(classes.get(family.unpooled, {}))
    if not fits and family.unpooled and _fits(flat, bare):
        fits, arguments = [family.unpooled], {NO_POOLER: False}
    if not fits:
        head = [f"{path}={flat[path]}" for path in flat if path.startswith(HEAD_PARTS)]
        obstacles.append(f"has no class with {', '.join(head) or 'no head'} on top")
    architecture = fits[0] if fits else next(iter(classes))
    for path, value in family.fixed.items():
        if not _holds(flat, path, value) and not FREE.match(path):
            obstacles.append(f"has {path}={value}, and this model {flat.get(path, 'none')}")
    settings = family.write(flat)
    if "head.labels" in flat:
        settings["id2label"] = dict(enumerate(flat.pop("head.labels")))
        settings["label2id"] = {label: n for n, label in settings["id2label"].items()}
    used = {*family.fixed, *classes[architecture]}
    for name, setting in family.fields.items():
        paths = setting.paths.split()
        values = [flat.get(path) for path in paths]
        used |= {*paths}
        if not setting.applies(flat):
            continue
        theirs = values[:1] if setting.values is None else _theirs(setting.values, values[0])
        if values[0] is None and setting.default is not None:
            if not FREE.match(paths[0]):
                obstacles.append(f"needs {paths[0]}, and this model has none")
        elif not theirs:
            obstacles.append(f"cannot express {paths[0]}={values[0]}")
        elif len({*values}) > 1 and not FREE.match(paths[0]):
            obstacles.append(f"has one {name} for {' and '.join(paths)}, and this model {values}")
        else:
            settings[name] = theirs[0]
    implied = _implied(flat)
    if config.embed.dim is not None:  # a model of a family that has this setting, ELECTRA
        del implied["embed.dim"]
    for path, value in flat.items():
        reported = not fits and path.startswith(HEAD_PARTS)
        if not (path in used or reported or FREE.match(path) or implied.get(path) == value):
            obstacles.append(f"cannot express {path}={value}")
    return ExportPlan(family, architecture, arguments, settings, obstacles)


def _theirs(values: Mapping[Any, Any], ours: Any) -> list[Any]:
    return [theirs for theirs, value in values.items() if value == ours]


def _merge_stacks(config: Seq2SeqConfig) -> Seq2SeqConfig:
    """The same model, with what encoder and decoder share set once."""
    for name in ("position", "feedforward"):
        encoder, decoder = (getattr(x.of(config), name) for x in (config.encoder, config.decoder))
        if encoder == decoder:
            unset: dict[str, Any] = {name: None}
            shared: dict[str, Any] = {
                "encoder": dataclasses.replace(config.encoder, **unset),
                "decoder": dataclasses.replace(config.decoder, **unset),
                name: encoder,
            }
            config = dataclasses.replace(config, **shared)
    return config


def _fits(flat: Flat, head: Mapping[str, Any]) -> bool:
    """True if a class has exactly the head of a model."""
    paths = {path for path in flat if path.startswith(HEAD_PARTS)} - ANY_VALUE
    return paths <= head.keys() and all(_holds(flat, path, value) for path, value in head.items())


def _without_pooler(flat: Mapping[str, Any]) -> Flat:
    return {path: value for path, value in flat.items() if not path.startswith("pooler.")}


def _holds(flat: Flat, path: str, value: Any) -> bool:
    return bool(flat.get(path) == (flat.get(value) if value == SAME_ACTIVATION else value))


# ---------------------------------------------------------------------------------------------
# Dotted paths


def flatten(config: TransformerConfig) -> Flat:
    """Settings as dotted paths, with every implied size written out."""
    flat = dict(_leaves(dump(config)))
    flat.pop("kind")
    flat.setdefault("ffn_dim", 4 * config.dim)
    if flat.get("pooler.over") == "first":
        del flat["pooler.over"]  # what every family does
    if isinstance(config, Seq2SeqConfig):
        for name in PER_STACK:
            shared = flat.pop(name)
            for side in ("encoder", "decoder"):
                flat.setdefault(f"{side}.{name}", shared)
    return {**_implied(flat), **flat}


def _implied(flat: Flat) -> Flat:
    """The values that some settings have unless they are set."""
    bias, dim = flat["bias"], flat["dim"]
    implied = {"attention_bias": bias, "qkv_bias": flat.get("attention_bias", bias)}
    implied |= {"embed.dim": dim, "target_vocab_size": flat.get("vocab_size")}
    heads = {flat[x] for x in ("heads", "encoder.heads", "decoder.heads") if x in flat}
    if len(heads) == 1:
        [count] = heads
        implied["kv_heads"] = count
        if count > 0 and dim % count == 0:
            implied["head_dim"] = dim // count
    return implied


def _tidy(flat: Flat) -> Flat:
    """Without implied values, and with what encoder and decoder share set once."""
    flat = {path: value for path, value in flat.items() if value is not None}
    for name in PER_STACK:
        if f"encoder.{name}" in flat:
            flat[name] = flat.pop(f"encoder.{name}")
            if flat.get(f"decoder.{name}") == flat[name]:
                del flat[f"decoder.{name}"]
    implied = _implied(flat)
    for path in ("kv_heads", "head_dim", "attention_bias"):
        if path in flat and flat[path] == implied.get(path):
            del flat[path]
    return flat


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
