"""N processes equal one: the same curve and weights, and any number can resume.

Real processes over gloo, started by torchrun, or forked where only the group matters. Without
dropout, which each process samples for itself, they differ from one process by rounding only.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_runs import CPU, WORDS, records, saved, trainer, write_recipe
from tests.checks import unchecked
from tests.faults.small_run import ending, fork
from tests.golden.record import RUN_FOLDER
from tests.test_cli import call
from torch import distributed as dist
from torch import nn

from manyheads import cli
from manyheads.commands.shared import row_processes
from manyheads.engines import Engine
from manyheads.errors import UserError
from manyheads.lab.device_memory import peak_memory
from manyheads.loading import load_torch_run
from manyheads.presets import build as build_preset
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer, read_run
from manyheads.train import checkpoint, parallel
from manyheads.train.loop import seed_step
from manyheads.train.optimizer import Train
from manyheads.train.parallel import (
    ShardedBuild,
    connected,
    local_batches,
    shard_sizes,
    shared_rows,
    split_microbatches,
)
from manyheads.train.sharded import sizes
from manyheads.train.step import World

# Adam divides rounding by rounding where a gradient is zero by nature: its eps is above that. And
# at the kink of ReLU a rounding decides whether there is a gradient.
PLAIN = (
    "model.feedforward.activation=gelu",
    *("model.dropout=0", "train.eps=1e-5", "train.log_every=1", "train.warmup_steps=1"),
    *("train.schedule=constant", "train.learning_rate=0.01", "train.steps=6"),
    *("train.validate_every=3", "train.save_every=2", "train.average_checkpoints=2"),
)
# So little that a step may have fewer sentences than there are processes.
FEW = (*PLAIN, "train.batch_tokens=30")
HALVES = (*PLAIN, "train.batch_tokens=150", "train.accumulate=2")
KILLED = """
import os, signal
from manyheads.train import loop

plain = loop.Trainer.step

def step(self, number):
    first_time = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_time and (self.world.rank, number) == ({rank}, {step}):
        os.kill(os.getpid(), signal.{signal})
    return plain(self, number)

loop.Trainer.step = step
from manyheads.cli import main
main()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("corpus"))


