"""Attention with one head over the encoder's states (Luong et al. 2015).

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


def check_exact_attention(attention: AttentionFunctionConfig, model: str) -> None:
    """Refuse approximations: they are for self-attention, which these models do not have."""
    if not attention.exact:
        raise UserError(
            f"model.attention={attention.kind} approximates self-attention, and {model} has none: "
            "choose an exact implementation (model.attention=dense)"
        )


class LuongAttention(nn.Module):
    """One head as wide as the model; subclasses choose its queries, keys and values."""

    def __init__(
        self, score: ScoreConfig, attention: AttentionFunctionConfig, dim: int, max_length: int
    ) -> None:
        super().__init__()
        self.score = score.build(1, dim)
        self.position = Position()  # source and target positions are not comparable
        self.config = AttentionSizes(
            heads=1, kv_heads=1, head_dim=dim, key_dim=dim, max_length=max_length
        )
        self.core: AttentionFunction = attention.build(self.config)
        check_combination(self.core, self.score, self.position)

    def context(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """c at each position of x [b·n, t, d], with keys and values [b, s, d]."""
        # n hypotheses of a sentence are more queries to the same keys, not copies of the keys.
        beams = x.shape[0] // keys.shape[0]
        q = rearrange(x, "(b n) t d -> b 1 (n t) d", n=beams)
        k, v = (rearrange(tensor, "b s d -> b 1 s d") for tensor in (keys, values))
        mask = mask.for_cross_attention(q.shape[2])
        out = self.core(AttentionInputs(q, k, v, mask, self.score, self.position))
        return rearrange(out, "b 1 (n t) d -> (b n) t d", n=beams)
