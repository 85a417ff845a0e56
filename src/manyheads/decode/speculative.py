"""Speculative decoding (Leviathan et al. 2023): a small draft model proposes, the model decides.

The draft generates γ tokens x_1, …, x_γ one by one, and the model computes their probabilities in
one pass. With q the draft's probabilities and p the model's,

    x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i))

Instead of the first rejected token one is sampled from norm(max(0, p_i − q_i)), and the rest is
dropped; after γ accepted tokens one more is sampled from p_{γ+1}. The text has the model's
distribution whatever the draft is: a good draft only makes it faster. At temperature 0 the
probabilities are 0 and 1, and a proposal is accepted if it is the model's choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.decode.beam import LogitsConstraints
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
    accepted: int = 0

    def __str__(self) -> str:
        share = self.accepted / max(1, self.proposed)
        return f"{self.accepted} of {self.proposed} proposed tokens were accepted ({share:.0%})"


class CachedText:
    """A model and the cache of a text whose end may change."""

    def __init__(self, model: Gpt) -> None:
        self.model, self.cache = model.eval(), KVCache()
        self.max_length = model.decoder.position.max_length

    def logits(self, text: list[int], count: int) -> Float[Tensor, "count v"]:
        """Logits after each of the last `count` tokens; computes those that are not cached."""
        self.cache.truncate(min(self.cache.length, len(text) - count))
        device = self.model.tokens.weight.device
        new = torch.tensor([text[self.cache.length :]], device=device)
        hidden = self.model.hidden(new, cache=self.cache)
        return self.model.logits(hidden[0, -count:]).float()


@dataclass(frozen=True)
class Speculation:
    """One text, continued by a model and its draft."""

    model: CachedText
    draft: CachedText
    constraints: LogitsConstraints
    sample: Sample
    random: torch.Generator
    acceptance: Acceptance

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

    def _next(self, text: list[int], start: int, end: int, ahead: int) -> list[int]:
        """The accepted proposals, and one token of the model."""
        most = end - len(text) - 1  # proposals: one token is always the model's
        if self.draft.max_length is not None:
            most = min(most, self.draft.max_length - len(text) + 1)
        extended: list[int] = list(text)
        q: list[Distribution] = []
        for _ in range(min(ahead, most)):
            logits = self.draft.logits(extended, 1)
            q.append(self._probabilities(logits, len(extended) - start, end - start)[0])
            extended.append(self._pick(q[-1]))
            if extended[-1] == self.constraints.end:
                break
        logits = self.model.logits(extended, len(q) + 1)
        p = self._probabilities(logits, len(text) - start, end - start)
        proposed, accepted = extended[len(text) :], 0
        for token in proposed:
            uniform = float(torch.rand(1, generator=self.random))
            if uniform * float(q[accepted][token]) >= float(p[accepted][token]):
                break
            accepted += 1
        self.acceptance.proposed += len(proposed)
        self.acceptance.accepted += accepted
        if accepted < len(proposed):
            return [*proposed[:accepted], self._pick(_residual(p[accepted], q[accepted]))]
        if proposed and proposed[-1] == self.constraints.end:
            return proposed  # nothing follows the end
        return [*proposed, self._pick(p[accepted])]

    def _probabilities(self, logits: Float[Tensor, "t v"], done: int, limit: int) -> Probabilities:
        """The probabilities that tokens are sampled from, after `done` tokens."""
        lengths = torch.arange(done + 1, done + 1 + len(logits), device=logits.device)
        self.constraints.apply(logits, lengths, lengths == limit)
        return filtered(logits, self.sample).softmax(-1)

    def _pick(self, probabilities: Distribution) -> int:
        uniform = torch.rand(1, generator=self.random).to(probabilities.device)
        return int(pick(probabilities[None], uniform))


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """max(0, p − q); p if that is zero everywhere, because p and q differ only by rounding."""
    residual = (p - q).clamp(min=0)
    return torch.where(residual.sum() > 0, residual, p)


@dataclass(frozen=True)
class Speculative(Generator):
    """A generator that samples with the help of a draft; its beam search is the usual one.

    `ahead` is γ, the number of tokens that the draft proposes at a time. At temperature 0 the text
    is the model's (up to rounding: one pass over several tokens may round differently).
    """

    draft: Gpt = field(kw_only=True)
    ahead: int = field(default=4, kw_only=True)
    acceptance: Acceptance = field(default_factory=Acceptance, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_at_least("ahead", self.ahead, 1)
        tokens = self.draft.tokens.num_embeddings
        if self.vocabulary != tokens:
            raise UserError(
                f"the draft has {tokens} tokens and the model {self.vocabulary}: choose a draft "
                "trained with the same tokenizer"
            )

    def _sample(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler
    ) -> list[list[int]]:
        rows = zip(texts[0].tolist(), limits.tolist(), sampler.random, strict=True)
        end = self.special_tokens.end
        return [
            [token for token in self._speculate(*row, sampler.sample) if token != end]
            for row in rows
        ]

    def _stream(self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler) -> Iterator[Rows]:
        [prompt], [limit], [random] = texts[0].tolist(), limits.tolist(), sampler.random
        for token in self._speculate(prompt, limit, random, sampler.sample):
            yield torch.tensor([token])

    def _speculate(
        self, prompt: list[int], limit: int, random: torch.Generator, sample: Sample
    ) -> Iterator[int]:
        models = CachedText(self.model), CachedText(self.draft)
        text = Speculation(*models, self.constraints, sample, random, self.acceptance)
        return text.generate(prompt, limit, self.ahead)


def with_draft(generator: BaseGenerator, draft: BaseGenerator) -> Speculative:
    """The same generator with the model of another one as its draft."""
    if not isinstance(generator, Generator) or not isinstance(draft, Generator):
        raise UserError("--draft works only with runs; one of these was exported: use the run")
    if generator.tokenizer.to_json() != draft.tokenizer.to_json():
        raise UserError(
            "the draft has another tokenizer: choose a run trained with the same tokenizer"
        )
    how = generator.tokenizer, generator.decode, generator.warn, generator.graphs
    return Speculative(generator.model, *how, draft=draft.model)
