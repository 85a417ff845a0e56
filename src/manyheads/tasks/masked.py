"""Masked language models: predict what was hidden (BERT, RoBERTa), or find what was replaced
(ELECTRA); and whether the second text follows the first.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.batching import split
from manyheads.data.language import TextData, Texts
from manyheads.data.masking import Masked, Replaced
from manyheads.data.mlm import HELD_OUT, MaskedBatch, MaskedOrder, MaskedText, drawing
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models import heads
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.electra import Electra
from manyheads.tasks.spec import EXAMPLE, LoadedModel, RunSettings, TaskSpec, add_frame
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss, cross_entropy

# What is hidden for validation is the same for every run: by this seed, so many rows at a time.
HELD_OUT_SEED, HELD_OUT_ROWS = 0, 32
MULTIPLE = 64  # of hidden tokens in a batch on a GPU, where a pass is recorded for each shape


def masked_loss(model: Bert, hidden: Tensor, batch: MaskedBatch, smoothing: float = 0.0) -> Loss:
    """−log P of the hidden tokens: the output layer sees their places alone."""
    head: Any = model.head
    at = hidden.flatten(0, 1)[batch.places]
    return cross_entropy(
        head.output.enter(head.enter(at)),
        head.output.matrix(model.tokens),
        batch.wanted,
        bias=head.output.bias,
        smoothing=smoothing,
        count=batch.predictions,
    )


def follows_loss(logits: Tensor, other: Tensor) -> Loss:
    """−log P of whether the second text follows (class 0) or comes from elsewhere (class 1)."""
    total = F.cross_entropy(logits.float(), other, reduction="sum")
    return Loss(total, total.detach(), len(other))


@dataclass(frozen=True)
class Found:
    """What a pass found: the terms of the loss, and how often the second answers were right."""

    losses: dict[str, Loss]
    right: dict[str, Tensor]


def masked_pass(model: Bert, batch: MaskedBatch, smoothing: float = 0.0) -> Found:
    """Masked language modelling, with next-sentence prediction where the texts are pairs."""
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    losses = {"masked": masked_loss(model, hidden, batch, smoothing)}
    if batch.other is None:
        return Found(losses, {})
    logits = model.follows(hidden, batch.real)
    losses["next_sentence"] = follows_loss(logits, batch.other)
    return Found(losses, {"next_sentence": (logits.argmax(-1) == batch.other).sum()})


def replaced_pass(model: Electra, batch: MaskedBatch, weight: float) -> Found:
    """The generator's loss at the masks, and the model's at every token: was it replaced?"""
    hidden = model.generator.hidden(batch.tokens, batch.real, batch.segments)
    masked = masked_loss(model.generator, hidden, batch)
    tokens, drawn = model.fill(batch.tokens, batch.places, hidden)
    wrong = torch.zeros_like(tokens, dtype=torch.float32)
    changed = (drawn != batch.wanted).float()
    wrong = wrong.flatten().scatter(0, batch.places, changed).view_as(wrong)
    logits = model.model(tokens, batch.real, batch.segments).float()
    each = F.binary_cross_entropy_with_logits(logits, wrong, reduction="none")
    right = (logits > 0) == (wrong > 0.5)
    if batch.real is not None:
        each, right = each * batch.real, right & batch.real
    total = each.sum()
    found = Loss(total, total.detach(), batch.size, weight)
    return Found({"masked": masked, "replaced": found}, {"replaced": right.sum()})


class MaskedTask:
    """What the training loop asks of masked language models and of ELECTRA."""

    def __init__(
        self,
        run: RunSettings,
        part: Texts,
        valid: Texts,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, objective, max_length = run.train, run.objective, run.model.max_length
        self.objective, self.train, self.device = objective, train, device
        short = run.data.short
        text = MaskedText(part, tokenizer, objective, max_length=max_length, short=short)
        self.valid = MaskedText(valid, tokenizer, objective, max_length=max_length, short="skip")
        self.rows = train.batch_rows or max(1, train.batch_tokens // max_length)
        self.order = MaskedOrder(text, self.rows * train.accumulate, run.seed, part.name)
        self.per_epoch = self.order.per_epoch
        self.digest = text.text.digest()
        self.notes = list(dict.fromkeys([*part.notes, *valid.notes]))
        self.valid.text.stretches(self.valid.room)  # refuse a short text now, not after hours

    def batches(self, step: int) -> list[MaskedBatch]:
        framed, inputs, places = self.order.at(step)
        parts = split(np.arange(len(framed.tokens)), self.train.accumulate)
        batches = [framed.hidden(inputs, places, rows) for rows in parts]
        if self.device.type == "cuda" and isinstance(self.objective, Masked):
            batches = [batch.padded(MULTIPLE) for batch in batches]
        return [batch.to(self.device) for batch in batches]

    def tokens(self, batch: MaskedBatch) -> int:
        return batch.size

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        if isinstance(self.objective, Replaced):
            return {"masked": batch.predictions, "replaced": batch.size}
        pairs = {} if batch.other is None else {"next_sentence": len(batch.tokens)}
        return {"masked": batch.predictions, **pairs}

    def losses(self, model: nn.Module, batch: MaskedBatch) -> dict[str, Loss]:
        return one_pass(model, batch, self.objective, self.train.label_smoothing).losses

    def describe(self, step: int) -> str:
        return f"{self.rows * self.train.accumulate} stretches of text, drawn for step {step}"

    def validate(self, model: nn.Module) -> dict[str, float]:
        return masked_scores(model, self.valid, self.objective, self.device)


def one_pass(
    model: nn.Module, batch: MaskedBatch, objective: Masked | Replaced, smoothing: float = 0.0
) -> Found:
    if isinstance(objective, Replaced):
        assert isinstance(model, Electra)
        return replaced_pass(model, batch, objective.weight)
    assert isinstance(model, Bert)
    return masked_pass(model, batch, smoothing)


@torch.no_grad()
def masked_scores(
    model: nn.Module, text: MaskedText, objective: Masked | Replaced, device: torch.device
) -> dict[str, float]:
    """The losses on held-out text, hidden in the same places for every run."""
    model.eval()
    torch.manual_seed(HELD_OUT_SEED)  # what a generator draws
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    weights: dict[str, float] = {}
    right: dict[str, int] = {}
    whole = text.text.stretches(text.room)
    for begin in range(0, whole, HELD_OUT_ROWS):
        random = drawing(HELD_OUT_SEED, HELD_OUT, begin)
        count = min(HELD_OUT_ROWS, whole - begin)
        starts = np.arange(begin, begin + count) * text.room
        framed = text.stretches(starts) if text.pairs is None else text.drawn_pairs(count, random)
        inputs, places = text.hide(framed, random)
        batch = framed.hidden(inputs, places, np.arange(count)).to(device)
        found = one_pass(model, batch, objective)
        for name, loss in found.losses.items():
            sums[name] = sums.get(name, 0.0) + float(loss.nll)
            counts[name] = counts.get(name, 0) + loss.count
            weights[name] = loss.weight
        for name, hits in found.right.items():
            right[name] = right.get(name, 0) + int(hits)
    means = {name: sums[name] / max(1, counts[name]) for name in sums}
    scores = {"loss": sum(weights[name] * mean for name, mean in means.items())}
    if len(means) > 1:
        scores |= {f"{name}_loss": mean for name, mean in means.items()}
    if counts["masked"]:
        scores["perplexity"] = perplexity(sums["masked"], counts["masked"])
    scores |= {f"{name}_accuracy": hits / counts[name] for name, hits in right.items()}
    return scores


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """The masked language model's losses on a split."""
    model, tokenizer = loaded.torch_model(), loaded.encoder().tokenizer
    if not isinstance(loaded.run.model.head, heads.Masked):
        raise UserError(
            f"{loaded.folder} has no head for masked words, which running text is scored by: "
            "use a language model, or one with that head"
        )
    objective = loaded.run.objective or Masked()
    texts = data.read(split_name)
    text = MaskedText(texts, tokenizer, objective, max_length=model.config.max_length, short="skip")
    device = next(model.parameters()).device
    scores: Scores = dict(masked_scores(model, text, objective, device))
    unit = f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"
    shares = f"mask:{objective.mask_share}|random:{objective.random_share}|unit:{objective.unit}"
    said = (
        f"of hidden tokens ({unit})|rate:{objective.rate}|{shares}|pairs:{objective.pairs}|"
        f"length:{model.config.max_length}|hidden by seed {HELD_OUT_SEED}"
    )
    scores["signature"] = {"perplexity": said}
    return scores | {"split": split_name, "examples": len(text.text.flat)}


