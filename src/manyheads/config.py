"""Settings: frozen dataclasses ↔ TOML, with checked `a.b=c` overrides.

A choice between parts is a union of dataclasses, each with a `kind`; in TOML it is a word
(`position = "rotary"`) or a table with that kind (`{kind = "rotary", base = 500.0}`). A single
word for any other table sets the one field that has the word among its choices, so that
`model.norm=post` means `model.norm.placement=post`.

A field declares its range and its meaning in its type:

    beam: Annotated[int, Between(1, 1000), "Beam width; 1 is greedy search"] = 4

`parse` checks ranges; `describe` lists all settings with type, choices, default and meaning. Old
spellings stay readable: a class lists renamed fields in `RENAMED` (old → new) and an old `kind`
in `OLD_KINDS`; `Renamed` in an annotation maps old values.
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

    low: float
    high: float = math.inf
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
            raise UserError(f"'{assignment}' is no setting: write it as name=value, e.g. seed=1")
        changed = _set(changed, path.split("."), text, path)
    return changed


def dump(config: Any) -> dict[str, Any]:
    """A dataclass as plain values; `None` fields are left out, as TOML has no null."""
    table: dict[str, Any] = {}
    if hasattr(type(config), "kind"):
        table["kind"] = type(config).kind
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            if field.default is not None:
                options = _options(_hints(type(config))[field.name])
                table[field.name] = _words_for_none(options)[0]
            continue
        table[field.name] = dump(value) if dataclasses.is_dataclass(value) else _plain(value)
    return table


def unset(config: Any, prefix: str = "") -> dict[str, str]:
    """What `dump` leaves out: dotted names of settings that are None, and the word to set them."""
    words: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            words |= unset(value, f"{name}.")
        elif value is None and field.default is None:
            options = _options(_hints(type(config))[field.name])
            words[name] = _words_for_none(options)[0]
    return words


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def describe(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration: name, type and choices, value, meaning."""
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        hint, value, name = hints[field.name], getattr(config, field.name), f"{prefix}{field.name}"
        nested = dataclasses.is_dataclass(value)
        shown = getattr(value, "kind", "") if nested else _shown(value)
        parts: list[Any] = [part for part in _options(hint) if dataclasses.is_dataclass(part)]
        if shown or not nested:
            yield Setting(name, _type_text(hint), shown, _meaning(hint))
        if nested:
            yield from describe(value, f"{name}.")
        elif value is None and len(parts) == 1 and not hasattr(parts[0], "kind"):
            yield from describe(parts[0](), f"{name}.")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    words = {None: "none", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _meaning(hint: Any) -> str:
    """The first text in an annotation."""
    texts = [text for text in get_args(hint)[1:] if isinstance(text, str)]
    return texts[0] if get_origin(hint) is Annotated and texts else ""


def _type_text(hint: Any) -> str:
    """A type as a user would say it: its choices, or its name and range."""
    annotations = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    ranges = [f", {a}" for a in annotations if isinstance(a, Between)]
    words = []
    for option in _options(hint):
        names = {int: "integer", float: "number", str: "text", Path: "path", bool: "true|false"}
        if option is type(None):
            words.append("none")
        elif get_origin(option) is Annotated:
            words.append(_type_text(option))
        elif get_origin(option) is Literal:
            words.append("|".join(map(str, get_args(option))))
        elif get_origin(option) is tuple:
            words.append(f"list of {_type_text(get_args(option)[0])}")
        else:
            words.append(getattr(option, "kind", names.get(option, "table")))
    return "|".join(words) + "".join(ranges)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def to_toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(table)


def _set(config: Any, path: list[str], text: str, full_path: str) -> Any:
    hints = _hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    old, *rest = path
    name = _renamed(type(config), old)
    if name != old:
        parent = full_path.removesuffix(".".join(path))
        full_path = ".".join((f"{parent}{name}", *rest))
        print(f"'{parent}{old}' is now '{parent}{name}'", file=sys.stderr)
    if name not in names:
        parent = full_path.removesuffix(".".join((name, *rest)))
        is_kind = f" is {type(config).kind}" if hasattr(type(config), "kind") else ""
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
            raise UserError(
                f"'{full_path.removesuffix('.' + '.'.join(rest))}' is a single value: "
                f"there is no '{full_path}'"
            )
        value = _set(current, rest, text, full_path)
    else:
        value = _convert(hints[name], text, full_path, current)
    return _unchecked(config, name, value)


def _renamed(config: type, name: str) -> str:
    """The present name of a field that an older release called `name`."""
    renamed: Mapping[str, str] = getattr(config, "RENAMED", {})
    return renamed.get(name, name)


def _unchecked(config: Any, name: str, value: Any) -> Any:
    """A copy with one field changed, without the checks of its `__post_init__`."""
    changed = copy.copy(config)
    object.__setattr__(changed, name, value)
    return changed


def _default_of(hint: Any, where: str) -> Any:
    """The part that an optional field holds, with its defaults, when only one is possible."""
    options = [option for option in _options(hint) if dataclasses.is_dataclass(option)]
    if len(options) != 1:
        raise UserError(f"'{where}': choose the kind of its part first")
    return _convert(options[0], {}, where, None)


def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def _plain_type(hint: Any) -> Any:
    """The type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _options(hint: Any) -> tuple[Any, ...]:
    hint = _plain_type(hint)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kinds(options: Iterable[Any]) -> dict[str, Any]:
    """The parts of a union by their kind, old kinds included."""
    parts = [option for option in options if hasattr(option, "kind")]
    return {kind: part for part in parts for kind in kinds_of(part)}


def kinds_of(part: Any) -> tuple[str, ...]:
    """The words for a part: its kind, and what older releases called it."""
    return (part.kind, *getattr(part, "OLD_KINDS", ()))


def _words_for_none(options: Iterable[Any]) -> list[str]:
    """A part may be called "none" itself; then that word means the part."""
    return [word for word in WORDS_FOR_NONE if word not in _kinds(options)]


def _convert(hint: Any, value: Any, where: str, current: Any) -> Any:
    """`value` as the annotated type; `current` is what an override changes."""
    if get_origin(hint) is Annotated:
        hint, *annotations = get_args(hint)
        for annotation in annotations:
            if isinstance(annotation, Renamed) and isinstance(value, str):
                value = annotation.values.get(value, value)
        value = _convert(hint, value, where, current)
        for annotation in annotations:
            if isinstance(annotation, Between) and value is not None:
                annotation.check(value, where)
        return value
    options = _options(hint)
    is_plain = isinstance(hint, type) and isinstance(value, hint) and not isinstance(value, bool)
    if is_plain and not dataclasses.is_dataclass(value):
        return value
    if len(options) > 1:
        return _convert_union(options, value, where, current)
    if dataclasses.is_dataclass(hint):
        return _convert_table(hint, value, where, current)
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        if str(value) in choices:
            return get_args(hint)[choices.index(str(value))]
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
    try:
        if hint is int and isinstance(value, str):
            digits = value.replace("_", "")
            number = float(digits)  # also 1e6
            if number != int(number):
                raise ValueError
            # By `int` where possible: a float has only 53 bits.
            return int(digits) if digits.lstrip("+-").isdigit() else int(number)
        if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            return float(value)
        if hint is str and isinstance(value, (str, int, float)):
            return str(value)
        if hint is Path and isinstance(value, str):
            return Path(value)
    except (ValueError, OverflowError):
        pass
    names = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    raise UserError(f"{where} is {names.get(hint, hint)} (not {value!r})")


def _convert_union(options: tuple[Any, ...], value: Any, where: str, current: Any) -> Any:
    words_for_none = _words_for_none(options)
    none = value is None or (isinstance(value, str) and value.lower() in words_for_none)
    if none and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    kinds = _kinds(rest)
    if kinds:
        word = value.get("kind") if isinstance(value, Mapping) else value
        if isinstance(word, tuple(kinds.values())):
            return _convert_table(type(word), word, where, None)
        if not isinstance(word, str) or word not in kinds:
            known = [part.kind for part in dict.fromkeys(kinds.values())]
            known += [words_for_none[0]] if type(None) in options else []
            raise UserError(f"{where}={word}: {nearest(str(word), known)}")
        chosen = kinds[word]
        same = current if isinstance(current, chosen) else None
        return _convert_table(chosen, value if isinstance(value, Mapping) else {}, where, same)
    if len(rest) == 1:
        return _convert(rest[0], value, where, current)
    errors = []
    for option in rest:
        try:
            return _convert(option, value, where, current)
        except UserError as error:
            errors.append(str(error))
    raise UserError(" or ".join(errors))


def _convert_table(hint: Any, value: Any, where: str, current: Any) -> Any:
    fields = {field.name: field for field in dataclasses.fields(hint)}
    hints = _hints(hint)
    if isinstance(value, hint):  # built in Python: check its values
        for name in fields:
            path = f"{where}.{name}" if where else name
            _convert(hints[name], getattr(value, name), path, None)
        return value
    if isinstance(value, str):
        value = _word_as_table(hint, hints, fields, value, where)
    if not isinstance(value, Mapping):
        raise UserError(f"{where or 'the file'} is a table of settings (not {value!r})")
    values: dict[str, Any] = {}
    for name, item in value.items():
        if name == "kind" and hasattr(hint, "kind"):
            continue
        name = _renamed(hint, name)
        path = f"{where}.{name}" if where else name
        if name not in fields:
            raise UserError(f"there is no setting '{path}': {nearest(name, fields)}")
        values[name] = _convert(hints[name], item, path, None)
    if current is not None:
        return dataclasses.replace(current, **values)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in values
    ]
    if missing:
        raise UserError(f"'{where + '.' if where else ''}{missing[0]}' is needed: set it")
    return hint(**values)


def _word_as_table(
    hint: Any, hints: Mapping[str, Any], fields: Iterable[str], word: str, where: str
) -> dict[str, str]:
    if getattr(hint, "kind", None) == word:
        return {}
    choices = {
        name: [str(choice) for choice in get_args(_plain_type(hints[name]))]
        for name in fields
        if get_origin(_plain_type(hints[name])) is Literal
    }
    for name, words in choices.items():
        if word in words:
            return {name: word}
    every = [word for words in choices.values() for word in words]
    advice = nearest(word, every) if every else f"set one of its fields, e.g. {where}.NAME=..."
    raise UserError(f"{where}={word}: {advice}")
