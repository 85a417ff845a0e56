"""Where the parameters, the FLOPs and the memory of a model go.

Everything is read off a model built on the meta device, which has shapes and no numbers, so
that the largest preset costs nothing. FLOPs are those of the matrix multiplications, two for
each multiply-add, as the dense core does them: each query meets every key, seen or not.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from manyheads.errors import Mistake
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.heads import DetectHead, MaskedHead
from manyheads.models.joined import Joined
from manyheads.models.rnn import GlobalAttention, Rnn
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Patches, Vit, VitConfig
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.cores import Besides, Counted
from manyheads.nn.embedding import Head
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.feedforward import GatedFeedForward
from manyheads.nn.positions import Position
from manyheads.nn.relative import RelativePosition
from manyheads.nn.scores import AdditiveScore, BilinearScore, ReducedRankScore, Score
from manyheads.presets import ModelConfig

PARTS = ["embedding", "positions", "recurrent", "attention", "cross-attention", "feed-forward"]
PARTS += ["norms", "head"]
BYTES = {"float32": 4, "bfloat16": 2}
BACKWARD = 2  # each product has two gradients, each a product of the same size

Attention = SelfAttention | CrossAttention


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
        raise Mistake(f"length={length}, batch={batch}: both must be at least 1")
    with torch.device("meta"):
        model = config.build()
    for position in model.modules():
        if isinstance(position, Position):
            position.refuse_past(length)
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    parts = _parameters(model)
    total = sum(parts.values())
    streams = _streams(model, length)
    kept = {token: BYTES["float32"] * stream.kept for token, stream in streams.items()}
    return Account(
        kind=config.kind,
        length=length,
        batch=batch,
        parameters=total,
        parts=parts,
        block_parameters=sum(weight.numel() for part in blocks for weight in part.parameters()),
        tokens={token: stream.count for token, stream in streams.items()},
        flops={token: dict(stream.flops) for token, stream in streams.items()},
        inference={
            form: Inference(
                weights=size * total,
                cache_per_token={token: size * stream.cached for token, stream in streams.items()},
                state=size * sum(x.state for x in streams.values()),
                cache=size * batch * sum(x.count * x.cached + x.state for x in streams.values()),
            )
            for form, size in BYTES.items()
        },
        training=Training(
            weights=BYTES["float32"] * total,
            gradients=BYTES["float32"] * total,
            moments=2 * BYTES["float32"] * total,
            activations_per_token=kept,
            activations=batch * sum(streams[token].count * kept[token] for token in kept),
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
    kinds: dict[str, type | tuple[type, ...]] = {
        "positions": Position,
        "attention": SelfAttention,
        "cross-attention": (CrossAttention, GlobalAttention),
        "recurrent": nn.LSTM,
        "norms": (nn.LayerNorm, nn.RMSNorm),
        "embedding": (nn.Embedding, Patches),
    }
    return next((part for part, kind in kinds.items() if isinstance(module, kind)), None)


@dataclass
class _Stream:
    """Tokens of a kind; of one, FLOPs by part, values kept for the backward pass, and cached.

    `state` are values that are cached of them all together.
    """

    count: int
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: int = 0
    cached: int = 0
    state: int = 0

    def multiply(self, part: str, *products: int) -> None:
        """Products of one token's vectors with matrices of these sizes."""
        if sum(products):
            self.flops[part] += 2 * sum(products)


