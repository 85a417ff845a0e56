"""What a token of each kind costs in a model: FLOPs by part, and values kept and cached.

Read off a model's modules; the numbers that these make together stand in `account`.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle

from torch import nn
from torch.nn import functional as F

from manyheads.baselines.bytenet import ByteNet, DilatedBlock
from manyheads.baselines.convolution import Convolution
from manyheads.baselines.convs2s import ConvS2S, StepAttention
from manyheads.baselines.elmo import Elmo
from manyheads.baselines.gnmt import Gnmt
from manyheads.baselines.luong_attention import MemoryAttention
from manyheads.baselines.rnn import Rnn
from manyheads.models.bert import Bert
from manyheads.models.decoder_only_seq2seq import Joined
from manyheads.models.gpt import Gpt
from manyheads.models.heads import DetectHead, MaskedHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Vit
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.embedding import Head
from manyheads.nn.exact_attention import AttentionCost, Counted
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.feedforward import GatedFeedForward
from manyheads.nn.relative import RelativePosition
from manyheads.nn.scores import AdditiveScore, BilinearScore, ReducedRankScore, Score

Attention = SelfAttention | CrossAttention


@dataclass
class Stream:
    """Tokens of a kind; of one, FLOPs by part, values kept for the backward pass, and cached.

    `state` are values that are cached of them all together.
    """

    count: int
    flops: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    cached: int = 0
    state: int = 0

    def multiply(self, part: str, *products: int) -> None:
        """Products of one token's vectors with matrices of these sizes."""
        if sum(products):
            self.flops[part] += 2 * sum(products)


def streams(model: nn.Module, length: int) -> dict[str, Stream]:
    """What a token of each kind costs, as `model(...)` runs it.

    What reads one vector of a whole text or image is left out.
    """
    if isinstance(model, Rnn):
        return _recurrent_streams(model, length)
    if isinstance(model, Elmo):
        return _context_streams(model, length)
    if isinstance(model, Gnmt):
        return _deep_streams(model, length)
    if isinstance(model, ConvS2S):
        return _gated_streams(model, length)
    if isinstance(model, ByteNet):
        return _dilated_streams(model, length)
    if isinstance(model, Joined):
        return _joined_streams(model, length)
    if isinstance(model, Seq2Seq):
        source, target = Stream(length), Stream(length)
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
        streams = {"patch": Stream(model.config.side**2)}
        patch = streams["patch"]
        patch.multiply("embedding", model.patches.project.weight.numel())
        patch.kept += model.patches.project.weight[0].numel()  # the pixels
        if model.config.first == "token":
            streams["class"] = Stream(1)
        for stream in streams.values():
            _add_stack(stream, model.encoder, length)
        return streams
    token = Stream(length)
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


def _joined_streams(model: Joined, length: int) -> dict[str, Stream]:
    """Source and target stand in one sequence, and go through one stack."""
    model.decoder.position.refuse_past(2 * length)
    source, target = Stream(length), Stream(length)
    for stream in (source, target):
        _add_parts(stream, "embedding", model.embedding)
        _add_stack(stream, model.decoder, 2 * length)
        stream.cached = _cached(model.decoder, SelfAttention)
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _recurrent_streams(model: Rnn, length: int) -> dict[str, Stream]:
    source, target = Stream(length), Stream(length)
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


def _deep_streams(model: Gnmt, length: int) -> dict[str, Stream]:
    source, target = Stream(length), Stream(length)
    dim = model.config.dim
    _add_lstm(source, model.both_ways)
    source.cached = dim  # the memory is key and value
    _add_lstm(target, model.lowest)
    target.state = 2 * dim
    for own, layers in ((source, model.encoder), (target, model.decoder)):
        for layer in layers:
            assert isinstance(layer, nn.LSTM)
            _add_lstm(own, layer)
            target.state += 2 * dim if own is target else 0
    source.kept += dim
    _add_scores("cross-attention", target, source, model.attention, 1, dim, length)
    target.kept += dim
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _context_streams(model: Elmo, length: int) -> dict[str, Stream]:
    """Of a classifier what it reads with; of language models, each token's two predictions too."""
    token = Stream(length)
    for part in model.modules():
        if isinstance(part, nn.LSTM):
            _add_lstm(token, part)
    if model.config.head is None:
        for _ in range(2):
            _add_head(token, model.output, model.tokens)
    else:  # all layers side by side, their mixture, and what the greatest is sought in
        token.kept += (model.config.layers + 3) * 2 * model.config.dim
    return {"token": token}


