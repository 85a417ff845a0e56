"""An LSTM language model, to compare with a Gpt: its state is all that it knows of the past."""

from dataclasses import dataclass

import torch
from torch import nn

from manyheads.baselines.baseline import initialise_lstms
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

    Forget-gate biases are initialised to 1, as is usual: an LSTM that forgets half of its state
    at each step takes long to learn to keep it.
    """

    def __init__(self, config: LstmConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.lstm = nn.LSTM(config.dim, config.dim, config.layers, batch_first=True)
        self.head = LMHead(config.vocab_size, config.dim, tied=True, bias="none")
        initialise(self, "xavier", config.layers)
        initialise_lstms(self.lstm)
        self.remember(1.0)

    def remember(self, bias: float, write: float = 0.0) -> None:
        """Initialise the gates: a step keeps σ(bias) of the state and adds σ(write) of the new."""
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
