"""Summaries from end to end: learned, validated, scored, generated, whatever the length."""

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
from manyheads.loading import load_torch_run
from manyheads.tasks import summaries
from manyheads.tasks.summaries import summarize, truncate

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
    keys = [f"summary{n}" for n in range(1, references + 1)] if references > 1 else ["summary"]
    result = []
    for _ in range(count):
        lines = [draw.choices(NUMBERS, k=draw.randint(1, 4)) for _ in range(2)]
        row = {"dialogue": "\n".join(" ".join(words) for words in lines)}
        summary = "\n".join(words[0] for words in lines)
        result.append(row | dict.fromkeys(keys, "nothing") | {keys[-1]: summary})
    return result


def write(path: Path, objects: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in objects), encoding="utf-8")


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


def evaluate(folder: Path, split: str) -> dict[str, Any]:
    loaded = load_torch_run(folder)
    assert loaded.run.data is not None
    return loaded.evaluate(loaded.run.data, split)


def test_scores_are_those_of_the_last_validation(run: Path) -> None:
    scores, last = evaluate(run, "valid"), records(run)[-1]
    assert (last["step"], last["split"]) == (150, "valid")
    assert scores.keys() == ROUGE | {"loss", "perplexity", "signature", "split", "examples"}
    assert scores["signature"].keys() == ROUGE | {"loss", "perplexity"}
    for key in ("loss", "perplexity", "rougeL"):
        assert scores[key] == pytest.approx(last[key], rel=1e-5), key
    assert (scores["split"], scores["examples"]) == ("valid", 21)
    assert "cut:16 tokens" in scores["signature"]["loss"]
    assert scores["rougeL"] > 0.7  # learned


def test_all_references_count(run: Path) -> None:
    scores = evaluate(run, "test")
    assert "refs:3|of them:best" in scores["signature"]["rouge1"]
    assert scores["rouge1"] > 0.7  # the last of the three is right
    assert scores["loss"] > evaluate(run, "valid")["loss"]  # the first is not


def test_a_line_in_is_a_line_out_and_a_long_one_is_truncated(run: Path) -> None:
    translator = load_torch_run(run).translator()
    long = ". ".join(["one two three"] * 20)
    start = truncate(translator, long)
    assert long.startswith(start)
    assert 8 <= len(translator.tokenizer.encode(start)) <= 15
    assert summarize(translator, [long]) == summarize(translator, [start])
    lines = ["one two ⏎ three", "", long, "one two ⏎ three"]
    code, printed, stderr = call("summarize", run, stdin="\n".join(lines).encode())
    assert code == 0
    out = printed.splitlines()
    assert (len(out), out[1], out[3]) == (4, "", out[0])
    assert out[0]
    assert stderr.startswith("line 3 ")
    assert f"{len(start)} of {len(long)} characters" in stderr
    assert stderr.count("\n") == 1
    assert result("translate", run, stdin=start.encode()).splitlines() == [out[2]]
    assert "input:2: " in mistake("translate", run, code=3, stdin=b"one\n\xff\n")


def test_without_rouge_score_training_works_and_scoring_names_it(
    documents: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    settings = (*SETTINGS, f"data.folder={documents}", "train.steps=1")
    recipe_trainer("summaries", tmp_path / "run", *settings).run()
    assert "rougeL" not in records(tmp_path / "run")[-1]
    with pytest.raises(UserError, match=r"manyheads\[summaries\]"):
        evaluate(run, "valid")
