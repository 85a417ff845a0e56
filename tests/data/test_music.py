"""Music as text: which files belong to which split, their words, and what is refused."""

import json
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mido")

from tests.data.helpers import refusal, write
from tests.data.small_music import scale_up, write_chorales, write_performances

from manyheads.data.corpus import report_leaks
from manyheads.data.events import ChoraleGrid, Note, encode_events, write_midi
from manyheads.data.language import EncodedText
from manyheads.data.music import PHRASE, MusicData, phrases
from manyheads.errors import UserError
from manyheads.tokenizer.train import Words

CHORALE = ChoraleGrid()
SOUND = [[72, 67, 60, 48]]


def test_a_fraction_of_the_files_is_held_out(tmp_path: Path) -> None:
    write_performances(tmp_path / "a" / "b", 8)
    for number in (8, 9):
        write_midi([[Note(0, number, 5, 1)]], tmp_path / "a" / f"{number}.mid")
    data = MusicData(folder=str(tmp_path / "a"), valid_fraction=0.3)
    assert data.splits() == ["train", "valid"]
    train, valid = ({text for [text] in data.read(split).documents[1:]} for split in data.splits())
    assert (len(train), len(valid), len(train | valid)) == (7, 3, 10)
    assert "'test'" in refusal(UserError, data.read, "test")


def test_files_of_one_piece_are_held_out_together(tmp_path: Path) -> None:
    """Transposed, faster, or with other notes here and there, as performances have."""
    for piece in range(10):
        draw = random.Random(piece)
        pitches = draw.choices(range(30, 90), k=300)
        for copy in range(4):
            (tmp_path / f"copy{copy}").mkdir(exist_ok=True)
            length = 10 + copy
            wrong = {at: draw.randrange(128) for at in range(1, 300) if draw.random() < 0.1}
            notes = [
                Note(length * at, wrong.get(at, pitch + 3 * copy), length * at + length, 10)
                for at, pitch in enumerate([30, *pitches, piece + 31])
            ]
            write_midi([notes], tmp_path / f"copy{copy}" / f"{piece}.mid")
    data = MusicData(folder=str(tmp_path), valid_fraction=0.3)
    train, valid = (data.read(split) for split in ("train", "valid"))
    pieces = []
    for part in (train, valid):
        onsets = [[int(w[2:]) for w in words if w[:2] == "on"] for words in part.pieces_of_words]
        pieces.append([pitches[-1] - pitches[0] - 1 for pitches in onsets])
    assert [len(part) for part in pieces] == [28, 12]
    assert {*pieces[0], *pieces[1]} == {*range(10)}
    assert not {*pieces[0]} & {*pieces[1]}
    assert report_leaks(data, train, valid) == []
    assert report_leaks(data, train, train) == ["28 of 28 pieces of 'valid' also occur in training"]


def test_every_run_of_intervals_is_a_phrase() -> None:
    pitches = random.Random(1).sample(range(128), 30)
    for notes in (PHRASE, PHRASE + 1, 30):
        assert len(phrases([f"on{pitch}" for pitch in pitches[:notes]])) == notes - PHRASE


def test_a_chorale_in_two_splits_is_reported(tmp_path: Path) -> None:
    data = MusicData(
        folder=str(write_chorales(tmp_path, 40)), file="chorales.json", encoding=CHORALE
    )
    train, valid = data.read("train"), data.read("valid")
    assert report_leaks(data, train, valid) == []
    table = json.loads((tmp_path / "chorales.json").read_text())
    frames = [[70 - step % 7, 60, 55 + step % 5, 40 + step % 11] for step in range(40)]
    moved = [[pitch + 2 for pitch in frame] for frame in frames]
    table["train"][3], table["valid"][5] = frames, moved
    (tmp_path / "chorales.json").write_text(json.dumps(table))
    notes = report_leaks(data, data.read("train"), data.read("valid"))
    assert notes == ["1 of 40 pieces of 'valid' also occur in training"]


@pytest.mark.parametrize("packed", [False, True])
def test_folders_and_archives_are_splits(packed: bool, tmp_path: Path) -> None:
    for number, split in enumerate(("train", "valid", "test"), start=1):
        folder = write_performances(tmp_path / split / "deep", number).parent
        (folder / "notes.txt").write_text("not music")
        (folder / "._song.mid").write_bytes(b"of macOS")
        if packed:
            with tarfile.open(tmp_path / f"{split}.tar.gz", "w:gz") as archive:
                archive.add(folder, "inside")
            shutil.rmtree(folder)
    data = MusicData(folder=str(tmp_path))
    assert data.splits() == ["train", "valid", "test"]
    assert data.read("train").pieces_of_words == [encode_events(scale_up(0))]
    assert data.read("test").pieces_of_words == [encode_events(scale_up(n)) for n in range(3)]


