"""Distillation: interrupted, damaged and repeated translation gives the same bytes; shortlists."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.small_run import assert_same_bits, call, ending, fork, mistake
from tests.golden.record import RUN_FOLDER

from manyheads import distill
from manyheads.data.batching import Ragged
from manyheads.distill import Shortlist, model1
from manyheads.engines import Engine, read_shortlist
from manyheads.errors import UserError
from manyheads.exchange.ctranslate2 import Ctranslate2Translator
from manyheads.loading import load_torch_run
from manyheads.run import SHORTLIST

STUDENT = ("data.train_pairs=72", "model.encoder.layers=2", "train.steps=2")
STUDENT = (*STUDENT, "train.probes=0", "decode.bleu_sentences=0")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "SHARD", 20)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    pytest.importorskip("ctranslate2")
    return shutil.copytree(RUN_FOLDER, tmp_path / "teacher")


def distil(teacher: Path, out: Path, *words: str) -> tuple[int, str, str]:
    return call("distill", teacher, *STUDENT, *words, "--out", out, "--device", "cpu")


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name except locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The shards that are written from now on."""
    written: list[Path] = []
    plain = distill.write_text

    def write(path: Path, text: str) -> None:
        written.extend([path] if path.suffix == ".txt" and path.name != SHORTLIST else [])
        plain(path, text)

    monkeypatch.setattr(distill, "write_text", write)
    return written


def test_killed_while_it_translates(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL inside the third shard; the same command translates the others and ends equal."""
    code, _, said = distil(teacher, tmp_path / "whole")
    assert code == 0, said
    expected = contents(teacher / "distilled")
    shutil.rmtree(teacher / "distilled")
    out = tmp_path / "student"

    def dying() -> int:
        plain: Callable[..., Any] = os.replace
        calls = [0]

        def replace(source: Any, target: Any) -> None:
            calls[0] += Path(target).parent.parent.name == "distilled"
            if calls[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(source, target)

        os.replace = replace
        return distil(teacher, out)[0]

    assert ending(fork(dying, tmp_path / "said")) == -signal.SIGKILL
    assert list((teacher / "distilled").rglob(".*.partial"))
    written = counted(monkeypatch)
    code, _, said = distil(teacher, out)
    assert code == 0, said
    assert [path.name for path in written] == ["00002.txt", "00003.txt"]
    assert contents(teacher / "distilled") == expected
    assert_same_bits(out, tmp_path / "whole")
    assert (out / SHORTLIST).read_bytes() == (tmp_path / "whole" / SHORTLIST).read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()


def test_damaged_and_foreign_shards_are_translated_again(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distil(teacher, tmp_path / "student")[0] == 0
    expected = contents(teacher / "distilled")
    [folder] = (teacher / "distilled").iterdir()
    first, second, third, _ = sorted(folder.glob("*.txt"))
    first.write_bytes(first.read_bytes().replace(b"e", b"o", 1))
    second.write_bytes(third.read_bytes())
    third.write_bytes(third.read_bytes()[:-9])
    written = counted(monkeypatch)
    assert distil(teacher, tmp_path / "student")[0] == 0
    assert written == [first, second, third]
    assert contents(teacher / "distilled") == expected
    # Another search is another set of translations; another student shares these.
    assert distil(teacher, tmp_path / "other", "model.dim=8")[0] == 0
    assert len(written) == 3
    assert distil(teacher, tmp_path / "wide", "--beam", "3")[0] == 0
    assert len(written) == 7
    mistake(distil(teacher, tmp_path / "student", "model.dim=8"), "model.dim", "--fresh")
    mistake(distil(teacher, teacher), "--out")
    mistake(distil(teacher, tmp_path / "new", "tokens.vocab_size=9"), "tokens.vocab_size")


def test_the_engine_uses_the_shortlist(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of all tokens changes nothing, one of a few restricts the output."""
    texts = ["The dog sees the tree.", "We do not know the old man."]
    run = load_torch_run(teacher)
    fast = run.with_engine(Engine("ctranslate2"))
    free = fast.translate(texts, beam=2)
    everything = list(range(run.tokenizer.vocab_size))
    names = Shortlist(everything, {}).text(run.tokenizer)
    distill.write_text(teacher / SHORTLIST, distill.with_sums(names, SHORTLIST, None))
    assert read_shortlist(teacher) == names
    assert fast.translate(texts, beam=2) == free
    allowed = run.tokenizer.encode("der Hund")
    few = Shortlist(allowed, {}).text(run.tokenizer)
    distill.write_text(teacher / SHORTLIST, distill.with_sums(few, SHORTLIST, None))
    # PyTorch, which has no shortlist, would search again at a limit.
    monkeypatch.setattr(Ctranslate2Translator, "_differs", lambda *search: False)
    for engine in (Engine("ctranslate2"), Engine("auto", "int8")):
        translator = run.with_engine(engine).translator(beam=2, at_limit="truncate")
        special = {translator.special_tokens.end, run.tokenizer.unknown, run.tokenizer.start}
        tokens = {token for [best] in translator.search(texts, n_best=1) for token in best.tokens}
        assert tokens <= {*allowed, *special}
    assert run.with_engine(Engine("auto")).translate(texts, beam=2) == free
    (teacher / SHORTLIST).write_bytes((teacher / SHORTLIST).read_bytes()[:-1])
    with pytest.raises(UserError, match="checksum"):
        run.with_engine(Engine("ctranslate2")).translator()


def test_model1_aligns_words() -> None:
    """A pair with only one of two words separates words that otherwise occur together."""
    sources = Ragged.of([[1, 2, 0], [2, 3, 0], [1, 3, 0], [1, 0]])
    targets = Ragged.of([[11, 12, 0], [12, 13, 0], [13, 11, 0], [11, 0]])
    x, y, probability = model1(sources, targets)
    assert np.allclose(np.bincount(x, probability)[[0, 1, 2, 3]], 1)
    best = {int(a): int(y[x == a][probability[x == a].argmax()]) for a in (1, 2, 3)}
    assert best == {1: 11, 2: 12, 3: 13}
    shortlist = Shortlist.of(sources, targets, size=1, end=0)
    assert shortlist == Shortlist([0], {1: [1, 11], 2: [2, 12], 3: [3, 13]})
    assert shortlist.coverage(sources, targets) == (1.0, 4.5)
    share, _ = shortlist.coverage(Ragged.of([[1, 0]]), Ragged.of([[11, 12, 0]]))
    assert share == 0.5
