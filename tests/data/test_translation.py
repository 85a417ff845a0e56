"""Parallel text: the layout of a batch, and which files are read for which split."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.batching import Ragged
from manyheads.data.translation import Corpus, EncodedPairs, FilesData, PhrasebookData
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

SOURCES = ["a dog", "the cat sees a bird", "no"]
TARGETS = ["ein Hund", "die Katze sieht einen Vogel", "nein"]


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """One token a letter: lengths in tokens are lengths in characters."""
    return Characters().train([*SOURCES, *TARGETS])


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=9),
    data=st.data(),
)
def test_a_rectangle_of_rows_equals_a_plain_loop(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=12))
    tokens, real = Ragged.of(sequences).padded(np.array(rows), pad=100)
    width = max(len(sequences[row]) for row in rows)
    assert tokens.tolist() == [
        sequences[row] + [100] * (width - len(sequences[row])) for row in rows
    ]
    assert real.tolist() == [
        [column < len(sequences[row]) for column in range(width)] for row in rows
    ]
    assert Ragged.of(sequences).lengths.tolist() == [len(sequence) for sequence in sequences]


def test_the_layout_of_a_batch(letters: Tokenizer) -> None:
    data = EncodedPairs(Corpus(SOURCES, TARGETS), letters, max_length=64)
    batch = data.batch(np.array([1, 0]))
    for place, row in enumerate((1, 0)):
        source, target = letters.encode(SOURCES[row]), letters.encode(TARGETS[row])
        read = batch.source[place][batch.source_real[place]].tolist()
        assert read == [*source, letters.end]
        assert batch.wanted[place][batch.real[place]].tolist() == [*target, letters.end]
        assert batch.target[place][batch.real[place]].tolist() == [letters.start, *target]
    assert (batch.source[~batch.source_real] == letters.pad).all()
    assert (batch.wanted[~batch.real] == letters.pad).all()
    # What a position reads is what the position before it should have said.
    assert torch.equal(batch.target[:, 1:], batch.wanted[:, :-1])
    assert batch.source_tokens == int(batch.source_real.sum())
    assert batch.target_tokens == int(batch.real.sum())
    assert data.lengths.tolist() == [
        1 + max(len(s), len(t)) for s, t in zip(SOURCES, TARGETS, strict=True)
    ]


def test_too_long_pairs_are_refused_or_left_out(letters: Tokenizer) -> None:
    corpus = Corpus(SOURCES, TARGETS)
    longest = len(TARGETS[1]) + 1
    assert EncodedPairs(corpus, letters, longest).kept == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        EncodedPairs(corpus, letters, longest - 1)
    line = one_line(caught)
    assert f"model.max_length={longest - 1}" in line
    assert f"first is pair 2 with {longest} tokens" in line
    assert "train.too_long=skip" in line
    data = EncodedPairs(corpus, letters, longest - 1, "skip")
    assert data.kept == [0, 2]
    end = [letters.end]
    assert data.batch(np.array([1])).wanted.tolist() == [letters.encode("nein") + end]
    with pytest.raises(DataError, match=r"model\.max_length=2"):
        EncodedPairs(corpus, letters, 2, "skip")


def test_a_pair_is_numbered_as_in_its_files(letters: Tokenizer) -> None:
    corpus = Corpus(SOURCES, TARGETS, name="a.txt, b.txt", rows=[4, 9, 11])
    with pytest.raises(DataError) as caught:
        EncodedPairs(corpus, letters, 20)
    assert one_line(caught).startswith("a.txt, b.txt: 1 pairs are longer")
    assert "the first is pair 10 " in one_line(caught)
    assert EncodedPairs(corpus, letters, 20, "skip").numbers == [5, 12]


def test_an_empty_corpus_is_refused(letters: Tokenizer) -> None:
    with pytest.raises(DataError, match="no sentence pair"):
        EncodedPairs(Corpus([], []), letters, 64)


def write(folder: Path, name: str, lines: list[str]) -> str:
    content = "".join(f"{line}\n" for line in lines).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def numbered(count: int, language: str) -> list[str]:
    return [f"{language} {number}" for number in range(count)]


def test_two_files(tmp_path: Path) -> None:
    data = FilesData(
        source=write(tmp_path, "a.txt", numbered(5, "en")),
        target=write(tmp_path, "b.txt", numbered(5, "de")),
        valid_source=write(tmp_path, "c.txt", ["validation"]),
        valid_target=write(tmp_path, "d.txt", ["Prüfung"]),
        test_source=write(tmp_path, "e.txt", ["test"]),
        test_target=write(tmp_path, "f.txt", ["Probe"]),
    )
    train = data.read("train")
    assert (train.sources, train.targets) == (numbered(5, "en"), numbered(5, "de"))
    assert train.aligned is None
    assert (data.read("valid").sources, data.read("valid").targets) == (["validation"], ["Prüfung"])
    assert (data.read("test").sources, data.read("test").targets) == (["test"], ["Probe"])
    assert data.splits() == ["train", "valid", "test"]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("valid", ["valid", "val", "dev"])
def test_a_folder_and_two_endings(valid: str, ending: str, tmp_path: Path) -> None:
    for stem, count in (("train", 4), (valid, 2), ("test", 3)):
        write(tmp_path, f"{stem}.en{ending}", numbered(count, f"{stem} en"))
        write(tmp_path, f"{stem}.de{ending}", numbered(count, f"{stem} de"))
    data = FilesData(folder=str(tmp_path), source="en", target="de")
    for split, stem, count in (("train", "train", 4), ("valid", valid, 2), ("test", "test", 3)):
        read = data.read(split)
        assert read.sources == numbered(count, f"{stem} en")
        assert read.targets == numbered(count, f"{stem} de")
    assert data.splits() == ["train", "valid", "test"]


def test_without_validation_files_a_seeded_share_is_held_out(tmp_path: Path) -> None:
    source = write(tmp_path, "a", numbered(200, "en"))
    target = write(tmp_path, "b", numbered(200, "de"))
    data = FilesData(source=source, target=target, held_out=0.1)
    train, valid = data.read("train"), data.read("valid")
    assert (len(train.sources), len(valid.sources)) == (180, 20)
    assert sorted(train.sources + valid.sources) == sorted(numbered(200, "en"))
    for corpus in (train, valid):
        assert [s.split()[1] for s in corpus.sources] == [t.split()[1] for t in corpus.targets]
    again = FilesData(source=source, target=target, held_out=0.1)
    assert again.read("valid").sources == valid.sources
    assert valid.sources != numbered(200, "en")[:20]
    # A message about a pair counts as the files do.
    assert valid.rows is not None
    assert [f"en {row}" for row in valid.rows] == valid.sources
    assert train.name != valid.name  # or one would not know which of them a message is about
    assert data.splits() == ["train", "valid"]


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    data = FilesData(
        source=write(tmp_path, "a", ["x", "y"]), target=write(tmp_path, "b", ["x", "y"])
    )
    with pytest.raises(UserError) as caught:
        data.read("test")
    assert "data.test_source and data.test_target" in one_line(caught)
    with pytest.raises(UserError) as caught:
        data.read("tset")
    assert "did you mean 'test'?" in one_line(caught)
    with pytest.raises(UserError) as caught:
        PhrasebookData().read("composition")
    assert "did you mean 'compositional'?" in one_line(caught)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_two_sides_go_together(split: str, side: str, tmp_path: Path) -> None:
    source, target = write(tmp_path, "a", ["x", "y"]), write(tmp_path, "b", ["x", "y"])
    data = FilesData(source=source, target=target, **{f"{split}_{side}": source})  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        data.read(split)
    assert f"data.{split}_source and data.{split}_target go together" in one_line(caught)


def test_half_of_the_validation_files_does_not_train_on_them(tmp_path: Path) -> None:
    source, target = write(tmp_path, "a", ["x", "y"]), write(tmp_path, "b", ["x", "y"])
    with pytest.raises(UserError, match="go together"):
        FilesData(source=source, target=target, valid_source=source).read("train")


@pytest.mark.parametrize("given", [{}, {"source": "en"}, {"target": "de"}])
def test_files_must_be_named(given: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        FilesData(**given).read("train")  # type: ignore[arg-type]
    assert "data.source and data.target are needed" in one_line(caught)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        FilesData(folder=str(tmp_path / "nowhere"), source="en", target="de").read("train")
    assert f"data.folder={tmp_path / 'nowhere'} is not a folder" in one_line(caught)
    write(tmp_path, "train.en", ["x", "y"])
    with pytest.raises(UserError) as caught:
        FilesData(folder=str(tmp_path), source="en", target="de").read("train")
    assert str(tmp_path / "train.de") in one_line(caught)


def test_empty_lines_are_refused_or_skipped_with_a_note(tmp_path: Path) -> None:
    source = write(tmp_path, "a", ["one", "", "three", "four", "five"])
    target = write(tmp_path, "b", ["eins", "zwei", " ", "vier", "fünf"])
    files = {"source": source, "target": target, "valid_source": source, "valid_target": target}
    with pytest.raises(DataError) as caught:
        FilesData(**files).read("train")  # type: ignore[arg-type]
    assert f"{source}:2: empty line" in one_line(caught)
    data = FilesData(**files, empty_lines="skip")  # type: ignore[arg-type]
    read = data.read("train")
    assert list(zip(read.sources, read.targets, strict=True)) == [
        ("one", "eins"),
        ("four", "vier"),
        ("five", "fünf"),
    ]
    assert any("2 pairs with an empty side were skipped" in note for note in read.notes)


def test_the_phrasebook_gives_as_many_pairs_as_asked_with_their_alignments() -> None:
    data = PhrasebookData(train_pairs=40, valid_pairs=5, test_pairs=3)
    for split, count in (("train", 40), ("valid", 5), ("test", 3), ("compositional", 3)):
        corpus = data.read(split)
        assert len(corpus.sources) == len(corpus.targets) == count
        assert corpus.aligned is not None
        assert [pair.source for pair in corpus.aligned] == corpus.sources
        assert [pair.target for pair in corpus.aligned] == corpus.targets
    assert data.splits() == ["train", "valid", "test", "compositional"]


def test_several_test_sets_are_found_by_name_and_the_first_one_is_test(tmp_path: Path) -> None:
    for stem in ("train", "valid", "test_2017", "test_2016"):
        for side in ("en", "de"):
            (tmp_path / f"{stem}.{side}").write_text(f"{stem} {side}\n")
    data = FilesData(folder=str(tmp_path), source="en", target="de")
    assert data.read("test").sources == ["test_2016 en"]
    assert "test_2016" in data.read("test").name  # which is told with its scores
    assert data.read("test_2017").targets == ["test_2017 de"]
    with pytest.raises(UserError, match=r"known: test, test_2016, test_2017, train, valid"):
        data.read("other")
    (tmp_path / "test.en").write_text("plain\n")
    (tmp_path / "test.de").write_text("plain\n")
    assert data.read("test").sources == ["plain"]
