"""Settings of a foreign model as ours, and ours as a foreign model's, by the tables of a family."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.config import dump, parse
from manyheads.errors import DataError, UserError
from manyheads.exchange.foreign import (
    OWN_ACTIVATIONS,
    SAME_ACTIVATION,
    Family,
    Flat,
    Foreign,
    activation,
)
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import AttentionConfig
from manyheads.presets import TransformerConfig

# What says how a model is trained or computed, not what it is.
FREE = re.compile(
    r"((encoder|decoder)\.)?core\.|initial$|(.*[._])?dropout$|embed\.norm\.placement$"
)
SIDED = ("layers", "heads", "hidden")
LABELLED = ("classify", "tag")
ON_TOP = ("head.", "pooler.", "next_sentence.")
# Several answers at once are no choice among labels.
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "problem_type": (None, "single_label_classification", "regression"),
}
# What any head of its kind may have in its own way.
VARYING = {"head.labels", "head.dropout", "head.tie", "pooler.dim"}
LARGEST = 2**53  # of a size; up to there whole numbers and floats are the same


def read_settings(family: Family, foreign: Foreign) -> TransformerConfig:
    """Our settings of a foreign model; what we do not have is refused by its name."""
    known = {**family.defaults, **foreign.settings}
    only = {**family.only, **(PROBLEMS if foreign.head == "classify" else {})}
    for name, allowed in only.items():
        if known.get(name, allowed[0]) not in allowed:
            choices = " or ".join(map(str, allowed))
            raise UserError(
                f"a {family.kind} model with {name}={known[name]} is not supported: only {choices}"
            )
    for name in family.squares:
        known[name] = _side(family, name, known[name])
    _check_kinds(family, known)
    flat: Flat = {**family.fixed, **family.heads[foreign.architecture]}
    for theirs, ours in family.fields.items():
        for path in ours.split():
            flat[path] = activation(known[theirs]) if _is_activation(path) else known[theirs]
    if flat.get("head.kind") in LABELLED:
        flat["head.labels"] = _labels(known, foreign)
    flat |= family.read(dataclasses.replace(foreign, settings=known))
    flat = _without_pooler(flat) if family.lacks_pooler(foreign) else flat
    for path, value in flat.items():
        if value == SAME_ACTIVATION:
            flat[path] = flat[SAME_ACTIVATION]
        # Each layer has tensors of its own: no time is spent on what they can never fill.
        if path.endswith("layers") and value is not None and value > len(foreign.tensors):
            raise DataError(f"config.json calls for {value} layers, and the weights have far fewer")
    try:
        return parse(family.model, _nested(_tidy(flat)), "model")
    except UserError as error:
        raise DataError(
            f"config.json of a {family.kind} model does not hold together: {error}"
        ) from None


def _side(family: Family, name: str, given: Any) -> Any:
    """One number for a square that is given by its sides."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) != 2 or given[0] != given[1]:
        raise UserError(f"a {family.kind} model with {name}={given} is not supported: only squares")
    return given[0]


def _check_kinds(family: Family, known: Mapping[str, Any]) -> None:
    """A setting is what its usual value is; what has none is a size."""
    for name in (*family.fields, *family.defaults):
        if name not in known:
            raise DataError(f"config.json has no '{name}', which a {family.kind} model needs")
        wanted = _wanted(known[name], family.defaults.get(name, 1))
        if wanted:
            raise DataError(f"config.json has {name}={known[name]!r}, which should be {wanted}")


