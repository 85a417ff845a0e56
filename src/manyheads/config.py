"""Settings: frozen dataclasses ↔ TOML, with checked `a.b=c` overrides.

A choice between parts is a union of dataclasses, each with a `kind`; in TOML it is a word
(`position = "rotary"`) or a table with that kind (`{kind = "rotary", base = 500.0}`). A single
word for any other table sets the one field that has the word among its choices, so that
`model.norm=post` means `model.norm.placement=post`.

A field declares its range and its meaning in its type:

    beam: Annotated[int, Between(1, 1000), "Beam width; 1 is greedy search"] = 4

`parse` checks ranges; `describe` lists all settings with type, choices, default and meaning. Old
spellings stay readable: a class lists renamed fields in `RENAMED` (old → new) and an old `kind`
in `OLD_KINDS`; `Renamed` in an annotation maps old values. Run folders of older releases may have
settings that were removed: `REMOVED` lists the values with which they still load.
"""

import copy
import dataclasses
import difflib
import math
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import tomli_w

from manyheads.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Between:
    """Declares the range of a number; `open_low` and `open_high` exclude the end points."""

    low: float | int
    high: float | int = math.inf
    open_low: bool = False
    open_high: bool = False

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if self.open_low else f"at least {self.low}"
        low = f"above {self.low}" if self.open_low else f"from {self.low}"
        return f"{low} {'to below' if self.open_high else 'to'} {self.high}"

    def check(self, value: Any, where: str) -> None:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if not (above and below) or value in (math.inf, -math.inf):
            raise UserError(f"{where}={value} must be {self}")


class Renamed:
    """Declares old spellings of a setting's values: `Renamed(old="new")`; `_` stands for `-`."""

    def __init__(self, **values: str) -> None:
        self.values = {old.replace("_", "-"): new for old, new in values.items()}


Count = Annotated[int, Between(1)]
Natural = Annotated[int, Between(0)]
NonNegative = Annotated[float, Between(0)]
Positive = Annotated[float, Between(0, open_low=True)]
Probability = Annotated[float, Between(0, 1, open_high=True)]  # of dropping, say: never all
Fraction = Annotated[float, Between(0, 1)]


class Setting(NamedTuple):
    """One setting as `manyheads settings` shows it; `default` is a value as TOML has it."""

    name: str
    type: str
    default: Any
    meaning: str

    @property
    def text(self) -> str:
        """The value as an override has it."""
        value = self.default
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)


WORDS_FOR_NONE = ("none", "null", "off")
EXTENSIONS: list[tuple[frozenset[Any], type]] = []  # a union's options, and a plug-in's part


# What people and other libraries call some settings.
OTHER_NAMES = {
    **dict.fromkeys(("lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "batch_tokens"),
    **dict.fromkeys(("amp", "bf16", "fp16", "autocast"), "precision"),
    **dict.fromkeys(("pretrained", "finetune", "fine_tune", "fine_tuning"), "init"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), "patience"),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm"), "clip"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "schedule"),
    **dict.fromkeys(("context_length", "block_size", "max_seq_length"), "max_length"),
    **dict.fromkeys(("num_beams", "beam_size", "beam_width"), "beam"),
    **dict.fromkeys(("d_model", "hidden_size", "n_embd"), "dim"),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "number_of_layers"), "layers"),
    **dict.fromkeys(("num_heads", "n_head", "nhead", "number_of_heads"), "heads"),
    "d_ff": "ffn_dim",
    "logging": "log_to",
}


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest right name, or all of them."""
    known = sorted(set(known))
    close = [name for name in known if word and name.startswith(f"{word}-")]
    close = close[:1] or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'nothing'}"


@overload
def parse(kind: type[T], value: object, where: str = "") -> T: ...
@overload
def parse(kind: Any, value: object, where: str = "") -> Any: ...
def parse(kind: Any, value: object, where: str = "") -> Any:
    """Build `kind` from plain TOML or JSON values; a wrong name or type is a UserError."""
    return _convert(kind, value, where, None)


def change(config: T, table: Mapping[str, Any]) -> T:
    """The same settings with those of a table; a table inside it changes only what it names.

    Checks run once all are applied: `model.heads=6 model.dim=384` may come in any order.
    """
    result: T = _convert(type(config), table, "", config)
    return result


def override_all(config: T, assignments: Sequence[str]) -> T:
    """Apply `a.b=c` overrides; later ones win."""
    return change(config, as_table(assignments))


def assign(config: T, assignments: Sequence[str]) -> T:
    """The same without the checks of `config` itself, for incomplete settings."""
    changed = copy.copy(config)
    for name, value in _convert_fields(type(config), as_table(assignments), "", config).items():
        object.__setattr__(changed, name, value)
    return changed


def is_setting(word: str) -> bool:
    """True for `name=value`; the name has no slash, so `./name=value` is a path."""
    name, equals, _ = word.partition("=")
    return bool(equals) and "/" not in name


def as_table(assignments: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` overrides as nested tables. `kind` is the word for a part as a whole."""
    table: dict[str, Any] = {}
    # The word for a part comes before its fields.
    for assignment in sorted(assignments, key=lambda text: text.partition("=")[0].count(".")):
        path, equals, text = assignment.partition("=")
        *parents, name = path.removesuffix(".kind").split(".")
        if not equals or not path:
            raise UserError(
                f"'{assignment}' is not a setting: write it as name=value, "
                "e.g. seed=1 or data.folder=corpus"
            )
        node = table
        for parent in parents:
            inner = node.get(parent, {})
            node[parent] = node = inner if isinstance(inner, dict) else {"kind": inner}
        node[name] = text
    return table


