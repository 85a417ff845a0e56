"""Write the parts of a Transformer: copy this file, replace each `raise`, run the scoreboard.

Letters: b batch, t query positions, s key positions, h heads, c channels per head, d width,
f feed-forward width, n rows, v vocabulary.
"""

from collections.abc import Callable

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


def cross_attention(
    q: Float[Tensor, "b h t c"],
    k: Float[Tensor, "b h s c"],
    v: Float[Tensor, "b h s c"],
    real: Bool[Tensor, "b s"],
) -> Float[Tensor, "b h t c"]:
    """softmax(QKᵀ/√c) V over the keys that are real; padding (False) has weight 0."""
    raise NotImplementedError


def token_embedding(
    tokens: Int[Tensor, "b t"], table: Float[Tensor, "v d"]
) -> Float[Tensor, "b t d"]:
    """The rows of the table, times √d."""
    raise NotImplementedError


def sinusoidal_positions(t: int, d: int) -> Float[Tensor, "t d"]:
    """sin(p/10000^(2i/d)) in channel 2i, the cosine in channel 2i + 1."""
    raise NotImplementedError


def rotary_positions(x: Float[Tensor, "b h t c"]) -> Float[Tensor, "b h t c"]:
    """Rotate channels 2i and 2i + 1 at position p by the angle p/10000^(2i/c)."""
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


def residual(
    x: Float[Tensor, "b t d"], f: Callable[[Float[Tensor, "b t d"]], Float[Tensor, "b t d"]]
) -> Float[Tensor, "b t d"]:
    """x + f(layer_norm(x)): pre-norm, with an eps of 1e-5 and without gain and bias."""
    raise NotImplementedError


def learning_rate(steps: Int[Tensor, " n"], d: int, warmup: int) -> Float[Tensor, " n"]:
    """d^−½ · min(step^−½, step · warmup^−3/2) for each step."""
    raise NotImplementedError


def label_smoothing(
    logits: Float[Tensor, "n v"], labels: Int[Tensor, " n"], smoothing: float
) -> Float[Tensor, ""]:
    """Sum over rows of the cross-entropy with (1 − smoothing)·one-hot + smoothing/v."""
    raise NotImplementedError
