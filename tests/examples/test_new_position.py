"""A new position scheme is one new file and one line in the union of position schemes."""

from pathlib import Path

from tests.examples.extended import TINY, Extended

GAUSSIAN = '''
"""A Gaussian preference for short distances: −(i − j)² / 2σ² on the scores."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import nn

from manyheads.nn.positions import Position, PositionSizes


class GaussianPosition(Position):
    """Each head learns its width σ."""

    def __init__(self, heads: int, width: float) -> None:
        super().__init__()
        self.log_width = nn.Parameter(torch.full((heads,), width).log())

    def score(self, q, queries, keys):
        distance = rearrange(queries, "b t -> b 1 t 1") - rearrange(keys, "b s -> b 1 1 s")
        width = rearrange(self.log_width.exp(), "h -> 1 h 1 1")
        return (-((distance / width) ** 2) / 2).to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """`width` is where σ starts, in positions."""

    width: float = 8.0
    kind: ClassVar[str] = "gaussian"
    per_layer: ClassVar[bool] = True

    def build(self, sizes: PositionSizes) -> Position:
        return GaussianPosition(sizes.heads, self.width)
'''

LINE = "PositionConfig = NoPosition"
IMPORT = "from manyheads.nn.gaussian import Gaussian\n"


def test_a_new_position_scheme_trains_and_translates(tmp_path: Path) -> None:
    extended = Extended(
        tmp_path,
        "nn/gaussian.py",
        GAUSSIAN,
        "nn/positions.py",
        LINE,
        f"{IMPORT}PositionConfig = Gaussian | NoPosition",
    )
    settings = ("model.position=gaussian", "model.position.width=4")
    extended.run("train", "phrasebook", *TINY, *settings, "--out", "run")
    assert 'kind = "gaussian"' in (tmp_path / "run/run.toml").read_text(encoding="utf-8")
    translated = extended.run("translate", "run", "--beam", "2", stdin="The dog sees.\n")
    assert translated.count("\n") == 1
    assert "parameters" in extended.run("info", "run")
