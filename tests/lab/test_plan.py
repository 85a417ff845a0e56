"""The plan of a training against published figures, and against its own formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.test_cli import result

from manyheads.lab.plan import Plan, Setup, compare_devices, plan_training
from manyheads.lab.training_cost import DEVICES
from manyheads.models.gpt import GptConfig
from manyheads.nn.layers import Gated, Norm
from manyheads.nn.positions import Rotary
from manyheads.presets import preset
from manyheads.recipes import read_recipe
from manyheads.run import write_settings

GIB = 2**30


def llama(layers: int, dim: int, heads: int, ffn_dim: int, length: int = 8192) -> GptConfig:
    """Llama 3.1 (Grattafiori et al. 2024, table 3)."""
    return GptConfig(
        vocab_size=128_256,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=8,
        ffn_dim=ffn_dim,
        max_length=length,
        position=Rotary(),
        norm=Norm(placement="pre", form="rms"),
        feedforward=Gated(activation="silu"),
        tie="none",
        bias=False,
        dropout=0.0,
    )


LLAMA_8B = llama(32, 4096, 32, 14336)
LLAMA_70B = llama(80, 8192, 64, 28672)


def torchtitan(config: GptConfig, **settings: Any) -> Plan:
    """FSDP with weights sent in bfloat16, and a loss that stores all logits."""
    return plan_training(config, Setup(logit_bytes=12, gather_bytes=2, **settings))


def test_speed_is_near_published_runs_that_did_not_calibrate_it() -> None:
    """torchtitan, benchmarks/llama3_h100_202412 (tables 1 and 3) and docs/performance.md.

    Half of the blocks count as checkpointed where torchtitan checkpoints selectively.
    """
    h100 = [torchtitan(LLAMA_8B, devices=n, micro_batch=2, checkpointed=0.5) for n in (8, 128)]
    assert h100[0].tokens_per_device == pytest.approx(6667, rel=0.05)  # calibrates
    assert h100[1].tokens_per_device == pytest.approx(6514, rel=0.05)
    kinds = {"device_kind": "a100", "devices": 64}
    a100 = torchtitan(LLAMA_8B, **kinds, checkpointed=0.5)
    assert a100.tokens_per_device == pytest.approx(2904, rel=0.05)  # calibrates
    large = torchtitan(LLAMA_70B, **kinds, checkpointed=1.0)
    assert large.tokens_per_device == pytest.approx(331, rel=0.12)
    assert large.mfu == pytest.approx(0.517, rel=0.12)


def test_memory_is_near_a_published_run_with_full_checkpointing() -> None:
    """torchtitan, table 2: sequences of 32,768 on 8 H100, 83.9 GiB."""
    plan = torchtitan(replace(LLAMA_8B, max_length=32768), devices=8, checkpointed=1.0)
    assert sum(plan.memory.values()) / GIB == pytest.approx(83.9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "speed", "memory", "error"),
    [("gpt2", 533_123, 10.36, 0.1), ("gpt3-medium", 207_328, 24.77, 0.22)],
)
def test_one_h200_is_near_what_docs_speed_measured(
    name: str, speed: float, memory: float, error: float
) -> None:
    setup = Setup(device_kind="h200", layout="ddp", length=1024, micro_batch=32)
    plan = plan_training(preset(name), setup)
    assert plan.tokens_per_device == pytest.approx(speed, rel=0.1)
    # Activations are those of eager code; fused feed-forward parts keep less.
    assert sum(plan.memory.values()) / GIB == pytest.approx(memory, rel=error)


def test_bytes_sent_are_those_of_ring_collectives() -> None:
    config = preset("gpt3-13b")
    parameters = plan_training(config, Setup()).parameters
    ddp = plan_training(config, Setup(devices=16, layout="ddp"))
    assert ddp.sent == {"all-reduce": pytest.approx(2 * 4 * parameters * 15 / 16, abs=2)}
    fsdp = plan_training(config, Setup(devices=16))
    assert fsdp.sent["reduce-scatter"] == pytest.approx(4 * parameters * 15 / 16, abs=2)
    assert fsdp.sent["all-gather"] > 1.9 * fsdp.sent["reduce-scatter"]
    hsdp = plan_training(config, Setup(devices=16, layout="hsdp"))
    assert hsdp.setup.shards == 8
    assert hsdp.sent["all-reduce"] == pytest.approx(2 * 4 * parameters / 8 / 2, abs=2)
    assert hsdp.seconds["communication"] < fsdp.seconds["communication"]
    assert plan_training(config, Setup()).sent == {}


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    for checkpointed in (0.0, 1.0):
        setup = Setup(devices=64, checkpointed=checkpointed)
        largest = plan_training(preset("gpt3-13b"), setup).largest_micro_batch
        assert largest >= 1
        for size, fits in ((largest, True), (largest + 1, False)):
            plan = plan_training(preset("gpt3-13b"), replace(setup, micro_batch=size))
            assert plan.fits == fits
    assert plan.capacity < DEVICES["h100"].memory


def test_a_run_folder_is_planned_as_its_recipe(tmp_path: Path) -> None:
    settings = ["model.dim=32", "model.vocab_size=1000"]
    write_settings(read_recipe("phrasebook", settings), tmp_path)
    options = ["model.dropout=0", "--devices", "2", "--json"]
    of_run, of_recipe = (
        json.loads(result("plan", *words, *options))
        for words in ([tmp_path], ["phrasebook", *settings])
    )
    assert of_run == of_recipe | {"name": str(tmp_path)}


def test_shards_divide_weights_gradients_and_moments() -> None:
    plans = compare_devices(preset("gpt3-xl"), Setup(), [1, 8, 64])
    memory = {(p.setup.layout, p.setup.devices): p.memory for p in plans}
    for part in ("weights", "gradients", "moments"):
        assert memory["ddp", 64][part] == memory["ddp", 1][part]
        assert memory["fsdp", 64][part] == pytest.approx(memory["ddp", 1][part] / 64, abs=8)
        assert memory["hsdp", 64][part] == memory["fsdp", 8][part]


def test_the_budget_adds_up() -> None:
    plan = plan_training(preset("gpt3-xl"), Setup(devices=8, accumulate=4, micro_batch=2))
    assert plan.step_tokens == 8 * 4 * 2 * 2048
    budget = plan.budget(1e9)
    assert budget["steps"] == -(-(10**9) // plan.step_tokens)
    assert budget["device_hours"] == pytest.approx(8 * budget["hours"])
    assert json.loads(json.dumps(plan.as_dict(1e9)))["budget"]["steps"] == budget["steps"]
    assert "device hours" in plan.text(1e9)