def _streams(model: nn.Module, length: int) -> dict[str, _Stream]:
    """What a token of each kind costs, as `model(...)` runs it.

    What reads one vector of a whole text or image is left out.
    """
    if isinstance(model, Rnn):
        return _recurrent_streams(model, length)
    if isinstance(model, Joined):
        return _joined_streams(model, length)
    if isinstance(model, Seq2Seq):
        source, target = _Stream(length), _Stream(length)
        _add_parts(source, "embedding", model.encoder_embedding)
        _add_stack(source, model.encoder, length)
        source.kept += model.config.dim  # the memory, one for all layers of the decoder
        _add_parts(target, "embedding", model.decoder_embedding)
        _add_stack(target, model.decoder, length, memory=source)
        _add_head(target, model.head, model.target_table)
        source.cached = _cached(model.decoder, CrossAttention)
        target.cached = _cached(model.decoder, SelfAttention)
        return {"source": source, "target": target}
    assert isinstance(model, Gpt | Bert | Vit)
    if isinstance(model, Vit):
        streams = {"patch": _Stream(model.config.side**2)}
        patch = streams["patch"]
        patch.multiply("embedding", model.patches.project.weight.numel())
        patch.kept += model.patches.project.weight[0].numel()  # the pixels
        if model.config.first == "token":
            streams["class"] = _Stream(1)
        for stream in streams.values():
            _add_stack(stream, model.encoder, length)
        return streams
    token = _Stream(length)
    _add_parts(token, "embedding", model.embedding)
    if isinstance(model, Gpt):
        _add_stack(token, model.decoder, length)
        _add_head(token, model.head, model.tokens)
        token.cached = _cached(model.decoder, SelfAttention)
        return {"token": token}
    _add_stack(token, model.encoder, length)
    head = getattr(model, "head", None)
    if head is not None and not head.pooled:
        _add_parts(token, "head", head)
    if isinstance(head, MaskedHead | DetectHead):
        token.kept += head.project.out_features  # before the activation
    if isinstance(head, MaskedHead):
        _add_head(token, head.output, model.tokens)
    return {"token": token}


def _joined_streams(model: Joined, length: int) -> dict[str, _Stream]:
    """Source and target stand in one sequence, and go through one stack."""
    model.decoder.position.refuse_past(2 * length)
    source, target = _Stream(length), _Stream(length)
    for stream in (source, target):
        _add_parts(stream, "embedding", model.embedding)
        _add_stack(stream, model.decoder, 2 * length)
        stream.cached = _cached(model.decoder, SelfAttention)
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _recurrent_streams(model: Rnn, length: int) -> dict[str, _Stream]:
    source, target = _Stream(length), _Stream(length)
    part, attention, dim = "cross-attention", model.attention, model.config.dim
    _add_lstm(source, model.encoder)
    source.kept += dim
    source.cached = dim  # the memory is key and value
    _add_lstm(target, model.decoder)
    target.state = 2 * model.decoder.num_layers * dim
    _add_scores(part, target, source, attention, 1, dim, length)
    target.multiply(part, attention.combine.weight.numel())
    target.kept += dim + attention.combine.in_features
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _add_lstm(token: _Stream, lstm: nn.LSTM) -> None:
    """Four gates a layer and direction, each of which reads the input and the last state.

    The backward pass needs both, the gates, and the cell before and after its tanh.
    """
    directions, width = 2 if lstm.bidirectional else 1, lstm.input_size
    for _ in range(lstm.num_layers):
        gates = 4 * lstm.hidden_size
        token.multiply("recurrent", directions * gates * (width + lstm.hidden_size))
        token.kept += width + directions * (gates + 3 * lstm.hidden_size)
        width = directions * lstm.hidden_size


def _add_parts(token: _Stream, part: str, module: nn.Module) -> None:
    """The projections and norms of a module, and what they keep: their inputs."""
    linears = _linears(module)
    token.multiply(part, *(linear.weight.numel() for linear in linears))
    token.kept += _norm_widths(module) + sum(linear.in_features for linear in linears)


def _add_head(token: _Stream, head: Head, table: nn.Embedding) -> None:
    matrix = head.matrix(table)
    token.multiply("head", matrix.numel())
    token.kept += sum(matrix.shape)  # its input; and the logits, which the loss keeps


