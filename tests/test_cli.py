"""The command line: results on stdout, all else on stderr, one line for a mistake."""

import dataclasses
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyheads import cli, loading
from manyheads.commands import training
from manyheads.config import parse
from manyheads.decode import translate as translate_module
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import Run, read_run
from manyheads.tokenizer.tokenizer import Tokenizer

TINY = (
    *("data.train_pairs=120", "data.valid_pairs=3", "data.test_pairs=3", "tokens.vocab_size=300"),
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32", "train.steps=6"),
    *("train.batch_tokens=600", "train.warmup_steps=2", "train.validate_every=3"),
    *("train.save_every=3", "decode.bleu_sentences=2", "decode.max_length_extra=2"),
    *("decode.max_length_ratio=1", "decode.beam=2"),
)


def call(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """`manyheads WORDS < STDIN` in this process: exit code, stdout, stderr."""
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
    return int(code or 0), out.getvalue(), err.getvalue()


def result(*words: object, stdin: bytes = b"") -> str:
    """What a command that works prints."""
    code, printed, said = call(*words, stdin=stdin)
    assert code == 0, said
    assert "Traceback" not in said
    return printed


def mistake(*words: object, code: int = 2, stdin: bytes = b"") -> str:
    """The one line of a command that is refused."""
    found, printed, said = call(*words, stdin=stdin)
    assert found == code, said
    assert printed == ""
    assert said.startswith("manyheads: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """One tiny run for all, with what training it printed and said."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    code, printed, said = call("train", "phrasebook", *TINY, "--out", out, "--device", "cpu")
    assert code == 0, said
    return out, printed, said


@pytest.fixture(scope="module")
def run(trained: tuple[Path, str, str]) -> Path:
    return trained[0]


# --- help ---


def seconds(words: list[str]) -> float:
    """Processor time of a command: what it takes on a machine that does nothing else."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_an_average_is_said(tmp_path: Path) -> None:
    settings = ("train.steps=6", "train.average_checkpoints=2")
    _, _, said = call("train", "phrasebook", *TINY, *settings, "--out", tmp_path / "mean")
    assert "the weights are the mean of those after steps 3, 6" in said


def test_help_is_instant() -> None:
    words = [sys.executable, "-m", "manyheads", "--help"]
    assert statistics.median(seconds(words) for _ in range(3)) < 0.5


def test_help_imports_no_torch() -> None:
    script = """
import contextlib, io, sys
from manyheads import cli
from manyheads.commands import training
for words in ([], ["--help"], ["-h"], *([name, "--help"] for name in sys.argv[1:])):
    sys.argv = ["manyheads", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main()
    assert "Usage" in printed.getvalue() or not words, words
slow = {"torch", "numpy", "tokenizers", "sacrebleu", "matplotlib"} & set(sys.modules)
sys.exit(f"imported {slow}" if slow else 0)
"""
    names = ["demo", "train", "evaluate", "translate", "info", "tokens", "compare"]
    done = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_opening_and_counting_import_no_compiler() -> None:
    """It takes a second. (An optimizer imports it, and so does a kernel of our own.)"""
    script = """
import sys
import manyheads.loading, manyheads.run
from manyheads.summary import count_parameters
from manyheads.presets import preset
for name in ("transformer-base", "bert-base", "gpt3-small"):
    count_parameters(preset(name))
slow = {"torch._dynamo", "sympy", "torch.onnx", "transformers", "matplotlib"} & set(sys.modules)
sys.exit(f"imported {slow}" if slow else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- mistakes ---


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train", "phrasebok"], "did you mean 'phrasebook'?"),
        (["train", "nothing/like/it.toml"], "there is no recipe 'nothing/like/it.toml'"),
        (["train", "phrasebook", "model.dimm=3"], "did you mean 'model.dim'?"),
        (["train", "phrasebook", "trian.steps=3"], "did you mean 'train'?"),
        (["train", "phrasebook", "model.position=rotery"], "did you mean 'rotary'?"),
        (["train", "phrasebook", "data.pair=en-dee"], "did you mean 'en-de'?"),
        (["train", "phrasebook", "model.dim=wide"], "model.dim is a whole number"),
        (["train", "phrasebook", "model.dim"], "write it as name=value"),
        (["train", "phrasebook", "model.heads=3"], "does not divide into 3 heads"),
        (["train", "phrasebook", "train.steps=0"], "train.steps=0 must be at least 1"),
        (["train", "phrasebook", "--seed", "-1"], "seed=-1"),
        (["train", "phrasebook", "--device", "gpu"], "use auto or cpu"),
        (["train", "phrasebook", "--threads", "0"], "--threads 0 must be at least 1"),
        (["info", "transformer-bas"], "did you mean 'transformer-base'?"),
        (["info", "transformer-base", "model.layer=3"], "did you mean 'layers'?"),
        (["compare", "phrasebook", "model.dim=16"], "nothing to compare"),
        (["compare", "phrasebook", "seed=1,2", "--split", "vald"], "did you mean 'valid'?"),
        (["compare", "phrasebok", "seed=1,2"], "did you mean 'phrasebook'?"),
        (["evaluate", "no/such/run"], "no run folder no/such/run"),
        (["translate", "no/such/run"], "no run folder no/such/run"),
        (["trian"], "No such command 'trian'"),
        (["train", "phrasebook", "--outt", "x"], "see manyheads train --help"),
        (["translate", "run", "--beam", "five"], "'--beam'"),
        (["translate", "run", "test.en"], "manyheads translate RUN < FILE"),
        (["evaluate"], "Missing argument 'RUN': see manyheads evaluate --help"),
    ],
)
def test_a_mistake_is_one_line_with_advice(
    words: list[str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert advice in mistake(*words)
    assert not any(path.suffix == ".safetensors" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["evaluate", "--split", "tset"], "did you mean 'test'?"),
        (["evaluate", "--split", "composition"], "did you mean 'compositional'?"),
        (["evaluate", "--device", "cpuu"], "use auto or cpu"),
        (["evaluate", "--beam", "0"], "decode.beam=0 must be from 1"),
        (["translate", "--beam", "0"], "decode.beam=0 must be from 1"),
        (["translate", "--beam", "100000"], "decode.beam=100000 must be from 1 to 1000"),
        (["translate", "--n-best", "0"], "--n-best 0 must be at least 1"),
        (["translate", "--sample", "--top-p", "0"], "top_p=0.0"),
    ],
)
def test_a_mistake_about_a_run_is_one_line(words: list[str], advice: str, run: Path) -> None:
    assert advice in mistake(words[0], run, *words[1:])


@pytest.mark.parametrize(
    ("words", "part"), [(["trian"], "trian"), (["train", "phrasebook", "--ouut", "x"], "--ouut")]
)
def test_a_wrong_word_or_option_is_a_usage_error(words: list[str], part: str) -> None:
    code, printed, said = call(*words)
    assert (code, printed) == (2, "")
    assert part in said
    assert "Traceback" not in said


# --- train ---


def test_training_says_on_stderr_and_prints_nothing(trained: tuple[Path, str, str]) -> None:
    out, printed, said = trained
    assert printed == ""
    assert "parameters on cpu, float32" in said
    assert "step 3  loss" in said
    assert "train 6/6" in said
    assert "\r" not in said  # no bar outside a terminal
    assert said.splitlines()[-1] == f"trained: {out}; next: manyheads evaluate {out}"
    assert {path.name for path in out.iterdir()} >= {
        *("run.toml", "tokenizer.json", "model.safetensors", "state", "metrics.jsonl")
    }


def test_the_same_command_again_does_nothing_more(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    lines = (run / "metrics.jsonl").read_bytes()
    code, printed, said = call("train", "phrasebook", *TINY, "--out", run, "--device", "cpu")
    assert (code, printed) == (0, "")
    assert "loss" not in said
    assert {path: path.read_bytes() for path in run.rglob("*.safetensors")} == before
    assert (run / "metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model.dim=32", "model.dim is 16 there and 32 here"),
        ("seed=9", "seed is 1 there and 9 here"),
        ("data.pair=en-fr", "data.pair is en-de there and en-fr here"),
        ("train.clip=none", "train.clip"),
    ],
)
def test_another_setting_does_not_go_into_the_same_folder(
    setting: str, named: str, run: Path
) -> None:
    before = (run / "run.toml").read_bytes()
    line = mistake("train", "phrasebook", *TINY, setting, "--out", run)
    assert named in line
    assert "--out" in line
    assert (run / "run.toml").read_bytes() == before


def test_the_printed_settings_are_a_recipe(tmp_path: Path) -> None:
    printed = result("train", "phrasebook", *TINY, "--seed", "5", "--print-config")
    table = tomllib.loads(printed)
    assert parse(Run, table) == read_recipe("phrasebook", [*TINY, "seed=5"])
    assert "# model.head_dim=none" in printed.splitlines()  # TOML has no word for it
    recipe = tmp_path / "mine.toml"
    recipe.write_text(printed, encoding="utf-8")
    assert result("train", recipe, "--print-config") == printed


def test_a_recipe_file_trains_into_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = result("train", "phrasebook", *TINY, "train.steps=1", "--print-config")
    Path("mine.toml").write_text(settings, encoding="utf-8")
    assert result("train", "mine.toml", "data.train_pairs=30") == ""
    found = read_run(Path("runs/mine"))
    size = Tokenizer.load(Path("runs/mine/tokenizer.json")).vocab_size
    wanted = read_recipe("mine.toml", ["data.train_pairs=30"])
    model = dataclasses.replace(wanted.model, vocab_size=size)
    assert found == dataclasses.replace(wanted, model=model)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed = ", "not valid TOML"),
        ("seed = 1", "'data' is needed"),
        ("sede = 1", "did you mean 'seed'?"),
    ],
)
def test_a_broken_recipe_file_is_named(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    line = mistake("train", path)
    assert str(path) in line
    assert part in line


# --- the user's own files ---

GOOD = "".join(
    f"sentence number {word}\n" for word in ["one", "two", "three", "four", "five", "six"]
)
LONG = GOOD + "word " * 300 + "\n"


@pytest.mark.parametrize(
    ("source", "target", "named", "parts"),
    [
        (GOOD, GOOD + "more\n", "a.txt", ["6 lines", "7"]),
        ("", GOOD, "a.txt", ["empty"]),
        (GOOD, b"caf\xe9\n" * 6, "b.txt", ["not UTF-8", "line 1"]),
        (GOOD, GOOD.replace("sentence number two", ""), "b.txt:2", ["empty line"]),
        (GOOD.replace("sentence number six", "  "), GOOD, "a.txt:6", ["data.empty_lines=skip"]),
        (LONG, LONG, "b.txt", ["model.max_length=128", "pair 7", "train.too_long=skip"]),
        (None, GOOD, "a.txt", ["no file"]),
    ],
)
def test_files_that_cannot_be_used_are_named(
    source: Any, target: Any, named: str, parts: list[str], tmp_path: Path
) -> None:
    files = {"a.txt": source, "b.txt": target}
    for name, content in files.items():
        if content is not None:
            raw = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(raw)
    code, printed, said = call(
        *("train", "phrasebook", "data=files", f"data.source={tmp_path / 'a.txt'}"),
        *(f"data.target={tmp_path / 'b.txt'}", "data.held_out=0.2", "tokens.vocab_size=300"),
        *("--out", tmp_path / "run", "--device", "cpu"),
    )
    assert code == (2 if source is None else 3)
    assert printed == ""
    assert said.count("\n") == 1
    assert said.startswith("manyheads: ")
    assert str(tmp_path / named) in said
    for part in parts:
        assert part in said


def test_a_folder_of_files_that_is_missing() -> None:
    words = ["data=files", "data.folder=/no/such/folder", "data.source=en", "data.target=de"]
    assert "data.folder=/no/such/folder is not a folder" in mistake("train", "phrasebook", *words)
    assert "data.source and data.target are needed" in mistake("train", "phrasebook", "data=files")


# --- evaluate ---


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


def test_other_splits_have_no_compositional_score(run: Path) -> None:
    scores = json.loads(result("evaluate", run, "--split", "valid", "--json", "--beam", "1"))
    assert (scores["split"], scores["examples"]) == ("valid", 3)
    assert "compositional_bleu" not in scores
    # It is the loss that training wrote down for the weights it kept.
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    best = min(record["loss"] for record in records if record["split"] == "valid")
    assert scores["loss"] == pytest.approx(best, rel=1e-5)


def test_what_eight_bits_and_half_precision_cost_is_scored_and_not_kept(run: Path) -> None:
    as_is = json.loads(result("evaluate", run, "--json", "--device", "cpu"))
    eight, said = (found := call("evaluate", run, "--json", "--int8"))[1:]
    assert found[0] == 0
    assert "loss and perplexity are not computed of eight bits" in said
    scores = json.loads(eight)
    assert scores["computed_in"] == "int8"
    assert scores.keys() >= {"bleu", "chrf", "alignment_error"}
    assert "loss" not in scores
    half = json.loads(result("evaluate", run, "--json", "--half", "--device", "cpu"))
    assert half["computed_in"] == "bfloat16"
    assert half["loss"] == pytest.approx(as_is["loss"], rel=0.02)
    assert half["loss"] != as_is["loss"]
    assert json.loads((run / "scores.json").read_text()) == as_is
    assert "choose one" in mistake("evaluate", run, "--int8", "--half")


def test_runs_that_write_together_are_scored_together(run: Path) -> None:
    """A run with itself is the plainest pair: what it writes is what it writes alone."""
    as_is = json.loads(result("evaluate", run, "--json", "--device", "cpu"))
    code, printed, said = call("evaluate", run, "--with", run, "--with", run, "--json")
    assert code == 0
    assert "not computed of several runs that write together" in said
    scores = json.loads(printed)
    assert scores["written_with"] == f"{run} {run}"
    assert (scores["bleu"], scores["chrf"]) == (as_is["bleu"], as_is["chrf"])
    assert json.loads((run / "scores.json").read_text()) == as_is
    lines = b"the cat\na dog\n"
    together = call("translate", run, "--with", run, "--n-best", "2", stdin=lines)[1]
    alone = call("translate", run, "--n-best", "2", stdin=lines)[1]
    texts = [[line.split(" ||| ")[1] for line in told.splitlines()] for told in (together, alone)]
    assert texts[0] == texts[1]
    assert "no run folder no/such/run" in mistake("translate", run, "--with", "no/such/run")
    assert "--compile or --with" in mistake("translate", run, "--with", run, "--compile")


# --- translate ---

TEXT = "The dog sleeps.\n\n   \nA small cat sees the tree.\r\nÄ ü 漢字 🙂\nthe last line"


def test_as_many_lines_out_as_in(run: Path) -> None:
    code, printed, said = call("translate", run, stdin=TEXT.encode())
    assert code == 0
    assert said == ""
    lines = printed.split("\n")
    assert len(lines) == 6 + 1
    assert lines[-1] == ""
    assert lines[1] == lines[2] == ""
    assert result("translate", run, stdin=b"") == ""
    alone = [result("translate", run, stdin=f"{line}\n".encode()) for line in TEXT.splitlines()]
    assert "".join(alone) == printed  # no line hangs on its neighbours


def test_eight_bits_write_as_many_lines_and_none_hangs_on_another(run: Path) -> None:
    printed = result("translate", run, "--int8", stdin=TEXT.encode())
    assert printed.count("\n") == 6
    words = [result("translate", run, "--int8", stdin=f"{x}\n".encode()) for x in TEXT.split("\n")]
    assert "".join(words[:6]) == printed


def test_translate_takes_settings_of_writing(run: Path) -> None:
    settings = ("decode.stopping=exact", "decode.beam=3")
    assert result("translate", run, *settings, stdin=TEXT.encode()).count("\n") == 6
    for wrong, advice in (
        ("decode.order=length", "order"),
        ("data.pair=en-fr", "only decode"),
        ("in.txt", "translate RUN < FILE"),
    ):
        assert advice in mistake("translate", run, wrong, stdin=TEXT.encode())


def test_scores_of_another_search_are_told_and_not_kept(run: Path) -> None:
    kept = run / "scores.json"
    before = kept.read_bytes() if kept.exists() else None
    how = ("decode.stopping=exact", "--beam", "3")
    scores = json.loads(result("evaluate", run, *how, "data.test_pairs=8", "--json"))
    assert "decode.stopping=exact" in scores["decoded_with"].split()
    assert (kept.read_bytes() if kept.exists() else None) == before


def test_to_list_several_searches_no_narrower(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    write = translate_module.translate_lines

    def watched(translator: Any, *given: Any, **more: Any) -> Any:
        widths.append(translator.decode.beam)
        return write(translator, *given, **more)

    def with_beam_of_five(*given: Any) -> Any:
        found = load_run(*given)
        decode = dataclasses.replace(found.run.decode, beam=5)
        return dataclasses.replace(found, run=dataclasses.replace(found.run, decode=decode))

    load_run = loading.load_run
    monkeypatch.setattr(loading, "load_run", with_beam_of_five)
    monkeypatch.setattr(translate_module, "translate_lines", watched)
    for given in ([], ["--n-best", "2"], ["--n-best", "9"], ["--beam", "1", "--n-best", "3"]):
        result("translate", run, *given, stdin=b"The dog sleeps.\n")
    assert widths == [5, 5, 9, 3]
    both = mistake("translate", run, "--sample", "--beam", "2", stdin=b"")
    assert "leave out --sample" in both


def test_half_precision_writes_as_many_lines(run: Path) -> None:
    assert result("translate", run, "--half", stdin=TEXT.encode()).count("\n") == 6


def test_what_is_for_a_gpu_is_refused_elsewhere(run: Path) -> None:
    on_cpu = ("--compile", "--device", "cpu")
    assert "leave out --compile" in mistake("translate", run, *on_cpu, stdin=TEXT.encode())
    assert "choose one" in mistake("translate", run, "--int8", "--half", stdin=TEXT.encode())


def test_half_precision_is_that_of_the_weights_and_leaves_the_run_alone(run: Path) -> None:
    whole = load_torch_run(run)
    half = whole.in_half()
    assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in whole.model.parameters()} == {torch.float32}


def test_a_line_that_is_too_long_goes_in_pieces(run: Path) -> None:
    text = "short\n" + "many words " * 100 + "\nshort\n"
    code, printed, said = call("translate", run, stdin=text.encode())
    assert code == 0
    assert printed.count("\n") == 3
    assert said.count("\n") == 1
    assert said.startswith("line 2 is longer than the model's 128 tokens")


def test_input_that_is_not_utf8(run: Path) -> None:
    line = mistake("translate", run, code=3, stdin=b"good\nb\xe4d\n")
    assert "line 2" in line
    assert "UTF-8" in line


def test_the_n_best_of_each_line(run: Path) -> None:
    printed = result("translate", run, "--n-best", "3", stdin=b"The dog sleeps.\nA cat.\n")
    rows = [line.split(" ||| ") for line in printed.splitlines()]
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    for first in (0, 3):
        scores = [float(row[2]) for row in rows[first : first + 3]]
        assert scores == sorted(scores, reverse=True)


def test_a_seed_draws_the_same_twice(run: Path) -> None:
    words = ("translate", run, "--sample", "--temperature", "2", "--seed")
    drawn = [result(*words, seed, stdin=TEXT.encode()) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0].count("\n") == drawn[2].count("\n") == 6


def test_a_moved_run_gives_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = result("translate", run, stdin=TEXT.encode())
    scores = result("evaluate", run, "--split", "valid", "--json")
    shutil.copytree(run, tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path / "far")
    assert result("translate", "away", stdin=TEXT.encode()) == here
    assert result("evaluate", "away", "--split", "valid", "--json") == scores


def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "manyheads", "translate", str(run), "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(b"The dog sleeps.\n" * 3, timeout=60)
    assert (process.returncode, said) == (0, b"")


# --- info, tokens, compare, demo ---


def test_info_counts_whole_parameters() -> None:
    found = json.loads(result("info", "transformer-base", "--json"))
    assert isinstance(found["parameters"], int)
    assert all(isinstance(count, int) for count in found["parts"].values())
    assert sum(found["parts"].values()) == found["parameters"]
    assert 60e6 < found["parameters"] < 66e6
    shallow = json.loads(result("info", "transformer-base", "model.layers=1", "--json"))
    assert shallow["parameters"] < found["parameters"]
    assert f"{found['parameters'] / 1e6:.1f}M parameters" in result("info", "transformer-base")


def test_the_largest_costs_nothing() -> None:
    before = os.times()
    found = json.loads(result("info", "gpt3-175b", "--json"))
    after = os.times()
    assert 174e9 < found["parameters"] < 176e9
    assert after.user - before.user < 3


def test_info_of_a_run_counts_its_weights(run: Path) -> None:
    found = json.loads(result("info", run, "--json"))
    weights = load_file(run / "model.safetensors")
    assert found["parameters"] == sum(tensor.numel() for tensor in weights.values())


def test_tokens_shows_the_merges(run: Path) -> None:
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    ids = tokenizer.encode("the dog")
    printed = result("tokens", run, "the", "dog").splitlines()
    assert printed[0] == "  " + "|".join("the dog")
    assert all("(merge " in line for line in printed[1:-1])
    assert len(printed) > 3
    assert printed[-1] == f"{len(ids)} tokens: {' '.join(map(str, ids))}"
    found = json.loads(result("tokens", run / "tokenizer.json", "the dog", "--json"))
    assert (found["text"], found["ids"]) == ("the dog", ids)
    assert found["pieces"] == found["steps"][-1]["pieces"] == tokenizer.subwords(ids)
    assert "".join(found["pieces"]) == "the dog"


def test_compare_gives_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "compare"
    words = ["compare", "phrasebook", *TINY, "train.steps=3", "data.train_pairs=40"]
    words += ["model.position=sinusoidal,learned", "--out", str(out), "--device", "cpu"]
    code, printed, said = call(*words)
    assert code == 0, said
    assert "loss" in said
    assert "model.position=sinusoidal" in printed
    assert "model.position=learned" in printed
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "compare.png") in said
    found = json.loads(result(*words, "--json"))
    assert found["split"] == "valid"
    rows = {row["settings"]: row for row in found["runs"]}
    assert rows.keys() == {"model.position=sinusoidal", "model.position=learned"}
    # Learned positions have tables of max_length × dim on each side.
    counts = [row["parameters"] for row in found["runs"]]
    assert counts[1] - counts[0] == 2 * 128 * 16
    for row in found["runs"]:
        assert f"{row['parameters']:,}" in printed
        assert f"{row['loss']:.3f}" in printed
        assert (Path(row["folder"]) / "model.safetensors").is_file()


