"""What an encoder says of lines of text: vectors, words for masks, labels.

A line with a tab in it is a pair of texts. Lines are read in batches of similar length, and one
that is longer than the model is cut.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.data.batching import Ragged, Rows, in_order_of_length
from manyheads.errors import UserError
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq, EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.heads import EncoderHead, Masked, Tag, mean_of
from manyheads.nn.shapes import Hidden
from manyheads.tokenizer.tokenizer import CONTINUATION, Tokenizer

BATCH_TOKENS = 512  # on a CPU, where states that leave its caches cost more than calls
GPU_BATCH_TOKENS = 16384
MASKS = ("[MASK]", "<mask>")  # whatever the model calls its own
Pool = Literal["mean", "cls", "tokens"]
Vectors = Float[np.ndarray, "lines *n"]
Answers = Float[Tensor, "b *n"]


@dataclass(frozen=True)
class Guess:
    """A word for a mask, and how likely it is."""

    word: str
    probability: float


@dataclass(frozen=True)
class HeadOutput:
    """Of a text or one of its tokens: the label, and the probability of every label.

    A head with one label gives a number; the label is its name then.
    """

    label: str
    scores: dict[str, float]
    piece: str = ""


@dataclass(frozen=True)
class _Batch:
    rows: Rows
    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"]


class TextEncoder:
    """A model that reads, with its tokenizer: ours, or a graph with the same face.

    The tokenizer puts texts into the frame that the model was trained with. Where there is none,
    a text without any token is the token `empty`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        segments: int = 1,
        empty: int | None = None,
        head: EncoderHead | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.tokenizer, self.head = model, tokenizer, head
        self.max_length, self.segments, self.empty = max_length, segments, empty
        self.device = torch.device(device)

    @torch.inference_mode()
    def embed(
        self,
        lines: Sequence[str],
        pool: Pool = "mean",
        advance: Callable[[int], None] = lambda done: None,
    ) -> Vectors:
        """One vector a line (the mean of its tokens' or the first one's), or those of all tokens.

        Token vectors are lines × longest × width, with NaN behind the end of a shorter line.
        """
        found: list[Any] = [None] * len(lines)
        done = 0
        for batch in self._batches(lines):
            hidden = self._states(batch).float()
            if pool == "mean":
                vectors = mean_of(hidden, batch.real)
            else:
                vectors = hidden[:, 0] if pool == "cls" else _blank(hidden, batch.real)
            for row, vector in zip(batch.rows.tolist(), vectors.cpu().numpy(), strict=True):
                found[row] = vector
            done += len(batch.rows)
            advance(done)
        return _stacked(found) if pool == "tokens" else np.stack(found)

    def _states(self, batch: _Batch) -> Hidden:
        """What the model has at each position when it has read a text."""
        if isinstance(self.model, Gpt | DecoderOnlySeq2Seq):
            return self.model.hidden(batch.tokens, batch.real)
        if isinstance(self.model, EncoderDecoder):
            # A source may be unfolded to more places than it has tokens.
            return self.model.encode(batch.tokens, batch.real).states[:, : batch.tokens.shape[1]]
        return self.model.hidden(batch.tokens, batch.real, batch.segments)

    @torch.inference_mode()
    def fill(self, lines: Sequence[str], top: int = 1, first: int = 1) -> list[list[list[Guess]]]:
        """For each mask of each line its likeliest words, best first; `first` numbers the lines."""
        if not isinstance(self.head, Masked):
            raise UserError("this model has no head for masked words: use a masked language model")
        mask = self.tokenizer.mask
        own = str(self.tokenizer.content(mask))
        spelled = self._spelled
        found: list[list[list[Guess]]] = [[] for _ in lines]
        masked = [row for row, line in enumerate(lines) if spelled.search(line)]
        texts = [own.join(spelled.split(lines[row])) for row in masked]
        for batch in self._batches(texts, specials=True):
            places = batch.tokens == mask
            hidden = self._states(batch)[places]
            if not len(hidden):  # each beyond what is read
                continue
            guesses = iter(self.model.head_output(hidden[None])[0])
            for row, count in zip(batch.rows.tolist(), places.sum(1).tolist(), strict=True):
                found[masked[row]] = [self._guesses(next(guesses), top) for _ in range(count)]
        for number, (line, words) in enumerate(zip(lines, found, strict=True), start=first):
            if len(words) != len(spelled.findall(line)):
                raise UserError(
                    f"line {number} has a mask beyond the {self.max_length} tokens that the "
                    "model reads: shorten it"
                )
        return found

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """A mask as a person may write it: in the usual ways, or as the tokenizer has it."""
        own = self.tokenizer.content(self.tokenizer.mask)
        return re.compile("|".join(map(re.escape, (*MASKS, str(own)))), re.IGNORECASE)

    def _guesses(self, logits: Float[Tensor, " v"], top: int) -> list[Guess]:
        chances, tokens = logits.float().softmax(-1).topk(min(top, len(logits)))
        words = self.tokenizer.pieces(tokens.tolist())
        return [Guess(word, float(chance)) for word, chance in zip(words, chances, strict=True)]

    def filled(self, line: str, guesses: list[list[Guess]]) -> str:
        """A line with the best word for each of its masks."""
        text, *others = self._spelled.split(line)
        for words, after in zip(guesses, others, strict=True):
            text = self._with(text, words[0].word) + after
        return text

    def _with(self, text: str, word: str) -> str:
        """A text and the word after it, with the spaces that the word was read with."""
        glued = word.startswith(CONTINUATION)
        if word.startswith(" "):
            apart = text and not text.endswith(" ")
            return text + (word if apart else word.lstrip(" "))
        if glued or (self.tokenizer.takes_space(self.tokenizer.mask) and text.strip()):
            text = text.rstrip(" ")
        return text + word.removeprefix(CONTINUATION)

    @property
    def tags(self) -> bool:
        """Whether labels are of tokens."""
        return isinstance(self.head, Tag)

    @property
    def labels(self) -> tuple[str, ...]:
        """What it may answer; a single one is the name of a number."""
        labels: tuple[str, ...] | None = getattr(self.head, "labels", None)
        if labels is None:
            raise UserError("this model has no head for labels: use a classifier or a tagger")
        return labels

    @torch.inference_mode()
    def classify(self, lines: Sequence[str]) -> list[list[HeadOutput]]:
        """The label of each line; where the head tags tokens, one for each token of the text."""
        labels = self.labels
        found: list[list[HeadOutput]] = [[] for _ in lines]
        before, after = self.tokenizer.frame()
        around = torch.tensor([*before, *after], device=self.device)
        for batch in self._batches(lines):
            answers = self._answers(batch).float()
            for place, row in enumerate(batch.rows.tolist()):
                if answers.ndim == 2:
                    found[row] = [_answer(answers[place], labels)]
                    continue
                real = True if batch.real is None else batch.real[place]
                read = batch.tokens[place]
                text = torch.isin(read, around, invert=True) & real
                pieces = self.tokenizer.pieces(read[text].tolist())
                found[row] = [
                    _answer(logits, labels, piece.strip())
                    for logits, piece in zip(answers[place][text], pieces, strict=True)
                ]
        return found

    def _answers(self, batch: _Batch) -> Answers:
        return self.model(batch.tokens, batch.real, batch.segments)

    def _batches(self, lines: Sequence[str], *, specials: bool = False) -> Iterator[_Batch]:
        """Batches sorted by length; where nothing is padded, nothing has to be masked."""
        texts = [_text(line) for line in lines]
        framed = self.tokenizer.framed(texts, self.max_length, specials=specials)
        if self.empty is not None:
            framed = [one if one[0] else ([self.empty], [0]) for one in framed]
        elif not all(ids for ids, _ in framed):
            raise UserError("there is nothing to read in an empty line: leave it out")
        tokens = Ragged.of([ids for ids, _ in framed])
        segments = Ragged.of([parts for _, parts in framed])
        budget = BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS
        for rows in in_order_of_length(tokens.lengths, budget):
            ids, real = tokens.padded(rows, 0)
            parts, _ = segments.padded(rows, 0)
            # Some tokenizers count texts for models that do not.
            parts = parts.clamp(max=self.segments - 1)
            masked = None if bool(real.all()) else real.to(self.device)
            yield _Batch(rows, ids.to(self.device), masked, parts.to(self.device))


def segments_of(config: Any) -> int:
    """How many texts the model tells apart by segment embeddings."""
    embed = getattr(config, "embed", None)
    return 1 if embed is None else embed.segments or 1


def _text(line: str) -> str | tuple[str, str]:
    one, tab, two = line.partition("\t")
    return (one, two) if tab else line


def _blank(hidden: Hidden, real: Bool[Tensor, "b t"] | None) -> Hidden:
    return hidden if real is None else hidden.masked_fill(~real[..., None], torch.nan)


def _stacked(found: list[np.ndarray]) -> np.ndarray:
    longest = max(len(vectors) for vectors in found)
    whole = np.full((len(found), longest, found[0].shape[1]), np.nan, dtype=np.float32)
    for row, vectors in enumerate(found):
        whole[row, : len(vectors)] = vectors
    return whole


def _answer(logits: Float[Tensor, " labels"], labels: Sequence[str], piece: str = "") -> HeadOutput:
    if len(labels) == 1:
        return HeadOutput(labels[0], {labels[0]: float(logits[0])}, piece)
    chances = logits.softmax(-1).tolist()
    best = max(range(len(chances)), key=chances.__getitem__)
    return HeadOutput(labels[best], dict(zip(labels, chances, strict=True)), piece)
