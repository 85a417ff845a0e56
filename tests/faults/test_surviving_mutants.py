"""Properties that mutants of release 0.1 could break without a failing test."""

import pytest
import torch

from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.train.loop import seed_step
from manyheads.train.optimizer import Train, build_optimizer


def test_every_setting_of_adam_reaches_the_optimizer() -> None:
    settings = Train(beta1=0.7, beta2=0.8, eps=0.3, weight_decay=0.1)
    matrices, vectors = build_optimizer(torch.nn.Linear(3, 2), settings).param_groups
    for group in (matrices, vectors):
        assert (group["betas"], group["eps"]) == ((0.7, 0.8), 0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_no_two_steps_of_several_runs_and_processes_share_random_numbers() -> None:
    cases = [(seed, step, rank) for seed in range(4) for step in range(40) for rank in range(3)]
    numbers = set()
    for case in cases:
        seed_step(*case)
        numbers.add(int(torch.randint(2**62, ())))
    assert len(numbers) == len(cases)


def test_scaled_initial_weights_count_the_layers_of_both_stacks() -> None:
    """GPT-2's 0.02 / √(2 · layers), for the projections into the residual stream."""
    torch.manual_seed(1)
    sizes = {"dim": 64, "heads": 4, "ffn_dim": 128, "vocab_size": 9, "max_length": 8}
    model = Seq2SeqConfig(**sizes, layers=4, init="normal-scaled").build()
    parameters = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    scaled = [p.flatten() for n, p in parameters if n.endswith(("output.weight", "outer.weight"))]
    assert len(scaled) == 4 * 2 + 4 * 3
    assert float(torch.cat(scaled).std()) == pytest.approx(0.02 * (2 * 8) ** -0.5, rel=0.02)
