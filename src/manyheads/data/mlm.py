"""Masked language modelling: rows of text in special tokens, and what each step masks.

A row is a window of the stream in its frame, <cls> text <sep>, or for next-sentence prediction
two runs of sentences, <cls> first <sep> second <sep>.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from manyheads.data.batching import IGNORE_INDEX, Rows, map_tensors
from manyheads.data.language import EncodedText, Texts, room_for_text
from manyheads.data.masking import (
    MASKING,
    TEXTS,
    Masked,
    ReplacedToken,
    Rng,
    Tokens,
    mask_tokens,
)
from manyheads.errors import DataError
from manyheads.tokenizer.tokenizer import Tokenizer

Positions = Int[np.ndarray, " rows"]  # in the stream


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
        return map_tensors(self, lambda x: x.to(device, non_blocking=True))


@dataclass(frozen=True)
class MaskedRow:
    """A text in its special tokens: the original `tokens`, and the masked `inputs`."""

    tokens: Tokens
    inputs: Tokens
    chosen: Bool[np.ndarray, " _"]  # to be predicted
    segments: Tokens  # 0 in the first text, 1 in the second
    is_next: bool | None  # for pairs: the second text follows the first


class Run(NamedTuple):
    """Consecutive tokens of the stream in each row."""

    start: Positions
    stop: Positions

    @property
    def size(self) -> Positions:
        return self.stop - self.start

    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each row."""
        return list(zip(self.start.tolist(), self.stop.tolist(), strict=True))


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


class MaskedText:
    """A text from which masked rows are drawn: windows, or pairs of sentences."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        objective: Masked | ReplacedToken,
        *,
        max_length: int,
    ) -> None:
        self.objective, self.tokenizer, self.max_length = objective, tokenizer, max_length
        self.before, self.after = tokenizer.frame()
        self.text = EncodedText(texts, tokenizer, ends=False)
        pairs = isinstance(objective, Masked) and objective.pairs == "next-sentence"
        special_tokens = len(self.before) + len(self.after) * (2 if pairs else 1)
        self.length = room_for_text(max_length, special_tokens)
        self.pairs = SentencePairs(self.text, texts, room=self.length) if pairs else None

    def rows(self, starts: Rows, rng: Rng) -> list[MaskedRow]:
        """Masked windows at `starts`; for next-sentence prediction as many drawn pairs instead."""
        runs: list[Run] = [Run(starts, starts + self.length)]
        is_next: list[bool | None] = [None] * len(starts)
        if self.pairs is not None:
            first, second, follows = self.pairs.draw(len(starts), rng(TEXTS))
            runs, is_next = [first, second], follows.tolist()
        framed = [self._frame(*spans) for spans in zip(*(run.spans() for run in runs), strict=True)]
        tokens, is_text, segments = zip(*framed, strict=True)
        # ELECTRA's generator fills in masks only.
        objective, fractions = self.objective, (1.0, 0.0)
        if isinstance(objective, Masked):
            fractions = (objective.mask_fraction, objective.random_fraction)
        inputs, chosen = mask_tokens(
            _pad(tokens, self.tokenizer.pad).numpy(),
            _pad(is_text, False).numpy(),
            rng(MASKING),
            rate=objective.rate,
            mask_fraction=fractions[0],
            random_fraction=fractions[1],
            mask=self.tokenizer.mask,
            ordinary=self.tokenizer.ordinary,
        )
        return [
            MaskedRow(ids, inputs[n, : len(ids)], chosen[n, : len(ids)], segments[n], is_next[n])
            for n, ids in enumerate(tokens)
        ]

    def _frame(self, *spans: tuple[int, int]) -> tuple[Tokens, Bool[np.ndarray, " _"], Tokens]:
        """One or two spans of the stream in special tokens: ids, which are text, segments."""
        count = len(self.before)
        tokens, is_text, segments = [*self.before], [False] * count, [0] * count
        for segment, (start, stop) in enumerate(spans):
            tokens += [*self.text.flat[start:stop].tolist(), *self.after]
            is_text += [True] * (stop - start) + [False] * len(self.after)
            segments += [segment] * (stop - start + len(self.after))
        return np.array(tokens), np.array(is_text), np.array(segments)

    def batch(self, rows: Sequence[MaskedRow]) -> MaskedBatch:
        """Rows padded to the longest."""
        pad = self.tokenizer.pad
        tokens, inputs = (
            _pad([getattr(row, name) for row in rows], pad) for name in ("tokens", "inputs")
        )
        chosen = _pad([row.chosen for row in rows], False)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        return MaskedBatch(
            inputs,
            None if bool(real.all()) else real,
            _pad([row.segments for row in rows], 0) if self.pairs else None,
            chosen.flatten().nonzero()[:, 0],
            tokens[chosen],
            torch.tensor([int(not row.is_next) for row in rows]) if self.pairs else None,
            int(lengths.sum()),
        )


def _pad(rows: Sequence[np.ndarray], value: int | bool) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], True, value)
