"""Class swaps leave a model with the same parameters, names and results."""

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.block import Block
from manyheads.optimize import (
    ACTIVATION_BUDGET,
    CompiledStack,
    can_capture,
    checkpoint_blocks,
    compile_blocks,
    optimize,
)

SIZES: Any = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "dropout": 0.0}


def test_optimize_does_nothing_on_a_cpu() -> None:
    model = Seq2SeqConfig(**SIZES).build()
    classes = [type(part) for part in model.modules()]
    optimize(model)
    assert [type(part) for part in model.modules()] == classes


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.3, "attention_dropout": 0.2}])
@pytest.mark.parametrize("config", [GptConfig, Seq2SeqConfig])
def test_checkpointed_blocks_give_the_same_bits(config: Any, settings: dict[str, float]) -> None:
    model, tokens = config(**{**SIZES, **settings}).build().train(), torch.randint(50, (3, 9))
    inputs = (tokens, tokens) if config is Seq2SeqConfig else (tokens,)

    def loss_and_grads() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(*inputs).square().mean()
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    names, plain = [*model.state_dict()], loss_and_grads()
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    assert can_capture(model)
    checkpoint_blocks(model)
    assert [*model.state_dict()] == names
    assert [part for part in model.modules() if isinstance(part, Block)] == blocks
    for result, expected in zip(loss_and_grads(), plain, strict=True):
        assert torch.equal(result, expected)
    assert can_capture(model) == (not settings)  # the host reads the generator's state


def test_checkpointing_needs_blocks() -> None:
    with pytest.raises(UserError, match=r"train\.activation_checkpointing"):
        checkpoint_blocks(nn.Linear(2, 2))


@pytest.mark.compile
@pytest.mark.parametrize("settings", [{}, {"dropout": 0.1}, {"attention_dropout": 0.1}])
def test_compiled_stacks_keep_less_without_dropout(
    settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would sample another dropout mask when it recomputes."""
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    model: Any = GptConfig(**{**SIZES, **settings}).build().eval()
    names, budgets = [*model.state_dict()], []
    model.decoder.blocks[0].register_forward_pre_hook(
        lambda block, inputs: budgets.append(functorch_config.activation_memory_budget)
    )
    tokens = torch.randint(50, (3, 9))
    with torch.no_grad():
        expected = model(tokens)
        compile_blocks(model)
        assert torch.equal(model(tokens), expected)
    assert [*model.state_dict()] == names
    assert isinstance(model.decoder, CompiledStack)
    assert budgets == [1.0, 1.0 if settings else ACTIVATION_BUDGET]
    assert functorch_config.activation_memory_budget == 1.0
