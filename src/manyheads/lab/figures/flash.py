"""FlashAttention: its tiles step by step, the memory it avoids, and where the time goes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.figures.drawing import COLOURS, Drawing, plain_ticks
from manyheads.nn.attend import attend
from manyheads.view.figures import HIGHLIGHT, canvas

# --- the tiles ---


@dataclass(frozen=True)
class TileStep:
    """The state of every query after a block of keys: maximum m, sum l, output o (not divided)."""

    columns: slice
    m: Tensor
    total: Tensor
    o: Tensor

    @property
    def output(self) -> Tensor:
        return self.o / self.total[:, None]


def tile_steps(scores: Tensor, v: Tensor, block: int) -> list[TileStep]:
    """m' = max(m, max s), l' = e^(m−m') l + Σ e^(s−m'), o' = e^(m−m') o + Σ e^(s−m') v."""
    queries, keys = scores.shape
    m = torch.full((queries,), -torch.inf, dtype=scores.dtype)
    total = torch.zeros_like(m)
    o = torch.zeros(queries, v.shape[1], dtype=v.dtype)
    steps = []
    for first in range(0, keys, block):
        columns = slice(first, min(first + block, keys))
        highest = torch.maximum(m, scores[:, columns].amax(1))
        p, shrink = (scores[:, columns] - highest[:, None]).exp(), (m - highest).exp()
        total = shrink * total + p.sum(1)
        o = shrink[:, None] * o + p @ v[columns]
        m = highest
        steps.append(TileStep(columns, m, total, o))
    return steps


@dataclass(frozen=True, kw_only=True)
class FlashTiles:
    """One block of queries against all blocks of keys."""

    queries: Annotated[Count, "Queries of the block"] = 4
    keys: Annotated[Count, "Keys"] = 8
    block: Annotated[Count, "Keys of a block"] = 2
    head_dim: Annotated[Count, "Channels"] = 4
    seed: Annotated[Count, "Random seed"] = 1

    def make(self) -> Drawing:
        torch.manual_seed(self.seed)
        q, k, v = (
            torch.randn(1, 1, n, self.head_dim, dtype=torch.float64)
            for n in (self.queries, self.keys, self.keys)
        )
        scores = 2 * (q @ k.mT)[0, 0] / self.head_dim**0.5
        steps = tile_steps(scores, v[0, 0], self.block)
        exact = attend(2 * q, k, v)[0, 0]
        error = float((steps[-1].output - exact).abs().max())

        def draw(path: Path) -> None:
            count = len(steps)
            size = (3.1 * count, 0.9 + 0.8 * self.queries)
            with canvas(size, path, rows=2, columns=count, height_ratios=[1.0, 1.0]) as (
                figure,
                axes,
            ):
                for index, step in enumerate(steps):
                    self._scores(axes[index], scores, step, index)
                    self._state(axes[count + index], step, steps[index - 1] if index else None)
                figure.suptitle(
                    "FlashAttention: one block of queries, a block of keys at a time. Where m "
                    f"rises (red), l and o shrink by e^(m − m′). The end is exact ({error:.0e} off)"
                )

        channels = tuple(f"output_{c + 1}" for c in range(self.head_dim))
        rows = [
            (
                *(index + 1, query + 1, float(step.m[query]), float(step.total[query])),
                *step.output[query].tolist(),
            )
            for index, step in enumerate(steps)
            for query in range(self.queries)
        ]
        text = f"after {len(steps)} blocks the output differs from softmax(QKᵀ/√c)V by {error:.1g}"
        columns = ("step", "query", "m", "l", *channels)
        return Drawing(columns=columns, rows=rows, draw=draw, lines=(text,))

    def _scores(self, panel: Any, scores: Tensor, step: TileStep, index: int) -> None:
        from matplotlib.patches import Rectangle

        shown = scores.clone()
        shown[:, step.columns.stop :] = torch.nan  # not loaded yet
        panel.set_facecolor("0.9")
        panel.imshow(shown.numpy(), cmap="viridis", vmin=scores.min(), vmax=scores.max())
        width = step.columns.stop - step.columns.start
        frame = Rectangle(
            (step.columns.start - 0.5, -0.5),
            width,
            self.queries,
            fill=False,
            edgecolor=HIGHLIGHT,
            linewidth=3,
        )
        panel.add_patch(frame)
        panel.set_title(f"step {index + 1}: keys {step.columns.start + 1}–{step.columns.stop}")
        panel.set_xticks(range(self.keys), [f"k{j + 1}" for j in range(self.keys)])
        panel.set_yticks(range(self.queries), [f"q{i + 1}" for i in range(self.queries)])

    def _state(self, panel: Any, step: TileStep, before: TileStep | None) -> None:
        """A table of m, l and the first channel; a maximum that rose in this step is marked."""
        panel.axis("off")
        cells = [
            [f"{step.m[i]:.2f}", f"{step.total[i]:.2f}", f"{step.output[i, 0]:.3f}"]
            for i in range(self.queries)
        ]
        table = panel.table(
            cellText=cells,
            rowLabels=[f"q{i + 1}" for i in range(self.queries)],
            colLabels=["m (max)", "l (sum)", "o₁ / l"],
            cellLoc="right",
            bbox=[0.1, 0, 0.9, 1],
        )
        for row in range(self.queries):
            if before is not None and step.m[row] > before.m[row]:
                table[row + 1, 0].set_facecolor("#ffd8cc")
        table.auto_set_font_size(False)
        table.set_fontsize(9)


# --- the memory hierarchy ---


@dataclass(frozen=True)
class Memory:
    """One level: bytes, and bytes a second."""

    name: str
    size: float
    speed: float


# A100: Dao et al. 2022, figure 1 (SRAM: 108 × 192 kB). H100, H200: vendor's data sheets; SRAM speed
# is 128 bytes a clock and multiprocessor.
HIERARCHIES = {
    "a100": (
        (Memory("SRAM", 20e6, 19e12), Memory("HBM", 40e9, 1.5e12), Memory("DRAM", 1e12, 12.8e9)),
        312e12,
        192 * 1024,
    ),
    "h100": (
        (Memory("SRAM", 30e6, 33e12), Memory("HBM", 80e9, 3.35e12), Memory("DRAM", 1e12, 64e9)),
        989e12,
        228 * 1024,
    ),
    "h200": (
        (Memory("SRAM", 30e6, 33e12), Memory("HBM", 141e9, 4.8e12), Memory("DRAM", 1e12, 64e9)),
        989e12,
        228 * 1024,
    ),
}
HALF = 2  # bytes of a number


def standard_bytes(n: int, d: int) -> int:
    """Q, K, V read, O written; S and P each written and read."""
    return HALF * (4 * n * d + 4 * n * n)


def flash_bytes(n: int, d: int, fast: int) -> int:
    """Algorithm 1 of Dao et al. 2022: K and V once; for each block of keys Q and O read, O written.

    A block of keys has M / 4d rows, M being the numbers that the fast memory holds.
    """
    rows = max(1, min(n, fast // HALF // (4 * d)))
    blocks = -(-n // rows)
    return HALF * (2 * n * d + 3 * n * d * blocks)


@dataclass(frozen=True, kw_only=True)
class MemoryHierarchy:
    """Bytes that one head moves through slow memory, and the times that follow."""

    device: Annotated[Literal["a100", "h100", "h200"], "Device"] = "a100"
    head_dim: Annotated[Count, "Channels of a head"] = 64
    lengths: Annotated[tuple[Count, ...], "Lengths n"] = (1024, 2048, 4096, 8192)

    def make(self) -> Drawing:
        levels, peak, fast = HIERARCHIES[self.device]
        slow = levels[1].speed
        d = self.head_dim
        rows: list[tuple[str | int | float, ...]] = []
        for n in self.lengths:
            flops = 4 * n * n * d
            moved = standard_bytes(n, d), flash_bytes(n, d, fast)
            rows.append((n, d, *moved, moved[0] / slow, moved[1] / slow, flops / peak))
        names = ("standard_bytes", "flash_bytes", "standard_seconds", "flash_seconds")
        columns = ("n", "head_dim", *names, "arithmetic_seconds")

        def draw(path: Path) -> None:
            with canvas((11.5, 4.6), path, columns=2) as (figure, [left, right]):
                for place, level in enumerate(levels):
                    left.barh(place, level.speed / 1e9, color=COLOURS[place], height=0.62)
                    text = f" {level.speed / 1e9:,.5g} GB/s, {_size(level.size)}"
                    left.text(level.speed / 1e9, place, text, va="center")
                left.set_yticks(range(len(levels)), [level.name for level in levels])
                left.set(xscale="log", xlabel="GB a second", title=f"{self.device}: memory")
                left.set_xlim(1, 5e6)
                left.invert_yaxis()
                plain_ticks(left.xaxis)
                styles = {4: "standard attention: HBM", 5: "FlashAttention: HBM", 6: "arithmetic"}
                for colour, (at, label) in zip(COLOURS[3:], styles.items(), strict=True):
                    values = [1e6 * float(row[at]) for row in rows]
                    right.plot(self.lengths, values, marker="o", color=colour, label=label)
                right.set(xscale="log", yscale="log", xlabel="length n")
                right.set(ylabel="microseconds", title=f"one head, d = {d}, forward")
                right.set_xticks(self.lengths, list(map(str, self.lengths)))
                right.minorticks_off()
                plain_ticks(right.yaxis)
                right.grid(alpha=0.3)
                right.legend()
                figure.suptitle(
                    "bytes / bandwidth and FLOPs / peak: standard attention waits for slow memory"
                )

        last = rows[-1]
        lines = (
            f"n = {last[0]}: standard {int(last[2]) / 1e6:.0f} MB, {1e6 * float(last[4]):.0f} µs; "
            f"FlashAttention {int(last[3]) / 1e6:.0f} MB, {1e6 * float(last[5]):.0f} µs; "
            f"arithmetic {1e6 * float(last[6]):.0f} µs ({self.device})",
        )
        return Drawing(columns=columns, rows=rows, draw=draw, lines=lines)


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


# --- the time of each part ---


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Measured: products, mask, softmax, dropout, each a pass over the n × n matrix; and fused."""

    length: Annotated[Count, "Length n"] = 1024
    heads: Annotated[Count, "Heads"] = 4
    head_dim: Annotated[Count, "Channels of a head"] = 64
    dropout: Annotated[Probability, "Dropout of the weights"] = 0.1
    rounds: Annotated[Count, "Rounds; times are medians"] = 3
    device: Annotated[str, "cpu, cuda or cuda:N"] = "cpu"

    def make(self) -> Drawing:
        try:
            device = torch.device(self.device)
            q, k, v = torch.randn(3, 1, self.heads, self.length, self.head_dim, device=device)
        except (RuntimeError, AssertionError):
            raise UserError(f"device={self.device} is not available: use device=cpu") from None
        n = self.length
        mask = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
        with torch.inference_mode():
            scores = q @ k.mT
            masked = scores.masked_fill(mask, -torch.inf)
            weights = masked.softmax(-1)
            acts: dict[str, Callable[[], object]] = {
                "matmul QKᵀ": lambda: q @ k.mT,
                "mask": lambda: scores.masked_fill(mask, -torch.inf),
                "softmax": lambda: masked.softmax(-1),
                "dropout": lambda: torch.nn.functional.dropout(weights, self.dropout),
                "matmul PV": lambda: weights @ v,
                "fused, all": lambda: attend(q, k, v, rule="causal", implementation="fused"),
            }
            times = side_by_side(acts, self.rounds, device)
        products = 2 * self.heads * n * n * self.head_dim
        flops = {"matmul QKᵀ": products, "matmul PV": products, "fused, all": 2 * products}
        total = sum(times.values()) - times["fused, all"]
        multiplied = times["matmul QKᵀ"] + times["matmul PV"]

        def draw(path: Path) -> None:
            with canvas((7.4, 3.6), path) as (_, [axes]):
                start = 0.0
                for colour, name in zip(COLOURS, list(times)[:-1], strict=False):
                    width = 1000 * times[name]
                    axes.barh(1, width, left=start, color=colour, label=name)
                    if width > 0.06 * 1000 * total:
                        centred = {"ha": "center", "va": "center", "color": "white"}
                        axes.text(start + width / 2, 1, f"{width:.2g}", **centred)
                    start += width
                fused = 1000 * times["fused, all"]
                axes.barh(0, fused, color=COLOURS[5], label="fused (no dropout)")
                axes.text(fused, 0, f" {fused:.2g}", va="center")
                axes.set_yticks([1, 0], ["standard", "fused"])
                axes.set(xlabel="milliseconds, forward", ylim=(-0.6, 1.6))
                axes.set_title(
                    f"where the time goes: n = {n}, {self.heads} heads of {self.head_dim} "
                    f"({device.type}, threads: {torch.get_num_threads()})"
                )
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=6, fontsize=8)

        rows = [(name, seconds, flops.get(name, 0)) for name, seconds in times.items()]
        line = (
            f"{device.type}: the products take {multiplied / total:.0%} of {1000 * total:.3g} ms; "
            f"mask, softmax and dropout the rest; fused: {1000 * times['fused, all']:.3g} ms"
        )
        return Drawing(columns=("part", "seconds", "flops"), rows=rows, draw=draw, lines=(line,))
