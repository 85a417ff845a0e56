"""Linformer: its formula, its matrices and its limits. (tests/nn/test_attention.py: with the
identity as its matrices it is dense attention.)"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.capture import capture
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import AttentionInputs, AttentionSizes
from manyheads.nn.linformer import Linformer, LinformerAttention
from manyheads.nn.masks import full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=4, key_dim=4, max_length=9)


def build() -> LinformerAttention:
    return Linformer(rank=3).build(SIZES).double()


def inputs(length: int = 9) -> AttentionInputs:
    q, k, v = (torch.randn(2, heads, length, 4, dtype=torch.float64) for heads in (4, 2, 2))
    return AttentionInputs(q, k, v, make_mask(full, length), InnerScore(0.5), Position())


def test_it_is_the_formula() -> None:
    """softmax(q (E k)ᵀ) E v head by head; queries share their group's keys."""
    function, call = build(), inputs()
    assert {name: x.shape for name, x in function.state_dict().items()} == {"keys": (3, 9)}
    out, weights, e = function(call), function.weights(call), function.keys
    for head in range(4):
        k, v = call.k[:, head // 2], call.v[:, head // 2]
        expected = (0.5 * call.q[:, head] @ (e @ k).mT).softmax(-1)
        torch.testing.assert_close(weights[:, head], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(out[:, head], expected @ (e @ v), rtol=0, atol=1e-12)


def test_initial_matrices() -> None:
    """Entries of N(0, 1/rank)."""
    function = Linformer(rank=64).build(replace(SIZES, max_length=512))
    for matrix in (x.detach() for x in function.parameters()):
        assert abs(float(matrix.std()) * 8 - 1) < 0.03
        assert abs(float(matrix.mean())) < 0.01


def test_refusals() -> None:
    """A rank above the length, decoders, and texts that are too long."""
    with pytest.raises(UserError, match=r"rank=10 .*max_length=9"):
        Linformer(rank=10).build(SIZES)
    sizes: Any = {"vocab_size": 11, "dim": 8, "layers": 1, "heads": 2, "max_length": 9}
    for config in (GptConfig, Seq2SeqConfig):
        with pytest.raises(UserError, match=r"model\.encoder\.attention=linformer"):
            config(**sizes, attention=Linformer(rank=3)).build()
    with pytest.raises(UserError, match=r"10 positions, .*model\.max_length"):
        build()(inputs(length=10))


@pytest.mark.parametrize("half", [False, True])
def test_an_encoder_trains(half: bool) -> None:
    """Finite gradients for every weight, also in mixed precision, and a loss that falls."""
    sizes: Any = {"vocab_size": 13, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    config = BertConfig(**sizes, max_length=9, attention_dropout=0.1, attention=Linformer(rank=3))
    model, tokens = config.build(), torch.randint(13, (4, 9))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    real = torch.arange(9) < torch.tensor([[9], [7], [4], [1]])
    losses: list[Tensor] = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(tokens, real)
        losses.append(F.cross_entropy(logits[real].float(), tokens[real]))
        optimizer.zero_grad()
        losses[-1].backward()
        grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        assert all(grad.isfinite().all() for grad in grads.values())
        assert sum(".core." in name and bool(grad.any()) for name, grad in grads.items()) == 2
        optimizer.step()
    assert losses[-1] < losses[0]
    with capture(model.eval()) as maps:
        model(tokens[:2, :7])
    assert [x.shape for x in maps["self"]] == [(2, 4, 7, 3)] * 2
