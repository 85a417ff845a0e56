"""Encoders of text: vectors, words for masks, labels.

A line with a tab is a pair of texts. Lines are encoded in batches of similar length; one that is
longer than the model is truncated.
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

from manyheads.baselines.rnn import LanguageModel
from manyheads.data.batching import Ragged, Rows, batches_by_length
from manyheads.errors import UserError
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq, EncoderDecoder
from manyheads.models.heads import EncoderHead, Masked, Tag, mean_of
from manyheads.nn.shapes import Hidden
from manyheads.tokenizer.tokenizer import CONTINUATION, Tokenizer

BATCH_TOKENS = 512  # on a CPU: larger batches do not fit its caches
GPU_BATCH_TOKENS = 16384
MASKS = ("[MASK]", "<mask>")  # accepted in addition to the tokenizer's own
Pool = Literal["mean", "cls", "tokens"]
Vectors = Float[np.ndarray, "lines *n"]


@dataclass(frozen=True)
class Guess:
    """A word for a mask, and its probability."""

    word: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The label of a text or of one of its subwords, and the probability of every label.

    A regression head has one label, the name of its number, which `scores` holds.
    """

    label: str
    scores: dict[str, float]
    piece: str = ""


@dataclass(frozen=True)
class _Batch:
    rows: Rows
    tokens: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"]


