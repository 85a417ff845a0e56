"""Words that are not in the training data: subwords against full words and characters.

The data are English noun pairs and the German compound, as "garden table" and "Gartentisch". A few
are common and most are rare, as words of a text are.
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
COMMON = 5  # occurrences in training of a common word; a rare word has none
ROOM = 64
KINDS: dict[str, Tokens] = {
    "pieces": Bpe(vocab_size=400),
    "words": Words(vocab_size=400),
    "characters": Characters(vocab_size=400),
}


@dataclass(frozen=True)
class Size:
    """The size of a model and its data; every step has `rows` pairs, for all tokenizers."""

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
    """Training pairs, and test pairs: common ones, and ones that training does not have."""

    train: Corpus
    common: Corpus
    rare: Corpus


def compounds(size: Size, seed: int) -> Compounds:
    """Sample by Zipf's law: the n-th most common compound has 1/n of the first one's "
    "probability."""
    random = np.random.default_rng(seed)
    nouns = size.nouns
    order = random.permutation(nouns * nouns)
    chances = 1 / np.arange(1, len(order) + 1)
    drawn = random.choice(order, size.pairs, p=chances / chances.sum())
    counts = np.bincount(drawn, minlength=len(order))
    common = random.permutation(np.flatnonzero(counts >= COMMON))[: size.tested]
    rare = random.permutation(np.flatnonzero(counts == 0))[: size.tested]

    def corpus(which: np.ndarray) -> Corpus:
        both = [(NOUNS[index // nouns], NOUNS[index % nouns]) for index in which]
        english = [f"{a.english[0]} {b.english[0]}" for a, b in both]
        return Corpus(english, [a.german[0] + b.german[0].lower() for a, b in both])

    return Compounds(corpus(drawn), corpus(common), corpus(rare))


def compare(
    kind: Tokens, data: Compounds, size: Size, seed: int, device: torch.device
) -> dict[str, float]:
    """Accuracies, tokens per compound, and the share of unknown ones, for a kind of tokenizer."""
    tokenizer = kind.train([*data.train.sources, *data.train.targets])
    pairs = EncodedPairs(data.train, tokenizer, ROOM)
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
        rows = random.integers(len(data.train.sources), size=size.rows)
        loss = translation_loss(model, pairs.batch(rows).to(device), 0.0)
        return loss.objective / loss.count

    learn(model, loss_of, steps=size.steps, rate=size.rate, warmup=size.steps // 10)
    translator = Translator(model, tokenizer, Decode(beam=1))
    written = tokenizer.encode_batch(data.rare.targets)
    values = {"length": fmean(map(len, written))}
    values["unknown"] = fmean(tokenizer.unknown in ids for ids in written)
    for name, corpus in (("common", data.common), ("rare", data.rare)):
        answers = zip(translator.translate(corpus.sources), corpus.targets, strict=True)
        values[name] = fmean(answer == reference for answer, reference in answers)
    return values


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    numbers: dict[str, list[float]] = {}
    for seed in setting.seeds:
        data = compounds(size, seed)
        for name, kind in KINDS.items():
            for what, value in compare(kind, data, size, seed, setting.device).items():
                numbers.setdefault(f"{what}, {name}", []).append(value)
    return Measured(numbers=numbers)


def judge(measured: Measured) -> Judged:
    mean = measured.mean
    why = "; ".join(
        f"{name}: accuracy {measured.reported(f'rare, {name}')} on unseen and "
        f"{measured.reported(f'common, {name}')} on common compounds, "
        f"{measured.reported(f'length, {name}')} tokens each, "
        f"{measured.reported(f'unknown, {name}')} unknown"
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
    sentence="Subwords by byte-pair encoding handle rare words: none is unknown, unlike with full "
    "words, and texts are far shorter than in characters.",
    lectures="004",
    criterion="with subwords no unseen compound is unknown, and the accuracy on unseen compounds "
    "is at least 10 points above that with full words and, after as many examples, at most 2 "
    "points below that with characters, in at most half as many tokens; on common compounds it is "
    "at most 2 points below that with full words",
    measure=measure,
    judge=judge,
)
