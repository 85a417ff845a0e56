"""What the translators before the Transformer are told alike, LSTMs and convolutions."""

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import UserError, check_at_least, check_share


@dataclass(frozen=True, kw_only=True)
class BaselineSizes:
    """The sizes that each of them has.

    `dim` is the width of the embeddings, `layers` are those of each side, `max_length` is what a
    run trains on and writes; `tie`: one matrix for source, target and output, or one for each.
    """

    vocab_size: int | None = None
    dim: int = 256
    layers: int = 2
    max_length: int = 512
    tie: Literal["all", "none"] = "all"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "max_length"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_share("model.dropout", self.dropout)

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    @property
    def shares_inputs(self) -> bool:
        """Whether source and target tokens are looked up in one table."""
        return self.tie == "all"
