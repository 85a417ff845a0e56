"""What becomes of a text on its way through a model: part after part, each with its numbers.

Hooks keep what every module was given and gave in the pass itself. Scores and masks, which a fast
core never holds, are computed again from the same queries and keys by the parts that define them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.models.base import Model
from manyheads.models.capture import Kind
from manyheads.nn.attention import CrossAttention, ExactAttention, SelfAttention, dense_weights
from manyheads.nn.block import Block, Stack
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
    """What a module was given, and what it gave."""

    args: tuple[Any, ...]
    output: Any


Calls = dict[nn.Module, Call]


@dataclass(frozen=True)
class Part:
    """Numbers on the way, the formula and the code that they come from.

    `axes` are letters of nn/shapes.py. Labels are those given, or the tokens of the stack that is
    named. `words` are the tokens that the numbers of a row speak of, where they differ by row;
    `all` how many columns there are, where not all are kept.
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
    """One stack with what leads into it: parts before, in each layer, and after the layers."""

    name: str
    ids: list[int]
    before: list[Part]
    layers: list[Part]
    after: list[Part]


@contextmanager
def calls_of(model: nn.Module) -> Iterator[Calls]:
    """While open, the last call of every module of the model is kept."""
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
    """The stacks of blocks of a model in the order of reading; none where it is made otherwise."""
    stacks_by_name = model.stacks()
    return [(name, below, stacks_by_name[name]) for name, below in model.embeddings().items()]


def forward_parts(model: Model, seen: Calls, record: Recording) -> list[Column]:
    """Every part of the last pass, for the one text that it read."""
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


def _one(tensor: Tensor) -> Tensor:
    """Of the one text of a batch, in full precision, where it can be kept."""
    return tensor[0].float().cpu()


def _embedded(name: str, embedding: Embedding, seen: Calls) -> list[Part]:
    """token · scale, position and segment, and the sum of them that enters the first layer."""
    table, tokens, position, places = seen[embedding].args[:4]
    vectors = table(tokens) * embedding.scale
    code: Code = (embedding.forward,)

    def part(what: str, title: str, tensor: Tensor, formula: str, code: Code) -> Part:
        return Part(f"{name}.{what}", title, "t d", _one(tensor), formula, code, name)

    scale = "" if embedding.scale == 1.0 else f" · √d,  √d = {embedding.scale:.4g}"
    parts = [part("embedding", "Embedding", vectors, f"E[token]{scale}", code)]
    terms = ["E[token]" if embedding.scale == 1.0 else "√d · E[token]"]
    if type(position).embed is not Position.embed:
        alone = position.embed(torch.zeros_like(vectors), places).expand_as(vectors)
        said, shown = formulas.embedded(position), (position.embed, embedding.forward)
        parts.append(part("position", "Position", alone, said, shown))
        terms.append("PE(pos)")
    if embedding.segment is not None:
        given = seen[embedding].args[4] if len(seen[embedding].args) > 4 else None
        segments = embedding.segment(torch.zeros_like(tokens) if given is None else given)
        parts.append(part("segment", "Segment", segments, "S[segment]", code))
        terms.append("S[segment]")
    total = " + ".join(terms)
    if not isinstance(embedding.norm, nn.Identity):
        total = f"Norm({total})"
    if not isinstance(embedding.project, nn.Identity):
        total = f"({total}) W + b"
    parts.append(part("input", "Sum", seen[embedding].output, f"x = {total}", code))
    return parts


def _layer(name: str, layer: int, block: Block, seen: Calls, record: Recording) -> list[Part]:
    """What comes in, then each part of the block with its residual connection."""
    entered = _one(seen[block].args[0])
    formula = "x: what the layer before gave, in the first layer the embeddings"
    code: Code = (block.forward,)
    parts = [Part(f"{name}.layer.input", "Input x", "t d", entered, formula, code, name)]
    own = _attention((name, "self", layer), block.attention, seen, record)
    parts += _around(f"{name}.self", block.attention_residual, seen, own, "MultiHead")
    if "cross" in dict(block.named_children()):
        other = _attention((name, "cross", layer), block.cross, seen, record)
        parts += _around(f"{name}.cross", block.cross_residual, seen, other, "MultiHead")
    inside = _feedforward(f"{name}.feedforward", block.feedforward, seen)
    return parts + _around(f"{name}.feedforward", block.feedforward_residual, seen, inside, "FFN")


def _around(
    place: str, residual: Residual, seen: Calls, inside: list[Part], function: str
) -> list[Part]:
    """The norm before or after, and the sum of the residual connection."""
    name = place.partition(".")[0]
    norm = _norm(place, residual.norm, seen, residual.forward)
    pre = residual.placement == "pre"
    total = seen[residual].output if pre else seen[residual.norm].args[0]
    formula, code = formulas.summed(residual, function), (residual.forward,)
    added = Part(f"{place}.sum", "x + output", "t d", _one(total), formula, code, name)
    return [norm, *inside, added] if pre else [*inside, added, norm]


def _norm(
    place: str, norm: nn.Module, seen: Calls, where: Callable[..., Any], what: str = "norm"
) -> Part:
    title = "Norm" if what == "norm" else "Last norm"
    tensor, name = _one(seen[norm].output), place.partition(".")[0]
    code = (where, Norm.build)
    return Part(f"{place}.{what}", title, "t d", tensor, formulas.norm(norm), code, name)


