"""Claims about cost: tiny runs give the judged numbers, and a broken part changes the verdict."""

from dataclasses import replace

import pytest
import torch

from manyheads.baselines.rnn import RnnLmConfig
from manyheads.lab.claims.claim import Measured, Setting, in_parts, listed
from manyheads.lab.claims.lectures import (
    approximations,
    flash_moves_less,
    parallel_over_places,
    path_length,
    squares_of_length,
    where_parameters_go,
)
from manyheads.nn.attention import Dense
from manyheads.nn.local import Longformer

ONCE, CPU = Setting(seeds=(1,)), torch.device("cpu")


# --- the tools ---


def test_an_lstm_of_the_claims_reads_only_the_past() -> None:
    torch.manual_seed(1)
    model = RnnLmConfig(dropout=0.0, vocab_size=9, dim=8, layers=2).build()
    tokens = torch.randint(9, (2, 6))
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 9
    assert torch.equal(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(tokens)[:, 4:], model(other)[:, 4:])
    gates = [bias.chunk(4) for name, bias in model.named_parameters() if "bias_ih" in name]
    assert all((forget == 1).all() and not write.any() for write, forget, *_ in gates)
    model.set_gates(3.0, -3.0)
    assert all((forget == 3).all() and (write == -3).all() for write, forget, *_ in gates)


def test_parts_that_hold_are_named() -> None:
    def judged(*actual: bool) -> tuple[str, str]:
        reported = in_parts(dict(zip(("a", "b", "c"), actual, strict=True)), "why", needed=["a"])
        return reported.verdict, reported.why

    assert judged(True, True, True) == ("holds", "why")
    assert judged(True, False, True) == ("depends", "only part of it holds: a and c; why")
    assert judged(False, True, True) == ("fails", "why")
    assert in_parts({"a": False, "b": False}, "why").verdict == "fails"
    assert listed(["a", "b", "c"]) == "a, b and c"


# --- where parameters go ---


def test_parameters_and_compute_are_told_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_parameters_go, "SIZES", ("gpt3-small", "gpt3-xl"))
    measured = where_parameters_go.measure(ONCE)
    assert where_parameters_go.judge(measured).verdict == "depends"
    # 16 d² FLOPs of the feed-forward against 4 n d of scores and mixing
    assert measured.numbers["overtaken at, smallest"] == [4 * 768]
    assert all(sum(shares) == pytest.approx(1.0) for shares in zip(*_ups(measured), strict=True))


def _ups(measured: Measured) -> list[list[float]]:
    return [[up for _, up in points] for points in measured.lines.values()]


# --- squares of length ---

TINY = replace(
    squares_of_length.SMALL, few=1, lengths=(8, 16, 512), rows=1, length=4, widths=(64, 128)
)


def test_times_of_attention_and_lstm_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares_of_length, "SMALL", replace(TINY, lengths=(8, 16), rounds=1))
    measured = squares_of_length.measure(ONCE)
    assert squares_of_length.judge(measured).why
    assert all(up > 0 for ups in _ups(measured) for up in ups)


# --- path length ---


def test_what_a_window_cannot_reach_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_length, "DISTANCES", (2, 8))
    monkeypatch.setattr(path_length, "LIMIT", 60)
    monkeypatch.setattr(path_length, "RATES", (1e-2,))
    measured = path_length.measure(ONCE)
    assert measured.most("transformer, far") < 60
    torch.manual_seed(1)
    near_sighted = replace(
        path_length.transformer(8).config, attention=Longformer(window=1)
    ).build()
    random = torch.Generator().manual_seed(1)
    steps = path_length.steps_needed(near_sighted, 8, 1e-2, 60, random)
    assert steps == 60
    broken = {**measured.numbers, "transformer, far": [float(steps)]}
    assert path_length.judge(replace(measured, numbers=broken)).verdict == "fails"


# --- masking trains all at once ---


# --- parallel over places ---


def test_a_model_that_goes_place_by_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = parallel_over_places.Sizes(dim=64, tokens=32, lengths=(4, 32), rounds=1)
    monkeypatch.setattr(parallel_over_places, "SMALL", tiny)
    before = torch.get_num_threads()
    measured = parallel_over_places.measure(replace(ONCE, threads=2))
    assert measured.numbers["transformer steps, n"] == [0]
    assert measured.numbers["lstm steps, n"][0] > 0.8
    assert measured.numbers["threads"] == [2]
    assert parallel_over_places.judge(measured).verdict in ("holds", "depends")
    assert torch.get_num_threads() == before

    def recurrent(dim: int, length: int, device: torch.device) -> dict[str, torch.nn.Module]:
        config = RnnLmConfig(
            dropout=0.0, vocab_size=parallel_over_places.VOCABULARY, dim=dim, layers=1
        )
        return {"transformer": config.build(), "lstm": config.build()}

    monkeypatch.setattr(parallel_over_places, "models", recurrent)
    single = parallel_over_places.measure(replace(ONCE, threads=1))
    assert single.numbers["threads"] == [1]
    assert "lstm speed-up" not in single.numbers
    assert parallel_over_places.judge(single).verdict == "fails"


def test_both_models_have_as_many_weights() -> None:
    sizes = [
        sum(weight.numel() for weight in model.parameters())
        for built in (
            parallel_over_places.models(128, 16, CPU),
            {name: path_length.MODELS[name](16) for name in ("transformer", "lstm")},
        )
        for model in built.values()
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    assert sizes[2] == pytest.approx(sizes[3], rel=0.05)


# --- approximations ---


def test_what_is_not_learned_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximations, "LENGTH", 16)
    monkeypatch.setattr(approximations, "STEPS", 2)
    measured = approximations.measure(ONCE)
    shares = [measured.mean(f"longformer, small {what}") for what in ("flops", "model flops")]
    assert shares[0] < shares[1] < 1
    assert measured.most("performer, small flops") < 1
    assert approximations.judge(measured).verdict == "fails"


# --- flash moves less ---


def test_the_matrix_is_found_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LENGTHS": (128, 512),
        "BLOCK": 64,
        "ROUNDS": 1,
        "COUNTED": 128,
        "FAST": 2**18,
        "SMALL_FAST": 2**16,
    }.items():
        monkeypatch.setattr(flash_moves_less, name, value)
    measured = flash_moves_less.measure(ONCE)
    assert flash_moves_less.judge(measured).verdict in ("holds", "depends")
    assert measured.least("dense memory, n") > 1.7
    assert flash_moves_less.block_for(2**18) == 2 * flash_moves_less.block_for(2**16) == 64
    monkeypatch.setattr(flash_moves_less, "Tiled", lambda block: Dense())
    assert flash_moves_less.judge(flash_moves_less.measure(ONCE)).verdict == "fails"
