"""Small models learn a language that counts, and a rule about it."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.tasks.small_texts import NUMBERS, trainer, write_texts
from tests.train.small_runs import records

from manyheads.loading import load_torch_run

QUICK = (
    *("model.dim=32", "model.dropout=0", "model.init=xavier", "train.batch_rows=16"),
    *("train.schedule=cosine", "train.learning_rate=1e-2", "train.log_every=1000"),
    *("train.steps=100", "train.validate_every=100", "train.save_every=1000"),
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), documents=150)


def entropy_of_words(folder: Path) -> float:
    """The loss of a model that knows only the word frequencies."""
    counts = Counter((folder / "counting.txt").read_text().split())
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


# Rotary positions: a word depends on its neighbours, at any position.
@pytest.mark.parametrize(
    ("name", "steps"), [("causal stream", 100), ("masked", 200), ("spans", 100)]
)
def test_the_language_is_learned(name: str, steps: int, texts: Path, tmp_path: Path) -> None:
    settings = (*QUICK, "model.position=rotary", f"train.steps={steps}")
    trainer(name, texts, tmp_path / "run", *settings).run()
    chance = entropy_of_words(texts)
    assert chance == pytest.approx(math.log(10), abs=0.01)
    last = records(tmp_path / "run")[-1]
    assert last["split"] == "valid"
    assert last["loss"] < 0.5 * chance


def test_a_rule_is_learned(texts: Path, tmp_path: Path) -> None:
    """A text with a seven in it is a lucky one."""
    draw = random.Random(3)
    drawn = [draw.choices(NUMBERS, k=draw.randint(4, 10)) for _ in range(300)]
    rows = [f"{' '.join(words)}\t{'lucky' if 'seven' in words else 'plain'}" for words in drawn]
    (tmp_path / "tables").mkdir()
    lines = "\n".join(["text\tlabel", *rows]) + "\n"
    (tmp_path / "tables/train.tsv").write_text(lines, encoding="utf-8")
    trainer("labels", tmp_path, tmp_path / "run", *QUICK, "data.held_out=0.2").run()
    last = records(tmp_path / "run")[-1]
    assert last["accuracy"] > 0.9
    [[lucky], [plain]] = (
        load_torch_run(tmp_path / "run")
        .encoder()
        .classify(["one two seven ten", "one two six ten"])
    )
    assert (lucky.label, plain.label) == ("lucky", "plain")