def _add_stack(own: _Stream, stack: Stack, length: int, memory: _Stream | None = None) -> None:
    """The blocks of a stack. `memory` is the stream whose tokens give keys to cross-attention."""
    own.kept += _norm_widths(stack)
    for block, position in zip(stack.blocks, cycle(stack.positions), strict=False):
        assert isinstance(block, Block)
        _add_attention("attention", own, own, block.attention, length)
        # A position's own matrices meet each query and each mix; its look-up tables do not.
        vectors = sum(matrix.numel() for matrix in position.parameters(recurse=False))
        if isinstance(position, RelativePosition):
            vectors = position.meets(length) * block.attention.heads.head_dim
        own.multiply("positions", block.attention.heads.heads * vectors)
        if memory is not None:
            _add_attention("cross-attention", own, memory, block.cross, length)
        own.multiply("feed-forward", *_products(block.feedforward))
        own.kept += block.attention.heads.dim + _kept_inside(block.feedforward)


def _add_attention(
    part: str, own: _Stream, other: _Stream, attention: Attention, keys: int
) -> None:
    """One token of `own` asks `keys` tokens of `other`, which pay for their keys and values."""
    heads = attention.heads
    if isinstance(attention, CrossAttention):
        own.multiply(part, attention.query.weight.numel())
    other.multiply(part, attention.project.weight.numel())
    own.multiply(part, attention.output.weight.numel())
    _add_scores(part, own, other, attention, heads.heads, heads.head_dim, keys)
    own.kept += heads.dim + 2 * heads.sizes[0]
    other.kept += sum(heads.sizes[1:])


def _add_scores(
    part: str,
    own: _Stream,
    other: _Stream,
    attention: Attention | GlobalAttention,
    heads: int,
    head_dim: int,
    keys: int,
) -> None:
    """The scores of one query with all keys, the mix of their values, and what a core adds."""
    query_side, key_side, inner = _score_sizes(attention.score, head_dim)
    core = attention.core
    besides = core.besides(keys) if isinstance(core, Counted) else Besides()
    keys = core.meets(keys)
    other.multiply(f"{part} scores", key_side)
    own.multiply(f"{part} scores", query_side, heads * inner * keys)
    own.multiply(f"{part} mixing", heads * head_dim * keys)
    own.multiply(part, besides.query)
    other.multiply(part, besides.key)
    own.kept += besides.kept_query
    other.kept += besides.kept_key
    if besides.weights:
        pair = inner if isinstance(attention.score, AdditiveScore) else 0
        own.kept += heads * keys * (besides.weights + pair)


def _score_sizes(score: Score, head_dim: int) -> tuple[int, int, int]:
    """Of a score, its matrix on a query's side, on a key's side, and what meets of each head."""
    if isinstance(score, BilinearScore):
        return score.weight.numel(), 0, score.weight.shape[2]
    if isinstance(score, ReducedRankScore | AdditiveScore):
        return score.query.numel(), score.key.numel(), score.query.shape[1]
    return 0, 0, head_dim


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _products(feedforward: nn.Module) -> list[int]:
    """The sizes of the matrices that a token meets; of experts those that serve it."""
    found = [linear.weight.numel() for linear in _linears(feedforward)]
    if isinstance(feedforward, ExpertFeedForward):
        one = feedforward.inner.weight[0].numel() + feedforward.outer.weight[0].numel()
        found.append(feedforward.config.top * one)
    return found


def _kept_inside(feedforward: nn.Module) -> int:
    """The input of the last projection; of a gate both factors; and what the activation needs."""
    if isinstance(feedforward, ExpertFeedForward):
        _, dim, hidden = feedforward.inner.weight.shape
        places = feedforward.config.top * feedforward.config.capacity
        bent = feedforward.activation is not F.relu
        return round(places * (2 * dim + hidden * (1 + bent)))
    hidden = max(linear.in_features for linear in _linears(feedforward))
    # The gradient of relu needs its result alone, which the next product keeps anyway.
    bent = getattr(feedforward, "activation", None) is not F.relu
    return hidden * (1 + bent + 2 * isinstance(feedforward, GatedFeedForward))


def _norm_widths(module: nn.Module) -> int:
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
    return sum(norm.weight.numel() for norm in norms)


def _cached(stack: Stack, kind: type[Attention]) -> int:
    """Keys and values of one token in all layers: layers · kv_heads · (key size + value size)."""
    return sum(sum(part.heads.sizes[1:]) for part in stack.modules() if isinstance(part, kind))
