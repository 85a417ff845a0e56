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
    """One setting as `manyheads settings` shows it."""

    name: str
    type: str
    default: str
    meaning: str


WORDS_FOR_NONE = ("none", "null", "off")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest right name, or all of them."""
    known = sorted(known)
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


def override(config: T, path: str, text: str) -> T:
    """The same settings with the field at a dotted path set from a command-line text."""
    return override_all(config, [f"{path}={text}"])


def override_all(config: T, assignments: Sequence[str]) -> T:
    """Apply `a.b=c` overrides; later ones win.

    Checks run once all are applied: `model.heads=6 model.dim=384` may come in any order.
    """
    return parse(type(config), dump(assign(config, assignments)))


def assign(config: T, assignments: Sequence[str]) -> T:
    """The same without the checks, for incomplete settings."""
    changed = config
    # The choice of a part resets its fields, so shorter paths come first.
    for assignment in sorted(assignments, key=lambda text: text.partition("=")[0].count(".")):
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError(f"'{assignment}' is not a setting: write it as name=value, e.g. seed=1")
        changed = _set(changed, path.split("."), text, path)
    return changed


def dump(config: Any) -> dict[str, Any]:
    """A dataclass as plain values; fields that are None by default are left out: see `unset`."""
    table: dict[str, Any] = {"kind": config.kind} if hasattr(config, "kind") else {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None or field.default is not None:
            table[field.name] = _plain(value, _hints(type(config))[field.name])
    return table


def unset(config: Any, prefix: str = "") -> dict[str, str]:
    """What `dump` leaves out: dotted names of settings that are None, and the word to set them."""
    words: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            words |= unset(value, f"{name}.")
        elif value is None and field.default is None:
            words[name] = _words_for_none(_hints(type(config))[field.name])[0]
    return words


def _plain(value: Any, hint: Any) -> Any:
    """A value as TOML has it; None, which TOML lacks, is a word."""
    if value is None:
        return _words_for_none(hint)[0]
    if isinstance(value, tuple):
        return [_plain(item, hint) for item in value]
    if dataclasses.is_dataclass(value):
        return dump(value)
    return str(value) if isinstance(value, Path) else value


def describe(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration: name, type and choices, value, meaning.

    Below the top level, where a part is chosen by its kind, the settings of the other kinds follow
    those of the chosen one.
    """
    for field in dataclasses.fields(config):
        hint, value = _hints(type(config))[field.name], getattr(config, field.name)
        name = f"{prefix}{field.name}"
        parts: list[Any] = [part for part in _options(hint) if dataclasses.is_dataclass(part)]
        if not dataclasses.is_dataclass(value):
            shown = _plain(value, hint)
            shown = ",".join(map(str, shown)) if isinstance(shown, list) else str(shown)
            lower = isinstance(value, bool)
            yield Setting(name, _type_text(hint), shown.lower() if lower else shown, _meaning(hint))
            if value is None and len(parts) == 1 and not hasattr(parts[0], "kind"):
                yield from describe(parts[0](), f"{name}.")
            continue
        if hasattr(value, "kind"):
            yield Setting(name, _type_text(hint), value.kind, _meaning(hint))
        chosen = list(describe(value, f"{name}."))
        yield from chosen
        others: dict[str, tuple[list[str], Setting]] = {}
        for part in parts if prefix else ():
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


# --- overrides ---


def _set(config: Any, path: list[str], text: str, full_path: str) -> Any:
    hints = _hints(type(config))
    old, *rest = path
    parent = full_path.removesuffix(".".join(path))
    name = _renamed(type(config), old)
    if name != old:
        print(f"'{parent}{old}' is now '{parent}{name}'", file=sys.stderr)
        full_path = ".".join((f"{parent}{name}", *rest))
    names = [field.name for field in dataclasses.fields(config)]
    if name not in names:
        is_kind = f" is {config.kind}" if hasattr(config, "kind") else ""
        raise UserError(
            f"there is no setting '{full_path}': "
            f"{nearest(parent + name, [parent + known for known in names])} "
            f"({parent.rstrip('.') or 'the run'}{is_kind})"
        )
    current = getattr(config, name)
    if rest and rest != ["kind"]:
        if current is None:
            current = _default_of(hints[name], full_path)
        if not dataclasses.is_dataclass(current):
            raise UserError(f"'{parent}{name}' is a single value: there is no '{full_path}'")
        value = _set(current, rest, text, full_path)
    else:
        value = _convert(hints[name], text, full_path, current)
    changed = copy.copy(config)
    object.__setattr__(changed, name, value)  # not checked by `__post_init__`
    return changed