def test_every_piece_comes_after_an_end(tmp_path: Path) -> None:
    """And every word of the encoding is a token, also one that does not occur."""
    music = MusicData(folder=str(write_performances(tmp_path))).read("train")
    tokenizer = Words().train(music.strings())
    assert tokenizer.vocab_size == 388 + 7
    text = EncodedText(music, tokenizer, ends=True)
    words = [[tokenizer.token_id(word) for word in piece] for piece in music.pieces_of_words]
    end = tokenizer.end
    assert text.flat.tolist() == [end, *(token for piece in words for token in [*piece, end])]


def test_a_position_has_the_same_voice_in_every_chorale(tmp_path: Path) -> None:
    data = MusicData(folder=str(write_chorales(tmp_path)), file="chorales.json", encoding=CHORALE)
    assert data.splits() == ["train", "valid", "test"]
    music = data.read("train")
    tokenizer = Words().train(music.strings())
    flat = EncodedText(music, tokenizer, ends=True).flat
    assert len(flat) == 1 + 4 * (4 * 12 + 4)
    altos, basses = ({tokenizer.content(int(token)) for token in flat[n::4]} for n in (2, 4))
    assert altos == {"p67", "rest"}
    assert basses == {"p48", "</s>"}
    assert [len(words) for words in music.pieces_of_words] == [48] * 4


def test_tempi_are_for_training_only(tmp_path: Path) -> None:
    write_performances(tmp_path, 4)
    plain, faster = (MusicData(folder=str(tmp_path), tempi=tempi) for tempi in ((), (1.25,)))
    assert faster.read("valid").documents == plain.read("valid").documents
    one, both = (data.read("train").pieces_of_words for data in (plain, faster))
    assert both[::2] == one
    assert both[1] != one[0]
    assert [w for w in both[1] if w.startswith("on")] == [w for w in one[0] if w.startswith("on")]


def message(data: MusicData, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        data.read(split)
    [line] = str(caught.value).splitlines()
    return line


def test_problems_are_one_line_with_the_file(tmp_path: Path) -> None:
    folder = write_performances(tmp_path / "music", 3)
    data = MusicData(folder=str(folder))
    for content in (b"MThd and no more", b""):
        write(folder / "broken.mid", content)
        assert message(data).startswith(f"{folder}/broken.mid: ")
    none = tmp_path / "none"
    none.mkdir()
    assert "no MIDI file" in message(MusicData(folder=str(none)))
    (none / "train.tar.gz").write_bytes(b"cut off")
    assert message(MusicData(folder=str(none))).startswith(f"{none / 'train.tar.gz'}: ")
    assert "is not a folder" in message(MusicData(folder=str(tmp_path / "no")))
    assert "data.folder is needed" in message(MusicData())
    assert "folder of no.json" in message(MusicData(file="no.json", encoding=CHORALE))
    missing = MusicData(folder=str(none), file="no.json", encoding=CHORALE)
    assert message(missing).startswith(f"no file {none / 'no.json'}")
    assert f"data.folder={folder}" in message(MusicData(folder=str(folder / "scale00.mid")))
    assert "did you mean 'train'" in message(data, "trian")
    (tmp_path / "one").mkdir()
    write_midi([scale_up(0)], tmp_path / "one" / "a.mid")
    assert "hold out" in message(MusicData(folder=str(tmp_path / "one")))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ("[" * 99999, "not valid JSON"),
        ([1], "no split 'train'"),
        ({"valid": [[[1, 2, 3, 4]]]}, "no split 'train'"),
        ({"train": []}, "no split 'train'"),
        ({"train": [[]]}, "train, piece 1: no note"),
        ({"train": [SOUND, [[-1] * 4] * 3]}, "piece 2: no note"),
        ({"train": [{"notes": SOUND}]}, "piece 1: not a list"),
        ({"train": [[*SOUND, [1, 2, 3]]]}, "sixteenth 2: [1, 2, 3] is"),
        ({"train": [[60, 62]]}, "sixteenth 1: 60 is"),
        ({"train": [[[1, 2, 3, 128]]]}, "sixteenth 1: [1, 2, 3, 128] is"),
        ({"train": [[[1, 2, 3, 58.0]]]}, "58.0] is"),
        ({"train": [[[1, 2, True, 4]]]}, "true, 4] is"),
        ({"train": [[[1, 2, 3, None]]]}, "null] is"),
    ],
)
def test_broken_chorales_are_refused(content: Any, problem: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    path = write(tmp_path / "x.json", text)
    line = message(MusicData(folder=str(tmp_path), file="x.json", encoding=CHORALE))
    assert line.startswith(str(path))
    assert problem in line
