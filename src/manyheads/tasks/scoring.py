"""The scores of a run on a split of its data, by what the run does."""

from typing import Any

from manyheads.baselines.elmo import ElmoConfig
from manyheads.data.images import ImageData
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.masking import Causal, Masked, Replaced
from manyheads.data.music import MusicData
from manyheads.data.summaries import SummaryData
from manyheads.data.translation import FilesData
from manyheads.errors import UserError, check_at_least
from manyheads.evaluate.scores import Scores
from manyheads.loading import OpenRun, TorchRun
from manyheads.models import heads
from manyheads.models.bert import BertConfig
from manyheads.run import Data, Run
from manyheads.tasks.both_ways import evaluate_both_ways
from manyheads.tasks.classification import evaluate_classification
from manyheads.tasks.denoising import evaluate_denoising
from manyheads.tasks.images import evaluate_images
from manyheads.tasks.language import evaluate_language
from manyheads.tasks.masked import evaluate_masked
from manyheads.tasks.music import evaluate_music
from manyheads.tasks.summaries import evaluate_summaries
from manyheads.tasks.translation import evaluate_translation


def data_for(run: Run) -> Data:
    """The kind of data that a model which came without any is scored on, to be filled in."""
    if run.task == "translation":
        return FilesData()
    if run.task == "summaries":
        return SummaryData()
    if run.task == "images":
        return ImageData()
    if isinstance(getattr(run.model, "head", None), heads.Classify):
        return LabelledData()
    return TextData()


def refuse_unscored(run: Run, name: str) -> None:
    """Refuse what has no scores once it is trained."""
    if isinstance(run.objective, Replaced):
        raise UserError(
            f"{name} is trained against a generator that is not kept, so that nothing scores it "
            "afterwards: its validation is in metrics.jsonl, and what it learned shows in "
            "fine-tuning"
        )


def score(opened: OpenRun, data: Data, split: str, stride: int | None = None) -> Scores:
    """Each number with its signature; `stride` is of language models alone."""
    refuse_unscored(opened.run, str(opened.folder))
    if stride is not None and opened.run.task != "language":
        raise UserError("--stride is for language models: leave it out")
    if isinstance(data, ImageData):
        return evaluate_images(opened.labeller(), data, split)
    if isinstance(data, LabelledData):
        return evaluate_classification(opened.encoder(), data, split)
    if isinstance(data, SummaryData) or opened.run.task == "summaries":
        assert isinstance(data, (SummaryData, FilesData))  # as `run.FITTING` has it
        return evaluate_summaries(opened.translator(), data, split)
    if not isinstance(data, (TextData, MusicData)):
        return evaluate_translation(opened.translator(), data, split).scores
    if not isinstance(opened, TorchRun):
        raise UserError(f"{opened.folder} was exported and gives no probabilities: use the run")
    run, model, tokenizer = opened.run, _any(opened.model), opened.tokenizer
    if run.task == "language":
        objective = run.objective if isinstance(run.objective, Causal) else Causal()
        check_at_least("--stride", stride, 1)
        if stride is not None and stride > run.model.max_length:
            raise UserError(
                f"--stride {stride} is longer than the {run.model.max_length} tokens that the "
                "model reads at once: choose at most that"
            )
        tokens = run.decode.read_at_once
        if isinstance(data, MusicData):
            return evaluate_music(model, tokenizer, data, split, batch_tokens=tokens, stride=stride)
        return evaluate_language(
            model, tokenizer, data, objective, split, batch_tokens=tokens, stride=stride
        )
    assert isinstance(data, TextData)  # as `run.FITTING` has it
    if run.task == "pretraining" and run.model.kind == "seq2seq":
        assert run.objective is not None
        return evaluate_denoising(model, tokenizer, data, _any(run.objective), run.decode, split)
    if isinstance(run.model, ElmoConfig) and run.model.head is None:
        return evaluate_both_ways(model, opened.encoder().tokenizer, data, split)
    if not isinstance(run.model, BertConfig) or not isinstance(run.model.head, heads.Masked):
        raise UserError(
            f"{opened.folder} has no head for masked words, which running text is scored by: "
            "use a language model, or one with that head"
        )
    objective_ = run.objective if isinstance(run.objective, Masked) else Masked()
    return evaluate_masked(model, opened.encoder().tokenizer, data, objective_, split)


def _any(part: object) -> Any:
    return part
