"""The command that draws what is inside a run: figure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyheads.commands import options
from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import check_image, choose, say, write
from manyheads.errors import UserError, check_above_zero, check_at_least

if TYPE_CHECKING:
    from manyheads.loading import TorchRun
    from manyheads.phrasebook import Pair

KINDS = ("head", "heads", "alignment", "positions", "curves", "landscape")
SENTENCE = "The small dog sees the tree."
MAPS = "encoder.self, decoder.self or decoder.cross"

_MAPS, _CURVES, _OTHERS = "Attention maps", "Curves", "Positions and landscape"


def figure(
    run: Annotated[Path, argument("RUN", "A run, or a figure that needs none")],
    kind: Annotated[str | None, argument("KIND", ", ".join(KINDS))] = None,
    others: Annotated[
        list[Path] | None, argument("RUN", "Curves: more runs; lectures: KEY=VALUE")
    ] = None,
    out: Annotated[Path | None, out_option("Image: .png, .svg, .pdf [default: KIND.png]")] = None,
    text: Annotated[
        str, option("Text to encode", metavar="TEXT", panel=_MAPS, show_default=False)
    ] = SENTENCE,
    target: Annotated[
        str | None,
        option("Target text [default: the model's translation]", metavar="TEXT", panel=_MAPS),
    ] = None,
    which: Annotated[str | None, option(MAPS, "--map", metavar="NAME", panel=_MAPS)] = None,
    layer: Annotated[int | None, option("Layer, from 1 [default: last]", panel=_MAPS)] = None,
    head: Annotated[int | None, option("Head, from 1 [default: mean]", panel=_MAPS)] = None,
    metric: Annotated[
        str, option("loss, bleu, learning_rate, ...", metavar="NAME", panel=_CURVES)
    ] = "loss",
    split: Annotated[str, option("valid or train", metavar="NAME", panel=_CURVES)] = "valid",
    length: Annotated[int, option("Number of positions", panel=_OTHERS)] = 64,
    size: Annotated[int, option("Landscape: points along each axis", panel=_OTHERS)] = 15,
    reach: Annotated[
        float, option("Landscape: distance each way", metavar="X", panel=_OTHERS)
    ] = 1.0,
    seed: Annotated[int, option("Landscape: seed of the directions", panel=_OTHERS)] = 1,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Plot attention maps, positions, training curves, loss landscape.

    Examples
      $ manyheads figure runs/demo heads --text "The dog sleeps." -o heads.svg
      $ manyheads figure runs/demo head --map encoder.self --layer 2 --head 1
      $ manyheads figure runs/a curves runs/b --metric bleu

    Kinds
      head        attention map of one head
      heads       attention maps of all heads
      alignment   cross-attention between words; gold links framed if known
      positions   position encodings, one matrix a scheme
      curves      metrics during training, of several runs if named
      landscape   loss around the weights, with and without residual connections

    Figures of the lectures (SVG, PNG, CSV; settings as KEY=VALUE)
      schedule, vanishing-gradients, depth, two-landscapes, flash-tiles,
      memory-hierarchy, attention-time, complexity;
      for a run: head-roles; for a sweep: kaplan
      $ manyheads figure schedule dims=256,512 warmups=4000
      $ manyheads figure runs/demo head-roles
    """
    from manyheads.config import nearest
    from manyheads.loading import TorchRun, load_run

    if kind not in KINDS:
        words = [str(run), *([kind] if kind else []), *map(str, others or [])]
        if _of_the_lectures(words, out, device, threads):
            return
        if kind is None:
            raise UserError(_without_kind(run))
        raise UserError(f"there is no figure '{kind}': {nearest(kind, KINDS)}")
    path = out or Path(f"{kind}.png")
    check_image("--out", path)
    if others and kind != "curves":
        raise UserError(f"a figure of {kind} has one run: leave out {others[0]}")
    if kind == "curves":
        _curves([run, *(others or [])], metric, split, path)
    else:
        choose(device, threads)
        loaded = load_run(run, device)
        if not isinstance(loaded, TorchRun):
            raise UserError(f"{run} was exported: plot the run that it came from")
        if kind == "positions":
            _positions(loaded, length, path)
        elif kind == "landscape":
            _landscape(loaded, size, reach, seed, path)
        else:
            _attention(loaded, kind, text, target, which, layer, head, path)
    say(f"plot: {path}")


