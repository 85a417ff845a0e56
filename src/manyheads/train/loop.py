"""The training loop, the same for every task.

A step is a pure function of (weights, seed, step): batches and dropout depend on the seed and the
step only. So a run that is killed and restarted repeats the steps since its last checkpoint, and
ends with the same bits as one that was never stopped.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.utils.deterministic
from torch import nn

from manyheads.errors import DataError, UserError
from manyheads.optimize import can_capture, checkpoint_blocks, compile_blocks, optimize
from manyheads.train.checkpoint import Checkpointer, Progress
from manyheads.train.metrics import Bar, Callback, LogWindow, Metrics, check_installed
from manyheads.train.optimizer import Ema, Train, build_optimizer, learning_rate
from manyheads.train.step import (
    ONE_PROCESS,
    ForwardBackward,
    Objective,
    StepStats,
    Task,
    World,
)

if TYPE_CHECKING:
    from manyheads.train.parallel import ShardedBuild

COMPILE_MIN_FLOPS = 3e15  # a GPU run with fewer is shorter than the compilation of a block
RANK_SEED_STRIDE = 0x9E3779B97F4A7C15  # no two steps of a run are so far apart


@runtime_checkable
class Probe(Protocol):
    """Records at some steps how the model treats fixed examples (tasks/probes.py)."""

    steps: set[int]

    def resume(self, step: int) -> None:
        """Begin, or continue after this step."""

    def record(self, model: nn.Module, step: int) -> None:
        """Append a record; must not change the weights."""


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
    `metadata` goes into the header of its file; `probe` records the model at `probe.steps`.
    `callback(step, split, scores)` gets each line of metrics.jsonl, as the library of
    `train.log_to` does, which also gets the `settings` of the run. `shards` are the parameters of a
    model that was built for FSDP.
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
        probe: Probe | None = None,
        settings: dict[str, Any] | None = None,
        callback: Callback | None = None,
        shards: "ShardedBuild | None" = None,
    ) -> None:
        check_installed(train.log_to)
        self.model, self.task, self.train = model, task, train
        self.saved_model = model if saved_model is None else saved_model
        self.dim, self.seed, self.folder, self.world = dim, seed, folder, world
        self.metadata, self.probe = metadata or {}, probe
        self.device = next(model.parameters()).device if shards is None else shards.device
        self.dtype = precision_of(train, self.device)
        if train.activation_checkpointing:
            checkpoint_blocks(model)
        self.objective = Objective(model, task)
        self.prefetcher: Any = None
        self.forward_backward: ForwardBackward
        if world.is_distributed:
            from manyheads.train.parallel import Distributed, split_microbatches

            self.task = split_microbatches(task, world.size)
            self.forward_backward = Distributed(self.objective, self.dtype, train, world, shards)
        else:
            self.forward_backward = ForwardBackward(self.objective, self.dtype)
        optimize(model)
        if self.device.type == "cuda" and not world.is_distributed:
            from manyheads.train.cuda_graphs import CudaGraphs, Prefetcher

            self.prefetcher = Prefetcher(task, train.steps - 1)
            if can_capture(model):
                single = train.accumulate == 1
                self.forward_backward = CudaGraphs(self.objective, self.dtype, single_pass=single)
        self.optimizer = build_optimizer(model, train)  # now: sharding replaces parameters
        self.ema = Ema(model, train.ema_decay) if train.ema_decay else None
        self.checkpointer = Checkpointer(
            folder, model, self.optimizer, self.saved_model, world, self.ema
        )
        self.progress = self.checkpointer.load() or Progress(data=task.digest)
        self._check_progress()
        self.metrics = None
        if world.is_main:
            self.metrics = Metrics(folder, self.progress.step, train.log_to, settings, callback)

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
            if self.probe is not None:
                self.probe.resume(progress.step)
                if progress.step == 0:
                    self._record_probe()
            window = LogWindow()
            while progress.step < train.steps and not self._is_stalled():
                window.add_step(self.step(progress.step))
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
                    self._log("train", window.scores() | {"learning_rate": rate})
                if validates or saves or stop:
                    self._check_weights()
                if validates:
                    with self.ema.swapped() if self.ema is not None else nullcontext():
                        self._validate(bar)
                if validates and self._is_stalled():
                    bar.say(f"stopped early: no better loss since step {progress.best_step}")
                    saves = True
                if self.probe is not None and progress.step in self.probe.steps:
                    self._record_probe()
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
        self.world.all_max(0)  # the others wait until the main process has written
        return progress

    def _is_stalled(self) -> bool:
        """Early stopping: the last `train.patience` validations had no better loss."""
        waited = self.progress.step - self.progress.best_step
        patience = self.train.patience
        return patience is not None and waited >= patience * self.train.validate_every

    def step(self, step: int) -> StepStats:
        """One update of the weights."""
        self.model.train()
        seed_step(self.seed, step, self.world.rank)
        batches = self.prefetcher(step) if self.prefetcher else self.task.batches(step)
        stats = StepStats()
        for batch in batches:
            stats.add_counts(self.task.tokens(batch), self.objective.counts(batch))
        self.forward_backward(batches, stats)
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip or math.inf)
        stats.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP
        for group in self.optimizer.param_groups:
            rate = learning_rate(self.train, self.dim, step + 1)
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(step + 1)
        self.forward_backward.zero_grad()
        return stats

    def close(self) -> None:
        """Release threads and files."""
        for part in (self.prefetcher, self.metrics):
            if part is not None:
                part.close()

    def _should_compile(self) -> bool:
        """If requested, or if a run of one process on a GPU is long enough to gain by it."""
        if self.train.deterministic:
            return False  # compiled kernels depend on the order in which shapes arrive
        if self.train.guided_alignment:
            return False  # it records weights inside a block
        if self.train.compile != "auto" or self.device.type != "cuda" or self.world.is_distributed:
            return self.train.compile == "yes"
        tokens = sum(map(self.task.tokens, self.task.batches(self.progress.step)))
        weights = sum(weight.numel() for weight in self.model.parameters())
        # All steps count, so that a resumed run is compiled if it was before.
        return 6 * weights * tokens * self.train.steps > COMPILE_MIN_FLOPS

    def _check_losses(self, window: LogWindow) -> None:
        """Stop before weights of a loss that is not finite are saved, and name its batch."""
        first = self.progress.step - len(window.unchecked)
        for step, stats in enumerate(window.unchecked, start=first):
            if not math.isfinite(nll := stats.nll()):
                raise self._not_finite(f"the loss of step {step + 1} is {nll}", step)
        window.unchecked = []

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
        with self.forward_backward.validation() as takes_part, torch.no_grad():
            scores = self.task.validate(self.model.eval()) if takes_part else {}
        scores = self.world.broadcast(scores)
        self._log("valid", scores)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
        bar.say(f"step {progress.step}  {shown}")
        is_best = progress.best is None or not scores["loss"] >= progress.best
        if is_best:
            progress.best, progress.best_step = scores["loss"], progress.step
        if is_best or self.train.checkpoint == "last":
            self.checkpointer.save_model({"step": progress.step, **scores, **self.metadata})

    def _log(self, split: str, scores: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(self.progress.step, split, scores)

    def _record_probe(self) -> None:
        assert self.probe is not None
        self.probe.record(self.saved_model, self.progress.step)

    def _save(self, *, snapshot: bool) -> None:
        """Planned saves have a snapshot for averaging; one at a signal would shift the mean."""
        progress = self.progress
        if snapshot:
            last = self.train.average_checkpoints
            progress.snapshots = [*progress.snapshots, progress.step][-last:]
        self.checkpointer.save(progress, snapshot=snapshot)
