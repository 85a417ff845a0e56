"""The task table. A new task is a module with a `TaskSpec` and one line here."""

from manyheads.tasks import (
    classification,
    images,
    language,
    music,
    pretraining,
    summaries,
    translation,
)
from manyheads.tasks.spec import TaskTable

TASKS = TaskTable(
    {
        "translation": translation.SPEC,
        "summaries": summaries.SPEC,
        "language": language.SPEC,
        "music": music.SPEC,
        "masked": pretraining.MASKED,
        "replaced": pretraining.REPLACED,
        "spans": pretraining.SPANS,
        "denoising": pretraining.DENOISING,
        "bidirectional": pretraining.BIDIRECTIONAL,
        "classification": classification.SPEC,
        "text": classification.IMPORTED,
        "images": images.SPEC,
    }
)