def _without_kind(name: Path) -> str:
    from manyheads.config import nearest
    from manyheads.lab.figures.table import FIGURES

    if name.is_dir():
        return f"a figure of {name} needs a KIND: {', '.join(KINDS)}"
    return f"there is no figure '{name}': {nearest(str(name), FIGURES)}"


def _of_the_lectures(words: list[str], out: Path | None, device: str, threads: int | None) -> bool:
    """Draw a figure of manyheads.lab.figures, if the words name one."""
    from manyheads.lab.figures import table

    name = table.find(words)
    if name is None:
        return False
    check_image("--out", out)
    choose(device, threads)
    written, lines = table.make(name, words, out)
    write("".join(f"{line}\n" for line in lines))
    say(f"plot: {', '.join(map(str, written))}")
    return True


def _attention(
    loaded: "TorchRun",
    kind: str,
    text: str,
    target: str | None,
    which: str | None,
    layer: int | None,
    head: int | None,
    path: Path,
) -> None:
    """Maps of heads; of an alignment between words, with gold links, if the sentence is known."""
    from manyheads.config import nearest
    from manyheads.models.seq2seq import Seq2Seq
    from manyheads.view.figures import head_grid, heat_map
    from manyheads.view.maps import attention_maps, word_alignment

    if kind == "alignment" and not isinstance(loaded.model, Seq2Seq):
        raise loaded.unsupported("aligns words", "an encoder–decoder with cross-attention")
    pair = _known_pair(loaded, text) if kind == "alignment" and target is None else None
    all_maps = (
        attention_maps(loaded, text, target) if pair is None else word_alignment(loaded, pair)
    )
    name = "decoder.cross" if kind == "alignment" else which or list(all_maps)[-1]
    if name not in all_maps:
        raise UserError(f"--map {name}: {nearest(name, list(all_maps))}")
    maps = all_maps[name]
    if kind == "heads":
        if layer is not None or head is not None:
            raise UserError("`heads` plots all heads: leave out --layer and --head, or use `head`")
        head_grid(maps.weights, f"{name}: {text}", path)
        return
    at = len(maps.weights) if layer is None else layer
    title = f"{name}, layer {at}, " + ("mean over its heads" if head is None else f"head {head}")
    title += "" if pair is None else " (frames: gold alignment)"
    marks = [] if pair is None else [(j, i) for i, j in pair.alignment]
    heat_map(maps.head(at, head), maps.rows, maps.columns, title, path, marks=marks)


def _known_pair(loaded: "TorchRun", text: str) -> "Pair | None":
    from manyheads.data.translation import PhrasebookData

    if not isinstance(loaded.run.data, PhrasebookData):
        return None
    splits = (loaded.run.data.read(split).aligned or [] for split in ("test", "valid"))
    return next((pair for pairs in splits for pair in pairs if pair.source == text), None)


def _positions(loaded: "TorchRun", length: int, path: Path) -> None:
    from manyheads.nn.block import Architecture
    from manyheads.view.figures import matrices
    from manyheads.view.maps import schemes

    check_at_least("--length", length, 2)
    config = loaded.run.model
    if not isinstance(config, Architecture):
        raise loaded.unsupported("has positions to plot", "a Transformer of text")
    title = "what a position scheme adds for a query at i and a key at j"
    matrices(schemes(loaded.model, config, length), title, path)


def _curves(runs: list[Path], metric: str, split: str, path: Path) -> None:
    from manyheads.config import nearest
    from manyheads.view.figures import curves, metric_curves

    lines = {}
    for run in runs:
        metrics = metric_curves(run, say)
        names = sorted({name for of, name in metrics if of == split})
        if (split, metric) not in metrics:
            raise UserError(f"{run} has no metric {metric} of {split}: {nearest(metric, names)}")
        lines[str(run)] = metrics[split, metric]
    curves(lines, f"{metric} ({split})", metric, path)


def _landscape(loaded: "TorchRun", size: int, reach: float, seed: int, path: Path) -> None:
    from manyheads.lab.landscape import landscape
    from manyheads.train.metrics import Bar
    from manyheads.view.figures import surfaces

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
    surfaces(losses, reach, title, path)
