"""Parameters, FLOPs and memory of a model, by part.

The model is built on the meta device, with shapes and no values, so that the largest preset takes
a second. FLOPs are those of the matrix products, two per multiply-add, as PyTorch's
`FlopCounterMode` counts them in a forward pass. Attention counts as the dense implementation
computes it: every query is scored with every key, masked or not.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from manyheads.baselines.bytenet import ByteNet, DilatedBlock
from manyheads.baselines.convolution import Convolution
from manyheads.baselines.convs2s import ConvDecoder, ConvEncoder, ConvS2S, StepAttention
from manyheads.baselines.elmo import Elmo
from manyheads.baselines.luong_attention import LuongAttention
from manyheads.errors import UserError
from manyheads.models.decoder_only_seq2seq import Baseline, DecoderOnlySeq2Seq
from manyheads.models.heads import DetectHead, MaskedHead
from manyheads.models.seq2seq import EncoderDecoderBase, Seq2Seq
from manyheads.models.vit import Patches, Vit, VitConfig
from manyheads.nn.attention import AttentionInputs, CrossAttention, Dense, SelfAttention
from manyheads.nn.block import Block, Stack, on_meta
from manyheads.nn.compressed import CompressedAttention
from manyheads.nn.experts import ExpertFeedForward, Projections
from manyheads.nn.layers import FeedForward, GatedFeedForward, LMHead
from manyheads.nn.linformer import LinformerAttention
from manyheads.nn.local import Local, Longformer
from manyheads.nn.performer import CHUNK, PerformerAttention
from manyheads.nn.positions import Position
from manyheads.nn.scores import AdditiveScore
from manyheads.ops import share_heads
from manyheads.presets import ModelConfig

PARTS = ["embedding", "positions", "recurrent", "convolution", "attention", "cross-attention"]
PARTS += ["feed-forward", "norms", "head"]
BYTES = {"float32": 4, "bfloat16": 2}
BACKWARD = 2  # each product has two gradients, each a product of the same size

Attention = SelfAttention | CrossAttention | LuongAttention


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Bytes in one data type: weights, KV cache per token of each kind, and cache of the batch.

    `state` is what a recurrent or convolutional decoder holds whatever the length.
    """

    weights: int
    cache_per_token: dict[str, int]
    state: int
    cache: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """Bytes in float32: weights, gradients, Adam's two moments, saved activations.

    Activations are an estimate of what autograd saves: the input of every projection and norm;
    queries, keys and values; what an activation function needs in addition to its result; the
    logits; and what the attention implementation saves (dense: the weights before and after the
    mask). A block with gelu, of width d, with h heads of size c and f hidden values, saves
    4d + 4hc + 2f values per token, and dense attention over n keys 2hn more. Dropout masks and
    the workspaces of kernels are left out.
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
class ModelSummary:
    """The cost of a model. `flops` are those of the forward pass, per token of each kind, by part.

    An encoder–decoder has source and target tokens, an image patches and the class token, other
    models one kind; `tokens` counts them in a sequence. A tensor shared by several parts counts
    once, in the part that uses it first.
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
        """Forward, over all tokens of a sequence or an image."""
        return sum(n * self.forward_flops[token] for token, n in self.tokens.items())

    @property
    def training_flops(self) -> dict[str, int]:
        """Forward and backward: three times forward."""
        return {token: (1 + BACKWARD) * flops for token, flops in self.forward_flops.items()}

    @property
    def feedforward_share(self) -> dict[str, float]:
        """Share of the blocks' parameters (0 without blocks) and of all forward FLOPs."""
        flops = sum(n * self.flops[kind].get("feed-forward", 0) for kind, n in self.tokens.items())
        return {
            "parameters": self.parts["feed-forward"] / max(1, self.block_parameters),
            "flops": flops / self.sequence_flops,
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


def summarize(config: ModelConfig, length: int | None = None, batch: int = 1) -> ModelSummary:
    """Count a model at a sequence length (default: its maximum) and a batch size."""
    if isinstance(config, VitConfig):
        length = config.positions  # the number of patches is fixed
    length = config.max_length if length is None else length
    if length < 1 or batch < 1:
        raise UserError(f"length={length}, batch={batch}: both must be at least 1")
    model = _build(config)
    for module in model.modules():
        if isinstance(module, Position):
            module.check_length(length)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    parts = _parameters(model)
    parameters = sum(parts.values())
    tokens = _token_counts(model, length)
    saved, cached, state = _memory(model, length)
    activations = {kind: BYTES["float32"] * saved[kind] for kind in tokens}
    return ModelSummary(
        kind=config.kind,
        length=length,
        batch=batch,
        parameters=parameters,
        parts=parts,
        block_parameters=sum(weight.numel() for block in blocks for weight in block.parameters()),
        tokens=tokens,
        flops=_flops(model, length),
        inference={
            dtype: Inference(
                weights=size * parameters,
                cache_per_token={kind: size * cached[kind] for kind in tokens},
                state=size * state,
                cache=size * batch * (sum(n * cached[kind] for kind, n in tokens.items()) + state),
            )
            for dtype, size in BYTES.items()
        },
        training=Training(
            weights=BYTES["float32"] * parameters,
            gradients=BYTES["float32"] * parameters,
            moments=2 * BYTES["float32"] * parameters,
            activations_per_token=activations,
            activations=batch * sum(n * activations[kind] for kind, n in tokens.items()),
        ),
    )


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters, those that modules share counted once."""
    return sum(parameter.numel() for parameter in _build(config).parameters())


def _build(config: ModelConfig) -> nn.Module:
    """On the meta device."""
    with on_meta():
        return config.build().eval()


# --- parts and kinds of tokens ---


def _parts(model: nn.Module) -> dict[str, str | None]:
    """The part of each module: that of its outermost ancestor that has one."""
    parts: dict[str, str | None] = {}
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        parts[path] = parts.get(parent) or _part(module, name, parent)
    return parts


def _part(module: nn.Module, name: str, parent: str) -> str | None:
    if name == "feedforward":  # of any class
        return "feed-forward"
    if name == "project" and parent.endswith("embedding"):
        return "embedding"  # the projection of a table narrower than the model
    if name == "first" and isinstance(module, nn.Linear):
        return "recurrent"  # gives a decoder's first state
    if name in ("enter", "leave") and isinstance(module, nn.Linear):
        return "convolution"  # to the width of the convolutions, and back
    kinds: dict[str, type | tuple[type, ...]] = {
        "positions": Position,
        "attention": SelfAttention,
        "cross-attention": (CrossAttention, LuongAttention),
        "recurrent": nn.LSTM,
        "convolution": Convolution,
        "norms": (nn.LayerNorm, nn.RMSNorm),
        "embedding": (nn.Embedding, Patches),
    }
    return next((part for part, kind in kinds.items() if isinstance(module, kind)), None)


def _parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by part; those outside all parts are projections of the heads."""
    parts = _parts(model)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[parts[name.rpartition(".")[0]] or "head"] += parameter.numel()
    return {part: counts[part] for part in PARTS}


def _token_counts(model: nn.Module, length: int) -> dict[str, int]:
    """How many tokens of each kind a sequence has."""
    if isinstance(model, Vit):
        patches = {"patch": model.config.side**2}
        return patches | {"class": 1} if model.config.first == "token" else patches
    if isinstance(model, ByteNet):
        return {"source": model.config.unfolded(length), "target": length}
    if isinstance(model, EncoderDecoderBase):
        return {"source": length, "target": length}
    return {"token": length}


def _kinds(model: nn.Module, path: str) -> list[str]:
    """The kinds of tokens that go through a module; none where it runs once per sequence."""
    root = path.partition(".")[0]
    if root in ("pooler", "next_sentence", "first"):
        return []
    if root == "head" and (isinstance(model, Elmo) or getattr(model.head, "pooled", False)):
        return ["token"] if path == "head.reader" else []
    if isinstance(model, Vit):
        both = ["patch", "class"] if model.config.first == "token" else ["patch"]
        return ["patch"] if root == "patches" else both
    if isinstance(model, DecoderOnlySeq2Seq):
        return ["target"] if root == "head" else ["source", "target"]
    if isinstance(model, EncoderDecoderBase):
        reads = root in ("encoder", "encoder_embedding", "both_ways")
        return ["source"] if reads or path.endswith(".cross.project") else ["target"]
    return ["token"]


# --- FLOPs ---


def _flops(model: nn.Module, length: int) -> dict[str, dict[str, int]]:
    """FLOPs per token of each kind, by part, of one forward pass. Changes the model.

    Equal blocks are counted once. Modules that need values to run are replaced by ones that
    compute products of the same size.
    """
    tokens = _token_counts(model, length)
    flops: dict[str, Counter[str]] = {kind: Counter() for kind in tokens}
    copies = _drop_copies(model)

    def add(path: str, part: str, kinds: list[str], count: int) -> None:
        times = next((n for block, n in copies.items() if path.startswith(block)), 1)
        for kind in kinds if count else []:
            flops[kind][part] += times * count // sum(tokens[kind] for kind in kinds)

    recorders: dict[str, _CoreRecorder] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, Attention):
            recorders[path] = _CoreRecorder(module.core)
            module.core = recorders[path]
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):  # no products, but slow on meta
            module.__class__ = nn.Identity  # type: ignore[assignment]
        elif isinstance(module, nn.LSTM):
            module.__class__ = _ParallelLSTM
        elif isinstance(module, ExpertFeedForward):
            module.__class__ = _FirstExperts
        elif isinstance(module, Projections):
            module.__class__ = _FirstProjection
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _ForwardPass(model)(length)
    counts = {path: sum(ops.values()) for path, ops in counter.get_flop_counts().items()}
    parts = _parts(model)
    for path, module in model.named_modules():
        if not any(module.children()):
            part = parts[path] or "head"
            count = counts.get(f"_ForwardPass.model.{path}", 0)
            add(path, part, _kinds(model, path), count)
    for path, recorder in recorders.items():
        part, queries = str(parts[path]), _kinds(model, path)
        keys = ["source"] if part == "cross-attention" else queries
        for name, kinds, count in recorder.flops(part, queries, keys):
            add(path, name, kinds, count)
    return {kind: dict(by_part) for kind, by_part in flops.items()}


