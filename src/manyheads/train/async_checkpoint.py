"""Saves of a run, on a GPU of one process written by a thread while it goes on computing.

What is saved is copied from the device at once, so that a save is of one step whatever comes after.
One is written at a time, in order, and a run waits for the last before it ends.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.train import checkpoint
from manyheads.train.checkpoint import Progress

Tensors = dict[str, Tensor]


class Saver:
    """Writes states and snapshots into a run folder, behind the training where `behind` says so."""

    def __init__(self, folder: Path, *, behind: bool) -> None:
        self.folder, self.behind = folder, behind
        self.pending: Future[None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.wait()

    def save(self, state: Tensors, weights: Tensors | None, progress: Progress) -> None:
        """A state to go on from and, for averaging, weights; of this moment."""
        self.wait()
        if not self.behind:
            self._write(partial(checkpoint.write_state, self.folder, state), weights, progress)
            return
        write = partial(checkpoint.write_state, self.folder, _on_host(state))
        held = None if weights is None else _on_host(weights)
        pool = ThreadPoolExecutor(1)
        self.pending = pool.submit(self._write, write, held, copy.deepcopy(progress))
        pool.shutdown(wait=False)  # the thread ends with what it writes

    def save_shards(
        self, model: nn.Module, optimizer: Optimizer, weights: Tensors | None, progress: Progress
    ) -> None:
        """The same of a sharded model, by all processes together; weights by the first alone."""
        write = partial(checkpoint.save_shards, self.folder, model, optimizer)
        self._write(write, weights, progress)

    def wait(self) -> None:
        """For what is being written; what went wrong with it is raised here."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(
        self, write: Callable[[Progress], None], weights: Tensors | None, progress: Progress
    ) -> None:
        if weights is not None:
            checkpoint.snapshot(self.folder, weights, progress.step)
        write(progress)
        if weights is not None:
            checkpoint.drop_old_snapshots(self.folder, progress)


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
