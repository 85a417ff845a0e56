"""Pretraining on windows of a text: one class for each objective, and what all share.

Masked language models (BERT, RoBERTa) and replaced-token detection (ELECTRA):

    L = −Σ_{i∈M} log P(x_i | x̃) over the masked positions M of a corrupted text x̃

Encoder–decoders that restore corrupted text: span corruption (T5) and denoising (BART).

Bidirectional language models (ELMo), each token from all before it and from all after it:

    L = −Σ_k (log P(t_k | t_1, …, t_{k−1}) + log P(t_k | t_{k+1}, …, t_n))    (Peters et al. 2018)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from manyheads.baselines.elmo import Elmo, ElmoConfig
from manyheads.config import dump, kinds_of
from manyheads.data import masking
from manyheads.data.batching import IGNORE_INDEX, Ragged, Rows, split, to_device
from manyheads.data.language import EncodedText, TextData, Texts, gather, room_for_text
from manyheads.data.masking import (
    Bidirectional,
    Denoising,
    Masked,
    ReplacedToken,
    Rng,
    Run,
    SpanCorruption,
    make_rng,
)
from manyheads.data.translation import Batch
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models import heads
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.electra import Electra
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.tasks.language import WindowTask
from manyheads.tasks.spec import (
    EXAMPLE,
    B,
    LoadedModel,
    RunSettings,
    TaskSpec,
    add_frame,
    token_unit,
)
from manyheads.tasks.translation import check_frame, translation_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss, cross_entropy

HELD_OUT_SEED, HELD_OUT_ROWS = 0, 32
MULTIPLE = 64  # of masked positions in a batch on a GPU: few shapes to capture as CUDA graphs

Tokens = Int[np.ndarray, " _"]  # any number of tokens: texts may differ in length


class ObjectiveText(Generic[B]):
    """A text for one objective: its windows become rows, batches of rows have losses.

    A subclass is made from (texts, tokenizer, run). With `is_static`, the randomness of a row
    depends only on its position in the text.
    """

    text: EncodedText
    length: int  # tokens per window
    is_static = False
    rows: Callable[[Rows, Rng], list[Any]]  # from the starts of windows
    batch: Callable[[Sequence[Any]], B]
    tokens: Callable[[B], int]
    counts: Callable[[B], dict[str, int]]
    losses: Callable[..., dict[str, Loss]]  # (model, batch, smoothing=0.0)
    signature: Callable[[], str]  # describes the perplexity

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        """The losses over the text, which is corrupted in the same way for every run."""
        model.eval()
        device = next(model.parameters()).device
        torch.manual_seed(HELD_OUT_SEED)  # for samples of ELECTRA's generator
        nll, weights = defaultdict[str, float](float), dict[str, float]()
        counts, correct = Counter[str](), Counter[str]()
        starts = np.arange(self.text.count_windows(self.length)) * self.length
        for begin in range(0, len(starts), HELD_OUT_ROWS):
            batch = self._held_out_batch(starts[begin : begin + HELD_OUT_ROWS], begin)
            losses = self.losses(model, to_device(batch, device))
            for name, loss in losses.items():
                nll[name] += float(loss.nll)
                counts[name] += loss.count
                weights[name] = loss.weight
                if loss.correct is not None:
                    correct[name] += int(loss.correct)
        means = {name: nll[name] / max(1, counts[name]) for name in nll}
        scores = {"loss": sum(weights[name] * mean for name, mean in means.items())}
        if len(means) > 1:
            scores |= {f"{name}_loss": mean for name, mean in means.items()}
        first = next(iter(nll))  # predicts tokens
        if counts[first]:
            scores["perplexity"] = perplexity(nll[first], counts[first])
        return scores | {f"{name}_accuracy": correct[name] / counts[name] for name in correct}

    def _held_out_batch(self, starts: Rows, number: int) -> B:
        random = make_rng(HELD_OUT_SEED, masking.HELD_OUT, number)
        return self.batch(self.rows(starts, lambda purpose: random))


class PretrainingTask(WindowTask[B]):
    """An objective for the trainer."""

    def __init__(self, kind: Callable[..., ObjectiveText[B]], *arguments: Any) -> None:
        self.kind = kind
        super().__init__(*arguments)

    def load(self, part: Texts, valid: Texts) -> None:
        self.data, self.valid = (self.kind(x, self.tokenizer, self.run) for x in (part, valid))
        self.text, length = self.data.text, self.data.length
        self.set_order(len(self.text.flat), length, moving=not self.data.is_static)
        self.valid.text.count_windows(length)  # refuse a short text before training

    def micro_batches(self, step: int) -> list[B]:
        data, starts, seed = self.data, self.rows(step), self.run.seed
        rows: list[Any] = []
        for group in np.split(starts, len(starts)) if data.is_static else [starts]:
            number = int(group[0]) if data.is_static else step
            rows += data.rows(group, partial(make_rng, seed, number=number))
        parts = split(np.arange(len(rows)), self.train.accumulate)
        return [data.batch([rows[index] for index in part]) for part in parts]

    def tokens(self, batch: B) -> int:
        return self.data.tokens(batch)

    def counts(self, batch: B) -> dict[str, int]:
        return self.data.counts(batch)

    def losses(self, model: Any, batch: B) -> dict[str, Loss]:
        return self.data.losses(model, batch, self.train.label_smoothing)

    def validate(self, model: Any) -> dict[str, float]:
        return self.valid.scores(model)


def evaluate(
    kind: Callable[..., ObjectiveText[Any]], loaded: LoadedModel, data: TextData, split_name: str
) -> Scores:
    """The losses of a split."""
    text = kind(data.read(split_name), loaded.encoder().tokenizer, loaded.run)
    return {
        **text.scores(loaded.model),
        "signature": {"perplexity": text.signature()},
        "split": split_name,
        "examples": len(text.text.flat),
    }


# --- masked and replaced-token ---


@dataclass(frozen=True)
class MaskedBatch:
    """Texts with masked tokens: `positions` of these in the flattened rows, and their `labels`.

    `other` are the labels of next-sentence prediction: 1 if the second text is from elsewhere.
    `size` counts tokens without padding, `count` the predictions that `padded` did not add.
    """

    tokens: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"] | None
    segments: Int[Tensor, "b t"] | None
    positions: Int[Tensor, " n"]
    labels: Int[Tensor, " n"]
    other: Int[Tensor, " b"] | None
    size: int
    count: int

    def padded(self, multiple: int) -> "MaskedBatch":
        """The same with a multiple of positions, so that shapes repeat."""
        missing = -len(self.positions) % multiple
        positions = F.pad(self.positions, (0, missing))
        labels = F.pad(self.labels, (0, missing), value=IGNORE_INDEX)
        return replace(self, positions=positions, labels=labels)


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
        count=batch.count,
    )


def masked_losses(model: Bert, batch: MaskedBatch, smoothing: float = 0.0) -> dict[str, Loss]:
    """Masked language modelling and, if the texts are pairs, next-sentence prediction.

    −log P of whether the second text follows (class 0) or is from elsewhere (class 1).
    """
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    losses = {"masked": masked_loss(model, hidden, batch, smoothing)}
    if batch.other is None:
        return losses
    logits = model.next_sentence_logits(hidden, batch.real)
    total = F.cross_entropy(logits.float(), batch.other, reduction="sum")
    correct = (logits.argmax(-1) == batch.other).sum()
    next_sentence = Loss(total, total.detach(), len(batch.other), correct=correct)
    return losses | {"next_sentence": next_sentence}


def replaced_losses(model: Electra, batch: MaskedBatch, weight: float) -> dict[str, Loss]:
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
    detection = Loss(total, total.detach(), batch.size, weight, correct.sum())
    return {"masked": masked, "replaced": detection}


class MaskedRow(NamedTuple):
    """A text in its special tokens: the original `tokens`, and the masked `inputs`."""

    tokens: Tokens
    inputs: Tokens
    chosen: Bool[np.ndarray, " _"]  # to be predicted
    segments: Tokens  # 0 in the first text, 1 in the second
    is_next: bool  # the second text follows the first


class MaskedWindows(ObjectiveText[MaskedBatch]):
    """Text for masked language modelling, or for replaced-token detection.

    A row is a window, or for next-sentence prediction a drawn pair of texts.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, run: RunSettings) -> None:
        self.objective: Masked | ReplacedToken = run.objective or Masked()
        self.is_static = self.objective.masking == "static"
        self.tokenizer, self.max_length = tokenizer, run.model.max_length
        self.before, self.after = tokenizer.frame()
        self.text = EncodedText(texts, tokenizer, ends=False)
        pairs = self.objective.pairs == "next-sentence"
        special_tokens = len(self.before) + len(self.after) * (2 if pairs else 1)
        self.length = room_for_text(self.max_length, special_tokens)
        self.pairs = masking.SentencePairs(self.text, texts, room=self.length) if pairs else None

    def rows(self, starts: Rows, rng: Rng) -> list[MaskedRow]:
        """Masked windows at `starts`, or as many pairs."""
        runs, is_next = [Run(starts, starts + self.length)], np.zeros(len(starts), dtype=np.bool_)
        if self.pairs is not None:
            *runs, is_next = self.pairs.draw(len(starts), rng(masking.TEXTS))
        framed = [self._frame(runs, row) for row in range(len(starts))]
        tokens, is_text, segments = zip(*framed, strict=True)
        objective, tokenizer = self.objective, self.tokenizer
        inputs, chosen = masking.mask_tokens(
            _pad(tokens, tokenizer.pad).numpy(),
            _pad(is_text, False).numpy(),
            rng(masking.MASKING),
            rate=objective.rate,
            mask_fraction=objective.mask_fraction,
            random_fraction=objective.random_fraction,
            mask=tokenizer.mask,
            ordinary=tokenizer.ordinary,
        )
        return [
            MaskedRow(ids, inputs[n, : len(ids)], chosen[n, : len(ids)], segments[n], is_next[n])
            for n, ids in enumerate(tokens)
        ]

    def _frame(self, runs: list[Run], row: int) -> tuple[Tokens, Bool[np.ndarray, " _"], Tokens]:
        """The runs of a row in special tokens: ids, which are text, segments."""
        count = len(self.before)
        tokens, is_text, segments = [*self.before], [False] * count, [0] * count
        for segment, run in enumerate(runs):
            text = self.text.flat[run.start[row] : run.stop[row]].tolist()
            tokens += [*text, *self.after]
            is_text += [True] * len(text) + [False] * len(self.after)
            segments += [segment] * (len(text) + len(self.after))
        return np.array(tokens), np.array(is_text), np.array(segments)

    def batch(self, rows: Sequence[MaskedRow]) -> MaskedBatch:
        """Rows padded to the longest."""
        tokens, inputs, chosen, segments, is_next = zip(*rows, strict=True)
        labels, mask = _pad(tokens, self.tokenizer.pad), _pad(chosen, False)
        lengths = torch.tensor([len(ids) for ids in tokens])
        real = torch.arange(labels.shape[1]) < lengths[:, None]
        positions = mask.flatten().nonzero()[:, 0]
        return MaskedBatch(
            _pad(inputs, self.tokenizer.pad),
            None if bool(real.all()) else real,
            _pad(segments, 0) if self.pairs else None,
            positions,
            labels[mask],
            torch.tensor([int(not follows) for follows in is_next]) if self.pairs else None,
            int(lengths.sum()),
            len(positions),
        )

    def tokens(self, batch: MaskedBatch) -> int:
        return batch.size

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        counts = {"masked": batch.count}
        if isinstance(self.objective, ReplacedToken):
            counts["replaced"] = batch.size
        elif batch.other is not None:
            counts["next_sentence"] = len(batch.tokens)
        return counts

    def losses(self, model: Any, batch: MaskedBatch, smoothing: float = 0.0) -> dict[str, Loss]:
        if isinstance(self.objective, ReplacedToken):
            return replaced_losses(model, batch, self.objective.weight)
        return masked_losses(model, batch, smoothing)

    def signature(self) -> str:
        objective, tokenizer = self.objective, self.tokenizer
        assert isinstance(objective, Masked)
        return (
            f"of hidden tokens ({token_unit(tokenizer)})|rate:{objective.rate}|"
            f"mask:{objective.mask_fraction}|random:{objective.random_fraction}|unit:pieces|"
            f"pairs:{objective.pairs}|length:{self.max_length}|hidden by seed {HELD_OUT_SEED}"
        )


