"""Models small enough to test every combination of parts."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import Vit, resize_weights
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    PositionConfig,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.tiled import Tiled

VOCAB = 17
POSITIONS: dict[str, PositionConfig] = {
    "none": NoPosition(),
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "rotary": Rotary(),
    "shaw": Shaw(max_distance=2),
    "t5": Buckets(buckets=6, max_distance=5),
    "alibi": Alibi(),
    "relative": Relative(max_distance=3),
}
CORES: dict[str, AttentionFunctionConfig] = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=4),
}
# Each position with one core; tests/nn/test_attention.py has all the pairs.
PARTS = [
    *(("none", "dense"), ("sinusoidal", "fused"), ("learned", "tiled"), ("rotary", "fused")),
    *(("shaw", "dense"), ("t5", "tiled"), ("alibi", "fused"), ("relative", "tiled")),
]
Model = type[GptConfig] | type[BertConfig] | type[Seq2SeqConfig]


def tiny(kind: Model, position: str = "sinusoidal", core: str = "fused", **changes: Any) -> Any:
    """A configuration of two layers of two heads, without dropout."""
    sizes = {"vocab_size": VOCAB, "dim": 8, "layers": 2, "heads": 2, "ffn_dim": 12}
    parts = {"position": POSITIONS[position], "attention": CORES[core]}
    return kind(**{**sizes, **parts, "max_length": 32, "dropout": 0.0, **changes})


def words(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape)


def resized(model: Vit, image_size: int) -> Vit:
    """The same model for images of another size, its learned positions interpolated."""
    config = replace(model.config, image_size=image_size)
    config.check_image_size()
    weight = next(model.parameters())
    other = config.build().to(weight.device, weight.dtype)
    other.load_state_dict(resize_weights(dict(model.state_dict()), model.config, config))
    return other.train(model.training)
