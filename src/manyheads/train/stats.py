"""What steps are measured by: tokens, and for each term of the loss its sum and its count."""

import time
from typing import Any

import torch

from manyheads.nn.experts import Routing
from manyheads.train.cuda_graphs import Shares
from manyheads.train.loss import Loss
from manyheads.train.parallel import World


class Step:
    """What a step was measured by: its tokens, and for each term of the loss sum and count."""

    def __init__(self) -> None:
        self.tokens = 0
        self.counts: dict[str, int] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float] = {}
        self.told: dict[str, list[tuple[torch.Tensor, torch.Tensor | int]]] = {}

    def expect(self, tokens: int, counts: dict[str, int]) -> None:
        """Before any of it is computed: what a micro-batch brings."""
        self.tokens += tokens
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def shares(self, device: torch.device) -> Shares:
        """What a prediction of each term counts for in the objective of the whole step."""
        counts = torch.tensor([1 / max(1, count) for count in self.counts.values()])
        return dict(zip(self.counts, counts.to(device, non_blocking=True), strict=True))

    def share(self, losses: dict[str, Loss]) -> torch.Tensor:
        """What a micro-batch adds to the objective of the whole step."""
        terms = [
            loss.objective * loss.weight / max(1, self.counts[name])
            for name, loss in losses.items()
        ]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def add(self, losses: dict[str, Loss], routing: list[Routing], *, counts: bool = True) -> None:
        """What a micro-batch has brought; one that does not count brings nothing."""
        for name, loss in losses.items():
            nll = loss.nll.detach() if counts else torch.zeros_like(loss.nll)
            self.sums[name] = self.sums[name] + nll if name in self.sums else nll
            self.weights[name] = loss.weight
        for one in routing:
            found = (one.dropped, one.places) if counts else (torch.zeros_like(one.dropped), 0)
            self.told.setdefault("dropped", []).append(found)

    def complete(self, world: World) -> None:
        """With what the other processes computed of the step."""
        if not world.several:
            return
        shares = [one for told in self.told.values() for one in (_total(told, 0), _total(told, 1))]
        sums = [sum_.double() for sum_ in self.sums.values()]
        device = sums[0].device
        row = torch.stack(
            [*sums, *(torch.as_tensor(one, device=device).double() for one in shares)]
        )
        found = iter(world.total(row))
        self.sums = {name: next(found) for name in self.sums}
        self.told = {name: [(next(found), next(found))] for name in self.told}

    def nll(self) -> float:
        return float(sum(self.sums.values()))


def _total(told: list[tuple[torch.Tensor, torch.Tensor | int]], place: int) -> Any:
    return sum(one[place] for one in told)


class Window:
    """The steps since the last log line."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.checked = 0
        self.began = time.monotonic()

    def scores(self) -> dict[str, float]:
        """The mean loss of each term where there are several, and their weighted sum."""
        means, loss = {}, 0.0
        for name, weight in self.steps[-1].weights.items():
            count = max(1, sum(step.counts[name] for step in self.steps))
            mean = float(sum(step.sums[name] for step in self.steps)) / count
            means[f"{name}_loss"] = mean
            loss += weight * mean
        tokens = sum(step.tokens for step in self.steps)
        seconds = max(1e-9, time.monotonic() - self.began)
        terms = means if len(means) > 1 else {}
        for name in self.steps[-1].told:
            told = [one for step in self.steps for one in step.told[name]]
            terms[name] = float(_total(told, 0)) / float(_total(told, 1))
        return {"loss": loss, **terms, "tokens_per_second": tokens / seconds}

    def note(self) -> str:
        scores = self.scores()
        told = "".join(f"  {name} {scores[name]:.1%}" for name in self.steps[-1].told)
        return f"loss {scores['loss']:.3f}{told}  {scores['tokens_per_second']:,.0f} tokens/s"
