"""The field's own models on our parts: the same numbers, forward and backward, and back again."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.exchange.foreign import take
from manyheads.exchange.huggingface import KINDS, from_huggingface, to_huggingface
from tests.exchange.zoo import CLASSES, ENCODERS, LONGEST, PAIRS, draw, exact

SEEDS = range(24)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# What an untied model of `transformers` 5 stores under a second name, and never reads.
UNREAD = ("model.shared.weight", "cls.predictions.bias", "lm_head.bias")
every = pytest.mark.parametrize("family", CLASSES)


def tokens_of(rng: random.Random, vocabulary: int, rows: int, length: int) -> Tensor:
    """Any tokens but the first four, which padding may be among."""
    drawn = [[rng.randrange(4, vocabulary) for _ in range(length)] for _ in range(rows)]
    return torch.tensor(drawn)


def padding(rng: random.Random, rows: int, length: int, *, left: bool) -> Tensor:
    """Which positions are real: at least one in each row, padding on one side."""
    real = torch.ones(rows, length, dtype=torch.bool)
    for row in range(rows):
        empty = rng.randrange(length)
        real[row, : empty if left else 0] = False
        real[row, length - (0 if left else empty) :] = False
    return real


def both(family: str, theirs: Any, ours: nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the two say to the same input, and which of it is of real positions."""
    rng = random.Random(f"input {family} {seed}")
    rows, dtype = rng.choice([1, 2, 3]), next(ours.parameters()).dtype
    if family == "vit":
        config = theirs.config
        images = torch.randn(rows, config.num_channels, config.image_size, config.image_size)
        out = theirs(images.to(dtype))
        return out[0], ours(images.to(dtype)), torch.ones(rows, dtype=torch.bool)
    length = rng.randint(1, LONGEST)
    words = tokens_of(rng, theirs.config.vocab_size, rows, length)
    # Encoders are read from their first position, and RoBERTa counts from the first real one.
    real = padding(rng, rows, length, left=family not in ENCODERS and rng.random() < 0.3)
    words = words.masked_fill(~real, theirs.config.pad_token_id or 0)
    if family in PAIRS:
        vocabulary = getattr(theirs.config, "decoder_vocab_size", None) or theirs.config.vocab_size
        wanted = tokens_of(rng, vocabulary, rows, rng.randint(1, LONGEST))
        written = padding(rng, *wanted.shape, left=False)
        out = theirs(
            input_ids=words,
            attention_mask=real.long(),
            decoder_input_ids=wanted,
            decoder_attention_mask=written.long(),
        )
        return out.logits, ours(words, wanted, real, written), written
    if family in ENCODERS:
        segments = torch.zeros_like(words)
        extra = {}
        if family != "distilbert" and theirs.config.type_vocab_size > 1:
            segments = torch.randint(theirs.config.type_vocab_size, words.shape)
        if family != "distilbert":
            extra = {"token_type_ids": segments}
        out = theirs(input_ids=words, attention_mask=real.long(), **extra)
        said = ours(words, real, segments)
        each = said.shape[:2] == words.shape and said.ndim + (out[0].ndim == 2) > 2
        return out[0], said, real if each else torch.ones(rows, dtype=torch.bool)
    return theirs(input_ids=words, attention_mask=real.long()).logits, ours(words, real), real


def gradients(family: str, theirs: Any, ours: nn.Module) -> dict[str, Tensor]:
    """Their gradients by our names; what got none has zeros."""
    found = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items()}
    found |= {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    tied = {id(p): n for n, p in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        found[name] = found[tied[id(parameter)]]
    canonical = {KINDS[family].canonical(name): grad for name, grad in found.items()}
    return take(KINDS[family], ours, canonical)


@every
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_and_gradients_are_theirs(family: str, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    for seed in SEEDS:
        theirs = draw(family, seed, dtype)
        with exact(theirs):
            ours = from_huggingface(theirs)
            expected, said, real = both(family, theirs, ours, seed)
            assert said.shape == expected.shape
            assert expected[real].std() > 0.01 or expected[real].numel() < 3
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
