"""A cache of forward passes: their tensors, with least-recently-used eviction."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from torch import Tensor

from manyheads.web.responses import Problem


@dataclass(frozen=True)
class Trace:
    """Tensors by name, with a JSON `manifest` that describes them.

    A name is `stack.kind.tensor`, as in `encoder.self.weights`. The first index is the layer and
    the second the head, if the tensor has them.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def bytes(self) -> int:
        """Size of the tensors plus the JSON manifest."""
        numbers = sum(tensor.nbytes for tensor in self.tensors.values())
        return numbers + len(json.dumps(self.manifest))


class Traces:
    """Traces by name; the least recently used ones are dropped first."""

    def __init__(self, most_bytes: int, most: int = 256) -> None:
        self.most_bytes, self.most = most_bytes, most
        self.bytes = 0
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._lock = Lock()

    def find(self, name: str) -> Trace | None:
        with self._lock:
            if name in self._traces:
                self._traces.move_to_end(name)
            return self._traces.get(name)

    def get(self, name: str) -> Trace:
        """The trace of that name; raise if it was dropped, and the page requests it again."""
        trace = self.find(name)
        if trace is None:
            raise Problem(
                404, "this trace was dropped from the cache: request it again", "no-trace"
            )
        return trace

    def keep(self, name: str, trace: Trace) -> None:
        self.check(trace.bytes)
        with self._lock:
            if name in self._traces:
                self.bytes -= self._traces.pop(name).bytes
            self._traces[name] = trace
            self.bytes += trace.bytes
            while self.bytes > self.most_bytes or len(self._traces) > self.most:
                self.bytes -= self._traces.popitem(last=False)[1].bytes

    def check(self, size: int) -> None:
        """Raise if a trace exceeds the size of the cache."""
        if size > self.most_bytes:
            raise Problem(
                413,
                f"the maps of this text have {size >> 20} MiB, more than "
                f"{self.most_bytes >> 20} MiB: shorten it",
            )
