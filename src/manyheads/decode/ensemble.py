"""Ensembles: several models generate one text, each token by the mean of their probabilities.

    P(y_t | y_<t, x) = 1/m Σ_i P_i(y_t | y_<t, x)

Models may be of different kinds and sizes, but must share a tokenizer. The usual members are runs
that differ only in their seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import Decode, DecoderSession, Parents
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class EnsembleSession:
    """Sessions of several models over the same hypotheses."""

    members: Sequence[DecoderSession]

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        """log Σ_i P_i: as logits, those of the mean."""
        logs = [member.step(tokens).float().log_softmax(-1) for member in self.members]
        return torch.stack(logs).logsumexp(0)

    def reorder(self, parents: Parents) -> None:
        for member in self.members:
            member.reorder(parents)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        for member in self.members:
            member.keep_sentences(sentences)


@dataclass(frozen=True)
class EnsembleTranslator(BaseTranslator):
    """Translators that generate together, with the settings of the first."""

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
    """One translator of several; refuses those with different tokens."""
    first, *others = members
    for other in others:
        if other.tokenizer.to_json() != first.tokenizer.to_json():
            raise UserError(
                "the runs have different tokenizers: choose runs trained with the same tokenizer"
            )
        same_frame = other.special_tokens.frame == first.special_tokens.frame
        if not same_frame or other.vocabulary != first.vocabulary:
            raise UserError(
                "the runs have different start and end tokens or vocabulary sizes: choose runs "
                "trained with the same settings"
            )
    return EnsembleTranslator(tuple(members), first.tokenizer, first.decode) if others else first
