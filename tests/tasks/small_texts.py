"""Texts, tables and runs that train in a blink, one for each objective.

The language counts: a sentence is a run of number words, a document continues to count.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train.loop import Trainer

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
QUARTERS = ("north-west", "north-east", "south-west", "south-east")
CPU = torch.device("cpu")

SIZES = (
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32"),
    *("model.max_length=16", "train.batch_rows=6", "train.warmup_steps=2"),
    *("train.steps=12", "train.save_every=4", "train.validate_every=6", "train.log_every=1"),
)
WORDS = "tokens=words"
STEPS = ("train.epochs=none", "train.warmup_ratio=none", "train.learning_rate=1e-3")


@dataclass(frozen=True)
class Case:
    """A recipe with settings on top, which makes one way to train."""

    recipe: str
    settings: tuple[str, ...]

    def all(self, folder: Path) -> list[str]:
        return [*SIZES, f"data.folder={folder}", *self.settings]


CASES = {
    "causal stream": Case("gpt-mini", ("data.lines=sentences", WORDS)),
    "causal documents": Case(
        "language", ("data.lines=sentences", "objective.packing=documents", WORDS)
    ),
    "masked": Case("bert-mini", ("objective.pairs=none", WORDS)),
    "masked static": Case("bert-mini", ("objective.pairs=none", "objective.masking=static", WORDS)),
    "masked pairs": Case("bert-mini", (WORDS,)),
    "masked pairs static": Case("bert-mini", ("objective.masking=static", WORDS)),
    "replaced": Case("electra-mini", (WORDS,)),
    "spans": Case("t5-mini", ("objective.rate=0.4", "objective.mean_length=2", WORDS)),
    "denoising": Case("t5-mini", ("objective=denoising", "objective.delete_rate=0.1", WORDS)),
    "labels": Case("classify", (*STEPS, WORDS)),
    "a number": Case(
        "classify", (*STEPS, "data.label=score", "data.pair=pair", "data.answer=number", WORDS)
    ),
    "pictures": Case(
        "images",
        (
            *(*STEPS, "model.image_size=8", "data.augment.crop_padding=1", "data.augment.flip=0.5"),
            *("data.augment.operations=1", "data.mixing.mixup=0.4", "data.mixing.cutmix=1"),
        ),
    ),
}


def counted(first: int, count: int) -> list[str]:
    """So many number words from one on, after ten again from one."""
    return [NUMBERS[(first + place) % len(NUMBERS)] for place in range(count)]


def write_texts(folder: Path, documents: int = 20) -> Path:
    """A folder with documents of sentences, and a table of the same with labels and numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    texts = []
    for _ in range(documents):
        place, sentences = draw.randrange(10), []
        for _ in range(draw.randint(2, 5)):
            size = draw.randint(2, 7)
            sentences.append(" ".join(counted(place, size)))
            place += size
        texts.append("\n".join(sentences))
    (folder / "counting.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    write_table(folder / "tables")
    write_pictures(folder / "pictures")
    return folder


def write_table(folder: Path, rows: int = 60) -> None:
    """Whether the first word comes again, and how many words there are."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(2)
    lines = ["text\tpair\tlabel\tscore"]
    for _ in range(rows):
        words = draw.choices(NUMBERS, k=draw.randint(2, 6))
        again = "again" if words[0] in words[1:] else "once"
        other = " ".join(draw.choices(NUMBERS, k=2))
        lines.append(f"{' '.join(words)}\t{other}\t{again}\t{len(words) / 2}")
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_pictures(folder: Path, count: int = 60) -> None:
    """The class of a picture is its bright quarter."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    labels = np.arange(count) % len(QUARTERS)
    pixels = draw.integers(0, 100, (count, 8, 8), dtype=np.uint8)
    for picture, label in zip(pixels, labels, strict=True):
        row, column = divmod(4 * int(label), 8)
        picture[4 * row : 4 * row + 4, column : column + 4] += 150
    np.savez(folder / "quarters.npz", x_train=pixels, y_train=labels, classes=QUARTERS)


def trainer(name: str, folder: Path, out: Path, *overrides: str) -> Trainer:
    """What trains one of the cases on the texts of a folder."""
    case = CASES[name]
    data = folder / {"classify": "tables", "images": "pictures"}.get(case.recipe, "")
    return recipe_trainer(case.recipe, out, *case.all(data), *overrides)


def recipe_trainer(recipe: str, out: Path, *overrides: str) -> Trainer:
    """What `manyheads train RECIPE OVERRIDES --out OUT` makes before it runs."""
    return make_trainer(read_recipe(recipe, overrides), out, CPU)
