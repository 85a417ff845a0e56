"""Attention as it was before it had heads: one query a place, over what an encoder has as it is.

c_t = Σ_s α_ts v_s,  α_ts = softmax_s(score(q_t, k_s))
"""

from einops import rearrange
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    check_combination,
)
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScoreConfig


def check_exact(core: AttentionFunctionConfig, model: str) -> None:
    """Refuse a core that sees less than everything: each query here looks at a whole source."""
    if not core.exact:
        raise UserError(
            f"model.attention={core.kind} is for self-attention, and {model} has none: choose "
            "one that computes attention in full (model.attention=dense)"
        )


class MemoryAttention(nn.Module):
    """A score and a core for one head as wide as the memory; subclasses say what asks it."""

    def __init__(
        self, score: ScoreConfig, core: AttentionFunctionConfig, dim: int, max_length: int
    ) -> None:
        super().__init__()
        self.score = score.build(1, dim)
        self.position = Position()  # source and target positions are not comparable
        sizes = AttentionSizes(
            heads=1, kv_heads=1, head_dim=dim, key_dim=dim, max_length=max_length
        )
        self.core: AttentionFunction = core.build(sizes)
        check_combination(self.core, self.score, self.position)

    def context(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """c at each place of x [b·n, t, d], with keys and values [b, s, d]."""
        # Several hypotheses of one sentence (n beams) are queries to the same keys, not copies.
        beams = x.shape[0] // keys.shape[0]
        q = rearrange(x, "(b n) t d -> b 1 (n t) d", n=beams)
        k, v = (rearrange(one, "b s d -> b 1 s d") for one in (keys, values))
        mask = mask.for_cross_attention(q.shape[2])
        mixed = self.core(AttentionInputs(q, k, v, mask, self.score, self.position))
        return rearrange(mixed, "b 1 (n t) d -> (b n) t d", n=beams)
