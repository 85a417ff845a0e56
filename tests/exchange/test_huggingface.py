"""The field's own models on our parts: the same numbers, forward and backward, and back again."""

import copy
from typing import Any

import pytest
import torch
from tests.exchange.zoo import CLASSES, SEEDS, both, draw, exact
from torch import Tensor, nn

from manyheads.exchange.family import from_hf_state
from manyheads.exchange.huggingface import KINDS, from_huggingface, to_huggingface

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# What an untied model of `transformers` 5 stores under a second name, and never reads.
UNREAD = ("model.shared.weight", "cls.predictions.bias", "lm_head.bias")
every = pytest.mark.parametrize("family", CLASSES)


def gradients(family: str, theirs: Any, ours: nn.Module) -> dict[str, Tensor]:
    """Their gradients by our names; what got none has zeros."""
    found = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items()}
    found |= {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    tied = {id(p): n for n, p in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        found[name] = found[tied[id(parameter)]]
    canonical = {KINDS[family].canonical(name): grad for name, grad in found.items()}
    return from_hf_state(KINDS[family], ours, canonical)


@every
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_logits_and_gradients_are_theirs(family: str, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    for seed in SEEDS:
        theirs = draw(family, seed, dtype)
        with exact(theirs):
            ours = from_huggingface(theirs)
            expected, said, real = both(family, theirs, ours, seed)
            assert said.shape == expected.shape
            assert expected[real].numel() < 3 or expected[real].std() > 0.01
            torch.testing.assert_close(said[real], expected[real], rtol=bound, atol=bound)
            pull = torch.randn_like(said[real])
            ((said[real] * pull).sum() / pull.numel()).backward()
            ((expected[real] * pull).sum() / pull.numel()).backward()
        wanted = gradients(family, theirs, ours)
        for name, parameter in ours.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(
                grad, wanted[name], rtol=bound, atol=bound, msg=f"{seed} {name}"
            )


@every
def test_there_and_back_is_the_same_bit_for_bit(family: str) -> None:
    for seed in SEEDS:
        theirs = draw(family, seed)
        back = to_huggingface(from_huggingface(theirs))
        assert type(back) is type(theirs)
        unread = () if theirs.config.to_dict().get("tie_word_embeddings", True) else UNREAD
        old, new = (
            {name: tensor for name, tensor in model.state_dict().items() if name not in unread}
            for model in (theirs, back)
        )
        assert old.keys() == new.keys()
        for name in old:
            assert torch.equal(old[name], new[name]), (seed, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every
def test_models_on_a_gpu_come_and_leave_too(family: str) -> None:
    for seed in range(2):
        theirs = draw(family, seed)
        ours = from_huggingface(copy.deepcopy(theirs).cuda())
        assert {x.device.type for x in ours.state_dict().values()} == {"cuda"}
        back, expected = to_huggingface(ours), to_huggingface(from_huggingface(theirs))
        for name, tensor in expected.state_dict().items():
            same = torch.equal(back.state_dict()[name], tensor)
            assert same or name in UNREAD, (seed, name)
