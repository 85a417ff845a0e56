"""Claims about heads, depth, norms and warm-up: broken models change the verdict."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from manyheads.lab.claims import phrases as text
from manyheads.lab.claims.claim import Setting
from manyheads.lab.claims.lectures import (
    feed_forward_needed,
    layer_norm_speed,
    norm_and_warmup,
    residuals,
    several_heads,
)
from manyheads.nn.attention import SelfAttention
from manyheads.nn.layers import Residual

CPU = torch.device("cpu")
ONCE = Setting(seeds=(1,))
TINY: dict[ModuleType, dict[str, object]] = {
    feed_forward_needed: {"LAYERS": 2, "DIM": 8, "ROWS": 2},
    layer_norm_speed: {
        "SENTENCES": 40,
        "DIM": 8,
        "CASES": {
            "2 layers": (
                layer_norm_speed.Stack(2, 4, (1e-3, 1e-2)),
                layer_norm_speed.Stack(2, 4, (1e-3, 1e-2), normed=False),
            )
        },
    },
    norm_and_warmup: {"SENTENCES": 40, "STEPS": 4, "DIM": 8, "LAYERS": 2, "WARMUP": 2},
    residuals: {"SENTENCES": 40, "STEPS": 3, "DIM": 8, "DEPTHS": (1, 2), "RATES": (1e-2,)},
    several_heads: {
        "WIDE": 16,
        "WIDE_HEADS": 2,
        "SHORT": 4,
        "LONG": 8,
        "ROUNDS": 1,
        "STEPS": 2,
        "RATES": (1e-2,),
        "ROWS": 2,
        "DIM": 8,
        "TEST_TEXTS": 2,
    },
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constants in TINY.items():
        for name, value in constants.items():
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__.split(".")[-1])
def test_an_experiment_gives_what_its_judge_asks_for(module: ModuleType) -> None:
    claim = module.CLAIM
    measured = claim.measure(Setting(seeds=(1, 2)))
    assert all(len(values) == 2 for values in measured.numbers.values())
    assert measured.lines
    assert claim.judge(measured).why
    again = claim.measure(Setting(seeds=(1, 2)))
    steady = [name for name in measured.numbers if not name.startswith("time")]
    assert [again.numbers[name] for name in steady] == [measured.numbers[name] for name in steady]


def depth_verdict() -> str:
    return feed_forward_needed.judge(feed_forward_needed.measure(ONCE)).verdict


def test_broken_parts_change_what_depth_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:  # residual connections that are none
        broken.setattr(Residual, "forward", lambda self, x, part: part(self.norm(x)))
        assert depth_verdict() == "fails"
    with monkeypatch.context() as broken:  # attention that looks nowhere else
        broken.setattr(SelfAttention, "forward", lambda self, x, sight, position, cache=None: x)
        assert depth_verdict() == "fails"


def test_the_labels_are_the_preceding_words() -> None:
    class Echo(nn.Module):
        """Logits of the word at each position itself, for every predicted offset."""

        def forward(self, words: Tensor) -> Tensor:
            hot = nn.functional.one_hot(words, several_heads.WORDS).float()
            return hot.repeat(1, 1, several_heads.PLACES)

    random = torch.Generator().manual_seed(1)
    scores, expected = several_heads.scores_and_labels(Echo(), 2, random, CPU)
    places = several_heads.LENGTH - several_heads.PLACES
    local = scores.argmax(-1).view(2, places, -1)
    before = expected.view(2, places, -1)
    for back in range(1, several_heads.PLACES + 1):
        assert torch.equal(before[:, back:, back - 1], local[:, :-back, 0])


def test_rates_are_tuned_on_the_first_seed_alone() -> None:
    tried: list[tuple[float, int]] = []

    def run(rate: float, seed: int) -> list[float]:
        tried.append((rate, seed))
        return [math.nan] if rate > 1 else [abs(rate - 0.1)]

    best, curves = text.tuned(run, (0.01, 0.1, 10.0), (5, 6))
    assert (best, curves) == (0.1, [[0.0], [0.0]])
    assert tried == [(0.01, 5), (0.1, 5), (10.0, 5), (0.1, 6)]
