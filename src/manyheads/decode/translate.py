"""Writing with an encoder–decoder: sentences in, hypotheses out, in the order they came."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.data.batching import Ragged, in_order_of_length
from manyheads.decode.beam import Allowed, BeamSearch, Decode, Hypothesis, Marks, Stepper
from manyheads.decode.beam_cache import cache_for
from manyheads.decode.best_first import AT_ONCE, HELD, BestFirst
from manyheads.decode.cuda_graphs import Recordings, steady
from manyheads.decode.generate import collect
from manyheads.decode.sample import Sample, Sampler
from manyheads.decode.tree_cache import TreeCache
from manyheads.decode.writer import Writer
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.seq2seq import Memory, Seq2Seq
from manyheads.nn.attention import CrossAttention, KeysAndValues
from manyheads.nn.masks import AttentionMask, full, make_mask
from manyheads.optimize import InferenceCache
from manyheads.tokenizer.tokenizer import Tokenizer

READ = 512  # tokens of sources in a pass, with little padding between long and short ones
Sources = Int[Tensor, "n s"]
RealSources = Bool[Tensor, "n s"]
Rows = Int[Tensor, " n"]


class Seq2SeqStepper:
    """An encoder–decoder in the middle of writing; the memory is held once a sentence."""

    def __init__(self, model: EncoderDecoder, source: Tensor, real: Tensor) -> None:
        self.model = model
        self.memory = model.encode(source, real)
        self.cache = cache_for(model)

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        hidden = self.model.decode(tokens[:, None], self.memory, cache=self.cache)
        return self.model.logits(hidden[:, -1]).float()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self.cache.reorder(rows)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.cache.keep_sentences(sentences)
        sight = self.memory.mask
        real = None if sight.padding_mask is None else sight.padding_mask[sentences]
        self.memory = Memory(
            self.memory.states[sentences],
            AttentionMask(sight.rule, sight.query_positions, sight.key_positions, real),
        )


class Seq2SeqForest:
    """An encoder–decoder before trees of hypotheses, one for each source."""

    def __init__(self, model: Seq2Seq, sources: Ragged, padding: int) -> None:
        self.model, self.sources, self.padding = model, sources, padding
        self.device = next(model.parameters()).device
        self.cache = TreeCache(self.device)
        self.lengths: list[int] = []
        self.memory: Memory | None = None

    def read(self, sentences: range) -> None:
        parts = [part for part in self.model.decoder.modules() if isinstance(part, CrossAttention)]
        lengths, begin = self.sources.lengths, sentences.start
        memories: list[dict[nn.Module, KeysAndValues]] = []
        while begin < sentences.stop:
            some = range(begin, min(sentences.stop, begin + max(1, READ // int(lengths[begin]))))
            source, real = self.sources.padded(np.array(some), self.padding)
            states = self.model.encode(source.to(self.device), real.to(self.device)).states
            memories.append({part: part.project_kv(states) for part in parts})
            begin = some.stop
        self.cache.add(memories)
        self.lengths += lengths[sentences.start : sentences.stop].tolist()
        self._look()

    def step(self, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> Float[Tensor, "n v"]:
        assert self.memory is not None
        self.cache.ask(paths)
        newest = torch.tensor(tokens, device=self.device)[:, None]
        hidden = self.model.decode(newest, self.memory, cache=self.cache)
        return self.model.logits(hidden[:, -1]).float()

    def keep(self, trees: Sequence[int]) -> None:
        self.lengths = [self.lengths[tree] for tree in trees]
        self.cache.keep(trees, max(self.lengths, default=0))
        self._look()

    def _look(self) -> None:
        """What hypotheses see of the sources; their states are not asked for again."""
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        real = torch.arange(max(self.lengths, default=0), device=self.device) < lengths
        self.memory = Memory(
            real, make_mask(full, real.shape[1], padding_mask=real, device=self.device)
        )


class AnyTranslator:
    """Writes with a tokenizer and settings; a subclass says what computes the steps."""

    tokenizer: Tokenizer
    decode: Decode

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def max_length(self) -> int:
        """The most tokens of a source, and of what is written."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """How many tokens there are to write."""
        raise NotImplementedError

    def begin(self, source: Int[Tensor, "b s"], real: Bool[Tensor, "b s"]) -> Stepper:
        """Ready to write the first token after each source."""
        raise NotImplementedError

    @property
    def marks(self) -> Marks:
        return Marks(self.tokenizer, self.decode)

    @property
    def allowed(self) -> Allowed:
        return Allowed(self.decode, self.marks.end, self.marks.banned)

    @torch.no_grad()
    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence (the whole beam unless told), best first."""
        marks = self.marks
        search = BeamSearch(
            self.decode, start=marks.start, end=marks.end, banned=marks.banned, n_best=n_best
        )
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        done = 0
        for rows, source, real, limits in self._batches(sentences, self.decode.beam):
            found = self._searched(search, source, real, limits)
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
            found = self._written(source, real, limits, Sampler(sample, rows.tolist(), first))
            for row, tokens in zip(rows.tolist(), found, strict=True):
                written[row] = tokens
        return self.tokenizer.decode_batch(written)

    def _searched(
        self, search: BeamSearch, source: Sources, real: RealSources, limits: Rows
    ) -> list[list[Hypothesis]]:
        return search(self.begin(source, real), limits)

    def _written(
        self, source: Sources, real: RealSources, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        start = torch.full_like(limits, self.marks.start)
        return collect(self.begin(source, real), start, limits, sampler, self.allowed)

    def _batches(
        self, sentences: Sequence[str], beam: int
    ) -> list[tuple[np.ndarray, Tensor, Tensor, Tensor]]:
        """Batches sorted by length: their rows, sources, what is real, and length limits."""
        self.marks.check(self.vocabulary)
        encoded = self.tokenizer.encode_batch(sentences)
        ragged = Ragged.of([self.marks.source(ids) for ids in encoded])
        batches = []
        budget = max(1, self.decode.written_at_once(self.device) // beam)
        for rows in in_order_of_length(ragged.lengths, budget):
            source, real = ragged.padded(rows, self.marks.padding)
            limits = [self.decode.limit(int(n), self.max_length) for n in ragged.lengths[rows]]
            batches.append(
                (
                    rows,
                    source.to(self.device),
                    real.to(self.device),
                    torch.tensor(limits, device=self.device),
                )
            )
        return batches


@dataclass(frozen=True)
class Translator(AnyTranslator):
    """A model with its tokenizer and the settings it writes with.

    Its steps are recorded on a GPU, or as `recordings` say; on a CPU they are computed with its
    weights as the kernels there read them best.
    """

    model: EncoderDecoder
    tokenizer: Tokenizer
    decode: Decode
    recordings: Recordings = field(default_factory=Recordings, compare=False, repr=False)
    arrangement: InferenceCache = field(default_factory=InferenceCache, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def max_length(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.target_table.num_embeddings

    def begin(self, source: Int[Tensor, "b s"], real: Bool[Tensor, "b s"]) -> Stepper:
        model = self.model.eval()
        if steady(model):
            model = self.arrangement.get(model)
        return Seq2SeqStepper(model, source, real)

    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """As in any translator; a steady model can also be searched best first."""
        marks, decode = self.marks, self.decode
        if not decode.best_first or not steady(self.model):
            return super().search(sentences, advance, n_best)
        marks.check(self.vocabulary)
        encoded = [marks.source(ids) for ids in self.tokenizer.encode_batch(sentences)]
        order = sorted(range(len(encoded)), key=lambda row: -len(encoded[row]))
        sources = Ragged.of([encoded[row] for row in order])
        lengths = sources.lengths.tolist()
        limits = [decode.limit(length, self.max_length) for length in lengths]
        budget = decode.written_at_once(self.device)
        rooms = [
            max(1, min(AT_ONCE, budget // length, HELD // (decode.beam * limit)))
            for length, limit in zip(lengths, limits, strict=True)
        ]
        search = BestFirst(
            decode, start=marks.start, end=marks.end, banned=marks.banned, n_best=n_best
        )
        model = self.arrangement.get(self.model.eval())
        assert isinstance(model, Seq2Seq)
        found = search(Seq2SeqForest(model, sources, marks.padding), limits, rooms, advance)
        return [hypotheses for _, hypotheses in sorted(zip(order, found, strict=True))]

    @property
    def _writer(self) -> Writer:
        return Writer(self.recordings, self.model)

    def _searched(
        self, search: BeamSearch, source: Sources, real: RealSources, limits: Rows
    ) -> list[list[Hypothesis]]:
        if self._writer.serves:
            return self._writer.search((source, real), search, limits)
        return super()._searched(search, source, real, limits)

    def _written(
        self, source: Sources, real: RealSources, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        if self._writer.serves:
            start = torch.full_like(limits, self.marks.start)
            return self._writer.collect((source, real), start, limits, sampler, self.allowed)
        return super()._written(source, real, limits, sampler)
