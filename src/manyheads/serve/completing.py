"""Continuations for programs: rows of many requests generated together, a token a step.

Prompts of different lengths are padded on the left. Row r has `absent[r]` padding positions; its
first token has position 0, and no later token sees the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.generate import Generator
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.sample import Sample, Sampler, choose
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import PaddingMask
from manyheads.serve.batching import Bounds, Job, Work
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.responses import Problem

BROKEN = "\ufffd"  # stands for bytes that are no character yet
Prompts = Int[Tensor, "rows length"]
Logits = Float[Tensor, "rows v"]
Rows = Int[Tensor, " rows"]


@dataclass(frozen=True)
class Completion:
    """What one request wants: how many continuations of each prompt, how long, drawn how.

    `likeliest` is how many tokens are told with their log P at each place, None if none is wanted;
    with `echo` also at the places of the prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    each: int
    most: int
    sample: Sample
    stops: tuple[str, ...] = ()
    likeliest: int | None = None
    echo: bool = False
    stream: bool = False

    @property
    def rows(self) -> int:
        return self.each * len(self.prompts)

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class Told:
    """A token with its log P (none for the first of all) and the likeliest ones in its place."""

    token: int
    offset: int
    log_probability: float | None
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What is new in one row; `finish` says why it is the last piece of it."""

    row: int
    text: str
    told: tuple[Told, ...]
    tokens: int
    finish: str | None


class Growing:
    """What follows a prompt. `add` and `end` give the text that is sure by then.

    A character of several tokens waits for the last of them, and what may be the beginning of a
    stop text waits until more is known.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids = list(prompt)
        self.begun = self.read = tokenizer.decode(self.ids)
        self.held = ""
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those that wait included."""
        return len(self.read) - len(self.begun)

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith(BROKEN):
            return ""
        # By length: bytes that follow may spoil what was a sign.
        new, self.read = text[len(self.read) :], text
        return self._passed(new)

    def end(self) -> str:
        """What was held back, once nothing follows any more."""
        if self.stopped:
            return ""
        last = self._passed(self.tokenizer.decode(self.ids)[len(self.read) :])
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        self.stopped = self.stopped or bool(found)
        held, self.held = self.held[: min(found, default=len(self.held))], ""
        return last + held

    def _passed(self, new: str) -> str:
        self.held += new
        begins = (at for at in range(len(self.held)) if self._may_stop(at))
        at = next(begins, len(self.held))
        sure, self.held = self.held[:at], self.held[at:]
        if self.stops and self.held.startswith(self.stops):
            self.stopped, self.held = True, ""
        return sure

    def _may_stop(self, at: int) -> bool:
        return any(stop.startswith(self.held[at : at + len(stop)]) for stop in self.stops)


class RaggedCache(KVCache):
    def __init__(self, absent: Rows) -> None:
        super().__init__()
        self.absent = absent
        self.even = not bool(absent.any())

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        mask = super().mask(rule, length, padding, device)
        if self.even:
            return mask
        places = torch.arange(self.length + length, device=device) - self.absent[:, None]
        # What is absent asks from position 0, so that there is something that it sees.
        keys = places.clamp(min=0)
        return AttentionMask(rule, keys[:, self.length :], keys, places >= 0)

    def select_rows(self, rows: Rows) -> None:
        super().select_rows(rows)
        self.absent = self.absent[rows]


def together(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Prompts, Rows]:
    """Prompts that end at the same place, and how many places are absent before each."""
    longest = max(len(prompt) for prompt in prompts)
    absent = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * gap + list(prompt) for gap, prompt in zip(absent, prompts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(absent, device=device)


def may_be_ragged(model: Gpt) -> bool:
    """Whether every attention goes by positions and sight alone, whatever the place in the row."""
    parts = (part for part in model.modules() if isinstance(part, SelfAttention))
    return all(type(part.core) in (Dense, Fused) for part in parts)


class Row:
    def __init__(self, job: Job[Completion], number: int, generator: Generator) -> None:
        ask = job.ask
        self.job, self.number = job, number
        self.prompt = ask.prompts[number // ask.each]
        self.growing = Growing(generator.tokenizer, self.prompt, ask.stops)
        self.sampler = Sampler(ask.sample, [number])
        self.end = generator.special_tokens.end
        self.text, self.told, self.written = "", list[Told](), 0
        self.finish: str | None = None

    @property
    def before(self) -> int:
        return len(self.growing.begun) if self.job.ask.echo else 0

    def take(self, token: int, log: Float[Tensor, " v"] | None) -> None:
        """The next token, and the log P of all that could have come there."""
        offset = self.before + self.growing.length
        if token == self.end:
            self.finish = "stop"
        else:
            self.written += 1
            if log is not None:
                self.told.append(tell(token, offset, log, self.job.ask.likeliest or 0))
            self.text += self.growing.add(token)
            if self.growing.stopped:
                self.finish = "stop"
        self.close()

    def close(self) -> None:
        """End the row where it has to, and tell what is new if somebody waits for it."""
        if self.finish is None and self.written >= self.job.ask.most:
            self.finish = "length"
        if self.finish is not None:
            self.text += self.growing.end()
            self.finish = "stop" if self.growing.stopped else self.finish
        if self.finish is not None or (self.job.ask.stream and self.text):
            piece = Piece(self.number, self.text, tuple(self.told), self.written, self.finish)
            self.job.tell(piece)
            self.text, self.told = "", []


def tell(token: int, offset: int, log: Float[Tensor, " v"], count: int) -> Told:
    best, ids = log.topk(min(count, len(log)))
    pairs = tuple(zip(ids.tolist(), best.tolist(), strict=True))
    return Told(token, offset, float(log[token]), pairs)


class Completions(Work[Completion]):
    def __init__(self, opened: LoadedRun, bounds: Bounds) -> None:
        generator = opened.generator(at_limit="truncate")
        if not isinstance(generator, Generator):
            raise UserError(f"{opened.folder} was exported: serve the run it came from")
        self.generator, self.bounds = generator, bounds
        self.constraints = generator.constraints
        self.context = generator.context
        self.ragged = may_be_ragged(generator.model)

    def encode(self, text: str) -> tuple[int, ...]:
        tokenizer = self.generator.tokenizer
        return (*tokenizer.frame()[0], *tokenizer.encode(text))

    def check(self, ask: Completion) -> Completion:
        """The request with its empty prompts begun; what would fail in a batch is refused here."""
        marks, vocabulary = self.generator.special_tokens, self.generator.vocabulary
        strange = [t for prompt in ask.prompts for t in prompt if not 0 <= t < vocabulary]
        if strange:
            raise Problem(400, f"token {strange[0]} is none of this model: it has {vocabulary}")
        begun = replace(ask, prompts=tuple(prompt or (marks.start,) for prompt in ask.prompts))
        if begun.longest + begun.most > self.context:
            raise Problem(
                413,
                f"{begun.longest} tokens of the prompt and max_tokens {begun.most} are more than "
                f"the {self.context} that this model reads: shorten one of them",
                "context_length_exceeded",
            )
        if not self._in_bounds([begun]):
            raise Problem(
                413,
                f"{begun.rows} texts of up to {begun.longest + begun.most} tokens are too many at "
                f"once: at most {self.bounds.rows} texts and {self.bounds.tokens} tokens",
                "too_large",
            )
        return begun

    def _in_bounds(self, asks: Sequence[Completion]) -> bool:
        rows = sum(ask.rows for ask in asks)
        width = max(ask.longest for ask in asks) + max(ask.most for ask in asks)
        return rows <= self.bounds.rows and rows * width <= max(self.bounds.tokens, self.context)

    def fits(self, asks: Sequence[Completion]) -> bool:
        """Those in bounds; a table of positions must also reach over the longest of both kinds."""
        positions = self.generator.positions
        width = max(ask.longest for ask in asks) + max(ask.most for ask in asks)
        lengths = {len(prompt) for ask in asks for prompt in ask.prompts}
        return (
            self._in_bounds(asks)
            and (positions is None or width <= positions + 1)
            and (self.ragged or len(lengths) == 1)
        )

    @torch.no_grad()
    def compute(self, jobs: Sequence[Job[Completion]]) -> None:
        rows = [Row(job, number, self.generator) for job in jobs for number in range(job.ask.rows)]
        self.generator.model.eval()
        if self.ragged:
            self._write(rows)
            return
        for length in sorted({len(row.prompt) for row in rows}):  # those of one request may differ
            self._write([row for row in rows if len(row.prompt) == length])

    def _write(self, rows: list[Row]) -> None:
        model = self.generator.model
        prompts, absent = together([row.prompt for row in rows], self.generator.device)
        cache = RaggedCache(absent)
        hidden = None
        if prompts.shape[1] > 1:
            hidden = model.hidden(prompts[:, :-1], cache=cache)
        for place, row in enumerate(rows):
            self._echo(row, None if hidden is None else hidden[place, int(absent[place]) :])
        newest, kept = prompts[:, -1], [at for at, row in enumerate(rows) if _goes_on(row)]
        length = 0
        while True:
            _end_jobs(rows)
            if len(kept) < len(rows):
                rows = [rows[at] for at in kept]
                index = torch.tensor(kept, dtype=torch.long, device=newest.device)
                newest = newest[index]
                cache.select_rows(index)
            if not rows:
                return
            length += 1
            logits = model.logits(model.hidden(newest[:, None], cache=cache)[:, -1]).float()
            newest = self._step(rows, logits, length)
            kept = [at for at, row in enumerate(rows) if _goes_on(row)]

    def _echo(self, row: Row, hidden: Float[Tensor, "n d"] | None) -> None:
        """The prompt itself and the log P of its tokens, where they are wanted."""
        ask, prompt = row.job.ask, row.prompt
        if ask.echo:
            row.text = row.growing.begun
            if ask.likeliest is not None:
                row.told.append(Told(prompt[0], 0, None, ()))
                logs = None if hidden is None else self.generator.model.logits(hidden)
                for at, token in enumerate(prompt[1:], start=1):
                    assert logs is not None
                    offset = len(self.generator.tokenizer.decode(prompt[:at]))
                    log = logs[at - 1].float().log_softmax(-1)
                    row.told.append(tell(token, offset, log, ask.likeliest))
        row.close()

    def _step(self, rows: Sequence[Row], logits: Logits, length: int) -> Rows:
        wanted = any(row.job.ask.likeliest is not None for row in rows)
        logs = logits.log_softmax(-1) if wanted else None
        newest = logits.new_zeros(len(rows), dtype=torch.long)
        self.constraints.apply(logits, torch.full_like(newest[:1], length))
        alike: dict[Sample, list[int]] = {}
        for at, row in enumerate(rows):
            alike.setdefault(replace(row.sampler.sample, seed=0), []).append(at)
        for sample, places in alike.items():
            uniforms = torch.cat([rows[at].sampler.uniforms(1)[:, 0] for at in places])
            newest[places] = choose(logits[places], uniforms.to(logits.device), sample)
        for at, (row, token) in enumerate(zip(rows, newest.tolist(), strict=True)):
            told = logs is not None and row.job.ask.likeliest is not None
            row.take(token, logs[at] if told and logs is not None else None)
        return newest


def _goes_on(row: Row) -> bool:
    return row.finish is None and not row.job.gone


def _end_jobs(rows: Sequence[Row]) -> None:
    """Who has all its rows need not wait for the others of the batch."""
    going = {id(row.job) for row in rows if _goes_on(row)}
    for row in rows:
        if id(row.job) not in going:
            row.job.end()
