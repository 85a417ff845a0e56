"""Reading in both directions against reading from the left: who knows more of a word, of a text."""

from dataclasses import dataclass

import torch

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.reading import (
    PAD,
    UNLABELLED,
    Labelled,
    Labeller,
    Rows,
    Size,
    Vocabulary,
    encoder,
    short,
    words_of,
)
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.layers import EmbeddingConfig
from manyheads.phrasebook import Pair

POINTS = 0.02
TRAIN_PAIRS, TEST_PAIRS = 12_000, 500
SMALL = Size(dim=64, layers=2, longest=10, rows=64, steps=250, rate=5e-3)
LARGE = Size(dim=256, layers=4, longest=16, rows=256, steps=2000, rate=1e-3)


@dataclass(frozen=True)
class Task:
    """What to learn from and what to be asked about; labels are below `classes`."""

    train: Labelled
    test: Labelled
    classes: int


def german_words(pairs: list[Pair], rows: Rows) -> tuple[Rows, int]:
    """For each English word the first German word aligned with it, and the number of classes.

    It depends on the word and its context: "the" is der, die, das, den, dem or des.
    """
    numbers: dict[str, int] = {}
    labels = torch.full_like(rows, UNLABELLED)
    for row, pair in zip(labels, pairs, strict=True):
        german = words_of(pair.target, pair.target_words)
        for place, other in sorted(pair.alignment, reverse=True):
            row[place + 1] = numbers.setdefault(german[other], len(numbers))
    return labels, len(numbers)


def last_german_word(pairs: list[Pair], rows: Rows) -> tuple[Rows, int]:
    """For each sentence the last German word, predicted at the final punctuation mark.

    At that position a causal model has seen the complete sentence.
    """
    numbers: dict[str, int] = {}
    labels = torch.full_like(rows, UNLABELLED)
    last = (rows != PAD).sum(1) - 1
    for row, place, pair in zip(labels, last, pairs, strict=True):
        word = words_of(pair.target, pair.target_words)[-2]
        row[place] = numbers.setdefault(word, len(numbers))
    return labels, len(numbers)


def tasks(size: Size) -> tuple[dict[str, Task], int]:
    """Both tasks on the same sentences, and the number of English words."""
    pairs = short("train", TRAIN_PAIRS + TEST_PAIRS, size.longest)
    vocabulary = Vocabulary.of(pairs)
    rows = vocabulary.rows(pairs, size.longest)
    by_name = {}
    for name, label in (("words", german_words), ("texts", last_german_word)):
        labels, classes = label(pairs, rows)
        data = Labelled(rows, labels)
        by_name[name] = Task(data[:TRAIN_PAIRS], data[TRAIN_PAIRS:], classes)
    return by_name, len(vocabulary)


def reader(both: bool, words: int, size: Size, seed: int) -> Bert | Gpt:
    """An encoder, or the same stack with a causal mask."""
    if both:
        return encoder(words, size, seed)
    torch.manual_seed(seed)
    config = GptConfig(
        vocab_size=words,
        dim=size.dim,
        layers=size.layers,
        heads=4,
        max_length=size.longest + 1,
        embed=EmbeddingConfig(scale="sqrt-dim"),
        dropout=0.0,
    )
    return config.build()


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    by_name, words = tasks(size)
    numbers: dict[str, list[float]] = {}
    for name, task in by_name.items():
        for side in ("both", "causal"):
            numbers[f"{name} {side}"] = []
            for seed in setting.seeds:
                model = Labeller(reader(side == "both", words, size, seed), task.classes)
                model.to(setting.device)
                model.fit(task.train, batch=size.rows, steps=size.steps, rate=size.rate, seed=seed)
                numbers[f"{name} {side}"].append(model.accuracy(task.test))
    return Measured(numbers=numbers)


def judge(measured: Measured) -> Judged:
    why = "; ".join(
        f"{name}: {measured.reported(f'{name} both')} right with both directions, "
        f"{measured.reported(f'{name} causal')} with a causal mask"
        for name in ("words", "texts")
    )
    leads = {
        name: measured.mean(f"{name} both") - measured.mean(f"{name} causal")
        for name in ("words", "texts")
    }
    ahead = [name for name, lead in leads.items() if lead >= POINTS]
    if not ahead:
        return Judged("fails", why)
    if len(ahead) == 1:
        return Judged("depends", f"holds only for {ahead[0]}; {why}")
    return Judged("holds", why)


CLAIM = Claim(
    sentence="An encoder that reads in both directions classifies better than a causal one of the "
    "same size: it can use what comes later.",
    lectures="000",
    criterion="at least 2 points of accuracy ahead, both in labelling each word (with its German "
    "word) and in labelling a sentence from its last position (with the last German word)",
    measure=measure,
    judge=judge,
)
