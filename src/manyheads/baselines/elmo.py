"""Two LSTM language models, one a direction, and vectors of words in their context (ELMo).

Deep contextualized word representations (Peters et al. 2018). One model reads forward and predicts
the token that follows, the other backward and predicts the one before; they share the token table.
Layer j has →h_j and ←h_j at each place, h_j = [→h_j; ←h_j], and h_0 the token itself, twice.
What stands on top learns which layers it needs:

    ELMo = γ Σ_j s_j h_j,  s = softmax(w)

and reads these vectors with an LSTM both ways; the greatest of each channel gives the labels.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.baselines.rnn import initialise_lstm, lengths_of, read_both_ways
from manyheads.errors import UserError, check_at_least, check_share
from manyheads.models.base import Model
from manyheads.models.heads import Answer, Classify
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens

Layers = Float[Tensor, "layers b t d"]


@dataclass(frozen=True, kw_only=True)
class ElmoConfig:
    """Language models of both directions, and where it has one the classifier on top.

    `dim` is the width of the embeddings and of each direction; `tie`: one matrix for tokens and
    output, or one for each. `frozen` language models stay as they were pretrained, and what stands
    on top is trained alone. `max_length` is what a run trains on and reads.
    """

    vocab_size: int | None = None
    dim: int = 256
    layers: int = 2
    max_length: int = 512
    head: Classify | None = None
    frozen: bool = False
    tie: Literal["all", "none"] = "all"
    dropout: float = 0.1
    kind: ClassVar[str] = "elmo"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "max_length"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_share("model.dropout", self.dropout)
        if self.frozen and self.head is None:
            raise UserError("model.frozen leaves nothing to train: set it with model.head=classify")

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    def build(self) -> "Elmo":
        return Elmo(self)


class ContextHead(nn.Module):
    """ELMo = γ Σ_j s_j h_j, an LSTM that reads it both ways, and the labels of a text."""

    def __init__(self, config: ElmoConfig, head: Classify) -> None:
        super().__init__()
        wide = 2 * config.dim
        self.dropout = nn.Dropout(config.dropout if head.dropout is None else head.dropout)
        self.weights = nn.Parameter(torch.zeros(config.layers + 1))
        self.gamma = nn.Parameter(torch.ones(()))
        self.reader = nn.LSTM(wide, config.dim, batch_first=True, bidirectional=True)
        self.output = nn.Linear(wide, len(head.labels))

    def mixed(self, layers: Layers) -> Hidden:
        return self.gamma * einsum(self.weights.softmax(0), layers, "j, j b t d -> b t d")

    def forward(self, layers: Layers, real: PaddingMask | None = None) -> Answer:
        x = read_both_ways(self.reader, self.dropout(self.mixed(layers)), real)
        if real is not None:
            x = x.masked_fill(~real[..., None], -math.inf)
        return self.output(self.dropout(x.amax(1)))


class Elmo(Model):
    """Gives labels where it has a head for them; without, what its top has of each place."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.scale = math.sqrt(dim)  # the table has entries of N(0, 1/d), gates want N(0, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.ahead, self.back = (
            nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(config.layers))
            for _ in range(2)
        )
        if config.head is None:
            self.output = LMHead(config.vocabulary, dim, tied=config.tie == "all", bias="none")
        else:
            self.head = ContextHead(config, config.head)
        initialise(self, "xavier", config.layers)
        for part in self.modules():
            if isinstance(part, nn.LSTM):
                initialise_lstm(part)

    def directions(self, tokens: Tokens, real: PaddingMask | None = None) -> tuple[Layers, Layers]:
        """→h and ←h of every layer, the tokens first; neither has read any padding before it."""
        train = torch.is_grad_enabled() and not self.config.frozen
        with torch.set_grad_enabled(train):
            x = self.dropout(self.tokens(tokens) * self.scale)
            back = self._read(self.back, turned(x, real))
            return self._read(self.ahead, x), torch.stack([turned(one, real) for one in back])

    def _read(self, lstms: nn.ModuleList, x: Hidden) -> Layers:
        found = [x]
        for lstm in lstms:
            read, _ = lstm(self.dropout(x))
            x = read + x if len(found) > 1 else read  # a residual around each but the first
            found.append(x)
        return torch.stack(found)

    def contexts(self, tokens: Tokens, real: PaddingMask | None = None) -> Layers:
        """h of every layer."""
        return torch.cat(self.directions(tokens, real), dim=-1)

    def hidden(
        self, tokens: Tokens, real: PaddingMask | None = None, segments: Tensor | None = None
    ) -> Hidden:
        """The vectors of the tokens in their context: those that the head mixes, or the top's."""
        layers = self.contexts(tokens, real)
        return layers[-1] if self.config.head is None else self.head.mixed(layers)

    def forward(
        self, tokens: Tokens, real: PaddingMask | None = None, segments: Tensor | None = None
    ) -> Answer:
        if self.config.head is None:
            return self.hidden(tokens, real)
        return self.head(self.contexts(tokens, real), real)


def turned(x: Hidden, real: PaddingMask | None) -> Hidden:
    """Each text from its last vector to its first; padding stays behind it."""
    if real is None:
        return x.flip(1)
    places = torch.arange(x.shape[1], device=x.device)
    lengths = lengths_of(real)[:, None]
    order = torch.where(places < lengths, lengths - 1 - places, places)
    return x.gather(1, order[..., None].expand_as(x))