def torchrun(processes: int, *words: Any, restarts: int = 0, code: int = 0) -> str:
    """The output of a program in this many processes."""
    said = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
        + [str(word) for word in words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == code, said.stdout
    return said.stdout


def forked(processes: int, work: Callable[[], int], folder: Path, nodes: int = 1) -> str:
    """The output of a function in this many processes, which need no import."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def run(rank: int) -> int:
        local = {"LOCAL_RANK": rank % (processes // nodes), "GROUP_WORLD_SIZE": nodes}
        group = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port, **local}
        os.environ.update({name: str(value) for name, value in group.items()})
        os.environ["MASTER_ADDR"] = "localhost"
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        with unchecked():
            return work()

    logs = [folder / f"process{rank}" for rank in range(processes)]
    numbers = [fork(partial(run, rank), log) for rank, log in enumerate(logs)]
    codes = [ending(number) for number in numbers]
    output = "".join(log.read_text() for log in logs)
    assert codes == [0] * processes, output
    return output


def together(processes: int, recipe: Path, out: Path, *overrides: str, code: int = 0) -> str:
    train = ("-m", "manyheads", "train", recipe, *overrides, "--out", out)
    return torchrun(processes, *train, code=code)


def curve(out: Path) -> dict[tuple[int, str], float]:
    return {(record["step"], record["split"]): record["loss"] for record in records(out)}


def assert_alike(one: Path, other: Path, records: int = 8) -> None:
    """The same losses at the same steps, the same weights: to rounding."""
    ours, theirs = curve(one), curve(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) == records  # by default six steps, two validations
    for at, loss in ours.items():
        assert theirs[at] == pytest.approx(loss, abs=2e-6), at
    assert abs(ours[1, "train"] - ours[6, "train"]) > 0.05
    weights, others = saved(one), saved(other)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


def test_two_processes_of_which_one_is_killed_end_as_one_does(recipe: Path, tmp_path: Path) -> None:
    """DDP, with accumulation; any process, at any step, and torchrun starts them again."""
    trainer(recipe, tmp_path / "one", *HALVES).run()
    draw = random.Random()
    rank, step = draw.randrange(2), draw.randrange(6)
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(rank=rank, step=step, signal="SIGKILL"), encoding="utf-8")
    words = (script, "train", recipe, *HALVES, "--out", tmp_path / "two")
    said = torchrun(2, *words, restarts=1)
    assert "2 × cpu, ddp" in said, said
    assert said.count("trained:") == 1
    assert ("resuming from step" in said) == (step >= 2), said  # the first save is after two steps
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_run_of_four_processes_goes_on_with_two_and_with_one_and_with_four(
    recipe: Path, tmp_path: Path
) -> None:
    """FSDP: each process has, and saves, a part of every weight."""
    one, many = tmp_path / "one", tmp_path / "many"
    reference = trainer(recipe, one, *FEW, "train.steps=8")
    rows = [len(reference.task.order.rows(step)) for step in range(6)]  # type: ignore[attr-defined]
    assert min(rows) < 4
    reference.run()
    together(4, recipe, many, *FEW, "train.parallel=fsdp", "train.steps=2")
    [step] = (many / "state").glob("step-*")
    shards = sorted(step.glob("*.safetensors"))
    assert len(shards) == 4
    complete = checkpoint.state_of(reference.model, reference.optimizer)
    total = sum(tensor.nbytes for tensor in complete.values())
    assert max(shard.stat().st_size for shard in shards) < 0.5 * total
    assert {n: t.shape for n, t in sizes(step).items()} == {n: t.shape for n, t in complete.items()}
    said = together(2, recipe, many, *FEW, "train.parallel=fsdp", "train.steps=4")
    assert "resuming from step 2" in said
    trainer(recipe, many, *FEW, "train.steps=6").run()
    assert not list((many / "state").glob("step-*"))  # one process has a file again
    said = together(4, recipe, many, *FEW, "train.parallel=fsdp", "train.steps=8")
    assert "resuming from step 6" in said
    # Validation fell on the last steps of the parts too.
    lines = (many / "metrics.jsonl").read_text().splitlines(keepends=True)
    extra = tuple(f'"step": {step}, "split": "valid"' for step in (2, 4))
    lines = [line for line in lines if not any(text in line for text in extra)]
    (many / "metrics.jsonl").write_text("".join(lines))
    assert_alike(one, many, 11)


def test_four_processes_shard_in_any_layout_and_end_as_one_does(
    recipe: Path, tmp_path: Path
) -> None:
    """A run that changes from FSDP to HSDP (2 copies in 2 shards) at a resume."""
    trainer(recipe, tmp_path / "one", *FEW).run()
    trainer(recipe, tmp_path / "half", *FEW, "train.precision=bfloat16").run()

    def several() -> int:
        """Three trainings in one process group."""
        settings = (*FEW, "train.parallel=fsdp")
        with connected(print) as world:
            for name, more in (
                ("mixed", "train.steps=3"),
                ("mixed", "train.replicate=2"),
                ("bfloat16", "train.precision=bfloat16"),
            ):
                run = read_recipe(str(recipe), [*settings, more])
                make_trainer(run, tmp_path / name, CPU, world).run()
        return 0

    forked(4, several, tmp_path)
    assert_alike(tmp_path / "one", tmp_path / "mixed")
    # Gradients of half-precision products are summed over smaller micro-batches.
    half, many = curve(tmp_path / "half"), curve(tmp_path / "bfloat16")
    assert half.keys() == many.keys()
    assert all(many[at] == pytest.approx(loss, abs=0.02) for at, loss in half.items())


def test_two_nodes_with_a_process_each_end_as_one_does(recipe: Path, tmp_path: Path) -> None:
    """test_nodes.py has real nodes, in `make test-slow`."""
    trainer(recipe, tmp_path / "one", *HALVES).run()

    def train() -> int:
        sys.argv = ["manyheads", "train", str(recipe), *HALVES, "--out", str(tmp_path / "two")]
        cli.main()
        return 0

    output = forked(2, train, tmp_path, nodes=2)
    assert "process group: 2 processes, 2 nodes, gloo, main" in output
    assert_alike(tmp_path / "one", tmp_path / "two")


def test_an_engine_that_calls_the_other_divides_its_rows_once(tmp_path: Path) -> None:
    """As CTranslate2 does, which lets PyTorch search some rows again."""

    class Torch:
        def search(self, rows: range) -> list[int]:
            print(f"torch {list(rows)}")
            return [row * row for row in rows]

    class Fast(Torch):
        def search(self, rows: range) -> list[int]:
            print(f"fast {list(rows)}")
            return [*Torch().search(rows[:1]), *(row * row for row in rows[1:])]

    def work() -> int:
        with connected(print) as world, shared_rows(world, "search", Torch, Fast):
            print(Fast().search(range(5)), Torch().search(range(3)))
        return 0

    output = forked(2, work, tmp_path)
    assert output.count("[0, 1, 4, 9, 16] [0, 1, 4]\n") == 2
    for line in ("fast [0, 2, 4]", "fast [1, 3]", "torch [0]", "torch [1]", "torch [0, 2]"):
        assert f"{line}\n" in output


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_every_engine_divides_its_rows(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    run = load_torch_run(shutil.copytree(RUN_FOLDER, tmp_path / "run")).with_engine(Engine(engine))
    translator = run.translator()
    owner = next(kind for kind in type(translator).__mro__ if "search" in vars(kind))
    search = owner.search  # type: ignore[attr-defined]
    monkeypatch.setattr(
        owner, "search", lambda self, x, *rest, **named: counts.append(len(x)) or search(self, x)
    )
    monkeypatch.setattr(parallel.dist, "all_gather_object", gathered_by_one)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "connected", lambda report: nullcontext(World(0, 2)))
    with row_processes("translate"):
        translator.search(["The dog sees the tree."] * 4)
    assert counts == [2]


def gathered_by_one(parts: list[Any], results: Any) -> None:
    parts[:] = [results] * len(parts)


def test_processes_translate_evaluate_and_embed_as_one_does(recipe: Path, tmp_path: Path) -> None:
    """Each computes a part of the rows; the main process prints all, in order."""
    out = tmp_path / "run"
    trainer(recipe, out, *PLAIN).run()
    lines = [" ".join(WORDS[: 1 + n % 7]) for n in range(41)]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    commands = {
        "translate": ("translate", out, tmp_path / "in.txt", "--n-best", "2"),
        "evaluate": ("evaluate", out, "--split", "valid", "--json"),
        "embed": ("embed", out, tmp_path / "in.txt", "--out", tmp_path / "vectors.npy"),
    }

    def work(name: str) -> int:
        """The main process writes the output of a command into a file."""
        path = tmp_path / name if os.environ["RANK"] == "0" else os.devnull
        with open(path, "w", encoding="utf-8") as sys.stdout:
            sys.argv = ["manyheads", *map(str, commands[name])]
            try:
                cli.main()
            except SystemExit as end:
                return int(end.code or 0)
        return 0

    vectors = []
    for name, words in commands.items():
        code, output, error = call(*map(str, words))
        assert code == 0, error
        vectors += [np.load(words[-1])] if name == "embed" else []
        forked(2, partial(work, name), tmp_path)
        assert (tmp_path / name).read_text(encoding="utf-8") == output
        assert name == "embed" or output.count("\n") > 10
    vectors.append(np.load(tmp_path / "vectors.npy"))
    np.testing.assert_allclose(vectors[1], vectors[0], rtol=1e-5, atol=1e-6)
    assert len(vectors[0]) == 41


MODELS = [
    build
    for name in ("transformer-base", "bert-base", "palm-8b", "t5-base", "music-transformer")
    for build in [partial(build_preset, name, dim=64, layers=2, heads=4, vocab_size=997)]
]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.args[0])
def test_shards_of_a_build_have_the_bits_of_one_process(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = build()
    state = torch.get_rng_state()
    for rank in range(3):
        shards = ShardedBuild(Train(parallel="fsdp"), World(rank, 3), CPU)
        torch.manual_seed(3)
        with shards:
            sharded = build()
        assert torch.equal(torch.get_rng_state(), state)
        for name, values in shards.named(sharded).items():
            parts = model.get_parameter(name).detach().chunk(3)
            expected = parts[rank].flatten() if rank < len(parts) else torch.empty(0)
            assert torch.equal(values, expected), name
        for name, buffer in sharded.named_buffers():
            assert torch.equal(buffer, model.get_buffer(name))


def test_a_process_stores_its_shard_and_one_parameter_while_it_builds() -> None:
    """Memory by PyTorch's profiler, that of a build with complete parameters for comparison."""
    build = partial(build_preset, "gpt2", dim=64, layers=8, heads=4, vocab_size=997)
    model = build()
    total = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    shards = ShardedBuild(Train(parallel="fsdp"), World(1, 8), CPU)

    def build_shards() -> None:
        with shards:
            build()

    assert peak_memory(build, CPU) >= total
    assert peak_memory(build_shards, CPU) <= 1.1 * total / 8 + 2 * largest


def test_a_fill_that_cannot_be_sharded_is_an_error() -> None:
    shards = ShardedBuild(Train(parallel="fsdp"), World(0, 2), CPU)
    with shards, pytest.raises(TypeError, match="sharded parameter"):
        nn.Linear(4, 4).weight.detach()[:, :2].zero_()


def test_sizes_of_a_mesh_must_fit_the_processes() -> None:
    world = World(0, 8)
    assert shard_sizes(Train(parallel="fsdp"), world) == (1, 8)
    assert shard_sizes(Train(parallel="fsdp", shard=4), world) == (2, 4)
    assert shard_sizes(Train(parallel="fsdp", replicate=4), world) == (4, 2)
    for wrong in (Train(parallel="fsdp", shard=3), Train(parallel="fsdp", shard=2, replicate=2)):
        with pytest.raises(UserError, match="number of processes"):
            shard_sizes(wrong, world)


def test_a_process_waits_for_the_report_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "REPORT_TIMEOUT", timedelta(milliseconds=50))
    store = dist.HashStore()
    assert not parallel._is_reported(store)  # it then reports the error itself
    store.set(parallel.REPORTED, "")
    assert parallel._is_reported(store)


