"""Generation with a decoder-only model: prompts in, continuations out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyheads.baselines.rnn import LanguageModel
from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.decoder import BaseDecoder, GraphCache, ModelDecoder, after_prompts
from manyheads.decode.sample import Sample, Sampler
from manyheads.errors import UserError, check_at_least
from manyheads.models.gpt import Gpt
from manyheads.tokenizer.tokenizer import Tokenizer

GREEDY = Sample(temperature=0.0)


def ignore(line: str) -> None:
    """The default for warnings."""


class BaseGenerator(BaseDecoder):
    """Continues prompts; subclasses compute the steps.

    A prompt is token ids, and `limit` the most tokens to generate after it, an end included.
    Prompts of one length form a batch, so that none is padded. Positions without a table have no
    end: past the training length `warn` is called. A learned table ends the text, with a warning.
    """

    warn: Callable[[str], None]

    @property
    def positions(self) -> int | None:
        """The number of positions; None if they are unlimited."""
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
        for rows, tokens, limits in self._batches(prompts, limit, self.decode.beam):
            hypotheses = self._search((tokens,), tokens[:, -1], limits, n_best)
            for row, nbest in zip(rows, hypotheses, strict=True):
                results[row] = nbest
        return results

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        """One sampled continuation a prompt; the same for a seed whatever the batch.

        `first` is the number of the first prompt, if these come after others.
        """
        results: list[list[int]] = [[] for _ in prompts]
        for rows, tokens, limits in self._batches(prompts, limit, 1):
            texts = self._sample((tokens,), tokens[:, -1], limits, Sampler(sample, rows, first))
            for row, text in zip(rows, texts, strict=True):
                results[row] = text
        return results

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        """The tokens after a prompt, yielded one by one; greedy by default.

        `first` is the number of the prompt, if it comes after others.
        """
        [(rows, tokens, limits)] = self._batches([prompt], limit, 1)
        sampler = Sampler(sample or GREEDY, rows, first)
        steps = self._stream((tokens,), tokens[:, -1], limits, sampler)
        end = self.special_tokens.end
        return (int(token) for token in steps if int(token) != end)

    def _batches(
        self, prompts: Sequence[Sequence[int]], limit: int, beam: int
    ) -> list[tuple[list[int], Tensor, Tensor]]:
        """Batches of prompts of one length: their rows, their tokens, and their limits."""
        check_at_least("limit", limit, 1)
        self.special_tokens.check(self.vocabulary)
        prompts = [self._checked(prompt) for prompt in prompts]
        batches = []
        for length in sorted({len(prompt) for prompt in prompts}):
            most = self._limit(length, limit)
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            size = max(1, self.decode.decode_tokens(self.device) // (beam * (length + most)))
            for begin in range(0, len(rows), size):
                batch = rows[begin : begin + size]
                tokens = torch.tensor([prompts[row] for row in batch], device=self.device)
                batches.append((batch, tokens, torch.full_like(tokens[:, 0], most)))
        return batches

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """A prompt whose tokens the model has; an empty one is the start token."""
        tokens = self.vocabulary
        for token in prompt:
            if not 0 <= token < tokens:
                raise UserError(
                    f"the prompt has the token {token}, but the model has 0 to {tokens - 1}: "
                    "encode it with the model's tokenizer"
                )
        return list(prompt) or [self.special_tokens.start]

    def _limit(self, length: int, limit: int) -> int:
        """The most tokens after a prompt of this length; the last one needs no position."""
        positions = self.positions
        if positions is None:
            if self.context is not None and length + limit - 1 > self.context:
                # The same line for every prompt, so that a command can show it once.
                self.warn(
                    f"{limit} more tokens may exceed the {self.context} that the model was "
                    "trained with: quality beyond that is untested"
                )
            return limit
        if length > positions:
            raise UserError(
                f"the prompt has {length} tokens, but the model's learned positions end at "
                f"{positions}: shorten it"
            )
        most = positions - length + 1
        if most < limit:
            self.warn(
                f"after a prompt of {length} tokens the model can generate {most} of the "
                f"{limit} tokens: it has {positions} positions"
            )
        return min(limit, most)


@dataclass(frozen=True)
class Generator(BaseGenerator, ModelDecoder):
    """A language model with its tokenizer and the settings it generates with."""

    model: LanguageModel
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = ignore
    graphs: GraphCache = field(default_factory=GraphCache, compare=False, repr=False)

    @property
    def positions(self) -> int | None:
        model = self.model
        return model.decoder.position.max_length if isinstance(model, Gpt) else None

    @property
    def context(self) -> int:
        return self.model.config.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.tokens.num_embeddings

    def begin(self, *texts: Tensor) -> DecoderSession:
        return after_prompts(self.model.eval(), *texts)


class Detokenizer:
    """The text after a prompt, token by token. `add` and `end` return the text that is final.

    A character of several tokens waits for its last one, and the possible beginning of a stop
    text waits until it is decided.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids = list(prompt)
        self.text = tokenizer.decode(self.ids)
        self.start = len(self.text)
        self.pending, self.stopped = "", False

    @property
    def length(self) -> int:
        """Characters after the prompt, pending ones included."""
        return len(self.text) - self.start

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):  # a character whose other bytes are still to come
            return ""
        return self._final(text)

    def end(self) -> str:
        """The pending text, once no token follows; a mere beginning of a stop text is text."""
        if self.stopped:
            return ""
        final = self._final(self.tokenizer.decode(self.ids))
        stop_positions = [at for stop in self.stops if (at := self.pending.find(stop)) >= 0]
        self.stopped = self.stopped or bool(stop_positions)
        pending, self.pending = self.pending[: min(stop_positions, default=len(self.pending))], ""
        return final + pending

    def _final(self, text: str) -> str:
        # By length: later bytes may change earlier characters.
        self.pending += text[len(self.text) :]
        self.text = text
        may_stop = (at for at in range(len(self.pending)) if self._may_stop(at))
        at = next(may_stop, len(self.pending))
        final, self.pending = self.pending[:at], self.pending[at:]
        if self.pending.startswith(self.stops):
            self.stopped, self.pending = True, ""
        return final

    def _may_stop(self, at: int) -> bool:
        return any(stop.startswith(self.pending[at : at + len(stop)]) for stop in self.stops)


def as_text(
    tokenizer: Tokenizer,
    before: Sequence[int],
    tokens: Iterator[int],
    stops: Sequence[str] = (),
) -> Iterator[str]:
    """Text chunks of a token stream, up to the first stop text; takes no token after it."""
    detokenizer = Detokenizer(tokenizer, before, stops)
    for token in tokens:
        yield detokenizer.add(token)
        if detokenizer.stopped:
            return
    yield detokenizer.end()
