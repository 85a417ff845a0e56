"""Language models: the next token of a stream of text, and perplexity over all of a text."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.data.batching import split
from manyheads.data.language import EncodedText, TextData, Texts, Windows, gather
from manyheads.data.masking import Causal
from manyheads.errors import DataError, UserError, check_at_least
from manyheads.evaluate.scores import Scores, language_scores
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.metrics import Bar
from manyheads.train.step import Loss, cross_entropy

Places = Int[np.ndarray, " _"]


@dataclass(frozen=True)
class LanguageBatch:
    """Stretches of a stream, and what follows each token.

    Of packed documents also which document each token is of, and where what follows is of the same
    one: a document does not predict the next. `count` is how many tokens are predicted.
    """

    tokens: Int[Tensor, "b t"]
    wanted: Int[Tensor, "b t"]
    count: int
    documents: Int[Tensor, "b t"] | None = None
    inside: Bool[Tensor, "b t"] | None = None

    @staticmethod
    def of(
        text: EncodedText, starts: Places, length: int, objective: Causal, device: torch.device
    ) -> "LanguageBatch":
        stretches = gather(text.flat, starts, length + 1).astype(np.int64)
        whole = torch.from_numpy(stretches).to(device, non_blocking=True)
        tokens, wanted = whole[:, :-1], whole[:, 1:]
        if objective.packing == "stream":
            return LanguageBatch(tokens, wanted, tokens.numel())
        numbers = text.document_of(starts[:, None] + np.arange(length + 1))
        inside = numbers[:, 1:] == numbers[:, :-1]
        documents, seen = (torch.from_numpy(x).to(device) for x in (numbers[:, :-1], inside))
        return LanguageBatch(tokens, wanted, int(inside.sum()), documents, seen)


def language_loss(
    model: Gpt,
    batch: LanguageBatch,
    smoothing: float = 0.0,
    scored: Bool[Tensor, "b t"] | None = None,
) -> Loss:
    """−log P of what follows each token, or each of the `scored` ones."""
    hidden = model.hidden(batch.tokens, documents=batch.documents)
    count = batch.count if scored is None else None
    if batch.inside is not None:
        scored = batch.inside if scored is None else scored & batch.inside
    return cross_entropy(
        model.head.enter(hidden),
        model.head.matrix(model.tokens),
        batch.wanted,
        bias=model.head.bias,
        smoothing=smoothing,
        loss_mask=scored,
        count=count,
    )


@dataclass(frozen=True)
class Passes:
    """Stretches that together predict every token but the first, each once.

    After the first stretch each predicts its last `stride` tokens: with a stride of the context
    the stretches do not overlap, with a smaller one every token has more before it.
    """

    starts: Places
    new: Places  # how many tokens at its end a stretch is the first to predict
    length: int

    @staticmethod
    def over(tokens: int, context: int, stride: int | None = None) -> "Passes":
        step = context if stride is None else stride
        check_at_least("stride", step, 1)
        length = min(context, tokens - 1)
        ends = [*range(length, tokens - 1, min(step, length)), tokens - 1]
        new = np.diff(ends, prepend=0)
        return Passes(np.array(ends) - length, new, length)


def stream_nll(
    model: Gpt,
    text: EncodedText,
    objective: Causal,
    *,
    batch_tokens: int,
    stride: int | None = None,
    bar: Bar | None = None,
) -> tuple[float, int]:
    """Summed −log P of a stream, and the tokens that were predicted."""
    if len(text.flat) < 2:
        raise DataError(f"{text.name}: one token has nothing before it; give more text")
    passes = Passes.over(len(text.flat), model.config.max_length, stride)
    return passes_nll(model, text, passes, objective, batch_tokens=batch_tokens, bar=bar)


def passes_nll(
    model: Gpt,
    text: EncodedText,
    passes: Passes,
    objective: Causal,
    *,
    batch_tokens: int,
    bar: Bar | None = None,
    done: int = 0,
) -> tuple[float, int]:
    """Summed −log P of what these stretches predict, and how much that is.

    `done` is what other stretches have predicted before, for the bar.
    """
    model.eval()
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    size = max(1, batch_tokens // passes.length)
    columns = torch.arange(passes.length, device=device)
    with torch.no_grad():
        for begin in range(0, len(passes.starts), size):
            some = slice(begin, begin + size)
            batch = LanguageBatch.of(text, passes.starts[some], passes.length, objective, device)
            known = passes.length - torch.from_numpy(passes.new[some]).to(device)
            loss = language_loss(model, batch, scored=columns >= known[:, None])
            total, tokens = total + float(loss.nll), tokens + loss.count
            if bar is not None:
                bar.update(done + int(passes.new[: begin + size].sum()), "tokens")
    return total, tokens


class LanguageTask:
    """What the training loop asks of a language model."""

    def __init__(
        self,
        run: RunSettings,
        part: Texts,
        valid: Texts,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, self.length = run.train, run.model.max_length
        self.objective, self.train, self.device = run.objective or Causal(), train, device
        self.tokenizer, self.valid_texts = tokenizer, valid
        self.data = EncodedText(part, tokenizer, ends=True)
        self.valid = EncodedText(valid, tokenizer, ends=True)
        self.digest = self.data.digest()
        self.notes = list(dict.fromkeys([*part.notes, *valid.notes]))
        rows = (train.batch_rows or max(1, train.batch_tokens // self.length)) * train.accumulate
        # A stretch has one token more than it reads, the first of the next.
        self.order = Windows(len(self.data.flat) - 1, self.length, rows, run.seed, name=part.name)
        self.per_epoch = -(-self.order.per_epoch // rows)

    def batches(self, step: int) -> list[LanguageBatch]:
        parts = split(self.order.starts(step), self.train.accumulate)
        return [
            LanguageBatch.of(self.data, starts, self.length, self.objective, self.device)
            for starts in parts
        ]

    def tokens(self, batch: LanguageBatch) -> int:
        return batch.tokens.numel()

    def counts(self, batch: LanguageBatch) -> dict[str, int]:
        return {"tokens": batch.count}

    def losses(self, model: nn.Module, batch: LanguageBatch) -> dict[str, Loss]:
        assert isinstance(model, Gpt)
        return {"tokens": language_loss(model, batch, self.train.label_smoothing)}

    def describe(self, step: int) -> str:
        starts = self.order.starts(step)[:5].tolist()
        return f"stretches of {self.data.name} from tokens {', '.join(map(str, starts))} …"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Gpt)
        nll, tokens = stream_nll(
            model, self.valid, self.objective, batch_tokens=self.train.batch_tokens
        )
        scores = _scores(self.valid_texts, self.tokenizer, nll, tokens)
        return {name: value for name, value in scores.items() if isinstance(value, float)}


def _scores(texts: Texts, tokenizer: Tokenizer, nll: float, tokens: int) -> Scores:
    return language_scores(
        nll,
        tokens,
        unit=f"{tokenizer.kind}, {tokenizer.vocab_size} tokens",
        characters=texts.characters,
        bytes_=texts.bytes,
        words=texts.words,
    )


def evaluate(
    loaded: LoadedModel, data: TextData, split_name: str, *, stride: int | None = None
) -> Scores:
    """Perplexity, and bits per character and byte, of all of a split."""
    model, tokenizer = loaded.torch_model(), loaded.tokenizer
    objective, context = loaded.run.objective or Causal(), loaded.run.model.max_length
    check_stride(stride, context)
    texts = data.read(split_name)
    text = EncodedText(texts, tokenizer, ends=True)
    with Bar("evaluate", len(text.flat) - 1) as bar:
        at_once = loaded.run.decode.read_at_once
        nll, tokens = stream_nll(
            model, text, objective, batch_tokens=at_once, stride=stride, bar=bar
        )
    scores = _scores(texts, tokenizer, nll, tokens)
    how = f"context:{context}|stride:{stride or context}|packing:{objective.packing}|"
    how += "first token not predicted"
    scores["signature"] = {name: f"{said}|{how}" for name, said in scores["signature"].items()}
    return scores | {"split": split_name, "examples": tokens}


def check(run: RunSettings) -> None:
    """Packed documents start anywhere in a row, so nothing may count from its first position."""
    if run.objective is None or run.objective.packing == "stream":
        return
    core = run.model.attention
    if not getattr(core, "keeps_apart", core.exact):
        raise UserError(
            f"model.attention={core.kind} cannot separate packed documents: choose "
            "objective.packing=stream, or another model.attention"
        )
    if getattr(run.model.position, "period", None):
        raise UserError(
            "model.position.period counts from the beginning of a row, and packed documents "
            "begin anywhere in it: choose objective.packing=stream"
        )


def check_stride(stride: int | None, max_length: int) -> None:
    check_at_least("--stride", stride, 1)
    if stride is not None and stride > max_length:
        raise UserError(
            f"--stride {stride} is longer than the {max_length} tokens that the model reads at "
            "once: choose at most that"
        )


SPEC = TaskSpec(
    task="language",
    models=(GptConfig,),
    data=(TextData,),
    objectives=(Causal,),
    default_objective=Causal(),
    special_tokens=("end",),
    recipe="gpt-mini",
    is_default=True,
    check=check,
    prepare=LanguageTask,
    evaluate=evaluate,
    takes_stride=True,
    offers=("generate", "encode"),
    served_as="completions",
    example=lambda run: "The small dog sees",
)
