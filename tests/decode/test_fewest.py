"""`generate --min-new-tokens`: a text that the model would end at once goes on so far."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tasks.small_texts import SIZES, recipe_trainer
from tests.test_cli import mistake, result

from manyheads.loading import TorchRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model of characters that wants to end, and else to write an a."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("banana bandana\n" * 40, encoding="utf-8")
    settings = ("tokens=characters", "model.max_length=512", "train.steps=1", "train.batch_rows=2")
    where = f"data.folder={tmp_path / 'text'}"
    recipe_trainer("language", tmp_path / "run", *SIZES, where, *settings).run()
    whole = TorchRun._generator

    def eager(*parts: Any) -> Any:
        generator: Any = whole(*parts)
        wanted = torch.zeros(generator.vocabulary)
        wanted[generator.special_tokens.end] = 60.0
        wanted[generator.tokenizer.token_id("a")] = 40.0
        generator.model.logits = lambda hidden: wanted.expand(len(hidden), -1).clone()
        return generator

    monkeypatch.setattr(TorchRun, "_generator", eager)
    return tmp_path / "run"


@pytest.mark.parametrize("way", [(), ("--beam", 2)])
def test_a_text_has_the_fewest_tokens_before_its_end(way: tuple[object, ...], run: Path) -> None:
    words = ("generate", run, "--prompt", "b", *way)
    assert result(*words) == "b\n"
    assert result(*words, "--min-new-tokens", 0) == "b\n"
    assert result(*words, "--min-new-tokens", 7) == "b" + "a" * 7 + "\n"
    # Where nobody names the most, it is no fewer.
    assert result(*words, "--min-new-tokens", 250) == "b" + "a" * 250 + "\n"
    assert result(*words, "--min-new-tokens", 6, "--max-new-tokens", 6) == "baaaaaa\n"
    advice = mistake(*words, "--min-new-tokens", 7, "--max-new-tokens", 6)
    assert "--max-new-tokens=6 must be at least 7" in advice
