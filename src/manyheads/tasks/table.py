"""The task table. A new task is a module with a `TaskSpec` and one line here."""

from manyheads.data.images import ImageData
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.music import MusicData
from manyheads.data.summaries import SummaryData
from manyheads.data.translation import FilesData, PhrasebookData
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

Data = PhrasebookData | FilesData | SummaryData | TextData | LabelledData | ImageData | MusicData

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