def _renamed(config: type, name: str) -> str:
    """The present name of a field that an older release called `name`."""
    renamed: Mapping[str, str] = getattr(config, "RENAMED", {})
    return renamed.get(name, name)


def _default_of(hint: Any, where: str) -> Any:
    """The part that an optional field holds, with its defaults, when only one is possible."""
    parts = [option for option in _options(hint) if dataclasses.is_dataclass(option)]
    if len(parts) != 1:
        raise UserError(f"'{where}': choose the kind of its part first")
    return _convert(parts[0], {}, where, None)


# --- types ---


def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def _plain_type(hint: Any) -> Any:
    """The type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _options(hint: Any) -> tuple[Any, ...]:
    hint = _plain_type(hint)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


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
    if len(_options(hint)) > 1:
        return _convert_union(hint, value, where, current)
    if get_origin(hint) is Annotated:
        return _convert(hint, value, where, current)
    if dataclasses.is_dataclass(hint):
        return _convert_table(hint, value, where, current)
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
    if kinds:
        word = value.get("kind") if isinstance(value, Mapping) else value
        if isinstance(word, tuple(kinds.values())):
            return _convert_table(type(word), word, where, None)
        if not isinstance(word, str) or word not in kinds:
            known = [part.kind for part in dict.fromkeys(kinds.values())]
            known += words_for_none[:1] if is_optional else []
            raise UserError(f"{where}={word}: {nearest(str(word), known)}")
        same = current if isinstance(current, kinds[word]) else None
        return _convert_table(kinds[word], value if word is not value else {}, where, same)
    errors = []
    for option in rest:
        try:
            return _convert(option, value, where, current)
        except UserError as error:
            errors.append(str(error))
    raise UserError(" or ".join(errors))


def _convert_table(hint: Any, value: Any, where: str, current: Any) -> Any:
    fields, hints = {field.name: field for field in dataclasses.fields(hint)}, _hints(hint)
    prefix = f"{where}." if where else ""
    if isinstance(value, hint):  # built in Python: check its values
        for name in fields:
            _convert(hints[name], getattr(value, name), prefix + name, None)
        return value
    if isinstance(value, str):
        value = _word_as_table(hint, hints, value, where)
    if not isinstance(value, Mapping):
        raise UserError(f"{where or 'the file'} is a table of settings (not {value!r})")
    values: dict[str, Any] = {}
    for key, item in value.items():
        name = _renamed(hint, key)
        if name in fields:
            values[name] = _convert(hints[name], item, prefix + name, None)
        elif item in getattr(hint, "REMOVED", {}).get(name, ()):
            continue
        elif name != "kind" or not hasattr(hint, "kind"):
            raise UserError(f"there is no setting '{prefix}{name}': {nearest(name, fields)}")
    if current is not None:
        return dataclasses.replace(current, **values)
    for name, field in fields.items():
        has_default = field.default is not field.default_factory  # both are MISSING
        if name not in values and not has_default:
            raise UserError(f"'{prefix}{name}' is needed: set it")
    return hint(**values)


def _word_as_table(hint: Any, hints: Mapping[str, Any], word: str, where: str) -> dict[str, str]:
    """A single word for a table: its kind, or the value of the field that has it as a choice."""
    if getattr(hint, "kind", None) == word:
        return {}
    choices = {
        str(choice): field.name
        for field in reversed(dataclasses.fields(hint))  # the first field of several wins
        if get_origin(_plain_type(hints[field.name])) is Literal
        for choice in get_args(_plain_type(hints[field.name]))
    }
    if word in choices:
        return {choices[word]: word}
    advice = nearest(word, choices) if choices else f"set one of its fields, e.g. {where}.NAME=..."
    raise UserError(f"{where}={word}: {advice}")
