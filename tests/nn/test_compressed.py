"""Memory-compressed attention: loops over blocks, and its layers. (tests/nn/test_attention.py:
with a stride of 1 and the identity it is dense attention, and no block reveals a later key.)"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.models.capture import capture
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import AttentionInputs, AttentionSizes
from manyheads.nn.compressed import CompressedAttention, MemoryCompressed
from manyheads.nn.local import Local
from manyheads.nn.masks import AttentionMask, Rule, causal, full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=5, key_dim=5, max_length=64)
SCORE = InnerScore(0.4)


def build(stride: int = 3, *, looks_back: bool = True) -> CompressedAttention:
    """With kernels far from the mean, so that every number of them matters."""
    torch.manual_seed(7)
    function = CompressedAttention(stride, replace(SIZES, causal=looks_back))
    with torch.no_grad():
        for kernel in function.parameters():
            kernel.normal_(std=0.5)
    return function.double()


def draw(length: int, queries: int | None = None) -> list[Tensor]:
    shapes = [(2, 4, queries or length, 5), (2, 2, length, 5), (2, 2, length, 5)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def call(function: Any, tensors: list[Tensor], mask: AttentionMask, score: Score = SCORE) -> Tensor:
    return function(AttentionInputs(*tensors, mask, score, Position()))


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def by_hand(
    function: CompressedAttention, q: Tensor, k: Tensor, v: Tensor, rule: Rule, real: Tensor
) -> Tensor:
    """One row, head, query and block after the other."""
    out, stride = torch.zeros_like(q), function.stride
    for row, head, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        group, scores, values = head // 2, [], []
        for begin in range(0, k.shape[2], stride):
            block = [p for p in range(begin, min(begin + stride, k.shape[2])) if real[row, p]]
            if not block or (rule is causal and begin + stride - 1 > i):
                continue
            kernels = function.keys[group], function.values[group]
            key = sum(kernels[0][:, :, p - begin] @ k[row, group, p] for p in block)
            values.append(sum(kernels[1][:, :, p - begin] @ v[row, group, p] for p in block))
            scores.append(SCORE.scale * q[row, head, i] @ key)
        if values:
            weights = torch.stack(scores).softmax(0)
            out[row, head, i] = sum(w * value for w, value in zip(weights, values, strict=True))
    return out


@pytest.mark.parametrize("rule", [full, causal], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 6, 7])
def test_it_is_a_loop_over_blocks(rule: Rule, stride: int, length: int) -> None:
    function, tensors = build(stride, looks_back=rule is causal), draw(length)
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
    for padding_mask in (None, real):
        mask = make_mask(rule, length, padding_mask=padding_mask)
        every = torch.ones_like(real) if padding_mask is None else real
        close(call(function, tensors, mask), by_hand(function, *tensors, rule, every))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_key_counts_at_its_position(rows: int) -> None:
    """Padding in the middle of a row, positions by row: the same blocks as without it."""
    function, (q, k, v) = build(), (x[:rows] for x in draw(7, queries=2))
    source = [4, 2][:rows]
    positions = torch.tensor([[0, 1, 2, 3, n, n + 1, n + 2] for n in source])
    real = torch.ones(rows, 7).bool()
    real[:, :4] = torch.arange(4) < torch.tensor(source)[:, None]
    result = call(function, [q, k, v], AttentionMask(causal, positions[:, -2:], positions, real))
    for row, length in enumerate(source):
        without = [x[row : row + 1, :, [*range(length), 4, 5, 6]] for x in (k, v)]
        index = torch.arange(length + 3)[None]
        mask = AttentionMask(causal, positions[row : row + 1, -2:], index)
        close(result[row], call(function, [q[row : row + 1], *without], mask)[0])


def test_layers_alternate() -> None:
    built = [MemoryCompressed().build(replace(SIZES, layer=layer)) for layer in range(5)]
    assert ["ML"[isinstance(function, Local)] for function in built] == list("LMLML")
    sizes: Any = {"vocab_size": 13, "dim": 8, "layers": 3, "heads": 2, "kv_heads": 1}
    attention = MemoryCompressed(stride=2, size=4, layers="LLM")
    model = GptConfig(**sizes, max_length=24, attention=attention).build()
    tokens = torch.randint(13, (1, 9))
    with torch.no_grad(), capture(model) as maps:
        model(tokens)
    assert [tuple(weights.shape[2:]) for weights in maps["self"]] == [(9, 9), (9, 9), (9, 5)]
    model(tokens).square().sum().backward()
    kernels = [p.grad for name, p in model.named_parameters() if ".core." in name]
    assert len(kernels) == 2
    assert all(grad is not None and grad.any() for grad in kernels)


def test_a_block_is_its_mean_at_first() -> None:
    function = CompressedAttention(3, replace(SIZES, head_dim=64, key_dim=64))
    x = torch.randn(4, 2, 9, 64)
    blocks = function._compress(x, function.values, make_mask(full, 9)).detach()
    mean = x.unflatten(2, (3, 3)).mean(3)
    noise = (blocks - mean).square().mean().sqrt()
    assert 0.01 < float(noise) < 0.2 < float(mean.square().mean().sqrt())
    assert not torch.equal(function.keys[0], function.keys[1])


@pytest.mark.parametrize("wrong", [{"stride": 0}, {"size": 0}, {"layers": ""}, {"layers": "LMX"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(UserError, match=rf"attention\.{name}="):
        parse(MemoryCompressed, wrong, "attention")
