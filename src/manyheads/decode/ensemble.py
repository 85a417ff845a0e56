"""Ensembles: several models generate one text, each token by the mean of their probabilities.

    P(y_t | y_<t, x) = 1/m Σ_i P_i(y_t | y_<t, x)

They may be of different kinds and sizes, but must share a tokenizer. The usual members are runs
that differ only in their seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import Decode, DecoderSession
from manyheads.decode.decoder import BaseDecoder
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer


class EnsembleSession:
    """Sessions of several models over the same hypotheses."""

    def __init__(self, members: Sequence[DecoderSession]) -> None:
        self.members = members

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        """The log of the sum of their probabilities: as logits, those of the mean."""
        logs = [member.step(tokens).float().log_softmax(-1) for member in self.members]
        return torch.stack(logs).logsumexp(0)

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        for member in self.members:
            member.reorder(parents)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        for member in self.members:
            member.keep_sentences(sentences)


@dataclass(frozen=True)
class EnsembleTranslator(BaseTranslator):
    """Translators that generate as one, with the settings of the first."""

    members: tuple[BaseTranslator, ...]
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

    def begin(self, *texts: Tensor) -> DecoderSession:
        return EnsembleSession([member.begin(*texts) for member in self.members])


def ensemble(members: Sequence[BaseTranslator]) -> BaseTranslator:
    """The translators as one; refuses those that do not read or generate the same tokens."""
    first, *others = members
    for other in others:
        if other.tokenizer.to_json() != first.tokenizer.to_json():
            raise UserError(
                "the runs have different tokenizers, and write together token by token: choose "
                "runs that were trained on the same texts with the same tokens"
            )
        if (
            other.special_tokens.frame != first.special_tokens.frame
            or other.vocabulary != first.vocabulary
        ):
            raise UserError(
                "the runs begin and end texts with different tokens, or have different numbers of "
                "them: choose runs that were trained alike"
            )
    if any(type(member).begin is BaseDecoder.begin for member in members):
        raise UserError("CTranslate2 writes by itself and not with others: use the runs themselves")
    return EnsembleTranslator(tuple(members), first.tokenizer, first.decode) if others else first
