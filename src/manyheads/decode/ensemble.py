"""Several models that write one text together, each token by the mean of their probabilities.

    P(y_t | y_<t, x) = 1/m Σ_i P_i(y_t | y_<t, x)

They need not be of one kind or size, but must share a tokenizer. Runs that differ in their seed
alone are the plainest case: what each of them has learned by chance the others vote down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import Decode, Stepper
from manyheads.decode.translate import AnyTranslator, RealSources, Sources
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer


class Steppers:
    """Models in the middle of writing the same rows."""

    def __init__(self, members: Sequence[Stepper]) -> None:
        self.members = members

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        """The log of the sum of their probabilities: as logits, those of the mean."""
        logs = [member.step(tokens).log_softmax(-1) for member in self.members]
        return torch.stack(logs).logsumexp(0)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        for member in self.members:
            member.reorder(rows)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        for member in self.members:
            member.keep_sentences(sentences)


@dataclass(frozen=True)
class Together(AnyTranslator):
    """Translators that write as one, with the settings of the first."""

    members: tuple[AnyTranslator, ...]
    tokenizer: Tokenizer
    decode: Decode

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    @property
    def max_length(self) -> int:
        return min(member.max_length for member in self.members)

    @property
    def vocabulary(self) -> int:
        return self.members[0].vocabulary

    def begin(self, source: Sources, real: RealSources) -> Stepper:
        return Steppers([member.begin(source, real) for member in self.members])


def together(members: Sequence[AnyTranslator]) -> AnyTranslator:
    """The translators as one; refuses those that could not read or write the same tokens."""
    first, *others = members
    for other in others:
        if other.tokenizer.to_json() != first.tokenizer.to_json():
            raise UserError(
                "the runs have different tokenizers, and write together token by token: choose "
                "runs that were trained on the same texts with the same tokens"
            )
        if other.marks.frame != first.marks.frame or other.vocabulary != first.vocabulary:
            raise UserError(
                "the runs begin and end texts with different tokens, or have different numbers of "
                "them: choose runs that were trained alike"
            )
    if any(type(member).begin is AnyTranslator.begin for member in members):
        raise UserError("CTranslate2 writes by itself and not with others: use the runs themselves")
    return Together(tuple(members), first.tokenizer, first.decode) if others else first
