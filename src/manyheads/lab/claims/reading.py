"""Experiments on encoders: small ones for the phrasebook's English and an artificial language."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.masking import Masked, mask_tokens
from manyheads.lab.claims.trial import learn
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.gpt import Gpt
from manyheads.nn.layers import EmbeddingConfig
from manyheads.phrasebook import Pair, sentences
from manyheads.phrasebook.layout import Spans

PAD, MASK, FIRST = 0, 1, 2  # FIRST precedes each sentence
UNLABELLED = -100  # the default ignore_index of cross_entropy

Rows = Int[Tensor, "n t"]
Places = Bool[Tensor, "n t"]
Labels = Int[Tensor, " n"]
PlaceLabels = Int[Tensor, " places"]
Scores = Float[Tensor, "places classes"]
States = Float[Tensor, "places d"]


def words_of(text: str, spans: Spans) -> list[str]:
    return [text[start:end].lower() for start, end in spans]


def short(split: str, count: int, longest: int) -> list[Pair]:
    """`count` pairs with at most `longest` English words, punctuation marks included."""
    matching: list[Pair] = []
    drawn = 2 * count
    while len(matching) < count:
        pairs = sentences("en-de", split, drawn)
        matching = [pair for pair in pairs if len(pair.source_words) <= longest]
        drawn *= 2
    return matching[:count]


@dataclass(frozen=True)
class Vocabulary:
    """Word ids, numbered after the special tokens."""

    numbers: dict[str, int]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Vocabulary":
        words = {word for pair in pairs for word in words_of(pair.source, pair.source_words)}
        return cls({word: number for number, word in enumerate(sorted(words), FIRST + 1)})

    def __len__(self) -> int:
        return len(self.numbers) + FIRST + 1

    def rows(self, pairs: Sequence[Pair], longest: int) -> Rows:
        """FIRST, the words of a sentence, and padding up to `longest` words."""
        rows = torch.full((len(pairs), longest + 1), PAD)
        rows[:, 0] = FIRST
        for row, pair in zip(rows, pairs, strict=True):
            words = words_of(pair.source, pair.source_words)
            row[1 : len(words) + 1] = torch.tensor([self.numbers[word] for word in words])
        return rows


@dataclass(frozen=True, kw_only=True)
class Topics:
    """An artificial language: each text has a topic, and each topic has words of its own.

    `clear` words belong to one topic, `double` words to two, which the context disambiguates. A
    fraction `common` of the positions are `plain` words, which all topics share. Word ids are
    assigned in this order.
    """

    topics: int = 8
    clear: int = 160
    double: int = 40
    plain: int = 40
    common: float = 0.5
    length: int = 16
    seed: int = 0

    @property
    def words(self) -> int:
        return FIRST + 1 + self.clear + self.double + self.plain

    def is_double(self, rows: Rows) -> Places:
        first = FIRST + 1 + self.clear
        return (rows >= first) & (rows < first + self.double)

    def draw(self, count: int, random: np.random.Generator) -> tuple[Rows, Labels]:
        """Texts that begin with FIRST, and their topics."""
        topic_words = self._own()
        topics = random.integers(self.topics, size=count)
        shape = (count, self.length)
        chosen = random.integers(topic_words.shape[1], size=shape)
        plain = self.clear + self.double + random.integers(self.plain, size=shape)
        words = np.where(
            random.random(shape) < self.common, plain, topic_words[topics[:, None], chosen]
        )
        rows = np.concatenate([np.full((count, 1), FIRST), words + FIRST + 1], axis=1)
        return torch.from_numpy(rows), torch.from_numpy(topics)

    def _own(self) -> Int[np.ndarray, "topics words"]:
        """The words of each topic: its clear words, its double words and those of a neighbour."""
        random = np.random.default_rng(self.seed)
        clear = np.arange(self.clear).reshape(self.topics, -1)
        double = self.clear + random.permutation(self.double).reshape(self.topics, -1)
        return np.concatenate([clear, double, np.roll(double, 1, axis=0)], axis=1)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of an encoder, and the batches and steps of its pretraining."""

    dim: int
    layers: int
    longest: int
    rows: int
    steps: int
    rate: float


