"""Models of music: language models of its events, transposed in training, scored by piece."""

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.data.batching import Rows, split
from manyheads.data.events import ChoraleGrid, transpose_word
from manyheads.data.language import EncodedText
from manyheads.data.masking import Causal
from manyheads.data.music import Music, MusicData
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, loss_scores
from manyheads.tasks import language
from manyheads.tasks.language import (
    LanguageBatch,
    LanguageTask,
    SlidingWindows,
    check_stride,
    stream_nll,
)
from manyheads.tasks.spec import LoadedModel, RunSettings
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.metrics import Bar

TRANSPOSING = 1  # separates this random stream from others of the same seed and step
Table = Int[Tensor, "shifts v"]
# Music to begin with on the web page, in the words of each encoding.
CHORALE = "p72 p67 p64 p48 p72 p67 p64 p48 p74 p67 p65 p47"
PERFORMANCE = "velocity20 on60 shift25 off60 on64 shift25 off64 on67 shift50 off67"


def check_words(music: Music, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that has no token for a word of the encoding."""
    missing = next((word for word in music.vocabulary if tokenizer.token_id(word) is None), None)
    if missing is not None:
        raise UserError(
            f"'{missing}' is not a token of this model, and music has tokens=words: leave "
            "tokens out, or begin with a model of the same encoding"
        )


def transposition_table(music: Music, tokenizer: Tokenizer, semitones: int) -> Table:
    """Each token transposed by −semitones, …, semitones; −1 if that leaves MIDI's pitches."""
    ids = {word: tokenizer.token_id(word) for word in music.vocabulary}
    table = np.tile(np.arange(tokenizer.vocab_size), (2 * semitones + 1, 1))
    for row, shift in enumerate(range(-semitones, semitones + 1)):
        for word, token in ids.items():
            moved = ids.get(transpose_word(word, shift) or "")
            table[row, token] = -1 if moved is None else moved
    return torch.from_numpy(table)


def transpose(batch: LanguageBatch, table: Table, rows: Int[Tensor, " b"]) -> LanguageBatch:
    """Transpose each window by its row of the table, unless a pitch would leave MIDI's 128."""
    tokens = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
    moved = table[rows[:, None], tokens]
    moved = torch.where((moved < 0).any(dim=1, keepdim=True), tokens, moved)
    return dataclasses.replace(batch, tokens=moved[:, :-1], labels=moved[:, 1:])


def piece_windows(
    text: EncodedText, closing: int, context: int, stride: int | None = None
) -> list[SlidingWindows]:
    """Windows that predict every event of every piece, those of one length together.

    The context of a piece begins with the end token before it. Its own end token and the
    `closing` words before that are not predicted.
    """
    by_length: dict[int, list[SlidingWindows]] = {}
    for begin, stop in pairwise(text.document_starts[1:].tolist()):
        windows = SlidingWindows.over(stop - closing - begin, context, stride)
        moved = dataclasses.replace(windows, starts=windows.starts + begin - 1)
        by_length.setdefault(windows.length, []).append(moved)
    return [
        SlidingWindows(
            np.concatenate([windows.starts for windows in by_length[length]]),
            np.concatenate([windows.new for windows in by_length[length]]),
            length,
        )
        for length in sorted(by_length, reverse=True)
    ]


class MusicTask(LanguageTask):
    """Music modelling for the trainer.

    A window of a chorale begins right before a sixteenth, so that a position tells the voice: 1,
    5, 9, … are the soprano's.
    """

    def load(self, part: Music, valid: Music) -> None:
        check_words(part, self.tokenizer)
        super().load(part, valid)
        self.semitones, self.closing = self.run.data.transpose, valid.closing
        table = transposition_table(part, self.tokenizer, self.semitones)
        self.table = table.to(self.device)

    def rows(self, step: int) -> Rows:
        starts = super().rows(step)
        return starts - starts % self.run.data.encoding.unit

    def batches(self, step: int) -> list[LanguageBatch]:
        batches = super().batches(step)
        if not self.semitones:
            return batches
        random = np.random.default_rng([self.run.seed, step, TRANSPOSING])
        shifts = random.integers(2 * self.semitones + 1, size=len(self.rows(step)))
        parts = split(shifts, self.train.accumulate)
        return [
            transpose(batch, self.table, torch.from_numpy(part).to(self.device))
            for batch, part in zip(batches, parts, strict=True)
        ]

    def validate(self, model: Any) -> dict[str, float]:
        windows = piece_windows(self.valid, self.closing, self.length)
        batch_tokens = self.train.batch_tokens
        return loss_scores(*stream_nll(model, self.valid, windows, Causal(), batch_tokens))


def evaluate(
    loaded: LoadedModel, data: MusicData, split_name: str, *, stride: int | None = None
) -> Scores:
    """The mean −log P of all events of a split, in nats, and the perplexity.

    By default windows move by half of the context, so that every event has at least that much
    context, or all of its piece.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    context, unit = loaded.run.model.max_length, data.encoding.unit
    check_stride(stride, context)
    music = data.read(split_name)
    check_words(music, tokenizer)
    text = EncodedText(music, tokenizer, ends=True)
    step = stride or max(1, context // 2 // unit * unit)  # whole sixteenths of a chorale
    windows = piece_windows(text, music.closing, context, step)
    events = sum(int(group.new.sum()) for group in windows)
    with Bar("evaluate", events) as bar:
        batch_tokens = loaded.run.decode.forward_tokens
        nll, _ = stream_nll(model, text, windows, Causal(), batch_tokens, bar)
    scores = loss_scores(nll, events)
    signature = (
        f"{data.encoding.kind} encoding, {len(music.vocabulary)} words|{events} events of "
        f"{len(music.documents) - 1} pieces, each by itself, its first event after an end "
        "token, what closes and ends it not counted|"
        f"context:{context}|stride:{step}|not transposed"
    )
    return {
        "nll": scores["loss"],
        "perplexity": scores["perplexity"],
        "signature": {"nll": f"nats per event|{signature}", "perplexity": f"e^nll|{signature}"},
        "split": split_name,
        "examples": events,
    }


def check(run: RunSettings) -> None:
    if run.objective is not None and run.objective.packing != "stream":
        raise UserError(
            "objective.packing=documents hides the end token that a piece of music begins after: "
            "choose objective.packing=stream"
        )


def example(run: RunSettings) -> str:
    return CHORALE if isinstance(run.data.encoding, ChoraleGrid) else PERFORMANCE


SPEC = dataclasses.replace(
    language.SPEC,
    data=(MusicData,),
    recipe="jsb-chorales",
    is_default=False,
    check=check,
    prepare=MusicTask,
    evaluate=evaluate,
    pages=lambda run: ["music"],
    example=example,
)