def _pad(rows: Sequence[np.ndarray], value: int | bool) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], True, value)


class MaskedTask(PretrainingTask[MaskedBatch]):
    """Masked language modelling and replaced-token detection for the trainer."""

    def micro_batches(self, step: int) -> list[MaskedBatch]:
        batches = super().micro_batches(step)
        if self.device.type == "cuda" and isinstance(self.run.objective, Masked):
            batches = [batch.padded(MULTIPLE) for batch in batches]
        return batches


def evaluate_masked(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """The losses of a masked language model on a split."""
    if not isinstance(loaded.run.model.head, heads.Masked):
        raise UserError(
            f"{loaded.folder} has no head for masked words, which running text is scored by: "
            "use a language model, or one with that head"
        )
    return evaluate(MaskedWindows, loaded, data, split_name)


def has_pairs(run: RunSettings) -> bool:
    return isinstance(run.objective, Masked) and run.objective.pairs == "next-sentence"


def check_heads(run: RunSettings) -> None:
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
    check=check_heads,
    fit_tokenizer=add_frame,
    prepare=partial(MaskedTask, MaskedWindows),
    finetune=finetune,
    evaluate=evaluate_masked,
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


# --- span-corruption and denoising ---


class CorruptedText(ObjectiveText[Batch]):
    """A text of which windows are corrupted; the model has to restore them."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, run: RunSettings) -> None:
        self.run, self.tokenizer = run, tokenizer
        self.frame = SpecialTokens(tokenizer, run.decode).frame
        self.text = EncodedText(texts, tokenizer, ends=False)
        self.length = run.model.max_length - len(self.frame.source([]))
        self.sentinels = np.array(tokenizer.sentinels())

    def rows(self, starts: Rows, rng: Rng) -> list[tuple[list[int], list[int]]]:
        """The source and the target of each window."""
        objective, random = self.run.objective, rng(masking.CORRUPTION)
        windows = gather(self.text.flat, starts, self.length)
        sources: Iterable[np.ndarray]
        targets: Iterable[np.ndarray] = windows
        if isinstance(objective, SpanCorruption):
            rates = {"rate": objective.rate, "mean_length": objective.mean_length}
            masked = masking.sample_spans(len(windows), self.length, random, **rates)
            sources, targets = masking.corrupt_spans(windows, masked, self.sentinels)
        else:
            pairs = zip(starts.tolist(), windows, strict=True)
            sources = [self._add_noise(objective, start, window, random) for start, window in pairs]
        return [
            (self.frame.source(source.tolist()), [*target.tolist(), self.frame.end])
            for source, target in zip(sources, targets, strict=True)
        ]

    def batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
        sources, targets = (Ragged.of(list(side)) for side in zip(*rows, strict=True))
        return Batch.of(sources, targets, np.arange(len(rows)), self.frame.start, self.frame.pad)

    def _add_noise(
        self, objective: Denoising, start: int, row: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """BART's noise: permute sentences, delete tokens, replace each span by one mask."""
        if objective.permute_sentences:
            edges = self.text.sentence_starts
            first, last = np.searchsorted(edges, (start + 1, start + len(row)))
            sentences = np.split(row, edges[first:last] - start)
            order = random.permutation(len(sentences))
            row = np.concatenate([sentences[index] for index in order])
        if objective.delete_rate:
            row = masking.delete(row, random, rate=objective.delete_rate)
        if objective.infill_rate:
            rates = {"rate": objective.infill_rate, "mean_length": objective.mean_length}
            row = masking.infill(row, random, **rates, mask=self.tokenizer.mask)
        return row[: self.length]  # masks for empty spans may have made it longer

    def tokens(self, batch: Batch) -> int:
        return batch.source_tokens + batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": batch.target_tokens}

    def losses(self, model: Any, batch: Batch, smoothing: float = 0.0) -> dict[str, Loss]:
        return {"tokens": translation_loss(model, batch, smoothing)}

    def signature(self) -> str:
        settings = dump(self.run.objective)
        name = kinds_of(self.run.objective)[-1]  # as 0.1 called it: signatures stay comparable
        del settings["kind"]
        return (
            f"of {name} targets ({token_unit(self.tokenizer)})|"
            + "".join(f"{name}:{value}|" for name, value in settings.items())
            + f"length:{self.run.model.max_length}|broken by seed {HELD_OUT_SEED}"
        )


def add_sentinels(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """Add T5's sentinels: one for each span of a row, and one that ends the target."""
    objective, special_tokens = run.objective, SpecialTokens(tokenizer, run.decode).frame.source([])
    length = room_for_text(run.model.max_length, len(special_tokens))
    _, spans = masking.span_sizes(length, rate=objective.rate, mean_length=objective.mean_length)
    missing = range(len(tokenizer.sentinels()), spans + 1)
    return tokenizer.with_specials([f"<extra_id_{number}>" for number in missing])


DENOISING = TaskSpec(
    task="pretraining",
    models=(Seq2SeqConfig,),
    data=(TextData,),
    objectives=(Denoising,),
    special_tokens=("mask",),
    recipe="t5-mini",
    fit_tokenizer=check_frame,
    prepare=partial(PretrainingTask, CorruptedText),
    evaluate=partial(evaluate, CorruptedText),
)
SPANS = replace(
    DENOISING, objectives=(SpanCorruption,), special_tokens=(), fit_tokenizer=add_sentinels
)


# --- bidirectional ---


@dataclass(frozen=True)
class TokenBatch:
    tokens: Int[Tensor, "b t"]


class FramedText(ObjectiveText[TokenBatch]):
    """A text as one stream, of which windows get the tokenizer's special tokens around them."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, run: RunSettings) -> None:
        self.tokenizer, self.max_length = tokenizer, run.model.max_length
        self.before, self.after = tokenizer.frame()
        self.length = room_for_text(self.max_length, len(self.before) + len(self.after))
        self.text = EncodedText(texts, tokenizer, ends=False)

    def rows(self, starts: Rows, rng: Rng) -> list[list[int]]:
        windows = gather(self.text.flat, starts, self.length).tolist()
        return [[*self.before, *window, *self.after] for window in windows]

    def batch(self, rows: Sequence[list[int]]) -> TokenBatch:
        return TokenBatch(torch.tensor(rows))

    def tokens(self, batch: TokenBatch) -> int:
        return batch.tokens.numel()

    def counts(self, batch: TokenBatch) -> dict[str, int]:
        return {"tokens": 2 * len(batch.tokens) * self.length}

    def losses(self, model: Elmo, batch: TokenBatch, smoothing: float = 0.0) -> dict[str, Loss]:
        """Each token of the text is predicted twice; special tokens only give context."""
        forward, backward = (layers[-1] for layers in model.directions(batch.tokens))
        first, last = len(self.before), len(self.before) + self.length
        # Position k predicts k + 1 forward and k − 1 backward.
        states = [forward[:, first - 1 : last - 1], backward[:, first + 1 : last + 1]]
        labels = batch.tokens[:, first:last].repeat(1, 2)
        loss = cross_entropy(
            model.output.enter(model.dropout(torch.cat(states, dim=1))),
            model.output.matrix(model.tokens),
            labels,
            smoothing=smoothing,
            count=labels.numel(),
        )
        return {"tokens": loss}

    def signature(self) -> str:
        unit = token_unit(self.tokenizer)
        return f"of each token forward and backward ({unit})|length:{self.max_length}"


BIDIRECTIONAL = TaskSpec(
    task="pretraining",
    models=(ElmoConfig,),
    data=(TextData,),
    objectives=(Bidirectional,),
    recipe="elmo-mini",
    fit_tokenizer=add_frame,
    prepare=partial(PretrainingTask, FramedText),
    evaluate=partial(evaluate, FramedText),
)
