"""The command line: results on stdout, everything else on stderr, errors in one line."""

import dataclasses
import errno
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from manyheads import cli
from manyheads.commands import training
from manyheads.commands.shared import command_name
from manyheads.loading import load_run
from manyheads.models.capture import capture
from manyheads.recipes import read_recipe
from manyheads.run import read_run
from manyheads.tokenizer.tokenizer import Tokenizer

TINY = (
    *("data.train_pairs=120", "data.valid_pairs=3", "data.test_pairs=3", "tokens.vocab_size=300"),
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32", "train.steps=6"),
    *("train.batch_tokens=600", "train.warmup_steps=2", "train.validate_every=3"),
    *("train.save_every=3", "decode.bleu_sentences=2", "decode.max_length_extra=2"),
    *("decode.max_length_ratio=1", "decode.beam=2"),
)


def call(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """`manyheads WORDS < STDIN` in this process: exit code, stdout, stderr.

    Without the line on stderr that names the engine.
    """
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv = ["manyheads", *map(str, words)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv, sys.stdin = before
    lines = err.getvalue().splitlines(keepends=True)
    others = [line for line in lines if not line.startswith("engine: ")]
    return int(code or 0), out.getvalue(), "".join(others)


def result(*words: object, stdin: bytes = b"") -> str:
    """The standard output of a command that succeeds."""
    code, out, err = call(*words, stdin=stdin)
    assert code == 0, err
    return out


def mistake(*words: object, code: int = 2, stdin: bytes = b"") -> str:
    """The one line on stderr of a command that is refused."""
    exit_code, out, err = call(*words, stdin=stdin)
    assert exit_code == code, err
    assert out == ""
    *notes, line = err.splitlines()
    assert all("' is now '" in note for note in notes)  # a renamed setting
    assert line.startswith("manyheads: ")
    return f"{line}\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A tiny translation run, with the stdout and stderr of its training."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    code, printed, said = call("train", "phrasebook", *TINY, "--out", out, "--device", "cpu")
    assert code == 0, said
    return out, printed, said


@pytest.fixture(scope="module")
def run(trained: tuple[Path, str, str]) -> Path:
    return trained[0]


# --- help and discovery ---

SLOW_MODULES = {"torch", "numpy", "tokenizers", "sacrebleu", "matplotlib", "rich"}


def test_help_and_completion_import_nothing_slow() -> None:
    script = """
import contextlib, io, sys
from manyheads import cli
from manyheads.commands.catalogue import complete_recipe
names = [name for group in cli.COMMANDS.values() for name in group]
for words in ([], ["--help"], ["-h"], *([name, "--help"] for name in names)):
    sys.argv = ["manyheads", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main()
    assert "Usage" in printed.getvalue(), words
assert complete_recipe("phr") == ["phrasebook"]
print(" ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not SLOW_MODULES & set(done.stdout.split())


def test_loading_and_counting_import_no_compiler() -> None:
    """It takes a second. (An optimizer imports it, and so does a kernel of ours.)"""
    script = """
import sys
import manyheads.loading, manyheads.run
from manyheads.summary import count_parameters
from manyheads.presets import preset
for name in ("transformer-base", "bert-base", "gpt3-small"):
    count_parameters(preset(name))
print(" ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    slow = {"torch._dynamo", "sympy", "torch.onnx", "transformers", "matplotlib"}
    assert not slow & set(done.stdout.split())


COMMANDS = [name for group in cli.COMMANDS.values() for name in group]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-line summary, examples that run this program, 80 columns, no old spellings."""
    monkeypatch.setenv("COLUMNS", "80")
    text = result(name, "--help")
    lines = text.splitlines()
    assert lines[0].startswith(f"Usage: manyheads {name} [OPTIONS]")
    assert max(map(len, lines)) <= 80
    assert "\nExamples\n  $ " in text
    assert not {"--picture", "--with", "--rows", "--half", "docs/"} & set(text.split())
    summary = result("--help").split(f"\n  {name} ")[1].splitlines()[0].strip()
    assert summary.rstrip(".") in text


def test_the_commands_of_0_1_still_exist() -> None:
    listed = result("--help")
    for name in ("fill", "tokens", "scale"):
        assert "Usage" in result(name, "--help")
        assert f"\n  {name} " not in listed


def test_settings_are_listed_with_meaning_and_type() -> None:
    every = json.loads(result("settings", "phrasebook", "--json"))["settings"]
    names = [row["name"] for row in every]
    assert len(names) == len(set(names)) > 80
    lines = result("settings", "phrasebook", "train").splitlines()
    assert all(line.startswith("train.") for line in lines)
    row = next(line for line in lines if line.startswith("train.checkpoint=best"))
    assert "best | last" in row
    matches = result("settings", "phrasebook", "learning rate")
    assert "train.learning_rate=" in matches
    assert "train.schedule=" in matches  # "Learning-rate schedule"
    assert "model.layers=" in result("settings", "phrasebook", "number of layers")
    assert "train.batch_tokens=" not in matches
    changed = result("settings", "phrasebook", "model.position", "model.position=rotary")
    assert "model.position=rotary" in changed


# --- train ---


def test_training_reports_on_stderr_and_prints_nothing(trained: tuple[Path, str, str]) -> None:
    out, printed, said = trained
    assert printed == ""
    assert "parameters on cpu, float32" in said
    assert "step 3  loss" in said
    assert "train 6/6" in said
    assert "\r" not in said  # no progress bar outside a terminal
    next_step = f"trained: {out}; next: {command_name()} evaluate {out}"
    assert said.splitlines()[-1] == next_step
    assert {path.name for path in out.iterdir()} >= {
        *("run.toml", "tokenizer.json", "model.safetensors", "state", "metrics.jsonl")
    }


def test_fresh_starts_over(run: Path, tmp_path: Path) -> None:
    """The same bits as a new run; other files in the folder stay."""
    out = shutil.copytree(run, tmp_path / "run")
    (out / "scores.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    words = ("train", "phrasebook", *TINY, "--out", out, "--device", "cpu")
    assert mistake(*words, "seed=9").count("--fresh")
    _, _, said = call(*words, "--fresh")
    assert "step 3  loss" in said
    assert not (out / "scores.json").exists()
    assert (out / "notes.txt").exists()
    weights = [load_file(folder / "model.safetensors") for folder in (run, out)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_dry_run_prints_the_cost_and_writes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("train", "phrasebook", *TINY, "train.warmup_steps=60", "--dry-run")
    code, printed, notes = call(*words)
    assert code == 0
    assert "only 10% of its peak" in notes
    rows = dict(line.split("  ", 1) for line in printed.splitlines())
    assert {"parameters", "tokens per step", "steps", "time", "memory"} <= rows.keys()
    count = sum(tensor.numel() for tensor in load_file(run / "model.safetensors").values())
    assert rows["parameters"].strip() == f"{count:,}"
    assert rows["steps"].split()[0] == "6"
    assert not list(tmp_path.iterdir())


def test_a_recipe_file_trains_into_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = result("train", "phrasebook", *TINY, "train.steps=1", "--print-config")
    Path("mine.toml").write_text(settings, encoding="utf-8")
    assert result("train", "mine.toml", "data.train_pairs=30") == ""
    saved = read_run(Path("runs/mine"))
    recipe = read_recipe("mine.toml", ["data.train_pairs=30"])
    size = Tokenizer.load(Path("runs/mine/tokenizer.json")).vocab_size
    model = dataclasses.replace(recipe.model, vocab_size=size)
    assert saved == dataclasses.replace(recipe, model=model)


def test_a_users_own_files(tmp_path: Path) -> None:
    """Too long lines stop neither training nor evaluation; the printed next command works."""
    for side in ("en", "de"):
        lines = [f"{side} a{i} b{i}" for i in range(60)]
        (tmp_path / f"train.{side}").write_text("\n".join([*lines, "long " * 60]))
        (tmp_path / f"test.{side}").write_text("x y\n" + "long " * 60 + "\nz")
    files = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    small = [setting for setting in TINY if not setting.startswith("data.")]
    more = ("model.position=learned", "model.max_length=24", "train.too_long=skip")
    code, _, said = call("train", "translation", *files, *small, *more, "-o", tmp_path / "run")
    assert code == 0, said
    assert said.count("61 pairs") == 1
    assert said.count("1 of them held out for validation") == 1
    assert "left out" in said
    scores = json.loads(result("evaluate", *said.split(" evaluate ")[1].split(), "--json"))
    assert scores["examples"] == 3
    # A target language without spaces has a BLEU tokenizer of its own, and the signature says so.
    assert "tok:13a" in scores["signature"]["bleu"]
    for side, target in (("de", "zh"), ("de", "ja")):
        shutil.copy(tmp_path / f"test.{side}", tmp_path / f"test.{target}")
        words = ("evaluate", tmp_path / "run", f"data.target={target}", "--json")
        signature = json.loads(result(*words))["signature"]["bleu"]
        assert any(f"tok:{name}" in signature for name in ("zh", "ja-mecab", "char"))
    other = json.loads(result("evaluate", tmp_path / "run", "--bleu-tokenize", "char", "--json"))
    assert "tok:char" in other["signature"]["bleu"]


def test_a_users_own_tables(tmp_path: Path) -> None:
    """Trained from a table, evaluated on compressed files, standard input and another table."""
    rows = [
        {"pair": {"en": f"a{i} b{i}", "ja": f"犬{i}猫{i}"}, "text": f"犬{i}猫{i}"}
        for i in range(40)
    ]
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    small = [setting for setting in TINY if not setting.startswith("data.")]
    columns = ("data.source_column=pair.en", "data.target_column=pair.ja")
    words = ("train", "translation", f"data.train={table}", f"data.valid={table}", *columns, *small)
    code, _, said = call(*words, "-o", tmp_path / "run")
    assert code == 0, said
    assert "41 of 41 pairs of 'valid' also occur in training" in said
    unnamed = (*words, "data.target_column=text", "-o", tmp_path / "unnamed")
    assert call(*unnamed)[0] == 0
    evaluated = ("evaluate", tmp_path / "unnamed", "--split", "valid", "--json")
    assert "tok:char" in json.loads(result(*evaluated))["signature"]["bleu"]
    code, printed, said = call(*evaluated, "--bleu-tokenize", "13a")
    assert (code, json.loads(printed)["bleu"]) == (0, 0)
    assert "--bleu-tokenize" in said
    source, reference = tmp_path / "in.gz", tmp_path / "out.txt"
    source.write_bytes(gzip.compress(b"a1 b1\na2 b2\n"))
    reference.write_text("犬1猫1\n犬2猫2\n")
    table.unlink()
    code, _, said = call("evaluate", tmp_path / "run")
    assert (code, "data.test=FILE" in said) == (2, True)
    files = ("--reference", reference, "--json")
    scores = json.loads(result("evaluate", tmp_path / "run", "--source", source, *files))
    assert "tok:ja-mecab" in scores["signature"]["bleu"]
    code, printed, _ = call(
        "evaluate", tmp_path / "run", "--source", "-", *files, stdin=b"a1 b1\na2 b2\n"
    )
    assert (code, json.loads(printed)["chrf"]) == (0, scores["chrf"])
    other = tmp_path / "other.csv"
    other.write_text("en,ja\na1 b1,犬1猫1\na2 b2,犬2猫2\n")
    columns = ("data.source_column=en", "data.target_column=ja", f"data.test={other}")
    scores |= {"chrf": json.loads(result("evaluate", tmp_path / "run", *columns, "--json"))["chrf"]}
    assert json.loads(printed)["chrf"] == scores["chrf"]
    broken = other.write_text("en,ja\na1 b1,\n")
    code, _, said = call("evaluate", tmp_path / "run", *columns)
    assert (code, broken) == (3, 13)
    assert f"{other}:2: 'ja' is empty" in said


# --- evaluate ---


def test_evaluate_on_files_against_another_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("The dog sleeps.\nThe cat sees the tree.\n")
    (tmp_path / "r1").write_text("Der Hund schläft.\nDie Katze sieht den Baum.\n")
    (tmp_path / "r2").write_text("犬が寝ている\n猫が木を見る\n")
    before = (run / "scores.json").exists()
    files = ("--source", tmp_path / "in", "--reference", tmp_path / "r2")
    more = ("--reference", tmp_path / "r1", "--against", run, "--metric", "bleu", "--json")
    code, printed, _ = call("evaluate", run, *files, *more, "--confidence", "--device", "cpu")
    scores = json.loads(printed)
    assert (code, scores["examples"], "chrf" in scores) == (0, 2, False)
    assert {"bleu", "bleu_mean", "bleu_ci"} <= scores.keys()
    assert scores["paired"]["bleu"]["against"] == scores["bleu"]
    # The first reference is Japanese, and the run's language is German.
    assert "tok:char" in scores["signature"]["bleu"]
    assert (run / "scores.json").exists() == before
    assert call("evaluate", run, *files[:2])[0] == 2
    assert call("evaluate", run, "--metric", "blue")[0] == 2


def test_evaluate_gives_every_score_with_its_signature(run: Path) -> None:
    code, printed, said = call("evaluate", run, "--json", "--device", "cpu")
    assert code == 0
    scores = json.loads(printed)
    assert scores.keys() >= {
        *("bleu", "chrf", "exact_match", "loss", "perplexity", "signature", "split", "examples"),
        *("compositional_bleu", "alignment_error"),
    }
    assert json.loads((run / "scores.json").read_text()) == scores
    assert (scores["split"], scores["examples"]) == ("test", 3)
    assert scores["signature"].keys() == {"bleu", "chrf"}
    assert "tok:13a" in scores["signature"]["bleu"]
    assert 0 <= scores["bleu"] <= 100
    assert 0 <= scores["alignment_error"] <= 1
    assert torch.tensor(scores["loss"]).exp().item() == pytest.approx(scores["perplexity"])
    assert "evaluate 3/3" in said
    plain = result("evaluate", run, "--device", "cpu")
    for name, value in scores.items():
        if isinstance(value, float):
            assert any(line.split() == [name, f"{value:.4f}"] for line in plain.splitlines()), name
    assert scores["signature"]["bleu"] in plain


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--int8",), "computed_in", "int8"),
        (("--dtype", "bfloat16"), "computed_in", "bfloat16"),
        (("--ensemble", "{run}", "--with", "{run}"), "written_with", "{run} {run}"),
        (("decode.stopping=exact", "--beam", "3"), "decoded_with", "decode.stopping=exact"),
        (("data.test_pairs=8",), "evaluated_on", "data.test_pairs=8"),
    ],
)
def test_scores_of_a_variant_are_printed_and_not_saved(
    words: tuple[str, ...], key: str, value: str, run: Path
) -> None:
    reference = json.loads(result("evaluate", run, "--json", "--device", "cpu"))
    words = tuple(word.format(run=run) for word in words)
    scores = json.loads(result("evaluate", run, "--json", "--device", "cpu", *words))
    assert value.format(run=run) in scores[key]
    assert json.loads((run / "scores.json").read_text()) == reference
    assert ("loss" in scores) == (value != "int8" and key != "written_with")
    if value == "bfloat16":
        assert scores["loss"] == pytest.approx(reference["loss"], rel=0.02)
        assert scores["loss"] != reference["loss"]
    if key == "written_with":  # an ensemble of equal models is the model
        assert (scores["bleu"], scores["chrf"]) == (reference["bleu"], reference["chrf"])


def test_a_read_only_run_is_scored_and_not_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.json"))
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    code, printed, said = call("evaluate", copy, "--json", "--split", "valid")
    assert code == 0
    assert json.loads(printed)["examples"] == 3
    [line] = [line for line in said.splitlines() if "scores.json" in line]
    assert "only printed" in line
    assert not (copy / "scores.json").exists()


# --- translate ---

TEXT = "The dog sleeps.\n\n   \nA small cat sees the tree.\r\nÄ ü 漢字 🙂\nthe last line"


def test_as_many_lines_out_as_in(run: Path, tmp_path: Path) -> None:
    code, printed, said = call("translate", run, stdin=TEXT.encode())
    assert (code, said) == (0, "")
    lines = printed.split("\n")
    assert len(lines) == 6 + 1
    assert lines[-1] == ""
    assert lines[1] == lines[2] == ""
    assert result("translate", run, stdin=b"") == ""
    each = [result("translate", run, stdin=f"{line}\n".encode()) for line in TEXT.splitlines()]
    assert "".join(each) == printed  # no line depends on the others
    file = tmp_path / "in=1.txt"
    file.write_bytes(TEXT.encode())
    assert result("translate", run, file) == printed
    packed = tmp_path / "in.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    assert result("translate", run, packed) == printed
    assert "use manyheads translate" in mistake("summarize", run, file)


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_alignment_and_scores_follow_the_text(run: Path, engine: str) -> None:
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    words = ("translate", run, "--engine", engine, "--device", "cpu")
    stdin = b"The dog sleeps.\n\nThe cat sees the dog.\n"
    plain = result(*words, stdin=stdin).splitlines()
    lines = result(*words, "--alignment", "--scores", stdin=stdin).splitlines()
    assert [line.split(" ||| ")[0] for line in lines] == plain
    for line, source in zip(lines, stdin.decode().splitlines(), strict=True):
        text, links, log_probs = line.split(" ||| ")
        pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
        assert [target for _, target in pairs] == list(range(len(text.split()) if pairs else 0))
        assert all(place < len(source.split()) for place, _ in pairs)
        assert all(float(value) < 0 for value in log_probs.split())
        assert bool(log_probs) == bool(source)
    if engine == "torch":
        n_best = result(*words, "--n-best", "2", "--scores", stdin=stdin).splitlines()
        assert [line.count(" ||| ") for line in n_best] == [3] * 5
    both = mistake(*words[:2], "--ensemble", run, "--scores", stdin=stdin)
    assert "leave out --ensemble" in both
    assert "leave out --sample" in mistake(*words[:2], "--sample", "--scores", stdin=stdin)


# --- pipes and terminals ---


def shell(command: str, run: Path) -> subprocess.CompletedProcess[str]:
    command = command.format(run=run, manyheads=f"{sys.executable} -m manyheads")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code", "word"),
    [
        ("{manyheads} translate {run} --engine torch <&-", 2, "standard input"),
        ("{manyheads} recipes >&-", 0, ""),
        ("{manyheads} recipes > /dev/full", 3, "space"),
        ("yes dog | head -2000 | {manyheads} translate {run} --engine torch | head -1", 0, ""),
        ("{manyheads} recipes | true; exit ${{PIPESTATUS[0]}}", 0, ""),
        ("PYTHONIOENCODING=ascii {manyheads} tokenize {run} weiter", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full_or_broken(
    command: str, code: int, word: str, run: Path
) -> None:
    done = shell(command, run)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.stderr.count("\n") == (1 if word else 0)
    assert word in done.stderr


def test_a_person_at_a_terminal_gets_a_hint(run: Path) -> None:
    main, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyheads", "translate", str(run), "--device", "cpu"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores SIGINT, and its processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(terminal)
    assert process.stderr is not None
    assert process.stdout is not None
    assert process.stderr.readline().startswith("engine: ")
    assert "Ctrl-D" in process.stderr.readline()
    os.write(main, b"The dog sleeps.\n")
    assert process.stdout.readline()  # at once, not when the input ends
    for _ in range(60):  # a signal just before the next read is only seen when the read returns
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    assert process.returncode == 130
    assert "Traceback" not in process.stderr.read()
    os.close(main)


# --- info, tokenize, compare, demo ---


def test_info_counts_parameters(run: Path) -> None:
    counts = json.loads(result("info", "transformer-base", "--json"))
    assert isinstance(counts["parameters"], int)
    assert sum(counts["parts"].values()) == counts["parameters"]
    assert 60e6 < counts["parameters"] < 66e6
    shallow = json.loads(result("info", "transformer-base", "model.layers=1", "--json"))
    assert shallow["parameters"] < counts["parameters"]
    assert f"{counts['parameters'] / 1e6:.1f}M parameters" in result("info", "transformer-base")
    of_run = json.loads(result("info", run, "--json"))
    weights = load_file(run / "model.safetensors")
    assert of_run["parameters"] == sum(tensor.numel() for tensor in weights.values())


def test_tokenize_shows_the_merges(run: Path) -> None:
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    ids = tokenizer.encode("the dog")
    printed = result("tokenize", run, "the", "dog").splitlines()
    assert printed[0] == "  " + "|".join("the dog")
    assert all("(merge " in line for line in printed[1:-1])
    assert len(printed) > 3
    assert printed[-1] == f"{len(ids)} tokens: {' '.join(map(str, ids))}"
    values = json.loads(result("tokens", run / "tokenizer.json", "the dog", "--json"))
    assert (values["text"], values["ids"]) == ("the dog", ids)
    assert values["pieces"] == values["steps"][-1]["pieces"] == tokenizer.subwords(ids)
    assert "".join(values["pieces"]) == "the dog"


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "words"])
def test_tokenize_learns_a_vocabulary(kind: str, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus.txt", tmp_path / "tokenizer.json"
    corpus.write_text("the unbelievable dog\nthe believable cat\n" * 20, "utf-8")
    words = ("tokenize", "--learn", corpus, "--kind", kind, "--size", "600")
    shown = json.loads(result(*words, "--out", out, "the", "dog", "--json"))
    saved = Tokenizer.load(out)
    assert saved.kind == kind
    assert shown["ids"] == saved.encode("the dog")
    assert result("tokenize", out, "the dog") == result(*words, "the dog")
    assert "'wordpiece'" in mistake("tokenize", "--learn", corpus, "--kind", "wordpeice", "a")
    assert "--learn FILE" in mistake("tokenize", out)


def test_capture_saves_activations_by_name(run: Path, tmp_path: Path) -> None:
    acts, text = tmp_path / "acts.safetensors", "The dog sees."
    printed = result("capture", run, text, "--target", "Der Hund.", "--out", acts)
    tensors = load_file(acts)
    assert {line.split()[0] for line in printed.splitlines()} == set(tensors)
    loaded: Any = load_run(run)
    tokenizer, special = loaded.tokenizer, loaded.translator().special_tokens
    source = torch.tensor([special.source(tokenizer.encode(text))])
    target = torch.tensor([[special.start, *tokenizer.encode("Der Hund.")]])
    with torch.no_grad(), capture(loaded.model) as maps:
        loaded.model(source, target)
    for name, weights in (
        ("encoder.self.weights", maps.all("self", "encoder")),
        ("decoder.self.weights", maps.all("self", "decoder")),
        ("decoder.cross.weights", maps.all("cross")),
    ):
        torch.testing.assert_close(tensors[name], torch.cat(weights))
    with safe_open(acts, "pt") as file:
        tokens = json.loads(file.metadata()["encoder.tokens"])
    assert tokens == tokenizer.subwords(source[0].tolist())
    assert tensors["encoder.layer.input"].shape == (1, len(tokens), 16)
    (tmp_path / "texts.txt").write_text("The dog.\nThe cat sees.\n", "utf-8")
    result("capture", run, tmp_path / "texts.txt", "--only", "*.self.q", "-o", acts)
    parts = ("encoder.self.q", "decoder.self.q")
    assert set(load_file(acts)) == {f"{line}/{name}" for line in (1, 2) for name in parts}
    assert "names no tensor" in mistake("capture", run, text, "--only", "x", "-o", acts)
    assert "shorten it" in mistake("capture", run, text * 200, "-o", acts)
    (tmp_path / "texts.txt").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in mistake("capture", run, tmp_path / "texts.txt", "-o", acts, code=3)
    words = ("serve", run, "--token-file", tmp_path / "texts.txt")
    assert "not UTF-8" in mistake(*words, code=3)


def test_compare_gives_a_table_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "compare"
    words = ["compare", "phrasebook", *TINY, "train.steps=3", "data.train_pairs=40"]
    words += ["--out", str(out), "--device", "cpu"]
    code, printed, said = call(*words, "--sweep", "model.position=sinusoidal,learned")
    assert code == 0, said
    assert said.startswith("2 runs, about ")
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    # The old form: a comma in a setting.
    code, values, said = call(*words, "model.position=sinusoidal,learned", "--json")
    assert code == 0
    assert "--sweep model.position=sinusoidal,learned" in said.splitlines()[0]
    compared = json.loads(values)
    assert compared["split"] == "valid"
    rows = {row["settings"]: row for row in compared["runs"]}
    assert rows.keys() == {"model.position=sinusoidal", "model.position=learned"}
    # Learned positions have tables of max_length × dim on each side.
    counts = [row["parameters"] for row in compared["runs"]]
    assert counts[1] - counts[0] == 2 * 128 * 16
    for row in compared["runs"]:
        assert row["settings"] in printed
        assert f"{row['parameters']:,}" in printed
        assert f"{row['loss']:.3f}" in printed
        assert (Path(row["folder"]) / "model.safetensors").is_file()


def test_demo_shows_what_was_learned(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny run in place of the one that takes minutes."""
    out = shutil.copytree(run, tmp_path / "demo")
    monkeypatch.setattr(training, "read_with_seed", lambda *args: read_recipe("phrasebook", TINY))
    printed = result("demo", "--out", out, "--device", "cpu")
    scores = json.loads((out / "scores.json").read_text())
    assert f"{scores['bleu']:.1f}   {scores['signature']['bleu']}" in printed
    assert f"{100 * scores['alignment_error']:.1f} %" in printed
    assert (out / "attention.png").read_bytes().startswith(b"\x89PNG")
    for sentence in read_run(out).data.read("test").sources[:5]:
        assert sentence in printed
    assert printed.split("Next:\n")[1].splitlines()[0].endswith(f"view {out}")
