"""The command that draws what is inside a run: figure."""

from pathlib import Path
from typing import Annotated

from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import Compute, check_image, say, write
from manyheads.errors import UserError

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
        str, option("A metric of metrics.jsonl, e.g. bleu", metavar="NAME", panel=_CURVES)
    ] = "loss",
    split: Annotated[str, option("valid or train", metavar="NAME", panel=_CURVES)] = "valid",
    length: Annotated[int, option("Number of positions", panel=_OTHERS)] = 64,
    size: Annotated[int, option("Landscape: points along each axis", panel=_OTHERS)] = 15,
    reach: Annotated[
        float, option("Landscape: distance each way", metavar="X", panel=_OTHERS)
    ] = 1.0,
    seed: Annotated[int, option("Landscape: seed of the directions", panel=_OTHERS)] = 1,
    compute: Compute = Compute(),
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
    from manyheads.lab.figures import runs

    if kind not in KINDS:
        words = [str(run), *([kind] if kind else []), *map(str, others or [])]
        if _of_the_lectures(words, out, compute):
            return
        if kind is None:
            raise UserError(_without_kind(run))
        raise UserError(f"there is no figure '{kind}': {nearest(kind, KINDS)}")
    path = out or Path(f"{kind}.png")
    check_image("--out", path)
    if others and kind != "curves":
        raise UserError(f"a figure of {kind} has one run: leave out {others[0]}")
    if kind == "curves":
        runs.draw_curves([run, *(others or [])], metric, split, path, say)
    else:
        loaded = compute.open(run)
        if kind == "positions":
            runs.draw_positions(loaded, length, path)
        elif kind == "landscape":
            runs.draw_landscape(loaded, size, reach, seed, path)
        else:
            runs.draw_attention(loaded, kind, text, target, which, layer, head, path)
    say(f"plot: {path}")


def _without_kind(name: Path) -> str:
    from manyheads.config import nearest
    from manyheads.lab.figures.table import FIGURES

    if name.is_dir():
        return f"a figure of {name} needs a KIND: {', '.join(KINDS)}"
    return f"there is no figure '{name}': {nearest(str(name), FIGURES)}"


def _of_the_lectures(words: list[str], out: Path | None, compute: Compute) -> bool:
    """Draw a figure of manyheads.lab.figures, if the words name one."""
    from manyheads.lab.figures import table

    name = table.find(words)
    if name is None:
        return False
    check_image("--out", out)
    compute.choose()
    written, lines = table.make(name, words, out)
    write("".join(f"{line}\n" for line in lines))
    say(f"plot: {', '.join(map(str, written))}")
    return True
