"""A new attention implementation is one new file and one line in the union of implementations."""

from pathlib import Path

from tests.examples.extended import TINY, Extended

SIGMOID = '''
"""Sigmoid attention: every weight on its own instead of a softmax over the keys."""

import math
from dataclasses import dataclass
from typing import ClassVar

from einops import einsum
from torch.nn import functional as F

from manyheads.nn.attention import ExactAttention
from manyheads.ops import share_heads


@dataclass(frozen=True)
class Sigmoid(ExactAttention):
    """σ(score(q, k) − log n) over n keys."""

    kind: ClassVar[str] = "sigmoid"
    exact: ClassVar[bool] = False  # not the same function as softmax attention

    def weights(self, inputs):
        q, k = inputs.q, share_heads(inputs.k, inputs.q.shape[1])
        scores = inputs.score(q, k) - math.log(k.shape[2])
        bias, allowed = inputs.position.bias(q, inputs.mask), inputs.mask.as_bool()
        scores = scores if bias is None else scores + bias
        return scores.sigmoid() if allowed is None else scores.sigmoid() * allowed

    def __call__(self, inputs):
        weights = F.dropout(self.weights(inputs), inputs.dropout)
        v = share_heads(inputs.v, inputs.q.shape[1])
        return einsum(weights, v, "b h t s, b h s c -> b h t c")
'''

LINE = "AttentionFunctionConfig = (\n    Dense"
IMPORT = "from manyheads.nn.sigmoid import Sigmoid\n"


def test_a_new_attention_implementation_trains_and_translates(tmp_path: Path) -> None:
    extended = Extended(
        tmp_path,
        "nn/sigmoid.py",
        SIGMOID,
        "nn/attend.py",
        LINE,
        f"{IMPORT}AttentionFunctionConfig = (\n    Sigmoid | Dense",
    )
    extended.run("train", "phrasebook", *TINY, "model.attention=sigmoid", "--out", "run")
    assert 'kind = "sigmoid"' in (tmp_path / "run/run.toml").read_text(encoding="utf-8")
    translated = extended.run("translate", "run", "--beam", "2", stdin="The dog sees.\n")
    assert translated.count("\n") == 1
