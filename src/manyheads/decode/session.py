"""Models in the middle of decoding: with a growing cache, or a static one for CUDA graphs."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decode.cuda_graphs import (
    GraphedFunction,
    can_pad,
    padded_prompt,
    supports_cuda_graph,
)
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.static_cache import StaticCache
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.nn.attention import CrossAttention
from manyheads.nn.masks import full, make_mask
from manyheads.nn.shapes import Hidden

Prompts = Int[Tensor, "n length"]
Sources = Int[Tensor, "n s"]
SourcePadding = Bool[Tensor, "n s"]


class ModelSession:
    """A model and its cache; one step reads the newest token of every hypothesis."""

    def __init__(self, model: Any, cache: KVCache | StaticCache) -> None:
        self.model, self.cache = model, cache

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        # Before hypotheses differ a growing cache holds one of each sentence.
        hidden = self.hidden(tokens[:, : self.cache.beams])
        logits = self.model.logits(hidden.flatten(0, 1)).unflatten(0, (len(tokens), -1))
        repeats = tokens.shape[1] // logits.shape[1]
        return logits.repeat_interleave(repeats, 1) if repeats > 1 else logits

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        raise NotImplementedError

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        self.cache.reorder(parents)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        raise NotImplementedError  # a static batch keeps its shape


class GptSession(ModelSession):
    """A decoder-only model; the last token of a prompt is read by the first step."""

    model: Gpt
    cache: KVCache

    def __init__(self, model: Gpt, prompts: Prompts) -> None:
        super().__init__(model, KVCache(shared=supports_cuda_graph(model)))
        if prompts.shape[1] > 1:
            model.hidden(prompts[:, :-1], cache=self.cache)

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        return self.model.hidden(tokens, cache=self.cache)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.cache.keep_sentences(sentences)


class Seq2SeqSession(ModelSession):
    """An encoder–decoder. Only Transformers read hypotheses as positions, the others as rows."""

    model: EncoderDecoder
    cache: KVCache

    def __init__(self, model: EncoderDecoder, source: Sources, padding: SourcePadding) -> None:
        super().__init__(model, KVCache(shared=supports_cuda_graph(model)))
        self.rows = not isinstance(model, Seq2Seq)
        self.memory = model.encode(source, padding)

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        read = tokens.reshape(-1, 1) if self.rows else tokens
        return self.model.decode(read, self.memory, cache=self.cache)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.cache.keep_sentences(sentences)
        sight = self.memory.mask
        real = None if sight.padding_mask is None else sight.padding_mask[sentences]
        self.memory = EncoderOutput(
            self.memory.states[sentences], replace(sight, padding_mask=real)
        )


class StaticGptSession(ModelSession):
    """A decoder-only model for CUDA graphs; `read` is called for every batch of prompts."""

    cache: StaticCache

    def __init__(self, model: Gpt, cache: StaticCache, pool: Any = None) -> None:
        super().__init__(model, cache)
        self.pool = pool
        self.prompts = cache.length.new_zeros(cache.sentences, cache.size)
        self.readers: dict[int, GraphedFunction] = {}

    def read(self, prompts: Prompts) -> None:
        """All tokens of the prompts but the last ones.

        Short prompts are padded on the right. No token before the padding sees it, and each of its
        slots is written again before it is seen.
        """
        rows, length = len(prompts), prompts.shape[1] - 1
        reader = self._reader(padded_prompt(length)) if length else None
        if reader is None:
            self._read(prompts[:, :-1])
            return
        self.prompts[:rows, :length] = prompts[:, :-1]
        reader()
        self.cache.length.fill_(length)

    def _reader(self, size: int) -> GraphedFunction | None:
        if size not in self.readers:
            if not can_pad(self.model.decoder, self.cache.sentences, size):
                return None
            function = partial(self._read, self.prompts[:, :size])
            self.readers[size] = GraphedFunction(function, self.prompts.device, self.pool)
        return self.readers[size]

    def _read(self, tokens: Prompts) -> None:
        cache = KVCache()
        if tokens.shape[1]:
            self.model.hidden(tokens, cache=cache)
        self.cache.fill(cache)

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        return self.model.hidden(tokens, cache=self.cache)


class StaticSeq2SeqSession(ModelSession):
    """An encoder–decoder for CUDA graphs; `read` is called for every batch of sources."""

    cache: StaticCache

    def __init__(self, model: Seq2Seq, cache: StaticCache, pool: Any = None) -> None:
        super().__init__(model, cache)
        rows, size, device = cache.sentences, cache.source_size, cache.length.device
        self.source = cache.length.new_zeros(rows, size)
        self.padding = torch.ones(rows, size, dtype=torch.bool, device=device)
        self.sight = make_mask(full, size, padding_mask=self.padding, device=device)
        function = partial(self._read, self.source, self.padding)
        padded = can_pad(model.encoder, rows, size)
        self.reader = GraphedFunction(function, device, pool) if padded else None

    def read(self, source: Sources, padding: SourcePadding) -> None:
        """Encode the sources; rows without one count as real, for they must see something."""
        rows, width = padding.shape
        self.padding[:rows, :width] = padding
        self.padding[:rows, width:] = False
        self.padding[rows:] = True
        if self.reader is None:
            self._read(source, padding)
        else:
            self.source[:rows, :width] = source
            self.reader()
        self.cache.clear()

    def _read(self, source: Sources, padding: SourcePadding) -> None:
        states = self.model.encode(source, padding).states
        for part in self.model.decoder.modules():
            if isinstance(part, CrossAttention):
                self.cache.set_cross_kv(part, *part.project_kv(states))

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        # A new mask object each time: the old one may hold what it computed from older padding.
        # The states of the sources are not needed: the cache has their keys and values.
        memory = EncoderOutput(self.padding, replace(self.sight))
        return self.model.decode(tokens, memory, cache=self.cache)
