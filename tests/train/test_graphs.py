"""Whose gradients a recorded pass writes. Graphs are stood in for; test_gpu.py has a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.train import cuda_graphs as graphs
from manyheads.train.cuda_graphs import Found, Recorded, Recorder, Shares

SHAPES = [2, 3, 2, 5, 3, 2, 5, 2, 3, 5, 4, 5, 3, 2, 2, 4]  # rows of the batches to come


@dataclass(frozen=True)
class Rows:
    x: Tensor


class Model(nn.Module):
    """Two layers, and a weight that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.idle = nn.Parameter(torch.ones(2))


class Replayed(Recorded):
    """As a graph does it: recording computes nothing, and a replay writes to where it was."""

    def __init__(
        self, work: Any, batch: Any, shares: Shares, pool: Any, owners: list[nn.Parameter] | None
    ) -> None:
        given = self.weights = owners or ALL
        before = [None if w.grad is None else w.grad.clone() for w in given]
        super().__init__(work, batch, shares, pool, owners)
        for weight, old in zip(given, before, strict=True):
            if old is not None:
                assert weight.grad is not None
                weight.grad.copy_(old)
        self.added = [weight.grad for weight in given]
        self.graph.replay = lambda: self.again(work)  # type: ignore[method-assign]

    def again(self, work: Any) -> None:
        pointed = [weight.grad for weight in self.weights]
        for weight, place in zip(self.weights, self.added, strict=True):
            weight.grad = None if self.gradients is not None else place
        work(Rows(**self.batch), self.shares)
        for weight, place in zip(self.weights, self.added, strict=True):
            if place is not None and self.gradients is not None:
                assert weight.grad is not None
                place.copy_(weight.grad)
        for weight, old in zip(self.weights, pointed, strict=True):
            weight.grad = old


ALL: list[nn.Parameter] = []


@contextmanager
def nothing(*given: Any, **named: Any) -> Iterator[None]:
    yield


class Graph:
    def replay(self) -> None: ...


def weights_after(passes: int, recorder_of: Any) -> dict[str, Tensor]:
    """Steps over batches of several shapes, with decay, which a weight without gradient has not."""
    torch.manual_seed(1)
    model = Model()
    ALL[:] = model.parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def work(batch: Rows, shares: Shares) -> Found:
        (model.parts(batch.x).square().sum() * shares["all"]).backward()
        return {}, []

    recorder = recorder_of(work, model)
    batches = [Rows(torch.randn(rows, 3)) for rows in SHAPES]
    for first in range(0, len(batches), passes):
        for batch in batches[first : first + passes]:
            (recorder or work)(batch, {"all": torch.tensor(0.5)})
        optimizer.step()
        if recorder is None:
            optimizer.zero_grad()
        else:
            recorder.forget()
    return model.state_dict()


@pytest.mark.parametrize("room", [0, 10**9])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_those_of_the_step(
    passes: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape with gradients of its own, or sharing them after the first; one pass or two."""
    wanted = weights_after(passes, lambda work, model: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "recording", nothing)
    monkeypatch.setattr(graphs, "Recorded", Replayed)
    monkeypatch.setattr(graphs, "OWN_BYTES", room)
    made: list[Recorder] = []

    def recorder_of(work: Any, model: nn.Module) -> Recorder:
        made.append(Recorder(work, model, alone=passes == 1))
        return made[-1]

    found = weights_after(passes, recorder_of)
    for name, one in wanted.items():
        assert torch.equal(found[name], one), name
    own = [one.gradients is not None for one in made[0].recorded.values()]
    assert len(own) == 3
    assert own == ([False] * 3 if passes == 2 else [True, bool(room), bool(room)])
