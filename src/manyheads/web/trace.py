"""All intermediate tensors of a forward pass, part by part, with formula and code.

Forward hooks record the inputs and outputs of every module. Fused attention never materialises
scores and masks: the modules that define them recompute them from the same queries and keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.models.capture import Kind
from manyheads.nn.attention import CrossAttention, ExactAttention, SelfAttention, dense_weights
from manyheads.nn.block import Block, Model, Stack
from manyheads.nn.experts import ExpertFeedForward
from manyheads.nn.layers import Embedding, FeedForward, GatedFeedForward, Norm, Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.shapes import Values
from manyheads.ops import share_heads
from manyheads.web import formulas
from manyheads.web.heads import Recording

Key = tuple[str, Kind, int]
Code = tuple[Callable[..., Any], ...]
Labels = str | tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Inputs and output of a module call."""

    args: tuple[Any, ...]
    output: Any


Calls = dict[nn.Module, Call]


@dataclass(frozen=True)
class Part:
    """An intermediate tensor with its formula and code.

    `axes` are letters of nn/shapes.py. `rows` and `columns` are labels, or the name of the stack
    whose tokens are the labels. `words` are column labels that differ by row; `all` is the full
    number of columns if only the largest are stored.
    """

    name: str
    title: str
    axes: str
    tensor: Tensor
    formula: str
    code: Code
    rows: Labels = ""
    columns: Labels = ""
    words: tuple[tuple[str, ...], ...] = ()
    all: int | None = None


@dataclass(frozen=True)
class Column:
    """The parts of a stack: before the layers, in each layer, and after them."""

    name: str
    ids: list[int]
    before: list[Part]
    layers: list[Part]
    after: list[Part]


@contextmanager
def calls_of(model: nn.Module) -> Iterator[Calls]:
    """Record the last call of every module while the context is open."""
    seen: Calls = {}

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[module] = Call(args, output)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def stacks(model: Model) -> list[tuple[str, Embedding, Stack]]:
    """The Transformer stacks of a model with their embeddings; empty for other architectures."""
    stacks_by_name = model.stacks()
    return [(name, below, stacks_by_name[name]) for name, below in model.embeddings().items()]


def forward_parts(model: Model, seen: Calls, record: Recording) -> list[Column]:
    """All parts of the last forward pass, for a batch of one text."""
    columns = []
    for name, embedding, stack in stacks(model):
        ids = seen[embedding].args[1][0].tolist()
        layers = [
            _layer(name, layer, block, seen, record)
            for layer, block in enumerate(stack.blocks)
            if isinstance(block, Block)
        ]
        after = []
        if not isinstance(stack.last_norm, nn.Identity):
            after.append(_norm(name, stack.last_norm, seen, stack.forward, "states"))
        columns.append(Column(name, ids, _embedded(name, embedding, seen), _stacked(layers), after))
    return columns


def _first(tensor: Tensor) -> Tensor:
    """The first item of a batch, as float32 on the CPU."""
    return tensor[0].float().cpu()


def _embedded(name: str, embedding: Embedding, seen: Calls) -> list[Part]:
    """Scaled token embedding, position, segment, and their sum, the input of the first layer."""
    table, tokens, position, positions = seen[embedding].args[:4]
    vectors = table(tokens) * embedding.scale
    code: Code = (embedding.forward,)

    def part(what: str, title: str, tensor: Tensor, formula: str, code: Code) -> Part:
        return Part(f"{name}.{what}", title, "t d", _first(tensor), formula, code, name)

    scale = "" if embedding.scale == 1.0 else f" · √d,  √d = {embedding.scale:.4g}"
    parts = [part("embedding", "Embedding", vectors, f"E[token]{scale}", code)]
    terms = ["E[token]" if embedding.scale == 1.0 else "√d · E[token]"]
    if type(position).embed is not Position.embed:
        position_term = position.embed(torch.zeros_like(vectors), positions).expand_as(vectors)
        formula, functions = formulas.embedded(position), (position.embed, embedding.forward)
        parts.append(part("position", "Position", position_term, formula, functions))
        terms.append("PE(pos)")
    if embedding.segment is not None:
        segment_ids = seen[embedding].args[4] if len(seen[embedding].args) > 4 else None
        segments = embedding.segment(
            torch.zeros_like(tokens) if segment_ids is None else segment_ids
        )
        parts.append(part("segment", "Segment", segments, "S[segment]", code))
        terms.append("S[segment]")
    total = " + ".join(terms)
    if embedding.concatenates:
        total = f"[{terms[0]}; {' + '.join(terms[1:])}]"
    if not isinstance(embedding.norm, nn.Identity):
        total = f"Norm({total})"
    if not isinstance(embedding.project, nn.Identity):
        total = f"({total}) W + b"
    parts.append(part("input", "Sum", seen[embedding].output, f"x = {total}", code))
    return parts


