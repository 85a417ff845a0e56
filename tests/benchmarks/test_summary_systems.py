"""Summarization systems: the commands of the page train the systems of the table."""

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from manyheads.config import dump
from manyheads.recipes import read_recipe

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
systems: Any = importlib.import_module("summaries")


def settings_on_the_page() -> dict[str, list[str]]:
    """The settings of each line that trains one of the five, by its folder."""
    page = (ROOT / "docs" / "summaries.md").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("    manyheads ")]
    trained = [words for words in lines if words[1:3] == ["train", "summaries"]]
    return {Path(words[-1]).name: words[3:-2] for words in trained}


@pytest.mark.parametrize("name", systems.SYSTEMS)
def test_the_page_trains_what_the_table_was_made_of(name: str) -> None:
    words = shlex.split(f"data.folder=dialogsum {systems.TRAIN} {systems.SYSTEMS[name]}")
    expected = dump(read_recipe("summaries", words))
    assert dump(read_recipe("summaries", settings_on_the_page()[name])) == expected
