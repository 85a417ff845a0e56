"""Kills, full disks and damaged folders: the last good checkpoint stays, and one line says what."""

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyheads import cli
from manyheads.data.translation import Batch
from manyheads.run import locked, read_run
from manyheads.tasks.translation import TranslationTask
from manyheads.train import checkpoint
from manyheads.train.checkpoint import read_tensors
from manyheads.training import read_recipe

KILLS = 10

RECIPE = """
[data]
kind = "files"
source = "{folder}/pairs.source"
target = "{folder}/pairs.target"
held_out = 0.1

[tokens]
kind = "bpe"
vocab_size = 300

[model]
dim = 16
layers = 1
heads = 2
hidden = 32
max_length = 64

[train]
steps = 60
batch_tokens = 300
warmup_steps = 8
validate_every = 10
save_every = 5
log_every = 1
average = 3

[decode]
beam = 1
validate_sentences = 0
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Word lists and their mirror images, enough for an epoch of several batches."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(1)
    lists = [draw.choices(["red", "blue", "dog", "cat", "tree"], k=4) for _ in range(80)]
    for name, order in (("source", 1), ("target", -1)):
        lines = "".join(" ".join(words[::order]) + "\n" for words in lists)
        (folder / f"pairs.{name}").write_text(lines)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.toml"


def call(*words: str | Path) -> tuple[int, str, str]:
    """`manyheads WORDS` in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["manyheads", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return int(code or 0), out.getvalue(), err.getvalue()


def train(recipe: Path, out: Path, *overrides: str) -> tuple[int, str, str]:
    return call("train", recipe, *overrides, "--out", out, "--device", "cpu")


def mistake(result: tuple[int, str, str], *parts: str) -> str:
    """The one line of a refusal, which has these parts."""
    code, printed, said = result
    assert code in (2, 3)
    assert printed == ""
    lines = [line for line in said.splitlines() if line.startswith("manyheads: ")]
    assert len(lines) == 1, said
    assert said.splitlines()[-1] == lines[0]
    assert "Traceback" not in said
    for part in parts:
        assert part in lines[0]
    return lines[0]


def fork(action: Callable[[], int], said: Path) -> int:
    """A real process that starts with everything imported; its stderr goes to a file."""
    number = os.fork()
    if number:
        return number
    try:
        stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 2)
        code = action()
    except BaseException as error:
        os.write(2, repr(error).encode())
        code = 99
    os._exit(code)


