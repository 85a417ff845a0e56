"""Instability against depth: pre-norm and post-norm, with warm-up and without."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import torch

from manyheads.config import Count, Positive
from manyheads.lab.claims.phrases import Phrases, ended, phrases, writer
from manyheads.lab.claims.trial import learn, stretches
from manyheads.lab.figures.drawing import COLOURS, Drawing
from manyheads.nn.layers import Norm
from manyheads.view.figures import canvas

Placement = Literal["pre", "post"]
PLACEMENTS: tuple[Placement, ...] = ("pre", "post")
ROWS, LENGTH = 16, 16


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Language models of the phrasebook's words, narrow, of several depths, at one rate."""

    layers: Annotated[tuple[Count, ...], "Numbers of layers"] = (4, 8, 12, 24)
    dim: Annotated[Count, "Width"] = 32
    steps: Annotated[Count, "Steps of each training"] = 150
    warmup: Annotated[Count, "Steps of warm-up, where there is one"] = 75
    rate: Annotated[Positive, "Peak learning rate"] = 2e-3
    sentences: Annotated[Count, "Sentences of the phrasebook"] = 2000
    seed: Annotated[Count, "Random seed"] = 1

    def make(self) -> Drawing:
        text = phrases(self.sentences, torch.device("cpu"))
        curves = {
            (layers, placement, warmup): self.losses(text, layers, placement, warmup)
            for layers in self.layers
            for placement in PLACEMENTS
            for warmup in (self.warmup, 0)
        }

        def name(placement: str, warmup: int) -> str:
            return f"{placement}-norm, {f'warm-up {warmup}' if warmup else 'no warm-up'}"

        def draw(path: Path) -> None:
            count = len(self.layers)
            with canvas((3.0 * count + 0.6, 4.0), path, columns=count, sharey=True) as (fig, row):
                for axes, layers in zip(row, self.layers, strict=True):
                    for (depth, placement, warmup), losses in curves.items():
                        if depth == layers:
                            axes.plot(
                                *zip(*stretches(losses, 30), strict=True),
                                color=COLOURS[PLACEMENTS.index(placement)],
                                linestyle="-" if warmup else "--",
                                label=name(placement, warmup),
                            )
                    axes.axhline(text.entropy, color="0.6", linewidth=0.8)
                    axes.set(title=f"{layers} layers", xlabel="step")
                    axes.grid(alpha=0.3)
                row[0].set_ylabel("loss (nats a word); grey: single words")
                row[0].legend(fontsize=8)
                fig.suptitle(f"depth, norm placement and warm-up at a rate of {self.rate:g}")

        lines, rows = [], []
        for (layers, placement, warmup), losses in curves.items():
            end = ended(losses)
            learned = text.entropy - end if isfinite(end) else float("-inf")
            lines.append(
                f"{layers:3} layers, {name(placement, warmup)}: loss {end:.2f}, "
                f"{learned:.2f} nats below single words"
            )
            rows += [(layers, placement, warmup, step, loss) for step, loss in enumerate(losses, 1)]
        columns = ("layers", "norm", "warmup", "step", "loss")
        return Drawing(columns=columns, rows=rows, draw=draw, lines=tuple(lines))

    def losses(self, text: Phrases, layers: int, placement: Placement, warmup: int) -> list[float]:
        norm = Norm(placement=placement)
        model = writer(text, layers=layers, dim=self.dim, length=LENGTH, seed=self.seed, norm=norm)
        loss_of = text.loss_of(model, ROWS, LENGTH, self.seed)
        return learn(model, loss_of, steps=self.steps, rate=self.rate, warmup=warmup)
