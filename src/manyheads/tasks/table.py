"""The task table. A new task is a module with a `TaskSpec` and one line here."""

from typing import Any

from manyheads.config import nearest
from manyheads.errors import UserError
from manyheads.tasks import (
    bidirectional,
    classification,
    denoising,
    images,
    language,
    masked,
    music,
    summaries,
    text,
    translation,
)
from manyheads.tasks.spec import TaskSpec

TASKS: dict[str, TaskSpec] = {
    "translation": translation.SPEC,
    "summaries": summaries.SPEC,
    "language": language.SPEC,
    "music": music.SPEC,
    "masked": masked.MASKED,
    "replaced": masked.REPLACED,
    "spans": denoising.SPANS,
    "denoising": denoising.DENOISING,
    "bidirectional": bidirectional.SPEC,
    "classification": classification.SPEC,
    "text": text.SPEC,
    "images": images.SPEC,
}


def rows_of(task: str) -> list[TaskSpec]:
    """The rows that share a value of the setting `task`."""
    rows = [row for row in TASKS.values() if row.task == task]
    if not rows:
        names = {row.task for row in TASKS.values()}
        raise UserError(f"task={task}: {nearest(str(task), names)}")
    return rows


def find_task(task: str, data: Any = None, objective: Any = None) -> TaskSpec:
    """The row of a run; data and objective choose where several rows share its `task`."""
    rows = rows_of(task)
    for row in rows:
        fits_data = data is None or isinstance(data, row.data)
        if fits_data and (objective is None or isinstance(objective, row.objectives)):
            return row
    return rows[0]


def default_task(model: Any) -> str:
    """The task of an imported model."""
    return next(
        row.task for row in TASKS.values() if row.is_default and isinstance(model, row.models)
    )


def kinds(parts: tuple[type, ...]) -> list[str]:
    """The words that settings have for these parts."""
    return [part.kind for part in parts]  # type: ignore[attr-defined]
