"""Settings that the translators before the Transformer share, LSTMs and convolutions."""

from dataclasses import dataclass
from typing import Annotated, Literal

from manyheads.config import Count, Probability
from manyheads.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BaselineSizes:
    """Sizes of an encoder–decoder without Transformer blocks."""

    vocab_size: Annotated[Count | None, "Tokens; a run takes it from its tokenizer"] = None
    dim: Annotated[Count, "Width of embeddings and layers"] = 256
    layers: Annotated[Count, "Layers of the encoder, and of the decoder"] = 2
    max_length: Annotated[Count, "Longest text in training and decoding, in tokens"] = 512
    tie: Annotated[Literal["all", "none"], "One matrix for source, target and output, or three"] = (
        "all"
    )
    dropout: Annotated[Probability, "Dropout of embeddings and layers"] = 0.1

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    @property
    def shares_inputs(self) -> bool:
        """True if source and target tokens have one embedding."""
        return self.tie == "all"