def _drop_copies(model: nn.Module) -> dict[str, int]:
    """Leave each stack one block of each kind; gives the paths of these, and how many there were.

    Blocks of a stack differ in nothing but the class of their attention implementation.
    """
    copies = {}
    for path, stack in list(model.named_modules()):
        if isinstance(stack, Stack):
            kinds: dict[type, list[Block]] = {}
            for block in stack.blocks:
                assert isinstance(block, Block)
                kinds.setdefault(type(block.attention.core), []).append(block)
            stack.blocks = nn.ModuleList(blocks[0] for blocks in kinds.values())
            for index, blocks in enumerate(kinds.values()):
                copies[f"{path}.blocks.{index}."] = len(blocks)
    return copies


class _ForwardPass(nn.Module):
    """A forward pass over one sequence or image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, length: int) -> None:
        model = self.model
        sequence = torch.empty(1, length, dtype=torch.long, device="meta")
        if isinstance(model, Vit):
            size = model.config.image_size
            model(torch.empty(1, model.config.channels, size, size, device="meta"))
        elif isinstance(model, Elmo) and model.config.head is None:
            for layers in model.directions(sequence):  # each direction predicts every token
                model.output(layers[-1], model.tokens)
        elif isinstance(model, EncoderDecoderBase):
            model(sequence, sequence)
        else:
            model(sequence)


class _ParallelLSTM(nn.LSTM):
    """The products of all steps at once: their sizes do not depend on the recurrence."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        directions = 1 + self.bidirectional
        for index, (input_weights, state_weights, *_) in enumerate(self.all_weights):
            F.linear(x, input_weights)
            F.linear(x.new_empty(*x.shape[:2], self.hidden_size), state_weights)
            if (index + 1) % directions == 0:
                x = x.new_empty(*x.shape[:2], directions * self.hidden_size)
        return x, hx


