"""What a sweep plans and finds, as tables, plain values, and a picture."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.table import Table

from manyheads.lab.scaling.law import LEVEL, Band, Fit, Frontier, Law
from manyheads.lab.scaling.plan import LARGER, Plan
from manyheads.lab.scaling.sweep import Findings
from manyheads.view.figures import curves

PLACES = 40  # of a line in the picture
HALF = 0.5  # of the way to the edge of a band: so far a prediction may move


def plan_table(plan: Plan, step_tokens: int) -> Table:
    """One line a run, and the whole."""
    table = Table(title="the plan")
    table.add_column("run", no_wrap=True)
    for name in ("width × depth", "N", "tokens", "steps", "rate", "FLOPs", "time"):
        table.add_column(name, justify="right")
    for one in plan.runs:
        model, rate = one.run.model, one.run.train.learning_rate
        table.add_row(
            one.name,
            f"{model.dim} × {model.layers}",
            f"{one.parameters:,}",
            f"{one.tokens:,}",
            f"{one.tokens // step_tokens:,}",
            "d^−½" if rate is None else f"{rate:.2g}",
            f"{one.flops:.2e}",
            time_of(one.seconds),
        )
    table.add_section()
    table.add_row("all", "", "", "", "", "", f"{plan.flops:.2e}", time_of(plan.seconds))
    return table


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Plain values, for JSON."""
    shown = ("name", "parameters", "tokens", "token_flops", "flops", "seconds")
    runs = [{name: getattr(one, name) for name in shown} for one in plan.runs]
    return {"runs": runs, "flops": plan.flops, "seconds": plan.seconds}


def time_of(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def runs_table(findings: Findings) -> Table:
    """Each run with its loss, and what the law says of it."""
    table = Table(title="the runs")
    for name in ("N", "tokens", "FLOPs", "loss", "the law", "off"):
        table.add_column(name, justify="right")
    for one in findings.trained:
        said = findings.joint.law.loss(one.parameters, one.tokens)
        table.add_row(
            f"{one.parameters:,}",
            f"{one.tokens:,}",
            f"{one.flops:.2e}",
            f"{one.loss:.4f}",
            f"{said:.4f}",
            f"{one.loss / said - 1:+.1%}",
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
    """Of each law its numbers with bands; of the frontier its exponents."""
    found = {"L(N, D)": _of_joint(findings.joint)}
    if findings.by_size is not None:
        found["L(N), most data"] = _of_one(findings.by_size, "A", "alpha")
    if findings.by_data is not None:
        found["L(D), largest model"] = _of_one(findings.by_data, "B", "beta")
    edges = [Frontier(law, findings.price) for law in findings.joint.draws]
    best = Frontier(findings.joint.law, findings.price)
    found["frontier"] = {
        "N* ~ C^": Band.of(best.exponents[0], [edge.exponents[0] for edge in edges]),
        "D* ~ C^": Band.of(best.exponents[1], [edge.exponents[1] for edge in edges]),
        "L* − E ~ C^−": Band.of(best.loss_exponent, [edge.loss_exponent for edge in edges]),
    }
    return found


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
    return {name: Band.of(value, [one[name] for one in drawn]) for name, value in best.items()}


def laws_table(findings: Findings) -> Table:
    table = Table(title=f"the laws, with bands of {LEVEL:.0%}")
    for column in ("law", "number", "value", "from", "to"):
        table.add_column(column, justify="left" if column in ("law", "number") else "right")
    for law, found in numbers(findings).items():
        for place, (name, band) in enumerate(found.items()):
            edges = [f"{value:.3g}" for value in (band.value, band.low, band.high)]
            table.add_row("" if place else law, name, *edges)
        table.add_section()
    return table


def said(findings: Findings) -> str:
    """The prediction beside what was measured, in a line; and how firm it was, in another."""
    made = findings.prediction
    assert made.measured is not None
    where = "inside" if made.inside else "outside"
    off = made.measured / made.loss - 1
    told = (
        f"predicted {made.loss:.4f} ({made.low:.4f} to {made.high:.4f}, {made.level:.0%}) for "
        f"{LARGER} times the compute; measured {made.measured:.4f}, {where} the band, "
        f"{abs(off):.2%} {'above' if off > 0 else 'below'} the prediction; the best run of the fit "
        f"had {min(one.loss for one in made.fitted):.4f}"
    )
    longer = findings.longer
    if longer is None:
        return told
    side = made.high - made.loss if longer.value > made.loss else made.loss - made.low
    far = abs(longer.value - made.loss) / side
    firm = (
        "far off: longer runs are needed" if far > HALF else "near: the prediction is firm in this"
    )
    return (
        f"{told}\nwithout the shortest runs the prediction would be {longer.value:.4f} "
        f"({longer.low:.4f} to {longer.high:.4f}), {far:.0%} of the way to the edge of the band, "
        f"{firm}"
    )


def as_dict(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Plain values, for JSON."""
    made = findings.prediction
    best = Frontier(findings.joint.law, findings.price)
    optimum = {f"{one.flops:.3e}": best.optimum(one.flops) for one in plan.runs[-1:]}
    return {
        "runs": [dataclasses.asdict(one) for one in findings.trained],
        "flops": plan.flops,
        "laws": {
            law: {name: dataclasses.asdict(band) for name, band in found.items()}
            for law, found in numbers(findings).items()
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
    """Loss against compute: a line a size, the frontier, the prediction, and what was measured."""
    made = findings.prediction
    lines: dict[str, list[tuple[float | int, float]]] = {}
    for one in findings.trained:
        lines.setdefault(f"N = {one.parameters:,}", []).append((one.flops, one.loss))
    best = Frontier(findings.joint.law, findings.price)
    first, last = min(one.flops for one in plan.runs), 2 * plan.target.flops
    places = [first * (last / first) ** (n / (PLACES - 1)) for n in range(PLACES)]
    lines["compute-optimal by the law"] = [(flops, best.loss(flops)) for flops in places]
    lines[f"predicted, N = {made.parameters:,}"] = [(made.flops, made.loss)]
    lines[f"its band of {made.level:.0%}"] = [(made.flops, made.low), (made.flops, made.high)]
    if made.measured is not None:
        lines["measured"] = [(made.flops, made.measured)]
    title = f"{len(findings.trained)} runs, and one of {LARGER} times the compute"
    curves(lines, title, "loss (nats a token)", path, "FLOPs", ("across",))
