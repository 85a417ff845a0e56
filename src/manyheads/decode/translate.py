"""Translation with an encoder–decoder: sentences, long texts and streams of lines."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from manyheads.data.batching import Ragged, batches_by_length
from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.decoder import BaseDecoder, GraphCache, ModelDecoder, after_sources
from manyheads.decode.sample import Sample, Sampler
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.tokenizer.tokenizer import Tokenizer

LINES_AT_ONCE = 512
BREAKS = str.maketrans("\r\n", "  ")  # a translation stays one line of output
# Where a long text is split, the best first, and what joins its parts again.
SPLITS = ((r"(?<=[.!?;])\s+", " "), (r"\s+", " "), (r"(?=.)", ""))


class BaseTranslator(BaseDecoder):
    """Translates sentences; subclasses compute the steps."""

    @property
    def max_length(self) -> int:
        """The most tokens of a source, and of a translation."""
        raise NotImplementedError

    def in_torch(self) -> "Translator | None":
        """The same with a PyTorch model, which gives probabilities; None if there is none."""
        return None

    @torch.no_grad()
    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence (default: all of the beam), best first."""
        start = self.special_tokens.start
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        done = 0
        for rows, texts, limits in self._batches(sentences, self.decode.beam):
            hypotheses = self._search(texts, start, limits, n_best)
            for row, nbest in zip(rows.tolist(), hypotheses, strict=True):
                results[row] = nbest
            done += len(rows)
            advance(done)
        return results

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """The best translation of each sentence."""
        return self._decode_best(self.search(sentences, n_best=1))

    def _decode_best(self, results: list[list[Hypothesis]]) -> list[str]:
        return self.tokenizer.decode_batch([nbest[0].tokens if nbest else [] for nbest in results])

    @torch.no_grad()
    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        """One sampled translation a sentence; the same for a seed whatever the batch.

        `first` is the number of the first sentence, if these come after others.
        """
        tokens: list[list[int]] = [[] for _ in sentences]
        for rows, texts, limits in self._batches(sentences, 1):
            start = torch.full_like(limits, self.special_tokens.start)
            samples = self._sample(texts, start, limits, Sampler(sample, rows.tolist(), first))
            for row, text in zip(rows.tolist(), samples, strict=True):
                tokens[row] = text
        return self.tokenizer.decode_batch(tokens)

    def _batches(
        self, sentences: Sequence[str], beam: int
    ) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor], Tensor]]:
        """Batches sorted by length: rows, sources with their padding mask, and length limits."""
        encoded = self._encode(sentences)
        budget = self.decode.decode_tokens(self.device) // beam
        for rows in batches_by_length(encoded.lengths, budget):
            yield rows, *self._padded(encoded, rows)

    def batch(self, sentences: Sequence[str]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """All sentences as one batch: sources with their padding mask, and length limits."""
        return self._padded(self._encode(sentences), np.arange(len(sentences)))

    def _encode(self, sentences: Sequence[str]) -> Ragged:
        self.special_tokens.check(self.vocabulary)
        encoded = self.tokenizer.encode_batch(sentences)
        return Ragged.of([self.special_tokens.source(ids) for ids in encoded])

    def _padded(self, encoded: Ragged, rows: np.ndarray) -> tuple[tuple[Tensor, Tensor], Tensor]:
        lengths = encoded.lengths[rows].tolist()
        limits = [self.decode.limit(length, self.max_length) for length in lengths]
        source, padding = encoded.padded(rows, self.special_tokens.padding)
        texts = source.to(self.device), padding.to(self.device)
        return texts, torch.tensor(limits, device=self.device)

    def translate_long(
        self, texts: Sequence[str], advance: Callable[[int], None] = lambda done: None
    ) -> list[str]:
        """The best translation of each text; one that is too long is translated in parts."""
        parts = [self.split(text) for text in texts]
        results = self.search([part for text in parts for part in text], advance, n_best=1)
        translations = iter(self._decode_best(results))
        return [" ".join(islice(translations, len(text))) for text in parts]

    def split(self, text: str) -> list[str]:
        """Parts of a text that fit the model, split after sentences, else words, else anywhere."""
        max_tokens = self.max_length - len(self.special_tokens.source([]))

        def fits(part: str) -> bool:
            return len(self.tokenizer.encode(part)) <= max_tokens

        def split_at(level: int, text: str) -> list[str]:
            if level == len(SPLITS) or fits(text):
                return [text]
            pattern, joint = SPLITS[level]
            units = [unit for unit in re.split(pattern, text) if unit]
            return _pack(
                [part for unit in units for part in split_at(level + 1, unit)], joint, fits
            )

        return split_at(0, text)


def _pack(units: Sequence[str], joint: str, fits: Callable[[str], bool]) -> list[str]:
    """Join neighbours into parts, each as long as fits.

    The length of a part is found by doubling and halving its number of units, so that a unit is
    encoded O(log n) times and not once for every later unit of its part.
    """
    parts: list[str] = []
    start = 0
    while start < len(units):
        end, more, grows = start + 1, 1, True
        while more:
            if end + more <= len(units) and fits(joint.join(units[start : end + more])):
                end += more
            else:
                grows = False
            more = more * 2 if grows else more // 2
        parts.append(joint.join(units[start:end]))
        start = end
    return parts


@dataclass(frozen=True)
class Translator(BaseTranslator, ModelDecoder):
    """A model with its tokenizer and the settings it generates with."""

    model: EncoderDecoder
    tokenizer: Tokenizer
    decode: Decode
    graphs: GraphCache = field(default_factory=GraphCache, compare=False, repr=False)
    is_guided: bool = False  # a head was trained on word links

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.target_table.num_embeddings

    def in_torch(self) -> "Translator":
        return self

    def begin(self, *texts: Tensor) -> DecoderSession:
        return after_sources(self.model.eval(), *texts)


@dataclass(frozen=True)
class Annotation:
    """Links (source word, target word) of a translation, and log P of its tokens and its end.

    `word_log_probs` has the sum over the tokens of each target word.
    """

    links: list[tuple[int, int]]
    log_probs: list[float]
    source_words: int
    target_words: int
    word_log_probs: list[float]


Annotate = Callable[[Sequence[str], Sequence[Hypothesis]], list[Annotation]]


@dataclass(frozen=True)
class LineFormat:
    """How a translation is printed: `number ||| text ||| score ||| alignment ||| log P`.

    Number and score are in n-best lists; `alignment` and `scores` choose the last two, which
    `annotate` computes.
    """

    n_best: int = 1
    alignment: bool = False
    scores: bool = False
    annotate: Annotate | None = None

    def lines(
        self,
        translator: BaseTranslator,
        number: int,
        parts: list[list[tuple[Hypothesis, Annotation | None]]],
    ) -> Iterator[str]:
        """The lines of one input line, which was translated in parts."""
        for rank in range(self.n_best if parts else 1):
            chosen = [nbest[min(rank, len(nbest) - 1)] for nbest in parts if nbest]
            texts = [translator.tokenizer.decode(best.tokens) for best, _ in chosen]
            fields = [" ".join(texts).translate(BREAKS)]
            if self.n_best > 1:
                fields = [str(number), *fields, f"{sum(best.score for best, _ in chosen):.4f}"]
            links, log_probs, before = [], [], (0, 0)
            for _, result in chosen:
                if result is not None:
                    links += [f"{i + before[0]}-{j + before[1]}" for i, j in result.links]
                    log_probs += [f"{value:.4f}" for value in result.log_probs]
                    before = before[0] + result.source_words, before[1] + result.target_words
            fields += [" ".join(links)] * self.alignment + [" ".join(log_probs)] * self.scores
            yield " ||| ".join(fields)

    def annotated(
        self, sentences: Sequence[str], results: Sequence[Sequence[Hypothesis]]
    ) -> Iterator[list[tuple[Hypothesis, Annotation | None]]]:
        """The hypotheses of each sentence with their annotations, all computed together."""
        flat = [
            (text, best) for text, nbest in zip(sentences, results, strict=True) for best in nbest
        ]
        every: Sequence[Annotation | None] = [None] * len(flat)
        if self.annotate is not None and flat:
            every = self.annotate([text for text, _ in flat], [best for _, best in flat])
        annotations = iter(every)
        for nbest in results:
            yield [(best, next(annotations)) for best in nbest]


def translate_lines(
    translator: BaseTranslator,
    lines: Iterable[str],
    form: LineFormat | None = None,
    sample: Sample | None = None,
    warn: Callable[[str], None] = lambda line: None,
    at_once: int | None = None,
) -> Iterator[str]:
    """Translate line by line; an empty line stays empty, a long one goes in parts.

    In an n-best list, a line in parts joins the n-th best translations of its parts.
    """
    form, lines = form or LineFormat(), iter(lines)
    line_count = part_count = 0
    while chunk := list(islice(lines, at_once or LINES_AT_ONCE)):
        lines_in_parts = [translator.split(line) if line.strip() else [] for line in chunk]
        for number, parts in enumerate(lines_in_parts, start=line_count + 1):
            if len(parts) > 1:
                warn(
                    f"line {number} is longer than the model's {translator.max_length} tokens: "
                    f"translated in {len(parts)} parts"
                )
        flat = [part for parts in lines_in_parts for part in parts]
        if sample:
            texts = iter(translator.sample(flat, sample, part_count))
            for parts in lines_in_parts:
                yield " ".join(islice(texts, len(parts))).translate(BREAKS)
        else:
            results = form.annotated(flat, translator.search(flat, n_best=form.n_best))
            for number, parts in enumerate(lines_in_parts, start=line_count):
                yield from form.lines(translator, number, list(islice(results, len(parts))))
        line_count += len(chunk)
        part_count += len(flat)
