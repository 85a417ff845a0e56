"""Masked language models (BERT, RoBERTa), replaced-token detection (ELECTRA), next sentences.

L = −Σ_{i∈M} log P(x_i | x̃) over the masked positions M of a corrupted text x̃
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.batching import split
from manyheads.data.language import TextData, Texts
from manyheads.data.masking import Masked, ReplacedToken
from manyheads.data.mlm import MaskedBatch, MaskedOrder, MaskedText
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models import heads
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.electra import Electra
from manyheads.tasks.language import HELD_OUT_SEED, held_out_windows
from manyheads.tasks.spec import (
    EXAMPLE,
    BaseTask,
    LoadedModel,
    RunSettings,
    TaskSpec,
    add_frame,
    token_unit,
)
from manyheads.train.step import Loss, cross_entropy

MULTIPLE = 64  # of masked positions in a batch on a GPU: few shapes to capture as CUDA graphs


def masked_loss(model: Bert, hidden: Tensor, batch: MaskedBatch, smoothing: float = 0.0) -> Loss:
    """−log P of the masked tokens; the output layer is computed at their positions only."""
    head: Any = model.head
    masked = hidden.flatten(0, 1)[batch.positions]
    return cross_entropy(
        head.output.enter(head.enter(masked)),
        head.output.matrix(model.tokens),
        batch.labels,
        bias=head.output.bias,
        smoothing=smoothing,
        count=batch.predictions,
    )


def next_sentence_loss(logits: Tensor, is_random: Tensor) -> Loss:
    """−log P of whether the second text follows (class 0) or is from elsewhere (class 1)."""
    total = F.cross_entropy(logits.float(), is_random, reduction="sum")
    return Loss(total, total.detach(), len(is_random))


@dataclass(frozen=True)
class PassResult:
    """The loss terms of a forward pass, and the number of correct binary predictions by term."""

    losses: dict[str, Loss]
    correct: dict[str, Tensor]


def masked_pass(model: Bert, batch: MaskedBatch, smoothing: float = 0.0) -> PassResult:
    """Masked language modelling, with next-sentence prediction if the texts are pairs."""
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    losses = {"masked": masked_loss(model, hidden, batch, smoothing)}
    if batch.other is None:
        return PassResult(losses, {})
    logits = model.next_sentence_logits(hidden, batch.real)
    losses["next_sentence"] = next_sentence_loss(logits, batch.other)
    return PassResult(losses, {"next_sentence": (logits.argmax(-1) == batch.other).sum()})


def replaced_pass(model: Electra, batch: MaskedBatch, weight: float) -> PassResult:
    """The generator's loss at the masks, and the model's at every token: was it replaced?"""
    hidden = model.generator.hidden(batch.tokens, batch.real, batch.segments)
    masked = masked_loss(model.generator, hidden, batch)
    tokens, samples = model.fill(batch.tokens, batch.positions, hidden)
    # A sample that equals the original token does not count as replaced.
    is_replaced = torch.zeros_like(tokens, dtype=torch.float32)
    differs = (samples != batch.labels).float()
    is_replaced = is_replaced.flatten().scatter(0, batch.positions, differs).view_as(is_replaced)
    logits = model.model(tokens, batch.real, batch.segments).float()
    losses = F.binary_cross_entropy_with_logits(logits, is_replaced, reduction="none")
    correct = (logits > 0) == (is_replaced > 0.5)
    if batch.real is not None:
        losses, correct = losses * batch.real, correct & batch.real
    total = losses.sum()
    detection = Loss(total, total.detach(), batch.size, weight)
    return PassResult({"masked": masked, "replaced": detection}, {"replaced": correct.sum()})


def forward_pass(
    model: nn.Module, batch: MaskedBatch, objective: Masked | ReplacedToken, smoothing: float = 0.0
) -> PassResult:
    if isinstance(objective, ReplacedToken):
        assert isinstance(model, Electra)
        return replaced_pass(model, batch, objective.weight)
    assert isinstance(model, Bert)
    return masked_pass(model, batch, smoothing)


class MaskedTask(BaseTask[MaskedBatch]):
    """Masked language modelling and replaced-token detection for the trainer."""

    def load(self, part: Texts, valid: Texts) -> None:
        train, max_length = self.train, self.run.model.max_length
        self.objective: Masked | ReplacedToken = self.run.objective
        settings: Any = {"objective": self.objective, "max_length": max_length}
        text = MaskedText(part, self.tokenizer, **settings, short=self.run.data.short)
        self.valid = MaskedText(valid, self.tokenizer, **settings, short="skip")
        rows = train.batch_rows or max(1, train.batch_tokens // max_length)
        self.order = MaskedOrder(text, rows * train.accumulate, self.run.seed, part.name)
        self.per_epoch = self.order.per_epoch
        self.digest = text.text.digest()
        self.valid.text.count_windows(self.valid.room)  # refuse a short text before training

    def batches(self, step: int) -> list[MaskedBatch]:
        rows = self.order.at(step)
        parts = split(np.arange(len(rows.tokens)), self.train.accumulate)
        batches = [rows.batch(part) for part in parts]
        if self.device.type == "cuda" and isinstance(self.objective, Masked):
            batches = [batch.padded(MULTIPLE) for batch in batches]
        return [batch.to(self.device) for batch in batches]

    def tokens(self, batch: MaskedBatch) -> int:
        return batch.size

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        counts = {"masked": batch.predictions}
        if isinstance(self.objective, ReplacedToken):
            counts["replaced"] = batch.size
        elif batch.other is not None:
            counts["next_sentence"] = len(batch.tokens)
        return counts

    def losses(self, model: nn.Module, batch: MaskedBatch) -> dict[str, Loss]:
        return forward_pass(model, batch, self.objective, self.train.label_smoothing).losses

    def describe(self, step: int) -> str:
        return f"{self.order.rows} windows of text, sampled for step {step}"

    def validate(self, model: nn.Module) -> dict[str, float]:
        return masked_scores(model, self.valid, self.objective, self.device)


@torch.no_grad()
def masked_scores(
    model: nn.Module, text: MaskedText, objective: Masked | ReplacedToken, device: torch.device
) -> dict[str, float]:
    """The losses of held-out text, masked at the same positions for every run."""
    model.eval()
    torch.manual_seed(HELD_OUT_SEED)  # for what ELECTRA's generator samples
    sums: Counter[str] = Counter()  # of floats
    counts: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for starts, random in held_out_windows(text.text, text.room):
        batch = text.rows(starts, random, random).batch(np.arange(len(starts))).to(device)
        result = forward_pass(model, batch, objective)
        for name, loss in result.losses.items():
            sums[name] += float(loss.nll)  # type: ignore[assignment]
            counts[name] += loss.count
            weights[name] = loss.weight
        for name, count in result.correct.items():
            correct[name] += int(count)
    means = {name: sums[name] / max(1, counts[name]) for name in weights}
    scores = {"loss": sum(weights[name] * mean for name, mean in means.items())}
    if len(means) > 1:
        scores |= {f"{name}_loss": mean for name, mean in means.items()}
    if counts["masked"]:
        scores["perplexity"] = perplexity(sums["masked"], counts["masked"])
    return scores | {f"{name}_accuracy": correct[name] / counts[name] for name in correct}


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """The losses of a masked language model on a split."""
    model, tokenizer = loaded.torch_model(), loaded.encoder().tokenizer
    if not isinstance(loaded.run.model.head, heads.Masked):
        raise UserError(
            f"{loaded.folder} has no head for masked words, which running text is scored by: "
            "use a language model, or one with that head"
        )
    objective, max_length = loaded.run.objective or Masked(), model.config.max_length
    texts = data.read(split_name)
    text = MaskedText(texts, tokenizer, objective, max_length=max_length, short="skip")
    unit = "pieces" if objective.unit == "subwords" else objective.unit  # 0.1's signature
    signature = (
        f"of hidden tokens ({token_unit(tokenizer)})|rate:{objective.rate}|"
        f"mask:{objective.mask_fraction}|random:{objective.random_fraction}|unit:{unit}|"
        f"pairs:{objective.pairs}|length:{max_length}|hidden by seed {HELD_OUT_SEED}"
    )
    return {
        **masked_scores(model, text, objective, next(model.parameters()).device),
        "signature": {"perplexity": signature},
        "split": split_name,
        "examples": len(text.text.flat),
    }


def has_pairs(run: RunSettings) -> bool:
    return isinstance(run.objective, Masked) and run.objective.pairs == "next-sentence"


def check(run: RunSettings) -> None:
    """The model needs the heads of the objective."""
    model, objective = run.model, run.objective
    head = "detect" if isinstance(objective, ReplacedToken) else "masked"
    if model.head is None or model.head.kind != head:
        raise UserError(f"objective={objective.kind} needs model.head={head}")
    if has_pairs(run) and (model.next_sentence is None or (model.embed.segments or 1) < 2):
        raise UserError(
            "objective.pairs=next-sentence needs model.embed.segments=2, model.pooler=tanh and "
            "model.next_sentence.classes=2"
        )


def with_generator(model: nn.Module, run: RunSettings) -> nn.Module:
    """ELECTRA trains a generator together with the model."""
    assert isinstance(model, Bert)
    return Electra(model, run.objective.generator_fraction)


def finetune(config: BertConfig, run: RunSettings) -> BertConfig:
    """With the head of the objective, and for pairs that of next-sentence prediction."""
    head_kind = heads.Detect if isinstance(run.objective, ReplacedToken) else heads.Masked
    paired = has_pairs(run)
    return replace(
        config,
        head=config.head if isinstance(config.head, head_kind) else head_kind(),
        pooler=config.pooler or (run.model.pooler if paired else None),
        next_sentence=run.model.next_sentence if paired else None,
        init="normal",  # small weights for new heads
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
    objectives=(ReplacedToken,),
    recipe="electra-mini",
    wrap=with_generator,
    evaluate=None,
    no_scores="was trained with a generator that is not kept, so it cannot be scored: see the "
    "validation scores in metrics.jsonl, or fine-tune it",
)
