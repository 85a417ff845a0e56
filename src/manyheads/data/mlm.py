"""Masked language modelling: framed rows, pairs of sentences, and what each step masks."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.batching import IGNORE_INDEX, Rows
from manyheads.data.language import EncodedText, Texts, Windows, gather
from manyheads.data.masking import Masked, Replaced, hide
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer

Where = Int[np.ndarray, " rows"]

# What random numbers are drawn for: each use has a sequence of its own. A list of numbers as a seed
# goes on with zeros for ever, so that neither a use nor the last number may be 0.
TEXTS, HIDING, HELD_OUT, BREAKING = range(1, 5)


def drawing(seed: int, purpose: int, number: int) -> np.random.Generator:
    """The random numbers for one use, of a step or of a place in the text."""
    return np.random.default_rng([seed, purpose, number + 1])


@dataclass(frozen=True)
class MaskedBatch:
    """Texts with some tokens hidden: where (`places` in the flattened rows), and what was there.

    `other` says of pairs whether the second text comes from elsewhere. `count` is how many places
    there are, where `padded` has added some that want nothing.
    """

    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"] | None
    places: Int[Tensor, " n"]
    wanted: Int[Tensor, " n"]
    other: Int[Tensor, " b"] | None
    size: int
    count: int | None = None

    @property
    def predictions(self) -> int:
        return len(self.places) if self.count is None else self.count

    def padded(self, multiple: int) -> "MaskedBatch":
        """The same with a multiple of places: batches of few shapes."""
        missing = -len(self.places) % multiple
        places = F.pad(self.places, (0, missing))
        wanted = F.pad(self.wanted, (0, missing), value=IGNORE_INDEX)
        return replace(self, places=places, wanted=wanted, count=self.predictions)

    def to(self, device: torch.device) -> "MaskedBatch":
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = {n: x.to(device, non_blocking=True) for n, x in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class Framed:
    """Rows of text with their special tokens; `text` is where something may be hidden."""

    tokens: Int[np.ndarray, "b t"]
    text: Bool[np.ndarray, "b t"]
    starts: Bool[np.ndarray, "b t"] | None  # of words
    segments: Int[np.ndarray, "b t"] | None = None
    lengths: Rows | None = None
    follows: Bool[np.ndarray, " b"] | None = None

    def hidden(self, inputs: np.ndarray, places: np.ndarray, rows: Rows) -> MaskedBatch:
        """Some of the rows as a batch, once it is drawn what is hidden."""
        lengths = None if self.lengths is None else self.lengths[rows]
        width = self.tokens.shape[1] if lengths is None else int(lengths.max())
        own, inputs = self.tokens[rows, :width], inputs[rows, :width]
        where = np.flatnonzero(places[rows, :width])
        real = None if lengths is None else np.arange(width) < lengths[:, None]
        segments = None if self.segments is None else self.segments[rows, :width]
        other = None if self.follows is None else (~self.follows[rows]).astype(np.int64)
        return MaskedBatch(
            torch.from_numpy(inputs.astype(np.int64)),
            None if real is None or real.all() else torch.from_numpy(real),
            None if segments is None else torch.from_numpy(segments.astype(np.int64)),
            torch.from_numpy(where),
            torch.from_numpy(own.reshape(-1)[where].astype(np.int64)),
            None if other is None else torch.from_numpy(other),
            int(width * len(rows) if lengths is None else lengths.sum()),
        )


@dataclass(frozen=True)
class Drawn:
    """Pairs of stretches, as positions in the stream, and whether the second follows the first."""

    first_start: Where
    first_stop: Where
    second_start: Where
    second_stop: Where
    follows: Bool[np.ndarray, " rows"]


class SentencePairs:
    """Next-sentence prediction (Devlin et al. 2019): two runs of sentences in `room` tokens.

    A run of sentences is cut in two somewhere inside; with probability ½ the second part is
    replaced by a run from another document. A line without a word belongs to the sentence before.
    """

    def __init__(
        self, text: EncodedText, texts: Texts, *, room: int, short: Literal["refuse", "skip"]
    ) -> None:
        if room < 2:
            raise UserError(f"two sentences do not fit into {room} tokens: raise model.max_length")
        self.room = room
        counts = [len(document.sentences) for document in texts.documents]
        home = np.repeat(np.arange(len(counts)), counts)
        words = [bool(s.strip()) for document in texts.documents for s in document.sentences]
        kept = np.array(words) & (np.diff(text.sentence_starts) > 0)
        sizes = np.bincount(home[kept], minlength=len(counts))
        _check_documents(texts, sizes, short)
        kept &= sizes[home] > 1
        home = home[kept]
        self._starts = text.sentence_starts[:-1][kept]
        # Sentences by number, and the first and last of the document of each.
        self._first = np.searchsorted(home, home, "left")
        self._last = np.searchsorted(home, home, "right") - 1
        numbers = np.arange(len(home))
        following = np.append(self._starts[1:], text.document_starts[-1])
        at_end = numbers == self._last
        self._stops = np.where(at_end, text.document_starts[home + 1], following)
        self._anchors = numbers[~at_end]

    def draw(self, rows: int, random: np.random.Generator) -> Drawn:
        """Pairs from anywhere in the text; where two exceed the room, the longer is cut first."""
        anchor = random.choice(self._anchors, rows)
        stop = self._run(anchor, np.full(rows, self.room), least=2)
        second = random.integers(anchor + 1, stop)
        follows = random.random(rows) < 0.5
        first_start, first_stop = self._starts[anchor], self._stops[second - 1]
        first_size = first_stop - first_start
        other = self._elsewhere(anchor, random)
        other_stop = self._run(other, self.room - first_size, least=1)
        second_start = self._starts[np.where(follows, second, other)]
        second_stop = self._stops[np.where(follows, stop, other_stop) - 1]
        second_size = second_stop - second_start
        # Half of the room is anybody's; beyond it, the first has what the second leaves.
        half = self.room - self.room // 2
        first_size = np.minimum(first_size, np.maximum(self.room - second_size, half))
        second_size = np.minimum(second_size, self.room - first_size)
        return Drawn(
            first_start,
            first_start + first_size,
            second_start,
            second_start + second_size,
            follows,
        )

    def _run(self, sentence: Where, room: Where, least: int) -> Where:
        """The sentence after the longest run from each that fits the room and its document."""
        fits = np.searchsorted(self._stops, self._starts[sentence] + room, "right")
        return np.clip(fits, sentence + least, self._last[sentence] + 1)

    def _elsewhere(self, sentence: Where, random: np.random.Generator) -> Where:
        """For each a sentence of another document, every one of them as likely."""
        first, size = self._first[sentence], self._last[sentence] - self._first[sentence] + 1
        drawn = random.integers(0, len(self._starts) - size)
        return np.where(drawn < first, drawn, drawn + size)


def _check_documents(
    texts: Texts, sizes: Int[np.ndarray, " d"], short: Literal["refuse", "skip"]
) -> None:
    """Refuse documents too short for next-sentence prediction, and fewer than two others."""
    alone = np.flatnonzero(sizes < 2)
    if len(sizes) > 1 and len(alone) and short == "refuse":
        document, count = texts.documents[alone[0]], "one" if sizes[alone[0]] else "no"
        raise DataError(
            f"{document.file}:{document.line}: the document that begins here has {count} sentence, "
            "and next-sentence prediction needs two; join it to another, or leave such out with "
            "data.short=skip"
        )
    if len(sizes) - len(alone) < 2:
        raise DataError(
            f"{texts.name}: next-sentence prediction needs two documents of two sentences or more, "
            f"and there are {len(sizes) - len(alone)} ({sizes.sum()} sentences in all): give one "
            "sentence a line and an empty line between documents, with data.lines=sentences, or go "
            "without it, objective.pairs=none"
        )


class MaskedText:
    """A text from which rows with something hidden are drawn: stretches, or pairs of sentences."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        objective: Masked | Replaced,
        *,
        max_length: int,
        short: Literal["refuse", "skip"] = "refuse",
    ) -> None:
        self.objective, self.tokenizer = objective, tokenizer
        self.mask, self.ordinary = tokenizer.mask, np.asarray(tokenizer.ordinary)
        self.before, self.after = tokenizer.frame()
        self.text = EncodedText(texts, tokenizer, ends=False, words=objective.unit == "words")
        pairs = isinstance(objective, Masked) and objective.pairs == "next-sentence"
        self.room = max_length - len(self.before) - len(self.after) * (2 if pairs else 1)
        if self.room < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        self.pairs = SentencePairs(self.text, texts, room=self.room, short=short) if pairs else None

    def stretches(self, starts: Rows) -> Framed:
        """Stretches of the text, each in its frame."""
        rows = gather(self.text.flat, starts, self.room)
        edges = ((0, 0), (len(self.before), len(self.after)))
        tokens = np.pad(rows, edges)
        tokens[:, : len(self.before)] = self.before
        tokens[:, tokens.shape[1] - len(self.after) :] = self.after
        text = np.pad(np.ones_like(rows, dtype=bool), edges)
        starts_of_words = None
        if self.text.word_starts is not None:
            where = starts[:, None] + np.arange(self.room)
            starts_of_words = np.pad(self.text.word_starts[where], edges)
        return Framed(tokens, text, starts_of_words)

    def drawn_pairs(self, rows: int, random: np.random.Generator) -> Framed:
        """Two runs of sentences in a frame, of which the second follows the first or does not."""
        assert self.pairs is not None
        drawn = self.pairs.draw(rows, random)
        first, second = (
            np.stack([drawn.first_start, drawn.first_stop]),
            np.stack([drawn.second_start, drawn.second_stop]),
        )
        before, after = len(self.before), len(self.after)
        lengths = np.diff(first, axis=0)[0], np.diff(second, axis=0)[0]
        columns = np.arange(int((lengths[0] + lengths[1]).max()) + before + 2 * after)[None]
        # Where each text begins in its row, and where the whole ends.
        one = np.full((rows, 1), before)
        two = one + lengths[0][:, None] + after
        end = two + lengths[1][:, None] + after
        in_first = (columns >= one) & (columns < two - after)
        in_second = (columns >= two) & (columns < end - after)
        source = np.where(in_first, first[0][:, None] + columns - one, 0)
        source = np.where(in_second, second[0][:, None] + columns - two, source)
        text = in_first | in_second
        tokens = np.where(text, self.text.flat[source], self.tokenizer.pad)
        for place, token in enumerate(self.before):
            tokens[:, place] = token
        for begin in (two - after, end - after):
            for place, token in enumerate(self.after):
                np.put_along_axis(tokens, begin + place, token, axis=1)
        starts = None if self.text.word_starts is None else text & self.text.word_starts[source]
        segments = ((columns >= two) & (columns < end)).astype(np.int64)
        return Framed(tokens, text, starts, segments, end[:, 0], drawn.follows)

    def hide(self, framed: Framed, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """What the model is to read, and where something was hidden."""
        wanted = self.objective
        # ELECTRA's generator fills masks alone.
        shares = (1.0, 0.0)
        if isinstance(wanted, Masked):
            shares = (wanted.mask_share, wanted.random_share)
        return hide(
            framed.tokens,
            framed.text,
            random,
            rate=wanted.rate,
            mask_share=shares[0],
            random_share=shares[1],
            mask=self.mask,
            ordinary=self.ordinary,
            starts=framed.starts,
        )


class MaskedOrder:
    """Which rows a step has and what is hidden in them: a pure function of (seed, step).

    With static masking both depend on the place of the text alone, so that every epoch hides the
    same; with dynamic masking each step draws anew.
    """

    def __init__(self, text: MaskedText, rows: int, seed: int, name: str) -> None:
        self.text, self.rows, self.seed = text, rows, seed
        self.static = text.objective.masking == "static"
        tokens = len(text.text.flat)
        self.windows = Windows(tokens, text.room, rows, seed, moving=not self.static, name=name)
        self.per_epoch = -(-self.windows.per_epoch // rows)

    def at(self, step: int) -> tuple[Framed, np.ndarray, np.ndarray]:
        """The rows of a step, what is read of them, and where something is hidden."""
        if not self.static:
            framed = (
                self.text.stretches(self.windows.starts(step))
                if self.text.pairs is None
                else self.text.drawn_pairs(self.rows, self._random(TEXTS, step))
            )
            return framed, *self.text.hide(framed, self._random(HIDING, step))
        starts = self.windows.starts(step)
        return _joined([self._still(int(start)) for start in starts], self.text.tokenizer.pad)

    def _still(self, start: int) -> tuple[Framed, np.ndarray, np.ndarray]:
        """A row that is the same whenever it comes."""
        if self.text.pairs is None:
            framed = self.text.stretches(np.array([start]))
        else:
            framed = self.text.drawn_pairs(1, self._random(TEXTS, start))
        return framed, *self.text.hide(framed, self._random(HIDING, start))

    def _random(self, purpose: int, number: int) -> np.random.Generator:
        return drawing(self.seed, purpose, number)


def _joined(
    rows: list[tuple[Framed, np.ndarray, np.ndarray]], pad: int
) -> tuple[Framed, np.ndarray, np.ndarray]:
    """Single rows as one rectangle."""
    width = max(framed.tokens.shape[1] for framed, _, _ in rows)

    def joined(parts: list[np.ndarray], filler: int) -> np.ndarray:
        return np.concatenate(
            [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=filler) for p in parts]
        )

    framed = [one for one, _, _ in rows]
    paired = framed[0].segments is not None
    whole = Framed(
        joined([one.tokens for one in framed], pad),
        joined([one.text for one in framed], 0),
        None,  # what is hidden is drawn already
        joined([np.asarray(one.segments) for one in framed], 0) if paired else None,
        np.concatenate([np.asarray(one.lengths) for one in framed]) if paired else None,
        np.concatenate([np.asarray(one.follows) for one in framed]) if paired else None,
    )
    return whole, joined([i for _, i, _ in rows], pad), joined([p for _, _, p in rows], 0)
