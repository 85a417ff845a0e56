"""prediction.json: the predicted loss of a run, written before the run begins and never after.

It holds the time, the runs that the law was fitted to, the prediction, and a digest of these. Once
the run has begun, the file may not change; `measured` is added once, at the end.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from manyheads.errors import DataError, UserError
from manyheads.fileio import write_text
from manyheads.lab.scaling.law import LEVEL, Band
from manyheads.lab.scaling.plan import TARGET, Planned

FILE = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run, with the numbers that the laws are fitted to."""

    name: str
    parameters: int
    tokens: int
    flops: int
    loss: float

    @staticmethod
    def of(planned: Planned, loss: float) -> "Trained":
        return Trained(
            name=planned.name,
            parameters=planned.parameters,
            tokens=planned.tokens,
            flops=planned.flops,
            loss=loss,
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted loss with its band, for a run larger than all runs of the fit."""

    made: str
    level: float
    parameters: int
    tokens: int
    flops: int
    loss: float
    low: float
    high: float
    fitted: tuple[Trained, ...]
    measured: float | None = None

    @property
    def digest(self) -> str:
        """A hash of all fields except `measured`."""
        table = dataclasses.asdict(dataclasses.replace(self, measured=None))
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    @property
    def inside(self) -> bool | None:
        """True if the measured loss is in the band; None before it is measured."""
        return None if self.measured is None else self.low <= self.measured <= self.high


def begun(out: Path) -> bool:
    """True if the predicted run has written files."""
    folder = out / TARGET
    return folder.exists() and any(folder.iterdir())


def predict(out: Path, target: Planned, band: Band, fitted: Sequence[Trained]) -> Prediction:
    """Save the prediction, or return the saved one if it was made from the same runs."""
    earlier = read(out)
    if earlier is not None and earlier.fitted == tuple(fitted) and earlier.flops == target.flops:
        return earlier
    if begun(out):
        why = "of other results" if earlier else "of nothing"
        raise UserError(
            f"{out / TARGET} has begun, predicted {why}: a prediction cannot be made after the "
            "fact; choose another --out"
        )
    made = Prediction(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        level=LEVEL,
        parameters=target.parameters,
        tokens=target.tokens,
        flops=target.flops,
        loss=band.value,
        low=band.low,
        high=band.high,
        fitted=tuple(fitted),
    )
    _write(out, made)
    return made


def measure(out: Path, loss: float) -> Prediction:
    """Add the measured loss to the saved prediction."""
    prediction = read(out)
    if prediction is None:
        raise UserError(f"{out / FILE} is gone: what is measured was not predicted")
    if prediction.measured not in (None, loss):
        raise UserError(f"{out / FILE} has another measured loss already: choose another --out")
    completed = dataclasses.replace(prediction, measured=loss)
    _write(out, completed)
    return completed


def read(out: Path) -> Prediction | None:
    """The saved prediction of a sweep, or None; raises DataError if the file was changed."""
    path = out / FILE
    if not path.exists():
        return None
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest = table.pop("digest")
        table["fitted"] = tuple(Trained(**run) for run in table["fitted"])
        prediction = Prediction(**table)
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: choose another --out") from None
    if prediction.digest != digest:
        raise DataError(f"{path} was changed after it was made: choose another --out")
    return prediction


def _write(out: Path, prediction: Prediction) -> None:
    table = {**dataclasses.asdict(prediction), "digest": prediction.digest}
    write_text(out / FILE, json.dumps(table, indent=2) + "\n")
