"""Writing with an encoder–decoder: sentences in, hypotheses out, in the order they came."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.data.batching import in_order_of_length
from manyheads.data.translation import Ragged
from manyheads.decode.beam import BeamSearch, Decode, Hypothesis
from manyheads.decode.cache import KeyValueCache
from manyheads.decode.sample import Sample, Sampler
from manyheads.models.seq2seq import Memory, Seq2Seq
from manyheads.nn.masks import Sight
from manyheads.tokens import Tokenizer


class Seq2SeqStepper:
    """An encoder–decoder in the middle of writing; the memory is held once a sentence."""

    def __init__(self, model: Seq2Seq, source: Tensor, real: Tensor) -> None:
        self.model = model
        self.memory = model.encode(source, real)
        self.cache = KeyValueCache()

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        hidden = self.model.decode(tokens[:, None], self.memory, cache=self.cache)
        return self.model.logits(hidden[:, -1]).float()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self.cache.reorder(rows)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.cache.keep_sentences(sentences)
        sight = self.memory.sight
        real = None if sight.real is None else sight.real[sentences]
        self.memory = Memory(
            self.memory.states[sentences], Sight(sight.rule, sight.queries, sight.keys, real)
        )


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizer and the settings it writes with."""

    model: Seq2Seq
    tokenizer: Tokenizer
    decode: Decode

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def banned(self) -> list[int]:
        """Special tokens that are never written."""
        inner = self.tokenizer
        return [inner.pad, inner.start, inner.unknown, inner.mask, inner.separator, inner.classify]

    @torch.no_grad()
    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence (the whole beam unless told), best first."""
        search = BeamSearch(
            self.decode,
            start=self.tokenizer.start,
            end=self.tokenizer.end,
            banned=self.banned,
            n_best=n_best,
        )
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        done = 0
        for rows, source, real, limits in self._batches(sentences, self.decode.beam):
            found = search(Seq2SeqStepper(self.model, source, real), limits)
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
        """One drawn translation a sentence; the same for a seed whatever the batch.

        `first` is the number of the first sentence, where these go on after others.
        """
        written: list[list[int]] = [[] for _ in sentences]
        for rows, source, real, limits in self._batches(sentences, 1):
            stepper = Seq2SeqStepper(self.model.eval(), source, real)
            samplers = [Sampler(sample, 1, first=first + row) for row in rows.tolist()]
            tokens = torch.full((len(rows),), self.tokenizer.start, device=self.device)
            done = torch.zeros_like(tokens, dtype=torch.bool)
            for length in range(1, int(limits.max()) + 1):
                logits = stepper.step(tokens)
                logits[:, self.banned] = -torch.inf
                drawn = [s.draw(row[None]) for s, row in zip(samplers, logits, strict=True)]
                tokens = torch.cat(drawn).to(self.device)
                done |= (tokens == self.tokenizer.end) | (limits <= length)
                if bool(done.all()):
                    break
                for place, row in enumerate(rows.tolist()):
                    if not done[place]:
                        written[row].append(int(tokens[place]))
        return self.tokenizer.decode_batch(written)

    def _batches(
        self, sentences: Sequence[str], beam: int
    ) -> list[tuple[np.ndarray, Tensor, Tensor, Tensor]]:
        """Batches sorted by length: their rows, sources, what is real, and length limits."""
        self.model.eval()
        encoded = [[*ids, self.tokenizer.end] for ids in self.tokenizer.encode_batch(sentences)]
        ragged = Ragged.of(encoded)
        maximum = self.model.config.max_length
        batches = []
        budget = max(1, self.decode.batch_tokens // beam)
        for rows in in_order_of_length(ragged.lengths, budget):
            source, real = ragged.padded(rows, self.tokenizer.pad)
            limits = [self.decode.limit(int(n), maximum) for n in ragged.lengths[rows]]
            batches.append(
                (
                    rows,
                    source.to(self.device),
                    real.to(self.device),
                    torch.tensor(limits, device=self.device),
                )
            )
        return batches
