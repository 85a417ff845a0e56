"""Generation with a decoder-only model: prompts in, continuations out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.cuda_graphs import GraphCache
from manyheads.decode.decoder import BaseDecoder, ModelDecoder
from manyheads.decode.sample import Sample, Sampler
from manyheads.decode.session import GptSession
from manyheads.errors import UserError, check_at_least
from manyheads.models.gpt import Gpt
from manyheads.tokenizer.tokenizer import Tokenizer

GREEDY = Sample(temperature=0.0)


def ignore(line: str) -> None:
    """The default for warnings."""


class BaseGenerator(BaseDecoder):
    """Continues prompts; a subclass has what computes the steps.

    A prompt is token ids, and `limit` the most tokens to generate after it, an end included.
    Prompts of one length go through the model together, so that none is ever padded. Positions
    without a table never end, and `warn` is called past the length of training; a learned table
    ends the text, and `warn` is called then.
    """

    warn: Callable[[str], None]
    draws: ClassVar[bool] = True  # whether it can sample reproducibly by a seed

    @property
    def positions(self) -> int | None:
        """The number of positions; None where they have no end."""
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """The length of training texts; None if unknown."""
        return None

    @torch.no_grad()
    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        """The n best continuations of each prompt (default: all of the beam), best first."""
        results: list[list[Hypothesis]] = [[] for _ in prompts]
        for rows, read, limits in self._batches(prompts, limit, self.decode.beam):
            found = self._search((read,), read[:, -1], limits, n_best)
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = hypotheses
        return results

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        """One sampled continuation a prompt; the same for a seed whatever the batch.

        `first` is the number of the first prompt, where these come after others.
        """
        results: list[list[int]] = [[] for _ in prompts]
        for rows, read, limits in self._batches(prompts, limit, 1):
            texts = self._sample((read,), read[:, -1], limits, Sampler(sample, rows, first))
            for row, tokens in zip(rows, texts, strict=True):
                results[row] = tokens
        return results

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        """The tokens after a prompt, each as soon as it is there; by default the likeliest ones.

        `first` is the number of the prompt, where it comes after others.
        """
        [(rows, read, limits)] = self._batches([prompt], limit, 1)
        sampler = Sampler(sample or GREEDY, rows, first)
        steps = self._stream((read,), read[:, -1], limits, sampler)
        end = self.special_tokens.end
        return (int(token) for token in steps if int(token) != end)

    def _batches(
        self, prompts: Sequence[Sequence[int]], limit: int, beam: int
    ) -> list[tuple[list[int], Tensor, Tensor]]:
        """Prompts of one length together: their rows, their tokens, and how much may follow."""
        check_at_least("limit", limit, 1)
        self.special_tokens.check(self.vocabulary)
        framed = [self._begun(prompt) for prompt in prompts]
        batches = []
        for length in sorted({len(prompt) for prompt in framed}):
            room = self._room(length, limit)
            rows = [row for row, prompt in enumerate(framed) if len(prompt) == length]
            size = max(1, self.decode.written_at_once(self.device) // (beam * (length + room)))
            for begin in range(0, len(rows), size):
                some = rows[begin : begin + size]
                read = torch.tensor([framed[row] for row in some], device=self.device)
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
        return list(prompt) or [self.special_tokens.start]

    def _room(self, length: int, limit: int) -> int:
        """How many tokens may follow a prompt; the last of them is never read."""
        most = self.positions
        if most is None:
            if self.context is not None and length + limit - 1 > self.context:
                # The same line whatever the prompt, so that it can be shown once.
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
class Generator(BaseGenerator, ModelDecoder):
    """A language model with its tokenizer and the settings it generates with."""

    model: Gpt
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = ignore
    graphs: GraphCache = field(default_factory=GraphCache, compare=False, repr=False)

    @property
    def positions(self) -> int | None:
        return self.model.decoder.position.max_length

    @property
    def context(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.tokens.num_embeddings

    def begin(self, *texts: Tensor) -> DecoderSession:
        [prompts] = texts
        return GptSession(self._eager_model(), prompts)


def as_text(tokenizer: Tokenizer, before: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """What each token adds to the text, as soon as its characters are complete."""
    ids, shown = list(before), tokenizer.decode(list(before))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
            yield text[len(shown) :]  # by length: later bytes may change earlier characters
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def until(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """The text before the first occurrence of a stop text.

    A possible beginning of one is held back until more text decides. After it no piece is taken.
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
    # The text is over: what was only a beginning belongs to it.
    found = (held.find(stop) for stop in stops)
    yield held[: min((at for at in found if at >= 0), default=len(held))]


def _may_be_at(at: int, text: str, stops: Sequence[str]) -> bool:
    """True if a stop text is there, or may be with more text."""
    return any(stop.startswith(text[at : at + len(stop)]) for stop in stops)
