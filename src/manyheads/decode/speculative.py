"""Speculative decoding (Leviathan et al. 2023): a small draft model proposes, the model decides.

The draft generates γ tokens x_1, …, x_γ, one after the other, and the model reads them in one
pass. With q the draft's probabilities and p the model's,

    x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i))

The first one that is not is sampled anew from norm(max(0, p_i − q_i)), and the rest is dropped;
after γ accepted ones one more is sampled from p_{γ+1}. The text has the distribution of the model
alone, whatever the draft is: a good draft only makes it faster. At temperature 0 the probabilities
are 0 and 1, and a proposal is accepted where it is the model's own choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.decode.constraints import LogitsConstraints
from manyheads.decode.decoder import Rows, Texts
from manyheads.decode.generate import BaseGenerator, Generator
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.sample import Sample, Sampler, filtered, pick
from manyheads.errors import UserError, check_at_least
from manyheads.models.gpt import Gpt

Probabilities = Float[Tensor, "t v"]
Distribution = Float[Tensor, " v"]


@dataclass
class Acceptance:
    """How many tokens were proposed, and how many of them were accepted."""

    proposed: int = 0
    taken: int = 0

    def __str__(self) -> str:
        share = self.taken / max(1, self.proposed)
        return f"{self.taken} of {self.proposed} proposed tokens were taken ({share:.0%})"


class Reader:
    """A model and its cache of a text; the end of the text may change."""

    def __init__(self, model: Gpt) -> None:
        self.model, self.cache = model.eval(), KVCache()

    def logits(self, text: list[int], count: int) -> Float[Tensor, "count v"]:
        """Logits after each of the last `count` tokens; reads those that are not cached."""
        self.cache.cut(min(self.cache.length, len(text) - count))
        device = self.model.tokens.weight.device
        new = torch.tensor([text[self.cache.length :]], device=device)
        hidden = self.model.hidden(new, cache=self.cache)
        return self.model.logits(hidden[0, -count:]).float()

    @property
    def max_length(self) -> int | None:
        """The longest text that it can read."""
        return self.model.decoder.position.max_length


class Speculation:
    """One text, continued by a model and its draft, with random numbers of its own."""

    def __init__(
        self,
        model: Reader,
        draft: Reader,
        constraints: LogitsConstraints,
        sample: Sample,
        random: torch.Generator,
        acceptance: Acceptance,
    ) -> None:
        self.model, self.draft, self.constraints = model, draft, constraints
        self.sample, self.random, self.acceptance = sample, random, acceptance

    def generate(self, prompt: list[int], limit: int, ahead: int) -> Iterator[int]:
        """The tokens after a prompt, an end included."""
        text, end = list(prompt), len(prompt) + limit
        while len(text) < end:
            with torch.no_grad():  # inside: the caller may want gradients
                new = self._next(text, len(prompt), end, ahead)
            for token in new:
                text.append(token)
                yield token
                if token == self.constraints.end:
                    return

    def _next(self, text: list[int], begun: int, end: int, ahead: int) -> list[int]:
        """The proposed tokens that are accepted, and one of the model's own."""
        most = end - len(text) - 1  # proposals: one token is always the model's
        if self.draft.max_length is not None:
            most = min(most, self.draft.max_length - len(text) + 1)
        extended, guesses = list(text), []
        for _ in range(min(ahead, most)):
            logits = self.draft.logits(extended, 1)
            guesses.append(self._probabilities(logits, len(extended) - begun, end - begun)[0])
            extended.append(self._pick(guesses[-1]))
            if extended[-1] == self.constraints.end:
                break
        logits = self.model.logits(extended, len(guesses) + 1)
        own = self._probabilities(logits, len(text) - begun, end - begun)
        proposed, taken = extended[len(text) :], 0
        while taken < len(proposed) and self._accepts(proposed[taken], own[taken], guesses[taken]):
            taken += 1
        self.acceptance.proposed += len(proposed)
        self.acceptance.taken += taken
        if taken < len(proposed):
            return [*proposed[:taken], self._pick(_rest(own[taken], guesses[taken]))]
        if proposed and proposed[-1] == self.constraints.end:
            return proposed  # nothing follows
        return [*proposed, self._pick(own[taken])]

    def _accepts(self, token: int, p: Distribution, q: Distribution) -> bool:
        uniform = float(torch.rand(1, generator=self.random))
        return uniform * float(q[token]) < float(p[token])

    def _probabilities(
        self, logits: Float[Tensor, "t v"], written: int, limit: int
    ) -> Probabilities:
        """The probabilities of the next positions, after `written` tokens, as they are sampled."""
        lengths = torch.arange(written + 1, written + 1 + len(logits), device=logits.device)
        self.constraints.apply(logits, lengths, lengths == limit)
        return filtered(logits, self.sample).softmax(-1)

    def _pick(self, probabilities: Distribution) -> int:
        uniform = torch.rand(1, generator=self.random).to(probabilities.device)
        return int(pick(probabilities[None], uniform))


def _rest(p: Distribution, q: Distribution) -> Distribution:
    """max(0, p − q); p where that is zero everywhere, because the two differ only by rounding."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum() > 0, rest, p)


@dataclass(frozen=True)
class Speculative(Generator):
    """A generator that samples with the help of a draft; its search is the usual one.

    `ahead` is the number of tokens that the draft proposes at a time. At temperature 0 the text is
    that of the model alone (as far as one pass over several tokens rounds as several do).
    """

    draft: Gpt = field(kw_only=True)
    ahead: int = field(default=4, kw_only=True)
    acceptance: Acceptance = field(default_factory=Acceptance, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_at_least("ahead", self.ahead, 1)
        own, other = self.vocabulary, self.draft.tokens.num_embeddings
        if own != other:
            raise UserError(
                f"the draft has {other} tokens and the model {own}: choose one that was trained "
                "with the same tokenizer"
            )

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        rows = zip(texts[0].tolist(), limits.tolist(), strict=True)
        end = self.special_tokens.end
        return [
            [token for token in self._speculate(prompt, limit, sampler, row) if token != end]
            for row, (prompt, limit) in enumerate(rows)
        ]

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        [prompt], [limit] = texts[0].tolist(), limits.tolist()
        return (torch.tensor([token]) for token in self._speculate(prompt, limit, sampler, 0))

    def _speculate(
        self, prompt: list[int], limit: int, sampler: Sampler, row: int
    ) -> Iterator[int]:
        models = Reader(self.model), Reader(self.draft)
        random = sampler.random[row]
        text = Speculation(*models, self.constraints, sampler.sample, random, self.acceptance)
        return text.generate(prompt, limit, self.ahead)


def with_draft(generator: BaseGenerator, draft: BaseGenerator) -> Speculative:
    """The same generator with the model of another one as its draft."""
    if not isinstance(generator, Generator) or not isinstance(draft, Generator):
        raise UserError("a draft and what it helps are runs themselves: one of these was exported")
    if generator.tokenizer.to_json() != draft.tokenizer.to_json():
        raise UserError(
            "the draft has another tokenizer: choose a run that was trained on the same texts with "
            "the same tokens"
        )
    how = generator.tokenizer, generator.decode, generator.warn, generator.graphs
    return Speculative(generator.model, *how, draft=draft.model)