def _sight(attention: nn.Module, call: Call) -> tuple[AttentionMask, Position]:
    """Who saw whom, and the position that scores: as the attention itself had them."""
    if isinstance(attention, SelfAttention):
        return call.args[1], call.args[2]
    assert isinstance(attention, CrossAttention)
    x, sight = call.args[0], call.args[2]
    queries = sight.key_positions.new_zeros(1, x.shape[1])
    return AttentionMask(
        sight.rule, queries, sight.key_positions, sight.padding_mask
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
    read, heads = ("encoder" if kind == "cross" else name), attention.config.heads
    sight, position = _sight(attention, seen[attention])
    q, k = record.queries[key], share_heads(record.keys[key], heads)
    weights = record.maps.by_layer[key][-1]
    v, core = share_heads(_values(attention, seen), heads), attention.core
    computed = core.forward if isinstance(core, nn.Module) else core.__call__
    exact = isinstance(core, ExactAttention)
    spread = position.value_bias(weights, sight) if exact else None
    mixed = rearrange(seen[attention.output].args[0], "b t (h c) -> b h t c", h=heads)
    project = attention.forward
    read_by = attention.project_kv if isinstance(attention, CrossAttention) else attention.forward

    def part(
        what: str, title: str, axes: str, tensor: Tensor, formula: str, *code: Callable[..., Any]
    ) -> Part:
        rows = read if axes == "h s c" else name
        columns = read if axes.endswith("s") else ""
        place = f"{name}.{kind}.{what}"
        return Part(place, title, axes, _one(tensor), formula, code, rows, columns)

    turned = (position.rotate,) if type(position).rotate is not Position.rotate else ()
    said = {letter: formulas.projected(letter, attention, position) for letter in "QKV"}
    parts = [
        part("q", "Q", "h t c", q, said["Q"], project, *turned),
        part("k", "K", "h s c", k, said["K"], read_by, *turned),
        part("v", "V", "h s c", v, said["V"], read_by),
    ]
    if exact:
        parts += _scores(part, attention, sight, position, (q, k))
        parts.append(part("weights", "Softmax", "h t s", weights, SOFTMAX, dense_weights))
    else:
        formula = f"the weights of core={attention.config.core.kind}: see its code"
        parts.append(part("weights", "Weights", "h t s", weights, formula, core.weights))
    formula = "head_h = α V" if spread is None else "head_h = α V + position on V"
    if spread is not None:
        aside = "Σ_j α_ij a^V_{clip(j−i)}"
        parts.append(part("spread", "Position on V", "h t c", spread, aside, position.value))
    parts.append(part("mix", "Mix", "h t c", mixed, formula, computed))
    formula = f"Concat(head_1, …, head_h) W^O{formulas.plus_bias(attention.output)}"
    output = seen[attention].output
    return [*parts, part("output", "Output", "t d", output, formula, project)]


SOFTMAX = "α_ij = exp(e_ij) / Σ_k exp(e_ik),  e the scores + mask"


def _scores(
    part: Callable[..., Part],
    attention: SelfAttention | CrossAttention,
    sight: AttentionMask,
    position: Position,
    queries_and_keys: tuple[Tensor, Tensor],
) -> list[Part]:
    """score(q, k), what the position adds, and what the mask takes away, as `dense_weights` does.

    A mask is 0 where a query sees a key and −∞ where it does not.
    """
    q, k = queries_and_keys
    scores = attention.score(q, k)
    formula = formulas.score(attention.score, q.shape[-1])
    parts = [part("scores", "Scores", "h t s", scores, formula, attention.score.forward)]
    bias = position.score(q, sight.query_positions, sight.key_positions)
    if bias is not None:
        bias, said = bias.expand_as(scores), formulas.biased(position)
        parts.append(part("bias", "Position bias", "h t s", bias, said, position.score))
        scores = scores + bias
    mask, seen_by = scores.new_zeros(scores.shape[-2:])[None], sight.as_bool()
    formula = "0: every query sees every key"
    if seen_by is not None:
        mask = mask.masked_fill(~seen_by[:1, 0], -torch.inf)
        formula = (
            "0 where query i sees key j (j ≤ i), else −∞" if sight.rule.is_causal else "0 / −∞"
        )
    parts.append(part("mask", "Mask", "t s", mask, formula, sight.as_bool, sight.rule.__call__))
    formula = "e = scores + bias + mask" if bias is not None else "e = scores + mask"
    return [*parts, part("masked", "Scores + mask", "h t s", scores + mask, formula, dense_weights)]


def _feedforward(place: str, part: nn.Module, seen: Calls) -> list[Part]:
    """What is inside a feed-forward layer, and what it gives."""
    name, code = place.partition(".")[0], (part.forward,)
    inside: list[Part] = []
    if isinstance(part, ExpertFeedForward):
        chances = seen[part.router].output[None].softmax(-1)
        formula = "softmax(x W_g): the experts' shares before the choice"
        inside.append(Part(f"{place}.router", "Router", "t e", _one(chances), formula, code, name))
    elif isinstance(part, FeedForward | GatedFeedForward):
        tensor = _one(seen[part.dropout].output)
        formula = formulas.hidden(part)
        inside.append(Part(f"{place}.hidden", "Hidden", "t f", tensor, formula, code, name))
    output, formula = _one(seen[part].output), formulas.feedforward(part)
    return [*inside, Part(f"{place}.output", "Output", "t d", output, formula, code, name)]


def _stacked(layers: list[list[Part]]) -> list[Part]:
    """Parts of the same name as one, with the layer as the first index.

    Layers that compute differently (one attends to fewer keys) have no common shape: such a part
    is left out.
    """
    parts = []
    for one in layers[0]:
        same = [part.tensor for parts in layers for part in parts if part.name == one.name]
        if len(same) == len(layers) and len({tensor.shape for tensor in same}) == 1:
            parts.append(replace(one, tensor=torch.stack(same)))
    return parts
