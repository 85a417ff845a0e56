"""Models of music: trained on transposed windows, scored by piece, generated as MIDI."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mido")

from tests.data.small_music import scale_up, write_chorales, write_performances
from tests.tasks.small_texts import recipe_trainer
from tests.tasks.test_resume import run_and_kill
from tests.test_cli import call
from tests.train.small_runs import assert_same_bits, records
from tests.view.test_figures import png

from manyheads.data.events import (
    ChoraleGrid,
    Performance,
    encode_events,
    parse_performance,
    write_midi,
)
from manyheads.data.music import MusicData
from manyheads.decode.compose import compose, prompt_of
from manyheads.decode.sample import Sample
from manyheads.loading import load_torch_run
from manyheads.tasks.music import MusicTask, transpose, transposition_table
from manyheads.train.loop import Trainer

SIZES = (
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32", "model.max_length=16"),
    *("train.batch_rows=6", "train.warmup_steps=2", "train.steps=12", "train.save_every=4"),
    *("train.validate_every=6", "train.log_every=1"),
)
CASES = {
    "midi": ("midi", "data.transpose=3"),
    "jsb": ("jsb-chorales", "data.file=chorales.json", "data.transpose=3"),
}


def read_midi(path: Path) -> Performance:
    return parse_performance(path.read_bytes(), str(path))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("music")
    return {
        "midi": write_performances(folder / "midi"),
        "jsb": write_chorales(folder / "jsb"),
    }


def trainer(name: str, folders: dict[str, Path], out: Path, *overrides: str) -> Trainer:
    recipe, *settings = CASES[name]
    where = f"data.folder={folders[name]}"
    return recipe_trainer(recipe, out, *SIZES, where, *settings, *overrides)


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    actual = {}
    for name in CASES:
        actual[name] = tmp_path_factory.mktemp("runs") / name
        trainer(name, folders, actual[name]).run()
    return actual


@pytest.mark.parametrize("name", CASES)
def test_killed_and_started_again_ends_with_the_same_bits(
    name: str, folders: dict[str, Path], trained: dict[str, Path], tmp_path: Path
) -> None:
    assert run_and_kill(trainer(name, folders, tmp_path), 10) == -signal.SIGKILL
    trainer(name, folders, tmp_path).run()
    assert_same_bits(tmp_path, trained[name])
    assert records(tmp_path)[-1]["loss"] == records(trained[name])[-1]["loss"]


@pytest.mark.parametrize("name", CASES)
def test_parted_batches_are_the_whole_one(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    full = trainer(name, folders, tmp_path / "1").task
    sizes = ("train.batch_rows=3", "train.accumulate=2")
    parted = trainer(name, folders, tmp_path / "2", *sizes).task
    for step in range(8):
        [item], parts = full.batches(step), parted.batches(step)
        assert torch.equal(item.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(item.labels, torch.cat([part.labels for part in parts]))
        assert item.count == sum(part.count for part in parts)


@pytest.mark.parametrize("name", CASES)
def test_a_step_transposes_each_window_by_one_interval(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Tokens and labels, and nothing but pitches; every interval occurs."""
    plain = trainer(name, folders, tmp_path / "1", "data.transpose=0").task
    moved = trainer(name, folders, tmp_path / "2").task
    content = moved.tokenizer.content  # type: ignore[attr-defined]
    intervals = set()
    for step in range(8):
        [before], [after] = plain.batches(step), moved.batches(step)
        assert torch.equal(after.tokens[:, 1:], after.labels[:, :-1])
        for rows in zip(before.tokens.tolist(), after.tokens.tolist(), strict=True):
            steps = set()
            for a, b in zip(*(map(content, row) for row in rows), strict=True):
                kind, pitch = re.fullmatch(r"(\D+)(\d*)", a).groups()  # type: ignore[union-attr]
                assert b.startswith(kind)
                if kind in ("on", "off", "p"):
                    steps.add(int(b.removeprefix(kind)) - int(pitch))
                else:
                    assert a == b
            assert len(steps) <= 1
            intervals |= steps
    assert intervals == set(range(-3, 4))


