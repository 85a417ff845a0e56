"""The training loop, the same for every task.

A step is a pure function of (weights, seed, step): batches and dropout depend on the seed and the
step only. So a run that is killed and restarted repeats the steps since its last checkpoint, and
ends with the same bits as one that was never stopped.
"""

import copy
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import nn

from manyheads.errors import DataError, UserError
from manyheads.optimize import can_capture, checkpoint_blocks, compile_blocks, optimize
from manyheads.train.checkpoint import AsyncCheckpointer, Checkpointer, Progress
from manyheads.train.metrics import Bar, LogWindow, Metrics, NoMetrics
from manyheads.train.optimizer import Train, build_optimizer, learning_rate
from manyheads.train.step import (
    ONE_PROCESS,
    Batches,
    ForwardBackward,
    Objective,
    StepStats,
    Task,
    World,
)

COMPILE_MIN_FLOPS = 3e15  # a GPU run with fewer is shorter than the compilation of a block
RANK_SEED_STRIDE = 0x9E3779B97F4A7C15  # no two steps of a run are so far apart


class Stopped(Exception):
    """A signal stopped the run; its state has been saved."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} and saved, step {step}")
        self.exit_code = 128 + signal_number


@contextmanager
def _catch_signals(world: World) -> Iterator[Callable[[], int]]:
    """Returns the signal received so far, or 0; a second signal interrupts at once.

    Not under torchrun: it forwards signals that processes may have received already, and ends
    them itself.
    """
    received = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received and not world.is_distributed:
            raise KeyboardInterrupt
        received = number

    is_main_thread = current_thread() is main_thread()  # only there Python handles signals
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main_thread else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _deterministic(is_on: bool) -> Iterator[None]:
    """Within this context PyTorch computes with algorithms that sum in a fixed order.

    An operation that has none raises. Our own training kernels use no atomic additions.
    """
    if not is_on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS: fixed workspaces
    memory: Any = torch.utils.deterministic
    settings = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a check for reads of such memory, not needed
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        problem = str(error).partition(", but")[0].partition(". ")[0]
        raise UserError(f"train.deterministic=true: {problem}; set it to false") from None
    finally:
        torch.use_deterministic_algorithms(settings[0])
        memory.fill_uninitialized_memory = settings[1]


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed what a step samples, e.g. dropout; each process samples for its own rows."""
    torch.manual_seed((seed * 1_000_003 + step + rank * RANK_SEED_STRIDE) % 2**63)


def precision_of(train: Train, device: torch.device) -> torch.dtype:
    """bfloat16 if requested, or if "auto" and the device computes it fast."""
    is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if train.precision == "bfloat16" or (train.precision == "auto" and is_fast):
        return torch.bfloat16
    return torch.float32


