"""O(n² d) against O(n d²): the time of self-attention and of an LSTM, as n and d grow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from manyheads.lab.claims.claim import Claim, Judged, Measured, Points, Setting, in_parts
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.cost import exponent
from manyheads.models.bert import BertConfig
from manyheads.nn.attend import attend
from manyheads.nn.attention import SelfAttention
from manyheads.nn.masks import full, make_mask
from manyheads.nn.positions import Position

WITHIN = 0.35
LONGEST = "time in that of the LSTM, at the longest"
CHANNELS = 64  # per head: a wider layer has more heads


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths at one width, around the crossover; and widths at one length.

    The widths use enough `rows` for the LSTM to be limited by arithmetic, not by memory bandwidth.
    """

    few: int
    width: int
    lengths: tuple[int, ...]
    rows: int
    length: int
    widths: tuple[int, ...]
    rounds: int


SMALL = Sizes(
    few=4,
    width=64,
    lengths=(128, 256, 512, 1024, 2048),
    rows=32,
    length=32,
    widths=(256, 512, 1024),
    rounds=3,
)
LARGE = Sizes(
    few=16,
    width=256,
    lengths=(1024, 2048, 4096, 8192),
    rows=64,
    length=256,
    widths=(1024, 2048, 4096),
    rounds=5,
)


def acts(
    rows: int, length: int, width: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Forward passes: only softmax(QKᵀ/√c)V, a self-attention layer, and an LSTM layer."""
    heads = width // CHANNELS
    config = BertConfig(vocab_size=1, dim=width, heads=heads, max_length=length)
    layer = SelfAttention(config.attention_config()).to(device)
    lstm = nn.LSTM(width, width, batch_first=True).to(device)
    x = torch.randn(rows, length, width, device=device)
    q, k, v = (torch.randn(rows, heads, length, CHANNELS, device=device) for _ in range(3))
    sight = make_mask(full, length, device=device)
    return {
        "attention": lambda: attend(q, k, v, implementation="fused"),
        "layer": lambda: layer(x, sight, Position()),
        "lstm": lambda: lstm(x),
    }


def crossing(
    first_times: Sequence[tuple[int, float]], second_times: Sequence[tuple[int, float]]
) -> float:
    """The first length from which on the first takes longer; ∞ if it does not at the longest."""
    first = float("inf")
    for (n, own_time), (_, other_time) in reversed(
        list(zip(first_times, second_times, strict=True))
    ):
        if own_time <= other_time:
            break
        first = float(n)
    return first


def measure(setting: Setting) -> Measured:
    sizes, names = LARGE if setting.large else SMALL, ("attention", "layer", "lstm")
    numbers: dict[str, list[float]] = {}
    lines: dict[str, Points] = {}
    for seed in setting.seeds:
        torch.manual_seed(seed)
        by_length: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        by_width: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        points = [(sizes.few, n, sizes.width, by_length, n) for n in sizes.lengths]
        points += [(sizes.rows, sizes.length, d, by_width, d) for d in sizes.widths]
        for rows, length, width, table, grown in points:
            with torch.inference_mode():
                timed = acts(rows, length, width, setting.device)
                times = side_by_side(timed, sizes.rounds, setting.device)
            for name in names:
                table[name].append((grown, times[name]))
        for name in ("attention", "lstm"):
            for axis, table in (("n", by_length), ("d", by_width)):
                power = exponent(table[name])
                assert power is not None  # there are several points
                numbers.setdefault(f"{name}, {axis}", []).append(power)
        crossed = crossing(by_length["layer"], by_length["lstm"])
        numbers.setdefault("crossing in widths", []).append(crossed / sizes.width)
        slower = by_length["layer"][-1][1] / by_length["lstm"][-1][1]
        numbers.setdefault(LONGEST, []).append(slower)
        numbers.setdefault("longest in widths", []).append(sizes.lengths[-1] / sizes.width)
        lines = {
            "self-attention": by_length["layer"],
            "softmax(QKᵀ)V only": by_length["attention"],
            "LSTM": by_length["lstm"],
        }
    return Measured(
        numbers=numbers,
        lines=lines,
        across=f"n, at d = {sizes.width}",
        up="seconds",
        logarithmic=("across", "up"),
    )


def judge(measured: Measured) -> Judged:
    expected = {
        "attention, n": (2, "attention takes time as n²"),
        "attention, d": (1, "attention takes time as d"),
        "lstm, n": (1, "an LSTM takes time as n"),
        "lstm, d": (2, "an LSTM takes time as d²"),
    }
    crossed = measured.most("crossing in widths") < float("inf")
    parts = {
        part: abs(measured.mean(name) - power) <= WITHIN for name, (power, part) in expected.items()
    }
    parts["there is such a length"] = crossed
    n, d, lstm_n, lstm_d = (measured.reported(name) for name in expected)
    longest = (
        f"at n = {measured.reported('longest in widths')} d, the longest, self-attention takes "
        f"{measured.reported(LONGEST)} times the time of the LSTM"
    )
    why = f"attention takes time as n^{n} and d^{d}, an LSTM as n^{lstm_n} and d^{lstm_d}; " + (
        f"self-attention is slower from n = {measured.reported('crossing in widths')} d on; "
        f"{longest}"
        if crossed
        else f"up to the longest self-attention does not stay slower; {longest}"
    )
    return in_parts(
        parts, why, needed=[expected[f"{name}, n"][1] for name in ("attention", "lstm")]
    )


CLAIM = Claim(
    sentence="Self-attention takes O(n² d) time, a recurrent layer O(n d²): from some length on "
    "attention is slower.",
    lectures="000, 002, 003, 004",
    criterion="the exponents of measured times are within 0.35 of 2 and 1 (attention, in n and d) "
    "and of 1 and 2 (LSTM), and self-attention becomes slower at a length that was measured",
    measure=measure,
    judge=judge,
)
