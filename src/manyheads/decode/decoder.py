"""What generators and translators share: search, sampling and streams over a batch of texts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
    Step,
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
from manyheads.decode.linears import for_inference
from manyheads.decode.sample import Sampler, Samples
from manyheads.decode.session import StaticGptSession, StaticSeq2SeqSession
from manyheads.decode.static_cache import StaticCache
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.tokenizer.tokenizer import Tokenizer

Texts = tuple[Tensor, ...]  # prompts; or sources, and True where they are no padding
Rows = Int[Tensor, " n"]
MakeState = Callable[[int, int, torch.device], Any]  # for so many rows of so many tokens


class Decoding(NamedTuple):
    """The state of a search or of sampling, and its step; a static step also reorders."""

    state: Any
    step: Step
    session: DecoderSession | None


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
        key = ("search", *search.settings)
        with self._decoding(texts, limits, search.beam, key, partial(Beams, search)) as decoding:
            beams: Beams = decoding.state
            beams.begin(start, limits)
            return beams.run(decoding.step, decoding.session)

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        with self._sampling(texts, limits, sampler) as decoding:
            samples: Samples = decoding.state
            samples.begin(newest, limits, sampler)
            return samples.run(decoding.step)

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        with self._sampling(texts, limits, sampler) as decoding:
            samples: Samples = decoding.state
            samples.begin(newest, limits, sampler)
            yield from samples.stream(decoding.step)

    def _sampling(
        self, texts: Texts, limits: Rows, sampler: Sampler
    ) -> AbstractContextManager[Decoding]:
        constraints, sample = self.constraints, replace(sampler.sample, seed=0)
        key = ("sample", *constraints.settings, sample)
        return self._decoding(texts, limits, 1, key, partial(Samples, constraints, sample))

    @contextmanager
    def _decoding(
        self, texts: Texts, limits: Rows, beams: int, key: tuple[Any, ...], make: MakeState
    ) -> Iterator[Decoding]:
        """A session that has read the texts, and a state for what follows them."""
        with torch.no_grad():
            session = self.begin(*texts)
        state = make(len(limits), int(limits.max()), self.device)
        yield Decoding(state, partial(state.step, session), session)


class StaticDecoder:
    """A static session and the state of a search or of sampling; their step is one CUDA graph."""

    def __init__(
        self,
        session: StaticGptSession | StaticSeq2SeqSession,
        state: Any,
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
        self.state.step(self.session)
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

    @contextmanager
    def _decoding(
        self, texts: Texts, limits: Rows, beams: int, key: tuple[Any, ...], make: MakeState
    ) -> Iterator[Decoding]:
        if not self.graphs.serves(self.model):
            with super()._decoding(texts, limits, beams, key, make) as decoding:
                yield decoding
            return
        rows, width, most = padded_rows(len(limits)), texts[0].shape[1], int(limits.max())
        prompt, source = (0, padded_source(width)) if len(texts) > 1 else (width, 0)
        size = padded_size(prompt + most)

        def build(pool: Any) -> StaticDecoder:
            cache = StaticCache(rows, beams, size, self.device, source)
            session = self._static_session(cache, pool)
            return StaticDecoder(session, make(rows, size, self.device), self.graphs, pool)

        shape = (*key, rows, beams, size, source)
        with self.graphs.borrow(self.model, shape, build) as static:
            with torch.no_grad():
                static.session.read(*texts)
            yield Decoding(static.state, static.step, None)

    def _static_session(
        self, cache: StaticCache, pool: Any
    ) -> StaticGptSession | StaticSeq2SeqSession:
        model = self.model
        if self.device.type == "cuda":
            rows = cache.sentences * cache.beams
            model = for_inference(model, rows=rows, compiled=self.graphs.compiled)
        if isinstance(model, Gpt):
            return StaticGptSession(model, cache, pool)
        assert isinstance(model, Seq2Seq)
        return StaticSeq2SeqSession(model, cache, pool)
