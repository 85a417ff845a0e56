"""Classification and regression of texts and pairs of texts, scored as GLUE does."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.baselines.elmo import ElmoConfig
from manyheads.data import batching
from manyheads.data.batching import Batches, Ragged, Rows, Shuffled
from manyheads.data.corpus import select_rows
from manyheads.data.labelled import Labelled, LabelledData, class_indices
from manyheads.data.language import TextData, room_for_text
from manyheads.errors import UserError
from manyheads.evaluate.labels import class_report, label_scores
from manyheads.evaluate.scores import Scores, add_plugin_metrics
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Pooler
from manyheads.tasks import pretraining
from manyheads.tasks.encode import segments_of
from manyheads.tasks.spec import BaseTask, LoadedModel, RunSettings, TaskSpec, add_frame
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.optimizer import TooLong
from manyheads.train.step import Loss


@dataclass(frozen=True)
class LabelledBatch:
    """Texts with their special tokens, and for each a class index or a number."""

    tokens: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"] | None
    labels: Int[Tensor, " b"] | Float[Tensor, " b"]
    size: int


class EncodedLabels:
    """Labelled texts as token ids.

    A text that is longer than the model is refused, left out ("skip"), or truncated at its end, of
    a pair the longer text first ("truncate").
    """

    def __init__(
        self, part: Labelled, tokenizer: Tokenizer, model: Any, too_long: TooLong = "truncate"
    ) -> None:
        framed = tokenizer.framed(part.texts)
        lengths = [len(ids) for ids, _ in framed]
        limit = model.max_length
        rows, self.notes = batching.fit_length(part.name, lengths, part.lines, limit, too_long)
        part = select_rows(part, rows)
        if self.notes:
            framed = tokenizer.framed(part.texts, limit)
        self.tokens = Ragged.of([ids for ids, _ in framed])
        has_segments = segments_of(model) > 1
        self.segments = Ragged.of([segments for _, segments in framed]) if has_segments else None
        is_number = isinstance(part.labels[0], float)
        numbers = np.array(part.labels, dtype=np.float32) if is_number else None
        self.labels = class_indices(part, model.head.labels) if numbers is None else numbers
        self.lines, self.name = part.lines, part.name

    def batch(self, rows: Rows) -> LabelledBatch:
        tokens, mask = self.tokens.padded(rows, 0)
        return LabelledBatch(
            tokens,
            None if bool(mask.all()) else mask,
            None if self.segments is None else self.segments.padded(rows, 0)[0],
            torch.from_numpy(self.labels[rows]),
            int(self.tokens.lengths[rows].sum()),
        )

    @torch.no_grad()
    def predict(self, model: Any, batch_tokens: int) -> Float[Tensor, "rows labels"]:
        """The output of the head for every row."""
        model.eval()
        device = next(model.parameters()).device
        outputs = torch.empty(len(self.labels), model.head.output.out_features)
        for rows in batching.batches_by_length(self.tokens.lengths, batch_tokens):
            batch = batching.to_device(self.batch(rows), device)
            outputs[rows] = model(batch.tokens, batch.mask, batch.segments).float().cpu()
        return outputs


def label_loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """−Σ_k q_k log p_k of class indices or probabilities q; (z − y)² of numbers y."""
    outputs = outputs.float()
    if labels.is_floating_point() and labels.ndim == 1:
        squares = (outputs.squeeze(-1) - labels).square().sum()
        return Loss(squares, squares.detach(), len(labels))
    objective = nll = F.cross_entropy(outputs, labels, reduction="sum")
    if smoothing:
        objective = F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=smoothing)
    return Loss(objective, nll.detach(), len(labels))


class ClassificationTask(BaseTask[LabelledBatch]):
    """Classification and regression for the trainer."""

    order: Shuffled | Batches

    def load(self, part: Labelled, valid: Labelled) -> None:
        train, model, seed = self.train, self.run.model, self.run.seed
        empty = ("", "") if isinstance(part.texts[0], tuple) else ""
        room_for_text(model.max_length, len(self.tokenizer.framed([empty])[0][0]))
        self.data = EncodedLabels(part, self.tokenizer, model, train.too_long)
        self.valid = EncodedLabels(valid, self.tokenizer, model)
        tokens = self.data.tokens
        self.digest = batching.digest_of(tokens.starts, tokens.flat, self.data.labels)
        self.notes += [*self.data.notes, *self.valid.notes]
        lengths = tokens.lengths
        if train.batch_rows is not None:
            self.order = Shuffled(len(lengths), train.batch_rows * train.accumulate, seed)
        else:
            self.order = Batches(lengths, train.batch_tokens * train.accumulate, seed)
        self.per_epoch = self.order.per_epoch
        self.examples = f"rows of {part.name} from lines"

    def batch(self, rows: Rows) -> LabelledBatch:
        return self.data.batch(rows)

    def tokens(self, batch: LabelledBatch) -> int:
        return batch.size

    def counts(self, batch: LabelledBatch) -> dict[str, int]:
        return {"labels": len(batch.tokens)}

    def losses(self, model: Any, batch: LabelledBatch) -> dict[str, Loss]:
        outputs = model(batch.tokens, batch.mask, batch.segments)
        return {"labels": label_loss(outputs, batch.labels, self.train.label_smoothing)}

    def number(self, row: int) -> int:
        return self.data.lines[row]

    def validate(self, model: Any) -> dict[str, float]:
        outputs = self.valid.predict(model, self.train.batch_tokens)
        labels, names = torch.from_numpy(self.valid.labels), self.run.model.head.labels
        loss = label_loss(outputs, labels)
        predictions = outputs[:, 0] if labels.is_floating_point() else outputs.argmax(-1)
        metrics = self.run.data.metrics(names)
        scores = label_scores(metrics, predictions.numpy(), labels.numpy(), len(names) - 1)
        del scores["signature"]
        return {"loss": float(loss.nll) / loss.count, **scores}


def evaluate(
    loaded: LoadedModel, data: LabelledData, split_name: str, *, by_class: bool = False
) -> Scores:
    """The metrics of the data on a split, also for each class if requested."""
    encoder, part = loaded.encoder(), data.read(split_name)
    names = encoder.labels
    lines = ["\t".join(text) if isinstance(text, tuple) else text for text in part.texts]
    predictions = [prediction for [prediction] in encoder.classify(lines)]
    values: list[Any] = [prediction.label for prediction in predictions]
    if data.regression:
        if len(names) > 1:
            raise UserError(
                f"the model predicts labels ({', '.join(names)}), and the data has numbers: leave "
                "out data.answer=number, or use a model that was trained for it"
            )
        values = [prediction.scores[prediction.label] for prediction in predictions]
    else:
        class_indices(part, names)  # refuses labels that the model does not know
    scores = label_scores(data.metrics(names), values, part.labels, names[-1])
    scores = add_plugin_metrics(scores, "classification", values, part.labels)
    if by_class and not data.regression:
        scores["classes"] = class_report(values, part.labels, names)
    return scores | {"split": split_name, "examples": len(lines)}


def check(run: RunSettings) -> None:
    if not isinstance(run.model.head, Classify):
        raise UserError("task=classification needs model.head=classify: leave out model.head")


def with_labels(head: Classify, labels: tuple[str, ...], name: str) -> Classify:
    """The head with the labels of the data; other labels that were set are refused."""
    if head.labels not in (Classify().labels, labels):
        raise UserError(
            f"model.head.labels={','.join(head.labels)} are not the labels of {name} "
            f"({','.join(labels)}): leave them out"
        )
    return replace(head, labels=labels)


def fit_model(run: RunSettings, part: Labelled) -> Any:
    head = with_labels(run.model.head, run.data.label_names(part), part.name)
    return replace(run.model, head=head)


def finetune(config: BertConfig | ElmoConfig, run: RunSettings) -> BertConfig | ElmoConfig:
    """A new classification head on a pretrained encoder, or on a decoder's last position."""
    if isinstance(config, ElmoConfig):
        return replace(config, head=Classify())
    return replace(
        config,
        head=Classify(),
        pooler=None if config.causal else config.pooler or Pooler(over="first"),
        next_sentence=None,
        init="normal",  # small weights for new heads
    )


