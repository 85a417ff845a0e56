"""Every setting of every part: it has a meaning, code reads it, and bad numbers are refused."""

import ast
import dataclasses
import tomllib
import types
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import manyheads
from manyheads.baselines.convolution import ByteNetConfig, ConvS2SConfig
from manyheads.baselines.elmo import ElmoConfig
from manyheads.baselines.rnn import GnmtConfig, RnnConfig, RnnLmConfig
from manyheads.commands.catalogue import commented_toml
from manyheads.config import describe, dump, override_all, parse
from manyheads.decode.beam import Decode
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.recipes import read_recipe, recipes
from manyheads.run import Run
from manyheads.tasks.spec import kinds
from manyheads.tasks.table import TASKS
from manyheads.tokenizer.train import Tokens

PACKAGE = Path(manyheads.__file__).parent
ANY_PARTS = {
    *("phrasebook", "translation", "bert", "gpt", "vit", "rnn", "gnmt", "convs2s"),
    "decoder-only-seq2seq",
}
EXACT = {core.kind for core in get_args(AttentionFunctionConfig) if core.exact}
DATA = {"phrasebook", "files", "summaries", "text", "labelled", "images", "music"}
# With these every part can be built: the dense core takes any score and any position.
SMALL = ["dim=16", "heads=2", "layers=2", "vocab_size=9", "attention=dense"]
MODELS: dict[str, Any] = {
    config.kind: config
    for config in (
        *(BertConfig(), GptConfig(), VitConfig(), DecoderOnlySeq2SeqConfig(), ElmoConfig()),
        *(RnnConfig(), GnmtConfig(), ConvS2SConfig(), ByteNetConfig(), RnnLmConfig()),
    )
}

# Settings that may be −1, NaN or infinite all the same, with the reason.
EXCEPTIONS = {
    "score.scale=-1": "looks for the least alike key: odd, but a number like another",
}


