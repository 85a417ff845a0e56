"""What pretraining hides: the objectives' settings, and how each one corrupts token ids.

Ids come in as plain numbers and the randomness as a Generator, so that what a step hides is a
pure function of (seed, step).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int

from manyheads.errors import UserError, check_above_zero, check_at_least, check_share

Tokens = Int[np.ndarray, " _"]  # any number of them: texts need not be equally long


@dataclass(frozen=True, kw_only=True)
class Causal:
    """The next token (GPT), in one stream or in packed documents that do not see each other."""

    packing: Literal["stream", "documents"] = "stream"
    kind: ClassVar[str] = "causal"


@dataclass(frozen=True, kw_only=True)
class Masked:
    """The tokens that were hidden (BERT, and without sentence pairs RoBERTa).

    What is chosen but neither masked nor replaced is kept as it is. Static masking hides the same
    tokens of a text in every epoch, dynamic masking others each time.
    """

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    unit: Literal["pieces", "words"] = "pieces"
    masking: Literal["dynamic", "static"] = "dynamic"
    pairs: Literal["none", "next-sentence"] = "none"
    kind: ClassVar[str] = "masked"

    def __post_init__(self) -> None:
        _check_rate("objective.rate", self.rate)
        for name, share in (("mask", self.mask_share), ("random", self.random_share)):
            if not 0 <= share <= 1:
                raise UserError(f"objective.{name}_share={share} must be from 0 to 1")
        if self.mask_share + self.random_share > 1:
            raise UserError(
                f"objective.mask_share={self.mask_share} and "
                f"objective.random_share={self.random_share} must be at most 1 together"
            )


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """Which tokens a small generator has put in place of hidden ones (ELECTRA).

    The generator is `generator_share` as wide as the model; `weight` is that of the detection
    loss beside the generator's own.
    """

    rate: float = 0.15
    unit: Literal["pieces", "words"] = "pieces"
    masking: Literal["dynamic", "static"] = "dynamic"
    generator_share: float = 0.25
    weight: float = 50.0
    kind: ClassVar[str] = "replaced"

    def __post_init__(self) -> None:
        _check_rate("objective.rate", self.rate)
        if not 0 < self.generator_share <= 1:
            raise UserError(f"objective.generator_share={self.generator_share} must be in (0, 1]")
        check_above_zero("objective.weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The spans behind the sentinels that stand for them in the source (T5)."""

    rate: float = 0.15
    mean_length: float = 3.0
    kind: ClassVar[str] = "spans"

    def __post_init__(self) -> None:
        _check_rate("objective.rate", self.rate)
        check_at_least("objective.mean_length", self.mean_length, 1)


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The text before its sentences were mixed and its tokens hidden or deleted (BART)."""

    infill_rate: float = 0.3
    mean_length: float = 3.0
    permute_sentences: bool = True
    delete_rate: float = 0.0
    kind: ClassVar[str] = "denoising"

    def __post_init__(self) -> None:
        check_share("objective.infill_rate", self.infill_rate)
        check_at_least("objective.mean_length", self.mean_length, 1)
        check_share("objective.delete_rate", self.delete_rate)


@dataclass(frozen=True, kw_only=True)
class BothWays:
    """The next token and the one before, each by a model of its own direction (ELMo)."""

    kind: ClassVar[str] = "both-ways"


Objective = Causal | Masked | Replaced | Spans | Denoising | BothWays


def _check_rate(name: str, rate: float) -> None:
    if not 0 < rate < 1:
        raise UserError(f"{name}={rate} must be above 0, below 1")


def hide(
    tokens: Int[np.ndarray, "b t"],
    may: Bool[np.ndarray, "b t"],
    random: np.random.Generator,
    *,
    rate: float,
    mask_share: float,
    random_share: float,
    mask: int,
    ordinary: Int[np.ndarray, " v"],
    starts: Bool[np.ndarray, "b t"] | None = None,
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """(inputs, places): tokens with some hidden, and where the loss is taken.

    Each token that `may` be hidden is chosen with probability `rate`, by itself or, where `starts`
    says where words begin, with its whole word; a word ends at a token that may not be hidden.
    A chosen token becomes `mask`, one of the `ordinary` ids or stays, each token by itself.
    """
    draws = random.random(tokens.shape)
    if starts is not None:
        draws = np.take(draws, _word_draws(may, starts))
    places = may & (draws < rate)
    fates = random.random(tokens.shape)
    inputs = np.where(places & (fates < mask_share), mask, tokens).astype(tokens.dtype)
    replaced = places & (fates >= mask_share) & (fates < mask_share + random_share)
    inputs[replaced] = random.choice(ordinary, np.count_nonzero(replaced))
    return inputs, places


def _word_draws(
    may: Bool[np.ndarray, "b t"], starts: Bool[np.ndarray, "b t"]
) -> Int[np.ndarray, "b t"]:
    """For each token a flat index that is its word's alone, where the word's draw is.

    It is that of its first piece or, in a word without a start, of the token before (one that may
    not be hidden and so has no use for its draw) or of the beginning of the row.
    """
    index = np.arange(may.size).reshape(may.shape)
    return np.maximum.accumulate(np.where(starts | ~may, index, index[:, :1]), axis=1)


def span_sizes(length: int, *, rate: float, mean_length: float) -> tuple[int, int]:
    """How many tokens of a text of this length T5 hides, and in how many spans."""
    if length < 2:
        raise UserError(f"a text of {length} tokens has no span to hide: give at least 2")
    hidden = min(max(round(length * rate), 1), length - 1)
    return hidden, min(max(round(hidden / mean_length), 1), hidden, length - hidden)


def span_places(
    rows: int, length: int, random: np.random.Generator, *, rate: float, mean_length: float
) -> Bool[np.ndarray, "b t"]:
    """Where the spans of T5 lie: every row has the same number of hidden tokens and of spans.

    Kept stretches and hidden spans take turns, a kept one first (so that the last token is always
    hidden); the lengths of either are a uniformly drawn composition of their sum.
    """
    hidden, spans = span_sizes(length, rate=rate, mean_length=mean_length)
    kept_lengths = _compositions(rows, length - hidden, spans, random)
    span_lengths = _compositions(rows, hidden, spans, random)
    turns = np.stack([kept_lengths, span_lengths], axis=2).reshape(rows, 2 * spans)
    changes = np.zeros((rows, length), dtype=np.bool_)
    np.put_along_axis(changes, turns.cumsum(axis=1)[:, :-1], True, axis=1)
    return np.logical_xor.accumulate(changes, axis=1)


def _compositions(
    rows: int, total: int, parts: int, random: np.random.Generator
) -> Int[np.ndarray, "b parts"]:
    """In each row positive numbers that add up to `total`, all such rows equally likely."""
    cut = np.tile(np.arange(total - 1) < parts - 1, (rows, 1))
    cuts = np.nonzero(random.permuted(cut, axis=1))[1].reshape(rows, parts - 1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=total)


def corrupt_spans(
    tokens: Int[np.ndarray, "b t"],
    places: Bool[np.ndarray, "b t"],
    sentinels: Int[np.ndarray, " k"],
) -> tuple[Int[np.ndarray, "b s"], Int[np.ndarray, "b u"]]:
    """(source, target): the text with a sentinel for each span, and the spans by their sentinels.

        a b c d e f  with c and e f hidden  →  a b X d Y  and  X c Y e f Z

    All rows must have as many hidden tokens and as many spans, as those of `span_places` do.
    """
    rows = len(tokens)
    begins = places.copy()
    begins[:, 1:] &= ~places[:, :-1]
    counts = np.stack([places.sum(axis=1), begins.sum(axis=1)])
    if (counts != counts[:, :1]).any():
        raise ValueError("the rows differ in how many tokens or spans are hidden")
    spans = int(counts[1, 0])
    if spans >= len(sentinels):
        raise UserError(
            f"{spans} spans need {spans + 1} sentinels, but there are {len(sentinels)}: raise "
            "objective.mean_length, lower objective.rate, or give the tokenizer more of them"
        )
    # Before the first span the number is -1: a sentinel that is looked up and never used.
    marks = sentinels[begins.cumsum(axis=1) - 1]
    source = np.where(begins, marks, tokens)[begins | ~places].reshape(rows, -1)
    marked = np.stack([marks, tokens], axis=2)[np.stack([begins, places], axis=2)]
    closing = np.full((rows, 1), sentinels[spans])
    target = np.concatenate([marked.reshape(rows, -1), closing], axis=1)
    return source.astype(tokens.dtype), target.astype(tokens.dtype)


def restore_spans(
    source: Int[np.ndarray, " s"], target: Int[np.ndarray, " u"], sentinels: Int[np.ndarray, " k"]
) -> Int[np.ndarray, " t"]:
    """The text that `corrupt_spans` made this row of, if it held no sentinel itself."""
    before, *pieces = np.split(source, np.flatnonzero(np.isin(source, sentinels)))
    marked = np.split(target, np.flatnonzero(np.isin(target, sentinels)))[1:]
    spans = {int(span[0]): span[1:] for span in marked}
    restored = [before]
    for piece in pieces:
        if int(piece[0]) not in spans:
            raise UserError(f"sentinel {piece[0]} of the source has no span in the target")
        restored += [spans[int(piece[0])], piece[1:]]
    return np.concatenate(restored)


def infill_spans(
    length: int, random: np.random.Generator, *, rate: float, mean_length: float
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """(starts, lengths) of the spans that BART hides, in the order in which they were drawn.

    Lengths are drawn from Poisson(mean_length), 0 among them, until they cover rate·length tokens,
    rounded; the last one, and no other, is cut to cover exactly as many. Then they are placed: all
    orders of the spans and of the tokens that are kept are equally likely, so that spans may touch
    but never overlap. An empty span lies before the token at its start.
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
    kept_before = slots[order] - np.arange(len(order))
    starts = np.empty_like(lengths)
    starts[order] = kept_before + lengths[order].cumsum() - lengths[order]
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
    inside = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(inside, starts, 1)
    np.add.at(inside, starts + lengths, -1)
    kept = inside.cumsum()[:-1] == 0
    kept_before = np.concatenate([[0], kept.cumsum()])
    return np.insert(tokens[kept], kept_before[starts], mask)


def permute(pieces: list[Tokens], random: np.random.Generator) -> list[Tokens]:
    """The sentences of a text in random order."""
    return [pieces[place] for place in random.permutation(len(pieces))]


def delete(
    tokens: Int[np.ndarray, " t"], random: np.random.Generator, *, rate: float
) -> Int[np.ndarray, " s"]:
    """A text without the tokens that vanish, each with probability `rate`; at least one stays."""
    stays = random.random(len(tokens)) >= rate
    if len(tokens) and not stays.any():
        stays[random.integers(len(tokens))] = True
    return tokens[stays]
