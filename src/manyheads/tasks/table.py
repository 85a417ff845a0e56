"""The task table. A new task is a module with a `TaskSpec` and one line here."""

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
from manyheads.tasks.spec import TaskTable

TASKS = TaskTable(
    {
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
)
