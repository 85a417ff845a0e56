"""Claims: verdicts are computed, and every criterion can fail."""

import pytest
import torch

from manyheads.lab.claims import runner
from manyheads.lab.claims.claim import Judged, Measured, Setting
from manyheads.nn import masks
from manyheads.nn.positions import RotaryPosition, SinusoidalPosition

ONCE = Setting(seeds=(1,))
# Numbers that a broken model would give, of each claim, and which of them breaks it.
BROKEN = {
    "approximations": (
        {
            f"{kind}, {size}{what}": share
            for kind in ("longformer", "linformer", "performer")
            for size in ("small", "large")
            for what, share in ((", far", 0.5), (", near", 0.9), (" flops", 0.2))
        }
        | {
            f"{kind}, {size} model flops": 0.9
            for kind in ("longformer", "linformer", "performer")
            for size in ("small", "large")
        }
        | {"exact, far": 1.0, "exact, near": 1.0},
        {"linformer, small, near": 0.99},
    ),
    "attention-aligns": (
        {"places": 0.8, "LSTM": 0.1, "Transformer": 0.2}
        | {"LSTM, untrained": 0.8, "Transformer, untrained": 0.8},
        {"Transformer": 0.7},
    ),
    "beam-size": (
        {"greedy": 50.0, "beam 4": 52.0, "beam 16": 51.0}
        | {"likelier": 0.5, "length": 0.9, "penalised length": 0.95},
        {"beam 4": 49.0},
    ),
    "both-directions": (
        {"words both": 0.9, "words causal": 0.8, "texts both": 0.7, "texts causal": 0.6},
        {"texts both": 0.6},
    ),
    "bottleneck": (
        {"attention, short": 1.0, "attention, long": 0.95}
        | {"one vector, short": 1.0, "one vector, long": 0.3},
        {"one vector, long": 0.9},
    ),
    "feed-forward-needed": (
        {"attention": 1e-9, "sharp attention": 1e-9}
        | {"with feed-forward": 0.5, "with residuals": 0.4, "with both": 0.5},
        {"attention": 0.5},
    ),
    "five-scores": (
        {
            f"{where}, {kind}": 1.0
            for where in ("Transformer", "LSTM", "time")
            for kind in ("dot", "scaled-dot", "bilinear", "reduced-rank", "additive")
        }
        | {"time, additive": 9.0, "time, bilinear": 3.0},
        {"LSTM, scaled-dot": 0.8},
    ),
    "flash-moves-less": (
        {
            "apart": 1e-6,
            "dense memory, n": 2.0,
            "tiled memory, n": 0.5,
            "fused memory, n": 1.0,
            "memory": 30.0,
            "moved": 3.0,
            "moved, small memory": 1.1,
            "tiled faster": 0.9,
            "fused faster": 2.0,
        },
        {"tiled memory, n": 1.9},
    ),
    "label-smoothing": (
        {"plain BLEU": 50.0, "smoothed BLEU": 52.0}
        | {"plain perplexity": 2.0, "smoothed perplexity": 2.3},
        {"smoothed BLEU": 49.0},
    ),
    "layer-norm-speed": (
        {
            f"{case}{what}": number
            for case in ("2 layers", "8 layers", "8 layers, small at first without norms")
            for what, number in ((", steps", 0.5), (", loss with", 3.0), (", loss without", 3.5))
        }
        | {"entropy": 5.5},
        {
            f"{case}, steps": 1.0
            for case in ("2 layers", "8 layers", "8 layers, small at first without norms")
        },
    ),
    "masking-recipe": (
        {
            **{f"{what}, 80/10/10": 0.9 for what in ("word", "sense", "tuned")},
            **{f"{what}, masks alone": 0.8 for what in ("word", "sense", "tuned")},
        },
        {"sense, 80/10/10": 0.8},
    ),
    "masking-trains-all-at-once": ({"apart": 1e-14, "leak": 0.0, "faster": 9.0}, {"leak": 1e-3}),
    "norm-and-warmup": (
        {
            "post, nats learned": 1.0,
            "post, same rate": 0.3,
            "post, own rate": 0.5,
            "pre, nats learned": 2.0,
            "pre, same rate": 1.0,
            "pre, own rate": 1.0,
        },
        {"pre, same rate": 0.5},
    ),
    "order-needs-positions": ({"none": 0.0, "rotary": 0.3}, {"rotary": 1e-15}),
    "parallel-over-places": (
        {
            "transformer steps, n": 0.0,
            "lstm steps, n": 1.0,
            "transformer keeps": 0.7,
            "lstm keeps": 0.1,
            "faster at the longest": 5.0,
            "threads": 4.0,
            "transformer speed-up": 3.0,
            "lstm speed-up": 1.1,
        },
        {"transformer steps, n": 1.0},
    ),
    "path-length": (
        {
            "transformer, near": 40.0,
            "transformer, far": 50.0,
            "lstm, near": 50.0,
            "lstm, far": 400.0,
            "keeping, near": 40.0,
            "keeping, far": 200.0,
            "limit": 400.0,
            "distance": 96.0,
            "shortest": 8.0,
        },
        {"transformer, far": 400.0},
    ),
    "positions-beyond-training": (
        {"learned": 1.0, "sinusoidal": 2.0, "rotary": 4.0, "alibi": 8.0},
        {"learned": 2.0},
    ),
    "pretraining-and-labels": (
        {
            "pretrained few": 0.9,
            "scratch few": 0.4,
            "pretrained many": 1.0,
            "scratch many": 1.0,
        },
        {"pretrained few": 0.4},
    ),
    "rare-words": (
        {
            "unknown, pieces": 0.0,
            "unknown, words": 1.0,
            "unknown, characters": 0.0,
            "rare, pieces": 0.8,
            "rare, words": 0.0,
            "rare, characters": 0.5,
            "common, pieces": 1.0,
            "common, words": 1.0,
            "common, characters": 0.9,
            "length, pieces": 5.0,
            "length, words": 1.0,
            "length, characters": 12.0,
        },
        {"unknown, pieces": 0.1},
    ),
    "residuals": (
        {
            "layers": 12.0,
            "deepest with": 12.0,
            "deepest without": 1.0,
            "slope with": 1.0,
            "slope without": 1e-3,
        },
        {"deepest with": 1.0},
    ),
    "rotary-distance": ({"rotary": 1e-15, "sinusoidal": 0.7}, {"rotary": 0.2}),
    "scaled-scores": ({"plain": 0.1, "scaled": 1.0}, {"scaled": 0.2}),
    "several-heads": (
        {
            "parameters": 1.0,
            "FLOPs": 1.0,
            "time, short": 1.0,
            "time, long": 1.1,
            "errors, 1 head": 0.4,
            "errors, 4 heads": 0.01,
        },
        {"errors, 4 heads": 0.4},
    ),
    "squares-of-length": (
        {
            "attention, n": 2.0,
            "attention, d": 1.0,
            "lstm, n": 1.0,
            "lstm, d": 2.0,
            "crossing in widths": 4.0,
            "longest in widths": 32.0,
            "time in that of the LSTM, at the longest": 3.0,
        },
        {"attention, n": 1.0},
    ),
    "tied-embeddings": ({"saved": 0.3, "tied": 3.6, "untied": 3.7}, {"tied": 3.9}),
    "where-parameters-go": (
        {
            "parameters, least": 0.666,
            "parameters, most": 0.667,
            "compute, smallest": 0.52,
            "compute, largest": 0.65,
            "growth": 0.01,
            "majority from": 0.1,
            "overtaken at, smallest": 3072.0,
            "overtaken at, largest": 49152.0,
        },
        {"parameters, least": 0.33},
    ),
}
# Those of which a part still holds with the number that breaks them.
PARTLY = {
    *("approximations", "attention-aligns", "both-directions", "five-scores", "label-smoothing"),
    *("masking-recipe", "tied-embeddings"),
}
# Where nothing differs from anything, that is a part of what these say: what else is lost.
LOST = {
    "five-scores": {"Transformer, scaled-dot": 0.5, "LSTM, scaled-dot": 0.5},
    "several-heads": {"parameters": 2.0, "FLOPs": 2.0, "time, short": 2.0, "time, long": 2.0},
    "tied-embeddings": {"saved": 0.0},
}
# Those that take a moment, and can be run here.
QUICK = (
    "masking-trains-all-at-once",
    "order-needs-positions",
    "rotary-distance",
    "scaled-scores",
)