class Trainer:
    """Trains a model on a task into a run folder, from where the folder left off.

    `saved_model` is the part of the model to use afterwards, if training needs more than that;
    `metadata` goes into the header of its file.
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
        metadata: dict[str, str] | None = None,
        saved_model: nn.Module | None = None,
        world: World = ONE_PROCESS,
    ) -> None:
        self.model, self.task, self.train = model, task, train
        self.saved_model = model if saved_model is None else saved_model
        self.dim, self.seed, self.folder, self.world = dim, seed, folder, world
        self.metadata = metadata or {}
        self.device = next(model.parameters()).device
        self.dtype = precision_of(train, self.device)
        if self.device.type == "cuda":
            optimize(model)
        if train.activation_checkpointing:
            checkpoint_blocks(model)
        self.objective = Objective(model, task)
        self._choose_collaborators()
        self.progress = self.checkpointer.load() or Progress(data=task.digest)
        self._check_progress()
        self.metrics = Metrics(folder, self.progress.step) if world.is_main else NoMetrics()

    def _choose_collaborators(self) -> None:
        """By device and number of processes: the loop does not depend on them."""
        model, train, world = self.model, self.train, self.world
        make_checkpointer: Callable[..., Checkpointer] = Checkpointer
        self.batches = Batches(self.task)
        self.forward_backward = ForwardBackward(self.objective, self.dtype)
        if world.is_distributed:
            from manyheads.train import parallel

            if train.parallel == "fsdp":  # the copy is made before the model is sharded
                replica = copy.deepcopy(model).cpu() if world.is_main else None
                make_checkpointer = partial(parallel.ShardedCheckpointer, replica=replica)
            self.batches = Batches(parallel.split_microbatches(self.task, world.size))
            self.forward_backward = parallel.Distributed(
                self.objective, self.dtype, self.batches, train.parallel, cast(Any, world)
            )
        elif self.device.type == "cuda":
            from manyheads.train.cuda_graphs import CudaGraphs
            from manyheads.train.prefetch import Prefetcher

            make_checkpointer = AsyncCheckpointer
            self.batches = Prefetcher(self.task, train.steps - 1)
            if can_capture(model):
                single = train.accumulate == 1
                self.forward_backward = CudaGraphs(self.objective, self.dtype, single_pass=single)
        self.optimizer = build_optimizer(model, train)  # now: sharding replaces parameters
        self.checkpointer = make_checkpointer(
            self.folder, model, self.optimizer, self.saved_model, world
        )

    def _check_progress(self) -> None:
        progress = self.progress
        if progress.data != self.task.digest:
            raise DataError(
                f"the training data is not what {self.folder} was trained on to step "
                f"{progress.step}: bring it back, or choose another --out"
            )
        if progress.step > self.train.steps:
            raise UserError(
                f"{self.folder} is at step {progress.step} already, past "
                f"train.steps={self.train.steps}"
            )

    def run(self) -> Progress:
        """Train to the last step and leave the chosen weights in model.safetensors."""
        train, progress = self.train, self.progress
        if self._should_compile():
            compile_blocks(self.model)
        bar = Bar("train", train.steps, progress.step)
        bar.console.quiet = not self.world.is_main
        with (
            _catch_signals(self.world) as received,
            bar,
            closing(self.checkpointer),
            _deterministic(train.deterministic),
        ):
            if progress.step:
                bar.say(f"resuming from step {progress.step}")
            if self.metrics.skipped_lines:
                path, count = self.folder / "metrics.jsonl", self.metrics.skipped_lines
                bar.say(f"{path}: lines that could not be read, and are left out: {count}")
            window = LogWindow()
            while progress.step < train.steps:
                window.steps.append(self.step(progress.step))
                progress.step += 1
                # Signals may reach the processes in different steps; all save the same one.
                stop = self.world.all_max(received())
                is_last = progress.step == train.steps
                validates = is_last or progress.step % train.validate_every == 0
                saves = is_last or progress.step % train.save_every == 0
                logs = validates or saves or progress.step % train.log_every == 0
                if logs or self.device.type == "cpu":  # a GPU would have to wait for the step
                    self._check_losses(window)
                    bar.update(progress.step, window.note())
                if logs:
                    rate = learning_rate(train, self.dim, progress.step)
                    self.metrics.write(
                        progress.step, "train", window.scores() | {"learning_rate": rate}
                    )
                if validates or saves or stop:
                    self._check_weights()
                if validates:
                    self._validate(bar)
                if saves or stop:
                    self._save(snapshot=saves and train.average_checkpoints > 1)
                if stop and not is_last:
                    raise Stopped(stop, progress.step)
                if logs:
                    window = LogWindow()
        if train.average_checkpoints > 1:
            about = {"averaged_steps": progress.snapshots, **self.metadata}
            self.checkpointer.save_average(progress, about)
        self.checkpointer.load_model()
        self.close()
        self.world.wait()
        return progress

    def step(self, step: int) -> StepStats:
        """One update of the weights."""
        self.model.train()
        seed_step(self.seed, step, self.world.rank)
        batches, stats = self.batches(step), StepStats()
        for batch in batches:
            stats.add_counts(self.task.tokens(batch), self.objective.counts(batch))
        self.forward_backward(batches, stats)
        if self.train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.dim, step + 1)
        self.optimizer.step()
        self.forward_backward.zero_grad()
        return stats

    def close(self) -> None:
        """Release threads and files."""
        self.batches.close()
        self.metrics.close()

    def _should_compile(self) -> bool:
        """If requested, or if a run on a GPU is long enough to gain by it."""
        if self.world.is_distributed or self.train.deterministic:
            return False  # compiled kernels depend on the order in which shapes arrive
        if self.train.compile != "auto" or self.device.type != "cuda":
            return self.train.compile == "yes"
        tokens = sum(map(self.task.tokens, self.task.batches(self.progress.step)))
        weights = sum(weight.numel() for weight in self.model.parameters())
        # All steps count, so that a resumed run is compiled if it was before.
        return 6 * weights * tokens * self.train.steps > COMPILE_MIN_FLOPS

    def _check_losses(self, window: LogWindow) -> None:
        """Stop before weights of a loss that is not finite are saved, and name its batch."""
        for steps_ago, nll in window.unchecked_nlls():
            if not math.isfinite(nll):
                step = self.progress.step - steps_ago
                raise self._not_finite(f"the loss of step {step + 1} is {nll}", step)

    def _check_weights(self) -> None:
        """A finite loss can have gradients that are not finite."""
        tensors = (getattr(p, "_local_tensor", p) for p in self.model.parameters())  # of FSDP
        is_broken = not all(bool(tensor.isfinite().all()) for tensor in tensors)
        if self.world.all_max(is_broken):
            step = self.progress.step - 1
            raise self._not_finite(f"the weights after step {step + 1} are not finite", step)

    def _not_finite(self, problem: str, step: int) -> UserError:
        return UserError(
            f"{problem} ({self.task.describe(step)}): lower train.learning_rate, raise "
            "train.warmup_steps or set train.clip=1; what was saved before is untouched"
        )

    def _validate(self, bar: Bar) -> None:
        progress = self.progress
        with self.checkpointer.full_model() as model, torch.no_grad():
            scores = self.task.validate(model.eval()) if self.world.is_main else {}
        scores = self.world.broadcast(scores)
        self.metrics.write(progress.step, "valid", scores)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
        bar.say(f"step {progress.step}  {shown}")
        is_best = progress.best is None or not scores["loss"] >= progress.best
        if is_best:
            progress.best, progress.best_step = scores["loss"], progress.step
        if is_best or self.train.checkpoint == "last":
            self.checkpointer.save_model({"step": progress.step, **scores, **self.metadata})

    def _save(self, *, snapshot: bool) -> None:
        """Planned saves have a snapshot for averaging; one at a signal would shift the mean."""
        progress = self.progress
        if snapshot:
            last = self.train.average_checkpoints
            progress.snapshots = [*progress.snapshots, progress.step][-last:]
        self.checkpointer.save(progress, snapshot=snapshot)
