"""Encoders that came from elsewhere: their head and the data decide what they are scored by."""

from typing import Any

import torch

from manyheads.baselines.elmo import ElmoConfig
from manyheads.data.labelled import Labelled, LabelledData
from manyheads.data.language import TextData, Texts
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores
from manyheads.models.bert import BertConfig
from manyheads.models.heads import Classify
from manyheads.tasks import bidirectional, classification, masked
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec, add_frame
from manyheads.train.loop import Task


def strings(part: Labelled | Texts) -> list[str]:
    if isinstance(part, Labelled):
        return classification.labelled_strings(part)
    return part.strings()


def fit_model(run: RunSettings, part: Any) -> Any:
    return classification.fit_model(run, part) if _has_labels(run) else run.model


def prepare(
    run: RunSettings, part: Any, valid: Any, tokenizer: Any, device: torch.device
) -> Task[Any]:
    if not _has_labels(run):
        raise UserError(
            "task=text is for models that came from elsewhere: train with task=classification or "
            "task=pretraining"
        )
    return classification.ClassificationTask(run, part, valid, tokenizer, device)


def finetune(config: Any, run: RunSettings) -> Any:
    return config if isinstance(config, ElmoConfig) else masked.finetune(config, run)


def _has_labels(run: RunSettings) -> bool:
    return isinstance(run.data, LabelledData) and isinstance(run.model.head, Classify)


def evaluate(loaded: LoadedModel, data: TextData | LabelledData, split_name: str) -> Scores:
    if isinstance(data, LabelledData):
        return classification.evaluate(loaded, data, split_name)
    model = loaded.run.model
    if isinstance(model, ElmoConfig) and model.head is None:
        return bidirectional.evaluate(loaded, data, split_name)
    return masked.evaluate(loaded, data, split_name)


def default_data(model: Any) -> TextData | LabelledData:
    return LabelledData() if isinstance(model.head, Classify) else TextData()


SPEC = TaskSpec(
    task="text",
    models=(BertConfig, ElmoConfig),
    data=(TextData, LabelledData),
    recipe="classify",
    is_default=True,
    strings=strings,
    fit_tokenizer=add_frame,
    fit_model=fit_model,
    prepare=prepare,
    finetune=finetune,
    evaluate=evaluate,
    default_data=default_data,
    pages=masked.pages,
    example=masked.example,
)
