"""Summaries from end to end: learned, validated, scored and written, whatever the length."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.small_texts import NUMBERS, recipe_trainer
from tests.test_cli import call, mistake, result
from tests.train.small_runs import records

from manyheads.errors import UserError
from manyheads.evaluate import rouge
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.tasks.summaries import beginning, summarize

ROUGE = {"rouge1", "rouge2", "rougeL", "rougeLsum"}
SETTINGS = (
    *("model.dim=32", "model.layers=1", "model.heads=2", "model.ffn_dim=64", "model.dropout=0"),
    *("model.max_length=16", "tokens=words", "train.steps=150", "train.batch_tokens=400"),
    *("train.warmup_steps=20", "train.learning_rate=1e-2", "train.label_smoothing=0"),
    *("train.validate_every=150", "train.save_every=150", "decode.beam=1"),
)


def rows(count: int, seed: int, references: int = 1) -> list[dict[str, str]]:
    """Two lines of number words; the summary has the first word of each, as two lines."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        lines = [draw.choices(NUMBERS, k=draw.randint(1, 4)) for _ in range(2)]
        row = {"dialogue": "\n".join(" ".join(words) for words in lines)}
        right = "\n".join(words[0] for words in lines)
        keys = [f"summary{n}" for n in range(1, references + 1)] if references > 1 else ["summary"]
        found.append(row | dict.fromkeys(keys, "nothing") | {keys[-1]: right})
    return found


def write(path: Path, objects: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    train = rows(60, seed=1)
    long = {"dialogue": " ".join(NUMBERS * 3), "summary": " ".join(NUMBERS * 2)}
    write(folder / "train.jsonl", [*train, long])
    write(folder / "dev.jsonl", [*train[:20], long])
    write(folder / "test.jsonl", [*rows(10, seed=1, references=3)])
    return folder


@pytest.fixture(scope="module")
def run(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "summaries"
    recipe_trainer("summaries", out, f"data.folder={documents}", *SETTINGS).run()
    return out


def scored(folder: Path, split: str) -> dict[str, Any]:
    opened = load_torch_run(folder)
    assert opened.run.data is not None
    return opened.evaluate(opened.run.data, split)


def test_what_was_learned_is_written(run: Path) -> None:
    translator = load_torch_run(run).translator()
    wanted = rows(20, seed=1)
    written = summarize(translator, [row["dialogue"].replace("\n", " ⏎ ") for row in wanted])
    assert sum(w == row["summary"] for w, row in zip(written, wanted, strict=True)) >= 16


def test_the_scores_are_those_of_the_last_validation(run: Path) -> None:
    scores, last = scored(run, "valid"), records(run)[-1]
    assert (last["step"], last["split"]) == (150, "valid")
    assert scores.keys() == ROUGE | {"loss", "perplexity", "signature", "split", "examples"}
    assert scores["signature"].keys() == ROUGE | {"loss", "perplexity"}
    for key in ("loss", "perplexity", "rougeL"):
        assert scores[key] == pytest.approx(last[key], rel=1e-5), key
    assert (scores["split"], scores["examples"]) == ("valid", 21)
    assert "log-perplexity" in scores["signature"]["loss"]
    assert "cut:16 tokens" in scores["signature"]["loss"]
    assert scores["rougeL"] > 0.7


def test_every_reference_is_scored_by(run: Path) -> None:
    scores = scored(run, "test")
    assert "refs:3|of them:best" in scores["signature"]["rouge1"]
    assert scores["rouge1"] > 0.7  # the last of the three is right
    assert scores["loss"] > scored(run, "valid")["loss"]  # the first is not


def test_a_long_document_is_read_as_far_as_it_fits(run: Path) -> None:
    translator = load_torch_run(run).translator()
    long = ". ".join(["one two three"] * 20)
    read = beginning(translator, long)
    assert long.startswith(read)
    assert 8 <= len(translator.tokenizer.encode(read)) <= 15
    assert summarize(translator, [long]) == summarize(translator, [read])
    assert beginning(translator, "one ⏎ two") == "one ⏎ two"


def test_a_line_in_a_line_out(run: Path) -> None:
    long = " ".join(NUMBERS * 3)
    lines = ["one two ⏎ three", "", long, "one two ⏎ three"]
    code, printed, said = call("translate", run, stdin="\n".join(lines).encode())
    assert code == 0
    out = printed.splitlines()
    assert len(out) == 4
    assert out[0] == out[3]
    assert out[0]
    assert out[1] == ""
    read = beginning(load_torch_run(run).translator(), long)
    assert said.splitlines() == [
        f"line 3 is longer than the model's 16 tokens: its first {len(read)} of {len(long)} "
        "characters are read"
    ]
    assert result("translate", run, stdin=read.encode()).splitlines() == [out[2]]
    assert "line 2 of the input is not UTF-8" in mistake(
        "translate", run, code=3, stdin=b"one\n\xff\n"
    )


def test_two_files_with_a_document_and_a_summary_a_line(documents: Path, tmp_path: Path) -> None:
    for name in ("long", "short"):
        (tmp_path / f"train.{name}").write_text("one two\nthree four\nfive\n", encoding="utf-8")
    files = ("data=files", f"data.folder={tmp_path}", "data.source=long", "data.target=short")
    recipe_trainer("summaries", tmp_path / "run", *SETTINGS, *files, "train.steps=1").run()
    scores = scored(tmp_path / "run", "valid")
    assert "refs:1|" in scores["signature"]["rouge2"]
    assert scores["examples"] == 1


def test_without_rouge_score_it_trains_and_says_what_scoring_needs(
    documents: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rouge, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    settings = (*SETTINGS, f"data.folder={documents}", "train.steps=1")
    recipe_trainer("summaries", tmp_path / "run", *settings).run()
    assert records(tmp_path / "run")[-1].keys() >= {"loss", "perplexity"}
    assert "rougeL" not in records(tmp_path / "run")[-1]
    with pytest.raises(UserError, match=r"manyheads\[summaries\]"):
        scored(run, "valid")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data=phrasebook", "data=summaries or files"),
        ("model=gpt", "model=.*not gpt"),
        ("objective=spans", "objective=none"),
    ],
)
def test_what_does_not_go_together(setting: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_recipe("summaries", [setting])
