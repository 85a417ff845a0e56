"""Parallel text: the layout of a batch, and which files are read for which split."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.helpers import refusal, write

from manyheads.config import parse
from manyheads.data.translation import Corpus, EncodedPairs, FilesData, PhrasebookData
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

SOURCES = ["a dog", "the cat sees a bird", "no"]
TARGETS = ["ein Hund", "die Katze sieht einen Vogel", "nein"]
LONGEST = len(TARGETS[1]) + 1


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """One token a letter: lengths in tokens are lengths in characters."""
    return Characters().train([*SOURCES, *TARGETS])


def test_the_layout_of_a_batch(letters: Tokenizer) -> None:
    data = EncodedPairs(Corpus(SOURCES, TARGETS), letters, max_length=64)
    batch = data.batch(np.array([1, 0]))
    for index, row in enumerate((1, 0)):
        source, target = letters.encode(SOURCES[row]), letters.encode(TARGETS[row])
        assert batch.source[index][batch.source_real[index]].tolist() == [*source, letters.end]
        assert batch.labels[index][batch.loss_mask[index]].tolist() == [*target, letters.end]
        assert batch.target[index][batch.loss_mask[index]].tolist() == [letters.start, *target]
    assert (batch.source[~batch.source_real] == letters.pad).all()
    assert (batch.labels[~batch.loss_mask] == letters.pad).all()
    assert torch.equal(batch.target[:, 1:], batch.labels[:, :-1])  # teacher forcing
    assert batch.source_tokens == int(batch.source_real.sum())
    assert batch.target_tokens == int(batch.loss_mask.sum())
    lengths = [1 + max(len(s), len(t)) for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert data.lengths.tolist() == lengths


def test_pairs_that_are_too_long(letters: Tokenizer) -> None:
    """Refused by their number in the files, skipped, or truncated before their end token."""
    corpus = Corpus(SOURCES, TARGETS, name="a.txt, b.txt", rows=[4, 9, 11])
    assert EncodedPairs(corpus, letters, LONGEST).rows == [0, 1, 2]
    message = refusal(DataError, EncodedPairs, corpus, letters, LONGEST - 1)
    assert message.startswith(f"a.txt, b.txt: line 10 has {LONGEST} tokens")
    assert f"model.max_length={LONGEST - 1}" in message
    assert "train.too_long=skip" in message
    skipped = EncodedPairs(corpus, letters, LONGEST - 1, "skip")
    assert (skipped.rows, skipped.numbers) == ([0, 2], [5, 12])
    assert skipped.batch(np.array([1])).labels.tolist() == [[*letters.encode("nein"), letters.end]]
    assert ["left out" in note for note in skipped.notes] == [True]
    cut = EncodedPairs(corpus, letters, 4, "truncate")
    assert ["truncated" in note for note in cut.notes] == [True]
    batch = cut.batch(np.arange(3))
    for ids, mask, texts in (
        (batch.source, batch.source_real, SOURCES),
        (batch.labels, batch.loss_mask, TARGETS),
    ):
        for row, real, text in zip(ids, mask, texts, strict=True):
            assert row[real].tolist() == [*letters.encode(text[:3]), letters.end]
    uncut = EncodedPairs(corpus, letters, 64, "truncate")
    assert uncut.digest() == EncodedPairs(corpus, letters, 64).digest() != cut.digest()
    assert uncut.notes == []
    for wrong in (Corpus([], []), corpus):
        refusal(DataError, EncodedPairs, wrong, letters, 2, "skip")
    refusal(UserError, EncodedPairs, corpus, letters, 1, "truncate")


def lines(path: Path, count: int, text: str) -> str:
    write(path, "".join(f"{text} {number}\n" for number in range(count)))
    return str(path)


def numbered(count: int, text: str) -> list[str]:
    return [f"{text} {number}" for number in range(count)]


def test_two_files(tmp_path: Path) -> None:
    counts = {"": 5, "valid_": 1, "test_": 2}
    names = {
        f"{split}{side}": lines(tmp_path / f"{split}{side}", count, f"{split}{side}")
        for split, count in counts.items()
        for side in ("source", "target")
    }
    data = parse(FilesData, names)
    assert data.splits() == ["train", "valid", "test"]
    for split, (prefix, count) in zip(data.splits(), counts.items(), strict=True):
        corpus = data.read(split)
        assert corpus.sources == numbered(count, f"{prefix}source")
        assert corpus.targets == numbered(count, f"{prefix}target")
        assert corpus.aligned is None


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("valid", ["valid", "val", "dev"])
def test_a_folder_and_two_endings(valid: str, ending: str, tmp_path: Path) -> None:
    stems = {"train": ("train", 4), "valid": (valid, 2), "test": ("test", 3)}
    for stem, count in stems.values():
        for side in ("en", "de"):
            lines(tmp_path / f"{stem}.{side}{ending}", count, f"{stem} {side}")
    data = FilesData(folder=str(tmp_path), source="en", target="de")
    assert data.splits() == list(stems)
    for split, (stem, count) in stems.items():
        corpus = data.read(split)
        assert corpus.sources == numbered(count, f"{stem} en")
        assert corpus.targets == numbered(count, f"{stem} de")


def test_without_validation_files_a_seeded_part_is_held_out(tmp_path: Path) -> None:
    source, target = (lines(tmp_path / side, 200, side) for side in ("en", "de"))
    data = FilesData(source=source, target=target, valid_fraction=0.1)
    assert data.splits() == ["train", "valid"]
    train, valid = data.read("train"), data.read("valid")
    assert (len(train.sources), len(valid.sources)) == (180, 20)
    assert sorted(train.sources + valid.sources) == sorted(numbered(200, "en"))
    assert data.read("valid") == valid
    assert valid.sources != numbered(200, "en")[:20]
    for corpus in (train, valid):  # rows are numbered as in the files
        assert corpus.rows is not None
        assert [f"en {row}" for row in corpus.rows] == corpus.sources
        assert [f"de {row}" for row in corpus.rows] == corpus.targets
    assert train.name != valid.name  # or a message would not say which of them it is about


def test_splits_and_settings_that_are_missing(tmp_path: Path) -> None:
    source = str(write(tmp_path / "a", "x\ny\n"))
    data = FilesData(source=source, target=source)
    assert "data.test_source" in refusal(UserError, data.read, "test")
    assert "did you mean 'test'?" in refusal(UserError, data.read, "tset")
    for split in ("valid", "test"):
        for side in ("source", "target"):
            half = parse(FilesData, {"source": source, "target": source, f"{split}_{side}": source})
            # Half of the validation files must not mean that they are trained on.
            for read in {split, "train" if split == "valid" else split}:
                assert f"data.{split}_source" in refusal(UserError, half.read, read)
    for names in ({}, {"source": "en"}, {"target": "de"}):
        assert "data.source and data.target" in refusal(
            UserError, parse(FilesData, names).read, "train"
        )
    nowhere = FilesData(folder=str(tmp_path / "nowhere"), source="en", target="de")
    assert f"data.folder={tmp_path / 'nowhere'}" in refusal(UserError, nowhere.read, "train")
    write(tmp_path / "train.en", "x\ny\n")
    one_side = FilesData(folder=str(tmp_path), source="en", target="de")
    assert str(tmp_path / "train.de") in refusal(UserError, one_side.read, "train")
    assert "did you mean 'compositional'?" in refusal(
        UserError, PhrasebookData().read, "composition"
    )


def test_skipped_pairs_are_noted(tmp_path: Path) -> None:
    names = {
        "source": str(write(tmp_path / "a", "one\n\nthree\nfour\nfive\n")),
        "target": str(write(tmp_path / "b", "eins\nzwei\n \nvier\nfünf\n")),
    }
    files = names | {f"valid_{side}": path for side, path in names.items()}
    assert "a:2: " in refusal(DataError, parse(FilesData, files).read, "train")
    corpus = parse(FilesData, files | {"empty_lines": "skip"}).read("train")
    assert corpus.sources == ["one", "four", "five"]
    assert corpus.targets == ["eins", "vier", "fünf"]
    assert any(note.startswith("2 pairs") for note in corpus.notes)


def test_rows_of_a_held_out_part_have_their_lines_in_the_file(tmp_path: Path) -> None:
    """Also after rows that were skipped."""
    files = {"source": str(write(tmp_path / "a", "\n" + "".join(f"{n}\n" for n in range(2, 42))))}
    files["target"] = files["source"]
    data = parse(FilesData, files | {"empty_lines": "skip", "valid_fraction": 0.2})
    for split, count in (("train", 32), ("valid", 8)):
        corpus = data.read(split)
        assert corpus.rows is not None
        assert corpus.sources == [str(row + 1) for row in corpus.rows]
        assert len(corpus.sources) == count


def test_several_test_sets_are_found_by_name_and_the_first_is_test(tmp_path: Path) -> None:
    for stem in ("train", "valid", "test_2017", "test_2016"):
        for side in ("en", "de"):
            write(tmp_path / f"{stem}.{side}", f"{stem} {side}\n")
    data = FilesData(folder=str(tmp_path), source="en", target="de")
    assert data.read("test").sources == ["test_2016 en"]
    assert "test_2016" in data.read("test").name  # reported with its scores
    assert data.read("test_2017").targets == ["test_2017 de"]
    assert "test_2016, test_2017" in refusal(UserError, data.read, "other")
    for side in ("en", "de"):
        write(tmp_path / f"test.{side}", "plain\n")
    assert data.read("test").sources == ["plain"]


def test_the_phrasebook_has_pairs_with_alignments() -> None:
    data = PhrasebookData(train_pairs=40, valid_pairs=5, test_pairs=3)
    assert data.splits() == ["train", "valid", "test", "compositional"]
    for split, count in (("train", 40), ("valid", 5), ("test", 3), ("compositional", 3)):
        corpus = data.read(split)
        assert len(corpus.sources) == len(corpus.targets) == count
        assert corpus.aligned is not None
        assert [pair.source for pair in corpus.aligned] == corpus.sources
        assert [pair.target for pair in corpus.aligned] == corpus.targets
    refusal(UserError, parse, PhrasebookData, {"train_pairs": 300_001}, "data")
