"""The plan and the results of a sweep, as tables, plain values, and a plot."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table

from manyheads.lab.figures.plots import curves
from manyheads.lab.scaling.law import LEVEL, Band, Fit, Frontier, Law
from manyheads.lab.scaling.plan import LARGER, Plan
from manyheads.lab.scaling.sweep import Findings, Scaling

PLACES = 40  # points of the plotted frontier
FEW_STEPS = 300  # a sweep with runs of 265 steps mispredicted its largest run
HALF = 0.5  # largest shift of a firm prediction, as a share of the distance to the band's edge


def plan_table(plan: Plan, step_tokens: int) -> Table:
    """One row per run, and the total."""
    table = Table(title="the plan")
    table.add_column("run", no_wrap=True)
    for name in ("width × depth", "N", "tokens", "steps", "rate", "FLOPs", "time"):
        table.add_column(name, justify="right")
    for planned in plan.runs:
        model, rate = planned.run.model, planned.run.train.learning_rate
        table.add_row(
            planned.name,
            f"{model.dim} × {model.layers}",
            f"{planned.parameters:,}",
            f"{planned.tokens:,}",
            f"{planned.tokens // step_tokens:,}",
            "d^−½" if rate is None else f"{rate:.2g}",
            f"{planned.flops:.2e}",
            time_of(planned.seconds),
        )
    table.add_section()
    table.add_row("all", "", "", "", "", "", f"{plan.flops:.2e}", time_of(plan.seconds))
    return table


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Plain values, for JSON."""
    shown = ("name", "parameters", "tokens", "token_flops", "flops", "seconds")
    runs = [{name: getattr(planned, name) for name in shown} for planned in plan.runs]
    return {"runs": runs, "flops": plan.flops, "seconds": plan.seconds}


def warnings(scaling: Scaling) -> list[str]:
    """The laws hold for new data, and for runs that are past the beginning."""
    fewest, lines = min(run.run.train.steps for run in scaling.plan.fitted), []
    if fewest < FEW_STEPS:
        lines.append(
            f"the shortest runs have {fewest} steps: such short runs often follow another law and "
            "mislead the prediction; raise train.steps or --budget"
        )
    if scaling.epochs > 1:
        lines.append(
            f"the predicted run repeats the text {scaling.epochs:.1f} times: the law holds for new "
            "tokens (up to about 4 epochs are nearly as good); use more text"
        )
    return lines


