"""Passes over batches as CUDA graphs: recorded once for each shape, then replayed by one call.

A small model's step is hundreds of kernels of a few microseconds each, and the host takes longer
to launch them than the device to compute them. A recorded pass is launched as a whole. What it
reads are copies of the batch at fixed places, and what it writes stays at fixed places too.

Where a step is one pass, its gradients are simply where the recording leaves them: nothing has to
be set to zero before, and nothing added up. They take as much room as the weights for every shape,
so that after some shapes, and where a step is several passes, recordings add to gradients which
all of them share.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.experts import Routing
from manyheads.train.loss import Loss
from manyheads.train.prefetch import recording, tensors_of

Shares = dict[str, Tensor]  # what a prediction of each term of the loss counts for
Found = tuple[dict[str, Loss], list[Routing]]
Work = Callable[[Any, Shares], Found]  # forward and backward over a batch
Gradients = list[Tensor | None]  # of all weights of a model; none where no loss reaches

AS_IT_IS = 2  # passes of a shape before it is recorded: kernels are chosen and compiled in them
MOST = 128  # shapes that are recorded; rarer ones are computed as they are
OWN_BYTES = 2 * 2**30  # of gradients that recordings have of their own; the first has them anyway


def recordable(model: nn.Module) -> bool:
    """Whether a pass is the same kernels each time: no part of the model asks the host."""
    parts = [(part, getattr(part, "core", None)) for part in model.modules()]
    return not any(getattr(one, "has_host_sync", False) for pair in parts for one in pair)


class Recorded:
    """A pass over batches of one shape. What is no tensor in a batch has no say in it.

    `gradients` are where each replay leaves them; None where it adds to those that there are.
    """

    def __init__(
        self, work: Work, batch: Any, shares: Shares, pool: Any, owners: list[nn.Parameter] | None
    ) -> None:
        self.batch = {name: tensor.clone() for name, tensor in tensors_of(batch).items()}
        self.shares = {name: share.clone() for name, share in shares.items()}
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with recording(self.graph, pool, mode="global"):
            self.found = work(replace(batch, **self.batch), self.shares)
        self.gradients: Gradients | None = None
        if owners is not None:
            self.gradients = [weight.grad for weight in owners]

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
    """Does the work of a pass, from its third time for a shape on by a recording of it.

    `alone` says that a step is one pass. After each step `forget` is to be called.
    """

    def __init__(self, work: Work, model: nn.Module, *, alone: bool) -> None:
        self.work, self.alone = work, alone
        self.weights = list(model.parameters())
        self.met: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, Recorded] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.shared: Gradients | None = None
        self.adding, self.owned = not alone, 0

    def __call__(self, batch: Any, shares: Shares) -> Found:
        tensors = tensors_of(batch).items()
        shape = (*((name, tuple(x.shape), x.dtype) for name, x in tensors), *shares)
        if shape not in self.recorded:
            self.met[shape] += 1
            if self.met[shape] <= AS_IT_IS or len(self.recorded) == MOST:
                return self.work(batch, shares)
            self.recorded[shape] = self._record(batch, shares)
        one = self.recorded[shape]
        found = one(batch, shares)
        if self.alone:
            self.adding = one.gradients is None
            self._give(one.gradients or self.shared)
        return found

    def forget(self) -> None:
        """The gradients of a step, when it is done."""
        if self.adding:
            torch._foreach_zero_([w.grad for w in self.weights if w.grad is not None])
        if self.alone:
            self.adding = False
            self._give([None] * len(self.weights))

    def _record(self, batch: Any, shares: Shares) -> Recorded:
        size = sum(weight.numel() * weight.element_size() for weight in self.weights)
        own = self.alone and (not self.recorded or self.owned + size <= OWN_BYTES)
        if own:
            self.owned += size
        elif self.alone:
            self.shared = self.shared or self._zeros()
            self._give(self.shared)
        return Recorded(self.work, batch, shares, self.pool, self.weights if own else None)

    def _zeros(self) -> Gradients:
        """For the weights that a loss reaches, as the first recording knows."""
        known = next(iter(self.recorded.values())).gradients or []
        return [None if one is None else torch.zeros_like(one) for one in known]

    def _give(self, gradients: Gradients | None) -> None:
        assert gradients is not None
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
