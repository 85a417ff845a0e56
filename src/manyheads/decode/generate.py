"""Writing with a decoder-only model: prompts in, what follows them out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import Allowed, BeamSearch, Decode, Hypothesis, Marks, Stepper
from manyheads.decode.beam_cache import cache_for
from manyheads.decode.cuda_graphs import Recordings, steady
from manyheads.decode.sample import Sample, Sampler
from manyheads.decode.writer import Writer
from manyheads.errors import UserError, check_at_least
from manyheads.models.gpt import Gpt
from manyheads.optimize import InferenceCache
from manyheads.tokenizer.tokenizer import Tokenizer

GREEDY = Sample(temperature=0.0)
Prompts = Int[Tensor, "n length"]
Rows = Int[Tensor, " n"]


class GptStepper:
    """A decoder-only model in the middle of writing.

    All of a prompt but its last token is read in one pass; the last one is the first step.
    """

    def __init__(self, model: Gpt, prompts: Int[Tensor, "n length"]) -> None:
        self.model = model
        self.cache = cache_for(model)
        if prompts.shape[1] > 1:
            model.hidden(prompts[:, :-1], cache=self.cache)

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        hidden = self.model.hidden(tokens[:, None], cache=self.cache)
        return self.model.logits(hidden[:, -1]).float()

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self.cache.reorder(rows)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        """There is nothing but the rows."""


def draw(
    stepper: Stepper,
    newest: Int[Tensor, " rows"],
    limits: Int[Tensor, " rows"],
    sampler: Sampler,
    allowed: Allowed,
) -> Iterator[Int[Tensor, " rows"]]:
    """One token a row and step, from the ones after `newest` on; a row that is done has the end."""
    done = torch.zeros_like(newest, dtype=torch.bool)
    for length in range(1, int(limits.max()) + 1):
        with torch.no_grad():  # inside: whoever takes the tokens may want gradients
            logits = stepper.step(newest)
        allowed.apply(logits, logits.logsumexp(-1, keepdim=True), length, limits == length)
        newest = sampler.draw(logits).masked_fill(done, allowed.end)
        yield newest
        done |= (newest == allowed.end) | (limits <= length)
        if bool(done.all()):
            return


def collect(
    stepper: Stepper,
    newest: Int[Tensor, " rows"],
    limits: Int[Tensor, " rows"],
    sampler: Sampler,
    allowed: Allowed,
) -> list[list[int]]:
    """What is drawn for each row, without the end."""
    written: list[list[int]] = [[] for _ in newest]
    for tokens in draw(stepper, newest, limits, sampler, allowed):
        for row, token in zip(written, tokens.tolist(), strict=True):
            if token != allowed.end:
                row.append(token)
    return written


def say_nothing(line: str) -> None:
    """Where nobody listens."""


class AnyGenerator:
    """Continues prompts; a subclass says what computes the steps.

    A prompt is token ids, and `limit` the most tokens to write after it, an end included. Prompts
    of one length go through the model together, so that none is ever padded. A position scheme
    without a table goes on for ever, and `warn` says so past what the model was trained on; a
    learned one ends the text with its table, and `warn` says that.
    """

    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None]
    draws: ClassVar[bool] = True  # whether it can take tokens by chance, the same for a seed

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def positions(self) -> int | None:
        """How many there are; None where they have no end."""
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """How many tokens it was trained to read at once; None where nobody knows."""
        return None

    @property
    def vocabulary(self) -> int:
        """How many tokens there are to write."""
        raise NotImplementedError

    def begin(self, prompts: Int[Tensor, "n length"]) -> Stepper:
        """Ready to read the last token of each prompt, and to write after it."""
        raise NotImplementedError

    @property
    def marks(self) -> Marks:
        return Marks(self.tokenizer, self.decode)

    @property
    def allowed(self) -> Allowed:
        return Allowed(self.decode, self.marks.end, self.marks.banned)

    @torch.no_grad()
    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        """The n best continuations of each prompt (the whole beam unless told), best first."""
        end, banned = self.marks.end, self.marks.banned
        results: list[list[Hypothesis]] = [[] for _ in prompts]
        for rows, read, limits in self._batches(prompts, limit, self.decode.beam):
            search = BeamSearch(
                self.decode, start=read[:, -1], end=end, banned=banned, n_best=n_best
            )
            found = self._searched(search, read, limits)
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = hypotheses
        return results

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        """One drawn continuation a prompt; the same for a seed whatever the batch.

        `first` is the number of the first prompt, where these go on after others.
        """
        results: list[list[int]] = [[] for _ in prompts]
        for rows, read, limits in self._batches(prompts, limit, 1):
            written = self._written(read, limits, Sampler(sample, rows, first))
            for row, tokens in zip(rows, written, strict=True):
                results[row] = tokens
        return results

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        """The tokens after a prompt, each as soon as it is there; the likeliest unless told.

        `first` is the number of the prompt, where it comes after others.
        """
        [(rows, read, limits)] = self._batches([prompt], limit, 1)
        steps = self._followed(read, limits, Sampler(sample or GREEDY, rows, first))
        end = self.marks.end
        return (int(token) for token in steps if int(token) != end)

    def _searched(self, search: BeamSearch, read: Prompts, limits: Rows) -> list[list[Hypothesis]]:
        return search(self.begin(read), limits)

    def _written(self, read: Prompts, limits: Rows, sampler: Sampler) -> list[list[int]]:
        return collect(self.begin(read), read[:, -1], limits, sampler, self.allowed)

    def _followed(self, read: Prompts, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        with torch.no_grad():
            stepper = self.begin(read)
        return draw(stepper, read[:, -1], limits, sampler, self.allowed)

    def _batches(
        self, prompts: Sequence[Sequence[int]], limit: int, beam: int
    ) -> list[tuple[list[int], Tensor, Tensor]]:
        """Prompts of one length together: their rows, their tokens, and how much may follow."""
        check_at_least("limit", limit, 1)
        self.marks.check(self.vocabulary)
        whole = [self._begun(prompt) for prompt in prompts]
        batches = []
        for length in sorted({len(prompt) for prompt in whole}):
            room = self._room(length, limit)
            rows = [row for row, prompt in enumerate(whole) if len(prompt) == length]
            size = max(1, self.decode.written_at_once(self.device) // (beam * (length + room)))
            for begin in range(0, len(rows), size):
                some = rows[begin : begin + size]
                read = torch.tensor([whole[row] for row in some], device=self.device)
                batches.append((some, read, torch.full_like(read[:, 0], room)))
        return batches

    def _begun(self, prompt: Sequence[int]) -> list[int]:
        """A prompt as the model reads it; an empty one is the start token."""
        tokens = self.vocabulary
        strange = next((token for token in prompt if not 0 <= token < tokens), None)
        if strange is not None:
            raise UserError(
                f"a prompt holds the token {strange}, but the model has 0 to {tokens - 1}: "
                "encode it with the model's own tokenizer"
            )
        return list(prompt) or [self.marks.start]

    def _room(self, length: int, limit: int) -> int:
        """How many tokens may follow a prompt; the last of them is written but never read."""
        most = self.positions
        if most is None:
            if self.context is not None and length + limit - 1 > self.context:
                # The same line whatever the prompt, for whoever wants to hear it once.
                self.warn(
                    f"{limit} more tokens may go past the {self.context} that the model was "
                    "trained to read: how well it writes there is untested"
                )
            return limit
        if length > most:
            raise UserError(
                f"a prompt of {length} tokens, but the model's learned positions end at {most}: "
                "shorten it"
            )
        room = most - length + 1
        if room < limit:
            self.warn(
                f"a prompt of {length} tokens leaves {room} of the model's {most} positions to "
                f"write, not {limit}"
            )
        return min(limit, room)


@dataclass(frozen=True)
class Generator(AnyGenerator):
    """A language model with its tokenizer and the settings it writes with.

    Its steps are recorded on a GPU, or as `recordings` say; on a CPU they are computed with its
    weights as the kernels there read them best.
    """

    model: Gpt
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = say_nothing
    recordings: Recordings = field(default_factory=Recordings, compare=False, repr=False)
    arrangement: InferenceCache = field(default_factory=InferenceCache, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def positions(self) -> int | None:
        return self.model.decoder.position.max_length

    @property
    def context(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.tokens.num_embeddings

    def begin(self, prompts: Int[Tensor, "n length"]) -> Stepper:
        model = self.model.eval()
        if steady(model):
            model = self.arrangement.get(model)
        return GptStepper(model, prompts)

    @property
    def _writer(self) -> Writer:
        return Writer(self.recordings, self.model)

    def _searched(self, search: BeamSearch, read: Prompts, limits: Rows) -> list[list[Hypothesis]]:
        if self._writer.serves:
            return self._writer.search((read,), search, limits)
        return super()._searched(search, read, limits)

    def _written(self, read: Prompts, limits: Rows, sampler: Sampler) -> list[list[int]]:
        if self._writer.serves:
            return self._writer.collect((read,), read[:, -1], limits, sampler, self.allowed)
        return super()._written(read, limits, sampler)

    def _followed(self, read: Prompts, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        if self._writer.serves:
            return self._writer.follow((read,), read[:, -1], limits, sampler, self.allowed)
        return super()._followed(read, limits, sampler)


def as_text(tokenizer: Tokenizer, before: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """What each token adds to the text, as soon as it is whole characters."""
    ids, shown = list(before), tokenizer.decode(list(before))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
            yield text[len(shown) :]  # by length: bytes that follow may spoil what was a sign
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def until(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """The text before the first place where one of the stop texts stands.

    What may be the beginning of one is held back until more is known. Once the place is sure, no
    further piece is asked for.
    """
    held = ""
    for piece in pieces:
        held += piece
        begins = (at for at in range(len(held)) if _may_be_at(at, held, stops))
        at = next(begins, len(held))
        yield held[:at]
        held = held[at:]
        if held.startswith(tuple(stops)):
            return
    # Nothing follows: what was only a beginning is text.
    found = (held.find(stop) for stop in stops)
    yield held[: min((at for at in found if at >= 0), default=len(held))]


def _may_be_at(at: int, text: str, stops: Sequence[str]) -> bool:
    """Whether a stop text stands there, or would with more text."""
    return any(stop.startswith(text[at : at + len(stop)]) for stop in stops)
