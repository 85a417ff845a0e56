"""Everything else computes what release 0.1 computed, bit by bit.

The record is made from 0.1 and never edited by hand; see record.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.golden.checks import check_bits, check_losses, skip_unless_exact
from tests.golden.harness import (
    LOSS_TOLERANCE,
    RECORD,
    Workspace,
    assert_losses,
    assert_outputs,
    is_exact,
    read_record,
    remaining,
    schema,
)
from tests.golden.record import (
    BUILT,
    EXPORTED,
    LANGUAGE_FOLDER,
    RUN_FOLDER,
    record_attention,
    record_built,
    record_huggingface,
    record_language,
    record_old_run,
    record_preset,
    record_public,
    record_schema,
)
from tests.golden.runs import RUNS, SCHEMA_COMMANDS

NAMES = [run.name for run in RUNS if not run.name.startswith("translation")]


@pytest.mark.parametrize("name", NAMES)
def test_losses(name: str) -> None:
    check_losses(name)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_outputs(name: str) -> None:
    check_bits(name)


def test_every_run_is_recorded() -> None:
    assert {run.name for run in RUNS} <= {path.stem for path in RECORD.glob("*.json")}


@pytest.mark.parametrize("name", read_record("presets"))
def test_preset(name: str) -> None:
    """Names and shapes of the state dict, parameters, FLOPs and memory."""
    assert record_preset(name) == read_record("presets")[name]


def test_public_names() -> None:
    ours, theirs = record_public(), read_record("public")
    assert set(theirs["all"]) <= set(ours["all"])
    assert set(theirs["accessible"]) <= set(ours["accessible"])
    assert [name for name in ours["presets"] if name in theirs["presets"]] == theirs["presets"]


@pytest.mark.parametrize("name", SCHEMA_COMMANDS)
def test_json_of_commands(name: str, tmp_path: Path) -> None:
    assert record_schema(name, Workspace(tmp_path)) == read_record("schemas")[name]


def assert_tensors(ours: Any, theirs: Any) -> None:
    """Shapes and first values; hashes where bits must be the same."""
    if is_exact():
        assert ours == theirs
    assert ours["shape"] == theirs["shape"]
    assert ours["first"] == pytest.approx(theirs["first"], rel=1e-4, abs=1e-5)


def test_attend() -> None:
    ours, theirs = record_attention(), read_record("attention")
    assert ours.keys() == theirs.keys()
    for way in theirs:
        assert_tensors(ours[way], theirs[way])


@pytest.mark.parametrize("name", BUILT)
def test_built_model(name: str) -> None:
    """Seeded initial weights, the output and the captured attention maps."""
    ours, theirs = record_built(name), read_record("built")[name]
    assert_tensors(ours["output"], theirs["output"])
    assert ours["maps"]["shapes"] == theirs["maps"]["shapes"]
    if is_exact():
        assert ours == theirs


@pytest.mark.parametrize("name", EXPORTED)
def test_huggingface(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    skip_unless_exact()
    theirs = read_record("huggingface")[name]
    if transformers.__version__ != theirs["transformers"]:
        pytest.skip("names of tensors depend on the version of transformers")
    assert record_huggingface(name) == theirs


def test_run_folder_of_0_1(tmp_path: Path) -> None:
    """A folder written by 0.1 is loaded, translates, is scored, and training resumes."""
    import manyheads

    ours, theirs = record_old_run(tmp_path), read_record("run-0.1")
    names = set(manyheads.load(RUN_FOLDER).state_dict())
    assert names == set(manyheads.load(tmp_path / "resumed").state_dict())
    losses = [
        {key: one["resumed"][key] for key in ("steps", "train", "valid")} for one in (ours, theirs)
    ]
    assert_losses(*losses, None if is_exact() else LOSS_TOLERANCE)
    outputs = [(one["outputs"], one["resumed"]["outputs"]) for one in (ours, theirs)]
    for mine, recorded in zip(*outputs, strict=True):
        assert mine.keys() == remaining(recorded).keys()
        key = "evaluate --json"
        assert schema(mine[key]) == schema(recorded[key])
    skip_unless_exact()
    assert ours["stopped"] == theirs["stopped"]
    assert ours["resumed"]["weights"] == theirs["resumed"]["weights"]
    for mine, recorded in zip(*outputs, strict=True):
        assert_outputs(mine, recorded)


def test_language_model_of_0_1(tmp_path: Path) -> None:
    ours = record_language(tmp_path)
    skip_unless_exact()
    assert_outputs(ours, read_record("language-0.1"))


def test_folders_of_0_1_name_no_machine() -> None:
    """No absolute paths: what is committed can be used anywhere."""
    for folder in (RUN_FOLDER, LANGUAGE_FOLDER):
        for path in folder.rglob("*"):
            if path.is_file():
                assert not re.search(rb"\"/\w+/|/tmp/|/home/", path.read_bytes()), path
