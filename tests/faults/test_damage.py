"""Damaged folders, and folders that hold something else: one line names the problem."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.faults.damage import FILES, as_it_was, damages, judged
from tests.faults.small_run import SHORT, again, call, mistake, train, used

from manyheads.fileio import replace_file
from manyheads.lab.figures.plots import metric_curves
from manyheads.recipes import read_recipe
from manyheads.run import read_run
from manyheads.train import checkpoint
from manyheads.web.runs import read_metrics


def accept(folder: Path) -> None:
    """Delete the checksum lines, as the error message advises after an intended change."""
    lines = (folder / "run.toml").read_text().splitlines(keepends=True)
    (folder / "run.toml").write_text("".join(line for line in lines if "# check sum" not in line))


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


def use(recipe: Path, folder: Path, name: str) -> tuple[int, str, str]:
    """A command that reads this file of weights."""
    return used(folder) if name == "model.safetensors" else again(recipe, folder)


WEIGHTS = pytest.mark.parametrize("name", ["model.safetensors", "state/last.safetensors"])


@WEIGHTS
def test_damaged_weights_are_refused_by_name(name: str, recipe: Path, hurt: Path) -> None:
    """Truncated, a bit flipped, another dtype for the same bytes, another step, foreign weights."""
    assert use(recipe, hurt, name)[0] == 0
    path = hurt / name
    content, draw = path.read_bytes(), random.Random(1)
    flips = [draw.randrange(len(content)) for _ in range(3)] + [len(content) - 1]
    contents = [content[:left] for left in (0, 1, 7, 100, -1)]
    contents += [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in flips]
    contents += [content.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1)]
    contents += [content.replace(b'\\"step\\": ', b'\\"step\\": 1', 1)]
    for number, damaged in enumerate(contents):
        assert damaged != content, number
        path.write_bytes(damaged)
        result = use(recipe, hurt, name)
        assert result[0] == 3, (number, result)
        mistake(result, str(path))
    save_file({"weight": torch.zeros(3)}, path)
    mistake(use(recipe, hurt, name), str(path), "not written by Manyheads")


def test_weights_of_another_model(recipe: Path, hurt: Path, tmp_path: Path) -> None:
    for setting in ("model.dim=32", "model.layers=2"):
        other = tmp_path / setting
        assert train(recipe, other, *SHORT, setting)[0] == 0
        for name, reason in (
            ("model.safetensors", "another model"),
            ("state/last.safetensors", "does not fit"),
        ):
            shutil.copy(other / name, hurt / name)
            result = use(recipe, hurt, name)
            assert result[0] == 3
            mistake(result, str(hurt / name), reason)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("run.toml", text) for text in (b"", b"seed = ", b"\xff\xfe", b"seed = 1\n")),
        ("run.toml", b"[model]\ndim = 'wide'\n"),
        *(("tokenizer.json", text) for text in (b"", b"{", b"\xff", b"[]")),
    ],
)
def test_damaged_settings_and_tokenizers(
    name: str, content: bytes, recipe: Path, hurt: Path
) -> None:
    (hurt / name).write_bytes(content)
    for result in (used(hurt), again(recipe, hurt)):
        mistake(result, str(hurt / name))
    assert (hurt / name).read_bytes() == content


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
    mistake(used(hurt), "checksum", str(hurt / "tokenizer.json"))
    accept(hurt)
    for result in (used(hurt), again(recipe, hurt)):
        mistake(result, "270", str(size))


def test_settings_that_change_what_the_weights_mean(hurt: Path) -> None:
    """As many heads again fit the same tensors, and would compute something else."""
    settings = hurt / "run.toml"
    settings.write_text(settings.read_text().replace("heads = 2", "heads = 1"))
    mistake(used(hurt), "checksum", str(settings))
    accept(hurt)
    result = used(hurt)
    assert result[0] == 3
    mistake(result, "another model")


def test_settings_changed_on_purpose_are_accepted(recipe: Path, hurt: Path) -> None:
    """As the message says; the next training writes new checksums."""
    settings = hurt / "run.toml"
    settings.write_text(settings.read_text().replace("beam = 1", "beam = 3"))
    line = mistake(used(hurt), "deleting the line '# check sum … of run.toml'")
    assert str(settings) in line
    accept(hurt)
    assert used(hurt)[0] == 0
    assert read_run(hurt).decode.beam == 3
    assert again(recipe, hurt)[0] == 0  # a folder without checksums is used, and gets them
    assert settings.read_text().count("# check sum") == 2


@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_is_noticed_or_harmless(
    name: str, recipe: Path, averaged: Path, tmp_path: Path
) -> None:
    """A bit, a byte, the end of a file: never another model in silence."""
    before = as_it_was(recipe, averaged, tmp_path)
    for one in damages((averaged / name).read_bytes(), 1, random.Random(name)):
        judged(recipe, averaged, name, one, before, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damage_at_200_places_of_every_file(
    name: str, recipe: Path, averaged: Path, tmp_path: Path
) -> None:
    before = as_it_was(recipe, averaged, tmp_path)
    counts = {"noticed": 0, "harmless": 0}
    for one in damages((averaged / name).read_bytes(), 200, random.Random(f"200 {name}")):
        counts[judged(recipe, averaged, name, one, before, tmp_path)] += 1
    print(f"{name}: {counts}")


def test_every_file_of_a_run_is_damaged_above(averaged: Path) -> None:
    """A file that a run comes to have is one more to be checked here."""
    there = {str(path.relative_to(averaged)) for path in averaged.rglob("*") if path.is_file()}
    # Probes and conversions are no part of a run: tests/tasks/test_probes.py and test_engines.py.
    apart = {name for name in there if name.startswith(("tensorboard/", "probes/", "engines/"))}
    assert there - apart == set(FILES)


def test_a_broken_line_of_metrics_stops_nothing(recipe: Path, hurt: Path) -> None:
    """Training continues without it; the page and the curves name it."""
    path = hurt / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    hurt_lines = [lines[0], b"\xff" + lines[1], lines[2][:9] + b"\n", b'{"step": 1e999}\n']
    path.write_bytes(b"".join([*hurt_lines, *lines[3:]]))
    assert read_metrics(path)["broken"] == 3
    assert len(read_metrics(path)["records"]) == len(lines) - 2
    said: list[str] = []
    assert len(metric_curves(hurt, said.append)["train", "loss"]) == 3
    assert said == [f"{path}: lines that could not be read, and are left out: 3"]
    assert again(recipe, hurt)[0] == 0
    steps = [json.loads(line)["step"] for line in path.open()]
    assert steps == [1, 4, 5, 5, 6, 6]


def test_going_on_with_other_data_is_refused(tmp_path: Path) -> None:
    for side in ("en", "de"):
        lines = [f"{side} word{i} word{i + 1}" for i in range(40)]
        (tmp_path / f"train.{side}").write_text("\n".join(lines))
    small = ["model.dim=16", "model.layers=1", "model.heads=2", "tokens.vocab_size=300"]
    settings = [f"data.folder={tmp_path}", "data.source=en", "data.target=de", *small]
    command = (
        "train",
        "translation",
        *settings,
        "decode.bleu_sentences=0",
        "--out",
        tmp_path / "run",
    )
    assert call(*command, "train.steps=2", "--device", "cpu")[0] == 0
    with (tmp_path / "train.en").open("a") as file, (tmp_path / "train.de").open("a") as other:
        file.write("\none more")
        other.write("\none more")
    result = call(*command, "train.steps=4", "--device", "cpu")
    assert result[0] == 3
    mistake(result, "training data is not what", "step 2")


def test_fewer_steps_than_are_done_are_refused(recipe: Path, hurt: Path) -> None:
    mistake(
        train(recipe, hurt, "train.steps=1", "train.average_checkpoints=1"),
        "already",
        "train.steps=1",
    )


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


def test_nothing_in_a_run_folder_is_executed(recipe: Path, good: Path, tmp_path: Path) -> None:
    """Release 0.1 pickled states of FSDP. A sound state next to one wins; else it is refused."""

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    out = shutil.copytree(good, tmp_path / "run")
    shards = out / "state" / "shards-00000003"
    shards.mkdir()
    (shards / ".metadata").write_bytes(pickle.dumps(Payload()))
    facts = {"format": 1, "folder": shards.name, "about": vars(checkpoint.Progress(step=999))}
    (out / checkpoint.SHARDS).write_text(json.dumps(facts))
    code, _, said = again(recipe, out)
    assert code == 0
    assert "resuming from step 5" in said
    (out / checkpoint.LAST).unlink()
    result = again(recipe, out)
    assert result[0] == 3
    mistake(result, "shards.json", "--fresh")
    assert not (tmp_path / "executed").exists()


def test_links_in_a_run_folder_are_not_written_through(
    recipe: Path, good: Path, tmp_path: Path
) -> None:
    out, victim = shutil.copytree(good, tmp_path / "run"), tmp_path / "victim"
    for name in ("state/lock", "metrics.jsonl", "state/last.safetensors", "model.safetensors"):
        victim.write_text("precious")
        before = (out / name).read_bytes() if (out / name).exists() else None
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(victim)
        code, _, said = again(recipe, out)
        assert code in (0, 3), said
        assert "Traceback" not in said
        assert victim.read_text() == "precious"
        (out / name).unlink()
        if before is not None:
            (out / name).write_bytes(before)


@pytest.mark.parametrize("name", ["state", "probes"])
def test_linked_folders_in_a_run_folder_are_refused(
    name: str, recipe: Path, good: Path, tmp_path: Path
) -> None:
    out, victim = shutil.copytree(good, tmp_path / "run"), tmp_path / "victim"
    (out / name).mkdir(exist_ok=True)
    (out / name).rename(victim)
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    (out / name).symlink_to(victim)
    result = train(recipe, out, "train.steps=50", "train.probes=2", "train.average_checkpoints=1")
    mistake(result, f"{out / name} is a link")
    assert before == {path.name: path.read_bytes() for path in victim.iterdir()}


def test_a_partial_file_has_a_new_name_that_cannot_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partials: list[Path] = []
    for _ in range(2):
        replace_file(tmp_path / "file", lambda partial: partials.append(partial))
    assert len({path.name for path in partials}) == 2
    assert not any(str(os.getpid()) in path.name for path in partials)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
