"""What was captured of a pass through a model, kept as long as there is room for it."""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import Tensor

from manyheads.web.answers import Problem


@dataclass(frozen=True)
class Trace:
    """Tensors by name, and what a page has to know of them (`manifest`, JSON).

    A name is `stack.kind.what`, as in `encoder.self.weights`. The first index is the layer, the
    second the head, so far as the tensor has them.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Traces:
    """Traces by name; the longest unused ones make room for a new one."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[str, Trace] = OrderedDict()
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        return sum(trace.bytes for trace in self._kept.values())

    def find(self, name: str) -> Trace | None:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def get(self, name: str) -> Trace:
        """The trace of that name; a page whose trace was dropped asks for it anew."""
        trace = self.find(name)
        if trace is None:
            raise Problem(404, "this trace is not kept any more: ask for it again", "no-trace")
        return trace

    def keep(self, name: str, trace: Trace) -> None:
        self.check(trace.bytes)
        with self._lock:
            self._kept[name] = trace
            self._kept.move_to_end(name)
            while self.bytes > self.most_bytes:
                self._kept.popitem(last=False)

    def check(self, size: int) -> None:
        """Refuse what would not fit even alone."""
        if size > self.most_bytes:
            raise Problem(
                413,
                f"the maps of this text are {size >> 20} MiB, and {self.most_bytes >> 20} MiB are "
                "kept at most: send a shorter text",
            )
