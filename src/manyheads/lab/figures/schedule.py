"""The learning rate of the Transformer for several widths and warm-ups, without a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from manyheads.config import Count
from manyheads.lab.figures.drawing import COLOURS, Drawing
from manyheads.train.optimizer import Train, learning_rate
from manyheads.view.figures import canvas


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """d^−½ · min(step^−½, step · warmup^−3/2)."""

    dims: Annotated[tuple[Count, ...], "Widths d"] = (256, 512, 1024)
    warmups: Annotated[tuple[Count, ...], "Steps of warm-up"] = (4000, 8000)
    steps: Annotated[Count, "Steps shown"] = 20_000
    points: Annotated[Count, "Points of a curve"] = 200

    def make(self) -> Drawing:
        shown = sorted({1, *range(self.steps // self.points or 1, self.steps + 1)[:: self._every]})
        curves = {
            (dim, warmup): [(step, self.rate(dim, warmup, step)) for step in shown]
            for warmup in self.warmups
            for dim in self.dims
        }

        def draw(path: Path) -> None:
            with canvas((7.4, 4.4), path) as (_, [axes]):
                for (dim, warmup), points in curves.items():
                    axes.plot(
                        *zip(*points, strict=True),
                        color=COLOURS[self.dims.index(dim) % len(COLOURS)],
                        linestyle=("-", "--", ":", "-.")[self.warmups.index(warmup) % 4],
                        label=f"d = {dim}, warm-up {warmup:,}",
                    )
                title = "learning rate = d^−½ · min(step^−½, step · warmup^−3/2)"
                axes.set(xlabel="step", ylabel="learning rate", title=title, ylim=(0, None))
                axes.grid(alpha=0.3)
                axes.legend()

        peaks = tuple(
            f"d = {dim}, warm-up {warmup:,}: peak {self.rate(dim, warmup, warmup):.3e} at its end"
            for dim, warmup in curves
        )
        rows = [
            (dim, warmup, *point) for (dim, warmup), points in curves.items() for point in points
        ]
        return Drawing(columns=("dim", "warmup", "step", "rate"), rows=rows, draw=draw, lines=peaks)

    @property
    def _every(self) -> int:
        return max(1, self.steps // self.points)

    def rate(self, dim: int, warmup: int, step: int) -> float:
        train = Train(schedule="transformer", warmup_steps=warmup, learning_rate=None)
        return learning_rate(train, dim, step)
