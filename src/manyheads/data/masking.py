"""Pretraining objectives: their settings, and how each corrupts token ids.

Randomness is passed in as a Generator, so that the corruption of a step is a pure function of
(seed, step).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int

from manyheads.config import Between, Fraction, Positive, Probability
from manyheads.errors import UserError

Tokens = Int[np.ndarray, " _"]  # any number of tokens: texts may differ in length

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


def permute(sentences: list[Tokens], random: np.random.Generator) -> list[Tokens]:
    """The sentences of a text in random order."""
    return [sentences[index] for index in random.permutation(len(sentences))]


def delete(
    tokens: Int[np.ndarray, " t"], random: np.random.Generator, *, rate: float
) -> Int[np.ndarray, " s"]:
    """A text in which each token is deleted with probability `rate`; at least one stays."""
    stays = random.random(len(tokens)) >= rate
    if len(tokens) and not stays.any():
        stays[random.integers(len(tokens))] = True
    return tokens[stays]
