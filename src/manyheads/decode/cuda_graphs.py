"""Decoding steps as CUDA graphs: captured once per shape, then replayed with one call.

A step of a decoder is hundreds of kernels of a few microseconds each; launching them takes longer
than computing them. A graph launches them at once. Its tensors stay at fixed addresses, the length
included, so sessions here use a static cache. Short prompts and sources are encoded by graphs too.
On a CPU the same functions run eagerly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.decode.decoder import MakeState, ModelSession, Rows, Texts, has_attention
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.static_cache import StaticCache
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.nn.attention import CrossAttention, Dense, Fused
from manyheads.nn.block import Stack
from manyheads.nn.masks import full, make_mask
from manyheads.nn.shapes import Hidden
from manyheads.optimize import has_gemv, optimize, with_gemv
from manyheads.train.cuda_graphs import capture_graph

WARMUP = 2  # calls before the capture: they choose kernels and allocate tensors
MIN_SIZE = 64
MAX_ENCODED = 2048  # rows · positions of a graphed encoding; beyond it launches cost little
ENCODE_MULTIPLE = 64


# --- Shapes: padded, so that there are few graphs -------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a static cache: texts are padded to them."""

    rows: int
    beams: int
    size: int
    source_size: int

    @classmethod
    def of(cls, texts: Texts, limits: Rows, beams: int) -> "Shape":
        width, longest = texts[0].shape[1], int(limits.max())
        prompt, source = (0, padded_source(width)) if len(texts) > 1 else (width, 0)
        return cls(padded_rows(len(limits)), beams, padded_size(prompt + longest), source)


def padded_size(positions: int) -> int:
    """The next power of two, at least 64."""
    return max(MIN_SIZE, 1 << (positions - 1).bit_length())


def padded_prompt(positions: int) -> int:
    """The next multiple of 64, never more than `padded_size`."""
    return -(-positions // ENCODE_MULTIPLE) * ENCODE_MULTIPLE


def padded_rows(rows: int) -> int:
    """The next power of two up to 64, then the next multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32


def padded_source(positions: int) -> int:
    """The next multiple of 16, to which kernels align masks."""
    return -(-positions // 16) * 16


def can_pad(stack: Stack, rows: int, positions: int) -> bool:
    """True if a stack can encode so many positions, padding included, in one graph.

    With more positions the device is busy, and padding costs time.
    """
    max_length = stack.position.max_length
    exists = max_length is None or positions <= max_length
    return rows * positions <= MAX_ENCODED and exists and has_attention(stack, Dense, Fused)


# --- Graphs ---------------------------------------------------------------------------------------


class GraphedFunction:
    """A function without arguments and results: eager at first, then one CUDA graph."""

    def __init__(
        self, function: Callable[[], object], device: torch.device, pool: Any = None
    ) -> None:
        self.function, self.device, self.pool = function, device, pool
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        if self.device.type == "cuda" and self.graph is None and self.calls >= WARMUP:
            self.graph = self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()
        self.calls += 1

    def _run(self) -> None:
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # A cached cast of a weight would not follow the weight when training continues.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            self.function()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), capture_graph(graph, self.pool, mode="thread_local"):
            self._run()
        return graph


# --- Sessions with a static cache -----------------------------------------------------------------


class StaticGptSession(ModelSession):
    """A decoder-only model; `encode` is called for every batch of prompts."""

    cache: StaticCache

    def __init__(self, model: Gpt, cache: StaticCache, pool: Any = None) -> None:
        super().__init__(model, cache)
        self.pool = pool
        self.prompts = cache.length.new_zeros(cache.sentences, cache.size)
        self.encoders: dict[int, GraphedFunction] = {}  # by padded length

    def encode(self, prompts: Int[Tensor, "n length"]) -> None:
        """All tokens of the prompts but the last ones.

        Short prompts are padded on the right. No token before the padding sees it, and each of its
        slots is overwritten before it is seen.
        """
        rows, length = len(prompts), prompts.shape[1] - 1
        size = padded_prompt(length)
        if size not in self.encoders:
            if length == 0 or not can_pad(self.model.decoder, self.cache.sentences, size):
                self._encode(prompts[:, :-1])
                return
            function = partial(self._encode, self.prompts[:, :size])
            self.encoders[size] = GraphedFunction(function, self.prompts.device, self.pool)
        self.prompts[:rows, :length] = prompts[:, :-1]
        self.encoders[size]()
        self.cache.length.fill_(length)

    def _encode(self, tokens: Int[Tensor, "n length"]) -> None:
        cache = KVCache()
        if tokens.shape[1]:
            self.model.hidden(tokens, cache=cache)
        self.cache.fill(cache)


class StaticSeq2SeqSession(ModelSession):
    """An encoder–decoder; `encode` is called for every batch of sources."""

    cache: StaticCache

    def __init__(self, model: Seq2Seq, cache: StaticCache, pool: Any = None) -> None:
        super().__init__(model, cache)
        rows, size, device = cache.sentences, cache.source_size, cache.length.device
        self.source = cache.length.new_zeros(rows, size)
        self.padding = torch.ones(rows, size, dtype=torch.bool, device=device)
        self.mask = make_mask(full, size, padding_mask=self.padding, device=device)
        self.encoders: dict[int, GraphedFunction] = {}
        if can_pad(model.encoder, rows, size):
            function = partial(self._encode, self.source, self.padding)
            self.encoders[size] = GraphedFunction(function, device, pool)

    def encode(self, source: Int[Tensor, "n s"], padding: Bool[Tensor, "n s"]) -> None:
        """Encode the sources. Unused rows count as real: softmax needs at least one key."""
        rows, width = padding.shape
        self.padding[:rows, :width] = padding
        self.padding[:rows, width:] = False
        self.padding[rows:] = True
        self.source[:rows, :width] = source
        for encoder in self.encoders.values():
            encoder()
        if not self.encoders:
            self._encode(source, padding)
        self.cache.clear()

    def _encode(self, source: Int[Tensor, "n s"], padding: Bool[Tensor, "n s"]) -> None:
        states = self.model.encode(source, padding).states
        for part in self.model.decoder.modules():
            if isinstance(part, CrossAttention):
                self.cache.set_cross_kv(part, *part.project_kv(states))

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        # A new mask object each time: the old one may have cached a bias of older padding. The
        # states of the sources are not needed, because the cache has their keys and values.
        memory = EncoderOutput(self.padding, replace(self.mask))
        return self.model.decode(tokens, memory, cache=self.cache)


class StaticDecoder:
    """A static session and the state of a search or of sampling; their step is one CUDA graph."""

    def __init__(self, model: Any, shape: Shape, make: MakeState, pool: Any) -> None:
        device = next(model.parameters()).device
        if not torch.is_autocast_enabled(device.type):  # our kernels do not follow its dtype
            optimize(model)
            if shape.rows * shape.beams == 1 and has_gemv(model):
                model = with_gemv(model)
        cache = StaticCache(shape.rows, shape.beams, shape.size, device, shape.source_size)
        session = StaticGptSession if isinstance(model, Gpt) else StaticSeq2SeqSession
        self.session: Any = session(model, cache, pool)
        self.state = make(shape.rows, shape.size, device)
        self.step = GraphedFunction(partial(self.state.step, self.session), device, pool)

    def bytes(self) -> int:
        """The size of the cache; the rest is small."""
        return int(self.session.cache.bytes())
