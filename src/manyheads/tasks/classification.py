"""Labels or numbers for texts and pairs of texts: training, validation, and GLUE's scores."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.elmo import Elmo, ElmoConfig
from manyheads.data.batching import (
    Batches,
    Ragged,
    Rows,
    Shuffled,
    in_order_of_length,
    split,
)
from manyheads.data.labelled import Labelled, LabelledData, places
from manyheads.errors import DataError, UserError
from manyheads.evaluate.scores import Scores, label_scores
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.heads import Classify, Pooler
from manyheads.tasks import masked
from manyheads.tasks.encode import segments_of
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec, add_frame
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.optimizer import TooLong
from manyheads.train.step import Loss

SHOWN = 8  # labels that are named


@dataclass(frozen=True)
class LabelledBatch:
    """Texts in their frames, and for each its class number or its number."""

    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"] | None
    wanted: Int[Tensor, " b"] | Float[Tensor, " b"]
    size: int


class EncodedLabels:
    """Labelled texts as token ids, from which batches of rows are made.

    `too_long` says what becomes of a text that is longer than the model reads: it is refused, left
    out ("skip"), or cut at its end, of a pair the longer text first ("truncate").
    """

    def __init__(
        self,
        part: Labelled,
        names: tuple[str, ...],
        tokenizer: Tokenizer,
        *,
        max_length: int,
        segments: int,
        too_long: TooLong = "truncate",
    ) -> None:
        framed = tokenizer.framed(part.texts)
        long = [row for row, (ids, _) in enumerate(framed) if len(ids) > max_length]
        if long and too_long == "refuse":
            raise DataError(
                f"{part.name}:{part.lines[long[0]]}: {len(framed[long[0]][0])} tokens, and the "
                f"model reads {max_length} ({len(long)} such rows): cut them with "
                "train.too_long=truncate, or leave them out with train.too_long=skip"
            )
        if long and too_long == "skip":
            kept = sorted({*range(len(framed))} - {*long})
            if not kept:
                raise DataError(f"{part.name}: every row is longer than {max_length} tokens")
            part, framed = part.rows(kept), [framed[row] for row in kept]
        elif long:
            shorter = tokenizer.framed([part.texts[row] for row in long], max_length)
            for row, cut in zip(long, shorter, strict=True):
                framed[row] = cut
        done = "left out" if too_long == "skip" else "cut there"
        rows = f"{len(long):,} rows of over {max_length} tokens are {done}"
        self.notes = [f"{part.name}: {rows}"] if long else []
        self.tokens = Ragged.of([ids for ids, _ in framed])
        self.segments = Ragged.of([parts for _, parts in framed]) if segments > 1 else None
        numbers = np.array(part.numbers, dtype=np.float32)
        self.wanted = numbers if part.numbers else places(part, names)
        self.pad = 0  # never seen
        self.lines, self.name = part.lines, part.name

    def digest(self) -> str:
        """Names these texts with their answers."""
        total = hashlib.sha256()
        for array in (self.tokens.starts, self.tokens.flat, self.wanted):
            total.update(array.tobytes())
        return total.hexdigest()[:16]

    def batch(self, rows: Rows, device: torch.device) -> LabelledBatch:
        tokens, real = self.tokens.padded(rows, self.pad)
        segments = None if self.segments is None else self.segments.padded(rows, 0)[0]
        return LabelledBatch(
            tokens.to(device),
            None if bool(real.all()) else real.to(device),
            None if segments is None else segments.to(device),
            torch.from_numpy(self.wanted[rows]).to(device),
            int(self.tokens.lengths[rows].sum()),
        )


def answer_loss(answers: Tensor, wanted: Tensor, smoothing: float = 0.0) -> Loss:
    """−log P of the labels, or the squared distance to the numbers."""
    if wanted.is_floating_point():
        total = (answers.float().squeeze(-1) - wanted).square().sum()
        return Loss(total, total.detach(), len(wanted))
    plain = F.cross_entropy(answers.float(), wanted, reduction="sum")
    if not smoothing:
        return Loss(plain, plain.detach(), len(wanted))
    smoothed = F.cross_entropy(answers.float(), wanted, reduction="sum", label_smoothing=smoothing)
    return Loss(smoothed, plain.detach(), len(wanted))


class ClassificationTask:
    """What the training loop asks of a classifier."""

    def __init__(
        self,
        run: RunSettings,
        part: Labelled,
        valid: Labelled,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, names, max_length = run.train, run.model.head.labels, run.model.max_length
        check_length(part, tokenizer, max_length)
        self.train, self.device, self.names = train, device, names
        self.metrics = run.data.metrics(names)
        sizes: dict[str, Any] = {"max_length": max_length, "segments": segments_of(run.model)}
        self.data = EncodedLabels(part, names, tokenizer, **sizes, too_long=train.too_long)
        self.valid = EncodedLabels(valid, names, tokenizer, **sizes)
        self.digest = self.data.digest()
        notes = [*part.notes, *valid.notes, *self.data.notes, *self.valid.notes]
        self.notes = [*dict.fromkeys(notes), *label_counts(part)]
        lengths = self.data.tokens.lengths
        self.order: Shuffled | Batches
        if train.batch_rows is not None:
            self.order = Shuffled(len(lengths), train.batch_rows * train.accumulate, run.seed)
        else:
            self.order = Batches(lengths, train.batch_tokens * train.accumulate, run.seed)
        self.per_epoch = self.order.per_epoch

    def batches(self, step: int) -> list[LabelledBatch]:
        parts = split(self.order.rows(step), self.train.accumulate)
        return [self.data.batch(rows, self.device) for rows in parts]

    def tokens(self, batch: LabelledBatch) -> int:
        return batch.size

    def counts(self, batch: LabelledBatch) -> dict[str, int]:
        return {"labels": len(batch.tokens)}

    def losses(self, model: nn.Module, batch: LabelledBatch) -> dict[str, Loss]:
        answers = model(batch.tokens, batch.real, batch.segments)
        return {"labels": answer_loss(answers, batch.wanted, self.train.label_smoothing)}

    def describe(self, step: int) -> str:
        lines = [self.data.lines[row] for row in self.order.rows(step)[:5]]
        return f"rows of {self.data.name} from lines {', '.join(map(str, lines))} …"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Bert | Elmo)
        answers, wanted = all_answers(model, self.valid, self.train.batch_tokens)
        loss = answer_loss(answers, wanted)
        given = answers[:, 0] if wanted.is_floating_point() else answers.argmax(-1)
        last = len(self.names) - 1
        scores = label_scores(self.metrics, given.tolist(), wanted.tolist(), last)
        del scores["signature"]
        return {"loss": float(loss.nll) / loss.count, **scores}


def label_counts(part: Labelled) -> list[str]:
    """How often each label comes, the most frequent first, for a person to see what was read."""
    if not part.labels:
        return []
    counts = Counter(part.labels).most_common()
    shown = ", ".join(f"{label} {count:,}" for label, count in counts[:SHOWN])
    rest = f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
    return [f"{len(counts)} labels: {shown}{rest}"]


@torch.no_grad()
def all_answers(
    model: Bert | Elmo, data: EncodedLabels, batch_tokens: int
) -> tuple[Float[Tensor, "rows labels"], Tensor]:
    """What the model says of every row, and what is wanted."""
    model.eval()
    device = next(model.parameters()).device
    lengths = data.tokens.lengths
    head: Any = model.head
    found = torch.empty(len(lengths), head.output.out_features)
    for rows in in_order_of_length(lengths, batch_tokens):
        batch = data.batch(rows, device)
        found[rows] = model(batch.tokens, batch.real, batch.segments).float().cpu()
    return found, torch.from_numpy(data.wanted)


def evaluate(loaded: LoadedModel, data: LabelledData, split_name: str) -> Scores:
    """The task's own metrics on a split."""
    encoder = loaded.encoder()
    part = data.read(split_name)
    names = encoder.labels
    lines = ["\t".join(text) if isinstance(text, tuple) else text for text in part.texts]
    answers = [answer for [answer] in encoder.classify(lines)]
    if data.regression:
        if len(names) > 1:
            raise UserError(
                f"the model answers with labels ({', '.join(names)}), and the data asks for a "
                "number: leave out data.answer=number, or use a model that was trained for it"
            )
        given: list[float] | list[str] = [answer.scores[answer.label] for answer in answers]
        wanted: list[float] | list[str] = part.numbers
    else:
        places(part, names)  # refuses labels that the model does not know
        given, wanted = [answer.label for answer in answers], part.labels
    scores = label_scores(data.metrics(names), given, wanted, names[-1])
    return scores | {"split": split_name, "examples": len(lines)}


