"""The loss around two trained models (Li et al. 2018): with residual connections and without."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from manyheads.config import Count, Positive
from manyheads.errors import UserError
from manyheads.lab.claims.phrases import Phrases, phrases, writer
from manyheads.lab.claims.trial import learn
from manyheads.lab.figures.drawing import Drawing
from manyheads.lab.landscape import direction, moved, without_residuals
from manyheads.view.figures import HIGHLIGHT, canvas

KINDS = ("without residuals", "with residuals")
ROWS, LENGTH, BATCH_SEED = 16, 16, 99


@dataclass(frozen=True, kw_only=True)
class TwoLandscapes:
    """Two trainings of the same language model, each with the surface around its own end."""

    layers: Annotated[Count, "Layers"] = 8
    dim: Annotated[Count, "Width"] = 32
    steps: Annotated[Count, "Steps of each training"] = 250
    rate: Annotated[Positive, "Peak learning rate, after 20 steps of warm-up"] = 3e-3
    size: Annotated[Count, "Points along each axis (odd)"] = 15
    reach: Annotated[Positive, "Distance each way, in norms of the weights"] = 1.0
    sentences: Annotated[Count, "Sentences of the phrasebook"] = 2000
    seed: Annotated[Count, "Random seed"] = 1

    def make(self) -> Drawing:
        if self.size % 2 == 0 or self.size < 3:
            raise UserError(f"size={self.size} must be odd and at least 3: the middle is trained")
        text = phrases(self.sentences, torch.device("cpu"))
        surfaces = {kind: self.surface(text, kind) for kind in KINDS}
        offsets = torch.linspace(-self.reach, self.reach, self.size).tolist()
        middle = self.size // 2

        def draw(path: Path) -> None:
            low = min(float(losses.min()) for losses in surfaces.values())
            finite = [losses[losses.isfinite()] for losses in surfaces.values()]
            high = max(float(losses.max()) for losses in finite)
            levels = [low * (high / low) ** (i / 24) for i in range(25)]
            with canvas((11.0, 4.8), path, columns=2) as (figure, row):
                for axes, (kind, losses) in zip(row, surfaces.items(), strict=True):
                    shown = losses.nan_to_num(high, high, high).clamp(low, high).numpy()
                    drawn = axes.contourf(
                        offsets, offsets, shown, levels=levels, cmap="viridis_r", norm="log"
                    )
                    axes.contour(
                        offsets, offsets, shown, levels=levels, colors="white", linewidths=0.4
                    )
                    axes.plot(0, 0, marker="*", color=HIGHLIGHT, markersize=11)
                    title = f"{kind}: {float(losses[middle, middle]):.2f} at the trained weights"
                    axes.set(xlabel="along δ", ylabel="along η", aspect="equal", title=title)
                bar = figure.colorbar(drawn, ax=row, label="loss (nats a word), one scale")
                bar.ax.minorticks_off()
                bar.ax.set_yticks(levels[::4], [f"{level:.3g}" for level in levels[::4]])
                figure.suptitle(
                    f"two trainings of {self.layers} layers, {self.steps} steps each; single "
                    f"words: {text.entropy:.2f}"
                )

        lines = tuple(
            f"{kind}: loss {float(losses[middle, middle]):.2f} at the trained weights, "
            f"{float(losses.max()):.1f} at most within {self.reach:g} (single words "
            f"{text.entropy:.2f})"
            for kind, losses in surfaces.items()
        )
        rows = [
            (kind, offsets[column], offsets[row], float(losses[row, column]))
            for kind, losses in surfaces.items()
            for row in range(self.size)
            for column in range(self.size)
        ]
        columns = ("model", "delta", "eta", "loss")
        return Drawing(columns=columns, rows=rows, draw=draw, lines=lines)

    def surface(self, text: Phrases, kind: str) -> Tensor:
        """Train, then f(α, β) = L(θ + α δ + β η) on one batch, filter-normalised directions."""
        model = writer(text, layers=self.layers, dim=self.dim, length=LENGTH, seed=self.seed)
        with nullcontext() if kind == KINDS[1] else without_residuals(model):
            loss_of = text.loss_of(model, ROWS, LENGTH, self.seed)
            learn(model, loss_of, steps=self.steps, rate=self.rate, warmup=20)
            random = torch.Generator().manual_seed(self.seed)
            delta, eta = direction(model, random), direction(model, random)
            offsets = torch.linspace(-self.reach, self.reach, self.size).tolist()
            losses = torch.zeros(self.size, self.size)
            with torch.no_grad(), moved(model) as put:
                for row, beta in enumerate(offsets):
                    for column, alpha in enumerate(offsets):
                        put(alpha, delta, beta, eta)
                        # A new function draws the same windows.
                        batch_loss = text.loss_of(model, 4 * ROWS, LENGTH, BATCH_SEED)
                        losses[row, column] = float(batch_loss(0))
        return losses
