"""Write the parts of a Transformer: copy this file, replace each `raise`, run the scoreboard.

Letters: b batch, t query positions, s key positions, h heads, c channels per head, d width,
f feed-forward width, n rows, v vocabulary.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal_mask(t: int) -> Bool[Tensor, "t t"]:
    """True where query i may see key j, that is where j ≤ i."""
    raise NotImplementedError


def scaled_dot_product_attention(
    q: Float[Tensor, "b h t c"], k: Float[Tensor, "b h t c"], v: Float[Tensor, "b h t c"]
) -> Float[Tensor, "b h t c"]:
    """softmax(QKᵀ/√c) V with a causal mask."""
    raise NotImplementedError


def multi_head(
    x: Float[Tensor, "b t d"], projection: Float[Tensor, "d 3*d"], h: int
) -> Float[Tensor, "b t d"]:
    """Causal self-attention with h heads; x·projection holds q, k and v; no output projection."""
    raise NotImplementedError


def sinusoidal_positions(t: int, d: int) -> Float[Tensor, "t d"]:
    """sin(p/10000^(2i/d)) in channel 2i, the cosine in channel 2i + 1."""
    raise NotImplementedError


def layer_norm(x: Float[Tensor, "b t d"], eps: float) -> Float[Tensor, "b t d"]:
    """(x − mean) / √(variance + eps) over the channels, without gain and bias."""
    raise NotImplementedError


def feed_forward(
    x: Float[Tensor, "b t d"],
    up: Float[Tensor, "f d"],
    up_bias: Float[Tensor, " f"],
    down: Float[Tensor, "d f"],
    down_bias: Float[Tensor, " d"],
) -> Float[Tensor, "b t d"]:
    """max(0, x·upᵀ + up_bias)·downᵀ + down_bias."""
    raise NotImplementedError


def label_smoothing(
    logits: Float[Tensor, "n v"], labels: Int[Tensor, " n"], smoothing: float
) -> Float[Tensor, ""]:
    """Sum over rows of the cross-entropy with (1 − smoothing)·one-hot + smoothing/v."""
    raise NotImplementedError
