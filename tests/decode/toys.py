"""Toy translators: a vocabulary of words, peaked distributions, and sessions without a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor

from manyheads.decode.beam import BeamSearch, Decode, Hypothesis, LogitsConstraints
from manyheads.decode.decoder import after_sources
from manyheads.decode.translate import Translator
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    PositionConfig,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.tiled import Tiled
from manyheads.tokenizer.tokenizer import SPECIALS, Tokenizer

POSITIONS: dict[str, PositionConfig] = {
    "none": NoPosition(),
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "rotary": Rotary(),
    "shaw": Shaw(max_distance=2),
    "t5": Buckets(buckets=6, max_distance=5),
    "alibi": Alibi(),
}
CORES: dict[str, AttentionFunctionConfig] = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=4),
}
# Each position with one core; tests/nn/test_attention.py has all the pairs.
CELLS = [
    *(("none", "tiled"), ("sinusoidal", "fused"), ("learned", "dense"), ("rotary", "tiled")),
    *(("shaw", "dense"), ("t5", "fused"), ("alibi", "tiled")),
]
# One core a position: the one that honours it and is used most.
SCHEMES = [(p, "dense" if p == "shaw" else "fused") for p in POSITIONS]

# Weights with which some sentences end early, some late and some at the limit.
SEEDS = {
    "none": 12,
    "sinusoidal": 57,
    "learned": 33,
    "rotary": 28,
    "shaw": 15,
    "t5": 1,
    "alibi": 12,
}

WORDS = [*"abcdefgh"]
PAD, START, END = 0, 1, 2
SUPPRESSED = [0, 1, 3, 4, 5, 6]
LONGEST = 24

NextLogits = Callable[[Tensor, Tensor], Tensor]


def toy_tokenizer(pad: str = "<pad>") -> Tokenizer:
    """Eight words, split at spaces, after the special tokens."""
    special = [pad, *SPECIALS[1:]]
    vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(special)
    return Tokenizer(inner)


def toy_model(position: str = "sinusoidal", core: str = "fused", **changes: Any) -> Seq2Seq:
    """Random weights, in float64 so that rounding never decides between two hypotheses, and
    larger than usual, so that a next token is likely or unlikely and the source matters."""
    torch.manual_seed(changes.pop("seed", SEEDS[position]))
    sizes = {"vocab_size": len(SPECIALS) + len(WORDS), "dim": 16, "layers": 2, "heads": 2}
    parts = {"position": POSITIONS[position], "attention": CORES[core], "dropout": 0.0}
    fixed: Any = {"tie": "none", "ffn_dim": 24, "max_length": LONGEST}
    model = Seq2SeqConfig(**{**sizes, **parts, **fixed, **changes}).build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.8)
    return model


def toy_translator(position: str = "sinusoidal", core: str = "fused", **decode: Any) -> Translator:
    settings = {"max_length_ratio": 1.5, "max_length_extra": 3, **decode}
    return Translator(toy_model(position, core), toy_tokenizer(), Decode(**settings))


def toy_source(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random sources of these lengths, padded, and what of them is real."""
    real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    words = torch.randint(len(SPECIALS), len(SPECIALS) + len(WORDS), real.shape)
    return words.masked_fill(~real, PAD), real


class Recomputing:
    """A session that keeps prefixes and calls a function for the logits after each of them.

    The function gets the number of each row's sentence and its prefix, start token included.
    """

    def __init__(self, next_logits: NextLogits, sentences: int) -> None:
        self.next_logits = next_logits
        self.sentences = torch.arange(sentences)
        self.prefixes = torch.zeros(sentences, 1, 0, dtype=torch.long)  # one hypothesis at first
        self.steps: list[int] = []

    def step(self, tokens: Tensor) -> Tensor:
        n, beams, _ = self.prefixes.shape
        self.steps.append(n * beams)
        self.prefixes = torch.cat([self.prefixes, tokens[:, :beams, None]], dim=2)
        homes = self.sentences.repeat_interleave(beams)
        logits = self.next_logits(homes, self.prefixes.flatten(0, 1)).view(n, beams, -1)
        return logits.repeat_interleave(tokens.shape[1] // beams, 1).clone()

    def reorder(self, parents: Tensor) -> None:
        if self.prefixes.shape[1] == 1:
            parents = torch.zeros_like(parents)
        self.prefixes = self.prefixes[torch.arange(len(parents))[:, None], parents]

    def keep_sentences(self, sentences: Tensor) -> None:
        self.sentences, self.prefixes = self.sentences[sentences], self.prefixes[sentences]


def full_pass(model: Seq2Seq, source: Tensor, real: Tensor) -> NextLogits:
    """Next logits of a model by a full pass over source and prefix: no cache, no sharing."""
    with torch.no_grad():
        return lambda homes, prefixes: model(source[homes], prefixes, real[homes])[:, -1].float()


def chance(vocabulary: int, peak: float = 2.0, end: float = 0.0) -> NextLogits:
    """Random logits for each sentence and prefix, the same every time."""

    def next_logits(homes: Tensor, prefixes: Tensor) -> Tensor:
        rows = []
        for home, prefix in zip(homes.tolist(), prefixes.tolist(), strict=True):
            seed = hash((home, *prefix)) % 2**62
            logits = peak * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))
            logits[END] += end
            rows.append(logits)
        return torch.stack(rows)

    return next_logits


def beam_search(
    decode: Decode, suppressed: Sequence[int] = SUPPRESSED, n_best: int | None = None
) -> BeamSearch:
    constraints = LogitsConstraints(decode, END, suppressed, torch.device("cpu"))
    return BeamSearch(decode, constraints, n_best)


def searched(
    model: Seq2Seq, source: Tensor, real: Tensor, limits: list[int], **decode: Any
) -> list[list[Hypothesis]]:
    """Beam search as the translator does it."""
    search = beam_search(Decode(**decode))
    return search(after_sources(model, source, real), START, torch.tensor(limits))


def same(results: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    """The same hypotheses in the same order, with the same scores up to rounding."""
    assert [[h.tokens for h in nbest] for nbest in results] == [
        [h.tokens for h in nbest] for nbest in expected
    ]
    for field in ("log_probability", "score"):
        ours, theirs = (
            torch.tensor([getattr(h, field) for nbest in x for h in nbest])
            for x in (results, expected)
        )
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
