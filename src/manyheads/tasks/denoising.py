"""Encoder–decoders that restore text: T5's span corruption and BART's denoising."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from manyheads.config import dump
from manyheads.data.batching import Ragged, Rows, split
from manyheads.data.language import EncodedText, TextData, Texts, Windows, gather
from manyheads.data.masking import (
    Denoising,
    Spans,
    corrupt_spans,
    delete,
    infill,
    permute,
    span_places,
    span_sizes,
)
from manyheads.data.mlm import BREAKING, HELD_OUT, drawing
from manyheads.data.translation import Batch, Frame
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec
from manyheads.tasks.translation import check_frame, translation_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss

# What is broken for validation is the same for every run: by this seed, so many rows at a time.
HELD_OUT_SEED, HELD_OUT_ROWS = 0, 32


class BrokenText:
    """A text of which stretches are broken, and the original is to be written."""

    def __init__(
        self,
        texts: Texts,
        tokenizer: Tokenizer,
        objective: Spans | Denoising,
        frame: Frame,
        *,
        max_length: int,
    ) -> None:
        self.objective, self.tokenizer, self.name = objective, tokenizer, texts.name
        self.frame = frame
        self.text = EncodedText(texts, tokenizer, ends=False)
        self.length = max_length - len(frame.source([]))  # what stands around it
        self.sentinels = np.array(tokenizer.sentinels())

    def batches(self, starts: Rows, random: np.random.Generator, parts: int = 1) -> list[Batch]:
        """Stretches of the text, broken by these random numbers whatever they are parted into."""
        whole = gather(self.text.flat, starts, self.length)
        if isinstance(self.objective, Spans):
            wanted = self.objective
            rows, length = whole.shape
            sizes = {"rate": wanted.rate, "mean_length": wanted.mean_length}
            places = span_places(rows, length, random, **sizes)
            sources, targets = map(list, corrupt_spans(whole, places, self.sentinels))
        else:
            sources = [
                self._noise(int(start), row, random)
                for start, row in zip(starts, whole, strict=True)
            ]
            targets = list(whole)
        frame = self.frame
        source = Ragged.of([frame.source(row.tolist()) for row in sources])
        target = Ragged.of([[*row.tolist(), frame.end] for row in targets])
        return [
            Batch.of(source, target, rows, frame.start, frame.pad)
            for rows in split(np.arange(len(starts)), parts)
        ]

    def _noise(self, start: int, row: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """BART's: sentences in another order, tokens gone, stretches behind one mask each."""
        wanted = self.objective
        assert isinstance(wanted, Denoising)
        if wanted.permute_sentences:
            edges = self.text.sentence_starts
            first, last = np.searchsorted(edges, (start + 1, start + len(row)))
            inside = edges[first:last] - start
            row = np.concatenate(permute(np.split(row, inside), random))
        if wanted.delete_rate:
            row = delete(row, random, rate=wanted.delete_rate)
        if wanted.infill_rate:
            settings = {"rate": wanted.infill_rate, "mean_length": wanted.mean_length}
            row = infill(row, random, **settings, mask=self.tokenizer.mask)
        return row[: self.length]  # masks for empty stretches may have made it longer


class DenoisingTask:
    """What the training loop asks of span corruption and denoising."""

    def __init__(
        self,
        run: RunSettings,
        part: Texts,
        valid: Texts,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, objective, max_length = run.train, run.objective, run.model.max_length
        self.train, self.device, self.seed = train, device, run.seed
        frame = SpecialTokens(tokenizer, run.decode).frame
        self.data = BrokenText(part, tokenizer, objective, frame, max_length=max_length)
        self.valid = BrokenText(valid, tokenizer, objective, frame, max_length=max_length)
        self.rows = train.batch_rows or max(1, train.batch_tokens // max_length)
        tokens, rows = len(self.data.text.flat), self.rows * train.accumulate
        self.order = Windows(tokens, self.data.length, rows, run.seed, name=part.name)
        self.per_epoch = -(-self.order.per_epoch // rows)
        self.digest = self.data.text.digest()
        self.notes = list(dict.fromkeys([*part.notes, *valid.notes]))
        self.valid.text.stretches(self.valid.length)  # refuse a short text now, not after hours

    def batches(self, step: int) -> list[Batch]:
        starts = self.order.starts(step)
        random = drawing(self.seed, BREAKING, step)
        parts = self.data.batches(starts, random, self.train.accumulate)
        return [part.to(self.device) for part in parts]

    def tokens(self, batch: Batch) -> int:
        return batch.source_tokens + batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": batch.target_tokens}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Loss]:
        assert isinstance(model, Seq2Seq)
        return {"tokens": translation_loss(model, batch, self.train.label_smoothing)}

    def describe(self, step: int) -> str:
        starts = self.order.starts(step)[:5].tolist()
        return f"stretches of {self.data.name} from tokens {', '.join(map(str, starts))} …"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Seq2Seq)
        return restored_scores(model, self.valid)


@torch.no_grad()
def restored_scores(model: Seq2Seq, text: BrokenText) -> dict[str, float]:
    """The loss on held-out text, broken in the same way for every run."""
    model.eval()
    device = next(model.parameters()).device
    whole = text.text.stretches(text.length)
    nll, tokens = 0.0, 0
    for begin in range(0, whole, HELD_OUT_ROWS):
        starts = np.arange(begin, min(begin + HELD_OUT_ROWS, whole)) * text.length
        random = drawing(HELD_OUT_SEED, HELD_OUT, begin)
        [batch] = text.batches(starts, random)
        loss = translation_loss(model, batch.to(device), 0.0)
        nll, tokens = nll + float(loss.nll), tokens + loss.count
    return {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """How well the model restores a split."""
    run, model, tokenizer = loaded.run, loaded.torch_model(), loaded.tokenizer
    objective, frame = run.objective, SpecialTokens(tokenizer, run.decode).frame
    texts = data.read(split_name)
    text = BrokenText(texts, tokenizer, objective, frame, max_length=run.model.max_length)
    scores: Scores = dict(restored_scores(model, text))
    unit = f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"
    how = "|".join(f"{name}:{value}" for name, value in dump(objective).items() if name != "kind")
    said = (
        f"of {type(objective).kind} targets ({unit})|{how}|length:{model.config.max_length}|"
        f"broken by seed {HELD_OUT_SEED}"
    )
    scores["signature"] = {"perplexity": said}
    return scores | {"split": split_name, "examples": len(text.text.flat)}


def add_sentinels(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """T5's objective: one sentinel for each span of a row, and one that ends the target."""
    wanted, max_length = run.objective, run.model.max_length
    length = max_length - len(SpecialTokens(tokenizer, run.decode).frame.source([]))
    if length < 2:
        raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
    _, spans = span_sizes(length, rate=wanted.rate, mean_length=wanted.mean_length)
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
    prepare=DenoisingTask,
    evaluate=evaluate,
)
SPANS = replace(DENOISING, objectives=(Spans,), special_tokens=(), fit_tokenizer=add_sentinels)