def dump(config: Any) -> dict[str, Any]:
    """A dataclass as plain values; fields that are None by default are left out."""
    table: dict[str, Any] = {"kind": config.kind} if hasattr(config, "kind") else {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None or field.default is not None:
            table[field.name] = _plain(value, _hints(type(config))[field.name])
    return table


def _plain(value: Any, hint: Any) -> Any:
    """A value as TOML has it; None, which TOML lacks, is a word."""
    if value is None:
        return _words_for_none(hint)[0]
    if isinstance(value, tuple):
        return [_plain(item, hint) for item in value]
    if dataclasses.is_dataclass(value):
        return dump(value)
    return str(value) if isinstance(value, Path) else value


def describe(config: Any, prefix: str = "", *, other_kinds: bool = True) -> Iterator[Setting]:
    """Every setting of a configuration: name, type and choices, value, meaning.

    Below the top level, where a part is chosen by its kind, the settings of the other kinds follow
    those of the chosen one.
    """
    for field in dataclasses.fields(config):
        hint, value = _hints(type(config))[field.name], getattr(config, field.name)
        name = f"{prefix}{field.name}"
        parts: list[Any] = [part for part in _options(hint) if dataclasses.is_dataclass(part)]
        is_part = dataclasses.is_dataclass(value)
        if not is_part or hasattr(value, "kind"):
            shown = value.kind if is_part else _plain(value, hint)
            yield Setting(name, _type_text(hint), shown, _meaning(hint))
        chosen = list(describe(value, f"{name}.", other_kinds=other_kinds)) if is_part else []
        yield from chosen
        if other_kinds and value is None and len(parts) == 1 and not hasattr(parts[0], "kind"):
            yield from describe(parts[0](), f"{name}.")
        others: dict[str, tuple[list[str], Setting]] = {}
        for part in parts if other_kinds and prefix and is_part else ():
            for setting in describe(part(), f"{name}.") if not isinstance(value, part) else ():
                others.setdefault(setting.name, ([], setting))[0].append(part.kind)
        for kinds, setting in others.values():
            if setting.name not in {row.name for row in chosen}:
                yield setting._replace(meaning=f"{name}={'|'.join(kinds)}: {setting.meaning}")


def _meaning(hint: Any) -> str:
    """The first text in an annotation."""
    annotations = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((text for text in annotations if isinstance(text, str)), "")


def _type_text(hint: Any) -> str:
    """A type in words: its choices, or its name and range."""
    names = {int: "integer", float: "number", str: "text", Path: "path", bool: "true|false"}
    annotations = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    words = []
    for option in _options(hint):
        if option is type(None):
            words.append(_words_for_none(hint)[0])
        elif get_origin(option) is Annotated:
            words.append(_type_text(option))
        elif get_origin(option) is Literal:
            words.append("|".join(map(str, get_args(option))))
        elif get_origin(option) is tuple:
            words.append(f"list of {_type_text(get_args(option)[0])}")
        else:
            words.append(getattr(option, "kind", names.get(option, "table")))
    return "|".join(words) + "".join(f" ({a})" for a in annotations if isinstance(a, Between))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def to_toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(table)


# --- types ---


def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def _plain_type(hint: Any) -> Any:
    """The type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, with those that plug-ins add; of another type, itself."""
    hint = _plain_type(hint)
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return (*options, *(part for union, part in EXTENSIONS if union.issubset(options)))


def extend(union: Any, part: Any) -> None:
    """Add a part to a union, wherever settings have that union or one that includes it."""
    kind = getattr(part, "kind", None)
    if not hasattr(part, "__dataclass_fields__") or kind is None:
        raise UserError(f"{part!r} is not a dataclass with a kind")
    if kind in _kinds(union):
        raise UserError(f"there is a kind '{kind}' already: choose another name")
    EXTENSIONS.append((frozenset(get_args(union)), part))


def _kinds(hint: Any) -> dict[str, Any]:
    """The parts of a union by their kind, old kinds included."""
    parts = [option for option in _options(hint) if hasattr(option, "kind")]
    return {kind: part for part in parts for kind in kinds_of(part)}


def kinds_of(part: Any) -> tuple[str, ...]:
    """The words for a part: its kind, and what older releases called it."""
    return (part.kind, *getattr(part, "OLD_KINDS", ()))


def _words_for_none(hint: Any) -> list[str]:
    """A part may be called "none" itself; then that word means the part."""
    return [word for word in WORDS_FOR_NONE if word not in _kinds(hint)]


# --- values ---


def _convert(hint: Any, value: Any, where: str, current: Any) -> Any:
    """`value` as the annotated type; `current` is what an override changes."""
    annotations = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for annotation in annotations:
        if isinstance(annotation, Renamed) and isinstance(value, str):
            value = annotation.values.get(value, value)
    value = _convert_plain(_plain_type(hint), value, where, current)
    for annotation in annotations:
        if isinstance(annotation, Between) and value is not None:
            annotation.check(value, where)
    return value


def _convert_plain(hint: Any, value: Any, where: str, current: Any) -> Any:
    """`value` as a type without annotations."""
    if len(_options(hint)) > 1:
        return _convert_union(hint, value, where, current)
    if get_origin(hint) is Annotated:
        return _convert(hint, value, where, current)
    if dataclasses.is_dataclass(hint):
        return _convert_table(hint, value, where, current)
    if isinstance(value, Mapping):
        name = next(iter(value), "NAME")
        raise UserError(f"'{where}' is a single value: there is no '{where}.{name}'")
    if get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in get_args(hint)}
        if str(value) in choices:
            return choices[str(value)]
        raise UserError(f"{where}={value}: {nearest(str(value), choices)}")
    if get_origin(hint) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise UserError(f"{where} is a list: write it as a,b,c (not {value!r})")
        return tuple(_convert(get_args(hint)[0], item, where, None) for item in items if item != "")
    return _convert_simple(hint, value, where)


