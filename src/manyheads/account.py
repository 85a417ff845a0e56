"""Where the parameters, the FLOPs and the memory of a model go.

Everything is read off a model built on the meta device, which has shapes and no numbers, so
that the largest preset costs nothing. FLOPs are those of the matrix multiplications, two for
each multiply-add, as the dense core does them: each query meets every key, seen or not.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from manyheads.account_streams import streams
from manyheads.baselines.convolution import Convolution
from manyheads.baselines.luong_attention import MemoryAttention
from manyheads.errors import UserError
from manyheads.models.vit import Patches, VitConfig
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, on_meta
from manyheads.nn.positions import Position
from manyheads.presets import ModelConfig

PARTS = ["embedding", "positions", "recurrent", "convolution", "attention", "cross-attention"]
PARTS += ["feed-forward", "norms", "head"]
BYTES = {"float32": 4, "bfloat16": 2}
BACKWARD = 2  # each product has two gradients, each a product of the same size


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Bytes in one format: weights; keys and values of a token of each kind, and of the batch.

    A recurrent decoder also has states, which do not grow with what was read.
    """

    weights: int
    cache_per_token: dict[str, int]
    state: int
    cache: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """Bytes in float32: weights, gradients, Adam's two moments, and activations.

    Activations are an estimate of what the backward pass needs of each token: the input of
    every projection and norm; queries, keys and values of every head; what the feed-forward's
    activation needs beside its result; of the head, the logits; and what the core
    itself keeps, if it is dense each head's weights before and after the mask. For a block with
    gelu, of width d, with h heads of size c and f hidden values, that is 4d + 4hc + 2f values,
    and 2hn more for dense attention over n keys. Dropout masks and what a kernel borrows are
    left out.
    """

    weights: int
    gradients: int
    moments: int
    activations_per_token: dict[str, int]
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.activations


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a model costs. `flops` are forward, for one token of each kind, by part.

    An encoder–decoder has source and target tokens, an image patches and the class token, the
    others one kind; `tokens` is how many of each stand in a sequence. A tensor that several
    parts share counts once, where a token meets it first.
    """

    kind: str
    length: int
    batch: int
    parameters: int
    parts: dict[str, int]
    block_parameters: int
    tokens: dict[str, int]
    flops: dict[str, dict[str, int]]
    inference: dict[str, Inference]
    training: Training

    @property
    def forward_flops(self) -> dict[str, int]:
        return {token: sum(parts.values()) for token, parts in self.flops.items()}

    @property
    def sequence_flops(self) -> int:
        """Forward, of all tokens of a sequence or an image."""
        return sum(n * self.forward_flops[token] for token, n in self.tokens.items())

    @property
    def training_flops(self) -> dict[str, int]:
        """Forward and backward: three times the forward ones."""
        return {token: (1 + BACKWARD) * flops for token, flops in self.forward_flops.items()}

    @property
    def feedforward_share(self) -> dict[str, float]:
        """Of the parameters of the blocks (0 where there are none), and of all forward FLOPs."""
        inner = sum(n * self.flops[kind].get("feed-forward", 0) for kind, n in self.tokens.items())
        return {
            "parameters": self.parts["feed-forward"] / max(1, self.block_parameters),
            "flops": inner / self.sequence_flops,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        table = dataclasses.asdict(self)
        table["flops"] = {
            token: {
                "forward": self.forward_flops[token],
                "training": self.training_flops[token],
                "forward_parts": parts,
                "training_parts": {part: (1 + BACKWARD) * n for part, n in parts.items()},
            }
            for token, parts in self.flops.items()
        }
        table["feedforward_share"] = self.feedforward_share
        table["memory"] = {
            "inference": table.pop("inference"),
            "training": {**table.pop("training"), "total": self.training.total},
        }
        return table


def account(config: ModelConfig, length: int | None = None, batch: int = 1) -> Account:
    """Count a model at a sequence length (its longest, unless given) and a batch of sequences."""
    if isinstance(config, VitConfig):
        length = config.positions  # an image has as many patches as it has
    length = config.max_length if length is None else length
    if length < 1 or batch < 1:
        raise UserError(f"length={length}, batch={batch}: both must be at least 1")
    with on_meta():
        model = config.build()
    for position in model.modules():
        if isinstance(position, Position):
            position.refuse_past(length)
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    parts = _parameters(model)
    total = sum(parts.values())
    by_kind = streams(model, length)
    kept = {token: BYTES["float32"] * stream.kept for token, stream in by_kind.items()}
    return Account(
        kind=config.kind,
        length=length,
        batch=batch,
        parameters=total,
        parts=parts,
        block_parameters=sum(weight.numel() for part in blocks for weight in part.parameters()),
        tokens={token: stream.count for token, stream in by_kind.items()},
        flops={token: dict(stream.flops) for token, stream in by_kind.items()},
        inference={
            form: Inference(
                weights=size * total,
                cache_per_token={token: size * stream.cached for token, stream in by_kind.items()},
                state=size * sum(x.state for x in by_kind.values()),
                cache=size * batch * sum(x.count * x.cached + x.state for x in by_kind.values()),
            )
            for form, size in BYTES.items()
        },
        training=Training(
            weights=BYTES["float32"] * total,
            gradients=BYTES["float32"] * total,
            moments=2 * BYTES["float32"] * total,
            activations_per_token=kept,
            activations=batch * sum(by_kind[token].count * kept[token] for token in kept),
        ),
    )


def _parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by part: the outermost module that is a part by itself claims what it holds."""
    part_of: dict[str, str | None] = {}
    for name, module in model.named_modules():
        above, _, own = name.rpartition(".")
        part_of[name] = part_of.get(above) or _part(module, own, above)
    counted: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        # What stands outside of all parts comes after the blocks: the projections of the heads.
        counted[part_of[name.rpartition(".")[0]] or "head"] += parameter.numel()
    return {part: counted[part] for part in PARTS}


def _part(module: nn.Module, name: str, above: str) -> str | None:
    # A feed-forward may be of any class; its name in the block is what makes it one.
    if name == "feedforward":
        return "feed-forward"
    if name == "project" and above.endswith("embedding"):
        return "embedding"  # of a table narrower than the model
    if name == "first" and isinstance(module, nn.Linear):
        return "recurrent"  # gives the states that a decoder begins with
    if name in ("enter", "leave") and isinstance(module, nn.Linear):
        return "convolution"  # to its width, and back
    kinds: dict[str, type | tuple[type, ...]] = {
        "positions": Position,
        "attention": SelfAttention,
        "cross-attention": (CrossAttention, MemoryAttention),
        "recurrent": nn.LSTM,
        "convolution": Convolution,
        "norms": (nn.LayerNorm, nn.RMSNorm),
        "embedding": (nn.Embedding, Patches),
    }
    return next((part for part, kind in kinds.items() if isinstance(module, kind)), None)