def test_demo_shows_what_was_learned(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny run in place of the one that takes minutes."""
    out = shutil.copytree(run, tmp_path / "demo")
    monkeypatch.setattr(training, "_recipe", lambda *args: read_recipe("phrasebook", TINY))
    printed = result("demo", "--out", out, "--device", "cpu")
    scores = json.loads((out / "scores.json").read_text())
    assert f"{scores['bleu']:.1f}   {scores['signature']['bleu']}" in printed
    assert f"{100 * scores['alignment_error']:.1f} %" in printed
    assert (out / "attention.png").read_bytes().startswith(b"\x89PNG")
    for sentence in read_run(out).data.read("test").sources[:5]:
        assert sentence in printed
    assert f"manyheads translate {out}" in printed


# --- options that would do nothing, and lines that are too long ---


def test_options_that_would_do_nothing_are_refused(run: Path) -> None:
    assert "--sample" in mistake("translate", run, "--temperature", "0.5")
    assert "--n-best" in mistake("translate", run, "--sample", "--n-best", "2")
    assert "train.steps=9" in mistake("evaluate", run, "train.steps=9")


def test_evaluate_takes_settings_of_decoding(run: Path) -> None:
    greedy = json.loads(result("evaluate", run, "--split", "valid", "--beam", "1", "--json"))
    same = json.loads(result("evaluate", run, "decode.beam=1", "--split", "valid", "--json"))
    assert same == greedy


def test_translations_are_utf8_whatever_the_locale(run: Path) -> None:
    words = [sys.executable, "-m", "manyheads", "tokens", str(run), "weiter"]
    found = subprocess.run(
        words, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert "←" in found.stdout.decode("utf-8")


def test_a_line_past_learned_positions_stops_neither_training_nor_evaluation(
    tmp_path: Path,
) -> None:
    for side in ("en", "de"):
        lines = [f"{side} a{i} b{i}" for i in range(30)]
        (tmp_path / f"train.{side}").write_text("\n".join(lines))
        for split in ("valid", "test"):
            (tmp_path / f"{split}.{side}").write_text("x y\n" + "long " * 60 + "\nz")
    own = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    small = [setting for setting in TINY if not setting.startswith("data.")]
    more = ("model.position=learned", "model.max_length=24", "train.too_long=skip")
    out = tmp_path / "run"
    code, _, said = call("train", "translation", *own, *small, *more, "--out", out)
    assert code == 0, said
    assert "left out" in said
    assert json.loads(result("evaluate", out, "--json"))["examples"] == 3


def test_a_training_that_never_began_leaves_no_folder(tmp_path: Path) -> None:
    words = ("train", "translation", "data.source=a.en", "data.target=a.de")
    mistake(*words, f"data.folder={tmp_path}", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_next_command_that_training_names_works(tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("\n".join(f"{side} a{i} b{i}" for i in range(60)))
    own = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    small = [setting for setting in TINY if not setting.startswith("data.")]
    code, _, said = call("train", "translation", *own, *small, "--out", tmp_path / "run")
    assert code == 0, said
    assert said.count("60 pairs") == 1
    assert call("evaluate", *said.split(" evaluate ")[1].split())[0] == 0
