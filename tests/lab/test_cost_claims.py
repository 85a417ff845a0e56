"""Claims about cost: tiny runs give the judged numbers, and a broken part changes the verdict."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.lab.claims.claim import Measured, Setting, in_parts, listed
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.claims.lectures import (
    approximations,
    flash_moves_less,
    masking_trains_all_at_once,
    parallel_over_places,
    path_length,
    squares_of_length,
    where_parameters_go,
)
from manyheads.lab.claims.recurrent import LstmConfig
from manyheads.models.gpt import GptConfig
from manyheads.nn import masks
from manyheads.nn.attention import Dense
from manyheads.nn.local import Longformer
from manyheads.presets import preset

ONCE, CPU = Setting(seeds=(1,)), torch.device("cpu")


# --- the tools ---


def test_the_clock_gives_medians_and_lets_all_have_their_turn() -> None:
    calls: list[str] = []

    def act(name: str, size: int) -> Callable[[], object]:
        def work() -> torch.Tensor:
            calls.append(name)
            return torch.ones(size, size) @ torch.ones(size, size)

        return work

    actual = side_by_side({"small": act("small", 16), "large": act("large", 512)}, 2, CPU)
    assert actual["large"] > actual["small"] > 0
    turns = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert turns == ["small", "large"] * 3  # to warm up, and two rounds


def test_an_lstm_of_the_claims_reads_only_the_past() -> None:
    torch.manual_seed(1)
    model = LstmConfig(vocab_size=9, dim=8, layers=2).build()
    tokens = torch.randint(9, (2, 6))
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 9
    assert torch.equal(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(tokens)[:, 4:], model(other)[:, 4:])
    gates = [bias.chunk(4) for name, bias in model.named_parameters() if "bias_ih" in name]
    assert all((forget == 1).all() and not write.any() for write, forget, *_ in gates)
    model.remember(3.0, -3.0)
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


def test_a_narrow_feed_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(name: str) -> Any:
        config = preset(name)
        assert isinstance(config, GptConfig)
        return replace(config, ffn_dim=config.dim, layers=2)

    monkeypatch.setattr(where_parameters_go, "SIZES", ("gpt3-small", "gpt3-xl"))
    monkeypatch.setattr(where_parameters_go, "preset", narrow)
    assert where_parameters_go.CLAIM.judge(where_parameters_go.measure(ONCE)).verdict == "fails"


def _ups(measured: Measured) -> list[list[float]]:
    return [[up for _, up in points] for points in measured.lines.values()]


# --- squares of length ---

TINY = replace(
    squares_of_length.SMALL, few=1, lengths=(8, 16, 512), rows=1, length=4, widths=(64, 128)
)
Timed = Mapping[str, Callable[[], object]]


@pytest.mark.parametrize(
    ("power", "lengths", "verdict"),
    [(2, TINY.lengths, "holds"), (1, TINY.lengths, "fails"), (2, (8, 16, 32), "depends")],
)
def test_exponents_are_those_of_the_times(
    monkeypatch: pytest.MonkeyPatch, power: int, lengths: tuple[int, ...], verdict: str
) -> None:
    """It holds with the times of the formulas and fails with linear attention; with texts too
    short for a crossover only the exponents hold."""

    def acts(rows: int, length: int, width: int, device: torch.device) -> Timed:
        attention = float(length**power * width)
        lstm = float(2 * length * width**2)
        times = {"attention": attention, "layer": attention + lstm / 2, "lstm": lstm}
        return {name: lambda seconds=seconds: seconds for name, seconds in times.items()}  # type: ignore[misc]

    def read(acts: Mapping[str, Callable[[], float]], rounds: int, device: torch.device) -> Any:
        return {name: act() for name, act in acts.items()}

    monkeypatch.setattr(squares_of_length, "SMALL", replace(TINY, lengths=lengths))
    monkeypatch.setattr(squares_of_length, "acts", acts)
    monkeypatch.setattr(squares_of_length, "side_by_side", read)
    measured = squares_of_length.measure(ONCE)
    assert measured.numbers["attention, n"] == [pytest.approx(power)]
    judged = squares_of_length.judge(measured)
    assert judged.verdict == verdict
    assert "there is such a length" not in judged.why


def test_a_crossing_is_where_it_stays_slower() -> None:
    slow = [(1, 2.0), (2, 2.0), (4, 9.0), (8, 9.0)]
    assert squares_of_length.crossing(slow, [(1, 1.0), (2, 3.0), (4, 3.0), (8, 3.0)]) == 4
    assert squares_of_length.crossing(slow, [(n, 9.0) for n, _ in slow]) == float("inf")


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


def test_gates_of_an_lstm_that_is_told_keep_for_that_long() -> None:
    for build, bias in ((path_length.lstm, 1.0), (path_length.keeping, math.log(96))):
        write, forget, *_ = build(96).lstm.bias_ih_l0.chunk(4)
        assert forget.tolist() == pytest.approx([bias] * len(forget))
        assert write.tolist() == pytest.approx([0.0 if bias == 1 else -bias] * len(write))


# --- masking trains all at once ---


def test_a_leak_is_seen_at_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak() -> float:
        model = masking_trains_all_at_once.model_of(12, seed=1)
        vectors = torch.randn(2, 12, 64, dtype=torch.float64, requires_grad=True)
        return masking_trains_all_at_once.leak(model, vectors)

    assert leak() == 0
    monkeypatch.setattr(masks.AttentionMask, "is_causal", lambda self: False)
    for place in (0, 7, 10):  # the only query that sees what comes next
        with monkeypatch.context() as broken:
            broken.setattr(
                masks.Causal,
                "__call__",
                lambda self, q, k, place=place: (k <= q) | ((q == place) & (k == q + 1)),
            )
            assert leak() > 1e-3


# --- parallel over places ---


def test_steps_in_a_row_are_the_longest_chain() -> None:
    x = torch.ones((), requires_grad=True)
    short, long = x * 2, x
    for _ in range(5):
        long = long * 2
    steps = parallel_over_places.steps_in_a_row
    assert steps(short + long) - steps(short + x * 3) == 4


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
        config = LstmConfig(vocab_size=parallel_over_places.VOCABULARY, dim=dim, layers=1)
        return {"transformer": config.build(), "lstm": config.build()}

    monkeypatch.setattr(parallel_over_places, "models", recurrent)
    single = parallel_over_places.measure(replace(ONCE, threads=1))
    assert single.numbers["threads"] == [1]
    assert "lstm speed-up" not in single.numbers
    assert parallel_over_places.judge(single).verdict == "fails"


def test_threads_that_help_both_alike_are_named_in_no_part() -> None:
    numbers = {"transformer steps, n": [0.0], "lstm steps, n": [1.0], "threads": [4.0]}
    numbers |= {"transformer keeps": [0.7], "lstm keeps": [0.1], "faster at the longest": [5.0]}
    numbers |= {"transformer speed-up": [3.0], "lstm speed-up": [2.9]}
    judged = parallel_over_places.judge(Measured(numbers=numbers))
    assert judged.verdict == "depends"
    assert "gains more" not in judged.why
    numbers |= {"transformer speed-up": [0.9], "lstm speed-up": [0.1]}
    assert "gains more" not in parallel_over_places.judge(Measured(numbers=numbers)).why
    numbers["threads"] = [1.0]  # of which none is ahead
    assert parallel_over_places.judge(Measured(numbers=numbers)).verdict == "depends"
    del numbers["threads"]  # as on a GPU
    assert parallel_over_places.judge(Measured(numbers=numbers)).verdict == "holds"


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


@pytest.mark.parametrize("near", [False, True])
def test_every_question_has_its_answer_in_the_text(near: bool) -> None:
    random = torch.Generator().manual_seed(1)
    tokens, segments, asks, expected = approximations.texts(16, near, random)
    assert asks.sum(1).tolist() == [8] * approximations.ROWS
    for row, answers in enumerate(expected.tolist()):
        pairs = zip(tokens[row].tolist(), segments[row].tolist(), strict=True)
        known = {key: value for key, value in pairs if value != approximations.VALUES}
        assert [known[key] for key in tokens[row][asks[row]].tolist()] == answers
        for place in asks[row].nonzero()[:, 0].tolist():
            home = tokens[row].tolist().index(int(tokens[row, place]))
            assert (0 < place - home <= 3) if near else home < 8 <= place


def test_what_is_not_learned_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximations, "LENGTH", 16)
    monkeypatch.setattr(approximations, "STEPS", 2)
    measured = approximations.measure(ONCE)
    shares = [measured.mean(f"longformer, small {what}") for what in ("flops", "model flops")]
    assert shares[0] < shares[1] < 1
    assert measured.most("performer, small flops") < 1
    assert approximations.judge(measured).verdict == "fails"


# --- flash moves less ---


def test_what_fits_is_moved_once() -> None:
    x = torch.ones(64, 1024)  # 256 KiB
    counted = {}
    for room in (2**20, 2**16):
        with flash_moves_less.Traffic(room) as traffic:
            for _ in range(4):
                x.sum()
                x.view(-1)  # touches nothing
        counted[room] = traffic.bytes / x.nbytes
    assert counted[2**20] == pytest.approx(1, abs=0.2)
    assert counted[2**16] == pytest.approx(4, abs=0.2)


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
