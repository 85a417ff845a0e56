"""Pairs of runs of sentences, of which the second follows the first or comes from elsewhere."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from manyheads.data.language import EncodedText, Texts
from manyheads.errors import DataError, UserError

Where = Int[np.ndarray, " rows"]


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
            raise UserError(
                f"a pair of sentences does not fit into {room} tokens: raise model.max_length"
            )
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
