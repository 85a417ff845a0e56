"""Prompts of different lengths in one batch: the shorter ones begin later, none is looked at twice.

Row r has `absent[r]` places before its first token. Places are no positions: the first token of
every row stands at position 0, and what is before it is seen by nobody after.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.decode.kv_cache import KVCache
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import SelfAttention
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import Real

Prompts = Int[Tensor, "rows length"]
Rows = Int[Tensor, " rows"]


class RaggedCache(KVCache):
    """Keys and values of rows that began at different places."""

    def __init__(self, absent: Rows) -> None:
        super().__init__()
        self.absent = absent
        self.even = not bool(absent.any())

    def mask(
        self, rule: Rule, length: int, padding: Real | None, device: torch.device
    ) -> AttentionMask:
        mask = super().mask(rule, length, padding, device)
        if self.even:
            return mask
        places = torch.arange(self.length + length, device=device) - self.absent[:, None]
        # What is absent asks from position 0, so that there is something that it sees.
        keys = places.clamp(min=0)
        return AttentionMask(rule, keys[:, self.length :], keys, places >= 0)

    def select_rows(self, rows: Rows) -> None:
        super().select_rows(rows)
        self.absent = self.absent[rows]


def together(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Prompts, Rows]:
    """Prompts that end at the same place, and how many places are absent before each."""
    longest = max(len(prompt) for prompt in prompts)
    absent = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * gap + list(prompt) for gap, prompt in zip(absent, prompts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(absent, device=device)


def may_be_ragged(model: Gpt) -> bool:
    """Whether every attention goes by positions and sight alone, whatever the place in the row."""
    parts = (part for part in model.modules() if isinstance(part, SelfAttention))
    return all(type(part.core) in (Dense, Fused) for part in parts)
