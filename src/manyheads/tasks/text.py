"""Imported encoders: their head and the data decide how they are scored."""

from typing import Any

from manyheads.baselines.elmo import ElmoConfig
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.evaluate.scores import Scores
from manyheads.models.bert import BertConfig
from manyheads.models.heads import Classify
from manyheads.tasks import bidirectional, classification, masked
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec, add_frame


def finetune(config: Any, run: RunSettings) -> Any:
    return config if isinstance(config, ElmoConfig) else masked.finetune(config, run)


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
    fit_tokenizer=add_frame,
    prepare=None,
    finetune=finetune,
    evaluate=evaluate,
    default_data=default_data,
    pages=masked.pages,
    example=masked.example,
)
