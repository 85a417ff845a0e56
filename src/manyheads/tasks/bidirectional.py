"""Language models of both directions: each token from all before it, and from all after it.

−Σ_k (log P(t_k | t_1, …, t_{k−1}) + log P(t_k | t_{k+1}, …, t_n))    (Peters et al. 2018)
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.baselines.elmo import Elmo, ElmoConfig
from manyheads.data.batching import split
from manyheads.data.language import EncodedText, TextData, Texts, Windows, gather
from manyheads.data.masking import BothWays
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec, add_frame
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss, cross_entropy

HELD_OUT_ROWS = 32
Starts = Int[np.ndarray, " _"]
Stretches = Int[Tensor, "b t"]


@dataclass(frozen=True)
class StretchBatch:
    tokens: Stretches


class FramedText:
    """A text as one stream, stretches of which are read in the tokenizer's frame."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, max_length: int) -> None:
        self.before, self.after = tokenizer.frame()
        self.room = max_length - len(self.before) - len(self.after)
        if self.room < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        self.text = EncodedText(texts, tokenizer, ends=False)

    def stretches(self, starts: Starts, device: torch.device) -> Stretches:
        rows = gather(self.text.flat, starts, self.room).astype(np.int64)
        sides = [np.tile(np.array(side, dtype=np.int64), (len(rows), 1)) for side in self.frame]
        return torch.from_numpy(np.concatenate([sides[0], rows, sides[1]], axis=1)).to(device)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        return list(self.before), list(self.after)

    def loss(self, model: Elmo, tokens: Stretches, smoothing: float = 0.0) -> Loss:
        """Each token of the text twice; those of the frame are read and not predicted."""
        ahead, back = (layers[-1] for layers in model.directions(tokens))
        first, last = len(self.before), len(self.before) + self.room
        hidden = torch.cat([ahead[:, first - 1 : last - 1], back[:, first + 1 : last + 1]], dim=1)
        wanted = tokens[:, first:last].repeat(1, 2)
        return cross_entropy(
            model.output.enter(model.dropout(hidden)),
            model.output.matrix(model.tokens),
            wanted,
            smoothing=smoothing,
            count=wanted.numel(),
        )


class BidirectionalTask:
    """What the training loop asks of language models of both directions."""

    def __init__(
        self,
        run: RunSettings,
        part: Texts,
        valid: Texts,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, max_length = run.train, run.model.max_length
        self.train, self.device = train, device
        self.data = FramedText(part, tokenizer, max_length)
        self.valid = FramedText(valid, tokenizer, max_length)
        self.digest = self.data.text.digest()
        self.notes = list(dict.fromkeys([*part.notes, *valid.notes]))
        rows = (train.batch_rows or max(1, train.batch_tokens // max_length)) * train.accumulate
        tokens = len(self.data.text.flat)
        self.order = Windows(tokens, self.data.room, rows, run.seed, name=part.name)
        self.per_epoch = -(-self.order.per_epoch // rows)
        self.valid.text.stretches(self.valid.room)  # refuse a short text now, not after hours

    def batches(self, step: int) -> list[StretchBatch]:
        parts = split(self.order.starts(step), self.train.accumulate)
        return [StretchBatch(self.data.stretches(starts, self.device)) for starts in parts]

    def tokens(self, batch: StretchBatch) -> int:
        return batch.tokens.numel()

    def counts(self, batch: StretchBatch) -> dict[str, int]:
        return {"tokens": 2 * len(batch.tokens) * self.data.room}

    def losses(self, model: nn.Module, batch: StretchBatch) -> dict[str, Loss]:
        assert isinstance(model, Elmo)
        return {"tokens": self.data.loss(model, batch.tokens, self.train.label_smoothing)}

    def describe(self, step: int) -> str:
        starts = self.order.starts(step)[:5].tolist()
        return f"stretches of {self.data.text.name} from tokens {', '.join(map(str, starts))} …"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Elmo)
        return bidirectional_scores(model, self.valid)


@torch.no_grad()
def bidirectional_scores(model: Elmo, text: FramedText) -> dict[str, float]:
    """The mean of both directions over all whole stretches of a text."""
    model.eval()
    device = next(model.parameters()).device
    whole, nll, count = text.text.stretches(text.room), 0.0, 0
    for begin in range(0, whole, HELD_OUT_ROWS):
        starts = np.arange(begin, min(begin + HELD_OUT_ROWS, whole)) * text.room
        loss = text.loss(model, text.stretches(starts, device))
        nll, count = nll + float(loss.nll), count + loss.count
    return {"loss": nll / count, "perplexity": perplexity(nll, count)}


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """The losses on a split."""
    model, tokenizer = loaded.torch_model(), loaded.encoder().tokenizer
    texts = data.read(split_name)
    text = FramedText(texts, tokenizer, model.config.max_length)
    scores: Scores = dict(bidirectional_scores(model, text))
    unit = f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"
    said = f"of each token forward and backward ({unit})|length:{model.config.max_length}"
    scores["signature"] = {"perplexity": said}
    return scores | {"split": split_name, "examples": len(text.text.flat)}


SPEC = TaskSpec(
    task="pretraining",
    models=(ElmoConfig,),
    data=(TextData,),
    objectives=(BothWays,),
    recipe="elmo-mini",
    fit_tokenizer=add_frame,
    prepare=BidirectionalTask,
    evaluate=evaluate,
)
