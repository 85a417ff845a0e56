"""Encoder–decoders that restore corrupted text: T5's span corruption and BART's denoising."""

from dataclasses import replace
from typing import Any

import numpy as np

from manyheads.config import dump, kinds_of
from manyheads.data.batching import Ragged, Rows, split
from manyheads.data.language import EncodedText, TextData, Texts, gather
from manyheads.data.masking import (
    Denoising,
    SpanCorruption,
    corrupt_spans,
    delete,
    infill,
    permute,
    sample_spans,
    span_sizes,
)
from manyheads.data.mlm import CORRUPTION, make_rng
from manyheads.data.translation import Batch
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, loss_scores
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.tasks.language import HELD_OUT_SEED, WindowTask, held_out_windows
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec, token_unit, total_nll
from manyheads.tasks.translation import check_frame, translation_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss


class CorruptedText:
    """A text of which windows are corrupted; the model has to restore them."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, run: RunSettings) -> None:
        self.objective, self.tokenizer = run.objective, tokenizer
        self.frame = SpecialTokens(tokenizer, run.decode).frame
        self.text = EncodedText(texts, tokenizer, ends=False)
        self.length = run.model.max_length - len(self.frame.source([]))
        self.sentinels = np.array(tokenizer.sentinels())

    def batches(self, starts: Rows, random: np.random.Generator, parts: int = 1) -> list[Batch]:
        """Corrupted windows; they do not depend on the number of parts."""
        objective, frame = self.objective, self.frame
        windows = gather(self.text.flat, starts, self.length)
        if isinstance(objective, SpanCorruption):
            rates = {"rate": objective.rate, "mean_length": objective.mean_length}
            positions = sample_spans(len(windows), self.length, random, **rates)
            sources, targets = map(list, corrupt_spans(windows, positions, self.sentinels))
        else:
            pairs = zip(starts.tolist(), windows, strict=True)
            sources = [self._add_noise(objective, start, window, random) for start, window in pairs]
            targets = list(windows)
        source = Ragged.of([frame.source(row.tolist()) for row in sources])
        target = Ragged.of([[*row.tolist(), frame.end] for row in targets])
        return [
            Batch.of(source, target, rows, frame.start, frame.pad)
            for rows in split(np.arange(len(starts)), parts)
        ]

    def _add_noise(
        self, objective: Denoising, start: int, row: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """BART's noise: permute sentences, delete tokens, replace each span by one mask."""
        if objective.permute_sentences:
            edges = self.text.sentence_starts
            first, last = np.searchsorted(edges, (start + 1, start + len(row)))
            row = np.concatenate(permute(np.split(row, edges[first:last] - start), random))
        if objective.delete_rate:
            row = delete(row, random, rate=objective.delete_rate)
        if objective.infill_rate:
            rates = {"rate": objective.infill_rate, "mean_length": objective.mean_length}
            row = infill(row, random, **rates, mask=self.tokenizer.mask)
        return row[: self.length]  # masks for empty spans may have made it longer

    def scores(self, model: Seq2Seq) -> dict[str, float]:
        """The loss of held-out text, corrupted in the same way for every run."""
        device = next(model.parameters()).device
        windows = held_out_windows(self.text, self.length)
        batches = (self.batches(starts, random)[0].to(device) for starts, random in windows)
        losses = (translation_loss(model, batch, 0.0) for batch in batches)
        return loss_scores(*total_nll(model, losses))


class DenoisingTask(WindowTask[Batch]):
    """Span corruption and denoising for the trainer."""

    def load(self, part: Texts, valid: Texts) -> None:
        self.data = CorruptedText(part, self.tokenizer, self.run)
        self.valid = CorruptedText(valid, self.tokenizer, self.run)
        self.text = self.data.text
        self.set_order(len(self.text.flat), self.data.length)
        self.valid.text.count_windows(self.valid.length)  # refuse a short text before training

    def batches(self, step: int) -> list[Batch]:
        random = make_rng(self.run.seed, CORRUPTION, step)
        batches = self.data.batches(self.rows(step), random, self.train.accumulate)
        return [batch.to(self.device) for batch in batches]

    def tokens(self, batch: Batch) -> int:
        return batch.source_tokens + batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": batch.target_tokens}

    def losses(self, model: Any, batch: Batch) -> dict[str, Loss]:
        return {"tokens": translation_loss(model, batch, self.train.label_smoothing)}

    def validate(self, model: Any) -> dict[str, float]:
        return self.valid.scores(model)


def evaluate(loaded: LoadedModel, data: TextData, split_name: str) -> Scores:
    """Loss and perplexity of the targets of a split."""
    run, model, tokenizer = loaded.run, loaded.torch_model(), loaded.tokenizer
    text = CorruptedText(data.read(split_name), tokenizer, run)
    settings = dump(run.objective)
    name = kinds_of(run.objective)[-1]  # as 0.1 called it: signatures stay comparable
    del settings["kind"]
    signature = (
        f"of {name} targets ({token_unit(tokenizer)})|"
        + "".join(f"{name}:{value}|" for name, value in settings.items())
        + f"length:{model.config.max_length}|broken by seed {HELD_OUT_SEED}"
    )
    return {
        **text.scores(model),
        "signature": {"perplexity": signature},
        "split": split_name,
        "examples": len(text.text.flat),
    }


def add_sentinels(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """Add T5's sentinels: one for each span of a row, and one that ends the target."""
    objective, max_length = run.objective, run.model.max_length
    length = max_length - len(SpecialTokens(tokenizer, run.decode).frame.source([]))
    if length < 2:
        raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
    _, spans = span_sizes(length, rate=objective.rate, mean_length=objective.mean_length)
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
SPANS = replace(
    DENOISING, objectives=(SpanCorruption,), special_tokens=(), fit_tokenizer=add_sentinels
)
