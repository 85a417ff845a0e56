"""Attention maps of a run's model on a text, and what each position scheme tells a query."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.decode.translate import Translator
from manyheads.errors import UserError
from manyheads.loading import TorchRun
from manyheads.models.bert import Bert
from manyheads.models.capture import Maps, attentions, capture
from manyheads.models.decoder_only_seq2seq import Baseline
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Position,
    PositionConfig,
    PositionSizes,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)


@dataclass(frozen=True)
class TextMaps:
    """All heads of one kind of attention; row t is what the token of `rows[t]` looks at."""

    weights: Float[Tensor, "layers heads t s"]
    rows: list[str]
    columns: list[str]

    def head(self, layer: int, head: int | None) -> Float[Tensor, "t s"]:
        layers, heads = self.weights.shape[:2]
        for name, value, most in (("layer", layer, layers), ("head", head, heads)):
            if value is not None and not 1 <= value <= most:
                raise UserError(f"--{name} {value}: choose among 1 to {most}")
        chosen = self.weights[layer - 1]
        return chosen.mean(0) if head is None else chosen[head - 1]


@torch.no_grad()
def maps_of(opened: TorchRun, text: str, target: str | None = None) -> dict[str, TextMaps]:
    """Maps by name: encoder.self, decoder.self, decoder.cross.

    An encoder–decoder writes `target`, or what it would write itself. A row of cross-attention is
    the token that is written there, one of self-attention the token that is read.
    """
    model: Any = opened.model.eval()
    if not any(True for _ in attentions(model)):
        raise opened.unsupported("has maps of a text", "a model with attention")
    if isinstance(model, Seq2Seq | Baseline):
        return _written(opened, text, target)
    if isinstance(model, Gpt):
        tokenizer = opened.tokenizer
        ids = tokenizer.encode(text)
        stack = "decoder"
    elif isinstance(model, Bert):
        encoder = opened.encoder()
        tokenizer = encoder.tokenizer
        [(ids, _)] = tokenizer.framed([text])
        stack = "encoder"
    else:
        raise opened.unsupported("has maps of a text", "a model that reads one")
    if target is not None:
        raise UserError("--target is what an encoder–decoder writes: leave it out")
    _check(ids, model.config.max_length)
    with capture(model) as maps:
        model.hidden(_batch(ids, opened))
    pieces = tokenizer.subwords(ids)
    return {f"{stack}.self": _stacked(maps, stack, "self", pieces, pieces)}


def _written(opened: TorchRun, text: str, target: str | None) -> dict[str, TextMaps]:
    model: Any = opened.model
    tokenizer = opened.tokenizer
    translator = Translator(model, tokenizer, opened.run.decode)
    marks = translator.special_tokens
    source = marks.source(tokenizer.encode(text))
    _check(source, model.config.max_length)
    if target is None:
        found = translator.search([text], n_best=1)[0]
        written = found[0].tokens if found else []
    else:
        written = tokenizer.encode(target)
    given = [marks.start, *written]
    _check(given, model.config.max_length)
    with capture(model) as maps:
        model(_batch(source, opened), _batch(given, opened))
    read, steps = tokenizer.subwords(source), tokenizer.subwords(given)
    sides = {
        ("encoder", "self"): (read, read),
        ("decoder", "self"): (steps, steps),
        ("decoder", "cross"): (tokenizer.subwords([*written, marks.end]), read),
    }
    there = {(stack, kind) for stack, kind, _ in maps.by_layer}
    return {
        f"{stack}.{kind}": _stacked(maps, stack, kind, *labels)
        for (stack, kind), labels in sides.items()
        if (stack, kind) in there
    }


def _check(ids: Sequence[int], most: int) -> None:
    if not ids:
        raise UserError("there is nothing to look at: give a text with --text")
    if len(ids) > most:
        raise UserError(f"the text has {len(ids)} tokens, and the model reads {most}: shorten it")


def _stacked(maps: Maps, stack: str, kind: Any, rows: list[str], columns: list[str]) -> TextMaps:
    layers = [layer[0].float().cpu() for layer in maps.all(kind, stack)]
    if len({layer.shape for layer in layers}) > 1:
        raise UserError(f"the layers of {stack}.{kind} have maps of different sizes: none is drawn")
    return TextMaps(torch.stack(layers), rows, columns)


def _batch(ids: Sequence[int], opened: TorchRun) -> Tensor:
    return torch.tensor([list(ids)], device=opened.device)


# ---------------------------------------------------------------------------------------------
# Position schemes, one matrix each: what a query at i is told of a key at j. Positions that are
# added to embeddings meet in the dot product, PE_i · PE_j / d. Rotary ones turn equal queries and
# keys, ⟨R_i 1, R_j 1⟩ / c. Relative ones add to the score: shown for a query of ones in the first
# head. Learned schemes show the run's weights if it has that scheme, else their initial ones.

Matrix = Float[Tensor, "t s"]
SCHEMES: tuple[PositionConfig, ...] = (
    *(NoPosition(), Sinusoidal(), Learned(), Rotary()),
    *(Shaw(), Buckets(), Alibi(), Relative()),
)


@torch.no_grad()
def schemes(model: nn.Module, config: Architecture, length: int) -> dict[str, Matrix]:
    """A matrix for every scheme in the sizes of this model; its own as it is in the model."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    head_dim = config.head_dim or config.dim // config.heads
    sizes = PositionSizes(
        dim=config.dim, heads=config.heads, head_dim=head_dim, max_length=length, causal=False
    )
    found = {}
    for scheme in SCHEMES:
        name, own = scheme.kind, scheme.kind == config.position.kind and bool(stacks)
        if scheme.kind == "rotary" and head_dim % 2:
            continue  # it turns pairs of channels
        position = stacks[-1].position if own else scheme.build(sizes)
        device = next((p.device for p in position.parameters()), torch.device("cpu"))
        if own:
            name += " (of the run)"
        elif any(True for _ in position.parameters()):
            name += " (untrained)"
        found[name] = matrix_of(position.to(device), sizes, length).cpu()
    return found


def matrix_of(position: Position, sizes: PositionSizes, length: int) -> Matrix:
    """By the hooks alone: whichever of them a scheme overrides is what is seen."""
    device = next((p.device for p in position.parameters()), torch.device("cpu"))
    if type(position) is Position:
        return torch.zeros(length, length)
    reach = length if position.max_length is None else min(length, position.max_length)
    places = torch.arange(reach, device=device)[None]
    added = position.embed(torch.zeros(1, reach, sizes.dim, device=device), places)[0]
    if bool(added.any()):
        return einsum(added, added, "t d, s d -> t s") / sizes.dim
    ones = torch.ones(1, sizes.heads, reach, sizes.head_dim, device=device)
    bias = position.score(ones, places, places)
    if bias is not None:
        return bias[0, 0]
    turned = position.rotate(ones, places)[0, 0]
    return einsum(turned, turned, "t c, s c -> t s") / sizes.head_dim
