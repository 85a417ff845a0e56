"""Generation from one text: beam search, sampling and next-token probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decode.beam import (
    NEVER,
    BeamSearch,
    Decode,
    DecoderSession,
    LogitsConstraints,
    SpecialTokens,
)
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample, Sampler, Samples, filtered
from manyheads.decode.translate import Translator
from manyheads.errors import check_at_least
from manyheads.loading import LoadedRun
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import SizeLimit
from manyheads.web.responses import Fields, Problem

MOST_READ = 128  # input tokens; the pages generate while the user types
MOST_BEAM = 8
MOST_WRITTEN = 64  # tokens that a language model generates
DEFAULT_LIMIT = 20


class PrefixConstraints(LogitsConstraints):
    """Constraints that force the first tokens of a text.

    A forced token keeps its log P, so that scores stay comparable.
    """

    prefix: Sequence[int] = ()

    def apply(
        self,
        logits: Float[Tensor, "rows v"],
        length: Int[Tensor, " texts"],
        last: Bool[Tensor, " n"] | None = None,
        total: Float[Tensor, "rows 1"] | None = None,
    ) -> None:
        position = int(length[0])
        if position > len(self.prefix):
            super().apply(logits, length, last, total)
            return
        token = self.prefix[position - 1]
        price = logits[:, token].clone()
        logits.fill_(NEVER)
        logits[:, token] = price


@dataclass(frozen=True)
class Generation:
    """A model with its input `read`: a source to translate, or a prompt to continue.

    `limit` is the maximum number of generated tokens, including the end token.
    """

    opened: LoadedRun
    decode: Decode
    read: list[int]
    limit: int

    @property
    def model(self) -> Any:
        return self.opened.model

    @property
    def continues(self) -> bool:
        """True if the model continues its input (language model) rather than translating it."""
        return isinstance(self.opened.model, Gpt)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    @property
    def special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, self.decode)

    @property
    def start(self) -> int:
        """The token before the first generated one."""
        return self.read[-1] if self.continues else self.special_tokens.start

    @property
    def vocabulary(self) -> int:
        table = self.model.tokens if self.continues else self.model.target_table
        return int(table.num_embeddings)

    def begin(self, rows: int = 1) -> DecoderSession:
        """A decoder session before the first token, with `rows` copies of the input."""
        read = self._batch(self.read).expand(rows, -1)
        if self.continues:
            return Generator(self.model, self.tokenizer, self.decode).begin(read)
        translator = Translator(self.model, self.tokenizer, self.decode)
        return translator.begin(read, torch.ones_like(read, dtype=torch.bool))

    def constraints(self, prefix: Sequence[int] = ()) -> PrefixConstraints:
        special, device = self.special_tokens, self.opened.device
        constraints = PrefixConstraints(self.decode, special.end, special.suppressed, device)
        constraints.prefix = list(prefix)
        return constraints

    def search(self, prefix: Sequence[int] = (), beam: int | None = None) -> BeamSearch:
        """Beam search as in `Translator` and `Generator`, with the first tokens forced."""
        decode = replace(self.decode, beam=self.decode.beam if beam is None else beam)
        return BeamSearch(decode, self.constraints(prefix))

    def limits(self, rows: int = 1) -> Tensor:
        return torch.full((rows,), self.limit, device=self.opened.device)

    def sample(self, sample: Sample, rows: int, prefix: Sequence[int] = ()) -> list[list[int]]:
        """Sample `rows` texts, each with its own random numbers."""
        limits, sampler = self.limits(rows), Sampler(sample, rows)
        samples = Samples(self.constraints(prefix), sample, rows, self.limit, limits.device)
        samples.begin(torch.full_like(limits, self.start), limits, sampler)
        return samples.run(partial(samples.step, self.begin(rows)))

    def logits(self, generated: Sequence[int]) -> Float[Tensor, "t v"]:
        """Logits of one forward pass: row i predicts token i, the last row the next token."""
        if self.continues:
            logits = self.model(self._batch([*self.read, *generated]))[0]
            return logits[len(self.read) - 1 :].float()
        target = self._batch([self.start, *generated])
        return self.model(self._batch(self.read), target)[0].float()

    def after(self, generated: Sequence[int], sample: Sample) -> tuple[Tensor, Tensor]:
        """P of the next token, before and after constraints and sampling filters."""
        logits = self.logits(generated)[-1:]
        before = logits.softmax(-1)[0]
        length = torch.tensor([len(generated) + 1], device=logits.device)
        self.constraints().apply(logits, length, length == self.limit)
        return before, filtered(logits, sample).softmax(-1)[0]

    def text(self, generated: Sequence[int]) -> str:
        """Decode the generated tokens."""
        if not self.continues:
            return self.tokenizer.decode(generated)
        return self.tokenizer.decode([*self.read, *generated])[
            len(self.tokenizer.decode(self.read)) :
        ]

    def prefix(self, fields: Fields, name: str = "prefix") -> list[int]:
        """The forced first tokens of a request, validated."""
        value = fields.values.get(name, [])
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise Problem(400, f"'{name}' must be a list of token ids (integers)")
        if len(value) >= self.limit:
            raise Problem(
                413, f"'{name}' has {len(value)} tokens, more than the limit of {self.limit}"
            )
        suppressed = set(self.special_tokens.suppressed)
        for position, token in enumerate(value, start=1):
            early = token == self.special_tokens.end and position < len(value)
            if not 0 <= token < self.vocabulary or token in suppressed or early:
                raise Problem(400, f"'{name}' has {token}, which is never generated there")
        return value

    def _batch(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.opened.device)


def generation_of(opened: LoadedRun, fields: Fields, max_tokens: int) -> Generation:
    """The generation that a request {text, beam?, limit?} describes."""
    model: Any = opened.model
    if not isinstance(model, EncoderDecoder | Gpt):
        raise opened.unsupported("generates text", "an encoder–decoder or a language model")
    beam = fields.number("beam", MOST_BEAM)
    requested = fields.number("limit", MOST_WRITTEN)
    check_at_least("limit", requested, 1)
    limit = DEFAULT_LIMIT if requested is None else requested
    decode = opened.run.decode if beam is None else opened.decode(beam=beam)
    if decode.beam > MOST_BEAM:
        decode = opened.decode(beam=MOST_BEAM)
    special = SpecialTokens(opened.tokenizer, decode)
    ids = opened.tokenizer.encode(fields.text("text", ""))
    size_limit = SizeLimit(min(max_tokens, MOST_READ), 0)
    if not isinstance(model, Gpt):
        source = special.source(ids)
        size_limit.check(source, model, "the text")
        return Generation(
            opened, decode, source, decode.limit(len(source), model.config.max_length)
        )
    prompt = ids or [special.start]
    size_limit.check(prompt, model, "the text")
    positions = model.decoder.position.max_length
    if positions is not None:
        limit = min(limit, positions - len(prompt) + 1)
    return Generation(opened, decode, prompt, limit)
