"""Words that training never had: pieces of words against whole words and single characters.

English noun pairs and the German compound, "garden table" and "Gartentisch", a few of them
common and most of them rare, as words of a text are.
"""

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.decode.beam import Decode
from manyheads.decode.translate import Translator
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.trial import learn
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import EmbeddingConfig
from manyheads.phrasebook.nouns import NOUNS
from manyheads.tasks.translation import translation_loss
from manyheads.tokenizer.train import Bpe, Characters, Tokens, Words

POINTS = 0.02
COMMON = 5  # a word is common that training has so often, and rare that it never has
ROOM = 64
KINDS: dict[str, Tokens] = {
    "pieces": Bpe(vocab_size=400),
    "words": Words(vocab_size=400),
    "characters": Characters(vocab_size=400),
}


@dataclass(frozen=True)
class Size:
    """`pairs` of so many nouns to train on, and `rows` of them a step, whatever the tokens are."""

    nouns: int
    pairs: int
    tested: int
    dim: int
    layers: int
    steps: int
    rows: int
    rate: float


SMALL = Size(40, 2000, 200, 64, 1, 300, 64, 5e-3)
LARGE = Size(120, 40_000, 1000, 256, 3, 3000, 512, 1e-3)


@dataclass(frozen=True)
class Compounds:
    """Pairs to train on, and those to be asked about: common ones, and ones never seen."""

    train: Corpus
    common: Corpus
    rare: Corpus


def compounds(size: Size, seed: int) -> Compounds:
    """Drawn by Zipf's law: the n-th commonest compound is drawn n times as seldom as the first."""
    random = np.random.default_rng(seed)
    nouns = size.nouns
    order = random.permutation(nouns * nouns)
    chances = 1 / np.arange(1, len(order) + 1)
    drawn = random.choice(order, size.pairs, p=chances / chances.sum())
    counts = np.bincount(drawn, minlength=len(order))
    common = random.permutation(np.flatnonzero(counts >= COMMON))[: size.tested]
    rare = random.permutation(np.flatnonzero(counts == 0))[: size.tested]

    def corpus(which: np.ndarray) -> Corpus:
        both = [(NOUNS[one // nouns], NOUNS[one % nouns]) for one in which]
        english = [f"{a.english[0]} {b.english[0]}" for a, b in both]
        return Corpus(english, [a.german[0] + b.german[0].lower() for a, b in both])

    return Compounds(corpus(drawn), corpus(common), corpus(rare))


def compare(
    kind: Tokens, asked: Compounds, size: Size, seed: int, device: torch.device
) -> dict[str, float]:
    """Right answers, tokens a compound and unknown ones, after training with these tokens."""
    tokenizer = kind.train([*asked.train.sources, *asked.train.targets])
    data = EncodedPairs(asked.train, tokenizer, ROOM)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    config = Seq2SeqConfig(
        vocab_size=tokenizer.vocab_size,
        dim=size.dim,
        layers=size.layers,
        heads=4,
        max_length=ROOM,
        embed=EmbeddingConfig(scale="sqrt-dim"),
        dropout=0.0,
    )
    model = config.build().to(device)

    def loss_of(step: int) -> Tensor:
        rows = random.integers(len(asked.train.sources), size=size.rows)
        loss = translation_loss(model, data.batch(rows).to(device), 0.0)
        return loss.objective / loss.count

    learn(model, loss_of, steps=size.steps, rate=size.rate, warmup=size.steps // 10)
    translator = Translator(model, tokenizer, Decode(beam=1))
    written = tokenizer.encode_batch(asked.rare.targets)
    found = {"length": fmean(map(len, written))}
    found["unknown"] = fmean(tokenizer.unknown in ids for ids in written)
    for name, corpus in (("common", asked.common), ("rare", asked.rare)):
        answers = zip(translator.translate(corpus.sources), corpus.targets, strict=True)
        found[name] = fmean(answer == wanted for answer, wanted in answers)
    return found


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    numbers: dict[str, list[float]] = {}
    for seed in setting.seeds:
        asked = compounds(size, seed)
        for name, kind in KINDS.items():
            for what, value in compare(kind, asked, size, seed, setting.device).items():
                numbers.setdefault(f"{what}, {name}", []).append(value)
    return Measured(numbers=numbers)


def judge(measured: Measured) -> Judged:
    mean = measured.mean
    why = "; ".join(
        f"{name}: {measured.told(f'rare, {name}')} of unseen and "
        f"{measured.told(f'common, {name}')} of common compounds right, "
        f"{measured.told(f'length, {name}')} tokens each, "
        f"{measured.told(f'unknown, {name}')} unknown"
        for name in KINDS
    )
    if (
        measured.most("unknown, pieces") > 0
        or mean("rare, pieces") < mean("rare, words") + 0.1
        or mean("common, pieces") < mean("common, words") - POINTS
    ):
        return Judged("fails", why)
    against = {
        "in quality": mean("rare, pieces") >= mean("rare, characters") - POINTS,
        "in length": mean("length, pieces") <= mean("length, characters") / 2,
    }
    if not all(against.values()):
        won = [name for name, better in against.items() if better]
        part = f"and {' and '.join(won)} against characters" if won else "not against characters"
        return Judged("depends", f"holds only against words {part}; {why}")
    return Judged("holds", why)


CLAIM = Claim(
    sentence="Pieces of words by byte-pair encoding deal with rare words: none is unknown as with "
    "whole words, and texts stay far shorter than in characters.",
    deck="004",
    criterion="of compounds that training never had none is unknown in pieces, at least 10 points "
    "more are right than with whole words, and after as many examples no fewer (by 2 points) than "
    "with characters, in at most half as many tokens; of common ones no fewer (by 2 points) than "
    "with whole words",
    measure=measure,
    judge=judge,
)
