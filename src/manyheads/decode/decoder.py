"""What translators and generators share: sessions (a model with its cache), search and sampling."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.baselines.rnn import LanguageModel
from manyheads.decode.beam import (
    Beams,
    BeamSearch,
    Decode,
    DecoderSession,
    Forget,
    Hypothesis,
    LogitsConstraints,
    Parents,
    SpecialTokens,
    Step,
)
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.sample import Sampler, Samples
from manyheads.decode.static_cache import StaticCache
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.nn.attention import CrossAttention, Dense, Fused, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.shapes import Hidden
from manyheads.tokenizer.tokenizer import Tokenizer

Texts = tuple[Tensor, ...]  # prompts; or sources, and True where they are not padding
Rows = Int[Tensor, " n"]
MakeState = Callable[[int, int, torch.device], Any]  # for so many rows of so many tokens
# The state of a search or of sampling, its step, and how to forget sentences, if that is possible.
Decoding = tuple[Any, Step, Forget | None]

# Most entries of a graph cache, and their most bytes; the least recently used one goes first.
MAX_ENTRIES, MAX_BYTES = 8, 8 * 2**30


# --- Sessions -------------------------------------------------------------------------------------


class ModelSession:
    """A model and its cache; one step passes the newest token of every hypothesis through it.

    In a Transformer the hypotheses of a sentence are positions, in other models rows. An
    encoder–decoder also has the encoded sources, `memory`.
    """

    def __init__(
        self, model: Any, cache: KVCache | StaticCache, memory: EncoderOutput | None = None
    ) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.as_rows = not isinstance(model, Gpt | Seq2Seq)

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        # Before hypotheses differ, a growing cache holds one for each sentence.
        hidden = self.hidden(tokens[:, : self.cache.beams])
        logits = self.model.logits(hidden.flatten(0, 1)).unflatten(0, (len(tokens), -1))
        repeats = tokens.shape[1] // logits.shape[1]
        return logits.repeat_interleave(repeats, 1) if repeats > 1 else logits

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        tokens = tokens.reshape(-1, 1) if self.as_rows else tokens
        if self.memory is None:
            return self.model.hidden(tokens, cache=self.cache)
        return self.model.decode(tokens, self.memory, cache=self.cache)

    def reorder(self, parents: Parents) -> None:
        self.cache.reorder(parents)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        assert isinstance(self.cache, KVCache)  # a static batch keeps its shape
        self.cache.keep_sentences(sentences)
        if self.memory is not None:
            self.memory = self.memory.select(sentences)


def after_prompts(model: LanguageModel, prompts: Int[Tensor, "n length"]) -> ModelSession:
    """A session of a language model; its first step takes the last token of the prompts."""
    cache = KVCache(shared=supports_cuda_graph(model))
    if prompts.shape[1] > 1:
        model.hidden(prompts[:, :-1], cache=cache)
    return ModelSession(model, cache)


def after_sources(
    model: EncoderDecoder, source: Int[Tensor, "n s"], padding: Bool[Tensor, "n s"]
) -> ModelSession:
    """A session of an encoder–decoder with encoded sources."""
    memory = model.encode(source, padding)
    return ModelSession(model, KVCache(shared=supports_cuda_graph(model)), memory)


def supports_cuda_graph(model: nn.Module) -> bool:
    """True if every step runs the same kernels, with exact attention, and no module has hooks.

    Recurrent models and decoder-only seq2seq have states of other shapes; experts wait for the
    host to route tokens; approximate attention depends on the order of the slots.
    """
    if not isinstance(model, Gpt | Seq2Seq):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in all_modules(model)):
        return False
    return has_attention(model.decoder, Dense, Fused)


def has_attention(stack: Stack, *kinds: type) -> bool:
    """True if all attention is of these kinds, and there are no experts."""
    modules = all_modules(stack)
    attentions = [part for part in modules if isinstance(part, SelfAttention | CrossAttention)]
    experts = any(isinstance(part, ExpertFeedForward) for part in modules)
    return not experts and all(type(part.core) in kinds for part in attentions)


def all_modules(model: nn.Module) -> list[nn.Module]:
    """All modules; faster than `modules()`, which builds their names. Called for every batch."""
    modules = [model]
    for module in modules:
        modules.extend(part for part in module._modules.values() if part is not None)
    return modules


# --- Decoders -------------------------------------------------------------------------------------


class BaseDecoder:
    """A tokenizer and settings; subclasses compute the steps."""

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
        """A session that is ready to generate the first token after each text."""
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
        def make(*sizes: Any) -> Beams:
            return Beams(BeamSearch(self.decode, self.constraints, n_best), *sizes)

        beam = self.decode.beam
        key = ("search", min(n_best or beam, beam))
        with self._decoding(texts, limits, beam, key, make) as (beams, step, forget):
            beams.begin(start, limits)
            hypotheses: list[list[Hypothesis]] = beams.run(step, forget)
            return hypotheses

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        with self._sampling(texts, newest, limits, sampler) as (samples, step):
            tokens: list[list[int]] = samples.run(step)
            return tokens

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        with self._sampling(texts, newest, limits, sampler) as (samples, step):
            yield from samples.stream(step)

    @contextmanager
    def _sampling(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> Iterator[tuple[Samples, Step]]:
        sample = replace(sampler.sample, seed=0)  # graphs do not depend on the seed

        def make(*sizes: Any) -> Samples:
            return Samples(self.constraints, sample, *sizes)

        key = ("sample", sample)
        with self._decoding(texts, limits, 1, key, make) as (samples, step, _):
            samples.begin(newest, limits, sampler)
            yield samples, step

    @contextmanager
    def _decoding(
        self, texts: Texts, limits: Rows, beams: int, key: tuple[Hashable, ...], make: MakeState
    ) -> Iterator[Decoding]:
        """Encode the texts, and make the state for what follows them."""
        with torch.no_grad():
            session = self.begin(*texts)
        state = make(len(limits), int(limits.max()), self.device)
        yield state, partial(state.step, session), session.keep_sentences


class ModelDecoder(BaseDecoder):
    """A PyTorch model; by default its steps are CUDA graphs on a GPU and eager on a CPU."""

    model: Any
    graphs: "GraphCache"

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextmanager
    def _decoding(
        self, texts: Texts, limits: Rows, beams: int, key: tuple[Hashable, ...], make: MakeState
    ) -> Iterator[Decoding]:
        if not self.graphs.serves(self.model):
            with super()._decoding(texts, limits, beams, key, make) as decoding:
                yield decoding
            return
        from manyheads.decode.cuda_graphs import Shape, StaticDecoder

        shape = Shape.of(texts, limits, beams)
        build = partial(StaticDecoder, self.model, shape, make)
        with self.graphs.borrow(self.model, (*key, self.decode, shape), build) as static:
            with torch.no_grad():
                static.session.encode(*texts)
            yield static.state, static.step, None


E = TypeVar("E")


class GraphCache:
    """The CUDA graphs of one decoder, by shape and settings; by default on a GPU only."""

    def __init__(self, enabled: bool | None = None) -> None:
        self.enabled = enabled
        self.entries: dict[Hashable, Any] = {}
        self._pool: Any = None

    def serves(self, model: nn.Module) -> bool:
        """True if this model decodes by graphs."""
        on_gpu = next(model.parameters()).device.type == "cuda"
        return (on_gpu if self.enabled is None else self.enabled) and supports_cuda_graph(model)

    @contextmanager
    def borrow(self, model: nn.Module, shape: Hashable, build: Callable[[Any], E]) -> Iterator[E]:
        """The entry of this shape and these weights; `build` makes it from a memory pool.

        It has one user at a time: a second one gets another entry. The model is set to eval mode.
        """
        modules = all_modules(model)
        if any(module.training for module in modules):
            model.eval()
        kind = next(model.parameters()).device.type
        if self._pool is None and kind == "cuda":
            # One pool for all graphs: none of them uses what another one left there.
            self._pool = torch.cuda.graph_pool_handle()
        precision = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        key = (shape, precision, _addresses(modules))
        entry = self.entries.pop(key, None) or build(self._pool)
        try:
            yield entry
        finally:
            self.entries[key] = entry
            while self._is_full():
                del self.entries[next(iter(self.entries))]

    def _is_full(self) -> bool:
        count = len(self.entries)
        return count > MAX_ENTRIES or (count > 1 and self.bytes() > MAX_BYTES)

    def bytes(self) -> int:
        return sum(entry.bytes() for entry in self.entries.values())


def _addresses(modules: list[nn.Module]) -> tuple[int, ...]:
    """Where the weights are: a graph would use the old memory after they have moved."""
    tables = [table for part in modules for table in (part._parameters, part._buffers)]
    return tuple(x.data_ptr() for table in tables for x in table.values() if x is not None)