class _FirstExperts(ExpertFeedForward):
    """As many experts as serve a token; which ones the router chooses does not matter."""

    def forward(self, x: Any) -> Any:
        self.router(x)
        for _ in range(self.config.top):
            self.outer(self.inner(x[0]))
        return x


class _FirstProjection(Projections):
    """That of the first expert."""

    def forward(self, x: Any) -> Any:
        return self.of(0, x)


@dataclass(frozen=True, kw_only=True)
class _CoreCost:
    """The cost of an attention implementation per token, over all heads.

    A query is scored with `keys` keys. An approximation has more products (multiply-adds per
    query and per key), and saves more for the backward pass: values per query and per key, and
    how many times the weights of a query.
    """

    keys: int
    products: int = 0
    saved_per_query: int = 0
    saved_per_key: int = 0
    saved_weights: int = 0


def _core_cost(core: object, length: int) -> _CoreCost:
    """Formulas, where a pass on the meta device cannot tell.

    A window is computed in blocks, padding included; the Performer branches on values; memory
    compression pads its last block. An unknown implementation counts as exact attention.
    """
    if isinstance(core, Dense):
        return _CoreCost(keys=length, saved_weights=2)  # before and after the mask
    if isinstance(core, Local):
        return _CoreCost(keys=min(length, core.size))
    if isinstance(core, Longformer):
        return _CoreCost(keys=min(length, 2 * core.window + 1 + core.globals))
    if isinstance(core, LinformerAttention):
        mixed = core.rank * core.channels  # E K and F V
        return _CoreCost(
            keys=core.rank, products=mixed, saved_per_key=mixed // length, saved_weights=1
        )
    if isinstance(core, CompressedAttention):
        kernels = (core.keys, core.values)
        return _CoreCost(
            keys=math.ceil(length / core.stride),
            products=sum(kernel.numel() // core.stride for kernel in kernels),
            saved_per_key=sum(kernel[:, :, 0, 0].numel() for kernel in kernels) // core.stride,
        )
    if isinstance(core, PerformerAttention):
        # φ(q) and its product with φ(K)ᵀ V count as scores and mixing; φ(k), φ(K)ᵀ [V 1] and,
        # in a causal chunk, its pairs and the state before it do not.
        heads, head_dim, features = core.sizes.heads, core.sizes.head_dim, len(core.projection)
        kv_dim = core.sizes.kv_heads * head_dim
        chunk = min(CHUNK, length) if core.sizes.causal else 0
        state = heads * features * (head_dim + 1)
        return _CoreCost(
            keys=features,
            products=heads * (features + chunk * (features + head_dim + 1))
            + features * kv_dim
            + state,
            saved_per_query=heads * (features + head_dim + 2 + chunk),
            saved_per_key=heads * (features + head_dim + 1) - kv_dim + state // (chunk or length),
        )
    return _CoreCost(keys=length)


class _CoreRecorder(nn.Module):
    """Takes the place of an attention implementation: records its inputs, computes nothing."""

    inputs: AttentionInputs

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def check(self, score: Any, position: Any) -> None:
        """Accepts everything."""

    def weights(self, inputs: AttentionInputs) -> Any:
        raise NotImplementedError

    def forward(self, inputs: AttentionInputs) -> Any:
        self.inputs = inputs
        return inputs.q.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])

    def flops(
        self, part: str, queries: list[str], keys: list[str]
    ) -> Iterator[tuple[str, list[str], int]]:
        """Name, the kinds of tokens that share it, and FLOPs of what the core does."""
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        mask, score, position = self.inputs.mask, self.inputs.score, self.inputs.position
        (_, heads, length, _), no_queries = q.shape, q[:, :, :0]
        cost = _core_cost(self.core, k.shape[2])
        k = share_heads(k, heads)
        scored = k.new_empty(*k.shape[:2], cost.keys, k.shape[3])
        pairs = _count(score, q, scored) - _count(score, no_queries, scored)
        yield f"{part} scores", queries, pairs
        yield f"{part} scores", keys, _count(score, no_queries, k)
        yield f"{part} mixing", queries, 2 * heads * length * cost.keys * v.shape[3]
        weights = q.new_empty(*q.shape[:3], k.shape[2])
        on_positions = _count(position.bias, q, mask) + _count(position.value_bias, weights, mask)
        yield "positions", queries, on_positions
        yield part, queries, 2 * length * cost.products


