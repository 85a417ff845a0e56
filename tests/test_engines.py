"""Engines: CTranslate2 gives the texts of PyTorch, or PyTorch runs; conversions survive faults."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.record import LANGUAGE_FOLDER, RUN_FOLDER

import manyheads
from manyheads import engines
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.engines import Engine, convert, is_intact, why_not
from manyheads.errors import DataError, UserError
from manyheads.exchange.ctranslate2 import Ctranslate2Generator, Ctranslate2Translator
from manyheads.loading import LoadedRun, load_torch_run

pytest.importorskip("ctranslate2")

GREEDY = Sample(temperature=0.0)


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    return load_torch_run(shutil.copytree(RUN_FOLDER, tmp_path / "run"))


@pytest.fixture
def writer(tmp_path: Path) -> LoadedRun:
    return load_torch_run(shutil.copytree(LANGUAGE_FOLDER, tmp_path / "writer"))


def conversions(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "engines").iterdir())


def converted(run: LoadedRun) -> Path:
    return convert(run.folder, run.model, run.tokenizer, run.run.decode)


@pytest.mark.parametrize(
    "decode",
    [
        {"beam": 5, "length_penalty": 1.0, "penalty": "length"},
        {"beam": 1, "min_length": 6},
        {"beam": 3, "max_length_ratio": 0.5, "max_length_extra": 1},  # most reach the limit
        {"beam": 2, "at_limit": "truncate", "max_length_extra": 1},
    ],
    ids=str,
)
def test_translations_are_those_of_torch(decode: dict[str, Any], run: LoadedRun) -> None:
    data = replace(run.run.data, test_pairs=40)  # type: ignore[type-var]
    texts = ["", "a", "dog " * 80, *data.read("test").sources]
    fast, ours = run.with_engine(Engine("auto")).translator(**decode), run.translator(**decode)
    assert isinstance(fast, Ctranslate2Translator)
    assert fast.translate_long(texts) == ours.translate_long(texts)
    best = (translator.search(texts[3:], n_best=1) for translator in (fast, ours))
    for mine, theirs in zip(*best, strict=True):
        if decode["beam"] > 1:
            assert mine[0].score == pytest.approx(theirs[0].score, abs=1e-4)
    several = (translator.search(texts[3:9], n_best=2) for translator in (fast, ours))
    for one, other in zip(*several, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
    sample = Sample(seed=3)
    assert fast.sample(texts[3:6], sample) == ours.sample(texts[3:6], sample)


@pytest.mark.parametrize("decode", [{}, {"at_limit": "truncate", "min_length": 9}], ids=str)
def test_continuations_are_those_of_torch(decode: dict[str, Any], writer: LoadedRun) -> None:
    fast = writer.with_engine(Engine("auto")).generator(**decode)
    ours = writer.generator(**decode)
    assert isinstance(fast, Ctranslate2Generator)
    assert (fast.positions, fast.context) == (ours.positions, ours.context)
    prompts = [writer.tokenizer.encode(text) for text in ("the cat", "a", "some of them")]
    for limit in (1, 20, 200):  # 200: past max_length
        expected = ours.sample(prompts, limit, GREEDY)
        assert fast.sample(prompts, limit, GREEDY) == expected
        streamed = [list(fast.stream(prompt, limit)) for prompt in prompts]
        assert streamed == expected
    warm = Sample(temperature=0.9, seed=4)
    assert list(fast.stream(prompts[0], 9, warm)) == list(ours.stream(prompts[0], 9, warm))
    assert fast.search(prompts, 5) == ours.search(prompts, 5)


def test_a_run_loads_with_an_engine(run: LoadedRun) -> None:
    texts = ["The dog sees the tree.", "We do not know the old man."]
    ours = manyheads.load(run.folder, engine="torch")
    assert isinstance(ours.translator(), Translator)
    assert not (run.folder / "engines").exists()
    fast = manyheads.load(run.folder)
    assert isinstance(fast.translator(), Ctranslate2Translator)
    assert fast.translate(texts) == ours.translate(texts)
    # A translator of the same weights does not open them again.
    assert fast.translator().model is fast.translator(beam=2).model  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("decode", "word"),
    [
        ({"stopping": "exact"}, "stopping"),
        ({"length_penalty": 0.0}, "length_penalty"),
        ({"min_length": 6}, "min_length"),
        ({"forced_bos": 9}, "forced_bos"),
        ({"suppress_tokens": (9,)}, "suppress_tokens"),
    ],
)
def test_other_searches_run_in_torch(decode: dict[str, Any], word: str, run: LoadedRun) -> None:
    lines: list[str] = []
    auto = run.with_engine(Engine("auto", report=lines.append)).translator(**decode)
    assert isinstance(auto, Translator)
    assert word in lines[0]
    with pytest.raises(UserError, match=word):
        run.with_engine(Engine("ctranslate2")).translator(**decode)
    assert not (run.folder / "engines").exists()


def test_other_models_run_in_torch(run: LoadedRun) -> None:
    assert not why_not(run.model, run.run.decode)
    assert "float64" in why_not(run.model.double(), run.run.decode)
    run.model.float()
    handle = run.model.register_forward_hook(lambda *call: None)
    assert "hooks" in why_not(run.model, run.run.decode)
    handle.remove()
    half = run.with_engine(Engine("auto", "bfloat16"))
    assert isinstance(half.translator(), Translator)
    assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in run.model.parameters()} == {torch.float32}


def test_int8_is_that_of_ctranslate2(run: LoadedRun, writer: LoadedRun) -> None:
    eight = run.with_engine(Engine("auto", "int8")).translator()
    assert eight.in_torch() is None  # whose loss would be another's
    assert len(eight.translate(["The dog sees the tree.", "the"])) == 2
    [name] = conversions(run.folder)
    assert name.startswith("ctranslate2-int8-")
    with pytest.raises(UserError, match="int8 works only with translators"):
        writer.with_engine(Engine("auto", "int8")).generator()
    with pytest.raises(UserError, match="int8"):
        Engine("torch", "int8")


# --- Conversions ----------------------------------------------------------------------------------


def test_a_conversion_is_made_once_for_the_same_weights(run: LoadedRun) -> None:
    path = converted(run)
    written = (path / "model.bin").stat().st_mtime_ns
    assert converted(run) == path
    assert (path / "model.bin").stat().st_mtime_ns == written
    with torch.no_grad():
        next(run.model.parameters()).add_(1.0)
    other = converted(run)
    assert other != path
    assert conversions(run.folder) == [other.name]  # that of the old weights has gone
    assert converted(replace(run, run=replace(run.run, decode=run.decode(start=9)))) != other


def test_only_conversions_are_removed_and_never_through_a_link(
    run: LoadedRun, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (run.folder / "engines").symlink_to(home)
    lines: list[str] = []
    auto = run.with_engine(Engine("auto", report=lines.append))
    assert isinstance(auto.translator(), Translator)
    assert "is a link" in lines[0]
    with pytest.raises(UserError, match="is a link"):
        run.with_engine(Engine("ctranslate2")).translator()
    assert [path.name for path in home.iterdir()] == ["thesis"]
    (run.folder / "engines").unlink()
    (run.folder / "engines" / "notes").mkdir(parents=True)
    path = converted(run)
    assert conversions(run.folder) == [path.name, "notes"]


@pytest.mark.parametrize("damage", ["byte", "missing", "sums", "no sums", "empty"])
def test_a_damaged_conversion_is_made_again(damage: str, run: LoadedRun) -> None:
    path = converted(run)
    weights = path / "model.bin"
    content = weights.read_bytes()
    if damage == "byte":
        weights.write_bytes(content[:5000] + b"?" + content[5001:])
    elif damage == "missing":
        (path / "config.json").unlink()
    elif damage == "sums":
        (path / "checksums.json").write_text("[")
    elif damage == "no sums":
        (path / "checksums.json").write_text("{}")
    else:
        shutil.rmtree(path)
        path.mkdir()
    assert not is_intact(path)
    assert converted(run) == path
    assert is_intact(path)
    assert weights.read_bytes() == content


def test_a_kill_leaves_nothing_that_is_taken_for_a_conversion(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(model: Any, tokenizer: Any, folder: Path, *rest: Any) -> None:
        (folder / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    write, remove = engines.write_ctranslate2, shutil.rmtree
    monkeypatch.setattr(engines, "write_ctranslate2", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *path, **more: None)  # a kill removes nothing
    with pytest.raises(KeyboardInterrupt):
        converted(run)
    [left] = conversions(run.folder)
    assert left.startswith(".")
    monkeypatch.setattr(engines, "write_ctranslate2", write)
    monkeypatch.setattr(shutil, "rmtree", remove)
    path = converted(run)
    assert conversions(run.folder) == [left, path.name]  # another process may be writing it
    old = time.time() - 2 * engines.ABANDONED
    os.utime(run.folder / "engines" / left, (old, old))
    shutil.rmtree(path)
    assert converted(run) == path
    assert conversions(run.folder) == [path.name]


def test_a_run_folder_that_cannot_be_written(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "engines").write_text("")  # root may write into read-only folders
    fast = run.with_engine(Engine("ctranslate2"))
    assert fast.translate(["The dog."]) == run.translate(["The dog."])
    assert converted(run).parent != run.folder / "engines"
    assert converted(run) == converted(run)

    def full(*rest: Any) -> None:
        raise DataError("no space left on device")

    monkeypatch.setattr(engines, "write_ctranslate2", full)
    (run.folder / "engines").unlink()
    with torch.no_grad():
        next(run.model.parameters()).add_(1.0)
    lines: list[str] = []
    auto = run.with_engine(Engine("auto", report=lines.append))
    assert isinstance(auto.translator(), Translator)
    assert "no space left" in lines[0]
    assert conversions(run.folder) == []


def test_two_processes_that_convert_at_once_share_a_conversion(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes the name just before this one would."""
    move = os.replace

    def late(source: Path, target: Path) -> None:
        if source.is_dir():
            monkeypatch.setattr(os, "replace", move)
            shutil.copytree(source, target)
        move(source, target)

    monkeypatch.setattr(os, "replace", late)
    assert is_intact(converted(run))
    assert len(conversions(run.folder)) == 1