def has_pairs(run: RunSettings) -> bool:
    return isinstance(run.objective, Masked) and run.objective.pairs == "next-sentence"


def check(run: RunSettings) -> None:
    """The head must answer what the objective asks."""
    model, objective = run.model, run.objective
    head = "detect" if isinstance(objective, Replaced) else "masked"
    if model.head is None or model.head.kind != head:
        raise UserError(f"objective={objective.kind} needs model.head={head}")
    if has_pairs(run) and (model.next_sentence is None or (model.embed.segments or 1) < 2):
        raise UserError(
            "objective.pairs=next-sentence needs model.embed.segments=2, model.pooler=tanh and "
            "model.next_sentence.classes=2"
        )


def with_generator(model: nn.Module, run: RunSettings) -> nn.Module:
    """ELECTRA trains a generator next to the model."""
    assert isinstance(model, Bert)
    return Electra(model, run.objective.generator_share)


def finetune(config: BertConfig, run: RunSettings) -> BertConfig:
    """The head that the objective needs; next-sentence prediction comes with its pairs."""
    kind = heads.Detect if isinstance(run.objective, Replaced) else heads.Masked
    head = config.head if isinstance(config.head, kind) else kind()
    paired = has_pairs(run)
    return replace(
        config,
        head=head,
        pooler=config.pooler or (run.model.pooler if paired else None),
        next_sentence=run.model.next_sentence if paired else None,
        init="normal",  # small numbers for new heads
    )


def pages(run: RunSettings) -> list[str]:
    has_head = isinstance(getattr(run.model, "head", None), heads.Masked)
    return ["fill"] if has_head and run.model.kind == "bert" else []


def example(run: RunSettings) -> str:
    return "The small dog [MASK] the tree." if run.model.kind == "bert" else EXAMPLE


MASKED = TaskSpec(
    task="pretraining",
    models=(BertConfig,),
    data=(TextData,),
    objectives=(Masked,),
    special_tokens=("mask",),
    recipe="bert-mini",
    check=check,
    fit_tokenizer=add_frame,
    prepare=MaskedTask,
    finetune=finetune,
    evaluate=evaluate,
    pages=pages,
    example=example,
)
REPLACED = replace(
    MASKED,
    objectives=(Replaced,),
    recipe="electra-mini",
    wrap=with_generator,
    evaluate=None,
    no_scores="is trained against a generator that is not kept, so that nothing scores it "
    "afterwards: its validation is in metrics.jsonl, and what it learned shows in fine-tuning",
)
