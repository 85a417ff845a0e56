"""The formula of each module of a model, in the notation of the lectures."""

import math

from torch import nn

from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.layers import (
    ACTIVATIONS,
    FeedForward,
    GatedFeedForward,
    LMHead,
    NoResidual,
    Residual,
)
from manyheads.nn.positions import (
    AlibiPosition,
    BucketPosition,
    GridPosition,
    LearnedPosition,
    Position,
    RelativePosition,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
)
from manyheads.nn.scores import (
    AdditiveScore,
    BilinearScore,
    InnerScore,
    ReducedRankScore,
    Score,
)

WRITTEN = {
    "relu": "max(0, {})",
    "relu-squared": "max(0, {})²",
    "gelu": "GELU({})",
    "gelu-tanh": "GELU({})",
    "silu": "SiLU({})",
    "tanh": "tanh({})",
}


def score(part: Score, channels: int) -> str:
    """score(q, k) for all pairs; a scale equal to 1/√c is written as 1/√c."""
    written = pair_score(part, channels, "Q Kᵀ")
    return f"{written},  c = {channels}" if "√c" in written else written


def pair_score(part: Score, channels: int, product: str = "q_i · k_j") -> str:
    """score(q_i, k_j) for one pair."""
    if isinstance(part, BilinearScore):
        return "q W kᵀ"
    if isinstance(part, ReducedRankScore):
        return "(U q)ᵀ (V k)"
    if isinstance(part, AdditiveScore):
        return "wᵀ tanh(A q + B k)"
    if not isinstance(part, InnerScore):  # a plug-in's score
        return f"{type(part).__name__}(q_i, k_j)"
    if math.isclose(part.scale, channels**-0.5):
        return f"{product} / √c"
    return product if part.scale == 1.0 else f"{part.scale:g} · {product}"


def position(part: Position, scores: str | None = None) -> str:
    """The formula of a position scheme; `scores` replaces the score function of its paper."""
    if isinstance(part, RotaryPosition):
        pair = "2i and 2i+1" if part.layout == "interleaved" else "i and c/2+i"
        return f"channels {pair} turned by pos · {part.base:g}^(−2i/c), in queries and keys"
    if type(part).embed is not Position.embed:
        return f"x_pos ← x_pos + PE(pos),  {embedded(part)}"
    if type(part).score is not Position.score:
        usual = "q_i · k_j" if isinstance(part, BucketPosition) else "q_i · k_j / √c"
        return f"e_ij = {scores or usual} + {biased(part)}".replace("+ −", "− ")
    return "no position encoding: the model does not know the order of the tokens"


def embedded(part: Position) -> str:
    """The term that a scheme adds to the embeddings."""
    if isinstance(part, SinusoidalPosition):
        angle = f"pos / {part.base:g}^(2i/d)"
        if part.layout == "interleaved":
            return f"PE(pos, 2i) = sin({angle}),  PE(pos, 2i+1) = cos({angle})"
        return f"PE(pos, i) = sin({angle}),  PE(pos, d/2+i) = cos({angle})"
    if isinstance(part, GridPosition):
        return f"PE(pos) = [PE(row), PE(column)], half of the channels each: {embedded(part.line)}"
    if isinstance(part, LearnedPosition):
        row = f"pos + {part.offset}" if part.offset else "pos"
        return f"PE(pos) = P[{row}], a trained row for each position"
    return "the term that this scheme adds to the embeddings"


def biased(part: Position) -> str:
    """The term that a scheme adds to the scores."""
    if isinstance(part, AlibiPosition):
        return "−slope_h · |i − j|"
    if isinstance(part, BucketPosition):
        return "b_h(bucket(j − i))"
    if isinstance(part, RelativePosition):
        return "S_rel[i, j] / √c,  S_rel[i, j] = q_i · e_{j−i}"
    if isinstance(part, ShawPosition):
        return "q_i · a^K_{clip(j−i)} / √c"
    return "the term that this scheme adds to the scores"


def plus_bias(part: nn.Module, letter: str = "b") -> str:
    """The bias term of a linear layer; empty if it has none."""
    return "" if part.bias is None else f" + {letter}"


def projected(letter: str, part: SelfAttention | CrossAttention, position: Position) -> str:
    """The projection Q, K or V; a rotary position rotates Q and K."""
    source = "X" if isinstance(part, SelfAttention) else ("Z" if letter == "Q" else "H")
    plain = f"{source} W_h^{letter}{plus_bias(part.project, f'b_h^{letter}')}"
    if letter != "V" and part.config.qk_norm:
        plain = f"RMSNorm({plain})"
    if letter != "V" and isinstance(position, RotaryPosition):
        return f"{letter}_h = R_pos({plain}),  R_pos turns channel pairs by pos · θ_i"
    read = "" if source != "H" else ",  H the encoder output"
    return f"{letter}_h = {plain}{read}"


def norm(part: nn.Module) -> str:
    if isinstance(part, nn.Identity):
        return "x: the model has no norms"
    gain, bias = ("γ ", " + β") if getattr(part, "weight", None) is not None else ("", "")
    if isinstance(part, nn.RMSNorm):
        return f"RMSNorm(x) = {gain}x / √(mean(x²) + ε)"
    return f"LayerNorm(x) = {gain}(x − μ) / √(σ² + ε){bias}"


def summed(part: Residual, inside: str) -> str:
    """x + f(…) with the norm before (pre) or after (post) the sum."""
    if isinstance(part, NoResidual):
        return f"{inside}(…) without x: no residual connection"
    if part.placement == "pre":
        return f"x + {inside}(Norm(x))"
    return f"x + {inside}(x),  then Norm of it"


def hidden(part: FeedForward | GatedFeedForward) -> str:
    """The hidden layer of a feed-forward network."""
    name = next(name for name, known in ACTIVATIONS.items() if known is part.activation)
    written = WRITTEN[name]
    if isinstance(part, GatedFeedForward):
        opened = written.format(f"x W{plus_bias(part.gate)}")
        return f"h = {opened} ∘ (x V{plus_bias(part.inner, 'c')})"
    return "h = " + written.format(f"x W₁{plus_bias(part.inner, 'b₁')}")


def feedforward(part: nn.Module) -> str:
    if isinstance(part, FeedForward | GatedFeedForward):
        return f"FFN(x) = h W₂{plus_bias(part.outer, 'b₂')}"
    if isinstance(part, ExpertFeedForward):
        return "Σ_e g_e(x) · FFN_e(x) over the chosen experts e"
    return f"{type(part).__name__}(x)"


def logits(part: LMHead) -> str:
    """h Eᵀ with tied embeddings, else h Wᵀ."""
    scale = "" if part.scale == 1.0 else "d^−½ · "
    return f"z = {scale}h {'E' if part.weight is None else 'W'}ᵀ{plus_bias(part)}"
