"""The gradients of a step: a task's losses, forward and backward, micro-batch by micro-batch.

    L = Σ_terms weight · Σ_micro-batches objective / count

Each term is divided by its number of predictions in all micro-batches of the step. So accumulated
batches, and batches split over processes, have the gradient of one large batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch import distributed as dist

from manyheads import ops
from manyheads.data.batching import IGNORE_INDEX
from manyheads.nn.experts import ExpertFeedForward, Routing, take_routing

B = TypeVar("B")


@dataclass(frozen=True)
class Loss:
    """A term of the training loss, as sums over `count` predictions.

    `objective` is differentiated; `nll` is reported (−log p without label smoothing); `weight` is
    the factor of the term in the total. `correct` counts correct binary predictions.
    """

    objective: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    count: int
    weight: float = 1.0
    correct: Int[Tensor, ""] | None = None


def cross_entropy(
    hidden: Float[Tensor, "*n d"],
    matrix: Float[Tensor, "v d"],
    labels: Int[Tensor, "*n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    smoothing: float = 0.0,
    loss_mask: Bool[Tensor, "*n"] | None = None,
    count: int | None = None,
) -> Loss:
    """Cross-entropy with label smoothing ε, computed together with the output layer.

    L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b

    Positions outside `loss_mask`, or with the label IGNORE_INDEX, do not count. `count` is the
    number of the others; if the caller knows it, a GPU need not be waited for.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if loss_mask is not None and hidden.device.type == "cpu":  # where it is cheap to drop rows
        hidden, labels = hidden[loss_mask.flatten()], labels[loss_mask.flatten()]
    elif loss_mask is not None:
        labels = labels.masked_fill(~loss_mask.flatten(), IGNORE_INDEX)
    if count is None:
        count = int((labels != IGNORE_INDEX).sum())
    objective, nll = ops.linear_cross_entropy(hidden, matrix, bias, labels, smoothing)
    return Loss(objective, nll, count)


Result = tuple[dict[str, Loss], list[Routing]]  # of one micro-batch


@runtime_checkable
class Task(Protocol[B]):
    """The interface between the training loop and a task."""

    notes: list[str]  # remarks on the data, shown before training
    digest: str  # identifies the training data: a run resumes only with the same
    per_epoch: int  # steps in one pass over the data

    def batches(self, step: int) -> list[B]:
        """The micro-batches of a step: a pure function of it."""

    def tokens(self, batch: B) -> int:
        """Tokens of a batch, for reporting throughput."""

    def counts(self, batch: B) -> dict[str, int]:
        """The number of predictions of each loss term in a batch."""

    def losses(self, model: nn.Module, batch: B) -> dict[str, Loss]:
        """The loss terms of a batch, each summed over its predictions."""

    def describe(self, step: int) -> str:
        """Which examples a step contains, to find a broken one."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Scores on held-out data; `loss` selects the best checkpoint."""


class Objective(nn.Module):
    """A model and its task as one module, from a batch to loss terms.

    DDP and FSDP wrap it: their hooks have to see where a forward pass begins and ends.
    """

    def __init__(self, model: nn.Module, task: Task[Any]) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.has_experts = any(isinstance(part, ExpertFeedForward) for part in model.modules())

    def counts(self, batch: Any) -> dict[str, int]:
        counts = self.task.counts(batch)
        return counts | {"balance": 1} if self.has_experts else counts

    def forward(self, batch: Any) -> Result:
        """The loss terms and the experts' routing; the balance of the experts is a term too."""
        losses = self.task.losses(self.model, batch)
        routing = take_routing(self.model) if self.has_experts else []
        if routing:
            balance = torch.stack([layer.loss for layer in routing]).sum()
            losses = losses | {"balance": Loss(balance, balance.detach(), 1)}
        return losses, routing


class StepStats:
    """A step's tokens and, for each loss term, its sum, weight and number of predictions.

    Of `routed` choices of experts, `dropped` were over the capacity.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.counts: Counter[str] = Counter()
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}
        self.dropped: Tensor | int = 0
        self.routed: Tensor | int = 0
        self.grad_norm: Tensor | float = 0.0  # before clipping

    def add_counts(self, tokens: int, counts: dict[str, int]) -> None:
        """Of a micro-batch, before any is computed: gradients need the counts of all."""
        self.tokens += tokens
        self.counts.update(counts)

    def divisors(self) -> dict[str, int]:
        return {name: max(1, count) for name, count in self.counts.items()}

    def add(self, losses: dict[str, Loss], routing: list[Routing], *, counted: bool = True) -> None:
        """The results of a micro-batch; one that is not counted adds zeros."""
        for name, loss in losses.items():
            nll = loss.nll.detach() if counted else torch.zeros_like(loss.nll)
            self.sums[name] = self.sums[name] + nll if name in self.sums else nll
            self.weights[name] = loss.weight
        for layer in routing if counted else ():
            self.dropped, self.routed = self.dropped + layer.dropped, self.routed + layer.places

    def nll(self) -> float:
        return float(sum(self.sums.values()))


class ForwardBackward:
    """Adds the gradients of a step's micro-batches, one after the other, on one device."""

    def __init__(self, objective: nn.Module, dtype: torch.dtype) -> None:
        self.objective, self.dtype = objective, dtype
        self.device = next(objective.parameters()).device

    def __call__(self, batches: list[Any], stats: StepStats) -> None:
        for batch in batches:
            stats.add(*self.micro_batch(batch, stats.divisors()))

    def micro_batch(self, batch: Any, divisors: Mapping[str, Any]) -> Result:
        """One pass, on the device only: a CUDA graph can capture it."""
        losses, routing = self.losses(batch)
        weighted_sum(losses, divisors).backward()
        # Detached: memory of the autograd graph must not outlive a capture.
        detached = {
            name: replace(loss, objective=loss.nll.detach(), nll=loss.nll.detach())
            for name, loss in losses.items()
        }
        return detached, [replace(layer, loss=layer.loss.detach()) for layer in routing]

    def losses(self, batch: Any) -> Result:
        with torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16):
            result: Result = self.objective(batch)
        return result

    @contextmanager
    def validation(self) -> Iterator[bool]:
        """The model is ready to be evaluated, if this process takes part in that."""
        yield True

    def zero_grad(self) -> None:
        self.objective.zero_grad()


def weighted_sum(losses: dict[str, Loss], divisors: Mapping[str, Any]) -> Tensor:
    """Σ_terms weight · objective / count, what a micro-batch adds to the loss of its step."""
    terms = [loss.objective * loss.weight / divisors[name] for name, loss in losses.items()]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


@dataclass(frozen=True)
class World:
    """The processes of a training: this one is `rank` of `size`, and `local_rank` on its machine.

    The main process, of rank 0, writes the run folder and the messages. `parallel.connected` makes
    the world of processes that torchrun has started.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_max(self, number: int) -> int:
        """The largest number of any process; also a barrier."""
        if not self.is_distributed:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process, then the others; none continues before all are done."""
        if not self.is_main:
            self.all_max(0)
        yield
        if self.is_main:
            self.all_max(0)
        self.all_max(0)

    def broadcast(self, scores: dict[str, float]) -> dict[str, float]:
        """The scores of the main process."""
        objects = [scores]
        if self.is_distributed:
            dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
        return objects[0]

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors of those that FSDP shards, on the main process; none on the others."""
        if not self.is_distributed:
            return tensors
        gathered = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.is_main:
                gathered[name] = full.cpu()
        return gathered


ONE_PROCESS = World()
