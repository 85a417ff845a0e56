"""Small seeded data sets for the golden runs, written with the standard library and numpy only.

Every generator is `random.Random` or `np.random.default_rng` with a fixed seed, so the files
have the same bytes on every machine.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

SYLLABLES = ("ba", "co", "di", "fu", "ga", "ke", "lo", "mi", "nu", "pa", "re", "si", "ta", "vo")
QUARTERS = ("north-west", "north-east", "south-west", "south-east")


def make_words(count: int = 120) -> list[str]:
    rng, words = random.Random(11), []
    while len(words) < count:
        word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))
        if word not in words:
            words.append(word)
    return words


WORDS = make_words()


def make_sentence(rng: random.Random, shortest: int = 3, longest: int = 9) -> str:
    """A walk through the word list: the next word is near the last one, so there is structure."""
    index, words = rng.randrange(len(WORDS)), []
    for _ in range(rng.randint(shortest, longest)):
        words.append(WORDS[index % len(WORDS)])
        index += rng.choice((1, 1, 2, 5))
    return " ".join(words)


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_texts(folder: Path) -> None:
    """Documents with one sentence a line and an empty line between documents."""
    rng = random.Random(1)
    for name, documents in (("train", 80), ("valid", 12), ("test", 12)):
        lines: list[str] = []
        for _ in range(documents):
            lines += [f"{make_sentence(rng)} ." for _ in range(rng.randint(2, 5))]
            lines.append("")
        write_lines(folder / f"{name}.txt", lines)


def write_pairs(folder: Path) -> None:
    """Translation pairs: the target is the source in capitals, backwards."""
    rng = random.Random(2)
    for name, count in (("train", 300), ("valid", 20), ("test", 12)):
        sources = [make_sentence(rng) for _ in range(count)]
        targets = [" ".join(word.capitalize() for word in s.split()[::-1]) for s in sources]
        write_lines(folder / f"{name}.src", sources)
        write_lines(folder / f"{name}.trg", targets)


def write_tables(folder: Path) -> None:
    """Texts with a label and a number, and a second text for pairs."""
    rng = random.Random(3)
    for name, count in (("train", 150), ("valid", 24), ("test", 24)):
        rows = ["text\tpair\tlabel\tscore"]
        for _ in range(count):
            text, other = make_sentence(rng), make_sentence(rng, 2, 4)
            label = ("short", "middle", "long")[len(text.split()) // 4]
            rows.append(f"{text}\t{other}\t{label}\t{len(text.split()) / 2}")
        write_lines(folder / f"{name}.tsv", rows)


def write_images(folder: Path) -> None:
    """Images of 8 by 8 pixels; the class is the bright quarter."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    arrays = {}
    for name, count in (("train", 160), ("test", 24)):
        labels = np.arange(count) % len(QUARTERS)
        pixels = rng.integers(0, 100, (count, 8, 8), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            row, column = divmod(int(label), 2)
            image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
        arrays |= {f"x_{name}": pixels, f"y_{name}": labels}
    np.savez(folder / "quarters.npz", **arrays, classes=QUARTERS)


def write_pngs(folder: Path) -> None:
    """Four grey PNG files of the same kind, spelled out."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    for label, name in enumerate(QUARTERS):
        image = rng.integers(0, 100, (8, 8), dtype=np.uint8)
        row, column = divmod(label, 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
        rows = b"".join(b"\0" + line.tobytes() for line in image)
        header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
        parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
        (folder / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def write_chorales(folder: Path) -> None:
    """Four voices on a grid of sixteenths, in the layout of Jsb16thSeparated.json."""
    rng = random.Random(5)
    table = {
        split: [
            [
                [rng.choice((72, 74, -1)), rng.choice((67, 69)), rng.choice((60, 59)), 48]
                for _ in range(16)
            ]
            for _ in range(pieces)
        ]
        for split, pieces in (("train", 12), ("valid", 3), ("test", 3))
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Jsb16thSeparated.json").write_text(json.dumps(table), encoding="utf-8")


def write_midi(folder: Path) -> None:
    """Scales as MIDI files of format 0, spelled out byte by byte."""
    folder.mkdir(parents=True, exist_ok=True)
    scale = (60, 62, 64, 65, 67, 69, 71, 72)
    for number in range(12):
        events = bytearray()
        for at in range(16):
            pitch, velocity = scale[(number + at) % 8], 40 + 8 * (at % 3)
            events += bytes((0, 0x90, pitch, velocity, 96, 0x80, pitch, 0))
        events += bytes((0, 0xFF, 0x2F, 0))
        header = b"MThd" + (6).to_bytes(4, "big") + b"\0\0\0\1" + (480).to_bytes(2, "big")
        track = b"MTrk" + len(events).to_bytes(4, "big") + bytes(events)
        (folder / f"scale{number:02}.mid").write_bytes(header + track)


def write_summaries(folder: Path) -> None:
    """Dialogues of three lines; the summary is the first word of each."""
    rng = random.Random(6)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 120), ("dev", 12), ("test", 8)):
        rows = []
        for _ in range(count):
            lines = [make_sentence(rng, 2, 5) for _ in range(3)]
            summary = " ".join(line.split()[0] for line in lines)
            rows.append(json.dumps({"dialogue": "\n".join(lines), "summary": summary}))
        write_lines(folder / f"{name}.jsonl", rows)


WRITERS: dict[str, Callable[[Path], None]] = {
    "texts": write_texts,
    "pairs": write_pairs,
    "tables": write_tables,
    "images": write_images,
    "pngs": write_pngs,
    "chorales": write_chorales,
    "midi": write_midi,
    "summaries": write_summaries,
}


def sample_lines(count: int = 4, seed: int = 9) -> list[str]:
    rng = random.Random(seed)
    return [make_sentence(rng) for _ in range(count)]
