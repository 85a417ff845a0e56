"""Families of Hugging Face models as tables that convert settings and tensors in both directions.

A `Family` is one architecture: which of its settings is which of ours, what all its models have in
our terms, and the name of each of our tensors there. families.py has the tables. A model of ours
belongs to a family if reading the settings that were written for it gives the model again.
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
    "relu2": "relu-squared",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
SAME_ACTIVATION = "feedforward.activation"  # a head has the activation of the feed-forward part
# Settings of training and of the input, which do not define a model.
FREE = re.compile(r"init$|(.*[._])?dropout$|drop_path$|embed\.norm\.placement$|pixel_")
PER_STACK = ("layers", "heads", "ffn_dim")  # what encoder and decoder may have each


@dataclass(frozen=True)
class Foreign:
    """A model of another program: its class, its settings, and what only its tensors tell."""

    architecture: str
    settings: Mapping[str, Any]
    tied_head: bool  # the output matrix is the (target's) token table
    tied_inputs: bool  # encoder and decoder have one token table
    has_bias: bool  # the logits have a bias that is not zero
    has_pooler: bool


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
      values of others;
    - `fixed`: our settings that all its models have; `architectures`: the head of each class;
      `superset_of`: a class whose files often are of another; `unpooled`: one that may lack its
      pooler;
    - `read` and `write`: what no table can express;
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
        """Second names of tensors that a model may be stored under."""
        if hasattr(model, "target_tokens"):  # a tied head is tied to the target's table
            return {self.tied[0]: f"{self.variants['separate']['target_tokens']}.weight"}
        return self.aliases

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.unused)

    def foreign(
        self, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Foreign:
        """A foreign model by its settings and its tensors (by canonical name)."""

        def equal(first: str, second: str) -> bool:
            """True if two tensors are equal; one that is not stored is tied to the other."""
            pair = [tensors[name] for name in (first, second) if name in tensors]
            return len(pair) < 2 or torch.equal(*pair)

        encoder, decoder = (f"{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
        head, table = self.tied
        bias, pooler = tensors.get("final_logits_bias"), self.tensors.get("pooler.project", "-")
        return Foreign(
            architecture,
            settings,
            tied_head=equal(head, decoder if decoder in tensors else table),
            tied_inputs=equal(encoder, decoder),
            has_bias=bias is not None and bool(bias.any()),
            has_pooler=any(name.startswith(f"{pooler}.") for name in tensors),
        )


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
            module = module[: module.rindex(".")]
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
# Settings


def read_settings(family: Family, foreign: Foreign) -> TransformerConfig:
    """Our settings of a foreign model; unsupported ones are refused by name."""
    settings = {**family.known, **foreign.settings}
    flat: Flat = {**family.fixed, **family.architectures[foreign.architecture]}
    only = dict(family.only)
    if flat.get("head.kind") in ("classify", "tag"):
        flat["head.labels"] = labels = _labels(settings)
        if flat["head.kind"] == "classify":  # multi-label is not supported
            regression = ("regression",) if len(labels) == 1 else ()
            only["problem_type"] = (None, "single_label_classification", *regression)
    for name, allowed in only.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise _unsupported(family, name, settings[name], allowed)
    if foreign.architecture == family.unpooled and not foreign.has_pooler:
        flat = {path: value for path, value in flat.items() if not path.startswith("pooler.")}
    for name, setting in family.fields.items():
        if name not in settings:
            raise DataError(f"config.json has no '{name}', which a {family.kind} model needs")
        if setting.applies(flat):
            value = settings[name]
            if value is None and isinstance(setting.default, float):
                raise _unsupported(family, name, "null", ["a number"])
            if setting.values is not None:
                if value not in setting.values:
                    raise _unsupported(family, name, value, setting.values)
                value = setting.values[value]
            flat |= dict.fromkeys(setting.paths.split(), value)
    for path in ("tie", "head.tie"):
        if flat.get(path) == "all" and not foreign.tied_head:
            flat[path] = "none"
    flat |= family.read(dataclasses.replace(foreign, settings=settings))
    if flat.get("head.activation") == SAME_ACTIVATION:
        flat["head.activation"] = flat[SAME_ACTIVATION]
    try:
        return parse(family.model, _nested(_tidy(flat)), "model")
    except UserError as error:
        raise DataError(f"config.json of a {family.kind} model is inconsistent: {error}") from None


def _unsupported(family: Family, name: str, value: Any, allowed: Any) -> UserError:
    choices = " or ".join(map(str, allowed))
    return UserError(f"a {family.kind} model with {name}={value} is not supported: only {choices}")


def _labels(settings: Mapping[str, Any]) -> list[str]:
    """The labels by number; names are ignored if there are more or fewer than labels."""
    labels = {int(number): str(label) for number, label in (settings.get("id2label") or {}).items()}
    count = settings.get("num_labels", len(labels) or 2)
    numbered = {number: f"LABEL_{number}" for number in range(count)}
    return [*(labels if labels.keys() == numbered.keys() else numbered).values()]


@dataclass(frozen=True)
class ExportPlan:
    """A model of ours in a family: its class and settings, and the settings to change for it."""

    family: Family
    architecture: str
    settings: dict[str, Any]
    has_pooler: bool
    obstacles: list[str]


def write_settings(family: Family, architecture: str, config: TransformerConfig) -> ExportPlan:
    """Settings of a class for a model; obstacles are the settings that come back as others."""
    ours = flatten(config)
    settings: dict[str, Any] = {}
    for name, setting in family.fields.items():
        value = ours.get(setting.paths.split()[0])
        values = {value: value} if setting.values is None else setting.values
        words = [word for word, known in values.items() if known == value]
        settings |= {name: words[0]} if words and value is not None else {}
    settings |= family.write(ours)
    if "head.labels" in ours:
        settings["id2label"] = dict(enumerate(ours["head.labels"]))
        settings["label2id"] = {label: n for n, label in settings["id2label"].items()}
    tie = ours.get("tie", ours.get("head.tie"))
    foreign = Foreign(
        architecture,
        settings,
        tied_head=tie in ("all", "target"),
        tied_inputs=tie in ("all", "inputs"),
        has_bias=ours.get("output.bias", "none") != "none",
        has_pooler="pooler.activation" in ours,
    )
    try:
        theirs = flatten(read_settings(family, foreign))
    except UserError as error:
        return ExportPlan(family, architecture, settings, foreign.has_pooler, [str(error)])
    if "embed.dim" in theirs:  # only ELECTRA has this setting
        ours.setdefault("embed.dim", config.dim)
    differing = [
        path
        for path in ours | theirs
        if ours.get(path) != theirs.get(path) and not FREE.match(path)
    ]
    # Another kind of a part has other settings too.
    kinds = {path for path in differing if path.endswith(".kind")}
    changes = {path: (_word(theirs.get(path)), _word(ours.get(path))) for path in differing}
    obstacles = [
        f"model.{path.removesuffix('.kind')}={needed} (here {actual})"
        for path, (needed, actual) in changes.items()
        if path in kinds or f"{path.rpartition('.')[0]}.kind" not in kinds
    ]
    return ExportPlan(family, architecture, settings, foreign.has_pooler, obstacles)


def _word(value: Any) -> str:
    """A value as one types it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ---------------------------------------------------------------------------------------------
# Dotted paths


def flatten(config: TransformerConfig) -> Flat:
    """Settings as dotted paths, with every implied size written out.

    Exact attention implementations are left out: they are all the same model.
    """
    flat = dict(_leaves(dump(config)))
    flat.pop("kind")
    for side in ("", "encoder.", "decoder."):
        part = getattr(config, side[:-1]) if side and hasattr(config, side[:-1]) else config
        if part.attention is None or part.attention.exact:
            flat = {k: v for k, v in flat.items() if not k.startswith(f"{side}attention.")}
    flat.setdefault("ffn_dim", 4 * config.dim)
    if flat.get("output.bias") == "trained":
        flat["output.bias"] = "fixed"  # the same model
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
    implied["target_vocab_size"] = flat.get("vocab_size")
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
