"""A model that fits on no single device builds, shards and steps: tensors without memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from manyheads.optimize import checkpoint_blocks
from manyheads.presets import preset
from manyheads.summary import count_parameters
from manyheads.train.optimizer import Train, build_optimizer
from manyheads.train.parallel import make_mesh, shard_model
from manyheads.train.step import World

PROCESSES = 64


@pytest.fixture
def fake_group() -> Iterator[World]:
    """Process 5 of 64; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=PROCESSES)
    yield World(5, PROCESSES)
    dist.destroy_process_group()


def test_billions_of_parameters_shard_and_step(fake_group: World) -> None:
    """Eight of the 40 layers of GPT-3 13B, with Adam 45 GB."""
    config = replace(preset("gpt3-13b"), layers=8)
    train, shards = Train(parallel="fsdp", shard=8), 8
    mesh = make_mesh(train, fake_group, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = config.build()
        checkpoint_blocks(model)
        shard_model(model, mesh)
        optimizer = build_optimizer(model, train)
        tokens = torch.zeros(1, 64, dtype=torch.long)
        model(tokens).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    local = [cast(DTensor, parameter).to_local() for parameter in model.parameters()]
    held = sum(tensor.numel() for tensor in local)
    assert held == pytest.approx(count_parameters(config) / shards, rel=0.03)
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    assert [m.to_local().shape for m in moments] == [tensor.shape for tensor in local]
