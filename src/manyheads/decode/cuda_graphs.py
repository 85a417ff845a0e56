"""Decoding steps as CUDA graphs: captured once per shape, then replayed by one call.

A step of a decoder is hundreds of kernels of a few microseconds each, and the host takes longer to
launch them than the device to compute them. A graph launches them at once; its tensors stay at
fixed addresses, the length among them. Short prompts and sources are read by graphs too. On a CPU
the same functions simply run.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.attention import CrossAttention, Dense, Fused, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.flex import Flex
from manyheads.train.prefetch import capture_graph

WARMUP = 2  # calls before the capture: they choose kernels and allocate tensors
# Most entries of a cache, and their most bytes; the least recently used one goes first.
MAX_ENTRIES, MAX_BYTES = 8, 8 * 2**30
MIN_SIZE = 64
MAX_READ = 2048  # positions of all rows; with more, launches are not what takes the time
READ_MULTIPLE = 64


def supports_cuda_graph(model: nn.Module) -> bool:
    """True if every step runs the same kernels, with exact attention, and nothing has hooks.

    Recurrent models and decoder-only seq2seq have states of other shapes; experts ask the host
    which of them were chosen; approximate attention depends on the order of the slots.
    """
    if not isinstance(model, Gpt | Seq2Seq):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in _modules(model)):
        return False
    return _has_cores(model.decoder, Dense, Fused, Flex)


def _has_cores(stack: Stack, *kinds: type) -> bool:
    """True if all attention is of these kinds, and there are no experts."""
    modules = _modules(stack)
    attentions = [part for part in modules if isinstance(part, SelfAttention | CrossAttention)]
    experts = any(isinstance(part, ExpertFeedForward) for part in modules)
    return not experts and all(type(part.core) in kinds for part in attentions)


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules; faster than `modules()`, which makes their names, and called for every text."""
    found, left = [], [model]
    while left:
        part = left.pop()
        found.append(part)
        left.extend(inner for inner in part._modules.values() if inner is not None)
    return found


def can_pad(stack: Stack, rows: int, positions: int) -> bool:
    """True if a stack may read so many positions, padding among them, in one graph.

    With more of them the device is busy, and padding costs time.
    """
    most = stack.position.max_length
    exists = most is None or positions <= most
    return rows * positions <= MAX_READ and exists and _has_cores(stack, Dense, Fused)


def padded_size(positions: int) -> int:
    """The next power of two."""
    return max(MIN_SIZE, 1 << (positions - 1).bit_length())


def padded_prompt(positions: int) -> int:
    """The next multiple of 64, never more than `padded_size`."""
    return -(-positions // READ_MULTIPLE) * READ_MULTIPLE


def padded_rows(rows: int) -> int:
    """The next power of two up to 64, then the next multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32


def padded_source(positions: int) -> int:
    """The next multiple of 8."""
    return -(-positions // 8) * 8


# Try all kernel sizes; where PyTorch multiplies one row, fuse that with its neighbours.
INDUCTOR: dict[str, Any] = {"coordinate_descent_tuning": True}


def compile_after_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, eager at its first call, which allocates tensors, and compiled from then on.

    PyTorch compiles a function only a few times: each call here makes another function of it.
    """
    assert isinstance(method, MethodType)
    of: Any = method.__func__
    code = of.__code__.replace()
    alike = FunctionType(code, of.__globals__, of.__name__, of.__defaults__, of.__closure__)
    fast = torch.compile(MethodType(alike, method.__self__), dynamic=False, options=INDUCTOR)
    called = False

    def call(*args: Any) -> Any:
        nonlocal called
        chosen, called = fast if called else method, True
        return chosen(*args)

    return call


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
        # A cached cast of a weight would not follow the weight when it is trained on.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            self.function()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), capture_graph(graph, self.pool, mode="thread_local"):
            self._run()
        return graph


@runtime_checkable
class Entry(Protocol):
    """Something with a captured graph and its tensors."""

    def bytes(self) -> int: ...


E = TypeVar("E", bound=Entry)


class GraphCache:
    """The graphs of one decoder, by shape and settings; by default on a GPU only.

    `compiled`: a step is compiled before it is captured, which fuses kernels and takes as long as
    thousands of steps. Sampling is compiled with its model; of a beam search only the model, since
    the rest, compiled by PyTorch 2.13, chose other hypotheses.
    """

    def __init__(self, enabled: bool | None = None, *, compiled: bool = False) -> None:
        self.enabled, self.compiled = enabled, compiled
        self.entries: dict[Hashable, Entry] = {}
        self._pool: Any = None

    def serves(self, model: nn.Module) -> bool:
        """True if this model decodes by graphs."""
        on_gpu = next(model.parameters()).device.type == "cuda"
        return (on_gpu if self.enabled is None else self.enabled) and supports_cuda_graph(model)

    @contextmanager
    def borrow(self, model: nn.Module, shape: Hashable, make: Callable[[Any], E]) -> Iterator[E]:
        """The entry of this shape and these weights, made from a memory pool if there is none.

        It has one user at a time: a second one gets another entry. The model is set to eval mode.
        """
        modules = _modules(model)
        if any(module.training for module in modules):
            model.eval()
        key = (shape, _precision(model), _addresses(modules))
        entry: Any = self.entries.pop(key, None)
        if entry is None:
            entry = make(self._shared_pool(model))
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

    def _shared_pool(self, model: nn.Module) -> Any:
        """One for all graphs: none of them reads what another one left there."""
        if self._pool is None and next(model.parameters()).device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


def _precision(model: nn.Module) -> tuple[bool, torch.dtype]:
    kind = next(model.parameters()).device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _addresses(modules: list[nn.Module]) -> tuple[int, ...]:
    """Where the weights are: a graph would read them there also after they have moved."""
    tables = [table for part in modules for table in (part._parameters, part._buffers)]
    return tuple(x.data_ptr() for table in tables for x in table.values() if x is not None)