def _count(function: Callable[..., Any], *arguments: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*arguments)
    return counter.get_total_flops()


# --- memory ---


def _memory(model: Any, length: int) -> tuple[Counter[str], Counter[str], int]:
    """Values: saved for the backward pass and cached, per token of each kind; a decoder's state.

    The encoder's output is saved once, for all layers of the decoder.
    """
    saved: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    state = 0
    if isinstance(model, Seq2Seq | Baseline):
        encoded = model.config.dim * (2 if isinstance(model, ConvS2S) else 1)
        saved["source"] += 0 if isinstance(model, ByteNet) else encoded
        cached["source"] += 0 if isinstance(model, Seq2Seq) else encoded
    for path, module in model.named_modules():
        kinds = _kinds(model, path)
        values = 0 if path.endswith("cross.project") else _saved(module, model)
        saved.update(dict.fromkeys(kinds, values))
        if isinstance(module, Attention):
            is_cross = not isinstance(module, SelfAttention)
            keys = ["source"] if is_cross else kinds
            per_query, per_key = _saved_by_attention(module, length, model)
            saved.update(dict.fromkeys(kinds, per_query))
            saved.update(dict.fromkeys(keys, per_key))
            if path.startswith("decoder") and not isinstance(module, LuongAttention):
                cached.update({kind: sum(module.config.sizes[1:]) for kind in keys})
        if kinds == ["target"] and isinstance(module, nn.LSTM):
            state += 2 * module.num_layers * module.hidden_size
        if kinds == ["target"] and isinstance(module, Convolution):
            state += module.before * module.inner.in_channels
    return saved, cached, state


