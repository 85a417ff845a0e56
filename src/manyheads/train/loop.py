"""The training loop: one for every task.

A step is a pure function of (weights, seed, step): batches and dropout are drawn from the seed
and the step alone. So a run that is killed and started again repeats the steps since its last
save and ends with the same bits as one that was never stopped.
"""

import copy
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from manyheads.errors import DataError, UserError
from manyheads.nn.experts import ExpertFeedForward, Routing, take_routing
from manyheads.optimize import checkpoint_blocks, compile_blocks
from manyheads.train import checkpoint, parallel
from manyheads.train.async_checkpoint import Saver
from manyheads.train.checkpoint import Progress
from manyheads.train.cuda_graphs import Recorder, Shares, recordable
from manyheads.train.loss import Loss
from manyheads.train.metrics import Metrics
from manyheads.train.optimizer import Train, build_optimizer, learning_rate
from manyheads.train.parallel import ALONE, World
from manyheads.train.prefetch import Ahead
from manyheads.train.progress import Bar
from manyheads.train.stats import Step, Window

B = TypeVar("B")
MUCH = 3e15  # multiply-adds, twice over, that take a GPU longer than to compile a block
RANKS_APART = 0x9E3779B97F4A7C15  # no step of any run is so far from another


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


class Objective(nn.Module):
    """A model and what is asked of it in one: of a batch it gives the terms of the loss.

    What spreads a model over processes has to see where a pass begins and where it ends.
    """

    def __init__(self, model: nn.Module, task: Task[Any]) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> tuple[dict[str, Loss], list[Routing]]:
        """Also what a model's experts have to tell; their balance is a term of the loss."""
        losses, found = self.task.losses(self.model, batch), take_routing(self.model)
        if found:
            loss = torch.stack([one.loss for one in found]).sum()
            losses = losses | {"balance": Loss(loss, loss.detach(), 1)}
        return losses, found


class Stopped(Exception):
    """A signal asked the run to stop; it has been saved."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} and saved, step {step}")
        self.exit_code = 128 + signal_number


@contextmanager
def _signals(world: World) -> Iterator[Callable[[], int]]:
    """Asks once for a save at the end of the step; a second signal ends at once.

    Not under torchrun: it hands on what the processes may have got already, and ends them itself.
    """
    received = [0]

    def remember(number: int, frame: FrameType | None) -> None:
        if received[0] and not world.several:
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


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Dropout and whatever else a step draws: a function of the run's seed and the step.

    Each of several processes draws for rows of its own, and so other numbers.
    """
    torch.manual_seed((seed * 1_000_003 + step + rank * RANKS_APART) % 2**63)


