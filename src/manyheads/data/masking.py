"""Pretraining objectives: their settings, and how each corrupts token ids.

Randomness is passed in as a Generator, so that the corruption of a step is a pure function of
(seed, step).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from manyheads.config import Between, Fraction, Positive, Probability
from manyheads.data.language import EncodedText, Texts
from manyheads.errors import DataError, UserError

Rate = Annotated[
    float, Between(0, 1, open_low=True, open_high=True), "Fraction of the tokens to predict"
]
MeanLength = Annotated[float, Between(1), "Mean length of a span in tokens"]
Masking = Annotated[
    Literal["dynamic", "static"], "Mask other tokens in every epoch, or always the same"
]
UNIT = {"unit": ("pieces", "subwords")}  # 0.1 could also mask complete words

# Random numbers for each purpose come from a sequence of their own. numpy extends a list of
# numbers as a seed with zeros, so neither a purpose nor the last number may be 0.
TEXTS, MASKING, HELD_OUT, CORRUPTION = range(1, 5)
Rng = Callable[[int], np.random.Generator]  # the generator of a purpose


def make_rng(seed: int, purpose: int, number: int) -> np.random.Generator:
    """The generator for one purpose, of a step or of a position in the text."""
    return np.random.default_rng([seed, purpose, number + 1])


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Predict the next token (GPT)."""

    packing: Annotated[
        Literal["stream", "documents"], "Whether a token also attends to the documents before"
    ] = "stream"
    kind: ClassVar[str] = "causal"


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Predict masked tokens (BERT, and without sentence pairs RoBERTa).

    A chosen token that is neither masked nor replaced stays as it was.
    """

    rate: Rate = 0.15
    mask_fraction: Annotated[Fraction, "Fraction of the chosen tokens replaced by the mask"] = 0.8
    random_fraction: Annotated[Fraction, "Fraction replaced by a random token"] = 0.1
    masking: Masking = "dynamic"
    pairs: Annotated[Literal["none", "next-sentence"], "Add next-sentence prediction"] = "none"
    kind: ClassVar[str] = "masked"
    RENAMED: ClassVar[dict[str, str]] = {
        "mask_share": "mask_fraction",
        "random_share": "random_fraction",
    }
    REMOVED: ClassVar[dict[str, tuple[Any, ...]]] = UNIT

    def __post_init__(self) -> None:
        if self.mask_fraction + self.random_fraction > 1:
            raise UserError(
                f"objective.mask_fraction={self.mask_fraction} and objective.random_fraction="
                f"{self.random_fraction} must be at most 1 together"
            )


@dataclass(frozen=True, kw_only=True)
class ReplacedToken:
    """Detect the tokens that a small generator put in place of masked ones (ELECTRA)."""

    rate: Rate = 0.15
    masking: Masking = "dynamic"
    generator_fraction: Annotated[
        float, Between(0, 1, open_low=True), "Width of the generator, relative to the model"
    ] = 0.25
    weight: Annotated[Positive, "Weight of the detection loss; the generator's is 1"] = 50.0
    # The generator fills in masks only, in windows.
    mask_fraction: ClassVar[float] = 1.0
    random_fraction: ClassVar[float] = 0.0
    pairs: ClassVar[str] = "none"
    kind: ClassVar[str] = "replaced-token"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("replaced",)
    RENAMED: ClassVar[dict[str, str]] = {"generator_share": "generator_fraction"}
    REMOVED: ClassVar[dict[str, tuple[Any, ...]]] = UNIT


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Predict the spans that sentinels stand for in the source (T5)."""

    rate: Rate = 0.15
    mean_length: MeanLength = 3.0
    kind: ClassVar[str] = "span-corruption"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("spans",)


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Restore a text with permuted sentences and masked or deleted tokens (BART)."""

    infill_rate: Annotated[Probability, "Fraction of the tokens in spans behind a mask"] = 0.3
    mean_length: MeanLength = 3.0
    permute_sentences: Annotated[bool, "Shuffle the sentences of a window"] = True
    delete_rate: Annotated[Probability, "Probability of deleting a token"] = 0.0
    kind: ClassVar[str] = "denoising"


@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """Predict the next and the previous token, each by a model of its direction (ELMo)."""

    kind: ClassVar[str] = "bidirectional"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("both-ways",)


Objective = Causal | Masked | ReplacedToken | SpanCorruption | Denoising | Bidirectional


def mask_tokens(
    tokens: Int[np.ndarray, "b t"],
    maskable: Bool[np.ndarray, "b t"],
    random: np.random.Generator,
    *,
    rate: float,
    mask_fraction: float,
    random_fraction: float,
    mask: int,
    ordinary: Int[np.ndarray, " v"],
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """(inputs, chosen): tokens with some masked, and where the loss is taken.

    Each `maskable` token is chosen with probability `rate`. A chosen token becomes `mask`, one of
    the `ordinary` ids, or stays, independently of the others.
    """
    chosen = maskable & (random.random(tokens.shape) < rate)
    kinds = random.random(tokens.shape)
    inputs = np.where(chosen & (kinds < mask_fraction), mask, tokens).astype(tokens.dtype)
    replaced = chosen & (kinds >= mask_fraction) & (kinds < mask_fraction + random_fraction)
    inputs[replaced] = random.choice(ordinary, np.count_nonzero(replaced))
    return inputs, chosen


def span_sizes(length: int, *, rate: float, mean_length: float) -> tuple[int, int]:
    """How many tokens of a text of this length T5 masks, and in how many spans."""
    if length < 2:
        raise UserError(f"a text of {length} tokens is too short for a span: give at least 2")
    masked = min(max(round(length * rate), 1), length - 1)
    return masked, min(max(round(masked / mean_length), 1), masked, length - masked)


def sample_spans(
    rows: int, length: int, random: np.random.Generator, *, rate: float, mean_length: float
) -> Bool[np.ndarray, "b t"]:
    """The mask of T5's spans: every row has the same number of masked tokens and of spans.

    Unmasked and masked spans alternate, an unmasked one first, so the last token is always
    masked. The lengths of either kind are a uniformly drawn composition of their sum.
    """
    masked, spans = span_sizes(length, rate=rate, mean_length=mean_length)
    unmasked_lengths = _compositions(rows, length - masked, spans, random)
    masked_lengths = _compositions(rows, masked, spans, random)
    lengths = np.stack([unmasked_lengths, masked_lengths], axis=2).reshape(rows, 2 * spans)
    changes = np.zeros((rows, length), dtype=np.bool_)
    np.put_along_axis(changes, lengths.cumsum(axis=1)[:, :-1], True, axis=1)
    return np.logical_xor.accumulate(changes, axis=1)


def _compositions(
    rows: int, total: int, parts: int, random: np.random.Generator
) -> Int[np.ndarray, "b parts"]:
    """Rows of positive numbers that add up to `total`, all such rows equally likely."""
    cut = np.tile(np.arange(total - 1) < parts - 1, (rows, 1))
    cuts = np.nonzero(random.permuted(cut, axis=1))[1].reshape(rows, parts - 1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=total)


def corrupt_spans(
    tokens: Int[np.ndarray, "b t"],
    masked: Bool[np.ndarray, "b t"],
    sentinels: Int[np.ndarray, " k"],
) -> tuple[Int[np.ndarray, "b s"], Int[np.ndarray, "b u"]]:
    """(source, target): the text with a sentinel for each span, and the spans by their sentinels.

        a b c d e f  with c and e f masked  →  a b X d Y  and  X c Y e f Z

    All rows must have as many masked tokens and as many spans, as those of `sample_spans` do.
    """
    rows = len(tokens)
    begins = masked.copy()
    begins[:, 1:] &= ~masked[:, :-1]
    spans = int(begins[0].sum())
    if spans >= len(sentinels):
        raise UserError(
            f"{spans} spans need {spans + 1} sentinels, but there are {len(sentinels)}: raise "
            "objective.mean_length, lower objective.rate, or add sentinels to the tokenizer"
        )
    # Before the first span the index is -1: a sentinel that is looked up and never used.
    markers = sentinels[begins.cumsum(axis=1) - 1]
    source = np.where(begins, markers, tokens)[begins | ~masked].reshape(rows, -1)
    spans_only = np.stack([markers, tokens], axis=2)[np.stack([begins, masked], axis=2)]
    last = np.full((rows, 1), sentinels[spans])
    target = np.concatenate([spans_only.reshape(rows, -1), last], axis=1)
    return source.astype(tokens.dtype), target.astype(tokens.dtype)


def infill_spans(
    length: int, random: np.random.Generator, *, rate: float, mean_length: float
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """(starts, lengths) of the spans that BART masks, in the order in which they were drawn.

    Lengths are drawn from Poisson(mean_length), 0 included, until they cover rate·length tokens,
    rounded; only the last is shortened to cover exactly as many. All orders of the spans and the
    other tokens are equally likely, so spans may touch but never overlap. An empty span lies
    before the token at its start.
    """
    covered = round(rate * length)
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < covered:
        more = random.poisson(mean_length, 2 + int(1.2 * covered / mean_length))
        lengths = np.concatenate([lengths, more])
    lengths = lengths[: np.searchsorted(lengths.cumsum(), covered) + 1 if covered else 0]
    lengths[-1:] -= lengths.sum() - covered
    slots = random.choice(length - covered + len(lengths), len(lengths), replace=False)
    order = np.argsort(slots)
    tokens_before = slots[order] - np.arange(len(order))  # outside spans
    starts = np.empty_like(lengths)
    starts[order] = tokens_before + lengths[order].cumsum() - lengths[order]
    return starts, lengths


def infill(
    tokens: Int[np.ndarray, " t"],
    random: np.random.Generator,
    *,
    rate: float,
    mean_length: float,
    mask: int,
) -> Int[np.ndarray, " s"]:
    """A text with one mask for each of the spans that `infill_spans` draws."""
    starts, lengths = infill_spans(len(tokens), random, rate=rate, mean_length=mean_length)
    depth = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(depth, starts, 1)
    np.add.at(depth, starts + lengths, -1)
    outside = depth.cumsum()[:-1] == 0
    outside_before = np.concatenate([[0], outside.cumsum()])
    return np.insert(tokens[outside], outside_before[starts], mask)


def delete(
    tokens: Int[np.ndarray, " t"], random: np.random.Generator, *, rate: float
) -> Int[np.ndarray, " s"]:
    """A text in which each token is deleted with probability `rate`; at least one stays."""
    stays = random.random(len(tokens)) >= rate
    if len(tokens) and not stays.any():
        stays[random.integers(len(tokens))] = True
    return tokens[stays]


Positions = Int[np.ndarray, " rows"]  # in the stream


class Run(NamedTuple):
    """Consecutive tokens of the stream in each row."""

    start: Positions
    stop: Positions

    @property
    def size(self) -> Positions:
        return self.stop - self.start


class SentencePairs:
    """Next-sentence prediction (Devlin et al. 2019): two runs of sentences in `room` tokens.

    A run of sentences is divided in two; with probability ½ the second part is replaced by a run
    from another document. Documents of one sentence are left out.
    """

    def __init__(self, text: EncodedText, texts: Texts, *, room: int) -> None:
        self.room = room
        counts = [len(sentences) for sentences in texts.documents]
        document = np.repeat(np.arange(len(counts)), counts)
        usable = np.diff(text.sentence_starts) > 0
        sizes = np.bincount(document[usable], minlength=len(counts))
        if (sizes > 1).sum() < 2:
            raise DataError(
                f"{texts.name}: next-sentence prediction needs two documents of two sentences or "
                f"more, and there are {(sizes > 1).sum()} ({sizes.sum()} sentences in all): use "
                "data.lines=sentences with an empty line between documents, or objective.pairs=none"
            )
        usable &= sizes[document] > 1
        document = document[usable]
        self._starts = text.sentence_starts[:-1][usable]
        # For each sentence, the numbers of the first and last sentence of its document.
        self._first = np.searchsorted(document, document, "left")
        self._last = np.searchsorted(document, document, "right") - 1
        numbers = np.arange(len(document))
        is_last = numbers == self._last
        following = np.append(self._starts[1:], text.document_starts[-1])
        self._stops = np.where(is_last, text.document_starts[document + 1], following)
        self._anchors = numbers[~is_last]

    def draw(
        self, rows: int, random: np.random.Generator
    ) -> tuple[Run, Run, Bool[np.ndarray, " rows"]]:
        """(first, second, whether the second follows); the longer one is truncated first."""
        anchor = random.choice(self._anchors, rows)
        stop = self._run_stop(anchor, np.full(rows, self.room), least=2)
        middle = random.integers(anchor + 1, stop)
        is_next = random.random(rows) < 0.5
        first = Run(self._starts[anchor], self._stops[middle - 1])
        other = self._elsewhere(anchor, random)
        other_stop = self._run_stop(other, self.room - first.size, least=1)
        second = Run(
            self._starts[np.where(is_next, middle, other)],
            self._stops[np.where(is_next, stop, other_stop) - 1],
        )
        # Each text may use half of the tokens; the first also those that the second leaves.
        half = self.room - self.room // 2
        first_size = np.minimum(first.size, np.maximum(self.room - second.size, half))
        second_size = np.minimum(second.size, self.room - first_size)
        first = Run(first.start, first.start + first_size)
        return first, Run(second.start, second.start + second_size), is_next

    def _run_stop(self, sentence: Positions, room: Positions, least: int) -> Positions:
        """The sentence after the longest run from each that fits `room` and its document."""
        fits = np.searchsorted(self._stops, self._starts[sentence] + room, "right")
        return np.clip(fits, sentence + least, self._last[sentence] + 1)

    def _elsewhere(self, sentence: Positions, random: np.random.Generator) -> Positions:
        """For each a sentence of another document, all equally likely."""
        first, size = self._first[sentence], self._last[sentence] - self._first[sentence] + 1
        index = random.integers(0, len(self._starts) - size)
        return np.where(index < first, index, index + size)
