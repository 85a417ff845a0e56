"""What a run is for beside what its kind of model says, told by its settings alone."""

from manyheads.data.events import ChoraleGrid
from manyheads.data.music import MusicData
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Masked
from manyheads.run import Run

# A text to begin with, by what the model does; music is written in the words of its encoding.
EXAMPLES = {"bert": "The small dog [MASK] the tree.", "gpt": "The small dog sees"}
EXAMPLE = "The small dog sees the tree."
CHORALE = "p72 p67 p64 p48 p72 p67 p64 p48 p74 p67 p65 p47"
PERFORMANCE = "velocity20 on60 shift25 off60 on64 shift25 off64 on67 shift50 off67"


def abilities(run: Run) -> list[str]:
    """The pages that the run has beside those of its kind of model."""
    if isinstance(run.model, BertConfig) and isinstance(run.model.head, Masked):
        return ["fill"]
    if isinstance(run.data, MusicData) and isinstance(run.model, GptConfig):
        return ["music"]
    return []


def example(run: Run) -> str:
    """A text to begin with that the model can read."""
    if isinstance(run.data, MusicData):
        return CHORALE if isinstance(run.data.encoding, ChoraleGrid) else PERFORMANCE
    return EXAMPLES.get(run.model.kind, EXAMPLE)
