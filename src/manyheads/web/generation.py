"""A text before a model that writes, and what the model may write after it, place by place."""

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
from manyheads.loading import TorchRun
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import SizeLimit
from manyheads.web.responses import Fields, Problem

MOST_READ = 128  # tokens of a text that is written from while somebody types
MOST_BEAM = 8
MOST_WRITTEN = 64  # tokens that a language model goes on by
USUAL = 20


class PrefixConstraints(LogitsConstraints):
    """Constraints of a text whose first tokens are given.

    A given token costs its own log P, as a chosen one does: scores stay comparable.
    """

    prefix: Sequence[int] = ()

    def apply(
        self,
        logits: Float[Tensor, "rows v"],
        length: Int[Tensor, " #rows"],
        last: Bool[Tensor, " rows"] | None = None,
        total: Float[Tensor, "rows 1"] | None = None,
        *,
        forces: bool = True,
    ) -> None:
        position = int(length[0])
        if position > len(self.prefix):
            super().apply(logits, length, last, total, forces=forces)
            return
        token = self.prefix[position - 1]
        price = logits[:, token].clone()
        logits.fill_(NEVER)
        logits[:, token] = price


@dataclass(frozen=True)
class Generation:
    """A model with what it has read: a source, or a prompt that it goes on with.

    `limit` is the most tokens that it may write, an end included.
    """

    opened: TorchRun
    decode: Decode
    read: list[int]
    limit: int

    @property
    def model(self) -> Any:
        return self.opened.model

    @property
    def continues(self) -> bool:
        """Whether what is written stands behind what was read, in one text."""
        return isinstance(self.opened.model, Gpt)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    @property
    def special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, self.decode)

    @property
    def start(self) -> int:
        """The token before the first written one."""
        return self.read[-1] if self.continues else self.special_tokens.start

    @property
    def vocabulary(self) -> int:
        table = self.model.tokens if self.continues else self.model.target_table
        return int(table.num_embeddings)

    def begin(self, rows: int = 1) -> DecoderSession:
        """Ready to write the first token, in so many rows."""
        read = self._batch(self.read).expand(rows, -1)
        if self.continues:
            return Generator(self.model, self.tokenizer, self.decode).begin(read)
        translator = Translator(self.model, self.tokenizer, self.decode)
        return translator.begin(read, torch.ones_like(read, dtype=torch.bool))

    def constraints(self, given: Sequence[int] = ()) -> PrefixConstraints:
        special, device = self.special_tokens, self.opened.device
        constraints = PrefixConstraints(self.decode, special.end, special.suppressed, device)
        constraints.prefix = list(given)
        return constraints

    def search(self, given: Sequence[int] = (), beam: int | None = None) -> BeamSearch:
        """Beam search as `Translator` and `Generator` do it, the first tokens given."""
        decode = replace(self.decode, beam=self.decode.beam if beam is None else beam)
        return BeamSearch(decode, self.constraints(given))

    def limits(self, rows: int = 1) -> Tensor:
        return torch.full((rows,), self.limit, device=self.opened.device)

    def draw(self, sample: Sample, rows: int, given: Sequence[int] = ()) -> list[list[int]]:
        """So many texts, each by random numbers of its own."""
        limits, sampler = self.limits(rows), Sampler(sample, rows)
        samples = Samples(self.constraints(given), sample, rows, self.limit, limits.device)
        samples.begin(torch.full_like(limits, self.start), limits, sampler)
        return samples.run(partial(samples.step, self.begin(rows)))

    def logits(self, written: Sequence[int]) -> Float[Tensor, "t v"]:
        """In one pass: row i is of the token at place i, the last row of what comes after all."""
        if self.continues:
            whole = self.model(self._batch([*self.read, *written]))[0]
            return whole[len(self.read) - 1 :].float()
        target = self._batch([self.start, *written])
        return self.model(self._batch(self.read), target)[0].float()

    def after(self, written: Sequence[int], sample: Sample) -> tuple[Tensor, Tensor]:
        """P of the next token: as the model has it, and as it is drawn from."""
        logits = self.logits(written)[-1:]
        before = logits.softmax(-1)[0]
        length = torch.tensor([len(written) + 1], device=logits.device)
        self.constraints().apply(logits, length, length == self.limit)
        return before, filtered(logits, sample).softmax(-1)[0]

    def text(self, written: Sequence[int]) -> str:
        """What is written, as text."""
        if not self.continues:
            return self.tokenizer.decode(written)
        return self.tokenizer.decode([*self.read, *written])[
            len(self.tokenizer.decode(self.read)) :
        ]

    def given(self, fields: Fields, name: str = "prefix") -> list[int]:
        """The tokens that the text shall begin with, as a request names them."""
        value = fields.values.get(name, [])
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise Problem(400, f"'{name}' must be a list of tokens, whole numbers")
        if len(value) >= self.limit:
            raise Problem(
                413, f"'{name}' has {len(value)} tokens, but at most {self.limit} are written"
            )
        barred = set(self.special_tokens.suppressed)
        for place, token in enumerate(value, start=1):
            early = token == self.special_tokens.end and place < len(value)
            if not 0 <= token < self.vocabulary or token in barred or early:
                raise Problem(400, f"'{name}' holds {token}, which is never written there")
        return value

    def _batch(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.opened.device)


def generation_of(opened: TorchRun, fields: Fields, most_tokens: int) -> Generation:
    """What a request {text, beam?, limit?} asks a run to write from."""
    model: Any = opened.model
    if not isinstance(model, EncoderDecoder | Gpt):
        raise opened.unsupported("writes", "an encoder–decoder or a decoder-only model")
    beam = fields.number("beam", MOST_BEAM)
    asked = fields.number("limit", MOST_WRITTEN)
    check_at_least("limit", asked, 1)
    limit = USUAL if asked is None else asked
    decode = opened.run.decode if beam is None else opened.decode(beam=beam)
    if decode.beam > MOST_BEAM:
        decode = opened.decode(beam=MOST_BEAM)
    special = SpecialTokens(opened.tokenizer, decode)
    ids = opened.tokenizer.encode(fields.text("text", ""))
    room = SizeLimit(min(most_tokens, MOST_READ), 0)
    if not isinstance(model, Gpt):
        source = special.source(ids)
        room.check(source, model, "the text")
        return Generation(
            opened, decode, source, decode.limit(len(source), model.config.max_length)
        )
    prompt = ids or [special.start]
    room.check(prompt, model, "the text")
    positions = model.decoder.position.max_length
    if positions is not None:
        limit = min(limit, positions - len(prompt) + 1)
    return Generation(opened, decode, prompt, limit)