def _saved(module: nn.Module, model: Any) -> int:
    """Values that the backward pass needs of a token, those inside its submodules left out."""
    match module:
        case nn.Linear():
            return module.in_features
        case nn.LayerNorm() | nn.RMSNorm():
            return module.weight.numel()
        case nn.Conv1d():
            return module.in_channels
        case nn.Conv2d():
            return module.weight[0].numel()  # the pixels of a patch
        case nn.LSTM():
            return _saved_by_lstm(module)
        case FeedForward():
            return module.outer.in_features * _needs_input(module.activation)
        case GatedFeedForward():  # both factors; the two projections share their input
            inputs = 2 + _needs_input(module.activation)
            return module.outer.in_features * inputs - module.gate.in_features
        case ExpertFeedForward():
            _, dim, hidden = module.inner.weight.shape
            slots = module.config.top * module.config.capacity
            return round(slots * (2 * dim + hidden * (1 + _needs_input(module.activation))))
        case LMHead():  # its input, and the logits
            return sum(module.matrix(getattr(model, "target_table", model.tokens)).shape)
        case MaskedHead() | DetectHead():
            return module.project.out_features  # the input of the activation
        case DilatedBlock():
            return module.convolution.inner.in_channels  # relu's result, which is copied to pad it
        case ConvEncoder() | ConvDecoder():  # both halves of what is gated
            return 2 * sum(
                conv.in_channels for conv in module.modules() if isinstance(conv, nn.Conv1d)
            )
        case Elmo() if module.config.head is None:  # the head is used in both directions
            return sum(module.output.matrix(module.tokens).shape)
        case Elmo():  # all layers, their mixture, and what the maximum is taken of
            return (module.config.layers + 3) * 2 * module.config.dim
    return 0


def _saved_by_attention(attention: Attention, keys: int, model: Any) -> tuple[int, int]:
    """Values saved of a query and of a key, those of the projections left out."""
    if isinstance(attention, LuongAttention):
        heads, head_dim = 1, model.config.dim
        # Keys are the encoder's output, saved once; these values are a sum with the embeddings.
        per_query, per_key = head_dim, head_dim * isinstance(attention, StepAttention)
    else:
        heads = attention.config.heads
        keys *= 2 if isinstance(model, DecoderOnlySeq2Seq) else 1
        per_query, *others = attention.config.sizes
        per_key = sum(others)
    cost = _core_cost(attention.core, keys)
    per_pair = cost.saved_weights
    if cost.saved_weights and isinstance(attention.score, AdditiveScore):
        per_pair += attention.score.weight.shape[1]
    per_query += cost.saved_per_query + heads * cost.keys * per_pair
    return per_query, per_key + cost.saved_per_key