def numbers(kind: Any, prefix: str = "") -> Iterator[tuple[list[str], str]]:
    """Every number under a dataclass, with the choices of parts that lead to it."""
    for field in dataclasses.fields(kind):
        path, hint = f"{prefix}{field.name}", get_type_hints(kind)[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        parts = [option for option in options if dataclasses.is_dataclass(option)]
        for part in parts:
            choice = [f"{path}={part.kind}"] if len(parts) > 1 else []  # type: ignore[attr-defined]
            for choices, number in numbers(part, f"{path}."):
                yield [*choice, *choices], number
        if int in options or float in options:
            yield [], path


def built(config: Any, settings: Sequence[str]) -> None:
    config = override_all(config, settings)
    with torch.device("meta"):
        (config.model if isinstance(config, Run) else config).build()


def small(name: str) -> Any:
    config = read_recipe(name).model if name in recipes() else MODELS[name]
    names = {field.name for field in dataclasses.fields(config)}
    settings = [one for one in SMALL if one.partition("=")[0] in names]
    if isinstance(config, RnnConfig | ElmoConfig):  # they have another kind of attention
        settings.remove("attention=dense")
    if name in recipes():
        return read_recipe(name, [f"model.{setting}" for setting in settings])
    return override_all(config, settings)


def _core(choices: Sequence[str]) -> list[str]:
    """The kinds of cores among chosen parts."""
    return [one.partition("=")[2] for one in choices if one.partition("=")[0].endswith("attention")]


def trains(run: Run, objective: str) -> bool:
    """Whether the run's model may have this objective."""
    try:
        override_all(run, [f"objective={objective}"])
    except UserError:
        return False
    return True


@pytest.fixture(scope="module")
def tested() -> set[tuple[type | None, tuple[str, ...], str]]:
    """Numbers that were tested: the settings that they belong to, the chosen parts, the path."""
    return set()


def owner(config: Any, path: str) -> type | None:
    """The class of the model, the data, … that a number of a run belongs to."""
    part = path.partition(".")[0]
    return type(getattr(config, part)) if isinstance(config, Run) else type(config)


@pytest.mark.parametrize("name", [*recipes(), *MODELS])
def test_a_number_without_sense_is_refused(
    name: str, tested: set[tuple[type | None, tuple[str, ...], str]]
) -> None:
    """What several recipes share is tested with the first of them."""
    config = small(name)
    # The kind of a run's model is its task's; the other kinds are tested separately.
    other = {f"model={kind}" for kind in ("seq2seq", *MODELS)}
    if isinstance(config, Run):
        other -= {f"model={config.model.kind}"}
        objectives = {kind for row in TASKS.values() for kind in kinds(row.objectives)}
        fitting = {kind for row in TASKS.rows(config.task) for kind in kinds(row.data)}
        other |= {f"data={kind}" for kind in DATA - fitting}
        other |= {f"target_tokens={kind.kind}" for kind in get_args(Tokens)}  # needs another tie
        other |= {f"objective={kind}" for kind in objectives if not trains(config, kind)}
    found: dict[tuple[str, ...], list[str]] = {}
    for choices, path in numbers(type(config)):
        if not other & {*choices}:
            found.setdefault(tuple(choices), []).append(path)
    assert sum(map(len, found.values())) >= 5
    wrong = []
    for choices, all_paths in found.items():
        paths = [p for p in all_paths if (owner(config, p), choices, p) not in tested]
        tested |= {(owner(config, path), choices, path) for path in paths}
        if not paths:
            continue
        try:
            built(config, choices)  # so that the number is refused below, not the choice
        except UserError:  # rotary positions and another score: seen with the others
            # Cores that see less than everything are built for whom they fit, seen below.
            assert name not in ANY_PARTS or not EXACT.issuperset(_core(choices))
            continue
        for path, value in product(paths, ("-1", "0", "nan", "inf")):
            setting = f"{path}={value}"
            try:
                built(config, (*choices, setting))
            except UserError as mistake:
                said = str(mistake)
                if path.split(".")[-1] not in said or "\n" in said:
                    wrong.append(f"{setting} is reported as: {said}")
            else:
                if value != "0" and not setting.endswith(tuple(EXCEPTIONS)):
                    wrong.append(f"{setting} is accepted")
    assert not wrong, "\n".join(wrong)


def test_every_part_is_looked_at() -> None:
    """The walk of the test above reaches the alternatives, and the sides of a model."""
    tested = {path for _, path in numbers(Run)}
    for path in (
        *("seed", "data.train_pairs", "data.valid_fraction", "tokens.vocab_size", "train.clip"),
        *(
            "model.attention.block",
            "model.score.rank",
            "model.embed.norm.eps",
            "model.embed.segments",
        ),
        *("model.encoder.position.buckets", "model.decoder.feedforward.dropout"),
    ):
        assert path in tested
    for name in recipes():
        assert set(_paths(dump(read_recipe(name)))) <= tested


def _paths(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}"


@pytest.mark.parametrize(
    "setting",
    [
        *("model.dropout=2", "model.feedforward.dropout=2", "model.encoder.dropout=1"),
        *("model.embed.segments=0", "model.norm.eps=0", "model.position.base=0"),
        *("data.train_pairs=300_001", "data.valid_pairs=20_001", "data.test_pairs=20_001"),
        *("data.train_pairs=0", "decode.length_penalty=1e300", "decode.batch_tokens=0"),
    ],
)
def test_other_numbers_without_sense(setting: str) -> None:
    with pytest.raises(UserError, match=setting.split("=")[0].split(".")[-1]):
        read_recipe("phrasebook", [setting])


def test_limits_of_lengths() -> None:
    assert Decode(max_length_ratio=1e308).limit(1000, 128) == 128
    for fraction in ("0", "1"):  # something must be left on both sides
        with pytest.raises(UserError, match="valid_fraction"):
            read_recipe("translation", [f"data.held_out={fraction}"])


def config_classes(hint: Any) -> Iterator[type]:
    """The dataclasses that an annotation can hold, and all that theirs can."""
    if get_origin(hint) in (Union, types.UnionType, tuple, Annotated):
        for option in get_args(hint):
            yield from config_classes(option)
    elif dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        yield hint
        for inner in get_type_hints(hint).values():
            yield from config_classes(inner)


def test_every_setting_is_read_somewhere() -> None:
    """Checking a value in `__post_init__` is not reading it."""
    # Read by names put together; tests/data/test_translation.py reads each of these files.
    read = {f"{split}_{side}" for split in ("valid", "test") for side in ("source", "target")}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for path in PACKAGE.rglob("*.py"):
        visit(ast.parse(path.read_text(encoding="utf-8")))
    classes = set(config_classes(Run))
    assert len(classes) > 20
    fields = [(part, field.name) for part in classes for field in dataclasses.fields(part)]
    assert not sorted(f"{part.__name__}.{name}" for part, name in fields if name not in read)


def test_every_setting_has_a_meaning() -> None:
    missing = set()
    for part in set(config_classes(Run)):
        for field in dataclasses.fields(part):
            hint = get_type_hints(part, include_extras=True)[field.name]
            texts = [text for text in get_args(hint)[1:] if isinstance(text, str)]
            if get_origin(hint) is not Annotated or not texts:
                missing.add(part.__name__)
    assert not missing


@pytest.mark.parametrize("name", recipes())
def test_describe_lists_every_setting_of_a_recipe(name: str) -> None:
    run = read_recipe(name)
    rows = list(describe(run))
    names = {row.name for row in rows}
    assert {path for path in leaves(run) if not path.endswith("kind")} <= names
    assert all(row.type and not row.meaning.endswith(".") for row in rows)
    for row in rows:
        if row.name.startswith(("train.", "decode.")) or "." not in row.name:
            assert row.meaning, row.name


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        yield from leaves(value, f"{prefix}{field.name}.") if nested else [prefix + field.name]


@pytest.mark.parametrize("name", recipes())
def test_the_printed_settings_are_complete_and_a_recipe(name: str) -> None:
    run = read_recipe(name)
    printed = tomllib.loads(commented_toml(run))

    def written(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in table.items():
            nested = isinstance(value, dict)
            yield from written(value, f"{prefix}{key}.") if nested else [prefix + key]

    assert {*leaves(run)} <= {*written(printed)}
    assert parse(Run, printed) == run
    rows = describe(run, other_kinds=False)
    assert override_all(run, [f"{row.name}={row.text}" for row in rows]) == run
