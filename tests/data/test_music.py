"""Music as text: which files are for what, what they become, and what is refused."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("mido")

from tests.data.small_music import scale_up, write_chorales, write_performances

from manyheads.data.events import ChoraleGrid, events_of
from manyheads.data.language import EncodedText
from manyheads.data.midi import write_midi
from manyheads.data.music import MusicData
from manyheads.errors import UserError
from manyheads.tokenizer.train import Words

CHORALE = ChoraleGrid()
SOUND = [[72, 67, 60, 48]]


def names(data: MusicData, split: str) -> list[str]:
    return [document.file.rpartition("/")[2] for document in data.read(split).documents[1:]]


def test_a_share_of_the_files_is_held_out(tmp_path: Path) -> None:
    write_performances(tmp_path / "a", 7)
    write_performances(tmp_path / "a" / "b", 3)
    data = MusicData(folder=str(tmp_path / "a"), held_out=0.3)
    train, valid = data.read("train"), data.read("valid")
    assert data.splits() == ["train", "valid"]
    files = [[document.file for document in part.documents[1:]] for part in (train, valid)]
    assert [len(part) for part in files] == [7, 3]
    assert not {*files[0]} & {*files[1]}
    with pytest.raises(UserError, match="no music for the split 'test'"):
        data.read("test")


@pytest.mark.parametrize("packed", [False, True])
def test_folders_and_archives_are_splits(packed: bool, tmp_path: Path) -> None:
    for number, split in enumerate(("train", "valid", "test"), start=1):
        folder = write_performances(tmp_path / split / "deep", number).parent
        (folder / "notes.txt").write_text("not music")
        if packed:
            with tarfile.open(tmp_path / f"{split}.tar.gz", "w:gz") as archive:
                archive.add(folder, "inside")
            shutil.rmtree(folder)
    data = MusicData(folder=str(tmp_path))
    assert data.splits() == ["train", "valid", "test"]
    assert names(data, "test") == [f"scale0{number}.mid" for number in range(3)]
    assert names(data, "train") == ["scale00.mid"]
    assert data.read("test").pieces_of_words == [events_of(scale_up(n)) for n in range(3)]


def test_every_piece_comes_after_an_end(tmp_path: Path) -> None:
    """And every word of the encoding is a token, also one that no piece has."""
    music = MusicData(folder=str(write_performances(tmp_path))).read("train")
    tokenizer = Words().train(music.strings())
    assert tokenizer.vocab_size == 388 + 7
    text = EncodedText(music, tokenizer, ends=True)
    words = [[tokenizer.token_id(word) for word in piece] for piece in music.pieces_of_words]
    end = tokenizer.end
    assert text.flat.tolist() == [end, *(token for piece in words for token in [*piece, end])]


def test_a_place_of_the_stream_has_the_same_voice_in_every_chorale(tmp_path: Path) -> None:
    data = MusicData(folder=str(write_chorales(tmp_path)), file="chorales.json", encoding=CHORALE)
    music = data.read("train")
    tokenizer = Words().train(music.strings())
    flat = EncodedText(music, tokenizer, ends=True).flat
    assert len(flat) == 1 + 4 * (4 * 12 + 4)
    altos, basses = (
        {tokenizer.content(int(token)) for token in flat[place::4]} for place in (2, 4)
    )
    assert altos == {"p67", "rest"}
    assert basses == {"p48", "</s>"}
    assert [len(words) for words in music.pieces_of_words] == [48] * 4


def test_tempi_are_for_training_alone(tmp_path: Path) -> None:
    write_performances(tmp_path, 4)
    plain, faster = (MusicData(folder=str(tmp_path), tempi=tempi) for tempi in ((), (1.25,)))
    assert faster.read("valid").documents == plain.read("valid").documents
    one, both = (data.read("train").pieces_of_words for data in (plain, faster))
    assert both[::2] == one
    assert both[1] != one[0]
    assert [w for w in both[1] if w.startswith("on")] == [w for w in one[0] if w.startswith("on")]


def line_of(data: MusicData, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        data.read(split)
    [line] = str(caught.value).splitlines()
    return line


def test_mistakes_are_one_line_with_the_file(tmp_path: Path) -> None:
    folder = write_performances(tmp_path / "music", 3)
    data = MusicData(folder=str(folder))
    (folder / "broken.mid").write_bytes(b"MThd and no more")
    assert f"{folder}/broken.mid: broken MIDI file" in line_of(data)
    (folder / "broken.mid").write_bytes(b"")
    assert f"{folder}/broken.mid: the file is empty" in line_of(data)
    (tmp_path / "none").mkdir()
    assert "none holds no MIDI file" in line_of(MusicData(folder=str(tmp_path / "none")))
    assert "is not a folder" in line_of(MusicData(folder=str(tmp_path / "no")))
    assert "data.folder is needed: a folder of MIDI" in line_of(MusicData())
    bare = MusicData(file="no.json", encoding=CHORALE)
    assert "data.folder is needed: the one that holds no.json" in line_of(bare)
    a_file = MusicData(folder=str(folder / "scale00.mid"))
    assert f"is a file: give data.folder={folder}" in line_of(a_file)
    assert "did you mean 'train'" in line_of(data, "trian")
    (tmp_path / "none" / "train.tar.gz").write_bytes(b"cut off")
    assert "train.tar.gz: not a whole archive" in line_of(MusicData(folder=str(tmp_path / "none")))
    (tmp_path / "one").mkdir()
    write_midi([scale_up(0)], tmp_path / "one" / "a.mid")
    assert "cannot hold out" in line_of(MusicData(folder=str(tmp_path / "one")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not whole JSON"),
        ("[1]", "no split 'train'"),
        (json.dumps({"valid": [[[1, 2, 3, 4]]]}), "no split 'train'"),
        (json.dumps({"train": []}), "no split 'train'"),
        (json.dumps({"train": [[]]}), "train, piece 1: no note in this piece; take it out"),
        (json.dumps({"train": [SOUND, [[-1] * 4] * 3]}), "piece 2: no note in this piece"),
        (json.dumps({"train": [{"notes": SOUND}]}), "piece 1: no list of sixteenths"),
        (json.dumps({"train": [[*SOUND, [1, 2, 3]]]}), "sixteenth 2: 3 pitches, and a chorale"),
        (json.dumps({"train": [[60, 62]]}), "sixteenth 1: no list, and a chorale"),
        (json.dumps({"train": [[[1, 2, 3, 128]]]}), "sixteenth 1: 128 is no pitch"),
        (json.dumps({"train": [[[1, 2, 3, 58.0]]]}), "58.0 is no pitch, which is a whole number"),
        (json.dumps({"train": [[[1, 2, True, 4]]]}), "true is no pitch"),
        (json.dumps({"train": [[[1, 2, 3, None]]]}), "null is no pitch"),
    ],
)
def test_chorales_that_are_none_are_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    line = line_of(MusicData(folder=str(tmp_path), file="x.json", encoding=CHORALE))
    assert str(tmp_path / "x.json") in line
    assert said in line


def test_pickles_are_not_read(tmp_path: Path) -> None:
    line = line_of(MusicData(folder=str(tmp_path), file="x.npz", encoding=CHORALE))
    assert "pickled" in line


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"held_out": 1.0},
        {"transpose": -1},
        {"tempi": (0.0,)},
        {"tempi": (1.1,), "encoding": CHORALE},
        {"file": "x.json"},
    ):
        with pytest.raises(UserError, match="data"):
            MusicData(**wrong)  # type: ignore[arg-type]