def _gated_streams(model: ConvS2S, length: int) -> dict[str, Stream]:
    source, target = Stream(length), Stream(length)
    dim, width = model.config.dim, model.config.width
    for own, side in ((source, model.encoder), (target, model.decoder)):
        for linear in (side.enter, side.leave):
            own.multiply("convolution", linear.weight.numel())
            own.kept += linear.in_features
        for layer in side.layers:
            assert isinstance(layer, Convolution)
            _add_convolution(own, layer)
            own.kept += 2 * width  # both halves of what the gates are part of
    source.cached = 2 * dim  # z and e
    source.kept += 2 * dim
    for attention in model.decoder.attentions:
        assert isinstance(attention, StepAttention)
        for linear in (attention.query, attention.output):
            target.multiply("cross-attention", linear.weight.numel())
            target.kept += linear.in_features
        _add_scores("cross-attention", target, source, attention, 1, dim, length)
        target.kept += dim
        source.kept += dim  # the values, z + e
    target.state = sum(one.before * width for one in _convolutions(model.decoder))
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _dilated_streams(model: ByteNet, length: int) -> dict[str, Stream]:
    """A source is as long as it is unfolded."""
    source, target = Stream(model.config.unfolded(length)), Stream(length)
    dim = model.config.dim
    for own, stack in ((source, model.encoder), (target, model.decoder)):
        for block in stack.blocks:
            assert isinstance(block, DilatedBlock)
            _add_parts(own, "convolution", block)
            _add_convolution(own, block.convolution)
            own.kept += dim // 2  # relu's result, of which the convolution has a copy with zeros
    source.cached = dim
    target.state = sum(one.before * dim // 2 for one in _convolutions(model.decoder))
    for linear in (model.enter, model.leave):
        target.multiply("convolution", linear.weight.numel())
        target.kept += linear.in_features
    target.kept += dim  # the last norm's
    _add_head(target, model.head, model.target_table)
    return {"source": source, "target": target}


def _convolutions(module: nn.Module) -> list[Convolution]:
    return [part for part in module.modules() if isinstance(part, Convolution)]


def _add_convolution(token: Stream, layer: Convolution) -> None:
    """As many products as it reads vectors; its input is kept."""
    token.multiply("convolution", layer.inner.weight.numel())
    token.kept += layer.inner.in_channels


def _add_lstm(token: Stream, lstm: nn.LSTM) -> None:
    """Four gates a layer and direction, each of which reads the input and the last state.

    The backward pass needs both, the gates, and the cell before and after its tanh.
    """
    directions, width = 2 if lstm.bidirectional else 1, lstm.input_size
    for _ in range(lstm.num_layers):
        gates = 4 * lstm.hidden_size
        token.multiply("recurrent", directions * gates * (width + lstm.hidden_size))
        token.kept += width + directions * (gates + 3 * lstm.hidden_size)
        width = directions * lstm.hidden_size


def _add_parts(token: Stream, part: str, module: nn.Module) -> None:
    """The projections and norms of a module, and what they keep: their inputs."""
    linears = _linears(module)
    token.multiply(part, *(linear.weight.numel() for linear in linears))
    token.kept += _norm_widths(module) + sum(linear.in_features for linear in linears)


def _add_head(token: Stream, head: Head, table: nn.Embedding) -> None:
    matrix = head.matrix(table)
    token.multiply("head", matrix.numel())
    token.kept += sum(matrix.shape)  # its input; and the logits, which the loss keeps


def _add_stack(own: Stream, stack: Stack, length: int, memory: Stream | None = None) -> None:
    """The blocks of a stack. `memory` is the stream whose tokens give keys to cross-attention."""
    own.kept += _norm_widths(stack)
    for block, position in zip(stack.blocks, cycle(stack.positions), strict=False):
        assert isinstance(block, Block)
        _add_attention("attention", own, own, block.attention, length)
        # A position's own matrices meet each query and each mix; its look-up tables do not.
        vectors = sum(matrix.numel() for matrix in position.parameters(recurse=False))
        if isinstance(position, RelativePosition):
            vectors = position.meets(length) * block.attention.config.head_dim
        own.multiply("positions", block.attention.config.heads * vectors)
        if memory is not None:
            _add_attention("cross-attention", own, memory, block.cross, length)
        own.multiply("feed-forward", *_products(block.feedforward))
        own.kept += block.attention.config.dim + _kept_inside(block.feedforward)


def _add_attention(part: str, own: Stream, other: Stream, attention: Attention, keys: int) -> None:
    """One token of `own` asks `keys` tokens of `other`, which pay for their keys and values."""
    heads = attention.config
    if isinstance(attention, CrossAttention):
        own.multiply(part, attention.query.weight.numel())
    other.multiply(part, attention.project.weight.numel())
    own.multiply(part, attention.output.weight.numel())
    _add_scores(part, own, other, attention, heads.heads, heads.head_dim, keys)
    own.kept += heads.dim + 2 * heads.sizes[0]
    other.kept += sum(heads.sizes[1:])


def _add_scores(
    part: str,
    own: Stream,
    other: Stream,
    attention: Attention | MemoryAttention,
    heads: int,
    head_dim: int,
    keys: int,
) -> None:
    """The scores of one query with all keys, the mix of their values, and what a core adds."""
    query_side, key_side, inner = _score_sizes(attention.score, head_dim)
    core = attention.core
    besides = core.besides(keys) if isinstance(core, Counted) else AttentionCost()
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
    return sum(sum(part.config.sizes[1:]) for part in stack.modules() if isinstance(part, kind))