def _wanted(value: Any, usual: Any) -> str:
    """What a value should have been; nothing where it is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(usual, str):
        return "" if isinstance(value, str) else "a word"
    if isinstance(usual, float):
        return "" if number else "a number"
    if usual is None:
        return "" if value is None or number else "a number or null"
    whole = number and isinstance(value, int) and abs(value) < LARGEST
    return "" if whole else "a whole number"


def _is_activation(path: str) -> bool:
    return path.endswith("activation")


def _labels(settings: Mapping[str, Any], foreign: Foreign) -> list[str]:
    """The labels by number; names that are not as many as they should be are none."""
    named = settings.get("id2label") or {}
    count = settings.get("num_labels", len(named) if isinstance(named, dict) and named else 2)
    most = max(tensor.numel() for tensor in foreign.tensors.values())
    if _wanted(count, 1) or count > most:
        raise DataError(f"config.json has num_labels={count!r}, and the weights have not")
    try:
        found = {int(number): str(label) for number, label in named.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError("config.json has an id2label that is no table of numbers") from None
    if sorted(found) != list(range(len(named))):
        raise DataError("config.json has an id2label whose numbers do not count up from 0")
    if foreign.head == "classify" and settings.get("problem_type") == "regression" and count > 1:
        raise UserError(f"problem_type=regression of {count} numbers is not supported: only of one")
    if len(found) == count:
        return [found[number] for number in range(count)]
    return [f"LABEL_{number}" for number in range(count)]


@dataclass(frozen=True)
class Departure:
    """What a model of ours is in a family, and all that the family has no place for.

    `arguments` are what its class is built with beside its settings.
    """

    family: Family
    architecture: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    obstacles: list[str]

    def distance(self) -> int:
        return len(self.obstacles)


def write_settings(family: Family, config: TransformerConfig) -> Departure:
    """The class and the settings of a model in a family, and what stands in the way."""
    config = _alike(config) if isinstance(config, Seq2SeqConfig) else config
    flat = flatten(config)
    obstacles = []
    fits = [name for name in family.heads if _fits(flat, family.heads[name])]
    bare = [n for n in family.unpooled if _fits(flat, _without_pooler(family.heads[n]))]
    arguments: dict[str, Any] = {} if fits else {family.unpooled[name]: False for name in bare[:1]}
    fits += bare
    if not fits:
        top = [f"{path}={flat[path]}" for path in flat if path.startswith(ON_TOP)]
        obstacles.append(f"has no class with {', '.join(top) or 'no head'} on top")
    architecture = fits[0] if fits else next(iter(family.heads))
    for path, value in family.fixed.items():
        if not _holds(flat, path, value) and not FREE.match(path):
            given = flat.get(path, "none")
            obstacles.append(f"has {path}={value}, and this model {given}")
            _suppose(flat, path, value)
    settings = family.write(flat)
    if "head.labels" in flat:
        settings["id2label"] = dict(enumerate(flat.pop("head.labels")))
        settings["label2id"] = {label: n for n, label in settings["id2label"].items()}
    for theirs, ours in family.fields.items():
        values = [flat.pop(path, None) for path in ours.split()]
        if None in values:
            obstacles.append(f"needs {ours.split()[values.index(None)]}, and this model has none")
        elif any(value != values[0] for value in values) and not FREE.match(ours.split()[0]):
            named = " and ".join(ours.split())
            obstacles.append(f"has one {theirs} for {named}, and this model {values}")
        settings[theirs] = OWN_ACTIVATIONS.get(values[0]) if _is_activation(ours) else values[0]
    used = {*family.fixed, *family.heads[architecture]}
    for path, value in flat.items():
        on_top = not fits and path.startswith(ON_TOP)  # said already
        if not (path in used or on_top or FREE.match(path) or _implied(path, config)):
            obstacles.append(f"cannot express {path}={value}")
    return Departure(family, architecture, arguments, settings, obstacles)


def _alike(config: Seq2SeqConfig) -> Seq2SeqConfig:
    """The same model, what its sides have in common said once."""
    sides = config.encoder, config.decoder
    for name in ("position", "feedforward"):
        one, other = (getattr(side.of(config), name) for side in sides)
        if one == other:
            unsaid: dict[str, Any] = {name: None}
            said: dict[str, Any] = {name: one}
            encoder = dataclasses.replace(config.encoder, **unsaid)
            decoder = dataclasses.replace(config.decoder, **unsaid)
            config = dataclasses.replace(config, encoder=encoder, decoder=decoder, **said)
    return config


def _suppose(flat: Flat, path: str, value: Any) -> None:
    """Go on as if a part were the family's; what another kind of it has is said with the kind."""
    part, _, leaf = path.rpartition(".")
    if leaf == "kind":
        for name in [name for name in flat if name.startswith(f"{part}.")]:
            if not _is_activation(name) and not FREE.match(name):
                del flat[name]
    flat[path] = value


def _fits(flat: Flat, head: Mapping[str, Any]) -> bool:
    """Whether a model has exactly this on top."""
    top = {path for path in flat if path.startswith(ON_TOP)} - VARYING
    return top <= head.keys() and all(_holds(flat, path, value) for path, value in head.items())


def _without_pooler(flat: Mapping[str, Any]) -> Flat:
    return {path: value for path, value in flat.items() if not path.startswith("pooler.")}


def _holds(flat: Flat, path: str, value: Any) -> bool:
    wanted = flat.get(SAME_ACTIVATION) if value == SAME_ACTIVATION else value
    return bool(flat.get(path) == wanted)


def flatten(config: TransformerConfig) -> Flat:
    """Settings as dotted paths, with every size that follows from another written out."""
    flat = dict(_leaves(dump(config)))
    flat.pop("kind")
    flat.setdefault("hidden", 4 * config.dim)
    flat.setdefault("kv_heads", config.heads)
    flat.setdefault("attention_bias", config.bias)
    flat.setdefault("qkv_bias", flat["attention_bias"])
    flat.setdefault("embed.dim", config.dim)
    if flat.get("pooler.over") == "first":
        del flat["pooler.over"]  # what every family does
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


def _implied(path: str, config: TransformerConfig) -> bool:
    """Whether a setting says no more than others do."""
    if path == "embed.dim":
        return config.embed.dim is None
    if path == "target_vocab_size":
        return bool(getattr(config, path) in (None, config.vocab_size))
    if path not in ("head_dim", "kv_heads", "attention_bias", "qkv_bias"):
        return False
    unsaid: dict[str, Any] = {path: None}
    try:
        return _attentions(config) == _attentions(dataclasses.replace(config, **unsaid))
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
