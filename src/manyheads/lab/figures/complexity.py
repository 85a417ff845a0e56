"""The complexity table of layers, for given n and d, next to measured times."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import nn

from manyheads.config import Count
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.figures.drawing import COLOURS, Drawing, plain_ticks
from manyheads.nn.attend import attend
from manyheads.nn.local import Longformer
from manyheads.view.figures import canvas

Layer = Literal["attention", "lstm", "convolution", "restricted"]
NAMES: dict[Layer, str] = {
    "attention": "self-attention, softmax(QKᵀ)V",
    "lstm": "recurrent (LSTM)",
    "convolution": "convolutional",
    "restricted": "self-attention, restricted",
}


@dataclass(frozen=True, kw_only=True)
class Complexity:
    """Operations, sequential steps and path length (Vaswani et al. 2017, table 1), and times."""

    layers: Annotated[tuple[Layer, ...], "attention, lstm, convolution, restricted"] = (
        *("attention", "lstm", "convolution", "restricted"),
    )
    n: Annotated[Count, "Length n of the table"] = 1024
    dim: Annotated[Count, "Width d"] = 64
    kernel: Annotated[Count, "Kernel k of the convolution"] = 3
    window: Annotated[Count, "Neighbourhood r of restricted attention"] = 64
    lengths: Annotated[tuple[Count, ...], "Lengths that are timed"] = (128, 256, 512, 1024, 2048)
    rows: Annotated[Count, "Texts in a batch"] = 4
    rounds: Annotated[Count, "Rounds; times are medians"] = 3

    def make(self) -> Drawing:
        lengths = sorted({*self.lengths, self.n})
        times: dict[Layer, list[float]] = {layer: [] for layer in self.layers}
        for n in lengths:
            with torch.inference_mode():
                measured = side_by_side(self.acts(n), self.rounds, torch.device("cpu"))
            for layer in self.layers:
                times[layer].append(measured[layer])
        at = lengths.index(self.n)
        formulas = {layer: self.formulas(layer) for layer in self.layers}
        table = [
            (
                NAMES[layer],
                f"O({operations[0]})",
                operations[1],
                f"O({steps[0]})",
                steps[1],
                f"O({path[0]})",
                path[1],
                times[layer][at],
            )
            for layer, (operations, steps, path) in formulas.items()
        ]

        def draw(path: Path) -> None:
            with canvas((8.6, 6.4), path, rows=2, height_ratios=[0.5, 1]) as (_, [left, right]):
                left.axis("off")
                cells = [
                    [
                        row[0],
                        f"{row[1]} = {row[2]:.2e}",
                        f"{row[3]} = {row[4]:,}",
                        f"{row[5]} = {row[6]:,.4g}",
                        f"{1000 * row[7]:.3g} ms",
                    ]
                    for row in table
                ]
                heads = ["layer", "operations", "sequential steps", "longest path", "measured"]
                shown = left.table(
                    cellText=cells,
                    colLabels=heads,
                    cellLoc="left",
                    colWidths=[0.29, 0.22, 0.17, 0.19, 0.13],
                    bbox=[0, 0, 1, 1],
                )
                shown.auto_set_font_size(False)
                shown.set_fontsize(9)
                left.set_title(
                    f"n = {self.n}, d = {self.dim}, k = {self.kernel}, r = {self.window}"
                )
                for colour, layer in zip(COLOURS, self.layers, strict=False):
                    milliseconds = [1000 * seconds for seconds in times[layer]]
                    right.plot(lengths, milliseconds, marker="o", color=colour, label=NAMES[layer])
                right.set(xscale="log", yscale="log", xlabel="length n", ylabel="milliseconds")
                threads = torch.get_num_threads()
                right.set(title=f"measured, forward, {self.rows} texts, CPU threads: {threads}")
                right.set_xticks(lengths, list(map(str, lengths)))
                right.minorticks_off()
                plain_ticks(right.yaxis)
                right.grid(alpha=0.3)
                right.legend(fontsize=8)

        rows = [
            (layer, n, self.dim, *(part[1] for part in self.formulas(layer, n)), seconds)
            for layer in self.layers
            for n, seconds in zip(lengths, times[layer], strict=True)
        ]
        columns = ("layer", "n", "d", "operations", "sequential_steps", "path_length", "seconds")
        lines = tuple(
            f"{row[0]:29} {row[1]:>12} = {row[2]:.2e} operations, {row[4]:,} steps in sequence, "
            f"path {row[6]:,.4g}, {1000 * row[7]:.3g} ms"
            for row in table
        )
        return Drawing(columns=columns, rows=rows, draw=draw, lines=lines)

    def formulas(
        self, layer: Layer, length: int | None = None
    ) -> tuple[tuple[str, int], tuple[str, int], tuple[str, float]]:
        """Operations, sequential steps, path length: each as the paper writes it, and its value."""
        n, d, k, r = length or self.n, self.dim, self.kernel, self.window
        if layer == "attention":
            return ("n²·d", n * n * d), ("1", 1), ("1", 1.0)
        if layer == "lstm":
            return ("n·d²", n * d * d), ("n", n), ("n", float(n))
        if layer == "convolution":
            return ("k·n·d²", k * n * d * d), ("1", 1), ("log_k n", math.log(n, max(2, k)))
        return ("r·n·d", min(r, n) * n * d), ("1", 1), ("n/r", max(1.0, n / r))

    def acts(self, n: int) -> dict[str, Callable[[], object]]:
        """Forward passes; attention is without its projections, as the table counts."""
        d = self.dim
        x = torch.randn(self.rows, n, d)
        heads = torch.randn(self.rows, 1, n, d)
        lstm = nn.LSTM(d, d, batch_first=True)
        convolution = nn.Conv1d(d, d, self.kernel, padding=self.kernel // 2)
        near = Longformer(window=max(1, self.window // 2), globals=0)
        acts: dict[str, Callable[[], object]] = {
            "attention": lambda: attend(heads, heads, heads, implementation="fused"),
            "lstm": lambda: lstm(x),
            "convolution": lambda: convolution(x.mT),
            "restricted": lambda: attend(heads, heads, heads, implementation=near),
        }
        return {layer: acts[layer] for layer in self.layers}
