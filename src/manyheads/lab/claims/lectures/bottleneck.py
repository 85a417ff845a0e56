"""One vector for a whole sentence: what is left of it as sentences grow, and with attention.

An LSTM encoder–decoder translates random words one by one. Without attention its decoder has one
vector of the source, the last state of each direction, at the start and at every step.
"""

from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from manyheads.baselines.rnn import Rnn, RnnConfig
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.word_for_word import Words, accuracy, teach
from manyheads.nn.masks import AttentionMask

WORDS, DIM, RATE = 40, 64, 3e-3  # 3e-3 and 1e-2 serve both alike
LENGTHS = (2, 4, 6, 8, 10, 12, 14, 16)
STEPS = 1000
LARGE_DIM, LARGE_STEPS = 256, 6000


def one_vector(
    module: nn.Module, inputs: tuple[Tensor, Tensor, AttentionMask]
) -> tuple[object, ...]:
    """The memory with the same vector at each place: attention to it gives that vector alone."""
    x, memory, sight = inputs
    forward, backward = memory.chunk(2, dim=-1)
    whole = torch.cat([forward[:, -1], backward[:, 0]], dim=-1)
    return x, whole[:, None].expand_as(memory), sight


def model_of(vocabulary: int, *, attention: bool, large: bool) -> Rnn:
    dim = LARGE_DIM if large else DIM
    model = RnnConfig(
        vocab_size=vocabulary, dim=dim, layers=1, max_length=64, tie="none", dropout=0.0
    ).build()
    if not attention:
        model.attention.register_forward_pre_hook(one_vector)
    return model


def by_length(setting: Setting, seed: int, *, attention: bool) -> list[float]:
    """The share of words that a trained model has right, at each length."""
    torch.manual_seed(seed)
    words = Words.of(WORDS, seed, setting.device)
    model = model_of(words.vocabulary, attention=attention, large=setting.large)
    steps = LARGE_STEPS if setting.large else STEPS
    teach(model.to(setting.device), words, LENGTHS, steps=steps, rate=RATE, seed=seed)
    return list(map(partial(accuracy, model, words), LENGTHS))


def measure(setting: Setting) -> Measured:
    numbers: dict[str, list[float]] = {}
    lines = {}
    for name, attention in (("attention", True), ("one vector", False)):
        found = [by_length(setting, seed, attention=attention) for seed in setting.seeds]
        numbers[f"{name}, short"] = [row[0] for row in found]
        numbers[f"{name}, long"] = [row[-1] for row in found]
        means = [fmean(column) for column in zip(*found, strict=True)]
        lines[name] = list(zip(LENGTHS, means, strict=True))
    return Measured(numbers=numbers, lines=lines, across="words of a source", up="words right")


def judge(measured: Measured) -> Judged:
    learned = min(measured.least(f"{name}, short") for name in ("attention", "one vector")) > 0.9
    lost = measured.most("one vector, long") < 0.5
    kept = measured.least("attention, long") > 0.8
    why = (
        f"of {LENGTHS[-1]} words {measured.told('one vector, long')} are right through one vector, "
        f"{measured.told('attention, long')} with attention; of {LENGTHS[0]} words "
        f"{measured.told('one vector, short')} and {measured.told('attention, short')}"
    )
    if learned and lost and not kept:
        return Judged("depends", f"holds only for what one vector loses: {why}")
    return Judged("holds" if learned and lost and kept else "fails", why)


CLAIM = Claim(
    sentence="All that a decoder knows of a source goes through one vector where there is no "
    "attention, so that long sentences are lost; attention ends that bottleneck.",
    deck="001, 002",
    criterion="in sentences of 2 words more than 0.9 of the words are right with and without "
    "attention; of 16 words less than 0.5 through one vector, more than 0.8 with attention",
    measure=measure,
    judge=judge,
)
