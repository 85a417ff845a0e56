"""Compare a golden run with its record: losses always, bits where the fingerprint is the same."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.golden.harness import (
    LOSS_TOLERANCE,
    Workspace,
    assert_losses,
    assert_outputs,
    is_exact,
    read_record,
    remaining,
    schema,
)
from tests.golden.record import record_run
from tests.golden.runs import by_name

REASON = "bits are compared on the record's version of torch and kind of CPU only"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="golden-")  # removed when the process ends


@cache
def result_of(name: str) -> dict[str, Any]:
    """The run, trained once per process."""
    return record_run(by_name()[name], Workspace(Path(_folder().name)))


def skip_unless_exact() -> None:
    if not is_exact():
        pytest.skip(REASON)


def check_losses(name: str) -> None:
    """Losses of all steps, and the names and types of every JSON output."""
    ours, theirs = result_of(name), read_record(name)
    assert_losses(
        *({key: one[key] for key in ("steps", "train", "valid")} for one in (ours, theirs)),
        None if is_exact() else LOSS_TOLERANCE,
    )
    recorded = remaining(theirs["outputs"])
    assert ours["outputs"].keys() == recorded.keys()
    for command, output in recorded.items():
        if "--json" in command:
            assert schema(ours["outputs"][command]) == schema(output), command


def check_bits(name: str) -> None:
    """Final weights and outputs of all commands."""
    skip_unless_exact()
    ours, theirs = result_of(name), read_record(name)
    assert ours["weights"] == theirs["weights"]
    assert_outputs(ours["outputs"], theirs["outputs"])
