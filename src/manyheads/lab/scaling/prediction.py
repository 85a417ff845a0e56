"""prediction.json: what a run's loss will be, written before the run begins and never after.

It holds the time, the runs that the law was fitted to, what is predicted, and a digest of all of
that. Once the run has begun, nothing of it may change; `measured` is added once, at the end.
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
    """A run that has ended: what the laws know of it."""

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
    """A loss with its band, for a run that is larger than all that it is predicted from."""

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
        """Names everything but what was measured later."""
        table = dataclasses.asdict(dataclasses.replace(self, measured=None))
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    @property
    def inside(self) -> bool | None:
        """Whether what was measured lies in the band."""
        return None if self.measured is None else self.low <= self.measured <= self.high


def begun(out: Path) -> bool:
    """Whether the run to be predicted has left anything."""
    folder = out / TARGET
    return folder.exists() and any(folder.iterdir())


def predict(out: Path, target: Planned, band: Band, fitted: Sequence[Trained]) -> Prediction:
    """Write the prediction down, or give the one that was made of the same runs."""
    kept = read(out)
    if kept is not None and kept.fitted == tuple(fitted) and kept.flops == target.flops:
        return kept
    if begun(out):
        why = "of other results" if kept else "of nothing"
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
    """Add what came out, beside what was predicted."""
    kept = read(out)
    if kept is None:
        raise UserError(f"{out / FILE} is gone: what is measured was not predicted")
    if kept.measured not in (None, loss):
        raise UserError(f"{out / FILE} has another measured loss already: choose another --out")
    found = dataclasses.replace(kept, measured=loss)
    _write(out, found)
    return found


def read(out: Path) -> Prediction | None:
    """The prediction of a sweep, as it was made; a changed one is DataError."""
    path = out / FILE
    if not path.exists():
        return None
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest = table.pop("digest")
        table["fitted"] = tuple(Trained(**one) for one in table["fitted"])
        found = Prediction(**table)
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: choose another --out") from None
    if found.digest != digest:
        raise DataError(f"{path} was changed after it was made: choose another --out")
    return found


def _write(out: Path, prediction: Prediction) -> None:
    table = {**dataclasses.asdict(prediction), "digest": prediction.digest}
    write_text(out / FILE, json.dumps(table, indent=2) + "\n")
