"""The decoder-only Transformer: a language model (GPT)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from manyheads.nn.attention import Cache
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.embedding import Output
from manyheads.nn.masks import SameDocument, both, causal, look
from manyheads.nn.shapes import Hidden, Logits, Tokens


@dataclass(frozen=True, kw_only=True)
class GptConfig(Architecture):
    """A causal language model; its head is tied to the embedding unless told otherwise."""

    tie: Literal["all", "none"] = "all"
    output: Output = field(default_factory=Output)
    kind: ClassVar[str] = "gpt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()

    def build(self) -> "Gpt":
        return Gpt(self)


class Gpt(nn.Module):
    """logits[:, t] predict the token after tokens[:, t]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.decoder = Stack(config, causal=True)
        self.head = config.output.build(config.vocabulary, config.dim, tied=config.tie == "all")
        initialise(self, config.initial, config.layers)

    def hidden(
        self,
        tokens: Tokens,
        real: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Hidden:
        """With `documents`, numbers of what is packed into a row, each is read as if alone."""
        length = tokens.shape[1]
        self.decoder.position.refuse_past(length if cache is None else cache.end(length))
        own = None if documents is None else SameDocument(documents)
        rule = causal if own is None else both(causal, own)
        if cache is None:
            sight = look(rule, length, real=real, device=tokens.device)
        else:
            sight = cache.mask(rule, length, real, tokens.device)
        places = sight.queries if own is None else own.places()
        x = self.embedding(self.tokens, tokens, self.decoder.position, places)
        hidden: Tensor = self.decoder(x, sight, cache=cache)
        if cache is not None:
            cache.advance()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.tokens)

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, cache: Cache | None = None
    ) -> Logits:
        return self.logits(self.hidden(tokens, real, cache))