def _layer(name: str, layer: int, block: Block, seen: Calls, record: Recording) -> list[Part]:
    """The input of a block, then each sub-layer with its residual connection."""
    block_input = _first(seen[block].args[0])
    formula = "x: the output of the previous layer; in the first layer the embeddings"
    code: Code = (block.forward,)
    parts = [Part(f"{name}.layer.input", "Input x", "t d", block_input, formula, code, name)]
    self_attention = _attention((name, "self", layer), block.attention, seen, record)
    parts += _around(f"{name}.self", block.attention_residual, seen, self_attention, "MultiHead")
    if "cross" in dict(block.named_children()):
        cross_attention = _attention((name, "cross", layer), block.cross, seen, record)
        parts += _around(f"{name}.cross", block.cross_residual, seen, cross_attention, "MultiHead")
    inside = _feedforward(f"{name}.feedforward", block.feedforward, seen)
    return parts + _around(f"{name}.feedforward", block.feedforward_residual, seen, inside, "FFN")


def _around(
    place: str, residual: Residual, seen: Calls, inside: list[Part], function: str
) -> list[Part]:
    """A sub-layer with its norm (pre or post) and residual sum."""
    name = place.partition(".")[0]
    norm = _norm(place, residual.norm, seen, residual.forward)
    pre = residual.placement == "pre"
    total = seen[residual].output if pre else seen[residual.norm].args[0]
    formula, code = formulas.summed(residual, function), (residual.forward,)
    added = Part(f"{place}.sum", "x + output", "t d", _first(total), formula, code, name)
    return [norm, *inside, added] if pre else [*inside, added, norm]


def _norm(
    place: str, norm: nn.Module, seen: Calls, function: Callable[..., Any], part_name: str = "norm"
) -> Part:
    title = "Norm" if part_name == "norm" else "Last norm"
    tensor, name = _first(seen[norm].output), place.partition(".")[0]
    code = (function, Norm.build)
    return Part(f"{place}.{part_name}", title, "t d", tensor, formulas.norm(norm), code, name)


def _mask_and_position(attention: nn.Module, call: Call) -> tuple[AttentionMask, Position]:
    """The mask and the position scheme that the attention module used."""
    if isinstance(attention, SelfAttention):
        return call.args[1], call.args[2]
    assert isinstance(attention, CrossAttention)
    x, mask = call.args[0], call.args[2]
    queries = mask.key_positions.new_zeros(1, x.shape[1])
    return AttentionMask(
        mask.rule, queries, mask.key_positions, mask.padding_mask
    ), attention.position


def _values(attention: SelfAttention | CrossAttention, seen: Calls) -> Values:
    size = attention.config.sizes[-1]
    values = seen[attention.project].output[..., -size:]
    return rearrange(values, "b s (g c) -> b g s c", g=attention.config.kv_heads)


def _attention(
    key: Key, attention: SelfAttention | CrossAttention, seen: Calls, record: Recording
) -> list[Part]:
    """Q, K, V, scores, mask, weights, the mixed values of each head, and Concat(…) W^O."""
    name, kind, _ = key
    key_stack, heads = ("encoder" if kind == "cross" else name), attention.config.heads
    mask, position = _mask_and_position(attention, seen[attention])
    q, k = record.queries[key], share_heads(record.keys[key], heads)
    weights = record.maps.by_layer[key][-1]
    v, core = share_heads(_values(attention, seen), heads), attention.core
    core_forward = core.forward if isinstance(core, nn.Module) else core.__call__
    exact = isinstance(core, ExactAttention) and core.exact
    value_bias = position.value_bias(weights, mask) if exact else None
    mixed = rearrange(seen[attention.output].args[0], "b t (h c) -> b h t c", h=heads)
    attention_forward = attention.forward
    project_kv = (
        attention.project_kv if isinstance(attention, CrossAttention) else attention.forward
    )

    def part(
        what: str, title: str, axes: str, tensor: Tensor, formula: str, *code: Callable[..., Any]
    ) -> Part:
        rows = key_stack if axes == "h s c" else name
        columns = key_stack if axes.endswith("s") else ""
        part_name = f"{name}.{kind}.{what}"
        return Part(part_name, title, axes, _first(tensor), formula, code, rows, columns)

    rotations = (position.rotate,) if type(position).rotate is not Position.rotate else ()
    formulas_by_letter = {
        letter: formulas.projected(letter, attention, position) for letter in "QKV"
    }
    parts = [
        part("q", "Q", "h t c", q, formulas_by_letter["Q"], attention_forward, *rotations),
        part("k", "K", "h s c", k, formulas_by_letter["K"], project_kv, *rotations),
        part("v", "V", "h s c", v, formulas_by_letter["V"], project_kv),
    ]
    if exact:
        parts += _scores(part, attention, mask, position, (q, k))
        parts.append(part("weights", "Softmax", "h t s", weights, SOFTMAX, dense_weights))
    else:
        formula = f"the weights of core={attention.config.core.kind}: see its code"
        parts.append(part("weights", "Weights", "h t s", weights, formula, core.weights))
    formula = "head_h = A V" if value_bias is None else "head_h = A V + position on V"
    if value_bias is not None:
        formula_bias = "Σ_j A_ij a^V_{clip(j−i)}"
        parts.append(
            part("spread", "Position on V", "h t c", value_bias, formula_bias, position.value)
        )
    parts.append(part("mix", "Mix", "h t c", mixed, formula, core_forward))
    formula = f"Concat(head_1, …, head_h) W^O{formulas.plus_bias(attention.output)}"
    output = seen[attention].output
    return [*parts, part("output", "Output", "t d", output, formula, attention_forward)]