def precision_of(train: Train, device: torch.device) -> torch.dtype:
    """bfloat16 where it is asked for, or where the device computes it fast."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if train.precision == "bfloat16" or (train.precision == "auto" and fast):
        return torch.bfloat16
    return torch.float32


class Trainer:
    """Trains a model on a task into a run folder, going on where the folder left off.

    `kept` is the part of the model to be used afterwards, where training needs more than that.
    Of several processes the first writes the folder and speaks.
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
        world: World = ALONE,
    ) -> None:
        self.about, self.world = about or {}, world
        self.model, self.task, self.train = model, task, train
        self.kept = model if kept is None else kept
        self.dim, self.seed, self.folder = dim, seed, folder
        self.device = next(model.parameters()).device
        self.dtype = precision_of(train, self.device)
        self.routed = any(isinstance(part, ExpertFeedForward) for part in model.modules())
        self.sharded = world.several and train.parallel == "fsdp"
        if train.recompute:
            checkpoint_blocks(model)
        self.objective: nn.Module = Objective(model, task)
        if world.several:
            self.parts = parallel.divided(task, world.size)
            self.redrawn = parallel.redrawn(model)
            if self.sharded and world.first:  # where it validates, in one piece
                self.twin = copy.deepcopy(model).cpu()
            unreached = not self.sharded and self._unreached()
            self.objective = parallel.spread(
                self.objective, train.parallel, self.device, unreached=unreached
            )
            if not self.sharded:
                self._try_out()
        alone = self.device.type == "cuda" and not world.several
        self.recorder: Recorder | None = None
        if alone and recordable(model):
            self.recorder = Recorder(self._whole_pass, model, alone=train.accumulate == 1)
        self.ahead = Ahead(task, train.steps - 1) if alone else None
        self.saver = Saver(folder, behind=alone)
        self.optimizer = build_optimizer(model, train)
        self.progress = Progress(data=task.digest)
        if checkpoint.is_begun(folder):
            self.progress = checkpoint.load_state(folder, model, self.optimizer)
            if self.progress.data != task.digest:
                raise DataError(
                    f"the training data is not what {folder} was trained on to step "
                    f"{self.progress.step}: bring it back, or choose another --out"
                )
            if self.progress.step > train.steps:
                raise UserError(
                    f"{folder} is at step {self.progress.step} already, past "
                    f"train.steps={train.steps}"
                )
        self.metrics = Metrics(folder, self.progress.step) if world.first else None

    def run(self) -> Progress:
        """Train to the last step and leave the chosen weights in model.safetensors."""
        train, progress = self.train, self.progress
        bar = Bar("train", train.steps, progress.step)
        bar.console.quiet = not self.world.first
        if self._compiles():
            compile_blocks(self.model)
        with _signals(self.world) as stop, bar, self.saver:
            if progress.step:
                bar.say(f"going on from step {progress.step}")
            if self.metrics is not None and self.metrics.broken:
                count, path = self.metrics.broken, self.metrics.path
                bar.say(f"{path}: lines that could not be read, and are left out: {count}")
            window: Window | None = None
            while progress.step < train.steps:
                window = window or Window()
                window.steps.append(self.step(progress.step))
                progress.step += 1
                # A signal may reach the processes in different steps, and all save the same one.
                last, stopped = progress.step == train.steps, self.world.agreed(stop())
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
                    self._save_state()
                    raise Stopped(stopped, progress.step)
        if self.ahead is not None:
            self.ahead.close()
        self._finish()
        return progress

    def _compiles(self) -> bool:
        """Whether blocks are compiled: where that is wanted, or a GPU has so much to do."""
        if self.world.several or self.train.compile == "no":
            return False
        if self.train.compile == "yes" or self.device.type != "cuda":
            return self.train.compile == "yes"
        tokens = sum(map(self.task.tokens, self.task.batches(self.progress.step)))
        weights = sum(weight.numel() for weight in self.model.parameters())
        return 6 * weights * tokens * self.train.steps > MUCH  # also of a run that goes on

    def _is_due(self) -> bool:
        step, train = self.progress.step, self.train
        return step % train.validate_every == 0 or step % train.save_every == 0

    def step(self, step: int) -> Step:
        """One update; gives what it was measured by."""
        self.model.train()
        seed_step(self.seed, step, self.world.rank)
        task = self.parts if self.world.several else self.task
        batches = (self.ahead or task.batches)(step)
        done = Step()
        for batch in batches:
            extra = {"balance": 1} if self.routed else {}
            done.expect(self.task.tokens(batch), self.task.counts(batch) | extra)
        if self.recorder is not None:
            shares = done.shares(self.device)
            for batch in batches:
                done.add(*self.recorder(batch, shares))
        else:
            self._passes(batches, done)
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.dim, step + 1)
        self.optimizer.step()
        if self.recorder is not None:
            self.recorder.forget()
        else:
            self.optimizer.zero_grad()
        return done

    def _whole_pass(self, batch: Any, shares: Shares) -> tuple[dict[str, Loss], list[Routing]]:
        """Forward and backward over a batch, on the device alone: it may be recorded."""
        with torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16):
            losses, routing = self.objective(batch)
        terms = [loss.objective * (loss.weight * shares[name]) for name, loss in losses.items()]
        torch.stack(terms).sum().backward()
        # Without what they were computed by, which a recording must not find alive.
        told = {name: replace(loss, objective=loss.nll) for name, loss in losses.items()}
        return told, [replace(one, loss=one.loss.detach()) for one in routing]

    def _passes(self, batches: list[Any], done: Step) -> None:
        """Forward and backward over those of the batches that are this process's."""
        own = self.world.own(batches)
        for number, (batch, counts) in enumerate(own, start=1):
            with self._pass(last=number == len(own)):
                with torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16):
                    losses, routing = self.objective(batch)
                share = done.share(losses)
                if self.world.several:
                    # What comes out of the exchange is the mean, and the sum is wanted.
                    share = share * (self.world.size if counts else 0)
                share.backward()
            done.add(losses, routing, counts=counts)
        done.complete(self.world)

    def _unreached(self) -> bool:
        """Whether there are weights that no loss reaches, e.g. of a pooler for fine-tuning."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        with self._tried_out() as total:
            found = torch.autograd.grad(total, weights, allow_unused=True)
        return any(gradient is None for gradient in found)

    def _try_out(self) -> None:
        """A pass of which nothing stays, before the first that counts.

        After one, DDP puts gradients in the order in which they came, for good. In another order
        they are summed otherwise, so that a run that was stopped would round otherwise for a step.
        """
        with self._tried_out() as total:
            total.backward()
        self.model.zero_grad(set_to_none=True)

    @contextmanager
    def _tried_out(self) -> Iterator[torch.Tensor]:
        """The loss of a batch; what the pass has drawn anew in the model is put back."""
        before = [buffer.clone() for buffer in self.redrawn]
        with torch.autocast(self.device.type, self.dtype, self.dtype == torch.bfloat16):
            losses, _ = self.objective.train()(self.parts.batches(0)[0])
        yield torch.stack([loss.objective for loss in losses.values()]).sum()
        for buffer, old in zip(self.redrawn, before, strict=True):
            buffer.copy_(old)

    @contextmanager
    def _pass(self, *, last: bool) -> Iterator[None]:
        """One micro-batch; copies of a model exchange their gradients after the last alone."""
        if not self.world.several:
            yield
            return
        self.world.alike(self.redrawn)
        objective: Any = self.objective
        with nullcontext() if last or self.sharded else objective.no_sync():
            yield

    def _check_finite(self, window: Window) -> None:
        """Stop before a broken loss is saved, and name the batch that made it."""
        for index in range(window.checked, len(window.steps)):
            nll = window.steps[index].nll()
            if not math.isfinite(nll):
                step = self.progress.step - len(window.steps) + index
                raise self._broken(f"the loss of step {step + 1} is {nll}", step)
        window.checked = len(window.steps)

    def _check_weights(self) -> None:
        """A finite loss can have gradients that are not: its weights must not be saved either."""
        tensors = (parallel.local(parameter) for parameter in self.model.parameters())
        broken = not all(bool(tensor.isfinite().all()) for tensor in tensors)
        if self.world.agreed(broken):
            step = self.progress.step - 1
            raise self._broken(f"the weights after step {step + 1} are not finite", step)

    def _broken(self, what: str, step: int) -> UserError:
        return UserError(
            f"{what} ({self.task.describe(step)}): lower train.learning_rate, raise "
            "train.warmup_steps or set train.clip=1; what was saved before is untouched"
        )

    def _log(self, window: Window) -> str:
        step = self.progress.step
        rate = learning_rate(self.train, self.dim, step)
        if self.metrics is not None:
            self.metrics.write(step, "train", window.scores() | {"learning_rate": rate})
        return window.note()

    def _validate(self, bar: Bar) -> None:
        progress, scores = self.progress, self._scores()
        if self.metrics is not None:
            self.metrics.write(progress.step, "valid", scores)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
        bar.say(f"step {progress.step}  {shown}")
        better = progress.best is None or not scores["loss"] >= progress.best
        if better:
            progress.best, progress.best_step = scores["loss"], progress.step
        if better or self.train.keep == "last":
            about = {"step": progress.step, **scores, **self.about}
            weights = self._weights()
            if self.world.first:
                checkpoint.write_tensors(self.folder / checkpoint.WEIGHTS, weights, about)

    def _scores(self) -> dict[str, float]:
        """On held-out data, by the first process; there a sharded model is put together."""
        model, scores = self.model, {}
        if self.sharded:
            weights = parallel.whole(self.model.state_dict(), self.world)
        if self.world.first and self.sharded:
            self.twin.load_state_dict(weights)
            model = self.twin.to(self.device)
        if self.world.first:
            model.eval()
            with torch.no_grad():
                scores = self.task.validate(model)
        if self.world.first and self.sharded:
            self.twin.cpu()
        return self.world.told(scores)

    def _weights(self) -> dict[str, torch.Tensor]:
        """Of the model to use, in one piece; all processes have to ask for them."""
        state = self.kept.state_dict()
        return parallel.whole(state, self.world) if self.sharded else state

    def _save(self) -> None:
        average, weights = self.train.average, None
        if average > 1:
            weights = self._weights()
            self.progress.snapshots = [*self.progress.snapshots, self.progress.step][-average:]
        self._save_state(weights)

    def _save_state(self, weights: dict[str, torch.Tensor] | None = None) -> None:
        first, progress = self.world.first, self.progress
        if self.sharded:
            given = self.model, self.optimizer, weights if first else None
            self.saver.save_shards(*given, progress)
        elif first:
            self.saver.save(checkpoint.state_of(self.model, self.optimizer), weights, progress)
        self.world.wait()

    def _finish(self) -> None:
        """With averaging, the model to use is the mean of the last snapshots."""
        if self.train.average > 1 and self.world.first:
            checkpoint.drop_old_snapshots(self.folder, self.progress)  # what a kill has left
            drawn = {name for name, _ in self.kept.named_buffers()}
            mean = checkpoint.average(self.folder, self.progress, drawn)
            about = {"averaged_steps": self.progress.snapshots, **self.about}
            checkpoint.write_tensors(self.folder / checkpoint.WEIGHTS, mean, about)
        if not self.world.several:
            tensors, _ = checkpoint.read_tensors(self.folder / checkpoint.WEIGHTS)
            checkpoint.load_weights(self.kept, tensors, self.folder / checkpoint.WEIGHTS)
        if self.metrics is not None:
            self.metrics.close()
        self.world.wait()
