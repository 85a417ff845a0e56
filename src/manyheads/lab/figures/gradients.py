"""Vanishing gradients: how much the last output depends on a word k positions before it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
from torch import Tensor, nn

from manyheads.config import Count
from manyheads.lab.figures.drawing import COLOURS, Drawing, plain_ticks
from manyheads.models.gpt import GptConfig
from manyheads.nn.masks import causal, make_mask
from manyheads.view.figures import canvas

Encoder = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class VanishingGradients:
    """‖∂h_n/∂x_{n−k}‖ of untrained models, relative to k = 0; the mean over seeds."""

    length: Annotated[Count, "Words of a text"] = 64
    dim: Annotated[Count, "Width"] = 64
    layers: Annotated[Count, "Layers"] = 2
    seeds: Annotated[Count, "Seeds to average"] = 5

    def make(self) -> Drawing:
        curves: dict[str, list[float]] = {}
        for seed in range(1, self.seeds + 1):
            for name, model in self.models(seed).items():
                curves.setdefault(name, [0.0] * self.length)
                norms = self.norms(model, seed)
                curves[name] = [
                    a + n / self.seeds for a, n in zip(curves[name], norms, strict=True)
                ]
        relative = {name: [v / values[0] for v in values] for name, values in curves.items()}

        def draw(path: Path) -> None:
            with canvas((7.4, 4.4), path) as (_, [axes]):
                for colour, (name, values) in zip(COLOURS, relative.items(), strict=False):
                    axes.plot(range(self.length), values, color=colour, label=name)
                axes.set(xlabel="distance k of the word, in positions", yscale="log")
                axes.set(ylabel="‖∂h_n / ∂x_(n−k)‖, relative to k = 0")
                axes.set(title=f"gradient against distance, untrained, d = {self.dim}")
                plain_ticks(axes.yaxis)
                axes.grid(alpha=0.3)
                axes.legend()

        far = self.length - 1
        lines = tuple(
            f"{name}: {values[far]:.2g} of the gradient is left {far} words back"
            for name, values in relative.items()
        )
        rows = [(name, k, v) for name, values in relative.items() for k, v in enumerate(values)]
        return Drawing(columns=("model", "distance", "gradient"), rows=rows, draw=draw, lines=lines)

    def models(self, seed: int) -> dict[str, Encoder]:
        """PyTorch's recurrent layers with forget biases of 1, and a stack of causal blocks."""
        torch.manual_seed(seed)
        sizes = (self.dim, self.dim, self.layers)
        rnn, lstm = (kind(*sizes, batch_first=True).double() for kind in (nn.RNN, nn.LSTM))
        with torch.no_grad():
            for name, parameter in lstm.named_parameters():
                if name.startswith("bias_ih"):
                    parameter.chunk(4)[1].fill_(1.0)
        heads = 4 if self.dim % 4 == 0 else 1
        config = GptConfig(
            vocab_size=1, dim=self.dim, layers=self.layers, heads=heads, max_length=self.length
        )
        stack = config.build().double().eval().decoder
        mask = make_mask(causal, self.length)
        return {
            "RNN (tanh)": lambda x: rnn(x)[0],
            "LSTM (forget bias 1)": lambda x: lstm(x)[0],
            "Transformer": lambda x: stack(x, mask),
        }

    def norms(self, model: Encoder, seed: int) -> list[float]:
        """By distance: the norm of the gradient of a random projection of the last output."""
        random = torch.Generator().manual_seed(seed)
        shape = (8, self.length, self.dim)
        x = torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
        direction = torch.randn(self.dim, generator=random, dtype=torch.float64)
        (model(x)[:, -1] @ direction).sum().backward()
        assert x.grad is not None
        by_row = x.grad.norm(dim=-1).flip(1)
        return [fmean(column) for column in by_row.T.tolist()]
