"""Translation with an encoder–decoder: sentences in, hypotheses out, in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from manyheads.data.batching import Ragged, batches_by_length
from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.cuda_graphs import GraphCache
from manyheads.decode.decoder import BaseDecoder, ModelDecoder
from manyheads.decode.sample import Sample, Sampler
from manyheads.decode.session import Seq2SeqSession
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.tokenizer.tokenizer import Tokenizer


class BaseTranslator(BaseDecoder):
    """Translates sentences; a subclass has what computes the steps."""

    @property
    def max_length(self) -> int:
        """The most tokens of a source, and of a translation."""
        raise NotImplementedError

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
        for rows, source, padding, limits in self._batches(sentences, self.decode.beam):
            found = self._search((source, padding), start, limits, n_best)
            for row, hypotheses in zip(rows.tolist(), found, strict=True):
                results[row] = hypotheses
            done += len(rows)
            advance(done)
        return results

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """The best translation of each sentence."""
        best = [found[0].tokens if found else [] for found in self.search(sentences, n_best=1)]
        return self.tokenizer.decode_batch(best)

    @torch.no_grad()
    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        """One sampled translation a sentence; the same for a seed whatever the batch.

        `first` is the number of the first sentence, where these come after others.
        """
        tokens: list[list[int]] = [[] for _ in sentences]
        for rows, source, padding, limits in self._batches(sentences, 1):
            start = torch.full_like(limits, self.special_tokens.start)
            sampler = Sampler(sample, rows.tolist(), first)
            found = self._sample((source, padding), start, limits, sampler)
            for row, text in zip(rows.tolist(), found, strict=True):
                tokens[row] = text
        return self.tokenizer.decode_batch(tokens)

    def _batches(
        self, sentences: Sequence[str], beam: int
    ) -> list[tuple[np.ndarray, Tensor, Tensor, Tensor]]:
        """Batches sorted by length: rows, sources, True where they are real, and length limits."""
        special = self.special_tokens
        special.check(self.vocabulary)
        encoded = self.tokenizer.encode_batch(sentences)
        ragged = Ragged.of([special.source(ids) for ids in encoded])
        batches = []
        budget = max(1, self.decode.written_at_once(self.device) // beam)
        for rows in batches_by_length(ragged.lengths, budget):
            lengths = ragged.lengths[rows].tolist()
            limits = [self.decode.limit(length, self.max_length) for length in lengths]
            source, padding = (x.to(self.device) for x in ragged.padded(rows, special.padding))
            batches.append((rows, source, padding, torch.tensor(limits, device=self.device)))
        return batches


@dataclass(frozen=True)
class Translator(BaseTranslator, ModelDecoder):
    """A model with its tokenizer and the settings it generates with."""

    model: EncoderDecoder
    tokenizer: Tokenizer
    decode: Decode
    graphs: GraphCache = field(default_factory=GraphCache, compare=False, repr=False)

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.target_table.num_embeddings

    def begin(self, *texts: Tensor) -> DecoderSession:
        return Seq2SeqSession(self._eager_model(), *texts)
