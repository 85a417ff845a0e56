"""Training with CUDA graphs, simulated on a CPU: same weights as eager training.

A graph writes gradients at fixed addresses: its own, or those shared by all graphs. The tests on a
real GPU are in test_gpu.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.train import cuda_graphs
from manyheads.train.cuda_graphs import CudaGraphs, Divisors, GraphedPass
from manyheads.train.step import ForwardBackward, Loss, Result, StepStats

SHAPES = [2, 3, 2, 5, 3, 2, 5, 2, 3, 5, 4, 5, 3, 2, 2, 4]  # rows of successive batches


@dataclass(frozen=True)
class Rows:
    x: Tensor


class Model(nn.Module):
    """Two layers and their loss, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, batch: Rows) -> Result:
        total = self.parts(batch.x).square().sum()
        return {"all": Loss(total, total.detach(), len(batch.x))}, []


class Simulated(GraphedPass):
    """Like a CUDA graph: capture changes no gradient, replay writes to the captured addresses."""

    def __init__(
        self,
        run: Any,
        batch: Any,
        divisors: Divisors,
        pool: Any,
        parameters: list[nn.Parameter] | None,
    ) -> None:
        self.parameters = parameters or PARAMETERS
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        super().__init__(run, batch, divisors, pool, parameters)
        for parameter, old in zip(self.parameters, before, strict=True):
            if old is not None:
                assert parameter.grad is not None
                parameter.grad.copy_(old)
        self.captured = [parameter.grad for parameter in self.parameters]
        self.graph.replay = lambda: self.replay_eagerly(run)  # type: ignore[method-assign]

    def replay_eagerly(self, run: Any) -> None:
        current = [parameter.grad for parameter in self.parameters]
        has_own_gradients = self.gradients is not None
        for parameter, gradient in zip(self.parameters, self.captured, strict=True):
            parameter.grad = None if has_own_gradients else gradient
        run(Rows(**self.batch), self.divisors)
        for parameter, gradient in zip(self.parameters, self.captured, strict=True):
            if gradient is not None and has_own_gradients:
                assert parameter.grad is not None
                gradient.copy_(parameter.grad)
        for parameter, old in zip(self.parameters, current, strict=True):
            parameter.grad = old


PARAMETERS: list[nn.Parameter] = []


@contextmanager
def no_capture(*arguments: Any, **options: Any) -> Iterator[None]:
    yield


class Graph:
    def replay(self) -> None: ...


def train(passes: int, *, graphed: bool) -> tuple[dict[str, Tensor], ForwardBackward]:
    """Steps over several shapes, with weight decay, which skips parameters without gradient."""
    torch.manual_seed(1)
    model = Model()
    PARAMETERS[:] = model.parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    forward_backward = ForwardBackward(model, torch.float32)
    if graphed:
        forward_backward = CudaGraphs(model, torch.float32, single_pass=passes == 1)
    batches = [Rows(torch.randn(rows, 3)) for rows in SHAPES]
    for first in range(0, len(batches), passes):
        stats = StepStats()
        for batch in batches[first : first + passes]:
            stats.add_counts(len(batch.x), {"all": len(batch.x)})
        forward_backward(batches[first : first + passes], stats)
        optimizer.step()
        forward_backward.zero_grad()
    return model.state_dict(), forward_backward


@pytest.mark.parametrize("own_bytes", [0, 10**9])
@pytest.mark.parametrize("passes", [1, 2])
def test_graphed_passes_train_as_eager_ones(
    passes: int, own_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one pass a step, each shape may have its own gradients (up to `own_bytes`)."""
    expected, _ = train(passes, graphed=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_graphs, "capture_graph", no_capture)
    monkeypatch.setattr(cuda_graphs, "GraphedPass", Simulated)
    monkeypatch.setattr(cuda_graphs, "OWN_GRADIENT_BYTES", own_bytes)
    weights, graphed = train(passes, graphed=True)
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
    assert isinstance(graphed, CudaGraphs)
    has_own_gradients = [graph.gradients is not None for graph in graphed.graphs.values()]
    assert has_own_gradients == (
        [False] * 3 if passes == 2 else [True, bool(own_bytes), bool(own_bytes)]
    )