def time_of(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def runs_table(findings: Findings) -> Table:
    """Each run with its loss, the loss by the law, and the difference."""
    table = Table(title="the runs")
    for name in ("N", "tokens", "FLOPs", "loss", "the law", "off"):
        table.add_column(name, justify="right")
    for run in findings.trained:
        predicted = findings.joint.law.loss(run.parameters, run.tokens)
        table.add_row(
            f"{run.parameters:,}",
            f"{run.tokens:,}",
            f"{run.flops:.2e}",
            f"{run.loss:.4f}",
            f"{predicted:.4f}",
            f"{run.loss / predicted - 1:+.1%}",
        )
    made = findings.prediction
    if made.measured is not None:
        table.add_section()
        table.add_row(
            f"{made.parameters:,}",
            f"{made.tokens:,}",
            f"{made.flops:.2e}",
            f"{made.measured:.4f}",
            f"{made.loss:.4f}",
            f"{made.measured / made.loss - 1:+.1%}",
        )
    return table


def numbers(findings: Findings) -> dict[str, dict[str, Band]]:
    """The parameters of each law and the exponents of the frontier, with bands."""
    laws = {"L(N, D)": _of_joint(findings.joint)}
    if findings.by_size is not None:
        laws["L(N), most data"] = _of_one(findings.by_size, "A", "alpha")
    if findings.by_data is not None:
        laws["L(D), largest model"] = _of_one(findings.by_data, "B", "beta")
    edges = [Frontier(law, findings.price) for law in findings.joint.draws]
    best = Frontier(findings.joint.law, findings.price)
    laws["frontier"] = {
        "N* ~ C^": Band.of(best.exponents[0], [edge.exponents[0] for edge in edges]),
        "D* ~ C^": Band.of(best.exponents[1], [edge.exponents[1] for edge in edges]),
        "L* − E ~ C^−": Band.of(best.loss_exponent, [edge.loss_exponent for edge in edges]),
    }
    return laws


def _of_joint(fitted: Fit) -> dict[str, Band]:
    def parts(law: Law) -> dict[str, float]:
        return {
            "E": law.floor,
            "A": law.scales[0],
            "alpha": law.exponents[0],
            "B": law.scales[1],
            "beta": law.exponents[1],
        }

    return _bands(parts(fitted.law), [parts(law) for law in fitted.draws])


def _of_one(fitted: Fit, scale: str, exponent: str) -> dict[str, Band]:
    def parts(law: Law) -> dict[str, float]:
        return {"E": law.floor, scale: law.scales[0], exponent: law.exponents[0]}

    return _bands(parts(fitted.law), [parts(law) for law in fitted.draws])


def _bands(best: dict[str, float], drawn: list[dict[str, float]]) -> dict[str, Band]:
    return {
        name: Band.of(value, [values[name] for values in drawn]) for name, value in best.items()
    }


def laws_table(findings: Findings) -> Table:
    table = Table(title=f"the laws, with bands of {LEVEL:.0%}")
    for column in ("law", "number", "value", "from", "to"):
        table.add_column(column, justify="left" if column in ("law", "number") else "right")
    for law, bands in numbers(findings).items():
        for place, (name, band) in enumerate(bands.items()):
            edges = [f"{value:.3g}" for value in (band.value, band.low, band.high)]
            table.add_row("" if place else law, name, *edges)
        table.add_section()
    return table


def said(findings: Findings) -> str:
    """One line with the prediction and the measured loss, and one on how firm it was."""
    made = findings.prediction
    assert made.measured is not None
    where = "inside" if made.inside else "outside"
    off = made.measured / made.loss - 1
    summary = (
        f"predicted {made.loss:.4f} ({made.low:.4f} to {made.high:.4f}, {made.level:.0%}) for "
        f"{LARGER} times the compute; measured {made.measured:.4f}, {where} the band, "
        f"{abs(off):.2%} {'above' if off > 0 else 'below'} the prediction; the best run of the fit "
        f"had {min(run.loss for run in made.fitted):.4f}"
    )
    longer = findings.longer
    if longer is None:
        return summary
    side = made.high - made.loss if longer.value > made.loss else made.loss - made.low
    far = abs(longer.value - made.loss) / side
    firm = (
        "far off: longer runs are needed" if far > HALF else "near: the prediction is firm in this"
    )
    return (
        f"{summary}\nwithout the shortest runs the prediction would be {longer.value:.4f} "
        f"({longer.low:.4f} to {longer.high:.4f}), {far:.0%} of the way to the edge of the band, "
        f"{firm}"
    )


def as_dict(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Plain values, for JSON."""
    made = findings.prediction
    best = Frontier(findings.joint.law, findings.price)
    optimum = {f"{run.flops:.3e}": best.optimum(run.flops) for run in plan.runs[-1:]}
    return {
        "runs": [dataclasses.asdict(run) for run in findings.trained],
        "flops": plan.flops,
        "laws": {
            law: {name: dataclasses.asdict(band) for name, band in bands.items()}
            for law, bands in numbers(findings).items()
        },
        "token_flops": dataclasses.asdict(findings.price),
        "optimum": {c: {"parameters": n, "tokens": d} for c, (n, d) in optimum.items()},
        "prediction": {
            **{name: getattr(made, name) for name in ("made", "loss", "low", "high", "level")},
            "parameters": made.parameters,
            "tokens": made.tokens,
            "flops": made.flops,
            "measured": made.measured,
            "inside": made.inside,
            "digest": made.digest,
        },
        "without_shortest": None
        if findings.longer is None
        else dataclasses.asdict(findings.longer),
    }


def draw(plan: Plan, findings: Findings, path: Path) -> None:
    """Plot loss against compute: a line per size, the frontier, the prediction."""
    made = findings.prediction
    lines: dict[str, list[tuple[float | int, float]]] = {}
    for run in findings.trained:
        lines.setdefault(f"N = {run.parameters:,}", []).append((run.flops, run.loss))
    best = Frontier(findings.joint.law, findings.price)
    first, last = min(run.flops for run in plan.runs), 2 * plan.target.flops
    places = [first * (last / first) ** (n / (PLACES - 1)) for n in range(PLACES)]
    lines["compute-optimal by the law"] = [(flops, best.loss(flops)) for flops in places]
    lines[f"predicted, N = {made.parameters:,}"] = [(made.flops, made.loss)]
    lines[f"its band of {made.level:.0%}"] = [(made.flops, made.low), (made.flops, made.high)]
    if made.measured is not None:
        lines["measured"] = [(made.flops, made.measured)]
    title = f"{len(findings.trained)} runs, and one of {LARGER} times the compute"
    curves(lines, title, "loss (nats a token)", path, "FLOPs", ("across",))
