"""Language models: predict the next token, and the perplexity of a text.

L = −Σ_t log P(x_t | x_1, …, x_{t−1})
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.baselines.rnn import LanguageModel, RnnLmConfig
from manyheads.data.batching import Rows
from manyheads.data.language import EncodedText, TextData, Texts, Windows, gather
from manyheads.data.masking import Causal
from manyheads.errors import DataError, UserError, check_at_least
from manyheads.evaluate.scores import Scores, language_scores
from manyheads.models.gpt import GptConfig
from manyheads.tasks.probes import language_probe
from manyheads.tasks.spec import (
    B,
    BaseTask,
    LoadedModel,
    RunSettings,
    TaskSpec,
    token_unit,
    total_nll,
)
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.metrics import Bar
from manyheads.train.step import Loss, cross_entropy


@dataclass(frozen=True)
class LanguageBatch:
    """Windows of a stream, and the next token of each token.

    `count` is the number of predictions. If documents are packed, `documents` numbers the document
    of each token, and a token does not predict the first one of the next document (`loss_mask`).
    """

    tokens: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    count: int
    documents: Int[Tensor, "b t"] | None = None
    loss_mask: Bool[Tensor, "b t"] | None = None

    @staticmethod
    def of(
        text: EncodedText, starts: Rows, length: int, objective: Causal, device: torch.device
    ) -> "LanguageBatch":
        windows = gather(text.flat, starts, length + 1).astype(np.int64)
        both = torch.from_numpy(windows).to(device, non_blocking=True)
        tokens, labels = both[:, :-1], both[:, 1:]
        if objective.packing == "stream":
            return LanguageBatch(tokens, labels, tokens.numel())
        numbers = text.document_of(starts[:, None] + np.arange(length + 1))
        same = numbers[:, 1:] == numbers[:, :-1]
        documents, loss_mask = (torch.from_numpy(x).to(device) for x in (numbers[:, :-1], same))
        return LanguageBatch(tokens, labels, int(same.sum()), documents, loss_mask)


def language_loss(
    model: LanguageModel,
    batch: LanguageBatch,
    smoothing: float = 0.0,
    loss_mask: Bool[Tensor, "b t"] | None = None,
) -> Loss:
    """−log P of the next tokens, with `loss_mask` only of those inside it."""
    hidden = model.hidden(batch.tokens, documents=batch.documents)
    count = batch.count if loss_mask is None else None
    if batch.loss_mask is not None:
        loss_mask = batch.loss_mask if loss_mask is None else loss_mask & batch.loss_mask
    return cross_entropy(
        model.head.enter(hidden),
        model.head.matrix(model.tokens),
        batch.labels,
        bias=model.head.bias,
        smoothing=smoothing,
        loss_mask=loss_mask,
        count=count,
    )


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of equal length that predict every token of a text but the first, each once.

    All but the first window predict only their last `stride` tokens: a stride below the context
    gives every token more context.
    """

    starts: Rows
    new: Rows  # number of tokens at its end that a window predicts
    length: int

    @staticmethod
    def over(tokens: int, context: int, stride: int | None = None) -> "SlidingWindows":
        step = context if stride is None else stride
        check_at_least("stride", step, 1)
        if tokens < 2:
            raise DataError("a text of one token has no perplexity: use a longer text")
        length = min(context, tokens - 1)
        ends = [*range(length, tokens - 1, min(step, length)), tokens - 1]
        return SlidingWindows(np.array(ends) - length, np.diff(ends, prepend=0), length)


