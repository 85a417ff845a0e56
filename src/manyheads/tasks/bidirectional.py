"""Bidirectional language models: each token from all before it, and from all after it.

L = −Σ_k (log P(t_k | t_1, …, t_{k−1}) + log P(t_k | t_{k+1}, …, t_n))    (Peters et al. 2018)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.baselines.elmo import Elmo, ElmoConfig
from manyheads.data.batching import Rows
from manyheads.data.language import EncodedText, TextData, Texts, gather
from manyheads.data.masking import Bidirectional
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, loss_scores
from manyheads.tasks.language import WindowTask, held_out_windows
from manyheads.tasks.spec import LoadedModel, TaskSpec, add_frame, token_unit, total_nll
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss, cross_entropy


@dataclass(frozen=True)
class TokenBatch:
    tokens: Int[Tensor, "b t"]


class FramedText:
    """A text as one stream, of which windows get the tokenizer's special tokens around them."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, max_length: int) -> None:
        self.before, self.after = tokenizer.frame()
        self.length = max_length - len(self.before) - len(self.after)
        if self.length < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        self.text = EncodedText(texts, tokenizer, ends=False)

    def batch(self, starts: Rows, device: torch.device) -> TokenBatch:
        windows = gather(self.text.flat, starts, self.length).astype(np.int64)
        rows = [[*self.before, *window, *self.after] for window in windows.tolist()]
        return TokenBatch(torch.tensor(rows, device=device))

    def loss(self, model: Elmo, batch: TokenBatch, smoothing: float = 0.0) -> Loss:
        """Each token of the text is predicted twice; special tokens only give context."""
        forward, backward = (layers[-1] for layers in model.directions(batch.tokens))
        first, last = len(self.before), len(self.before) + self.length
        # Position k predicts k + 1 forward and k − 1 backward.
        states = [forward[:, first - 1 : last - 1], backward[:, first + 1 : last + 1]]
        labels = batch.tokens[:, first:last].repeat(1, 2)
        return cross_entropy(
            model.output.enter(model.dropout(torch.cat(states, dim=1))),
            model.output.matrix(model.tokens),
            labels,
            smoothing=smoothing,
            count=labels.numel(),
        )

    def scores(self, model: Elmo) -> dict[str, float]:
        """The mean of both directions over all windows of the text."""
        device = next(model.parameters()).device
        windows = held_out_windows(self.text, self.length)
        losses = (self.loss(model, self.batch(starts, device)) for starts, _ in windows)
        return loss_scores(*total_nll(model, losses))


class BidirectionalTask(WindowTask[TokenBatch]):
    """Bidirectional language modelling for the trainer."""

    def load(self, part: Texts, valid: Texts) -> None:
        self.data, self.valid = (
            FramedText(texts, self.tokenizer, self.run.model.max_length) for texts in (part, valid)
        )
        self.text = self.data.text
        self.set_order(len(self.text.flat), self.data.length)
        self.valid.text.count_windows(self.valid.length)  # refuse a short text before training

    def batch(self, rows: Rows) -> TokenBatch:
        return self.data.batch(rows, self.device)

    def counts(self, batch: TokenBatch) -> dict[str, int]:
        return {"tokens": 2 * len(batch.tokens) * self.data.length}

    def losses(self, model: Any, batch: TokenBatch) -> dict[str, Loss]:
        return {"tokens": self.data.loss(model, batch, self.train.label_smoothing)}

    def validate(self, model: Any) -> dict[str, float]:
        return self.valid.scores(model)


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """Loss and perplexity of a split."""
    model, tokenizer = loaded.torch_model(), loaded.encoder().tokenizer
    max_length = model.config.max_length
    text = FramedText(data.read(split_name), tokenizer, max_length)
    unit = token_unit(tokenizer)
    signature = f"of each token forward and backward ({unit})|length:{max_length}"
    return {
        **text.scores(model),
        "signature": {"perplexity": signature},
        "split": split_name,
        "examples": len(text.text.flat),
    }


SPEC = TaskSpec(
    task="pretraining",
    models=(ElmoConfig,),
    data=(TextData,),
    objectives=(Bidirectional,),
    recipe="elmo-mini",
    fit_tokenizer=add_frame,
    prepare=BidirectionalTask,
    evaluate=evaluate,
)
