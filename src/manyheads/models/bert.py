"""The encoder-only Transformer: bidirectional self-attention (BERT).

With `causal` it is a decoder that reads texts (GPT fine-tuned for classification): the last
position, which sees all others, stands for the text.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.config import Between
from manyheads.errors import UserError
from manyheads.models.heads import EncoderHead, EncoderWithHead, HeadOutput, Masked, Pooler
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens


@dataclass(frozen=True, kw_only=True)
class NextSentence:
    """Predicts from the pooled vector whether the second text follows the first."""

    classes: Annotated[int, Between(2), "Classes; 2: follows or not"] = 2


@dataclass(frozen=True, kw_only=True)
class BertConfig(Architecture):
    """A bidirectional encoder and its heads."""

    head: Annotated[EncoderHead | None, "Head; none: hidden states"] = field(default_factory=Masked)
    pooler: Annotated[Pooler | None, "One vector per text; none: the first position's"] = None
    next_sentence: Annotated[NextSentence | None, "Head for next-sentence prediction"] = None
    causal: Annotated[bool, "Attend to earlier positions only; pool the last one"] = False
    kind: ClassVar[str] = "bert"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.next_sentence is not None and self.pooler is None:
            raise UserError("model.next_sentence needs a pooled vector: set model.pooler=tanh")
        if self.causal and self.pooler is not None:
            raise UserError("model.causal=true pools the last position: set model.pooler=none")

    def build(self) -> "Bert":
        return Bert(self)


class Bert(EncoderWithHead):
    """Gives its head's output; without a head, next-sentence logits or hidden states."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.embed.width(config.dim))
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.encoder = Stack(config, causal=config.causal)
        pooled_dim = self.build_head(config, config.head, config.pooler)
        if config.next_sentence is not None:
            self.next_sentence = nn.Linear(pooled_dim, config.next_sentence.classes)
        initialise(self, config.init, config.layers)

    def hidden(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Hidden:
        self.encoder.position.check_length(tokens.shape[1])
        rule = causal if self.config.causal else full
        mask = make_mask(rule, tokens.shape[1], padding_mask=real, device=tokens.device)
        x = self.embedding(
            self.tokens, tokens, self.encoder.position, mask.query_positions, segments
        )
        return self.encoder(x, mask)

    def pool(self, hidden: Hidden, real: PaddingMask | None = None) -> Float[Tensor, "b p"]:
        if not self.config.causal:
            return super().pool(hidden, real)
        if real is None:
            return hidden[:, -1]
        return hidden[torch.arange(len(hidden), device=hidden.device), real.sum(1) - 1]

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*m"]:
        """The head's output for single vectors, e.g. those of the masked positions."""
        return self.head(hidden, self.tokens)

    def next_sentence_logits(
        self, hidden: Hidden, real: Tensor | None = None
    ) -> Float[Tensor, "b classes"]:
        """Next-sentence logits."""
        return self.next_sentence(self.pool(hidden, real))

    def head_output(self, hidden: Hidden, real: Tensor | None = None) -> HeadOutput:
        """The model's output for the hidden states of texts."""
        if self.config.head is None and self.config.next_sentence is None:
            return hidden
        if self.config.head is None:
            return self.next_sentence_logits(hidden, real)
        return self.logits(self.pool(hidden, real) if self.head.pooled else hidden)

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> HeadOutput:
        return self.head_output(self.hidden(tokens, real, segments), real)