SOFTMAX = "A_ij = exp(e_ij) / Σ_k exp(e_ik),  e the scores"


def _scores(
    part: Callable[..., Part],
    attention: SelfAttention | CrossAttention,
    attention_mask: AttentionMask,
    position: Position,
    queries_and_keys: tuple[Tensor, Tensor],
) -> list[Part]:
    """Scores, position bias and mask, computed as in `dense_weights`.

    A mask is 0 where a query sees a key and −∞ elsewhere. Without bias and mask e = scores, and
    there is no further part.
    """
    q, k = queries_and_keys
    scores = attention.score(q, k)
    formula = formulas.score(attention.score, q.shape[-1])
    parts = [part("scores", "Scores", "h t s", scores, formula, attention.score.forward)]
    bias = position.score(q, attention_mask.query_positions, attention_mask.key_positions)
    if bias is not None:
        bias, formula = bias.expand_as(scores), formulas.biased(position)
        parts.append(part("bias", "Position bias", "h t s", bias, formula, position.score))
        scores = scores + bias
    visible = attention_mask.as_bool()
    formula = "e = scores + bias" if bias is not None else "e = scores"
    if visible is not None and not visible[:1, 0].all():
        mask = scores.new_zeros(scores.shape[-2:])[None].masked_fill(~visible[:1, 0], -torch.inf)
        causal = "0 where query i sees key j (j ≤ i), else −∞"
        meaning = causal if attention_mask.rule.is_causal else "0 / −∞"
        code = (attention_mask.as_bool, attention_mask.rule.__call__)
        parts.append(part("mask", "Mask", "t s", mask, meaning, *code))
        scores, formula = scores + mask, f"{formula} + mask"
    elif bias is None:
        return parts
    title = "Scores + mask" if parts[-1].title == "Mask" else "Scores + bias"
    return [*parts, part("masked", title, "h t s", scores, formula, dense_weights)]


def _feedforward(place: str, part: nn.Module, seen: Calls) -> list[Part]:
    """The hidden layer or router, and the output, of a feed-forward layer."""
    name, code = place.partition(".")[0], (part.forward,)
    inside: list[Part] = []
    if isinstance(part, ExpertFeedForward):
        shares = seen[part.router].output[None].softmax(-1)
        formula = "softmax(x W_g): router probabilities before top-k"
        inside.append(Part(f"{place}.router", "Router", "t e", _first(shares), formula, code, name))
    elif isinstance(part, FeedForward | GatedFeedForward):
        tensor = _first(seen[part.dropout].output)
        formula = formulas.hidden(part)
        inside.append(Part(f"{place}.hidden", "Hidden", "t f", tensor, formula, code, name))
    output, formula = _first(seen[part].output), formulas.feedforward(part)
    return [*inside, Part(f"{place}.output", "Output", "t d", output, formula, code, name)]


def _stacked(layers: list[list[Part]]) -> list[Part]:
    """Stack the parts of all layers by name, with the layer as the first index.

    A part whose shape differs between layers is left out.
    """
    parts = []
    for first in layers[0]:
        same = [part.tensor for parts in layers for part in parts if part.name == first.name]
        if len(same) == len(layers) and len({tensor.shape for tensor in same}) == 1:
            parts.append(replace(first, tensor=torch.stack(same)))
    return parts