def _convert_simple(hint: Any, value: Any, where: str) -> Any:
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise UserError(f"{where} is true or false (not '{value}')")
    if isinstance(value, hint) and not isinstance(value, bool):
        return value
    try:
        if hint is int and isinstance(value, str):
            digits = value.replace("_", "")
            if digits.lstrip("+-").isdigit():  # not by `float`, which has only 53 bits
                return int(digits)
            if float(digits).is_integer():  # 1e6
                return int(float(digits))
        if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            return float(value)
        if hint is str and isinstance(value, (int, float)):
            return str(value)
        if hint is Path and isinstance(value, str):
            return Path(value)
    except (ValueError, OverflowError):
        pass
    names = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    raise UserError(f"{where} is {names.get(hint, hint)} (not {value!r})")


def _convert_union(hint: Any, value: Any, where: str, current: Any) -> Any:
    words_for_none, kinds = _words_for_none(hint), _kinds(hint)
    rest = [option for option in _options(hint) if option is not type(None)]
    is_optional = len(rest) < len(_options(hint))
    if is_optional and (value is None or str(value).lower() in words_for_none):
        return None
    if isinstance(value, tuple(kinds.values())):
        return _convert_table(type(value), value, where, None)
    if kinds:
        table = value if isinstance(value, Mapping) else {"kind": value}
        # A table without a kind is of the current part, or of the only one.
        default = getattr(current, "kind", next(iter(kinds)) if len(kinds) == 1 else None)
        word = table.get("kind", default)
        if not isinstance(word, str) or word not in kinds:
            known = [part.kind for part in dict.fromkeys(kinds.values())]
            known += words_for_none[:1] if is_optional else []
            raise UserError(f"{where}={word}: {nearest(str(word), known)}")
        if word != kinds[word].kind and current is not None:
            print(f"'{where}={word}' is now '{where}={kinds[word].kind}'", file=sys.stderr)
        same = current if type(current) is kinds[word] else None
        return _convert_table(kinds[word], {**table, "kind": word}, where, same)
    errors = []
    for option in rest:
        try:
            return _convert(option, value, where, current)
        except UserError as error:
            errors.append(str(error))
    raise UserError(" or ".join(errors))