SPEC = TaskSpec(
    task="classification",
    models=(BertConfig, ElmoConfig),
    data=(LabelledData,),
    recipe="classify",
    check=check,
    fit_tokenizer=add_frame,
    fit_model=fit_model,
    prepare=ClassificationTask,
    finetune=finetune,
    finetunes=(ElmoConfig, GptConfig),
    evaluate=evaluate,
    scoring=("by_class",),
    example=pretraining.example,
)


# Imported encoders: their head and the data decide how they are scored.


def finetune_imported(config: Any, run: RunSettings) -> Any:
    return config if isinstance(config, ElmoConfig) else pretraining.finetune(config, run)


def evaluate_imported(
    loaded: LoadedModel, data: TextData | LabelledData, split_name: str
) -> Scores:
    if isinstance(data, LabelledData):
        return evaluate(loaded, data, split_name)
    model = loaded.run.model
    if isinstance(model, ElmoConfig) and model.head is None:
        return pretraining.evaluate(pretraining.FramedText, loaded, data, split_name)
    return pretraining.evaluate_masked(loaded, data, split_name)


IMPORTED = TaskSpec(
    task="text",
    models=(BertConfig, ElmoConfig),
    data=(TextData, LabelledData),
    recipe="classify",
    is_default=True,
    fit_tokenizer=add_frame,
    prepare=None,
    finetune=finetune_imported,
    evaluate=evaluate_imported,
    default_data=lambda model: LabelledData() if isinstance(model.head, Classify) else TextData(),
    pages=pretraining.pages,
    example=pretraining.example,
)