class TextEncoder:
    """A model that encodes text, with its tokenizer.

    The tokenizer adds the special tokens that the model was trained with. If it adds none, an
    empty text is the token `empty`.
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
        """One vector a line (the mean of its tokens, or the first), or a vector a token.

        Token vectors are [lines, longest, dim], with NaN after the end of a shorter line.
        """
        vectors: list[Any] = [None] * len(lines)
        done = 0
        for batch in self._batches(lines):
            hidden = self._encode(batch).float()
            if pool == "mean":
                hidden = mean_of(hidden, batch.mask)
            elif pool == "cls":
                hidden = hidden[:, 0]
            elif batch.mask is not None:
                hidden = hidden.masked_fill(~batch.mask[..., None], torch.nan)
            for row, vector in zip(batch.rows.tolist(), hidden.cpu().numpy(), strict=True):
                vectors[row] = vector
            done += len(batch.rows)
            advance(done)
        if pool == "tokens":
            longest = max(map(len, vectors))
            vectors = [
                np.pad(vector, ((0, longest - len(vector)), (0, 0)), constant_values=np.nan)
                for vector in vectors
            ]
        return np.stack(vectors)

    def _encode(self, batch: _Batch) -> Hidden:
        """The hidden states of the last layer."""
        if isinstance(self.model, LanguageModel | DecoderOnlySeq2Seq):
            return self.model.hidden(batch.tokens, batch.mask)
        if isinstance(self.model, EncoderDecoder):
            # ByteNet's encoder may give more positions than there are tokens.
            return self.model.encode(batch.tokens, batch.mask).states[:, : batch.tokens.shape[1]]
        return self.model.hidden(batch.tokens, batch.mask, batch.segments)

    @torch.inference_mode()
    def fill(self, lines: Sequence[str], top: int = 1, first: int = 1) -> list[list[list[Guess]]]:
        """For each mask of each line its most probable words; `first` numbers the lines."""
        if not isinstance(self.head, Masked):
            raise UserError("this model has no head for masked words: use a masked language model")
        mask = self.tokenizer.mask
        masked = [row for row, line in enumerate(lines) if self._any_mask.search(line)]
        texts = [
            str(self.tokenizer.content(mask)).join(self._any_mask.split(lines[row]))
            for row in masked
        ]
        results: list[list[list[Guess]]] = [[] for _ in lines]
        for batch in self._batches(texts, specials=True):
            is_mask = batch.tokens == mask
            hidden = self._encode(batch)[is_mask]
            if not len(hidden):  # every mask was truncated
                continue
            guesses = iter(self.model.head_output(hidden[None])[0])
            for row, count in zip(batch.rows.tolist(), is_mask.sum(1).tolist(), strict=True):
                results[masked[row]] = [self._guesses(next(guesses), top) for _ in range(count)]
        for number, (line, words) in enumerate(zip(lines, results, strict=True), start=first):
            if len(words) != len(self._any_mask.findall(line)):
                raise UserError(
                    f"line {number} has a mask after the model's {self.max_length} tokens: "
                    "shorten it"
                )
        return results

    @cached_property
    def _any_mask(self) -> re.Pattern[str]:
        """A mask as a user may write it."""
        masks = (*MASKS, str(self.tokenizer.content(self.tokenizer.mask)))
        return re.compile("|".join(map(re.escape, masks)), re.IGNORECASE)

    def _guesses(self, logits: Float[Tensor, " v"], top: int) -> list[Guess]:
        probabilities, tokens = logits.float().softmax(-1).topk(min(top, len(logits)))
        words = self.tokenizer.subwords(tokens.tolist())
        return [Guess(word, float(p)) for word, p in zip(words, probabilities, strict=True)]

    def filled(self, line: str, guesses: list[list[Guess]]) -> str:
        """A line with the best word for each of its masks."""
        text, *rest = self._any_mask.split(line)
        for words, after in zip(guesses, rest, strict=True):
            text = self._append(text, words[0].word) + after
        return text

    def _append(self, text: str, word: str) -> str:
        """A text and a word, with the spaces that the tokenizer encodes with the word."""
        if word.startswith(" "):
            return text + (word if text and not text.endswith(" ") else word.lstrip(" "))
        takes_space = self.tokenizer.takes_space(self.tokenizer.mask) and text.strip()
        if word.startswith(CONTINUATION) or takes_space:
            text = text.rstrip(" ")
        return text + word.removeprefix(CONTINUATION)

    @property
    def tags(self) -> bool:
        """True if each token gets a label."""
        return isinstance(self.head, Tag)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the head; a single one is the name of a number."""
        labels: tuple[str, ...] | None = getattr(self.head, "labels", None)
        if labels is None:
            raise UserError("this model has no head for labels: use a classifier or a tagger")
        return labels

    @torch.inference_mode()
    def classify(self, lines: Sequence[str]) -> list[list[Prediction]]:
        """The label of each line; a tagger gives one per token of the text."""
        labels = self.labels
        results: list[list[Prediction]] = [[] for _ in lines]
        before, after = self.tokenizer.frame()
        special = torch.tensor([*before, *after], device=self.device)
        for batch in self._batches(lines):
            outputs = self.model(batch.tokens, batch.mask, batch.segments).float()
            for index, row in enumerate(batch.rows.tolist()):
                if outputs.ndim == 2:
                    results[row] = [_predict(outputs[index], labels)]
                    continue
                tokens = batch.tokens[index]
                is_text = torch.isin(tokens, special, invert=True)
                if batch.mask is not None:
                    is_text &= batch.mask[index]
                subwords = self.tokenizer.subwords(tokens[is_text].tolist())
                results[row] = [
                    _predict(logits, labels, subword.strip())
                    for logits, subword in zip(outputs[index][is_text], subwords, strict=True)
                ]
        return results

    def _batches(self, lines: Sequence[str], *, specials: bool = False) -> Iterator[_Batch]:
        """Batches sorted by length; one without padding has no mask."""
        pairs = [line.partition("\t") for line in lines]
        texts = [(first, second) if tab else first for first, tab, second in pairs]
        framed = self.tokenizer.framed(texts, self.max_length, specials=specials)
        if self.empty is not None:
            framed = [(ids, parts) if ids else ([self.empty], [0]) for ids, parts in framed]
        elif not all(ids for ids, _ in framed):
            raise UserError("there is nothing to encode in an empty line: leave it out")
        tokens = Ragged.of([ids for ids, _ in framed])
        segments = Ragged.of([parts for _, parts in framed])
        budget = BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS
        for rows in batches_by_length(tokens.lengths, budget):
            ids, mask = tokens.padded(rows, 0)
            # Some tokenizers number the texts for models without segment embeddings.
            parts = segments.padded(rows, 0)[0].clamp(max=self.segments - 1)
            padding = None if bool(mask.all()) else mask.to(self.device)
            yield _Batch(rows, ids.to(self.device), padding, parts.to(self.device))


def segments_of(config: Any) -> int:
    """The number of segments that a model tells apart."""
    if getattr(config, "attention", None) == "pair":
        return 2
    embed = getattr(config, "embed", None)
    return 1 if embed is None else embed.segments or 1


def _predict(
    logits: Float[Tensor, " labels"], labels: Sequence[str], subword: str = ""
) -> Prediction:
    if len(labels) == 1:
        return Prediction(labels[0], {labels[0]: float(logits[0])}, subword)
    probabilities = dict(zip(labels, logits.softmax(-1).tolist(), strict=True))
    return Prediction(max(probabilities, key=probabilities.__getitem__), probabilities, subword)
