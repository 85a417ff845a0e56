"""Figures of a trained run: attention maps, positions, training curves, loss landscape."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.config import nearest
from manyheads.data.translation import PhrasebookData
from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.lab.figures import plots
from manyheads.lab.figures.maps import TextMaps, attention_maps, word_alignment
from manyheads.lab.landscape import landscape
from manyheads.loading import LoadedRun
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.positions import Position, PositionConfig, PositionSizes
from manyheads.phrasebook import Pair
from manyheads.train.metrics import Bar

# ---------------------------------------------------------------------------------------------
# Position schemes as matrices [query i, key j]. Embeddings that are added meet in the dot product,
# PE_i · PE_j / d. Rotary ones rotate equal queries and keys, ⟨R_i 1, R_j 1⟩ / c. Relative ones add
# a bias: that of the first head, for a query of ones. A learned scheme is shown with the run's
# weights if the run has that scheme, else untrained.

Matrix = Float[Tensor, "t s"]
SCHEMES = [scheme() for scheme in get_args(PositionConfig)]


@torch.no_grad()
def schemes(model: nn.Module, config: Architecture, length: int) -> dict[str, Matrix]:
    """A matrix for every scheme in the sizes of this model; its own has its weights."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    head_dim = config.head_dim or config.dim // config.heads
    sizes = PositionSizes(
        dim=config.dim, heads=config.heads, head_dim=head_dim, max_length=length, causal=False
    )
    result = {}
    for scheme in SCHEMES:
        if scheme.kind == "rotary" and head_dim % 2:
            continue  # it rotates pairs of channels
        is_own = scheme.kind == config.position.kind and bool(stacks)
        position = stacks[-1].position if is_own else scheme.build(sizes)
        is_learned = any(True for _ in position.parameters())
        note = " (of the run)" if is_own else " (untrained)" if is_learned else ""
        result[scheme.kind + note] = position_matrix(position, sizes, length).cpu()
    return result


def position_matrix(position: Position, sizes: PositionSizes, length: int) -> Matrix:
    """The effect of whichever hook the scheme overrides: embed, score or rotate."""
    device = next((p.device for p in position.parameters()), torch.device("cpu"))
    if type(position) is Position:
        return torch.zeros(length, length)
    length = length if position.max_length is None else min(length, position.max_length)
    positions = torch.arange(length, device=device)[None]
    embedding = position.embed(torch.zeros(1, length, sizes.dim, device=device), positions)[0]
    if bool(embedding.any()):
        return einsum(embedding, embedding, "t d, s d -> t s") / sizes.dim
    ones = torch.ones(1, sizes.heads, length, sizes.head_dim, device=device)
    bias = position.score(ones, positions, positions)
    if bias is not None:
        return bias[0, 0]
    rotated = position.rotate(ones, positions)[0, 0]
    return einsum(rotated, rotated, "t c, s c -> t s") / sizes.head_dim


def draw_attention(
    loaded: LoadedRun,
    kind: str,
    text: str,
    target: str | None,
    which: str | None,
    layer: int | None,
    head: int | None,
    path: Path,
) -> None:
    """Maps of heads; of an alignment between words, with gold links, if the sentence is known."""
    if kind == "alignment" and not isinstance(loaded.model, Seq2Seq):
        raise loaded.unsupported("aligns words", "an encoder–decoder with cross-attention")
    pair = _known_pair(loaded, text) if kind == "alignment" and target is None else None
    if pair is not None:
        draw_pair(loaded, pair, path, layer, head)
        return
    all_maps = attention_maps(loaded, text, target)
    name = "decoder.cross" if kind == "alignment" else which or list(all_maps)[-1]
    if name not in all_maps:
        raise UserError(f"--map {name}: {nearest(name, list(all_maps))}")
    maps = all_maps[name]
    if kind == "heads":
        if layer is not None or head is not None:
            raise UserError("`heads` plots all heads: leave out --layer and --head, or use `head`")
        plots.head_grid(maps.weights, f"{name}: {text}", path)
        return
    _draw_head(name, maps, path, layer, head)


def draw_pair(
    loaded: LoadedRun, pair: Pair, path: Path, layer: int | None, head: int | None
) -> None:
    """Cross-attention between the words of a sentence with gold links, which are framed."""
    links = [(target, source) for source, target in pair.alignment]
    _draw_head("decoder.cross", word_alignment(loaded, pair), path, layer, head, links)


def _draw_head(
    name: str,
    maps: TextMaps,
    path: Path,
    layer: int | None,
    head: int | None,
    links: Sequence[tuple[int, int]] = (),
) -> None:
    at = len(maps.weights) if layer is None else layer
    title = f"{name}, layer {at}, " + ("mean over its heads" if head is None else f"head {head}")
    title += " (frames: gold alignment)" if links else ""
    plots.heat_map(maps.head(at, head), maps.rows, maps.columns, title, path, marks=links)


def _known_pair(loaded: LoadedRun, text: str) -> Pair | None:
    if not isinstance(loaded.run.data, PhrasebookData):
        return None
    splits = (loaded.run.data.read(split).aligned or [] for split in ("test", "valid"))
    return next((pair for pairs in splits for pair in pairs if pair.source == text), None)


def draw_positions(loaded: LoadedRun, length: int, path: Path) -> None:
    check_at_least("--length", length, 2)
    config = loaded.run.model
    if not isinstance(config, Architecture):
        raise loaded.unsupported("has positions to plot", "a Transformer of text")
    title = "what a position scheme adds for a query at i and a key at j"
    plots.matrices(schemes(loaded.model, config, length), title, path)


def draw_curves(
    runs: list[Path], metric: str, split: str, path: Path, warn: Callable[[str], None]
) -> None:
    lines = {}
    for run in runs:
        metrics = plots.metric_curves(run, warn)
        names = sorted({name for of, name in metrics if of == split})
        if (split, metric) not in metrics:
            raise UserError(f"{run} has no metric {metric} of {split}: {nearest(metric, names)}")
        lines[str(run)] = metrics[split, metric]
    plots.curves(lines, f"{metric} ({split})", metric, path)


def draw_landscape(loaded: LoadedRun, size: int, reach: float, seed: int, path: Path) -> None:
    check_above_zero("--reach", reach)
    with Bar("landscape", 2 * size * size) as bar:
        losses = landscape(
            loaded,
            size=size,
            reach=reach,
            seed=seed,
            advance=lambda done: bar.update(done, "points"),
        )
    title = f"loss of {loaded.folder} on a validation batch, two filter-normalised directions"
    plots.surfaces(losses, reach, title, path)
