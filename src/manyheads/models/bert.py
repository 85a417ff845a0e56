"""The encoder-only Transformer: reads both ways (BERT)."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import check_at_least
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.embedding import Head
from manyheads.nn.feedforward import ACTIVATIONS, Activation
from manyheads.nn.masks import full, look
from manyheads.nn.shapes import Hidden, Tokens


@dataclass(frozen=True, kw_only=True)
class MaskedHead:
    """Predicts the masked tokens: a projection, an activation, a norm, the tied matrix."""

    activation: Activation = "gelu"


@dataclass(frozen=True, kw_only=True)
class NextSentence:
    """Predicts from the first position whether the second text follows the first."""

    classes: int = 2

    def __post_init__(self) -> None:
        check_at_least("next_sentence.classes", self.classes, 2)


@dataclass(frozen=True, kw_only=True)
class BertConfig(Architecture):
    """A bidirectional encoder with the heads it is pretrained with."""

    masked: MaskedHead | None = field(default_factory=MaskedHead)
    next_sentence: NextSentence | None = field(default_factory=NextSentence)
    kind: ClassVar[str] = "bert"

    def build(self) -> "Bert":
        return Bert(self)


class Bert(nn.Module):
    """Gives masked-language-model logits, or hidden states without that head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.encoder = Stack(config, causal=False)
        if config.masked is not None:
            self.transform = nn.Linear(config.dim, config.dim)
            self.activation = ACTIVATIONS[config.masked.activation]
            self.transform_norm = config.norm.build(config.dim)
            self.head = Head(config.vocabulary, config.dim, tied=True, bias=True)
        if config.next_sentence is not None:
            self.pooler = nn.Linear(config.dim, config.dim)
            self.next_sentence = nn.Linear(config.dim, config.next_sentence.classes)
        initialise(self, config.initial, config.layers)

    def hidden(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Hidden:
        self.encoder.position.refuse_past(tokens.shape[1])
        sight = look(full, tokens.shape[1], real=real, device=tokens.device)
        x = self.embedding(self.tokens, tokens, self.encoder.position, sight.queries, segments)
        return self.encoder(x, sight)

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        return self.head(self.transform_norm(self.activation(self.transform(hidden))), self.tokens)

    def follows(self, hidden: Hidden) -> Float[Tensor, "b classes"]:
        """Next-sentence logits from the first position."""
        return self.next_sentence(self.pooler(hidden[:, 0]).tanh())

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Float[Tensor, "b t n"]:
        hidden = self.hidden(tokens, real, segments)
        return hidden if self.config.masked is None else self.logits(hidden)