def _saved_by_lstm(lstm: nn.LSTM) -> int:
    """Per layer its input; per direction the four gates, the state, the cell and its tanh."""
    directions = 2 if lstm.bidirectional else 1
    inputs = lstm.input_size + (lstm.num_layers - 1) * directions * lstm.hidden_size
    return inputs + lstm.num_layers * directions * 7 * lstm.hidden_size


def _needs_input(activation: Callable[[Tensor], Tensor]) -> bool:
    """True unless the gradient follows from the result, which the next projection saves."""
    return activation is not F.relu


# --- tables for the terminal ---


def human(count: int) -> str:
    """A count with three digits: 65.1M, 1.32B."""
    return _scaled(count, 1000, ["", "K", "M", "B", "T", "Q"])


def human_bytes(count: int) -> str:
    return _scaled(count, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def _scaled(count: int, step: int, units: list[str]) -> str:
    number, power = float(count), 0
    while round(number) >= 1000 and power < len(units) - 1:
        number, power = number / step, power + 1
    is_integer = power == 0 or round(number, 1) >= 100
    return f"{number:.0f}{units[power]}" if is_integer else f"{number:#.3g}{units[power]}"


def table(summary: ModelSummary) -> Group:
    """For the terminal: parameters and FLOPs by part, then memory."""
    return Group(_parts_table(summary), _memory_table(summary))


def _noun(token: str) -> str:
    return token if token in ("token", "patch") else f"{token} token"


def _parts_table(summary: ModelSummary) -> Table:
    table = Table(title=f"{human(summary.parameters)} parameters, FLOPs at length {summary.length}")
    if summary.block_parameters:
        share = summary.feedforward_share
        table.caption = (
            f"feed-forward: {share['parameters']:.0%} of the blocks' parameters, "
            f"{share['flops']:.0%} of the FLOPs"
        )
    table.add_column("part")
    for name in ("parameters", "share", *(f"FLOPs / {_noun(token)}" for token in summary.flops)):
        table.add_column(name, justify="right")
    for part in (f"{part}{work}" for part in PARTS for work in ("", " scores", " mixing")):
        size = summary.parts.get(part, 0)
        flops = [parts.get(part, 0) for parts in summary.flops.values()]
        if size or any(flops):
            cells = [human(number) if number else "" for number in (size, *flops)]
            percent = f"{size / summary.parameters:.1%}" if size else ""
            table.add_row(part, cells[0], percent, *cells[1:])
    table.add_section()
    forward, training = summary.forward_flops.values(), summary.training_flops.values()
    table.add_row("all, forward", human(summary.parameters), "100.0%", *map(human, forward))
    table.add_row("forward and backward", "", "", *map(human, training))
    return table


def _memory_table(summary: ModelSummary) -> Table:
    sequences = f"{summary.batch} × {summary.length}"
    table = Table(title="memory")
    table.add_column("")
    for name in (*(f"inference, {dtype}" for dtype in summary.inference), "training, float32"):
        table.add_column(name, justify="right")
    training, inference = summary.training, list(summary.inference.values())

    def row(name: str, inference: list[int], training: int = 0) -> None:
        if any(inference) or training:
            table.add_row(name, *(human_bytes(x) if x else "" for x in (*inference, training)))

    none = [0] * len(inference)
    row("weights", [each.weights for each in inference], training.weights)
    row("gradients", none, training.gradients)
    row("Adam's moments", none, training.moments)
    for token, activations in training.activations_per_token.items():
        row(f"cache / {_noun(token)}", [each.cache_per_token[token] for each in inference])
        row(f"activations / {_noun(token)}", none, activations)
    row("states / sequence", [each.state for each in inference])
    row(f"cache, {sequences} tokens", [each.cache for each in inference])
    row(f"activations, {sequences} tokens", none, training.activations)
    table.add_section()
    row("together", [each.weights + each.cache for each in inference], training.total)
    return table
