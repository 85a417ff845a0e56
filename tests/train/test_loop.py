"""The training loop: it learns, resumes to the same bits, and never saves broken weights."""

import dataclasses
import math
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small_runs import assert_same_bits, hurt, records, saved, trainer, write_recipe
from tests.faults.small_run import call, ending, fork
from torch import Tensor, nn

from manyheads import cli
from manyheads.data.translation import Batch
from manyheads.decode.beam import Decode
from manyheads.decode.translate import Translator
from manyheads.errors import UserError
from manyheads.tasks.translation import TranslationTask, translation_loss
from manyheads.train import loop
from manyheads.train.checkpoint import read_tensors
from manyheads.train.loop import Stopped, Trainer
from manyheads.train.optimizer import Train
from manyheads.train.step import Loss


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("corpus"))


class Killed(Exception):
    """A process that ends here."""


def kill() -> None:
    raise Killed


# --- it learns ---


def test_one_batch_is_learned_by_heart(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(
        recipe,
        tmp_path / "run",
        *("train.steps=120", "train.validate_every=120", "train.save_every=120"),
        *("train.schedule=constant", "train.learning_rate=0.01", "train.label_smoothing=0"),
        *("model.dropout=0", "model.dim=32", "train.batch_tokens=200", "train.log_every=5"),
    )
    task = actual.task
    assert isinstance(task, TranslationTask)
    rows = task.order.rows(0)
    assert len(rows) > 5
    only = task.batches(0)
    task.batches = lambda step: only  # type: ignore[method-assign]
    actual.run()
    losses = [r["loss"] for r in records(tmp_path / "run") if r["split"] == "train"]
    assert losses[0] > 3
    assert losses[-1] < 0.02
    decode = task.tokenizer.decode_batch
    pad = task.tokenizer.pad
    sides = (task.data.sources, task.data.targets)
    sources, targets = (decode(side.padded(rows, pad)[0].tolist()) for side in sides)
    assert all(s.split() == t.split()[::-1] for s, t in zip(sources, targets, strict=True))
    greedy = Translator(actual.model, task.tokenizer, Decode(beam=1))  # type: ignore[arg-type]
    assert greedy.translate(sources) == targets


def test_accumulated_batches_equal_one_large_batch(recipe: Path, tmp_path: Path) -> None:
    """In float64 the two differ by the order of summation: less than 1e-9 after eight steps.

    Adam divides rounding by rounding where a gradient is zero by nature (the bias of the keys,
    which softmax cancels), so its eps is raised above that.
    """
    plain = ("model.dropout=0", "train.steps=8", "train.warmup_steps=2", "train.eps=1e-6")
    large = trainer(recipe, tmp_path / "large", *plain, "train.batch_tokens=1024")
    small = trainer(
        recipe, tmp_path / "small", *plain, "train.batch_tokens=256", "train.accumulate=4"
    )
    start = {name: p.detach().clone().double() for name, p in large.model.named_parameters()}
    assert [len(large.task.batches(step)) for step in range(8)] == [1] * 8
    parts = [small.task.batches(step) for step in range(8)]
    assert max(map(len, parts)) == 4
    sizes = [[small.task.tokens(batch) for batch in batches] for batches in parts]
    assert any(len(set(size)) > 1 for size in sizes)  # unequal parts: a mean of means would differ
    for actual in (large, small):
        actual.model.double()
        actual.run()
    for name, parameter in small.model.named_parameters():
        other = large.model.get_parameter(name)
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(parameter, other, rtol=0, atol=1e-9)
        assert (other - start[name]).abs().max() > 1e-3


def test_a_position_is_scored_by_nothing_that_comes_after_it(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", "model.dropout=0")
    (batch,) = actual.task.batches(0)
    assert isinstance(batch, Batch)
    length = batch.target.shape[1]

    def loss_up_to(position: int, target: Tensor) -> float:
        real = batch.loss_mask & (torch.arange(length) <= position)
        changed = dataclasses.replace(batch, target=target, loss_mask=real)
        return float(translation_loss(actual.model, changed, 0.1).objective.detach())  # type: ignore[arg-type]

    for position in range(length - 1):
        later, now = batch.target.clone(), batch.target.clone()
        later[:, position + 1 :] = torch.randint(10, 300, later[:, position + 1 :].shape)
        now[:, position] = torch.randint(10, 300, now[:, position].shape)
        assert loss_up_to(position, later) == loss_up_to(position, batch.target)
        assert loss_up_to(position, now) != loss_up_to(position, batch.target)


def test_the_loss_of_a_batch_is_that_of_its_logits(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", "model.dropout=0")
    (batch,) = actual.task.batches(0)
    logits = actual.model(batch.source, batch.target, batch.source_real, batch.loss_mask)
    expected = nn.functional.cross_entropy(
        logits[batch.loss_mask], batch.labels[batch.loss_mask], label_smoothing=0.1, reduction="sum"
    )
    [loss] = actual.task.losses(actual.model, batch).values()
    torch.testing.assert_close(loss.objective, expected, rtol=1e-5, atol=1e-4)
    assert loss.count == actual.task.tokens(batch) == int(batch.loss_mask.sum())


def test_padding_to_a_shape_changes_no_loss_and_no_gradient(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", "model.dropout=0")
    model = actual.model.double()
    (batch,) = actual.task.batches(0)
    rows, length = batch.target.shape
    padded = batch.padded(rows + 3, 32)
    assert padded.source.shape == padded.source_real.shape == (rows + 3, 32)
    assert padded.target.shape == padded.labels.shape == padded.loss_mask.shape == (rows + 3, 32)
    assert length < 32
    assert padded.source_real.any(1).all()  # attention over nothing is not defined

    def result(batch: Batch) -> tuple[Tensor, list[Tensor]]:
        loss = translation_loss(model, batch, 0.1)  # type: ignore[arg-type]
        assert loss.count == actual.task.tokens(batch)
        return loss.objective, list(torch.autograd.grad(loss.objective, list(model.parameters())))

    (plain, slopes), (wide, others) = result(batch), result(padded)
    torch.testing.assert_close(wide, plain, rtol=1e-12, atol=0)
    for item, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(item, other, rtol=0, atol=1e-12)


def test_the_gradient_norm_is_logged_before_clipping(recipe: Path, tmp_path: Path) -> None:
    """As the mean over the steps since the last record."""
    norms = {}
    for clip, every in (("none", 1), ("1e-3", 1), ("none", 2)):
        run = tmp_path / f"{clip}-{every}"
        trainer(recipe, run, f"train.clip={clip}", f"train.log_every={every}").run()
        norms[clip, every] = [r["grad_norm"] for r in records(run) if r["split"] == "train"]
    assert norms["none", 1][0] == norms["1e-3", 1][0] > 1e-2
    assert norms["none", 2][0] == pytest.approx(sum(norms["none", 1][:2]) / 2)


def test_bfloat16_runs_on_a_cpu(recipe: Path, tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        actual = trainer(recipe, tmp_path / precision, f"train.precision={precision}")
        actual.run()
        assert actual.dtype == getattr(torch, precision)
        assert {p.dtype for p in actual.model.parameters()} == {torch.float32}
        losses[precision] = [r["loss"] for r in records(tmp_path / precision)]
    assert losses["bfloat16"] != losses["float32"]  # it did compute in bfloat16
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


# --- it resumes ---

AVERAGED = ("train.average_checkpoints=3", "train.save_every=4", "train.validate_every=6")


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout and averaging that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    actual = trainer(recipe, out, *AVERAGED)
    assert isinstance(actual.task, TranslationTask)
    assert actual.task.order.per_epoch < 10 < actual.train.steps  # it crosses epochs
    assert actual.model.encoder_embedding.dropout.p > 0  # type: ignore[union-attr]
    actual.run()
    # The comparison of bits sees the model, the last weights, both moments and the snapshots.
    assert {name.split()[0] for name in saved(out)} == {
        *("model.safetensors", "last.safetensors"),
        *(f"weights-{step:08d}.safetensors" for step in (16, 20, 24)),
    }
    return out


# Between saves, right after one, at a validation, in the first steps and in the last one.
@pytest.mark.parametrize("steps", [(2,), (12,), (5, 5, 14, 23)])
def test_killed_and_started_again_ends_with_the_same_bits(
    steps: tuple[int, ...], recipe: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for step in steps:
        actual = trainer(recipe, out, *AVERAGED)
        assert actual.progress.step % 4 == 0
        hurt(actual, step, kill)
        with pytest.raises(Killed):
            actual.run()
    trainer(recipe, out, *AVERAGED).run()
    assert_same_bits(out, whole)
    ours, theirs = records(out), records(whole)
    assert [(r["step"], r["split"]) for r in ours] == [(r["step"], r["split"]) for r in theirs]
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]


# A signal saves at once, between the saves of the plan or together with one (after step 19);
# late enough for a snapshot too many to be part of the average.
@pytest.mark.parametrize("steps", [(6, 21), (19,)])
def test_stopped_by_a_signal_and_started_again_ends_with_the_same_bits(
    steps: tuple[int, ...], recipe: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for step in steps:
        actual = trainer(recipe, out, *AVERAGED)
        hurt(actual, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped) as caught:
            actual.run()
        assert caught.value.exit_code == 128 + signal.SIGTERM
        assert f"step {step + 1}" in str(caught.value)
        # Training resumes after the step that the signal interrupted.
        assert trainer(recipe, out, *AVERAGED).progress.step == step + 1
    trainer(recipe, out, *AVERAGED).run()
    assert_same_bits(out, whole)
    places = [(r["step"], r["split"]) for r in records(out)]
    assert len(places) == len(set(places))
    assert set(places) >= {(r["step"], r["split"]) for r in records(whole) if r["step"] % 3 == 0}


def test_a_second_signal_ends_at_once(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run")

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    hurt(actual, 2, twice)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        actual.run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run" / "state" / "last.safetensors").exists()


def test_more_steps_go_on_and_the_same_command_does_nothing_more(
    recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for steps in (8, 16):
        actual = trainer(recipe, out, f"train.steps={steps}", "train.save_every=8")
        assert actual.progress.step == steps - 8
        actual.run()
    trainer(recipe, tmp_path / "once", "train.steps=16", "train.save_every=8").run()
    last = [read_tensors(tmp_path / name / "state/last.safetensors")[0] for name in ("run", "once")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[1])
    names = (*out.rglob("*.safetensors"), out / "metrics.jsonl")
    before = {path: path.read_bytes() for path in names}
    again = trainer(recipe, out, "train.steps=16", "train.save_every=8")
    hurt(again, 16, kill)
    assert again.run().step == 16
    assert {path: path.read_bytes() for path in names} == before


def test_a_line_of_metrics_that_was_cut_is_forgotten(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    actual = trainer(recipe, out, "train.steps=12")
    hurt(actual, 8, kill)
    with pytest.raises(Killed):
        actual.run()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "split": "tr')
    trainer(recipe, out, "train.steps=12").run()
    places = [(r["step"], r["split"]) for r in records(out)]
    assert places == [
        *((3, "train"), (6, "train"), (6, "valid")),
        *((9, "train"), (12, "train"), (12, "valid")),
    ]


# --- what it keeps ---


class Scripted:
    """A task of one linear layer whose validation losses are given."""

    digest = "numbers"
    per_epoch = 1
    notes: ClassVar[list[str]] = []

    def __init__(self, losses: list[float]) -> None:
        self.scores = iter(losses)
        self.seen: list[dict[str, Tensor]] = []

    def batches(self, step: int) -> list[Tensor]:
        return [torch.randn(8, 4, generator=torch.Generator().manual_seed(step))]

    def tokens(self, batch: Tensor) -> int:
        return len(batch)

    def counts(self, batch: Tensor) -> dict[str, int]:
        return {"numbers": len(batch)}

    def losses(self, model: nn.Module, batch: Tensor) -> dict[str, Loss]:
        total = (model(batch) - 1).square().sum()
        return {"numbers": Loss(total, total.detach(), len(batch))}

    def describe(self, step: int) -> str:
        return f"numbers {step}"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        self.seen.append({name: t.clone() for name, t in model.state_dict().items()})
        return {"loss": next(self.scores)}


def scripted(out: Path, losses: list[float], **changes: Any) -> tuple[Trainer, Scripted]:
    torch.manual_seed(0)
    out.mkdir(exist_ok=True)
    task = Scripted(losses)
    settings = {"steps": 2 * len(losses), "validate_every": 2, "save_every": 2, "warmup_steps": 2}
    train = Train(**{**settings, **changes})
    return Trainer(nn.Linear(4, 3), task, train, dim=4, seed=1, folder=out), task


def same(item: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return item.keys() == other.keys() and all(
        torch.equal(item[name], other[name]) for name in item
    )


def test_the_best_weights_are_to_use_and_the_last_to_go_on_from(tmp_path: Path) -> None:
    actual, task = scripted(tmp_path, [3.0, 1.0, 2.0, 1.0, 5.0])
    progress = actual.run()
    assert (progress.best, progress.best_step, progress.step) == (1.0, 4, 10)
    weights, about = read_tensors(tmp_path / "model.safetensors")
    assert about == {"step": 4, "loss": 1.0}
    assert same(weights, task.seen[1])
    assert same(dict(actual.model.state_dict()), task.seen[1])  # and the model in hand is that one
    last, about = read_tensors(tmp_path / "state/last.safetensors")
    assert about["step"] == 10
    prefix = "model."
    end = {name.removeprefix(prefix): t for name, t in last.items() if name.startswith(prefix)}
    assert same(end, task.seen[-1])
    assert not same(task.seen[-1], task.seen[1])


def test_the_best_is_remembered_over_a_stop(tmp_path: Path) -> None:
    actual, first = scripted(tmp_path, [3.0, 1.0], steps=10)
    hurt(actual, 4, kill)
    with pytest.raises(Killed):
        actual.run()
    actual, _ = scripted(tmp_path, [2.0, 1.5, 1.2], steps=10)
    assert actual.run().best_step == 4
    assert same(read_tensors(tmp_path / "model.safetensors")[0], first.seen[1])


@pytest.mark.parametrize("count", [2, 3, 9])
def test_averaging_gives_the_mean_of_the_last_saves(count: int, tmp_path: Path) -> None:
    actual, task = scripted(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], average_checkpoints=count)
    actual.run()
    weights, about = read_tensors(tmp_path / "model.safetensors")
    last = task.seen[-count:]
    assert about == {"averaged_steps": [2, 4, 6, 8, 10][-count:]}
    for name, tensor in weights.items():
        mean = torch.stack([each[name].double() for each in last]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-7, atol=1e-8)
    assert not any(same(weights, each) for each in last)
    assert len(list((tmp_path / "state").glob("weights-*"))) == len(last)


# --- it never saves what is broken ---


@pytest.fixture
def half(recipe: Path, tmp_path: Path) -> Path:
    """A run that stands at step 6 of 24, saved."""
    out = tmp_path / "run"
    actual = trainer(recipe, out)
    hurt(actual, 7, kill)
    with pytest.raises(Killed):
        actual.run()
    return out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_loss_stops_with_its_step_and_its_batch(
    value: float, recipe: Path, half: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in half.rglob("*.safetensors")}
    assert len(before) == 2
    actual = trainer(recipe, half)
    task = actual.task
    assert isinstance(task, TranslationTask)
    losses, broken = task.losses, [False]

    def break_it() -> None:
        broken[0] = True

    hurt(actual, 10, break_it)
    factor = torch.tensor(value)

    def requested(model: nn.Module, batch: Batch) -> dict[str, Loss]:
        [(name, right)] = losses(model, batch).items()
        if not broken[0]:
            return {name: right}
        return {name: Loss(right.objective * factor, right.nll * factor, right.count)}

    task.losses = requested  # type: ignore[method-assign]
    with pytest.raises(UserError) as caught:
        actual.run()
    line = str(caught.value)
    assert "\n" not in line
    assert f"loss of step 11 is {value}" in line
    # It names the pairs of the batch by their line numbers.
    named = line.partition("training pairs ")[2].partition(" and ")[0].split(", ")
    lines = (recipe.parent / "pairs.source").read_text().splitlines()
    first = task.data.sources.padded(task.order.rows(10)[:5], task.tokenizer.pad)[0]
    decoded = task.tokenizer.decode_batch(first.tolist())
    assert [lines[int(number) - 1] for number in named] == decoded
    assert "train.learning_rate" in line
    assert {path: path.read_bytes() for path in half.rglob("*.safetensors")} == before
    if math.isinf(value):
        return
    # Resumed without the fault, it ends with the same bits.
    trainer(recipe, half).run()
    trainer(recipe, tmp_path / "whole").run()
    assert_same_bits(half, tmp_path / "whole")


@pytest.mark.parametrize("by_signal", [False, True])
def test_weights_that_broke_under_a_finite_loss_are_not_saved(
    by_signal: bool, tmp_path: Path
) -> None:
    """√ at zero has a value and no slope: the loss is finite and the update is not."""
    actual, task = scripted(tmp_path, [3.0, 2.0, 1.0], save_every=2 if not by_signal else 4)
    broken_step = 5 if not by_signal else 4
    losses, broken = task.losses, [False]

    def break_it() -> None:
        broken[0] = True
        if by_signal:
            os.kill(os.getpid(), signal.SIGTERM)

    def requested(model: nn.Module, batch: Tensor) -> dict[str, Loss]:
        [(name, right)] = losses(model, batch).items()
        if not broken[0]:
            return {name: right}
        slope = (batch * 0 * model.weight.sum()).sqrt().sum()  # type: ignore[union-attr, operator]
        return {name: Loss(right.objective + slope, right.nll, 8)}

    task.losses = requested  # type: ignore[method-assign]
    hurt(actual, broken_step, break_it)
    with pytest.raises(UserError) as caught:
        actual.run()
    assert f"weights after step {broken_step + 1} are not finite" in str(caught.value)
    assert f"numbers {broken_step}" in str(caught.value)
    for path in (tmp_path / "model.safetensors", tmp_path / "state/last.safetensors"):
        tensors, about = read_tensors(path)
        assert all(tensor.isfinite().all() for tensor in tensors.values())
        assert about["step"] == 4


# --- signals to a process ---


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_says_how_to_go_on(
    number: signal.Signals,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a run"
    words = ["train", str(recipe), "train.steps=100000", "train.save_every=100000"]
    words += ["train.log_every=1", "--device", "cpu", "--out", str(out)]

    def train() -> int:
        code, printed, said = call(*words)
        assert printed == ""
        os.write(2, said.encode())
        return code

    process = fork(train, tmp_path / "said")
    patience = time.monotonic() + 600
    while not (out / "metrics.jsonl").exists() or len(records(out)) < 3:
        assert os.waitpid(process, os.WNOHANG)[0] == 0, (tmp_path / "said").read_text()
        assert time.monotonic() < patience
        time.sleep(0.02)
    os.kill(process, number)
    assert ending(process) == 128 + number
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith(f"manyheads: stopped by {number.name} and saved, step ")
    command = last.partition("resume with: ")[2]
    called = ["manyheads"] if shutil.which("manyheads") else [sys.executable, "-m", "manyheads"]
    assert shlex.split(command) == [*called, *words]
    step = int(last.partition("step ")[2].partition(";")[0])
    assert read_tensors(out / "state/last.safetensors")[1]["step"] == step
    # The printed command resumes from there.
    goal = ["train.steps=" + str(step + 2) if w.startswith("train.steps") else w for w in words]
    monkeypatch.setattr(sys, "argv", ["manyheads", *goal])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert f"resuming from step {step}" in capsys.readouterr().err
    places = [(r["step"], r["split"]) for r in records(out)]
    assert len(places) == len(set(places))
    assert [s for s, split in places if split == "train"] == list(range(1, step + 3))


def test_whether_blocks_are_compiled_is_the_whole_run_s_to_say(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by the cost of all steps, so that a resumed run is compiled if it was before."""
    actual = trainer(recipe, tmp_path / "run")
    actual.device = torch.device("cuda")
    tokens = sum(map(actual.task.tokens, actual.task.batches(0)))
    weights = sum(weight.numel() for weight in actual.model.parameters())
    cost = 6 * tokens * weights * actual.train.steps
    for min_flops, expected in ((1.5 * cost, False), (0.5 * cost, True)):
        monkeypatch.setattr(loop, "COMPILE_MIN_FLOPS", min_flops)
        assert actual._should_compile() == expected
    actual.task.batches = lambda step: type(actual.task).batches(actual.task, 0)  # type: ignore[method-assign]
    actual.progress.step = actual.train.steps - 1
    assert actual._should_compile()


@pytest.mark.parametrize("setting", ["yes", "no"])
def test_a_run_compiles_its_blocks_on_request(
    setting: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(loop, "compile_blocks", compiled.append)
    actual = trainer(recipe, tmp_path / "run", f"train.compile={setting}", "train.steps=1")
    actual.run()
    assert compiled == [actual.model] * (setting == "yes")


def test_early_stopping_ends_after_validations_without_a_better_loss(
    recipe: Path, tmp_path: Path
) -> None:
    """The best validation was the first; a run that was stopped early is finished."""
    settings = ("train.patience=2", "train.learning_rate=30", "train.clip=none")
    progress = trainer(recipe, tmp_path / "run", *settings).run()
    losses = [r["loss"] for r in records(tmp_path / "run") if r["split"] == "valid"]
    steps = [r["step"] for r in records(tmp_path / "run") if r["split"] == "valid"]
    best = steps[losses.index(min(losses))]
    assert progress.step == steps[-1] == best + 2 * 6 < 24
    before = saved(tmp_path / "run")
    assert trainer(recipe, tmp_path / "run", *settings).run().step == progress.step
    assert all(
        torch.equal(before[name], tensor) for name, tensor in saved(tmp_path / "run").items()
    )
    assert trainer(recipe, tmp_path / "run", "train.patience=none", *settings[1:]).run().step == 24
