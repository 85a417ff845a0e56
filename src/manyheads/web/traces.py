"""What was captured of a pass through a model, kept as long as there is room for it."""

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
    """Tensors by name, and what a page has to know of them (`manifest`, JSON).

    A name is `stack.kind.what`, as in `encoder.self.weights`. The first index is the layer, the
    second the head, so far as the tensor has them.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def bytes(self) -> int:
        """Of its numbers, and of its manifest as it is sent."""
        numbers = sum(tensor.nbytes for tensor in self.tensors.values())
        return numbers + len(json.dumps(self.manifest))


class Traces:
    """Traces by name; the longest unused ones make room for a new one."""

    def __init__(self, most_bytes: int, most: int = 256) -> None:
        self.most_bytes, self.most = most_bytes, most
        self.bytes = 0
        self._kept: OrderedDict[str, Trace] = OrderedDict()
        self._lock = Lock()

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
            if name in self._kept:
                self.bytes -= self._kept.pop(name).bytes
            self._kept[name] = trace
            self.bytes += trace.bytes
            while self.bytes > self.most_bytes or len(self._kept) > self.most:
                self.bytes -= self._kept.popitem(last=False)[1].bytes

    def check(self, size: int) -> None:
        """Refuse what would not fit even alone."""
        if size > self.most_bytes:
            raise Problem(
                413,
                f"the maps of this text are {size >> 20} MiB, and {self.most_bytes >> 20} MiB are "
                "kept at most: send a shorter text",
            )