def stream_nll(
    model: LanguageModel,
    text: EncodedText,
    groups: Sequence[SlidingWindows],
    objective: Causal,
    batch_tokens: int,
    bar: Bar | None = None,
) -> tuple[float, int]:
    """Σ −log P of the tokens that these windows predict, and their number."""
    device = next(model.parameters()).device

    def losses() -> Iterator[Loss]:
        done = 0
        for windows in groups:
            size, columns = max(1, batch_tokens // windows.length), np.arange(windows.length)
            for begin in range(0, len(windows.starts), size):
                starts, new = (x[begin : begin + size] for x in (windows.starts, windows.new))
                batch = LanguageBatch.of(text, starts, windows.length, objective, device)
                is_new = torch.from_numpy(columns >= windows.length - new[:, None])
                yield language_loss(model, batch, loss_mask=is_new.to(device))
                done += int(new.sum())
                if bar is not None:
                    bar.update(done, "tokens")

    return total_nll(model, losses())


class WindowTask(BaseTask[B]):
    """Tasks that train on windows of a text; a row is the position of a window's first token."""

    text: EncodedText  # the training split

    def set_order(self, tokens: int, length: int, *, moving: bool = True) -> None:
        """Train on windows of `length`, from the first `tokens` of the text."""
        train = self.train
        rows = train.batch_rows or max(1, train.batch_tokens // self.run.model.max_length)
        rows *= train.accumulate
        name = self.text.name
        self.order = Windows(tokens, length, rows, self.run.seed, moving=moving, name=name)
        self.per_epoch = -(-self.order.per_epoch // rows)
        self.digest = self.text.digest()
        self.examples = f"windows of {name} from tokens"

    def number(self, row: int) -> int:
        return row


class LanguageTask(WindowTask[LanguageBatch]):
    """Language modelling for the trainer."""

    def load(self, part: Any, valid: Any) -> None:
        self.length, self.valid_texts = self.run.model.max_length, valid
        self.objective = self.run.objective or Causal()
        self.text = part.encoded(self.tokenizer, ends=True)
        self.valid = valid.encoded(self.tokenizer, ends=True)
        self.set_order(len(self.text.flat) - 1, self.length)  # the last token is only predicted

    def batch(self, rows: Rows) -> LanguageBatch:
        return LanguageBatch.of(self.text, rows, self.length, self.objective, self.device)

    def counts(self, batch: LanguageBatch) -> dict[str, int]:
        return {"tokens": batch.count}

    def losses(self, model: Any, batch: LanguageBatch) -> dict[str, Loss]:
        return {"tokens": language_loss(model, batch, self.train.label_smoothing)}

    def validate(self, model: Any) -> dict[str, float]:
        windows = SlidingWindows.over(len(self.valid.flat), self.length)
        batch_tokens = self.train.batch_tokens
        nll, tokens = stream_nll(model, self.valid, [windows], self.objective, batch_tokens)
        scores = _scores(self.valid_texts, self.tokenizer, nll, tokens)
        del scores["signature"]
        return scores


def _scores(texts: Texts, tokenizer: Tokenizer, nll: float, tokens: int) -> Scores:
    return language_scores(
        nll,
        tokens,
        unit=token_unit(tokenizer),
        characters=texts.characters,
        bytes_=texts.bytes,
        words=texts.words,
    )


def evaluate(
    loaded: LoadedModel, data: TextData, split_name: str, *, stride: int | None = None
) -> Scores:
    """Perplexity, and bits per character and byte, of all of a split."""
    model, run = loaded.model, loaded.run
    objective, context = run.objective or Causal(), run.model.max_length
    check_stride(stride, context)
    texts = data.read(split_name)
    text = texts.encoded(loaded.tokenizer, ends=True)
    windows = SlidingWindows.over(len(text.flat), context, stride)
    with Bar("evaluate", len(text.flat) - 1) as bar:
        batch_tokens = run.decode.forward_tokens
        nll, tokens = stream_nll(model, text, [windows], objective, batch_tokens, bar)
    scores = _scores(texts, loaded.tokenizer, nll, tokens)
    settings = f"context:{context}|stride:{stride or context}|packing:{objective.packing}"
    scores["signature"] = {
        name: f"{signature}|{settings}|first token not predicted"
        for name, signature in scores["signature"].items()
    }
    return scores | {"split": split_name, "examples": tokens}


def check(run: RunSettings) -> None:
    """Packed documents begin anywhere in a row: nothing may depend on its first position."""
    if run.objective is None or run.objective.packing == "stream":
        return
    if not isinstance(run.model, GptConfig):
        problem = f"model={run.model.kind}"
    elif not run.model.attention.exact:
        problem = f"model.attention={run.model.attention.kind}"
    elif run.model.embed.position == "every-layer":
        problem = "model.embed.position=every-layer"
    else:
        return
    raise UserError(f"{problem} cannot separate packed documents: set objective.packing=stream")


def check_stride(stride: int | None, max_length: int) -> None:
    check_at_least("--stride", stride, 1)
    if stride is not None and stride > max_length:
        raise UserError(f"--stride {stride} exceeds the model's context: at most {max_length}")


SPEC = TaskSpec(
    task="language",
    models=(GptConfig, RnnLmConfig),
    data=(TextData,),
    objectives=(Causal,),
    default_objective=Causal(),
    special_tokens=("end",),
    recipe="gpt-mini",
    is_default=True,
    check=check,
    prepare=LanguageTask,
    probe=language_probe,
    evaluate=evaluate,
    scoring=("stride",),
    offers=("generate", "encode"),
    served_as="completions",
    example=lambda run: "The small dog sees",
)