def ending(number: int, patience: float = 60.0) -> int:
    """How a process ended: its exit code, or minus its signal."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    raise AssertionError("the process did not end")


def command(recipe: Path, out: Path, *overrides: str) -> Callable[[], int]:
    """`manyheads train` as the work of a forked process; what it says goes to its stderr."""

    def work() -> int:
        code, _, said = train(recipe, out, *overrides)
        os.write(2, said.encode())
        return code

    return work


def kept(out: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in [out / "model.safetensors", *sorted((out / "state").glob("*.safetensors"))]:
        tensors |= {f"{path.name} {name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def assert_same_bits(one: Path, other: Path) -> None:
    ours, theirs = kept(one), kept(other)
    assert ours.keys() == theirs.keys()
    assert any(" adam.exp_avg_sq." in name for name in ours)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts (and everything imported, for those that are forked)."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(recipe, out)[0] == 0
    return out


def reached(out: Path) -> int:
    """The step of the last whole line of metrics."""
    path = out / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(whole[-1])["step"]) if whole else 0


def until(action: Callable[[], int], last: int) -> Callable[[], int]:
    """The same training at its own speed, but a process that outran its killer waits for it."""

    def work() -> int:
        plain = TranslationTask.batches

        def waiting(self: TranslationTask, step: int) -> list[Batch]:
            if step > last:
                time.sleep(60)
            return plain(self, step)

        TranslationTask.batches = waiting  # type: ignore[method-assign]
        return action()

    return work


def test_ten_kills_at_random_moments_change_no_bit(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    """SIGKILL at ten steps, each time some moment later; then the same command again."""
    out, said, draw = tmp_path / "run", tmp_path / "said", random.Random(4)
    for step in sorted(draw.sample(range(2, 50), KILLS)):
        number = fork(until(command(recipe, out), step + 8), said)
        patience = time.monotonic() + 60
        while reached(out) < step:
            assert time.monotonic() < patience
            assert os.waitpid(number, os.WNOHANG)[0] == 0, said.read_text()
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(number, signal.SIGKILL)
        assert ending(number) == -signal.SIGKILL
        state = out / "state/last.safetensors"
        saved = read_tensors(state)[1]["step"] if state.exists() else 0
        assert step - 5 <= saved <= step + 9
    number = fork(command(recipe, out), said)
    assert ending(number) == 0, said.read_text()
    assert f"going on from step {saved}" in said.read_text()
    assert_same_bits(out, whole)
    assert not list(out.rglob(".*.partial"))  # a kill inside a save leaves no litter
    assert (out / "run.toml").read_bytes() == (whole / "run.toml").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    places = [(r["step"], r["split"]) for r in map(json.loads, (out / "metrics.jsonl").open())]
    assert len(places) == len(set(places)) == 60 + 6


@pytest.mark.parametrize("moment", ["save_file", "fsync", "replace"])
def test_killed_inside_a_save(moment: str, recipe: Path, whole: Path, tmp_path: Path) -> None:
    """The three moments of an atomic write, where a random kill seldom lands."""
    out = tmp_path / "run"

    def die_in_save() -> int:
        calls = [0]
        home: Any = checkpoint if moment == "save_file" else os
        plain = getattr(home, moment)

        def dying(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(home, moment, dying)
        return command(recipe, out)()

    number = fork(die_in_save, tmp_path / "said")
    assert ending(number) == -signal.SIGKILL, (tmp_path / "said").read_text()
    assert 0 < read_tensors(out / "state/last.safetensors")[1]["step"] < 60
    assert train(recipe, out)[0] == 0
    assert_same_bits(out, whole)
    assert not list(out.rglob(".*.partial"))


@pytest.fixture
def standing(recipe: Path, tmp_path: Path) -> Path:
    """A run trained to step 10, to be hurt; the recipe trains it on to 60."""
    out = tmp_path / "run"
    assert train(recipe, out, "train.steps=10", "train.average=1")[0] == 0
    return out


ON = ("train.average=1", "train.steps=20")
SHORT = ("train.average=1", "train.steps=5")


def test_a_disk_that_is_truly_full(recipe: Path, standing: Path, tmp_path: Path) -> None:
    """No file may grow past a limit that lets the metrics grow and the weights not."""
    before = {path: path.read_bytes() for path in standing.rglob("*.safetensors")}
    smallest = min(map(len, before.values()))

    number = fork(limited(command(recipe, standing, *ON), smallest // 2), tmp_path / "said")
    assert ending(number) == 3, (tmp_path / "said").read_text()
    line = mistake((3, "", (tmp_path / "said").read_text()), "could not be saved", "make room")
    assert "the one before it is untouched" in line
    assert "last.safetensors" in line or "model.safetensors" in line
    assert {path: path.read_bytes() for path in standing.rglob("*.safetensors")} == before
    assert not list(standing.rglob(".*.partial"))
    code, _, said = train(recipe, standing, *ON)
    assert code == 0
    assert "going on from step 10" in said
    assert read_tensors(standing / "state/last.safetensors")[1]["step"] == 20


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_left_for_a_checkpoint(
    recipe: Path, standing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in standing.rglob("*.safetensors")}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        result = train(recipe, standing, *ON)
    assert result[0] == 3
    mistake(result, "safetensors could not be saved", "No space left on device", "untouched")
    assert {path: path.read_bytes() for path in standing.rglob("*.safetensors")} == before
    assert call("info", standing)[0] == 0
    assert train(recipe, standing, *ON)[0] == 0


def test_no_space_left_for_the_first_checkpoint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", full)
    result = train(recipe, tmp_path / "run")
    assert result[0] == 3
    mistake(result, "could not be saved", "nothing was written")


def limited(action: Callable[[], int], most: int) -> Callable[[], int]:
    """The same work where no file may grow past so many bytes."""

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        return action()

    return work


@pytest.mark.parametrize(("name", "most"), [("tokenizer.json", 2000), ("run.toml", 500)])
def test_no_space_left_to_begin(
    name: str, most: int, recipe: Path, good: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "run", tmp_path / "said"
    assert most < (good / name).stat().st_size
    if name == "run.toml":  # the tokenizer, which is larger, is there already
        out.mkdir()
        (out / "tokenizer.json").write_bytes((good / "tokenizer.json").read_bytes())
        (out / "run.toml").write_bytes((good / "run.toml").read_bytes())
    number = fork(limited(command(recipe, out, *SHORT), most), said)
    assert ending(number) == 3, said.read_text()
    mistake((3, "", said.read_text()), "arge")
    if name == "run.toml":
        assert (out / name).read_bytes() == (good / name).read_bytes()
    else:
        assert not (out / name).exists()
    assert train(recipe, out, *SHORT)[0] == 0


def test_no_space_left_for_metrics(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out, said = shutil.copytree(whole, tmp_path / "run"), tmp_path / "said"
    size = (out / "metrics.jsonl").stat().st_size
    assert size > (out / "run.toml").stat().st_size
    number = fork(limited(command(recipe, out, "train.steps=70"), size + 20), said)
    assert ending(number) == 3, said.read_text()
    mistake((3, "", said.read_text()), "metrics.jsonl could not be saved")
    assert_same_bits(out, whole)
    assert train(recipe, out, "train.steps=70")[0] == 0
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(1, 71))


def test_two_processes_on_one_folder(recipe: Path, tmp_path: Path) -> None:
    """The second is refused; a killed one holds nothing."""
    out = tmp_path / "run"
    ready, tell = os.pipe()

    def hold() -> int:
        with locked(out):
            os.write(tell, b"!")
            time.sleep(60)
        return 0

    number = fork(hold, tmp_path / "said")
    try:
        assert os.read(ready, 1) == b"!"
        result = train(recipe, out, "train.steps=5")
        assert result[0] == 2
        mistake(result, str(out), "another process")
        assert not (out / "run.toml").exists()
    finally:
        os.kill(number, signal.SIGKILL)
        ending(number)
        os.close(ready)
        os.close(tell)
    assert train(recipe, out, "train.steps=5")[0] == 0


# --- folders that hold something else, or something damaged ---


def test_a_folder_with_something_else_in_it(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").write_text("...")
    result = train(recipe, out)
    assert result[0] == 2
    mistake(result, str(out), "chapter.tex", "--out")
    assert [path.name for path in out.iterdir()] == ["chapter.tex"]
    result = train(recipe, out / "chapter.tex")
    mistake(result, "is a file", "--out")
    mistake(train(recipe, out / "chapter.tex" / "run"), "cannot be made", "--out")


@pytest.fixture(scope="module")
def good(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("good") / "run"
    assert train(recipe, out, *SHORT)[0] == 0
    return out


@pytest.fixture
def hurt(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "hurt")


def used(folder: Path) -> tuple[int, str, str]:
    return call("evaluate", folder, "--split", "valid", "--device", "cpu")


def again(recipe: Path, folder: Path) -> tuple[int, str, str]:
    return train(recipe, folder, "train.steps=6", "train.average=1")


def test_the_folder_that_is_hurt_below_is_good(recipe: Path, hurt: Path) -> None:
    assert used(hurt)[0] == 0
    assert again(recipe, hurt)[0] == 0


@pytest.mark.parametrize("left", [0, 1, 7, 100, -1])
def test_a_truncated_file_of_weights(left: int, recipe: Path, hurt: Path) -> None:
    for name, use in (("model", used), ("state/last", lambda folder: again(recipe, folder))):
        path = hurt / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:left])
        result = use(hurt)
        assert result[0] == 3
        mistake(result, str(path), "damaged")


def test_weights_from_elsewhere(recipe: Path, hurt: Path) -> None:
    for name, use in (("model", used), ("state/last", lambda folder: again(recipe, folder))):
        path = hurt / f"{name}.safetensors"
        save_file({"weight": torch.zeros(3)}, path)
        result = use(hurt)
        assert result[0] == 3
        mistake(result, str(path), "not written by Manyheads")


def test_weights_of_another_model(recipe: Path, hurt: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert train(recipe, other, *SHORT, "model.dim=32")[0] == 0
    for name, use, reasons in (
        ("model", used, ["another model"]),
        ("state/last", lambda folder: again(recipe, folder), ["does not fit", "32]", "16]"]),
    ):
        path = f"{name}.safetensors"
        shutil.copy(other / path, hurt / path)
        result = use(hurt)
        assert result[0] == 3
        mistake(result, str(hurt / path), *reasons)
    deeper = tmp_path / "deeper"
    assert train(recipe, deeper, *SHORT, "model.layers=2")[0] == 0
    shutil.copy(deeper / "model.safetensors", hurt / "model.safetensors")
    mistake(used(hurt), "another model")


@pytest.mark.parametrize(
    "content", [b"", b"seed = ", b"\xff\xfe", b"seed = 1\n", b"[model]\ndim = 'wide'\n"]
)
def test_damaged_settings(content: bytes, recipe: Path, hurt: Path) -> None:
    (hurt / "run.toml").write_bytes(content)
    mistake(used(hurt), str(hurt / "run.toml"))
    mistake(again(recipe, hurt), str(hurt / "run.toml"))
    assert (hurt / "run.toml").read_bytes() == content


def test_missing_parts(recipe: Path, hurt: Path, tmp_path: Path) -> None:
    (hurt / "tokenizer.json").rename(tmp_path / "elsewhere")
    for result in (used(hurt), again(recipe, hurt)):
        assert result[0] == 3
        mistake(result, str(hurt / "tokenizer.json"))
    (tmp_path / "elsewhere").rename(hurt / "tokenizer.json")
    (hurt / "model.safetensors").unlink()
    mistake(used(hurt), "model.safetensors")
    shutil.rmtree(hurt / "state")
    mistake(used(hurt), "model.safetensors")
    (hurt / "run.toml").unlink()
    mistake(used(hurt), str(hurt), "run.toml")
    mistake(used(tmp_path / "nowhere"), str(tmp_path / "nowhere"))


def test_a_tokenizer_of_another_size(recipe: Path, hurt: Path) -> None:
    other = read_recipe(str(recipe), ["tokens.vocab_size=270"])
    corpus = other.data.read("train")
    other.tokens.train([*corpus.sources, *corpus.targets]).save(hurt / "tokenizer.json")
    size = read_run(hurt).model.vocab_size
    assert size != 270
    for result in (used(hurt), again(recipe, hurt)):
        mistake(result, "270", str(size))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_tokenizer(content: bytes, recipe: Path, hurt: Path) -> None:
    (hurt / "tokenizer.json").write_bytes(content)
    for result in (used(hurt), again(recipe, hurt)):
        assert result[0] == 3
        mistake(result, str(hurt / "tokenizer.json"))


def test_a_flipped_bit_is_noticed(recipe: Path, hurt: Path) -> None:
    """Anywhere in a file of weights: one clear line, never another model."""
    for name, use in (("model", used), ("state/last", lambda folder: again(recipe, folder))):
        path = hurt / f"{name}.safetensors"
        whole = path.read_bytes()
        random = Random(1)
        for place in [random.randrange(len(whole)) for _ in range(6)] + [len(whole) - 1]:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            result = use(hurt)
            assert result[0] == 3, (name, place, result)
            mistake(result, str(path))
        path.write_bytes(whole)


def test_settings_that_change_what_the_weights_mean(hurt: Path) -> None:
    """As many heads again fit the same tensors, and would compute something else."""
    settings = hurt / "run.toml"
    settings.write_text(settings.read_text().replace("heads = 2", "heads = 1"))
    result = used(hurt)
    assert result[0] == 3
    mistake(result, "another model")


def test_going_on_with_other_data_is_refused(tmp_path: Path) -> None:
    for side in ("en", "de"):
        lines = [f"{side} word{i} word{i + 1}" for i in range(40)]
        (tmp_path / f"train.{side}").write_text("\n".join(lines))
    small = ["model.dim=16", "model.layers=1", "model.heads=2", "tokens.vocab_size=300"]
    own = [f"data.folder={tmp_path}", "data.source=en", "data.target=de", *small]
    asked = ("train", "translation", *own, "decode.validate_sentences=0", "--out", tmp_path / "run")
    assert call(*asked, "train.steps=2", "--device", "cpu")[0] == 0
    with (tmp_path / "train.en").open("a") as file, (tmp_path / "train.de").open("a") as other:
        file.write("\none more")
        other.write("\none more")
    result = call(*asked, "train.steps=4", "--device", "cpu")
    assert result[0] == 3
    mistake(result, "training data is not what", "step 2")


def test_files_of_equal_runs_are_equal_byte_for_byte(recipe: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert train(recipe, tmp_path / name, *SHORT)[0] == 0
    for file in ("model.safetensors", "state/last.safetensors", "run.toml", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_fewer_steps_than_are_done_are_refused(recipe: Path, hurt: Path) -> None:
    mistake(train(recipe, hurt, "train.steps=1", "train.average=1"), "already", "train.steps=1")


@pytest.mark.parametrize("name", ["model.safetensors", "state/last.safetensors", "notes.txt"])
def test_what_somebody_else_put_into_the_folder_stays(
    name: str, recipe: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"precious")
    result = train(recipe, tmp_path / "run")
    assert result[0] == 2
    mistake(result, "something else", name)
    assert path.read_bytes() == b"precious"