def test_every_micro_batch_is_computed_by_one_process_and_all_compute_equally_many() -> None:
    for size in range(1, 6):
        for count in range(1, 12):
            shares = [local_batches(World(rank, size), list(range(count))) for rank in range(size)]
            counted = [part for share in shares for part, counts in share if counts]
            assert sorted(counted) == list(range(count))
            assert len({len(share) for share in shares}) == 1


def test_a_split_task_has_the_same_rows_in_smaller_parts(recipe: Path, tmp_path: Path) -> None:
    task: Any = trainer(recipe, tmp_path / "run", *HALVES).task
    parted = split_microbatches(task, 3)
    for step in range(6):
        whole, parts = task.batches(step), parted.batches(step)
        assert (len(whole), len(parts)) == (2, 6)
        assert sum(map(task.tokens, whole)) == sum(map(task.tokens, parts))
        sentences = [
            [row[: int(real.sum())].tolist() for batch in batches
             for row, real in zip(batch.labels, batch.loss_mask, strict=True)]
            for batches in (whole, parts)
        ]  # fmt: skip
        assert sentences[0] == sentences[1]


def test_a_task_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match="object cannot be divided among processes"):
        split_microbatches(cast(Any, object()), 2)


def test_each_process_draws_numbers_of_its_own_at_every_step() -> None:
    drawn = set()
    for rank in range(4):
        for step in range(8):
            seed_step(1, step, rank)
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 32
    seed_step(1, 5)
    single = torch.rand(3)
    seed_step(1, 5, 0)  # rank 0 samples like a single process
    assert torch.equal(torch.rand(3), single)