def _convert_table(hint: Any, value: Any, where: str, current: Any) -> Any:
    if isinstance(value, hint):  # built in Python: check its values
        fields = [field.name for field in dataclasses.fields(hint)]
        _convert_fields(hint, {name: getattr(value, name) for name in fields}, where, None)
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        raise UserError(f"{where or 'the file'} is a table of settings (not {value!r})")
    values = _convert_fields(hint, value, where, current)
    if current is not None:
        return dataclasses.replace(current, **values)
    for field in dataclasses.fields(hint):
        has_default = field.default is not field.default_factory  # both are MISSING
        if field.name not in values and not has_default:
            raise UserError(f"'{f'{where}.{field.name}'.lstrip('.')}' is needed: set it")
    return hint(**values)


def _convert_fields(hint: Any, table: Mapping[str, Any], where: str, current: Any) -> Any:
    """The fields that a table names, by their present names."""
    hints, prefix = _hints(hint), f"{where}." if where else ""
    names = [field.name for field in dataclasses.fields(hint)]
    word = table.get("kind")
    if word is not None and (not hasattr(hint, "kind") or word not in kinds_of(hint)):
        table = {**_word_as_fields(hint, hints, word, where or "kind"), **table}
    values: dict[str, Any] = {}
    for key, item in table.items():
        if key == "kind":
            continue
        name = getattr(hint, "RENAMED", {}).get(key, key)
        if item in getattr(hint, "REMOVED", {}).get(name, ()):
            continue
        if name not in names:
            is_kind = f" is {hint.kind}" if hasattr(hint, "kind") else ""
            advice = _advice(OTHER_NAMES.get(name, name), names, prefix, current)
            raise UserError(
                f"there is no setting '{prefix}{name}': {advice} ({where or 'the run'}{is_kind})"
            )
        if name != key and current is not None:  # an override, not a file of an older release
            print(f"'{prefix}{key}' is now '{prefix}{name}'", file=sys.stderr)
        values[name] = _convert(hints[name], item, prefix + name, getattr(current, name, None))
    return values


def _advice(name: str, names: list[str], prefix: str, current: Any) -> str:
    """The setting that was probably meant, here or in one of the parts."""
    parts = [part for part in names if hasattr(getattr(current, part, None), name)]
    known = [f"{part}.{name}" for part in parts] if name not in names else [name]
    if known:
        return f"did you mean '{prefix}{known[0]}'?"
    return nearest(prefix + name, [prefix + known for known in names])


def _word_as_fields(hint: Any, hints: Mapping[str, Any], word: Any, where: str) -> dict[str, str]:
    """A single word for a table sets the field that has it as a choice."""
    choices = {
        str(choice): field.name
        for field in reversed(dataclasses.fields(hint))  # the first field of several wins
        if get_origin(_plain_type(hints[field.name])) is Literal
        for choice in get_args(_plain_type(hints[field.name]))
    }
    if word in choices:
        return {choices[word]: word}
    names = ", ".join(f"{where}.{field.name}" for field in dataclasses.fields(hint))
    advice = nearest(word, choices) if choices else f"set one of {names}"
    raise UserError(f"{where}={word}: {advice}")
