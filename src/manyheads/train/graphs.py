"""Passes over batches as CUDA graphs: recorded once for each shape, then replayed by one call.

A small model's step is hundreds of kernels of a few microseconds each, and the host takes longer
to launch them than the device to compute them. A recorded pass is launched as a whole. What it
reads are copies of the batch at fixed places, what it writes stays at fixed places too: gradients
are added to those that the parameters have.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.experts import Routing
from manyheads.train.ahead import recording, tensors_of
from manyheads.train.objective import Loss

Shares = dict[str, Tensor]  # what a prediction of each term of the loss counts for
Found = tuple[dict[str, Loss], list[Routing]]
Work = Callable[[Any, Shares], Found]  # forward and backward over a batch

AS_IT_IS = 2  # passes of a shape before it is recorded: kernels are chosen and compiled in them
MOST = 128  # shapes that are recorded; rarer ones are computed as they are


def recordable(model: nn.Module) -> bool:
    """Whether a pass is the same kernels each time: no part of the model asks the host."""
    parts = [(part, getattr(part, "core", None)) for part in model.modules()]
    return not any(getattr(one, "asks_host", False) for pair in parts for one in pair)


class Recorded:
    """A pass over batches of one shape. What is no tensor in a batch has no say in it."""

    def __init__(self, work: Work, batch: Any, shares: Shares, pool: Any) -> None:
        self.batch = {name: tensor.clone() for name, tensor in tensors_of(batch).items()}
        self.shares = {name: share.clone() for name, share in shares.items()}
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with recording(self.graph, pool, mode="global"):
            self.found = work(replace(batch, **self.batch), self.shares)

    def __call__(self, batch: Any, shares: Shares) -> Found:
        given = tensors_of(batch)
        places = [*self.batch.values(), *self.shares.values()]
        values = [given[name] for name in self.batch] + [shares[name] for name in self.shares]
        torch._foreach_copy_(places, values, non_blocking=True)
        self.graph.replay()
        losses, routing = self.found  # the next replay writes to the same places
        told = {name: replace(loss, nll=loss.nll.clone()) for name, loss in losses.items()}
        return told, [replace(one, dropped=one.dropped.clone()) for one in routing]


class Recorder:
    """Does the work of a pass, from its third time for a shape on by a recording of it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.met: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, Recorded] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Any, shares: Shares) -> Found:
        tensors = tensors_of(batch).items()
        shape = (*((name, tuple(x.shape), x.dtype) for name, x in tensors), *shares)
        if shape not in self.recorded:
            self.met[shape] += 1
            if self.met[shape] <= AS_IT_IS or len(self.recorded) == MOST:
                return self.work(batch, shares)
            self.recorded[shape] = Recorded(self.work, batch, shares, self.pool)
        return self.recorded[shape](batch, shares)