def test_a_window_that_would_leave_the_pitches_stays(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    task = trainer("midi", folders, tmp_path).task
    assert isinstance(task, MusicTask)
    music = MusicData(folder=str(folders["midi"])).read("train")
    [batch] = task.batches(0)
    table = transposition_table(music, task.tokenizer, 90)
    lowest = torch.zeros(len(batch.tokens), dtype=torch.long)  # ninety semitones down
    result = transpose(batch, table, lowest)
    assert torch.equal(result.tokens, batch.tokens)
    assert torch.equal(result.labels, batch.labels)


@pytest.mark.parametrize("name", CASES)
def test_the_score_is_the_mean_over_every_event_of_every_piece(
    name: str, trained: dict[str, Path]
) -> None:
    """Each piece after an end token, its own end not counted; here event by event."""
    loaded = load_torch_run(trained[name])
    data, model, tokenizer = loaded.run.data, loaded.model, loaded.tokenizer
    assert isinstance(data, MusicData)
    total, count = 0.0, 0
    for words in data.read("valid").pieces_of_words:
        ids = [tokenizer.end, *(tokenizer.token_id(word) for word in words)]
        last = len(ids) - 1
        for t in range(1, len(ids)):
            begin = (t - 1) // 16 * 16
            if t > last // 16 * 16:  # the last window ends with the piece
                begin = max(0, last - 16)
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:t]]))[0, -1]
            total -= float(logits.log_softmax(-1)[ids[t]])
            count += 1
    scores = loaded.evaluate(data, "valid", stride=16)
    assert scores.keys() == {"nll", "perplexity", "signature", "split", "examples"}
    assert scores["nll"] == pytest.approx(total / count, rel=1e-4)
    assert scores["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)
    assert scores["examples"] == count
    assert f"{count} events" in scores["signature"]["nll"]
    assert "stride:8" in loaded.evaluate(data, "valid")["signature"]["nll"]


def test_a_run_writes_music_that_reads_back(trained: dict[str, Path], tmp_path: Path) -> None:
    out, again = tmp_path / "a.mid", tmp_path / "b.mid"
    for path in (out, again):
        code, printed, said = call(
            *("compose", trained["midi"], "--out", path, "--seed", 3, "--temperature", 2),
            *("--max-new-tokens", 60),
        )
        assert code == 0, said
        assert "notes per second" in printed
        assert "share of F#" in printed
        assert "valid" in printed
    assert out.read_bytes() == again.read_bytes()
    notes = read_midi(out)
    assert notes
    write_midi([notes], again)
    assert encode_events(read_midi(again)) == encode_events(notes)


def test_a_prime_is_what_the_file_begins_with(trained: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prime, out, roll = tmp_path / "prime.mid", tmp_path / "out.mid", tmp_path / "roll.png"
    write_midi([scale_up(2)], prime)
    code, _, said = call(
        *("compose", trained["midi"], "--out", out, "--prime", prime, "--picture", roll),
        *("--max-new-tokens", 60, "--temperature", 2),
    )
    assert code == 0, said
    assert "the model continues the last" in said  # of 16 tokens
    begun = scale_up(2)
    actual = read_midi(out)
    assert actual[: len(begun)] == begun
    assert len(actual) > len(begun)
    assert all(note.start >= begun[-1].end for note in actual[len(begun) :])
    width, height, colours = png(roll)
    assert min(width, height) > 300
    assert colours > 10


def eager_to_end(generator: Any) -> Any:
    """The same generator, with a model that wants to rest and then to end, from the first on."""
    model, tokenizer = generator.model, generator.tokenizer

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        actual = torch.zeros(*hidden.shape[:-1], tokenizer.vocab_size)
        actual[..., tokenizer.end] = 60.0
        actual[..., tokenizer.token_id("rest")] = 40.0
        return actual

    model.logits = logits
    return generator


def writer(run: Path, **how: Any) -> Any:
    return eager_to_end(load_torch_run(run).generator(**how))


@pytest.mark.parametrize("sample", [Sample(seed=2), None])
def test_a_chorale_opens_with_sound_whatever_the_model_wants(
    sample: Sample | None, trained: dict[str, Path]
) -> None:
    """A bar in which no voice rests; then it may rest, and once there is enough of it, end."""
    grid, how = ChoraleGrid(), {"at_limit": "truncate", "beam": 2}
    inputs: dict[str, Any] = {"limit": 100, "sample": sample}
    assert compose(writer(trained["jsb"], **how), grid, [], **inputs) == []
    opened = compose(writer(trained["jsb"], min_length=64, **how), grid, [], **inputs)
    assert len(opened) == 64
    assert "rest" not in opened
    longer = compose(writer(trained["jsb"], min_length=70, **how), grid, [], **inputs)
    assert longer[:64] == opened
    assert longer[64:] == ["rest"] * 6
    short = compose(writer(trained["jsb"], min_length=64, **how), grid, [], limit=9, sample=sample)
    assert len(short) == 9
    assert "rest" not in short
    # Where nobody names a limit, there is room for what has to be written.
    untold = compose(
        writer(trained["jsb"], min_length=40, **how), grid, [], limit=None, sample=sample
    )
    assert len(untold) == 40


def test_a_prompt_is_never_empty(trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if half of the context is shorter than a chord of four voices."""
    generator = load_torch_run(trained["jsb"]).generator()
    monkeypatch.setattr(type(generator), "positions", 4)
    last = generator.tokenizer.token_id("p60")
    assert prompt_of(["p60"] * 6, ChoraleGrid(), generator) == [last]


@pytest.mark.parametrize(
    ("shortest", "position"), [(0, "learned"), (12, "relative"), (16, "learned"), (64, "relative")]
)
def test_a_long_piece_is_written_in_windows(
    shortest: int,
    position: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the opening ends: what is read is at most as long as what training read, begins
    where its windows begin, and is the end of what was written.
    """
    trainer("jsb", folders, tmp_path, f"model.position={position}", "train.steps=1").run()
    said: list[str] = []
    generator = load_torch_run(tmp_path).generator(
        said.append, min_length=shortest, at_limit="truncate"
    )
    even = torch.zeros(generator.vocabulary)
    even[generator.special_tokens.end] = -torch.inf
    generator.model.logits = lambda hidden: even.expand(len(hidden), -1).clone()  # type: ignore[attr-defined]
    stream, read = type(generator).stream, []

    def seen(self: Any, ids: list[int], limit: int, *inputs: Any) -> Any:
        read.append((ids, limit))
        return stream(self, ids, limit, *inputs)

    monkeypatch.setattr(type(generator), "stream", seen)
    words = compose(generator, ChoraleGrid(), [], limit=100, sample=Sample())
    assert len(words) == 100
    assert said == []
    tokens, at = [generator.special_tokens.end, *map(generator.tokenizer.token_id, words)], 1
    for ids, limit in read:
        assert ids == tokens[at - len(ids) : at]
        assert (at - len(ids)) % 4 == 0
        assert len(ids) + limit - 1 <= 16
        at += limit
    assert at == 101
    assert len(read) < 20  # half of the window stays: it is not encoded again for each word
    even[generator.special_tokens.end] = -50.0  # written where nothing else may be
    ending = replace(generator, decode=replace(generator.decode, at_limit="force-eos"))
    assert len(compose(ending, ChoraleGrid(), [], limit=100, sample=Sample())) > 90
