"""Steps of writing as CUDA graphs: recorded once for each shape, then replayed by one call.

A step of a decoder is hundreds of kernels of a few microseconds each, and the host takes longer to
launch them than the device to compute them. A recorded step is launched as a whole, and it reads
and writes tensors at fixed places, the number of the step among them. What is read before the first
step is recorded too, if it is little. Elsewhere than on a GPU the same work is simply done.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.flex import Flex
from manyheads.train.prefetch import capture_graph

AS_IT_IS = 2  # steps before one is recorded: kernels are chosen and room is taken in them
ASKED = 16  # steps between two questions to the device whether all is done
# Recordings that are kept, and the most that they hold; the one unused for longest goes first.
MOST, MOST_BYTES = 8, 8 * 2**30
SMALLEST_ROOM = 64
READ = 2048  # positions of all rows, beyond which it is not the host that is waited for
READ_BY = 64  # positions, to a multiple of which what is read is filled up


def steady(model: nn.Module) -> bool:
    """Whether a step of this model is the same kernels at every place, and nobody listens in.

    An LSTM and a joined source have states of other shapes; experts ask the host who chose them;
    a core that is not exact makes something else of a room with empty slots.
    """
    if not isinstance(model, Gpt | Seq2Seq):
        return False
    if any(part._forward_hooks or part._forward_pre_hooks for part in _parts(model)):
        return False
    return _has_cores(model.decoder, Dense, Fused, Flex)


def _has_cores(stack: Stack, *kinds: type) -> bool:
    """Whether all attention is by these cores, and no part chooses experts."""
    parts = _parts(stack)
    attentions = [part for part in parts if isinstance(part, SelfAttention | CrossAttention)]
    chosen = any(isinstance(part, ExpertFeedForward) for part in parts)
    return not chosen and all(type(part.core) in kinds for part in attentions)


def _parts(model: nn.Module) -> list[nn.Module]:
    """All modules; `modules()` names them on its way, and is asked before every text."""
    found, left = [], [model]
    while left:
        part = left.pop()
        found.append(part)
        left.extend(inner for inner in part._modules.values() if inner is not None)
    return found


def reads_filled_up(stack: Stack, rows: int, positions: int) -> bool:
    """Whether a stack reads so many positions, some of them empty, by the same kernels each time.

    So many that the device is busy with them are read as they are.
    """
    most = stack.position.max_length
    there = most is None or positions <= most
    return rows * positions <= READ and there and _has_cores(stack, Dense, Fused)


def room_for(positions: int) -> int:
    """The next power of two."""
    return max(SMALLEST_ROOM, 1 << (positions - 1).bit_length())


def room_to_read(positions: int) -> int:
    """The next multiple of 64, which is no more than the room that there is for it."""
    return -(-positions // READ_BY) * READ_BY


def rows_for(rows: int) -> int:
    """The next power of two up to 64, then the next multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32


def source_room_for(positions: int) -> int:
    """The next multiple of 8."""
    return -(-positions // 8) * 8


# The sizes of all kernels are tried out, and where products with one row alone are PyTorch's they
# are written out and joined with what is beside them.
TUNED: dict[str, Any] = {"coordinate_descent_tuning": True}


def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """The work as it is the first time, when room is taken in it, and compiled from then on.

    PyTorch compiles a function a few times and then no more: this is one of its own each time.
    """
    assert isinstance(work, MethodType)
    of: Any = work.__func__
    code = of.__code__.replace()
    alike = FunctionType(code, of.__globals__, of.__name__, of.__defaults__, of.__closure__)
    fast = torch.compile(MethodType(alike, work.__self__), dynamic=False, options=TUNED)
    done = False

    def do(*given: Any) -> Any:
        nonlocal done
        chosen, done = fast if done else work, True
        return chosen(*given)

    return do


class Recorded:
    """Work that is done as it is at first, then by a recording of it."""

    def __init__(self, work: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self.work, self.device, self.pool = work, device, pool
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        if self.device.type == "cuda" and self.graph is None and self.calls >= AS_IT_IS:
            self.graph = self._record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._do()
        self.calls += 1

    def _do(self) -> None:
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # A weight that was cast once would stay as it was when it is trained on.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            self.work()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), capture_graph(graph, self.pool, mode="thread_local"):
            self._do()
        return graph


@runtime_checkable
class Kept(Protocol):
    """What is recorded with its tensors."""

    def bytes(self) -> int: ...


K = TypeVar("K", bound=Kept)


class Recordings:
    """What one writer has recorded, by shape and settings. Unless told, on a GPU alone.

    `compiled`: a step is compiled before it is recorded, which makes fewer kernels of it and takes
    as long as thousands of steps. What is compiled is the drawing of a token with all that comes
    before it; of a search the model alone, since the rest, compiled by PyTorch 2.13, chose other
    hypotheses.
    """

    def __init__(self, wanted: bool | None = None, *, compiled: bool = False) -> None:
        self.wanted, self.compiled = wanted, compiled
        self.kept: dict[Hashable, Kept] = {}
        self._pool: Any = None

    def serve(self, model: nn.Module) -> bool:
        """Whether this model writes by recorded steps."""
        on_gpu = next(model.parameters()).device.type == "cuda"
        return (on_gpu if self.wanted is None else self.wanted) and steady(model)

    @contextmanager
    def lent(self, model: nn.Module, shape: Hashable, make: Callable[[Any], K]) -> Iterator[K]:
        """What was made for this shape of these weights, or is made now from a memory pool.

        It is one user's as long as it is lent: another one at the same time gets one of its own.
        The model drops nothing from then on.
        """
        parts = _parts(model)
        if any(part.training for part in parts):
            model.eval()
        key = (shape, _precision(model), _weights(parts))
        found: Any = self.kept.pop(key, None)
        if found is None:
            found = make(self._shared_pool(model))
        try:
            yield found
        finally:
            self.kept[key] = found
            while len(self.kept) > MOST or (len(self.kept) > 1 and self.bytes() > MOST_BYTES):
                del self.kept[next(iter(self.kept))]

    def bytes(self) -> int:
        """What the kept ones hold."""
        return sum(one.bytes() for one in self.kept.values())

    def _shared_pool(self, model: nn.Module) -> Any:
        """One for all recordings: nothing that one of them leaves there is read by another."""
        if self._pool is None and next(model.parameters()).device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


def _precision(model: nn.Module) -> tuple[bool, torch.dtype]:
    kind = next(model.parameters()).device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _weights(parts: list[nn.Module]) -> tuple[int, ...]:
    """Where they are: a recording of a model that has been moved since reads elsewhere."""
    tables = [table for part in parts for table in (part._parameters, part._buffers)]
    return tuple(x.data_ptr() for table in tables for x in table.values() if x is not None)
