"""The encoder-only Transformer: reads both ways (BERT)."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import UserError, check_at_least
from manyheads.models.heads import Answer, EncoderHead, EncoderWithHead, Masked, Pooler
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.layers import Embedding
from manyheads.nn.masks import full, make_mask
from manyheads.nn.shapes import Hidden, Tokens


@dataclass(frozen=True, kw_only=True)
class NextSentence:
    """Predicts from the pooled vector whether the second text follows the first."""

    classes: int = 2

    def __post_init__(self) -> None:
        check_at_least("next_sentence.classes", self.classes, 2)


@dataclass(frozen=True, kw_only=True)
class BertConfig(Architecture):
    """A bidirectional encoder, with the heads that stand on it."""

    head: EncoderHead | None = field(default_factory=Masked)
    pooler: Pooler | None = None
    next_sentence: NextSentence | None = None
    kind: ClassVar[str] = "bert"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.next_sentence is not None and self.pooler is None:
            raise UserError("model.next_sentence reads the pooled vector: set model.pooler=tanh")

    def build(self) -> "Bert":
        return Bert(self)


class Bert(EncoderWithHead):
    """Gives what its head gives; without a head next-sentence logits or hidden states."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.embed.width(config.dim))
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.encoder = Stack(config, causal=False)
        pooled_dim = self.crown(config, config.head, config.pooler, config.vocabulary)
        if config.next_sentence is not None:
            self.next_sentence = nn.Linear(pooled_dim, config.next_sentence.classes)
        initialise(self, config.init, config.layers)

    def stacks(self) -> dict[str, Stack]:
        return {"encoder": self.encoder}

    def embeddings(self) -> dict[str, Embedding]:
        return {"encoder": self.embedding}

    def hidden(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Hidden:
        self.encoder.position.check_length(tokens.shape[1])
        mask = make_mask(full, tokens.shape[1], padding_mask=real, device=tokens.device)
        x = self.embedding(
            self.tokens, tokens, self.encoder.position, mask.query_positions, segments
        )
        return self.encoder(x, mask)

    def logits(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*m"]:
        """What the head says of single vectors, e.g. of the masked positions alone."""
        return self.head(hidden, self.tokens)

    def follows(self, hidden: Hidden, real: Tensor | None = None) -> Float[Tensor, "b classes"]:
        """Next-sentence logits."""
        return self.next_sentence(self.pool(hidden, real))

    def answer(self, hidden: Hidden, real: Tensor | None = None) -> Answer:
        """What the model gives for the hidden states of whole texts."""
        if self.config.head is None:
            return hidden if self.config.next_sentence is None else self.follows(hidden, real)
        return self.logits(self.pool(hidden, real) if self.head.pooled else hidden)

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Answer:
        return self.answer(self.hidden(tokens, real, segments), real)
