"""Kaplan's three panels of a sweep (`manyheads scaling-laws`), and the best N and D of a budget."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from manyheads.config import Positive
from manyheads.errors import UserError
from manyheads.lab.figures.drawing import COLOURS, Cell, Drawing, plain_ticks
from manyheads.lab.scaling.law import Band, Frontier, Price
from manyheads.lab.scaling.prediction import FILE, Prediction, Trained, read
from manyheads.lab.scaling.sweep import joint_fit
from manyheads.view.figures import HIGHLIGHT, canvas

PLACES = 40


@dataclass(frozen=True, kw_only=True)
class Kaplan:
    """Loss against compute, data and parameters; N* and D* of a budget by L(N, D)."""

    run: Annotated[str, "Folder of a sweep (manyheads scaling-laws --out)"] = ""
    budget_flops: Annotated[Positive | None, "Training FLOPs to spend"] = None

    def make(self) -> Drawing:
        if not self.run:
            raise UserError("kaplan needs a sweep: manyheads figure FOLDER kaplan")
        made = read(Path(self.run))
        if made is None:
            raise UserError(
                f"{self.run} has no {FILE}: run manyheads scaling-laws --out {self.run}"
            )
        runs = list(made.fitted)
        if made.measured is not None:
            runs.append(_target(made))
        fitted = joint_fit(made.fitted)
        price = Price.of(
            [run.parameters for run in made.fitted],
            [run.flops // run.tokens for run in made.fitted],
        )
        best = Frontier(fitted.law, price)
        budget = self.budget_flops or float(made.flops)
        size, tokens = best.optimum(budget)
        draws = [Frontier(law, price).optimum(budget) for law in fitted.draws]
        bands = [Band.of(v, [d[i] for d in draws]) for i, v in enumerate((size, tokens))]
        largest = max(run.flops for run in runs)
        lines = (
            f"L(N, D) = {fitted.law.floor:.3f} + {fitted.law.scales[0]:.3g} / "
            f"N^{fitted.law.exponents[0]:.3f} + {fitted.law.scales[1]:.3g} / "
            f"D^{fitted.law.exponents[1]:.3f}, of {len(made.fitted)} runs",
            f"budget {budget:.3g} FLOPs: N* = {size:.3g} ({bands[0].low:.3g} to "
            f"{bands[0].high:.3g}), D* = {tokens:.3g} tokens ({bands[1].low:.3g} to "
            f"{bands[1].high:.3g}), loss {best.loss(budget):.4f}",
            f"the budget is {budget / largest:.3g} times the largest run of the sweep"
            + (": far outside it, so do not rely on it" if budget > 10 * largest else ""),
        )

        def draw(path: Path) -> None:
            self._draw(path, runs, best, (budget, size, tokens))

        rows: list[tuple[Cell, ...]] = [
            (run.name, run.parameters, run.tokens, run.flops, run.loss) for run in runs
        ]
        rows.append(("best for the budget", round(size), round(tokens), budget, best.loss(budget)))
        columns = ("run", "parameters", "tokens", "flops", "loss")
        return Drawing(columns=columns, rows=rows, draw=draw, lines=lines)

    def _draw(
        self, path: Path, runs: list[Trained], best: Frontier, star: tuple[float, float, float]
    ) -> None:
        law, (budget, size, tokens) = best.law, star
        most, widest = max(run.tokens for run in runs), max(run.parameters for run in runs)
        panels: list[tuple[str, Callable[[Trained], float], Callable[[float], float], float]] = [
            ("compute (FLOPs)", lambda run: float(run.flops), best.loss, budget),
            (
                "data D (tokens)",
                lambda run: float(run.tokens),
                lambda d: law.loss(widest, d),
                tokens,
            ),
            ("parameters N", lambda run: float(run.parameters), lambda n: law.loss(n, most), size),
        ]
        names = ("best of the law", f"law at N = {widest:,}", f"law at D = {most:,}")
        sizes = sorted({run.parameters for run in runs})
        amounts = sorted({run.tokens for run in runs})
        with canvas((13.5, 4.8), path, columns=3, sharey=True) as (figure, row):
            for index, (axes, panel, name) in enumerate(zip(row, panels, names, strict=True)):
                across, cause, curve, at = panel
                groups = amounts if index == 2 else sizes
                for number, group in enumerate(groups):
                    of_group = sorted(
                        (cause(run), run.loss)
                        for run in runs
                        if (run.tokens if index == 2 else run.parameters) == group
                    )
                    label = f"{'D' if index == 2 else 'N'} = {group:,}"
                    colour = COLOURS[number % len(COLOURS)]
                    axes.plot(*zip(*of_group, strict=True), "o-", color=colour, label=label)
                low, high = min(map(cause, runs)), max([*map(cause, runs), at])
                points = [low * (high / low) ** (i / (PLACES - 1)) for i in range(PLACES)]
                axes.plot(points, list(map(curve, points)), "k--", linewidth=1.2, label=name)
                axes.plot(at, best.loss(budget), marker="*", markersize=15, color=HIGHLIGHT)
                _style(axes, across)
            row[0].set_ylabel("loss (nats a token)")
            figure.suptitle(
                f"loss against compute, data and parameters; ★ best for {budget:.2g} FLOPs: "
                f"N* = {size:.2g}, D* = {tokens:.2g}"
            )


def _style(axes: Any, across: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=across)
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _target(made: Prediction) -> Trained:
    assert made.measured is not None
    return Trained(
        name="predicted run",
        parameters=made.parameters,
        tokens=made.tokens,
        flops=made.flops,
        loss=made.measured,
    )


def best_for_budget(sweep: Path, flops: float) -> dict[str, Any]:
    """N*, D* and the loss of a budget by a finished sweep, with the lines that report them."""
    drawing = Kaplan(run=str(sweep), budget_flops=flops).make()
    _, size, tokens, _, loss = drawing.rows[-1]
    values = {"flops": flops, "parameters": size, "tokens": tokens, "loss": loss}
    return {**values, "lines": list(drawing.lines)}
