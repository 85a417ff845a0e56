"""The training loop: one for every task.

A step is a pure function of (weights, seed, step): batches and dropout are drawn from the seed
and the step alone. So a run that is killed and started again repeats the steps since its last
save and ends with the same bits as one that was never stopped.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from manyheads.errors import BadData, Mistake
from manyheads.files import write_text
from manyheads.nn.experts import ExpertFeedForward, take_routing
from manyheads.train import checkpoint
from manyheads.train.checkpoint import Progress
from manyheads.train.objective import Loss
from manyheads.train.optimizer import Train, build_optimizer, learning_rate
from manyheads.train.progress import Bar

B = TypeVar("B")


@runtime_checkable
class Task(Protocol[B]):
    """What the loop needs to know of a task."""

    notes: list[str]  # what a person should know of its data
    digest: str  # names the training data: going on with another would not be going on
    per_epoch: int  # how many steps see all of it once

    def batches(self, step: int) -> list[B]:
        """The micro-batches of a step: a pure function of it."""

    def tokens(self, batch: B) -> int:
        """Tokens of a batch, by which speed is told."""

    def counts(self, batch: B) -> dict[str, int]:
        """How many predictions each term of the loss has in a batch: it is normalised by them."""

    def losses(self, model: nn.Module, batch: B) -> dict[str, Loss]:
        """The terms of the loss of a batch, each summed over its predictions."""

    def describe(self, step: int) -> str:
        """Which examples a step holds, for a person who hunts a broken one."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Scores on held-out data; `loss` is the one that chooses the best checkpoint."""