def encoder(words: int, size: Size, seed: int) -> Bert:
    """A bidirectional encoder of word ids with a masked-language-model head."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=words,
        dim=size.dim,
        layers=size.layers,
        heads=4,
        max_length=size.longest + 1,
        embed=EmbeddingConfig(scale="sqrt-dim"),
        dropout=0.0,
    )
    return config.build()


def draw(below: int, count: int, random: np.random.Generator) -> Labels:
    """Random row indices for a batch."""
    return torch.from_numpy(random.integers(below, size=count))


@dataclass(frozen=True)
class Labelled:
    """Rows of word ids with a label at some positions, UNLABELLED at the others."""

    rows: Rows
    labels: Rows

    def __getitem__(self, chosen: slice | Tensor) -> "Labelled":
        return Labelled(self.rows[chosen], self.labels[chosen])


class Labeller(nn.Module):
    """An encoder and a linear layer on its states: logits of the labels at each position."""

    def __init__(self, encoder: Bert | Gpt, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.dim, classes)

    def scores(self, data: Labelled) -> tuple[Scores, PlaceLabels]:
        """Logits and labels of the labelled positions only."""
        states, labels = labelled_states(self.encoder, data)
        return self.head(states), labels

    def fit(self, data: Labelled, *, batch: int, steps: int, rate: float, seed: int) -> None:
        """Train the encoder and the linear layer on the labels."""
        random = np.random.default_rng(seed)
        count = len(data.rows)

        def loss_of(step: int) -> Tensor:
            return F.cross_entropy(*self.scores(data[draw(count, min(batch, count), random)]))

        learn(self, loss_of, steps=steps, rate=rate, warmup=steps // 10)

    @torch.no_grad()
    def accuracy(self, data: Labelled) -> float:
        scores, labels = self.scores(data)
        return float((scores.argmax(-1) == labels).float().mean())


def labelled_states(encoder: Bert | Gpt, data: Labelled) -> tuple[States, PlaceLabels]:
    """The last hidden states of the labelled positions, with their labels."""
    device = next(encoder.parameters()).device
    rows, labels = data.rows.to(device), data.labels.to(device)
    labelled = labels != UNLABELLED
    return encoder.hidden(rows, rows != PAD)[labelled], labels[labelled]


def hidden_words(
    rows: Rows, words: int, objective: Masked, random: np.random.Generator
) -> tuple[Rows, Places]:
    """Rows with words masked as the objective configures, and the masked positions."""
    tokens = rows.numpy()
    inputs, places = mask_tokens(
        tokens,
        tokens > FIRST,
        random,
        rate=objective.rate,
        mask_fraction=objective.mask_fraction,
        random_fraction=objective.random_fraction,
        mask=MASK,
        ordinary=np.arange(FIRST + 1, words),
    )
    return torch.from_numpy(inputs), torch.from_numpy(places)


def masked_loss(model: Bert, rows: Rows, inputs: Rows, places: Places) -> Tensor:
    """−log P(x_i | x̃), averaged over the masked positions."""
    device = next(model.parameters()).device
    inputs, places, rows = (x.to(device) for x in (inputs, places, rows))
    hidden = model.hidden(inputs, inputs != PAD)
    return F.cross_entropy(model.logits(hidden[places]), rows[places])


def pretrained(
    rows: Rows, words: int, size: Size, objective: Masked, seed: int, device: torch.device
) -> Bert:
    """An encoder after masked-language-model pretraining."""
    model = encoder(words, size, seed).to(device)
    random = np.random.default_rng(seed)

    def loss_of(step: int) -> Tensor:
        batch = rows[draw(len(rows), size.rows, random)]
        return masked_loss(model, batch, *hidden_words(batch, words, objective, random))

    learn(model, loss_of, steps=size.steps, rate=size.rate, warmup=size.steps // 10)
    return model
