"""The command that draws what is inside a run: figure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.commands.shared import PICTURES, Device, RunFolder, Threads, choose, say
from manyheads.errors import UserError, check_above_zero, check_at_least

if TYPE_CHECKING:
    from manyheads.loading import TorchRun
    from manyheads.phrasebook import Pair

KINDS = ("head", "heads", "alignment", "positions", "curves", "landscape")
SENTENCE = "The small dog sees the tree."


def figure(
    run: RunFolder,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=", ".join(KINDS))],
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Of curves: more runs")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The picture: .png, .svg or .pdf")] = None,
    text: Annotated[str, typer.Option(help="What the model reads")] = SENTENCE,
    target: Annotated[
        str | None, typer.Option(help="What it writes; else what it would write itself")
    ] = None,
    which: Annotated[
        str | None, typer.Option("--map", help="encoder.self, decoder.self or decoder.cross")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="From 1; else the last")] = None,
    head: Annotated[int | None, typer.Option(help="From 1; else the mean of the layer")] = None,
    metric: Annotated[str, typer.Option(help="Of curves: loss, bleu, learning_rate, …")] = "loss",
    split: Annotated[str, typer.Option(help="Of curves: valid or train")] = "valid",
    length: Annotated[int, typer.Option(help="Of positions: how many")] = 64,
    size: Annotated[int, typer.Option(help="Of the landscape: points each way")] = 15,
    reach: Annotated[float, typer.Option(help="Of the landscape: how far each way")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the landscape's directions")] = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw what is inside a run, as a file.

    manyheads figure RUN heads --text "The dog sleeps." --out heads.svg

    head: the map of one head. heads: those of all. alignment: which words
    cross-attention looks at, gold framed where the phrasebook knows it.
    positions: every scheme. curves: what was measured in training, of
    several runs if given. landscape: the loss around the weights, with
    residual connections and with them cut.
    """
    from manyheads.config import nearest
    from manyheads.loading import TorchRun, load_run

    if kind not in KINDS:
        raise UserError(f"there is no figure '{kind}': {nearest(kind, KINDS)}")
    path = out or Path(f"{kind}.png")
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"--out {path} must end in one of {', '.join(PICTURES)}")
    if others and kind != "curves":
        raise UserError(f"a figure of {kind} has one run: leave out {others[0]}")
    if kind == "curves":
        _curves([run, *(others or [])], metric, split, path)
    else:
        choose(device, threads)
        opened = load_run(run, device)
        if not isinstance(opened, TorchRun):
            raise UserError(f"{run} was exported, and cannot be looked into: draw the run itself")
        if kind in ("head", "heads"):
            _maps(opened, kind, text, target, which, layer, head, path)
        elif kind == "alignment":
            _alignment(opened, text, target, layer, head, path)
        elif kind == "positions":
            _positions(opened, length, path)
        else:
            _landscape(opened, size, reach, seed, path)
    say(f"picture: {path}")


def _maps(
    opened: "TorchRun",
    kind: str,
    text: str,
    target: str | None,
    which: str | None,
    layer: int | None,
    head: int | None,
    path: Path,
) -> None:
    from manyheads.config import nearest
    from manyheads.view.figures import head_grid, heat_map
    from manyheads.view.maps import attention_maps

    found = attention_maps(opened, text, target)
    name = which or list(found)[-1]
    if name not in found:
        raise UserError(f"--map {name}: {nearest(name, list(found))}")
    chosen = found[name]
    if kind == "heads":
        if layer is not None or head is not None:
            raise UserError("heads draws them all: leave out --layer and --head, or draw head")
        head_grid(chosen.weights, f"{name}: {text}", path)
        return
    at = len(chosen.weights) if layer is None else layer
    heat_map(chosen.head(at, head), chosen.rows, chosen.columns, _title(name, at, head), path)


def _title(name: str, layer: int, head: int | None) -> str:
    return f"{name}, layer {layer}, " + ("mean of its heads" if head is None else f"head {head}")


def _alignment(
    opened: "TorchRun",
    text: str,
    target: str | None,
    layer: int | None,
    head: int | None,
    path: Path,
) -> None:
    """Between words with gold links where the phrasebook has the sentence, else between tokens."""
    import torch

    from manyheads.models.seq2seq import Seq2Seq
    from manyheads.view.figures import heat_map
    from manyheads.view.maps import TextMaps, attention_maps

    if not isinstance(opened.model, Seq2Seq):
        raise opened.unsupported("aligns words", "an encoder–decoder with cross-attention")
    pair = _known_pair(opened, text) if target is None else None
    if pair is None:
        maps = attention_maps(opened, text, target)["decoder.cross"]
        at = len(maps.weights) if layer is None else layer
        title = _title("cross-attention", at, head)
        heat_map(maps.head(at, head), maps.rows, maps.columns, title, path)
        return
    from manyheads.evaluate.alignment import word_maps

    [(_, weights)] = list(word_maps(opened.model, opened.tokenizer, [pair]))
    rows = [pair.target[a:b] for a, b in pair.target_words]
    columns = [pair.source[a:b] for a, b in pair.source_words]
    maps = TextMaps(torch.as_tensor(weights), rows, columns)
    at = len(weights) if layer is None else layer
    title = f"{_title('cross-attention', at, head)} (frames: gold alignment)"
    marks = [(j, i) for i, j in pair.alignment]
    heat_map(maps.head(at, head), rows, columns, title, path, marks=marks)


def _known_pair(opened: "TorchRun", text: str) -> "Pair | None":
    from manyheads.data.translation import PhrasebookData

    if not isinstance(opened.run.data, PhrasebookData):
        return None
    splits = (opened.run.data.read(split).aligned or [] for split in ("test", "valid"))
    return next((pair for pairs in splits for pair in pairs if pair.source == text), None)


def _positions(opened: "TorchRun", length: int, path: Path) -> None:
    from manyheads.nn.block import Architecture
    from manyheads.view.figures import matrices
    from manyheads.view.maps import schemes

    check_at_least("--length", length, 2)
    config = opened.run.model
    if not isinstance(config, Architecture):
        raise opened.unsupported("has positions to draw", "a Transformer of text")
    title = "what a position scheme tells a query at i of a key at j"
    matrices(schemes(opened.model, config, length), title, path)


def _curves(runs: list[Path], metric: str, split: str, path: Path) -> None:
    from manyheads.config import nearest
    from manyheads.view.figures import curves, metric_curves

    lines = {}
    for run in runs:
        found = metric_curves(run, say)
        names = sorted({name for of, name in found if of == split})
        if (split, metric) not in found:
            raise UserError(f"{run} has measured no {metric} of {split}: {nearest(metric, names)}")
        lines[str(run)] = found[split, metric]
    curves(lines, f"{metric} ({split})", metric, path)


def _landscape(opened: "TorchRun", size: int, reach: float, seed: int, path: Path) -> None:
    from manyheads.lab.landscape import landscape
    from manyheads.train.metrics import Bar
    from manyheads.view.figures import surfaces

    check_above_zero("--reach", reach)
    with Bar("landscape", 2 * size * size) as bar:
        found = landscape(
            opened,
            size=size,
            reach=reach,
            seed=seed,
            advance=lambda done: bar.update(done, "points"),
        )
    title = f"loss of {opened.folder} on a held-out batch, two filter-normalised directions"
    surfaces(found, reach, title, path)