def judged(name: str, numbers: dict[str, float]) -> Judged:
    return runner.find(name).judge(Measured(numbers={key: [x] for key, x in numbers.items()}))


@pytest.mark.parametrize("name", list(runner.claims()))
def test_a_criterion_can_be_met_and_can_fail(name: str) -> None:
    """It fails with the number that breaks it, and where nothing differs from anything."""
    good, bad = BROKEN[name]
    assert judged(name, good).verdict == "holds"
    assert judged(name, good | bad).verdict == ("depends" if name in PARTLY else "fails")
    alike = dict.fromkeys(good, 1.0)
    assert judged(name, alike | LOST.get(name, {})).verdict == "fails"


@pytest.mark.parametrize("name", QUICK)
def test_quick_claims_hold(name: str) -> None:
    result = runner.run(name, ONCE)
    assert result.verdict == "holds"
    assert result.numbers.keys() >= set(BROKEN[name][0]) - {"rotary", "sinusoidal"}


def test_a_broken_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.Causal, "__call__", lambda self, q, k: k <= q + 1)
    monkeypatch.setattr(masks.AttentionMask, "is_causal", lambda self: False)
    assert runner.run("masking-trains-all-at-once", ONCE).verdict == "fails"


def test_broken_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(self: object, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * (1 + positions[:, None, :, None])

    monkeypatch.setattr(RotaryPosition, "rotate", grown)
    monkeypatch.setattr(SinusoidalPosition, "embed", lambda self, x, positions: x)
    assert runner.run("rotary-distance", ONCE).verdict == "fails"
    assert runner.run("order-needs-positions", ONCE).verdict == "fails"
