"""What generators and translators share: a search, sampling or a stream over a batch of texts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.decode.beam import (
    Beams,
    BeamSearch,
    Decode,
    DecoderSession,
    Hypothesis,
    SpecialTokens,
)
from manyheads.decode.constraints import LogitsConstraints
from manyheads.decode.cuda_graphs import (
    GraphCache,
    GraphedFunction,
    compile_after_first,
    padded_rows,
    padded_size,
    padded_source,
    supports_cuda_graph,
)
from manyheads.decode.sample import Sampler, Samples, sampling
from manyheads.decode.session import StaticGptSession, StaticSeq2SeqSession
from manyheads.decode.static_cache import StaticCache
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.optimize import for_inference
from manyheads.tokenizer.tokenizer import Tokenizer

Texts = tuple[Tensor, ...]  # prompts; or sources, and True where they are no padding
Rows = Int[Tensor, " n"]


class BaseDecoder:
    """A tokenizer and settings; a subclass has what computes the steps."""

    tokenizer: Tokenizer
    decode: Decode

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """The number of tokens that can be generated."""
        raise NotImplementedError

    def begin(self, *texts: Tensor) -> DecoderSession:
        """Ready to generate the first token after each text."""
        raise NotImplementedError

    @property
    def special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, self.decode)

    @property
    def constraints(self) -> LogitsConstraints:
        return self.special_tokens.constraints(self.device)

    def _search(
        self, texts: Texts, start: int | Rows, limits: Rows, n_best: int | None
    ) -> list[list[Hypothesis]]:
        search = BeamSearch(self.decode, self.constraints, n_best)
        return search(self.begin(*texts), start, limits)

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        with torch.no_grad():
            session = self.begin(*texts)
        state, step = sampling(session, newest, limits, sampler, self.constraints)
        return state.run(step)

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        with torch.no_grad():
            session = self.begin(*texts)
        state, step = sampling(session, newest, limits, sampler, self.constraints)
        return state.stream(step)


class StaticDecoder:
    """A static session and the state of a search or of sampling; their step is one CUDA graph."""

    def __init__(
        self,
        session: StaticGptSession | StaticSeq2SeqSession,
        state: Beams | Samples,
        graphs: GraphCache,
        pool: Any,
    ) -> None:
        self.session, self.state = session, state
        step: Callable[[], object] = self._step
        if graphs.compiled and isinstance(state, Beams):
            session.step = compile_after_first(session.step)  # type: ignore[method-assign]
        elif graphs.compiled:
            step = compile_after_first(self._step)
        self.graphed = GraphedFunction(step, session.cache.length.device, pool)

    def _step(self) -> None:
        self.state.step(self.session)  # type: ignore[arg-type]
        if isinstance(self.state, Beams):
            self.session.reorder(self.state.origin)

    def step(self, forces: bool) -> None:
        self.graphed()

    def bytes(self) -> int:
        """The size of the cache; the rest is small."""
        return self.session.cache.bytes()


class ModelDecoder(BaseDecoder):
    """A model of ours: its steps are CUDA graphs on a GPU, or as `graphs` says."""

    model: Any
    graphs: GraphCache

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def _eager_model(self) -> Any:
        """The model to take eager steps with."""
        model: nn.Module = self.model.eval()
        prepacked = self.device.type == "cpu" and supports_cuda_graph(model)
        return for_inference(model, rows=1) if prepacked else model

    def _search(
        self, texts: Texts, start: int | Rows, limits: Rows, n_best: int | None
    ) -> list[list[Hypothesis]]:
        if not self.graphs.serves(self.model):
            return super()._search(texts, start, limits, n_best)
        search = BeamSearch(self.decode, self.constraints, n_best)

        def make(rows: int, size: int) -> Beams:
            return Beams(search, rows, size, self.device)

        key = ("search", *search.settings)
        with self._borrow(texts, limits, search.beam, key, make) as static:
            beams: Any = static.state
            with torch.no_grad():
                static.session.read(*texts)
            beams.begin(start, limits)
            found: list[list[Hypothesis]] = beams.run(static.step)
            return found

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        if not self.graphs.serves(self.model):
            return super()._sample(texts, newest, limits, sampler)
        with self._static_samples(texts, newest, limits, sampler) as (state, step):
            return state.run(step)

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        if not self.graphs.serves(self.model):
            return super()._stream(texts, newest, limits, sampler)
        return self._static_stream(texts, newest, limits, sampler)

    def _static_stream(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> Iterator[Rows]:
        with self._static_samples(texts, newest, limits, sampler) as (state, step):
            yield from state.stream(step)

    @contextmanager
    def _static_samples(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> Iterator[tuple[Samples, Callable[[bool], None]]]:
        constraints, sample = self.constraints, replace(sampler.sample, seed=0)

        def make(rows: int, size: int) -> Samples:
            return Samples(constraints, sample, rows, size, self.device)

        key = ("sample", *constraints.settings, sample)
        with self._borrow(texts, limits, 1, key, make) as static:
            state: Any = static.state
            with torch.no_grad():
                static.session.read(*texts)
            state.begin(newest, limits, sampler)
            yield state, static.step

    @contextmanager
    def _borrow(
        self,
        texts: Texts,
        limits: Rows,
        beams: int,
        key: tuple[Any, ...],
        make: Callable[[int, int], Beams | Samples],
    ) -> Iterator[StaticDecoder]:
        """A static decoder with a shape that holds these texts."""
        rows, width, most = padded_rows(len(limits)), texts[0].shape[1], int(limits.max())
        prompt, source = (0, padded_source(width)) if len(texts) > 1 else (width, 0)
        size = padded_size(prompt + most)

        def build(pool: Any) -> StaticDecoder:
            cache = StaticCache(rows, beams, size, self.device, source)
            model = self.model
            if self.device.type == "cuda":
                model = for_inference(model, rows=rows * beams, compiled=self.graphs.compiled)
            session = _static_session(model, cache, pool)
            return StaticDecoder(session, make(rows, size), self.graphs, pool)

        shape = (*key, rows, beams, size, source)
        with self.graphs.borrow(self.model, shape, build) as static:
            yield static


def _static_session(
    model: nn.Module, cache: StaticCache, pool: Any
) -> StaticGptSession | StaticSeq2SeqSession:
    if isinstance(model, Gpt):
        return StaticGptSession(model, cache, pool)
    assert isinstance(model, Seq2Seq)
    return StaticSeq2SeqSession(model, cache, pool)