def test_no_two_steps_of_any_seed_draw_the_same_numbers() -> None:
    drawn = set()
    for seed in range(4):
        for step in (0, 1, 2, 3, 1000):
            seed_step(seed, step)
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 20


def test_mistakes_with_several_processes_are_one_line(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["manyheads", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    out = ("--out", tmp_path / "run")
    monkeypatch.delenv("RANK", raising=False)
    line = said("train", recipe, "train.parallel=fsdp", *out)
    assert "train.parallel=fsdp has no effect in one process: start with torchrun" in line
    assert "train.parallel" in said("train", recipe, "train.parallel=dpp", *out)
    # The default is accepted: one script serves any number of processes.
    assert "train.steps" in said("train", recipe, "train.parallel=ddp", "train.steps=0", *out)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert "MASTER_ADDR= " in said("train", recipe, *out)
    for wrong in ("x", ""):
        monkeypatch.setenv("RANK", wrong)
        assert f"RANK={wrong} " in said("train", recipe, *out)
    assert "torchrun does not work with demo" in said("demo", *out)
    assert "torchrun does not work with compare" in said("compare", recipe, "seed=1,2", *out)
    assert not (tmp_path / "run").exists()


def test_a_process_that_loses_the_others_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    codes: list[int] = []
    lines: list[str] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with connected(lines.append):
        raise dist.DistNetworkError("[gloo/pair.cc:42] connection closed\nand its cause")
    assert codes == [1]
    assert lines[-1].endswith(": connection closed")


@pytest.mark.slow
def test_a_signal_to_one_process_makes_all_save_the_same_step(recipe: Path, tmp_path: Path) -> None:
    """No save was due at that step; after a restart all resume from it."""
    script, out = tmp_path / "stopped.py", tmp_path / "out"
    script.write_text(KILLED.format(rank=1, step=4, signal="SIGTERM"), encoding="utf-8")
    settings = (*PLAIN, "train.save_every=100", "train.validate_every=100")
    said = torchrun(2, script, "train", recipe, *settings, "--out", out, restarts=1)
    assert said.count("stopped by SIGTERM and saved, step 5") == 1, said
    assert said.count("resuming from step 5") == 1, said
    together(2, recipe, tmp_path / "whole", *settings)
    assert curve(tmp_path / "whole") == curve(out)


@pytest.mark.slow
def test_a_mistake_is_said_once_and_leaves_no_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for wrong, said in (
        ("model.heads=3", "does not divide into 3 heads"),
        ("train.batch_tokens=2", "train.batch_tokens=2"),
    ):
        actual = together(2, recipe, out, wrong, code=1)
        assert actual.count("manyheads: ") == 1, actual
        assert said in actual
        assert not out.exists()


@pytest.mark.slow
def test_what_one_process_began_four_go_on_with_and_back(recipe: Path, tmp_path: Path) -> None:
    trainer(recipe, tmp_path / "one", *HALVES).run()
    out = tmp_path / "out"
    no_early = ("train.validate_every=3",)
    trainer(recipe, out, *HALVES, "train.steps=3", *no_early).run()
    together(4, recipe, out, *HALVES, "train.parallel=fsdp", "train.steps=6")
    trainer(recipe, out, *HALVES).run()  # nothing is left to do but to write
    assert curve(out)[6, "valid"] == pytest.approx(curve(tmp_path / "one")[6, "valid"], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("processes", [2, 4])
def test_killed_at_any_step_the_bits_are_those_of_an_undisturbed_run(
    recipe: Path, tmp_path: Path, parallel: str, processes: int
) -> None:
    """With dropout too: the samples of a process are a function of seed, step and rank."""
    settings = (*PLAIN, "model.dropout=0.1", f"train.parallel={parallel}")
    together(processes, recipe, tmp_path / "whole", *settings)
    for step in (1, 4):
        script = tmp_path / "killed.py"
        script.write_text(KILLED.format(rank=step % processes, step=step, signal="SIGKILL"))
        out = tmp_path / f"killed-{step}"
        torchrun(processes, script, "train", recipe, *settings, "--out", out, restarts=1)
        one, other = (make_trainer(read_run(each), each, CPU) for each in (tmp_path / "whole", out))
        for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(),
                        strict=True):  # fmt: skip
            assert torch.equal(a, b)
        assert curve(tmp_path / "whole") == curve(out)


def test_a_process_allocates_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of its number on the machine becomes the current device."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    world = World(rank=6, size=8, local_rank=2)
    assert parallel.device_of(world, torch.device("cuda")) == torch.device("cuda", 2)
    assert current == [2]