class Stopped(Exception):
    """A signal asked the run to stop; it has been saved."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} and saved, step {step}")
        self.exit_code = 128 + signal_number


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Asks once for a save at the end of the step; a second signal ends at once."""
    received = [0]

    def remember(number: int, frame: FrameType | None) -> None:
        if received[0]:
            raise KeyboardInterrupt
        received[0] = number

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, remember)
    except ValueError:  # not in the main thread: the caller handles signals
        pass
    try:
        yield lambda: received[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def seed_step(seed: int, step: int) -> None:
    """Dropout and whatever else a step draws: a function of the run's seed and the step."""
    torch.manual_seed((seed * 1_000_003 + step) % 2**63)


def precision_of(train: Train, device: torch.device) -> torch.dtype:
    """bfloat16 where it is asked for, or where the device computes it fast."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if train.precision == "bfloat16" or (train.precision == "auto" and fast):
        return torch.bfloat16
    return torch.float32


class Trainer:
    """Trains a model on a task into a run folder, going on where the folder left off.

    `kept` is the part of the model to be used afterwards, where training needs more than that.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task[Any],
        train: Train,
        *,
        dim: int,
        seed: int,
        folder: Path,
        about: dict[str, str] | None = None,
        kept: nn.Module | None = None,
    ) -> None:
        self.about = about or {}
        self.model, self.task, self.train = model, task, train
        self.kept = model if kept is None else kept
        self.dim, self.seed, self.folder = dim, seed, folder
        self.device = next(model.parameters()).device
        self.dtype = precision_of(train, self.device)
        self.routed = any(isinstance(part, ExpertFeedForward) for part in model.modules())
        self.optimizer = build_optimizer(model, train)
        self.progress = Progress(data=task.digest)
        if (folder / checkpoint.LAST).exists():
            self.progress = checkpoint.load_state(folder, model, self.optimizer)
            if self.progress.data != task.digest:
                raise BadData(
                    f"the training data is not what {folder} was trained on to step "
                    f"{self.progress.step}: bring it back, or choose another --out"
                )
            if self.progress.step > train.steps:
                raise Mistake(
                    f"{folder} is at step {self.progress.step} already, past "
                    f"train.steps={train.steps}"
                )
        self.metrics = Metrics(folder, self.progress.step)

    def run(self) -> Progress:
        """Train to the last step and leave the chosen weights in model.safetensors."""
        train, progress = self.train, self.progress
        with _signals() as stop, Bar("train", train.steps, progress.step) as bar:
            if progress.step:
                bar.say(f"going on from step {progress.step}")
            window: Window | None = None
            while progress.step < train.steps:
                window = window or Window()
                window.steps.append(self._step(progress.step))
                progress.step += 1
                last, stopped = progress.step == train.steps, stop()
                due = last or self._is_due()
                if due or progress.step % train.log_every == 0:
                    self._check_finite(window)
                    bar.update(progress.step, self._log(window))
                    window = None
                elif self.device.type == "cpu":
                    self._check_finite(window)
                    bar.update(progress.step, window.note())
                if due or stopped:
                    self._check_weights()
                if last or progress.step % train.validate_every == 0:
                    self._validate(bar)
                if last or progress.step % train.save_every == 0:
                    self._save()
                if stopped and not last:
                    # No snapshot: one more would shift the average.
                    checkpoint.save_state(self.folder, self.model, self.optimizer, progress)
                    raise Stopped(stopped, progress.step)
        self._finish()
        return progress

    def _is_due(self) -> bool:
        step, train = self.progress.step, self.train
        return step % train.validate_every == 0 or step % train.save_every == 0

    def _step(self, step: int) -> "Step":
        """One update; gives what it was measured by."""
        self.model.train()
        seed_step(self.seed, step)
        batches = self.task.batches(step)
        done = Step()
        for batch in batches:
            extra = {"balance": 1} if self.routed else {}
            done.expect(self.task.tokens(batch), self.task.counts(batch) | extra)
        for batch in batches:
            with torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16):
                losses = self.task.losses(self.model, batch) | self._routing(done)
            done.share(losses).backward()
            done.add(losses)
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.dim, step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return done

    def _routing(self, done: "Step") -> dict[str, Loss]:
        """The balance loss of a model's experts, where it has any, and the share they refused."""
        found = take_routing(self.model)
        if not found:
            return {}
        for one in found:
            done.tell("dropped", one.dropped, one.places)
        loss = torch.stack([one.loss for one in found]).sum()
        return {"balance": Loss(loss, loss.detach(), 1)}

    def _check_finite(self, window: "Window") -> None:
        """Stop before a broken loss is saved, and name the batch that made it."""
        for index in range(window.checked, len(window.steps)):
            nll = window.steps[index].nll()
            if not math.isfinite(nll):
                step = self.progress.step - len(window.steps) + index
                raise self._broken(f"the loss of step {step + 1} is {nll}", step)
        window.checked = len(window.steps)

    def _check_weights(self) -> None:
        """A finite loss can have gradients that are not: its weights must not be saved either."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            step = self.progress.step - 1
            raise self._broken(f"the weights after step {step + 1} are not finite", step)

    def _broken(self, what: str, step: int) -> Mistake:
        return Mistake(
            f"{what} ({self.task.describe(step)}): lower train.learning_rate, raise "
            "train.warmup_steps or set train.clip=1; what was saved before is untouched"
        )

    def _log(self, window: "Window") -> str:
        step = self.progress.step
        rate = learning_rate(self.train, self.dim, step)
        self.metrics.write(step, "train", window.scores() | {"learning_rate": rate})
        return window.note()

    def _validate(self, bar: Bar) -> None:
        self.model.eval()
        with torch.no_grad():
            scores = self.task.validate(self.model)
        progress = self.progress
        self.metrics.write(progress.step, "valid", scores)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
        bar.say(f"step {progress.step}  {shown}")
        better = progress.best is None or not scores["loss"] >= progress.best
        if better:
            progress.best, progress.best_step = scores["loss"], progress.step
        if better or self.train.keep == "last":
            about = {"step": progress.step, **scores, **self.about}
            checkpoint.write_tensors(
                self.folder / checkpoint.WEIGHTS, self.kept.state_dict(), about
            )

    def _save(self) -> None:
        if self.train.average > 1:
            checkpoint.snapshot(self.folder, self.kept, self.progress, self.train.average)
        checkpoint.save_state(self.folder, self.model, self.optimizer, self.progress)
        if self.train.average > 1:
            checkpoint.drop_old_snapshots(self.folder, self.progress)

    def _finish(self) -> None:
        """With averaging, the model to use is the mean of the last snapshots."""
        if self.train.average > 1:
            drawn = {name for name, _ in self.kept.named_buffers()}
            mean = checkpoint.average(self.folder, self.progress, drawn)
            about = {"averaged_steps": self.progress.snapshots, **self.about}
            checkpoint.write_tensors(self.folder / checkpoint.WEIGHTS, mean, about)
        tensors, _ = checkpoint.read_tensors(self.folder / checkpoint.WEIGHTS)
        checkpoint.load_weights(self.kept, tensors, self.folder / checkpoint.WEIGHTS)
        self.metrics.close()


class Step:
    """What a step was measured by: its tokens, and for each term of the loss sum and count."""

    def __init__(self) -> None:
        self.tokens = 0
        self.counts: dict[str, int] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float] = {}
        self.told: dict[str, list[tuple[torch.Tensor, int]]] = {}

    def expect(self, tokens: int, counts: dict[str, int]) -> None:
        """Before any of it is computed: what a micro-batch brings."""
        self.tokens += tokens
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def share(self, losses: dict[str, Loss]) -> torch.Tensor:
        """What a micro-batch adds to the objective of the whole step."""
        terms = [
            loss.objective * loss.weight / max(1, self.counts[name])
            for name, loss in losses.items()
        ]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def add(self, losses: dict[str, Loss]) -> None:
        for name, loss in losses.items():
            nll = loss.nll.detach()
            self.sums[name] = self.sums[name] + nll if name in self.sums else nll
            self.weights[name] = loss.weight

    def tell(self, name: str, hits: torch.Tensor, count: int) -> None:
        """A share to be told beside the loss."""
        self.told.setdefault(name, []).append((hits, count))

    def nll(self) -> float:
        return float(sum(self.sums.values()))


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
            terms[name] = float(sum(hits for hits, _ in told)) / sum(count for _, count in told)
        return {"loss": loss, **terms, "tokens_per_second": tokens / seconds}

    def note(self) -> str:
        scores = self.scores()
        return f"loss {scores['loss']:.3f}  {scores['tokens_per_second']:,.0f} tokens/s"


class Metrics:
    """metrics.jsonl, one object a line, and TensorBoard where it is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            # Steps after the last save will be done again: forget what was said of them.
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self.path, "".join(f"{line}\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.folder, self.first = folder, step + 1
        self.board: Any = None
        self.has_board = find_spec("tensorboard") is not None

    def write(self, step: int, split: str, scores: dict[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, "split": split, **scores}) + "\n")
            self.file.flush()
        except OSError as error:
            raise BadData(
                f"{self.path} could not be saved ({error}): make room and go on"
            ) from None
        if self.has_board and self.board is None:
            # Only now: importing it takes seconds.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.first)
        if self.board is not None:
            for name, value in scores.items():
                self.board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill
