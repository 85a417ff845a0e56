"""Parameters, FLOPs and memory of a model, by part.

The model is built on the meta device, with shapes and no values. FLOPs are those of the matrix
products, two per multiply-add: every weight of a projection is used once per token, and attention
counts as the dense implementation computes it, every query scored with every key, masked or not.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from manyheads.baselines.baseline import LuongAttention
from manyheads.baselines.convolution import ByteNet, Convolution, ConvS2S
from manyheads.baselines.elmo import Elmo
from manyheads.errors import UserError
from manyheads.models.decoder_only_seq2seq import Baseline, DecoderOnlySeq2Seq
from manyheads.models.heads import DetectHead, MaskedHead
from manyheads.models.seq2seq import EncoderDecoderBase, Seq2Seq
from manyheads.models.vit import Patches, Vit, VitConfig
from manyheads.nn.attention import CrossAttention, Dense, SelfAttention
from manyheads.nn.block import Block, Stack, on_meta
from manyheads.nn.compressed import CompressedAttention
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.layers import FeedForward, GatedFeedForward, LMHead
from manyheads.nn.linformer import LinformerAttention
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import full, make_mask
from manyheads.nn.performer import CHUNK, PerformerAttention
from manyheads.nn.positions import Position
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
    logits; and the weights of dense attention, before and after the mask. A block with gelu, of
    width d, with h heads of size c and f hidden values, saves 4d + 4hc + 2f values per token, and
    dense attention over n keys 2hn more. Left out are dropout masks, the workspaces of kernels and
    intermediate results of approximate attention and of the baselines.
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
    saved, cached, state = _memory(model, tokens)
    activations = {kind: BYTES["float32"] * saved[kind] for kind in tokens}
    return ModelSummary(
        kind=config.kind,
        length=length,
        batch=batch,
        parameters=parameters,
        parts=parts,
        block_parameters=sum(weight.numel() for block in blocks for weight in block.parameters()),
        tokens=tokens,
        flops=_flops(model, tokens),
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


def _parts(model: nn.Module) -> list[tuple[str, nn.Module, str | None]]:
    """Path, module and part of each module: that of its outermost ancestor that has one."""
    parts: dict[str, str | None] = {}
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        parts[path] = parts.get(parent) or _part(module, name, parent)
    return [(path, module, parts[path]) for path, module in model.named_modules()]


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
    parts = {path: part for path, _, part in _parts(model)}
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
        return ["token"] if path in ("head.reader", "head.second_reader") else []
    if isinstance(model, Vit):
        both = ["patch", "class"] if model.config.first == "token" else ["patch"]
        return ["patch"] if root == "patches" else both
    if isinstance(model, DecoderOnlySeq2Seq):
        return ["target"] if root == "head" else ["source", "target"]
    if isinstance(model, EncoderDecoderBase):
        reads = root in ("encoder", "encoder_embedding", "both_ways")
        return ["source"] if reads or path.endswith(".cross.project") else ["target"]
    return ["token"]


def _key_kinds(attention: Attention, kinds: list[str]) -> list[str]:
    return kinds if isinstance(attention, SelfAttention) else ["source"]


# --- FLOPs ---


def _flops(model: nn.Module, tokens: dict[str, int]) -> dict[str, dict[str, int]]:
    """FLOPs per token of each kind, by part, of a forward pass."""
    flops: dict[str, Counter[str]] = {kind: Counter() for kind in tokens}

    def add(kinds: list[str], part: str, count: int) -> None:
        for kind in kinds if count else []:
            flops[kind][part] += count

    rows = [(x, part or "head", _kinds(model, path)) for path, x, part in _parts(model)]
    for module, part, kinds in rows:
        add(kinds, part, 2 * _weights_per_token(module, model))
    for module, part, kinds in rows:
        if isinstance(module, Attention):
            sizes, keys = module.config, _key_kinds(module, kinds)
            seen, products = _core_cost(module.core, sum(tokens[kind] for kind in keys))
            query = torch.empty(1, sizes.heads, 1, sizes.head_dim, device="meta")
            key = torch.empty(1, sizes.heads, 1, sizes.key_dim, device="meta")
            per_key = _count(module.score, query[:, :, :0], key)
            per_pair = _count(module.score, query, key.expand(-1, -1, seen, -1)) - seen * per_key
            add(kinds, f"{part} scores", per_pair)
            add(keys, f"{part} scores", per_key)
            add(kinds, f"{part} mixing", 2 * sizes.heads * seen * sizes.head_dim)
            add(kinds, part, 2 * products)
    for module, _, kinds in rows:
        if isinstance(module, Stack):
            add(kinds, "positions", _position_flops(module, sum(tokens[kind] for kind in kinds)))
    return {kind: dict(by_part) for kind, by_part in flops.items()}


def _weights_per_token(module: nn.Module, model: Any) -> int:
    """The weights of a module, those of submodules left out, that a token is multiplied with."""
    match module:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d():
            return module.weight.numel()
        case nn.LSTM():
            return sum(weight.numel() for weight in module.parameters() if weight.ndim == 2)
        case ExpertFeedForward():
            return module.config.top * (
                module.inner.weight[0].numel() + module.outer.weight[0].numel()
            )
        case LMHead():
            return _uses(model) * _output_matrix(module, model).numel()
    return 0


def _uses(model: nn.Module) -> int:
    """How often the output matrix is used for a token: ELMo predicts in both directions."""
    return 2 if isinstance(model, Elmo) else 1


def _output_matrix(head: LMHead, model: Any) -> Tensor:
    return head.matrix(getattr(model, "target_table", model.tokens))


def _position_flops(stack: Stack, length: int) -> int:
    """FLOPs per token of the bias of all layers."""
    blocks = [block for block in stack.blocks if isinstance(block, Block)]
    sizes = blocks[0].attention.config
    q = torch.empty(1, sizes.heads, length, sizes.head_dim, device="meta")
    mask = make_mask(full, length, device=q.device)
    weights = q.new_empty(*q.shape[:3], length)
    count = _count(stack.position.bias, q, mask) + _count(stack.position.value_bias, weights, mask)
    return len(blocks) * count // length


def _core_cost(core: object, length: int) -> tuple[int, int]:
    """How many keys a query is scored with, and further multiply-adds per token, over all heads.

    An unknown implementation counts as exact attention.
    """
    match core:
        case Local():
            return min(length, core.size), 0
        case Longformer():
            return min(length, 2 * core.window + 1 + core.globals), 0
        case LinformerAttention():
            return core.rank, core.rank * core.channels  # E K and F V
        case CompressedAttention():
            kernels = core.keys.numel() + core.values.numel()
            return math.ceil(length / core.stride), kernels // core.stride
        case PerformerAttention():
            # φ(q) and its product with φ(K)ᵀ V count as scores and mixing; φ(k), φ(K)ᵀ [V 1] and,
            # in a causal chunk, its pairs and the state before it do not.
            sizes, features = core.sizes, len(core.projection)
            heads, wide = sizes.heads, sizes.head_dim + 1
            chunk = min(CHUNK, length) if sizes.causal else 0
            products = heads * (features + chunk * (features + wide) + features * wide)
            return features, products + features * sizes.kv_heads * sizes.head_dim
    return length, 0


def _count(function: Callable[..., Any], *arguments: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*arguments)
    return counter.get_total_flops()


# --- memory ---


def _memory(model: Any, tokens: dict[str, int]) -> tuple[Counter[str], Counter[str], int]:
    """Values: saved for the backward pass and cached, per token of each kind; a decoder's state.

    The encoder's output is saved once, for all layers of the decoder.
    """
    saved: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    state = 0
    if isinstance(model, Seq2Seq | Baseline):
        encoded = model.config.dim * (2 if isinstance(model, ConvS2S) else 1)
        saved["source"] += encoded
        cached["source"] += 0 if isinstance(model, Seq2Seq) else encoded
    for path, module in model.named_modules():
        kinds = _kinds(model, path)
        values = 0 if path.endswith("cross.project") else _saved(module, model)
        saved.update(dict.fromkeys(kinds, values))
        if isinstance(module, SelfAttention | CrossAttention):
            keys = _key_kinds(module, kinds)
            seen = sum(tokens[kind] for kind in keys)
            weights = 2 * module.config.heads * seen if isinstance(module.core, Dense) else 0
            per_query, *per_key = module.config.sizes
            saved.update(dict.fromkeys(kinds, per_query + weights))
            saved.update(dict.fromkeys(keys, sum(per_key)))
            if path.startswith("decoder"):
                cached.update(dict.fromkeys(keys, sum(per_key)))
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
            return math.prod(module.normalized_shape)
        case nn.Conv1d():
            return module.in_channels
        case nn.Conv2d():
            return module.weight[0].numel()  # the pixels of a patch
        case nn.LSTM():
            # Per layer its input; per direction the four gates, the state, the cell and its tanh.
            directions = 1 + module.bidirectional
            between = (module.num_layers - 1) * directions * module.hidden_size
            gates = module.num_layers * directions * 7 * module.hidden_size
            return module.input_size + between + gates
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
            return _uses(model) * sum(_output_matrix(module, model).shape)
        case MaskedHead() | DetectHead():
            return module.project.out_features  # the input of the activation
    return 0


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
