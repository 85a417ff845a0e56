"""Attention with one head over the encoder's states (Luong et al. 2015).

c_t = Σ_s α_ts v_s,  α_ts = softmax_s(score(q_t, k_s))
"""

from einops import rearrange
from torch import Tensor, nn

from manyheads.nn.attention import AttentionFunction, AttentionInputs, AttentionSizes, Dense
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScoreConfig


class LuongAttention(nn.Module):
    """One head as wide as the model; the context c at each position of x."""

    def __init__(self, score: ScoreConfig, dim: int) -> None:
        super().__init__()
        self.score = score.build(1, dim)
        self.position = Position()  # source and target positions are not comparable
        self.config = AttentionSizes(heads=1, kv_heads=1, head_dim=dim, key_dim=dim, max_length=0)
        self.core: AttentionFunction = Dense()

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        return self.context(x, memory, memory, mask)

    def context(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """c at each position of x [b·n, t, d], with keys and values [b, s, d]."""
        # n hypotheses of a sentence are more queries to the same keys, not copies of the keys.
        beams = x.shape[0] // keys.shape[0]
        q = rearrange(x, "(b n) t d -> b 1 (n t) d", n=beams)
        k, v = (rearrange(tensor, "b s d -> b 1 s d") for tensor in (keys, values))
        mask = mask.for_cross_attention(q.shape[2])
        out = self.core(AttentionInputs(q, k, v, mask, self.score, self.position))
        return rearrange(out, "b 1 (n t) d -> (b n) t d", n=beams)
