"""The parts that models from before the Transformer share: sizes, training, attention."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn

from manyheads import ops
from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    Cache,
    Dense,
)
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScoreConfig
from manyheads.nn.shapes import Hidden, PaddingMask


@dataclass(frozen=True, kw_only=True)
class BaselineSizes:
    """Sizes of a model without Transformer blocks."""

    vocab_size: Annotated[Count | None, "Tokens; a run takes it from its tokenizer"] = None
    dim: Annotated[Count, "Width of embeddings and layers"] = 256
    layers: Annotated[Count, "Layers of the encoder, and of the decoder"] = 2
    max_length: Annotated[Count, "Longest text in training and decoding, in tokens"] = 512
    tie: Annotated[Literal["all", "none"], "One matrix for source, target and output, or three"] = (
        "all"
    )
    dropout: Annotated[Probability, "Dropout of embeddings and layers"] = 0.1

    RENAMED: ClassVar[dict[str, str]] = {"core": "attention"}
    REMOVED: ClassVar[dict[str, tuple[object, ...]]] = {"attention": ({"kind": "dense"},)}

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    @property
    def shares_inputs(self) -> bool:
        """True if source and target tokens have one embedding."""
        return self.tie == "all"


class BaselineModel(EncoderDecoderBase):
    """An encoder–decoder without Transformer blocks.

    A subclass builds, in this order, its encoder, `build_target_table`, its decoder, `build_head`.
    """

    config: BaselineSizes

    def __init__(self, config: BaselineSizes) -> None:
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)

    def build_target_table(self) -> None:
        if not self.config.shares_inputs:
            self.target_tokens = nn.Embedding(self.config.vocabulary, self.config.dim)

    def build_head(self) -> None:
        """The LM head, and initial weights for everything."""
        config = self.config
        self.head = LMHead(config.vocabulary, config.dim, tied=config.shares_inputs, bias="none")
        initialise(self, "xavier", config.layers)
        initialise_lstms(self)

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Hidden:
        """Embeddings start as N(0, 1/d), and gates and sums expect N(0, 1)."""
        return self.dropout(table(tokens) * math.sqrt(self.config.dim))

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Hidden states; with a cache, at the positions after the cached ones."""
        if target_real is not None:
            text_lengths(target_real)  # padding after a text does not change its states
        hidden = self.decoder_states(target, memory, cache)
        if cache is not None:
            cache.advance(target.shape[1])
        return self.dropout(hidden)

    def decoder_states(self, target: Tensor, memory: EncoderOutput, cache: Cache | None) -> Hidden:
        """The decoder's top layer, continued from the states in the cache."""
        raise NotImplementedError


class LuongAttention(nn.Module):
    """Attention with one head over the encoder's states (Luong et al. 2015).

    c_t = Σ_s α_ts v_s,  α_ts = softmax_s(score(q_t, k_s))
    """

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


def text_lengths(real: PaddingMask) -> Int[Tensor, " b"]:
    """The length of each text; refuses an empty text, and padding that is not at the end."""
    lengths = real.sum(1)
    is_prefix = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    # While a CUDA graph is captured, values cannot be read; the warm-up has checked them.
    if not ops.is_capturing(real) and (not (is_prefix == real).all() or not lengths.all()):
        raise UserError("this model takes texts of at least one token, with padding at the end")
    return lengths


def initialise_lstms(model: nn.Module) -> None:
    """Xavier-uniform matrices for each gate, with the gain of tanh; biases zero.

    PyTorch's own initial weights are so small that upper layers learn late.
    """
    for lstm in (module for module in model.modules() if isinstance(module, nn.LSTM)):
        for name, parameter in lstm.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                continue
            for gate in parameter.chunk(4):
                nn.init.xavier_uniform_(gate, nn.init.calculate_gain("tanh"))
