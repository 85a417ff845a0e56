"""Settings: frozen dataclasses ↔ TOML, with checked `a.b=c` overrides.

A choice between parts is a union of dataclasses, each with a `kind`; in TOML it is a word
(`position = "rotary"`) or a table with that kind (`{kind = "rotary", base = 500.0}`). A single
word for any other table sets the one field that has the word among its choices, so that
`model.norm=post` means `model.norm.placement=post`.
"""

import copy
import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import tomli_w

from manyheads.errors import UserError

T = TypeVar("T")

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
                options = _options(get_type_hints(type(config))[field.name])
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
            options = _options(get_type_hints(type(config))[field.name])
            words[name] = _words_for_none(options)[0]
    return words


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def to_toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(table)


def _set(config: Any, path: list[str], text: str, full_path: str) -> Any:
    hints = get_type_hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    name, *rest = path
    if name not in names:
        parent = full_path.removesuffix(".".join(path))
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


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kinds(options: Iterable[Any]) -> dict[str, Any]:
    return {option.kind: option for option in options if hasattr(option, "kind")}


def _words_for_none(options: Iterable[Any]) -> list[str]:
    """A part may be called "none" itself; then that word means the part."""
    return [word for word in WORDS_FOR_NONE if word not in _kinds(options)]


def _convert(hint: Any, value: Any, where: str, current: Any) -> Any:
    """`value` as the annotated type; `current` is what an override changes."""
    options = _options(hint)
    if isinstance(hint, type) and isinstance(value, hint) and not isinstance(value, bool):
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
            return word
        if not isinstance(word, str) or word not in kinds:
            known = [*kinds, words_for_none[0]] if type(None) in options else list(kinds)
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
    hints = get_type_hints(hint)
    if isinstance(value, str):
        value = _word_as_table(hint, hints, fields, value, where)
    if not isinstance(value, Mapping):
        raise UserError(f"{where or 'the file'} is a table of settings (not {value!r})")
    values: dict[str, Any] = {}
    for name, item in value.items():
        if name == "kind" and hasattr(hint, "kind"):
            continue
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
        name: [str(choice) for choice in get_args(hints[name])]
        for name in fields
        if get_origin(hints[name]) is Literal
    }
    for name, words in choices.items():
        if word in words:
            return {name: word}
    every = [word for words in choices.values() for word in words]
    advice = nearest(word, every) if every else f"set one of its fields, e.g. {where}.NAME=..."
    raise UserError(f"{where}={word}: {advice}")
