"""An LSTM language model: its state is all that it knows of the past.

h_t = LSTM(h_{t−1}, x_t),  P(x_{t+1} | x_1, …, x_t) = softmax(h_t Eᵀ)
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.baselines.baseline import BaselineSizes, initialise_lstms
from manyheads.baselines.rnn import run_lstm
from manyheads.config import Count
from manyheads.models.base import Model
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import StateCache
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.shapes import Hidden, Logits, Tokens


@dataclass(frozen=True, kw_only=True)
class RnnLmConfig(BaselineSizes):
    """An LSTM language model."""

    layers: Annotated[Count, "LSTM layers"] = 2
    max_length: Annotated[Count, "Length of training windows, in tokens"] = 512
    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    kind: ClassVar[str] = "rnn-lm"

    def build(self) -> "RnnLm":
        return RnnLm(self)


class RnnLm(Model):
    """logits[:, t] predict the token after tokens[:, t]; every window starts from a zero state.

    Forget-gate biases start at 1, as is usual: an LSTM that forgets half of its state at each
    step takes long to learn to keep it.
    """

    def __init__(self, config: RnnLmConfig) -> None:
        super().__init__()
        self.config = config
        dim, layers = config.dim, config.layers
        between = config.dropout if layers > 1 else 0.0
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
        self.head = LMHead(config.vocabulary, dim, tied=config.tie == "all", bias="none")
        initialise(self, "xavier", layers)
        initialise_lstms(self)
        self.set_gates(forget=1.0)

    def set_gates(self, forget: float, write: float = 0.0) -> None:
        """Initial biases: a step keeps σ(forget) of the state and adds σ(write) of the new."""
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                if name.startswith("bias_ih"):
                    gates = parameter.chunk(4)  # input, forget, cell, output
                    gates[0].fill_(write)
                    gates[1].fill_(forget)

    def hidden(
        self,
        tokens: Tokens,
        real: Tensor | None = None,
        cache: StateCache | None = None,
        documents: Tensor | None = None,
    ) -> Hidden:
        """States of the top layer; padding, which follows a text, does not change them."""
        assert documents is None  # refused by the task
        x = self.dropout(self.tokens(tokens) * math.sqrt(self.config.dim))
        states = run_lstm(self.lstm, x, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.dropout(states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.tokens)

    def forward(self, tokens: Tokens, real: Tensor | None = None) -> Logits:
        return self.logits(self.hidden(tokens, real))


LanguageModel = Gpt | RnnLm
