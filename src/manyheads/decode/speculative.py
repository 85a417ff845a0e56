"""Speculative decoding (Leviathan et al. 2023): a small model proposes, the model itself decides.

The draft writes γ tokens x_1, …, x_γ, one after the other, and the model reads them all in one
pass. With q the draft's probabilities and p the model's,

    x_i is taken with probability min(1, p_i(x_i) / q_i(x_i))

The first that is not is drawn anew from norm(max(0, p_i − q_i)), and what follows it is forgotten;
after γ that were taken one more is drawn from p_{γ+1}. What is written is distributed as the
model alone would write it, whatever the draft is: a good draft only makes it faster. At temperature
0 the probabilities are 0 and 1, and a proposal is taken where it is the model's own choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.decode.beam import Allowed
from manyheads.decode.generate import AnyGenerator, Generator, Prompts, Rows
from manyheads.decode.kv_cache import KeyValueCache
from manyheads.decode.sample import Sample, Sampler, filtered, pick
from manyheads.errors import UserError, check_at_least
from manyheads.models.gpt import Gpt

Chances = Float[Tensor, "t v"]


@dataclass
class Told:
    """How many tokens were proposed, and how many of them were taken."""

    proposed: int = 0
    taken: int = 0

    def __str__(self) -> str:
        share = self.taken / max(1, self.proposed)
        return f"{self.taken} of {self.proposed} proposed tokens were taken ({share:.0%})"


class Reader:
    """A model and what it has read of a text; the end of the text may change."""

    def __init__(self, model: Gpt) -> None:
        self.model, self.cache = model.eval(), KeyValueCache()

    def after(self, text: list[int], wanted: int) -> Float[Tensor, "wanted v"]:
        """Logits after each of the last so many tokens; reads those that it has not read."""
        # At least as many as are asked for are read, those before are known.
        self.cache.cut(min(self.cache.length, len(text) - wanted))
        device = self.model.tokens.weight.device
        new = torch.tensor([text[self.cache.length :]], device=device)
        hidden = self.model.hidden(new, cache=self.cache)
        return self.model.logits(hidden[0, -wanted:]).float()

    @property
    def most(self) -> int | None:
        """The longest text that it can read."""
        return self.model.decoder.position.max_length


class Speculation:
    """One text, written on by a model and its draft; random numbers are the text's own."""

    def __init__(
        self,
        model: Reader,
        draft: Reader,
        allowed: Allowed,
        sample: Sample,
        random: torch.Generator,
        told: Told,
    ) -> None:
        self.model, self.draft, self.allowed = model, draft, allowed
        self.sample, self.random, self.told = sample, random, told

    def write(self, prompt: list[int], limit: int, ahead: int) -> Iterator[int]:
        """The tokens after a prompt, an end included."""
        text, end = list(prompt), len(prompt) + limit
        while len(text) < end:
            with torch.no_grad():  # inside: whoever takes the tokens may want gradients
                new = self._next(text, len(prompt), end, ahead)
            for token in new:
                text.append(token)
                yield token
                if token == self.allowed.end:
                    return

    def _next(self, text: list[int], begun: int, end: int, ahead: int) -> list[int]:
        """The proposed tokens that are taken, and one of the model's own."""
        room = end - len(text) - 1  # for proposals: one token is always the model's
        if self.draft.most is not None:
            room = min(room, self.draft.most - len(text) + 1)
        whole, guesses = list(text), []
        for _ in range(min(ahead, room)):
            logits = self.draft.after(whole, 1)
            guesses.append(self._chances(logits, len(whole) - begun, end - begun)[0])
            whole.append(self._draw(guesses[-1]))
            if whole[-1] == self.allowed.end:
                break
        logits = self.model.after(whole, len(guesses) + 1)
        chances = self._chances(logits, len(text) - begun, end - begun)
        proposed, taken = whole[len(text) :], 0
        while taken < len(proposed) and self._takes(
            proposed[taken], chances[taken], guesses[taken]
        ):
            taken += 1
        self.told.proposed += len(proposed)
        self.told.taken += taken
        if taken < len(proposed):
            return [*proposed[:taken], self._draw(_rest(chances[taken], guesses[taken]))]
        if proposed and proposed[-1] == self.allowed.end:
            return proposed  # nothing follows
        return [*proposed, self._draw(chances[taken])]

    def _takes(self, token: int, p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> bool:
        chance = float(torch.rand(1, generator=self.random))
        return chance * float(q[token]) < float(p[token])

    def _chances(self, logits: Float[Tensor, "t v"], written: int, limit: int) -> Chances:
        """The probabilities of the next places, after so many tokens, by how it is drawn."""
        total = logits.logsumexp(-1, keepdim=True)
        for number in range(len(logits)):
            place, row = written + number + 1, slice(number, number + 1)
            last = torch.tensor([place == limit], device=logits.device)
            self.allowed.apply(logits[row], total[row], place, last)
        return filtered(logits, self.sample).softmax(-1)

    def _draw(self, chances: Float[Tensor, " v"]) -> int:
        chance = torch.rand(1, generator=self.random).to(chances.device)
        return int(pick(chances[None], chance))


def _rest(p: Float[Tensor, " v"], q: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """max(0, p − q); where that is nothing, two that differ by rounding alone, p."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum() > 0, rest, p)


@dataclass(frozen=True)
class Speculative(Generator):
    """A generator that draws with the help of a draft; it searches as ever.

    `ahead` is how many tokens the draft proposes at a time. At temperature 0 what is written is
    what the model alone writes (as far as one pass over several tokens rounds as several do).
    """

    draft: Gpt = field(kw_only=True)
    ahead: int = field(default=4, kw_only=True)
    told: Told = field(default_factory=Told, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_at_least("ahead", self.ahead, 1)
        own, other = self.vocabulary, self.draft.tokens.num_embeddings
        if own != other:
            raise UserError(
                f"the draft has {other} tokens and the model {own}: choose one that was trained "
                "with the same tokenizer"
            )

    def _written(self, read: Prompts, limits: Rows, sampler: Sampler) -> list[list[int]]:
        end = self.marks.end
        return [
            [token for token in self._speculate(prompt, limit, sampler, row) if token != end]
            for row, (prompt, limit) in enumerate(zip(read.tolist(), limits.tolist(), strict=True))
        ]

    def _followed(self, read: Prompts, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        [prompt], [limit] = read.tolist(), limits.tolist()
        return (torch.tensor([token]) for token in self._speculate(prompt, limit, sampler, 0))

    def _speculate(
        self, prompt: list[int], limit: int, sampler: Sampler, row: int
    ) -> Iterator[int]:
        model, draft = Reader(self.model), Reader(self.draft)
        sample, random = sampler.sample, sampler.random[row]
        text = Speculation(model, draft, self.allowed, sample, random, self.told)
        return text.write(prompt, limit, self.ahead)


def drafted(generator: AnyGenerator, draft: AnyGenerator) -> Speculative:
    """The same generator with the model of another one as its draft."""
    if not isinstance(generator, Generator) or not isinstance(draft, Generator):
        raise UserError("a draft and what it helps are runs themselves: one of these was exported")
    if generator.tokenizer.to_json() != draft.tokenizer.to_json():
        raise UserError(
            "the draft has another tokenizer: choose a run that was trained on the same texts with "
            "the same tokens"
        )
    how = generator.tokenizer, generator.decode, generator.warn, generator.recordings
    return Speculative(generator.model, *how, draft=draft.model)
