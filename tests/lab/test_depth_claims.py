"""Claims about heads, depth, norms and warm-up: broken models change the verdict."""

import math
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from manyheads.lab.claims import phrases as text
from manyheads.lab.claims.claim import Measured, Setting
from manyheads.lab.claims.lectures import (
    feed_forward_needed,
    layer_norm_speed,
    norm_and_warmup,
    residuals,
    several_heads,
)
from manyheads.nn.attention import Fused, SelfAttention
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


def test_words_grow_alike_until_residuals_stop_it() -> None:
    measured = feed_forward_needed.measure(ONCE)
    judged = feed_forward_needed.judge(measured)
    assert judged.verdict == "depends"
    assert "residual connections end that" in judged.why
    assert measured.most("attention") < 1e-10
    assert measured.most("sharp attention") < 1e-10
    assert measured.most("with feed-forward") < 1e-10
    assert measured.least("with residuals") > 0.1


def depth_verdict() -> str:
    return feed_forward_needed.judge(feed_forward_needed.measure(ONCE)).verdict


def test_broken_parts_change_what_depth_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:  # residual connections that are none
        broken.setattr(Residual, "forward", lambda self, x, part: part(self.norm(x)))
        assert depth_verdict() == "fails"
    with monkeypatch.context() as broken:  # attention that looks nowhere else
        broken.setattr(SelfAttention, "forward", lambda self, x, sight, position, cache=None: x)
        assert depth_verdict() == "fails"


def test_gradients_pass_residual_connections() -> None:
    book = text.phrases(40, CPU)
    slopes = {kind: residuals.slopes(book, kind, 8, seed=1) for kind in residuals.KINDS}
    assert all(len(each) == 9 and each[-1] == 1 for each in slopes.values())
    assert slopes["with"][0] > slopes["without"][0]


@pytest.mark.usefixtures("tiny")
def test_residuals_that_are_never_cut_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals, "without_residuals", nullcontext)
    monkeypatch.setattr(residuals, "LEARNED", -100.0)  # as if all of it were learned
    measured = residuals.measure(ONCE)
    assert measured.numbers["nats with"] == measured.numbers["nats without"]
    assert residuals.judge(measured).verdict == "fails"


def test_depth_is_counted_up_to_the_first_that_does_not_learn() -> None:
    nats = {1: [1.0, 0.0], 2: [0.1, 1.0], 4: [1.0, 1.0]}
    assert [residuals.deepest(nats, place) for place in (0, 1)] == [1.0, 0.0]


@pytest.mark.usefixtures("tiny")
def test_norms_that_are_never_taken_out_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm_speed, "unnormed", lambda model: model)
    monkeypatch.setattr(layer_norm_speed, "LEARNED", -100.0)  # as if both had learned
    measured = layer_norm_speed.measure(ONCE)
    assert measured.numbers["2 layers, steps"] == [1.0]
    assert layer_norm_speed.judge(measured).verdict == "fails"


def test_a_model_without_norms_has_none() -> None:
    model = text.writer(text.phrases(10, CPU), layers=2, dim=8, length=4, seed=1)
    assert any(isinstance(part, nn.LayerNorm) for part in model.modules())
    bare = layer_norm_speed.unnormed(model)
    assert not any(isinstance(part, nn.LayerNorm) for part in bare.modules())


def test_steps_are_compared_at_the_loss_that_both_reach() -> None:
    slow = [4.0 - 0.02 * step for step in range(100)]
    fast = [4.0 - 0.04 * step for step in range(100)]
    assert layer_norm_speed.share(slow, slow) == 1
    assert 0.45 < layer_norm_speed.share(fast, slow) < 0.6
    assert 1.6 < layer_norm_speed.share(slow, fast) < 2.2
    assert layer_norm_speed.share(fast, [math.nan] * 100) <= 1


def test_steps_do_not_count_where_nothing_was_learned() -> None:
    numbers = {"entropy": [5.5]}
    for case in layer_norm_speed.CASES:
        numbers |= {f"{case}, loss with": [3.0], f"{case}, loss without": [15.0]}
    judged = layer_norm_speed.judge(Measured(numbers=numbers))
    assert judged.verdict == "depends"
    assert "faster" not in judged.why
    assert "models without norms do not train with 2 layers, 8 layers and 8" in judged.why
    numbers |= {f"{case}, loss with": [15.0] for case in layer_norm_speed.CASES}
    assert layer_norm_speed.judge(Measured(numbers=numbers)).verdict == "fails"


@pytest.mark.usefixtures("tiny")
def test_a_warm_up_that_is_none_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_and_warmup, "WARMUP", 0)
    measured = norm_and_warmup.measure(ONCE)
    assert measured.numbers["post, own rate"] == [1.0]
    assert norm_and_warmup.judge(measured).verdict == "fails"


def test_warm_up_depends_where_another_rate_does_as_well() -> None:
    numbers = {"post, same rate": [0.3], "post, own rate": [0.9]}
    numbers |= {"pre, same rate": [1.0], "pre, own rate": [1.0]}
    numbers |= {"post, nats learned": [1.0], "pre, nats learned": [2.0]}
    assert norm_and_warmup.judge(Measured(numbers=numbers)).verdict == "depends"


@pytest.mark.usefixtures("tiny")
def test_heads_that_look_nowhere_are_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_heads, "pass_of", lambda *_: lambda: None)
    monkeypatch.setattr(Fused, "__call__", lambda self, inputs: torch.zeros_like(inputs.q))
    measured = several_heads.measure(ONCE)
    assert measured.numbers["parameters"] == measured.numbers["FLOPs"] == [1.0]
    assert several_heads.judge(measured).verdict == "fails"


@pytest.mark.parametrize(("slow", "held"), [("short", "1,024"), ("long", "128")])
def test_the_lengths_are_named_at_which_heads_cost_no_more(slow: str, held: str) -> None:
    numbers = {"parameters": [1.0], "FLOPs": [1.0], "time, short": [1.0], "time, long": [1.0]}
    numbers |= {"errors, 1 head": [0.4], "errors, 4 heads": [0.1], f"time, {slow}": [3.0]}
    judged = several_heads.judge(Measured(numbers=numbers))
    assert judged.verdict == "depends"
    assert f"they take about its time over {held} words;" in judged.why
    assert judged.why.count("about its time") == 1


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


def test_the_label_is_the_next_word() -> None:
    class Counts(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return 50 * nn.functional.one_hot((words + 1) % 7, 7).float()

    book = text.Phrases(torch.arange(70) % 7, 7)
    assert book.entropy == pytest.approx(math.log(7))
    assert float(book.loss_of(Counts(), rows=3, length=5, seed=1)(0)) < 1e-6


def test_rates_are_tuned_on_the_first_seed_alone() -> None:
    tried: list[tuple[float, int]] = []

    def run(rate: float, seed: int) -> list[float]:
        tried.append((rate, seed))
        return [math.nan] if rate > 1 else [abs(rate - 0.1)]

    best, curves = text.tuned(run, (0.01, 0.1, 10.0), (5, 6))
    assert (best, curves) == (0.1, [[0.0], [0.0]])
    assert tried == [(0.01, 5), (0.1, 5), (10.0, 5), (0.1, 6)]
