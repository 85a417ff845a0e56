"""Masked language modelling: rows of text in special tokens, and what each step masks.

A row is a window of the stream in its frame, <cls> text <sep>, or for next-sentence prediction
two runs of sentences, <cls> first <sep> second <sep>.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.batching import IGNORE_INDEX, Rows
from manyheads.data.language import EncodedText, Texts, Windows
from manyheads.data.masking import Masked, ReplacedToken, mask_tokens
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer

Positions = Int[np.ndarray, " rows"]  # in the stream

# Random numbers for each purpose come from a sequence of their own. numpy extends a list of
# numbers as a seed with zeros, so neither a purpose nor the last number may be 0.
TEXTS, MASKING, HELD_OUT, CORRUPTION = range(1, 5)


def make_rng(seed: int, purpose: int, number: int) -> np.random.Generator:
    """The generator for one purpose, of a step or of a position in the text."""
    return np.random.default_rng([seed, purpose, number + 1])


@dataclass(frozen=True)
class MaskedBatch:
    """Texts with masked tokens: `positions` of these in the flattened rows, and their `labels`.

    `other` are the labels of next-sentence prediction: 1 if the second text is from elsewhere.
    `size` counts tokens without padding, `count` the predictions that `padded` did not add.
    """

    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"] | None
    positions: Int[Tensor, " n"]
    labels: Int[Tensor, " n"]
    other: Int[Tensor, " b"] | None
    size: int
    count: int | None = None

    @property
    def predictions(self) -> int:
        return len(self.positions) if self.count is None else self.count

    def padded(self, multiple: int) -> "MaskedBatch":
        """The same with a multiple of positions, so that shapes repeat."""
        missing = -len(self.positions) % multiple
        positions = F.pad(self.positions, (0, missing))
        labels = F.pad(self.labels, (0, missing), value=IGNORE_INDEX)
        return replace(self, positions=positions, labels=labels, count=self.predictions)

    def to(self, device: torch.device) -> "MaskedBatch":
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = {n: x.to(device, non_blocking=True) for n, x in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class MaskedRows:
    """Rows of text in their frames, padded: the original `tokens`, and the masked `inputs`."""

    tokens: Int[np.ndarray, "b t"]
    inputs: Int[np.ndarray, "b t"]
    chosen: Bool[np.ndarray, "b t"]  # to be predicted
    lengths: Rows
    segments: Int[np.ndarray, "b t"] | None  # for pairs: 0 in the first text, 1 in the second
    is_next: Bool[np.ndarray, " b"] | None  # for pairs: the second text follows the first

    def batch(self, rows: Rows) -> MaskedBatch:
        """Some of the rows as tensors, without padding that they do not need."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        tokens, chosen = self.tokens[rows, :width], self.chosen[rows, :width]
        real = np.arange(width) < lengths[:, None]
        segments = None if self.segments is None else self.segments[rows, :width]
        other = None if self.is_next is None else (~self.is_next[rows]).astype(np.int64)
        return MaskedBatch(
            torch.from_numpy(self.inputs[rows, :width].astype(np.int64)),
            None if real.all() else torch.from_numpy(real),
            None if segments is None else torch.from_numpy(segments),
            torch.from_numpy(np.flatnonzero(chosen)),
            torch.from_numpy(tokens[chosen].astype(np.int64)),
            None if other is None else torch.from_numpy(other),
            int(lengths.sum()),
        )

    @staticmethod
    def stack(parts: list["MaskedRows"], pad: int) -> "MaskedRows":
        """The rows of all parts, padded to one width."""
        width = max(part.tokens.shape[1] for part in parts)
        stacked: dict[str, Any] = {}
        for name in (field.name for field in fields(MaskedRows)):
            arrays = [getattr(part, name) for part in parts]
            if arrays[0] is not None and arrays[0].ndim == 2:
                filler = pad if name in ("tokens", "inputs") else 0
                missing = [((0, 0), (0, width - x.shape[1])) for x in arrays]
                pairs = zip(arrays, missing, strict=True)
                arrays = [np.pad(x, edges, constant_values=filler) for x, edges in pairs]
            stacked[name] = None if arrays[0] is None else np.concatenate(arrays)
        return MaskedRows(**stacked)


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
    from another document. A line without a word belongs to the sentence before it.
    """

    def __init__(
        self, text: EncodedText, texts: Texts, *, room: int, short: Literal["refuse", "skip"]
    ) -> None:
        if room < 2:
            raise UserError(f"two sentences do not fit into {room} tokens: raise model.max_length")
        self.room = room
        counts = [len(document.sentences) for document in texts.documents]
        document = np.repeat(np.arange(len(counts)), counts)
        has_words = [bool(s.strip()) for d in texts.documents for s in d.sentences]
        usable = np.array(has_words) & (np.diff(text.sentence_starts) > 0)
        sizes = np.bincount(document[usable], minlength=len(counts))
        _check_documents(texts, sizes, short)
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
        # Each may use half of the room; beyond it, the first has what the second leaves.
        half = self.room - self.room // 2
        first_size = np.minimum(first.size, np.maximum(self.room - second.size, half))
        second_size = np.minimum(second.size, self.room - first_size)
        first = Run(first.start, first.start + first_size)
        return first, Run(second.start, second.start + second_size), is_next

    def _run_stop(self, sentence: Positions, room: Positions, least: int) -> Positions:
        """The sentence after the longest run from each that fits the room and its document."""
        fits = np.searchsorted(self._stops, self._starts[sentence] + room, "right")
        return np.clip(fits, sentence + least, self._last[sentence] + 1)

    def _elsewhere(self, sentence: Positions, random: np.random.Generator) -> Positions:
        """For each a sentence of another document, all equally likely."""
        first, size = self._first[sentence], self._last[sentence] - self._first[sentence] + 1
        index = random.integers(0, len(self._starts) - size)
        return np.where(index < first, index, index + size)


def _check_documents(
    texts: Texts, sizes: Int[np.ndarray, " d"], short: Literal["refuse", "skip"]
) -> None:
    """Refuse documents too short for next-sentence prediction, and fewer than two others."""
    too_short = np.flatnonzero(sizes < 2)
    if len(sizes) > 1 and len(too_short) and short == "refuse":
        document, count = texts.documents[too_short[0]], "one" if sizes[too_short[0]] else "no"
        raise DataError(
            f"{document.file}:{document.line}: this document has {count} sentence, and "
            "next-sentence prediction needs two; join it to another, or set data.short=skip"
        )
    if len(sizes) - len(too_short) < 2:
        raise DataError(
            f"{texts.name}: next-sentence prediction needs two documents of two sentences or more, "
            f"and there are {len(sizes) - len(too_short)} ({sizes.sum()} sentences in all): use "
            "data.lines=sentences with an empty line between documents, or objective.pairs=none"
        )


class MaskedText:
    """A text from which masked rows are drawn: windows, or pairs of sentences."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        objective: Masked | ReplacedToken,
        *,
        max_length: int,
        short: Literal["refuse", "skip"] = "refuse",
    ) -> None:
        self.objective, self.tokenizer = objective, tokenizer
        self.ordinary = np.asarray(tokenizer.ordinary)
        self.before, self.after = tokenizer.frame()
        self.text = EncodedText(texts, tokenizer, ends=False, words=objective.unit == "words")
        pairs = isinstance(objective, Masked) and objective.pairs == "next-sentence"
        self.room = max_length - len(self.before) - len(self.after) * (2 if pairs else 1)
        if self.room < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        self.pairs = SentencePairs(self.text, texts, room=self.room, short=short) if pairs else None

    def rows(
        self, starts: Rows, pairing: np.random.Generator, masking: np.random.Generator
    ) -> MaskedRows:
        """Masked windows at `starts`; for next-sentence prediction as many drawn pairs instead."""
        if self.pairs is None:
            return self._mask([Run(starts, starts + self.room)], None, masking)
        first, second, is_next = self.pairs.draw(len(starts), pairing)
        return self._mask([first, second], is_next, masking)

    def _mask(
        self, runs: list[Run], is_next: Bool[np.ndarray, " b"] | None, random: np.random.Generator
    ) -> MaskedRows:
        """Runs of the stream in one frame, with masked tokens."""
        after = len(self.after)
        lengths = len(self.before) + np.sum([run.size + after for run in runs], axis=0)
        columns = np.arange(lengths.max())
        shape = len(lengths), len(columns)
        tokens = np.full(shape, self.tokenizer.pad, dtype=np.int64)
        tokens[:, : len(self.before)] = self.before
        source, segments = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        is_text = np.zeros(shape, dtype=bool)
        begin = np.full((len(lengths), 1), len(self.before))
        for number, run in enumerate(runs):
            end = begin + run.size[:, None]
            inside = (columns >= begin) & (columns < end)
            source = np.where(inside, run.start[:, None] + columns - begin, source)
            segments[(columns >= begin) & (columns < end + after)] = number
            is_text |= inside
            for index, token in enumerate(self.after):
                np.put_along_axis(tokens, end + index, token, axis=1)
            begin = end + after
        tokens = np.where(is_text, self.text.flat[source], tokens)
        word_starts = self.text.word_starts
        # ELECTRA's generator fills in masks only.
        objective, fractions = self.objective, (1.0, 0.0)
        if isinstance(objective, Masked):
            fractions = (objective.mask_fraction, objective.random_fraction)
        inputs, chosen = mask_tokens(
            tokens,
            is_text,
            random,
            rate=objective.rate,
            mask_fraction=fractions[0],
            random_fraction=fractions[1],
            mask=self.tokenizer.mask,
            ordinary=self.ordinary,
            word_starts=None if word_starts is None else word_starts[source],
        )
        paired = None if is_next is None else segments
        return MaskedRows(tokens, inputs, chosen, lengths, paired, is_next)


class MaskedOrder:
    """The rows of a step and their masks, a pure function of (seed, step).

    With static masking both depend only on the position in the text, so that every epoch masks
    the same tokens; with dynamic masking each step draws again.
    """

    def __init__(self, text: MaskedText, rows: int, seed: int, name: str) -> None:
        self.text, self.rows, self.seed = text, rows, seed
        self.static = text.objective.masking == "static"
        tokens = len(text.text.flat)
        self.windows = Windows(tokens, text.room, rows, seed, moving=not self.static, name=name)
        self.per_epoch = -(-self.windows.per_epoch // rows)

    def at(self, step: int) -> MaskedRows:
        starts = self.windows.starts(step)
        if not self.static:
            return self._draw(starts, step)
        rows = [self._draw(np.array([start]), int(start)) for start in starts]
        return MaskedRows.stack(rows, self.text.tokenizer.pad)

    def _draw(self, starts: Rows, number: int) -> MaskedRows:
        pairing, masking = (make_rng(self.seed, use, number) for use in (TEXTS, MASKING))
        return self.text.rows(starts, pairing, masking)