def check(run: RunSettings) -> None:
    if not isinstance(run.model.head, Classify):
        raise UserError(
            "task=classification needs model.head=classify: set it where model= is set, else "
            "leave model.head out"
        )


def labelled_strings(part: Labelled) -> list[str]:
    return [text for row in part.texts for text in (row if isinstance(row, tuple) else (row,))]


def fit_model(run: RunSettings, part: Labelled) -> Any:
    """The head gets the labels of the data."""
    labels, model = run.data.label_names(part), run.model
    if model.head.labels not in (Classify().labels, labels):
        raise UserError(
            f"model.head.labels={','.join(model.head.labels)} are not the labels of "
            f"{part.name} ({','.join(labels)}): leave them out"
        )
    return replace(model, head=replace(model.head, labels=labels))


def check_length(part: Labelled, tokenizer: Tokenizer, max_length: int) -> None:
    """Refuse a model that would read nothing but special tokens."""
    pairs = isinstance(part.texts[0], tuple)
    frame = len(tokenizer.framed([("", "") if pairs else ""])[0][0])
    if max_length < frame + (2 if pairs else 1):
        raise UserError(
            f"model.max_length={max_length} leaves no room for text next to {frame} special "
            "tokens: raise it"
        )


def finetune(config: BertConfig | ElmoConfig, run: RunSettings) -> BertConfig | ElmoConfig:
    """A new head for labels on a pretrained encoder."""
    if isinstance(config, ElmoConfig):
        return replace(config, head=Classify())
    return replace(
        config,
        head=Classify(),
        pooler=config.pooler or Pooler(over="first"),
        next_sentence=None,
        init="normal",  # small numbers for new heads
    )


SPEC = TaskSpec(
    task="classification",
    models=(BertConfig, ElmoConfig),
    data=(LabelledData,),
    recipe="classify",
    check=check,
    strings=labelled_strings,
    fit_tokenizer=add_frame,
    fit_model=fit_model,
    prepare=ClassificationTask,
    finetune=finetune,
    finetunes=(ElmoConfig,),
    evaluate=evaluate,
    example=masked.example,
)
