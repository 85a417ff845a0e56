"""Activation checkpointing: the same training, bit for bit, and less kept for the backward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import assert_same_bits
from torch import Tensor

from manyheads.errors import UserError
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.optimize import can_capture, checkpoint_blocks, compile_blocks
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train.loop import Trainer

SMALL = ["data.train_pairs=200", "data.valid_pairs=20", "decode.bleu_sentences=0"]
SMALL += ["model.dim=16", "model.layers=2", "model.heads=2", "tokens.vocab_size=400"]
SMALL += ["train.steps=4", "train.batch_tokens=400"]


def trainer(folder: Path, *settings: str) -> Trainer:
    return make_trainer(read_recipe("phrasebook", [*SMALL, *settings]), folder, torch.device("cpu"))


@pytest.mark.parametrize(
    "more",
    [
        ("model.dropout=0.3", "model.attention_dropout=0.2", "train.accumulate=2"),
        ("model.dropout=0", "model.norm=post", "model.feedforward=experts"),
    ],
)
def test_the_same_bits_are_learned(tmp_path: Path, more: tuple[str, ...]) -> None:
    for folder, recompute in (("kept", "false"), ("again", "true")):
        trainer(tmp_path / folder, *more, f"train.activation_checkpointing={recompute}").run()
    assert_same_bits(tmp_path / "again", tmp_path / "kept")


def test_a_run_may_begin_without_it_and_go_on_with_it(tmp_path: Path) -> None:
    """As one does where memory has ended."""
    trainer(tmp_path / "kept").run()
    trainer(tmp_path / "changed", "train.steps=2").run()
    trainer(tmp_path / "changed", "train.activation_checkpointing=true").run()
    assert_same_bits(tmp_path / "changed", tmp_path / "kept")


def saved_bytes(model: Any, tokens: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that a forward pass saves, without the weights, and the gradients."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    held: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in weights:
            held[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens).square().mean()
    return sum(held.values()), list(torch.autograd.grad(loss, list(model.parameters())))


def test_of_a_block_its_input_alone_is_kept() -> None:
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 20, "dim": 32, "layers": 8, "heads": 4, "max_length": 64}
    model = GptConfig(**sizes, dropout=0.0).build().train()
    tokens = torch.randint(20, (4, 64))
    default_bytes, expected = saved_bytes(model, tokens)
    checkpoint_blocks(model)
    checkpointed_bytes, actual = saved_bytes(model, tokens)
    assert checkpointed_bytes < default_bytes / 4
    for grad, reference in zip(actual, expected, strict=True):
        assert torch.equal(grad, reference)
    with torch.no_grad():
        model(tokens)  # nothing to keep, nothing to compute again


def test_what_draws_is_not_recorded() -> None:
    """A recording cannot ask where the generator stood."""
    sizes: Any = {"vocab_size": 20, "dim": 8, "layers": 1, "heads": 1}
    for dropout in (0.0, 0.1):
        model = Seq2SeqConfig(**sizes, dropout=dropout).build()
        assert can_capture(model)
        checkpoint_blocks(model)
        assert can_capture(model) == (not dropout)


def test_models_without_blocks_are_refused(tmp_path: Path) -> None:
    run = read_recipe(
        "phrasebook", ["model=rnn", *SMALL[:3], "train.activation_checkpointing=true"]
    )
    with pytest.raises(UserError, match=r"train\.activation_checkpointing"):
        make_trainer(run, tmp_path, torch.device("cpu"))


@pytest.mark.compile
def test_compiled_blocks_compute_again_too(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that a sight holds since the first time must not make another graph of the second."""
    if request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("torch.compile cannot trace the shape checks: run without the hook")
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda part: compile_(part, backend="aot_eager")
    )
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 20, "dim": 8, "layers": 2, "heads": 2, "dropout": 0.0}
    model = Seq2SeqConfig(**sizes).build().train()
    source, target = torch.randint(1, 20, (2, 3, 5))
    real = torch.arange(5) < torch.tensor([[5], [3], [2]])

    def gradients() -> list[Tensor]:
        loss = model(source, target, real).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    checkpoint_blocks(model)
    compile_blocks(model)
    for one, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)
