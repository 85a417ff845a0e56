"""A language model of LSTMs, to stand beside a Gpt: all that it knows of the past is its state."""

from dataclasses import dataclass

import torch
from torch import nn

from manyheads.baselines.rnn import initialise_lstm
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.shapes import Hidden, Logits, Tokens


@dataclass(frozen=True, kw_only=True)
class LstmConfig:
    """`dim` is the width of the embeddings and of every layer."""

    vocab_size: int
    dim: int
    layers: int

    def build(self) -> "LstmModel":
        return LstmModel(self)


class LstmModel(nn.Module):
    """logits[:, t] predict the token after tokens[:, t]; the head is the embedding.

    Forget gates begin with a bias of 1, as is usual: an LSTM that begins by forgetting half of
    its state at each step learns late to keep any of it.
    """

    def __init__(self, config: LstmConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.lstm = nn.LSTM(config.dim, config.dim, config.layers, batch_first=True)
        self.head = LMHead(config.vocab_size, config.dim, tied=True, bias="none")
        initialise(self, "xavier", config.layers)
        initialise_lstm(self.lstm)
        self.remember(1.0)

    def remember(self, bias: float, write: float = 0.0) -> None:
        """Let gates begin so: σ(bias) of the state is kept at a step, σ(write) of the new added."""
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                if name.startswith("bias_ih"):
                    gates = parameter.chunk(4)  # input, forget, cell, output
                    gates[0].fill_(write)
                    gates[1].fill_(bias)

    def hidden(self, tokens: Tokens) -> Hidden:
        states: torch.Tensor = self.lstm(self.tokens(tokens) * self.lstm.input_size**0.5)[0]
        return states

    def forward(self, tokens: Tokens) -> Logits:
        return self.head(self.hidden(tokens), self.tokens)
