"""Contextual word vectors from a forward and a backward LSTM language model (ELMo).

Deep contextualized word representations (Peters et al. 2018). One model predicts the next token,
the other the previous one; they share the token embedding. Layer j gives h_j = [→h_j; ←h_j] at
each position; h_0 is the token embedding, twice. The classifier learns a mixture of the layers:

    ELMo = γ Σ_j s_j h_j,  s = softmax(w)

followed by a bidirectional LSTM, max-pooling over positions and a linear layer. With
model.attention=pair (GLUE's BiLSTM+ELMo+Attn, Wang et al. 2018) each state u_i of that LSTM attends
to the states of the other text of a pair, and a second LSTM reads both:

    c_i = Σ_j softmax_j(u_i · u_j) u_j,  v = BiLSTM([u; c])
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.baselines.baseline import BaselineSizes, initialise_lstms, text_lengths
from manyheads.baselines.rnn import run_bidirectional
from manyheads.config import Count
from manyheads.errors import UserError
from manyheads.models.heads import Classify, HeadOutput
from manyheads.nn.block import Model, initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens

Layers = Float[Tensor, "layers b t d"]


@dataclass(frozen=True, kw_only=True)
class ElmoConfig(BaselineSizes):
    """A bidirectional language model, and a classifier on top if `head` is set."""

    layers: Annotated[Count, "LSTM layers of each direction"] = 2
    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    head: Annotated[Classify | None, "Classifier; none: language models"] = None
    attention: Annotated[
        Literal["none", "pair"], "Classifier: attention between the two texts of a pair"
    ] = "none"
    frozen: Annotated[bool, "Train the classifier only"] = False
    kind: ClassVar[str] = "elmo"

    def __post_init__(self) -> None:
        if self.frozen and self.head is None:
            raise UserError("model.frozen=true leaves nothing to train: add model.head=classify")

    def build(self) -> "Elmo":
        return Elmo(self)


class ContextHead(nn.Module):
    """Labels from γ Σ_j s_j h_j by a bidirectional LSTM and max-pooling."""

    def __init__(self, config: ElmoConfig, head: Classify) -> None:
        super().__init__()
        wide = 2 * config.dim
        self.dropout = nn.Dropout(config.dropout if head.dropout is None else head.dropout)
        self.weights = nn.Parameter(torch.zeros(config.layers + 1))
        self.gamma = nn.Parameter(torch.ones(()))
        self.reader = nn.LSTM(wide, config.dim, batch_first=True, bidirectional=True)
        if config.attention == "pair":
            self.second_reader = nn.LSTM(2 * wide, config.dim, batch_first=True, bidirectional=True)
        self.attends = config.attention == "pair"
        self.output = nn.Linear(wide, len(head.labels))

    def mixed(self, layers: Layers) -> Hidden:
        return self.gamma * einsum(self.weights.softmax(0), layers, "j, j b t d -> b t d")

    def forward(
        self, layers: Layers, real: PaddingMask | None = None, segments: Tokens | None = None
    ) -> HeadOutput:
        x = run_bidirectional(self.reader, self.dropout(self.mixed(layers)), real)
        if self.attends:
            both = self.dropout(torch.cat([x, attend_across(x, real, segments)], dim=-1))
            x = run_bidirectional(self.second_reader, both, real)
        if real is not None:
            x = x.masked_fill(~real[..., None], -math.inf)
        return self.output(self.dropout(x.amax(1)))


class Elmo(Model):
    """Gives logits of the labels if it has a head, else the top layer's states."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.scale = math.sqrt(dim)  # embeddings start as N(0, 1/d); gates expect N(0, 1)
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
        initialise_lstms(self)

    def directions(self, tokens: Tokens, real: PaddingMask | None = None) -> tuple[Layers, Layers]:
        """→h and ←h of every layer, embeddings first; no text depends on its padding."""
        train = torch.is_grad_enabled() and not self.config.frozen
        with torch.set_grad_enabled(train):
            x = self.dropout(self.tokens(tokens) * self.scale)
            backward = self._run(self.back, reverse_texts(x, real))
            backward = torch.stack([reverse_texts(layer, real) for layer in backward])
            return self._run(self.ahead, x), backward

    def _run(self, lstms: nn.ModuleList, x: Hidden) -> Layers:
        layers = [x]
        for lstm in lstms:
            y, _ = lstm(self.dropout(x))
            x = y + x if len(layers) > 1 else y  # residual connections from the second layer on
            layers.append(x)
        return torch.stack(layers)

    def contexts(self, tokens: Tokens, real: PaddingMask | None = None) -> Layers:
        """h_j of every layer."""
        return torch.cat(self.directions(tokens, real), dim=-1)

    def hidden(
        self, tokens: Tokens, real: PaddingMask | None = None, segments: Tensor | None = None
    ) -> Hidden:
        """Contextual vectors: the head's mixture of layers, or the top layer."""
        layers = self.contexts(tokens, real)
        return layers[-1] if self.config.head is None else self.head.mixed(layers)

    def forward(
        self, tokens: Tokens, real: PaddingMask | None = None, segments: Tensor | None = None
    ) -> HeadOutput:
        if self.config.head is None:
            return self.hidden(tokens, real)
        return self.head(self.contexts(tokens, real), real, segments)


def attend_across(x: Hidden, real: PaddingMask | None, segments: Tokens | None) -> Hidden:
    """Σ_j softmax_j(x_i · x_j) x_j over positions j of the other text; zero without one."""
    if segments is None:
        return torch.zeros_like(x)
    seen = segments[:, :, None] != segments[:, None, :]
    if real is not None:
        seen = seen & real[:, None, :]
    scores = einsum(x, x, "b t d, b s d -> b t s").masked_fill(~seen, torch.finfo(x.dtype).min)
    return (scores.softmax(-1) * seen) @ x


def reverse_texts(x: Hidden, real: PaddingMask | None) -> Hidden:
    """Each text in reverse order; padding stays at the end."""
    if real is None:
        return x.flip(1)
    positions = torch.arange(x.shape[1], device=x.device)
    lengths = text_lengths(real)[:, None]
    order = torch.where(positions < lengths, lengths - 1 - positions, positions)
    return x.gather(1, order[..., None].expand_as(x))
