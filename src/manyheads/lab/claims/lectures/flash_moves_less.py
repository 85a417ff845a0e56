"""Exact attention without the n × n matrix: memory, memory traffic, and time."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, in_parts
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.cost import CoreSettings, Setup, Trial, draw, exponent
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.tiled import Tiled

LENGTHS, LARGE_LENGTHS = (512, 1024, 2048, 4096), (2048, 4096, 8192, 16384)
BLOCK, LARGE_BLOCK = 256, 1024
ROUNDS = 3
COUNTED = 2048  # the length at which bytes are counted
PAGE = 4096
FAST, SMALL_FAST = 2**20, 2**19  # bytes
SQUARES = 16  # b × b buffers of one block: scores, their intermediates and gradients


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations move into and out of a small fast memory, in pages.

    It simulates a write-back LRU cache. A read of a missing page loads it. A full cache first drops
    the pages of freed tensors, then evicts the least recently used page, which costs a write if
    the page is dirty.
    """

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.written: OrderedDict[int, bool] = OrderedDict()  # by page, the most recently used last
        self.pages: dict[StorageWeakRef, set[int]] = {}
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        only_a_view = outputs and all(x.untyped_storage().data_ptr() in storages for x in outputs)
        if func._schema.is_mutable or not only_a_view:
            self._drop()
            for tensor in inputs:
                self._touch(tensor, writes=False)
            for tensor in outputs:
                self._touch(tensor, writes=True)
        return result

    def _drop(self) -> None:
        for storage in [each for each in self.pages if each.expired()]:
            for page in self.pages.pop(storage):
                self.written.pop(page, None)

    def _touch(self, tensor: torch.Tensor, *, writes: bool) -> None:
        if not tensor.numel():
            return
        pages = self.pages.setdefault(StorageWeakRef(tensor.untyped_storage()), set())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize
        first = tensor.data_ptr()
        for page in range(first // PAGE, (first + span - 1) // PAGE + 1):
            pages.add(page)
            if page not in self.written and not writes:
                self.bytes += PAGE
            self.written[page] = writes or self.written.get(page, False)
            self.written.move_to_end(page)
            if len(self.written) > self.room // PAGE:
                self.bytes += PAGE * self.written.popitem(last=False)[1]


def block_for(room: int) -> int:
    """The largest block size b such that SQUARES buffers of b² floats fit into the fast memory."""
    return math.isqrt(room // (SQUARES * torch.float32.itemsize))


def fewer(setup: Setup, room: int) -> float:
    """Bytes moved by `dense` divided by those of `tiled`, forward and backward."""
    trials, moved = trials_of(setup, COUNTED, block_for(room)), {}
    for name in ("dense", "tiled"):
        with Traffic(room) as traffic:
            trials[name].seconds()
        moved[name] = traffic.bytes
    return moved["dense"] / moved["tiled"]


def trials_of(setup: Setup, length: int, block: int) -> dict[str, Trial]:
    inputs = draw(setup, length)
    cores: dict[str, CoreSettings] = {
        "dense": Dense(),
        "tiled": Tiled(block=block),
        "fused": Fused(),
    }
    return {name: Trial(core, setup, inputs) for name, core in cores.items()}


def apart(trials: Mapping[str, Trial]) -> float:
    """The largest relative difference of outputs and gradients from those of `dense`."""
    results = {}
    for name, trial in trials.items():
        mixed = trial.forward()
        results[name] = torch.stack(
            [mixed.detach(), *(x for x in trial.backward(mixed) if x is not None)]
        )
    exact = results.pop("dense")
    return max(float((other - exact).abs().max() / exact.abs().max()) for other in results.values())


def measure(setting: Setting) -> Measured:
    numbers: dict[str, list[float]] = {}
    memory: dict[str, list[tuple[int, float]]] = {}
    lengths = LARGE_LENGTHS if setting.large else LENGTHS
    for seed in setting.seeds:
        setup = Setup(device=setting.device, heads=1, seed=seed)
        memory = {name: [] for name in ("dense", "tiled", "fused")}
        for length in lengths:
            trials = trials_of(setup, length, LARGE_BLOCK if setting.large else BLOCK)
            for name, trial in trials.items():
                memory[name].append((length, trial.memory()[1] / 2**20))
        calls = {name: trial.seconds for name, trial in trials.items()}
        times = side_by_side(calls, ROUNDS, setting.device)
        # On the CPU, since the count needs addresses; traffic inside a kernel is not counted.
        counted = replace(setup, device=torch.device("cpu"))
        values = {
            "apart": apart(trials_of(counted, COUNTED, block_for(FAST))),
            # From the two longest lengths, where the memory of one block is negligible.
            **{f"{name} memory, n": exponent(memory[name][-2:]) or 0.0 for name in memory},
            "memory": memory["dense"][-1][1] / memory["fused"][-1][1],
            "moved": fewer(counted, FAST),
            "moved, small memory": fewer(counted, SMALL_FAST),
            **{f"{name} faster": times["dense"] / times[name] for name in ("tiled", "fused")},
        }
        for name, value in values.items():
            numbers.setdefault(name, []).append(value)
    return Measured(
        numbers=numbers,
        lines=memory,
        across="n",
        up="MiB at the peak of forward and backward",
        logarithmic=("across", "up"),
    )


def judge(measured: Measured) -> Judged:
    exact = measured.most("apart") < 1e-4
    linear = (
        measured.least("dense memory, n") > 1.7
        and max(measured.most(f"{name} memory, n") for name in ("tiled", "fused")) < 1.3
    )
    reported = measured.reported
    parts = {
        "it is exact": exact,
        "memory grows as n and not as n²": linear,
        "fewer bytes are moved": measured.least("moved") > 2,
        "it is faster": measured.mean("fused faster") > 1.2,
    }
    why = (
        f"equal to within {reported('apart')}; memory grows as n^{reported('dense memory, n')} "
        "with the "
        f"matrix, without it as n^{reported('tiled memory, n')} (tiled) and "
        f"n^{reported('fused memory, n')} (fused), and at the longest {reported('memory')} times "
        "as "
        f"much is held with it; the textbook moves {reported('moved')} times the bytes of "
        f"the blocks through 1 MiB of fast memory "
        f"({reported('moved, small memory')} times through half of it); without the matrix it is "
        f"{reported('fused faster')} times as fast in one kernel, {reported('tiled faster')} "
        "times as a "
        f"loop of PyTorch operations"
    )
    return in_parts(parts, why, needed=list(parts)[:2])


CLAIM = Claim(
    sentence="Attention can be computed exactly block by block, without ever holding the n × n "
    "matrix: memory grows as n instead of n², fewer bytes are moved, and it is faster.",
    lectures="002, 003",
    criterion="results and gradients equal to 1e-4 (float32); exponents of memory, from the last "
    "length but one to the last, above 1.7 with the matrix and below 1.3 without; less than half "
    "of the bytes moved through a fast memory of 1 MiB; at least 1.2 times as fast in one kernel",
    measure=measure,
    judge=judge,
)
