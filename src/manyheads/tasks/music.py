"""Models of music: language models of its words, transposed in training, scored piece by piece."""

import dataclasses
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.data.batching import split
from manyheads.data.events import ChoraleGrid, transposed
from manyheads.data.language import EncodedText
from manyheads.data.masking import Causal
from manyheads.data.music import Music, MusicData
from manyheads.errors import DataError, UserError
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models.gpt import Gpt
from manyheads.tasks import language
from manyheads.tasks.language import LanguageBatch, LanguageTask, Passes, check_stride, passes_nll
from manyheads.tasks.spec import LoadedModel, RunSettings
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.metrics import Bar

TRANSPOSING = 1  # tells these draws from others of the same seed
Table = Int[Tensor, "moves v"]
Shifts = Int[np.ndarray, " rows"]
# Music to begin with on the web page, in the words of each encoding.
CHORALE = "p72 p67 p64 p48 p72 p67 p64 p48 p74 p67 p65 p47"
PERFORMANCE = "velocity20 on60 shift25 off60 on64 shift25 off64 on67 shift50 off67"


def check_words(music: Music, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer for which a word of the encoding is not one token."""
    missing = next((word for word in music.vocabulary if tokenizer.token_id(word) is None), None)
    if missing is not None:
        raise UserError(
            f"'{missing}' is no token of this model, and music has tokens=words: leave tokens out, "
            "or begin with a model of the same encoding"
        )


def check_enough(music: Music, length: int) -> None:
    """Refuse music with less than one stretch to train on: every event and end but the first."""
    tokens = music.words + len(music.documents) - 1
    if tokens < length:
        raise DataError(
            f"{music.name}: {tokens} tokens are too few to train on stretches of {length}: give "
            "more or longer pieces, or lower model.max_length"
        )


def moves(music: Music, tokenizer: Tokenizer, furthest: int) -> Table:
    """What each token is once it is transposed by −furthest, …, furthest; −1 is no pitch."""
    numbers = {word: tokenizer.token_id(word) for word in music.vocabulary}
    table = np.tile(np.arange(tokenizer.vocab_size), (2 * furthest + 1, 1))
    for row, semitones in enumerate(range(-furthest, furthest + 1)):
        for word, number in numbers.items():
            moved = numbers.get(transposed(word, semitones) or "")
            table[row, number] = -1 if moved is None else moved
    return torch.from_numpy(table)


def move(batch: LanguageBatch, table: Table, rows: Int[Tensor, " b"]) -> LanguageBatch:
    """Each stretch by the row of the table that is given for it.

    One in which a pitch would leave MIDI's 128 stays as it is.
    """
    whole = torch.cat([batch.tokens, batch.wanted[:, -1:]], dim=1)
    moved = table[rows[:, None], whole]
    moved = torch.where((moved < 0).any(dim=1, keepdim=True), whole, moved)
    return dataclasses.replace(batch, tokens=moved[:, :-1], wanted=moved[:, 1:])


def pieces_nll(
    model: Gpt,
    text: EncodedText,
    *,
    closing: int,
    batch_tokens: int,
    stride: int | None = None,
    bar: Bar | None = None,
) -> tuple[float, int]:
    """Summed −log P of every event of every piece, and how many these are.

    A piece is read by itself, after the end token that every piece comes after; that, its own end
    and the `closing` words before it are not predicted.
    """
    groups: dict[int, list[Passes]] = {}
    for begin, stop in pairwise(text.document_starts[1:].tolist()):
        passes = Passes.over(stop - closing - begin, model.config.max_length, stride)
        moved = dataclasses.replace(passes, starts=passes.starts + begin - 1)
        groups.setdefault(passes.length, []).append(moved)
    total, tokens = 0.0, 0
    for length, group in sorted(groups.items(), reverse=True):
        starts, new = (
            np.concatenate([getattr(one, x) for one in group]) for x in ("starts", "new")
        )
        nll, count = passes_nll(
            model,
            text,
            Passes(starts, new, length),
            Causal(),
            batch_tokens=batch_tokens,
            bar=bar,
            done=tokens,
        )
        total, tokens = total + nll, tokens + count
    return total, tokens


class MusicTask(LanguageTask):
    """What the training loop asks of a model of music.

    Of a chorale a stretch begins right before a sixteenth: so a position says which voice it is
    of, the soprano's being 1, 5, 9 and on.
    """

    def __init__(
        self,
        run: RunSettings,
        part: Music,
        valid: Music,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        check_words(part, tokenizer)
        check_enough(part, run.model.max_length)
        super().__init__(run, part, valid, tokenizer, device)
        self.seed, self.unit, self.furthest = run.seed, run.data.encoding.unit, run.data.transpose
        self.closing = valid.closing
        self.table = moves(part, tokenizer, self.furthest).to(device)

    def batches(self, step: int) -> list[LanguageBatch]:
        starts = self.order.starts(step)
        draw = np.random.default_rng([self.seed, step, TRANSPOSING])
        rows = draw.integers(2 * self.furthest + 1, size=len(starts))
        return [
            self._batch(*part)
            for part in zip(
                split(starts - starts % self.unit, self.train.accumulate),
                split(rows, self.train.accumulate),
                strict=True,
            )
        ]

    def _batch(self, starts: Shifts, rows: Shifts) -> LanguageBatch:
        batch = LanguageBatch.of(self.data, starts, self.length, self.objective, self.device)
        if not self.furthest:
            return batch
        return move(batch, self.table, torch.from_numpy(rows).to(self.device))

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Gpt)
        tokens = self.train.batch_tokens
        nll, events = pieces_nll(model, self.valid, closing=self.closing, batch_tokens=tokens)
        return {"loss": nll / events, "perplexity": perplexity(nll, events)}


def evaluate(
    loaded: LoadedModel, data: MusicData, split_name: str, *, stride: int | None = None
) -> Scores:
    """The mean −log P of all events of a split, in nats, and the perplexity that it comes to.

    Unless told, windows move by half of what the model reads at once: so every event has that much
    of its piece before it, or all there is.
    """
    model, tokenizer = loaded.torch_model(), loaded.tokenizer
    context, unit = loaded.run.model.max_length, data.encoding.unit
    check_stride(stride, context)
    music = data.read(split_name)
    check_words(music, tokenizer)
    text = EncodedText(music, tokenizer, ends=True)
    step = stride or max(1, context // 2 // unit * unit)  # whole sixteenths of a chorale
    with Bar("evaluate", len(text.flat)) as bar:
        at_once = loaded.run.decode.read_at_once
        nll, events = pieces_nll(
            model, text, closing=music.closing, batch_tokens=at_once, stride=step, bar=bar
        )
    how = f"{data.encoding.kind} encoding, {len(music.vocabulary)} words|{events} events of "
    how += f"{len(music.documents) - 1} pieces, each by itself, its first event after an end "
    how += "token, what closes and ends it not counted|"
    how += f"context:{context}|stride:{step}|not transposed"
    return {
        "nll": nll / events,
        "perplexity": perplexity(nll, events),
        "signature": {"nll": f"nats per event|{how}", "perplexity": f"e^nll|{how}"},
        "split": split_name,
        "examples": events,
    }


def check(run: RunSettings) -> None:
    if run.objective is not None and run.objective.packing != "stream":
        raise UserError(
            "a piece of music begins after the end of another, which objective.packing=documents "
            "hides: choose objective.packing=stream"
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
