"""The Positions page's question: what a position scheme adds, turns and weighs, as numbers.

A scheme is built by its own settings and asked by its own hooks, with a vector of zeros (what is
added to it), of ones (where it is turned to) and one query for every position (what is added to its
scores): nothing here is computed a second way.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import UserError
from manyheads.models.vit import VitConfig
from manyheads.nn.block import Block
from manyheads.nn.grid_positions import GridPosition, Sinusoidal2d
from manyheads.nn.positions import (
    Alibi,
    AlibiPosition,
    BucketPosition,
    Buckets,
    Learned,
    LearnedPosition,
    Position,
    PositionConfig,
    PositionSizes,
    Relative,
    RelativePosition,
    Rotary,
    RotaryPosition,
    Shaw,
    ShawPosition,
    Sinusoidal,
    SinusoidalPosition,
    skew,
)
from manyheads.web import formulas
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces

OF_RUN = "run"  # the scheme that a run has, with its weights
MOST = {"length": 512, "trained": 512, "dim": 512, "heads": 16}
DEFAULT = {"length": 64, "trained": 64, "dim": 64, "heads": 4}
MOST_BASE = 1e9
MOST_PATCHES = 1024
SKEWED = 8  # positions whose skew is shown step by step
CURVES = 4  # heads of which a curve is drawn
QUERY_SEED = 1
WITHOUT_HEADS = ("sinusoidal", "learned", "sinusoidal-2d")

Matrix = Float[Tensor, "t s"]
HeadMatrices = Float[Tensor, "h t s"]
Tables = dict[str, Tensor]
Curve = dict[str, Any]

BEYOND = {
    "none": "",
    "sinusoidal": "The waves go on, and their dot product hangs on the distance alone.",
    "learned": "There is no row beyond the last: a longer text is refused.",
    "rotary": "The turns go on; distances beyond those of training are new to the model.",
    "shaw": "Beyond its last distance every one has the vector of the last.",
    "t5": "All far distances share the last bucket.",
    "alibi": "The penalty goes on in a straight line: made to be read beyond training.",
    "relative": "Beyond its last distance every one has the vector of the last.",
    "sinusoidal-2d": "The waves of rows and columns go on.",
}
KINDS: dict[type[Position], str] = {
    Position: "none",
    SinusoidalPosition: "sinusoidal",
    LearnedPosition: "learned",
    RotaryPosition: "rotary",
    ShawPosition: "shaw",
    BucketPosition: "t5",
    AlibiPosition: "alibi",
    RelativePosition: "relative",
    GridPosition: "sinusoidal-2d",
}


@dataclass(frozen=True)
class Placed:
    """A position scheme, and the sizes that it was built for."""

    position: Position
    sizes: PositionSizes
    layers: int = 1
    stacks: tuple[str, ...] = ()
    columns: int | None = None  # of the grid that the positions of an image are
    scores: str | None = None  # the formula of what is added to, where there is a model

    @property
    def kind(self) -> str:
        return KINDS[type(self.position)]


def scheme(kind: str, base: float) -> PositionConfig | Sinusoidal2d:
    """The settings of a scheme by its name."""
    made: dict[str, PositionConfig | Sinusoidal2d] = {
        "sinusoidal": Sinusoidal(base=base),
        "learned": Learned(),
        "rotary": Rotary(base=base, layout="interleaved"),
        "shaw": Shaw(),
        "t5": Buckets(),
        "alibi": Alibi(),
        "relative": Relative(),
        "sinusoidal-2d": Sinusoidal2d(base=base),
    }
    if kind not in made:
        raise Problem(400, f"'{kind[:40]}' is no scheme: choose {', '.join(made)} or {OF_RUN}")
    return made[kind]


def drawn(config: PositionConfig | Sinusoidal2d, sizes: PositionSizes) -> Placed:
    """A scheme as a model begins with it: its tables are drawn, always the same."""
    position = config.build(sizes)
    draw = torch.Generator().manual_seed(QUERY_SEED)
    with torch.no_grad():
        for table in position.parameters():
            table.normal_(std=table.shape[-1] ** -0.5, generator=draw)
    columns = position.columns if isinstance(position, GridPosition) else None
    return Placed(position, sizes, columns=columns)


def of_run(model: Any, stack: str | None, layer: int) -> Placed:
    """The scheme of a trained model, in one of its stacks and layers."""
    found = model.stacks()
    if not found:
        raise UserError("this model has no positions: it reads one token after another")
    name = stack or next(iter(found))
    chosen = found.get(name)
    if chosen is None:
        raise UserError(f"the model has no stack '{name[:40]}': it has {', '.join(found)}")
    position = chosen.positions[min(layer, len(chosen.positions) - 1)]
    block = chosen.blocks[min(layer, len(chosen.blocks) - 1)]
    assert isinstance(position, Position)
    assert isinstance(block, Block)
    heads, config = block.attention.config, model.config
    length = getattr(config, "positions", config.max_length)
    sizes = PositionSizes(
        dim=config.embed.width(config.dim),
        heads=heads.heads,
        head_dim=heads.head_dim,
        max_length=position.max_length or length,
        causal=not getattr(position, "both_ways", name != "decoder"),
    )
    columns = config.side if isinstance(config, VitConfig) else None
    scores = formulas.pair_score(block.attention.score, heads.head_dim)
    return Placed(position, sizes, len(chosen.positions), tuple(found), columns, scores)


def tables(placed: Placed, length: int) -> Tables:
    """What each hook of a scheme gives, so far as the scheme has it.

    added: [n, d]; turned: [n, c], of a vector of ones; scores: [h, n, n], for one query at every
    position; dots: [n, n], of the rows of the first two.
    """
    position, sizes = placed.position, placed.sizes
    own, like = type(position), _like(position)
    places = torch.arange(length)[None]
    found: Tables = {}
    with torch.no_grad():
        if own.embed is not Position.embed:
            found["added"] = position.embed(like.new_zeros(1, length, sizes.dim), places)[0]
        if own.rotate is not Position.rotate:
            ones = like.new_ones(1, 1, length, sizes.head_dim)
            found["turned"] = position.rotate(ones, places)[0, 0]
        if own.score is not Position.score:
            queries = query(sizes).to(like)[:, :, None].expand(-1, -1, length, -1)
            bias = position.score(queries, places, places)
            assert bias is not None
            found["scores"] = bias[0]
    for name in ("added", "turned"):
        if name in found:
            found["dots"] = found[name] @ found[name].T
    return found


def _like(position: Position) -> Tensor:
    """A tensor of the type that the scheme computes in."""
    return next(position.parameters(), torch.empty(0))


def query(sizes: PositionSizes) -> Float[Tensor, "1 h c"]:
    """A query for each head, always the same."""
    draw = torch.Generator().manual_seed(QUERY_SEED + 1)
    return torch.randn(1, sizes.heads, sizes.head_dim, generator=draw)


def skew_steps(placed: Placed) -> Tables:
    """From Q Eᵀ to S_rel, each head: with a column of padding, read in shorter rows, and cut."""
    position, sizes = placed.position, placed.sizes
    assert isinstance(position, RelativePosition)
    length = min(SKEWED, sizes.max_length)
    draw = torch.Generator().manual_seed(QUERY_SEED + 2)
    queries = torch.randn(1, sizes.heads, length, sizes.head_dim, generator=draw)
    queries = queries.to(_like(position))
    far = length - 1
    with torch.no_grad():
        met = position.distances.scores(queries, -far, far * position.both_ways)
        padded = F.pad(met, (1, 0))
        read = padded.flatten(-2)[..., length:].unflatten(-1, met.shape[2:])
        steps = {"1": met, "2": padded, "3": read, "4": skew(met)}
    return {f"skew.{step}": table[0] for step, table in steps.items()}


def curves(placed: Placed, found: Tables) -> list[Curve]:
    """The dot product, or what is added to the scores, against the distance."""
    if "scores" in found:
        bias, causal = found["scores"][:CURVES], placed.sizes.causal
        length = bias.shape[-1]
        back = bias[:, -1].tolist()  # the last query sees all that is before it
        ahead = bias[:, 0, 1:].tolist()
        far = range(1 - length, 1 if causal else length)
        return [
            {
                "name": f"head {head + 1}",
                "points": list(zip(far, back[head] + ahead[head], strict=False)),
            }
            for head in range(len(bias))
        ]
    if "dots" not in found or placed.columns is not None:
        return []
    dots = found["dots"]
    means = [[k, float(dots.diagonal(k).mean())] for k in range(len(dots))]
    return [{"name": "mean over positions", "points": means}]


async def positions(request: Request) -> Response:
    """GET ?scheme&length&trained&dim&heads&base&causal, or ?scheme=run&run&stack&layer&length.

    What there is to see, and the name of the trace that has the tensors.
    """
    fields = Fields.of_query(request)
    state = request.app.state
    return await run_in_threadpool(_positions, fields, state.library, state.traces)


def _positions(fields: Fields, library: Library, traces: Traces) -> Response:
    kind = fields.text("scheme", "sinusoidal")
    length = _size(fields, "length")
    if kind == OF_RUN:
        run = fields.text("run")
        version = library.version(run)
        with library.model(run) as opened:
            layer = fields.number("layer", 10_000) or 0
            stack = fields.optional_text("stack")
            placed = of_run(opened.model, stack, layer)
            return _answer(placed, length, ["run", run, version, stack, layer, length], traces)
    sizes = {name: _size(fields, name) for name in ("trained", "dim", "heads")}
    if kind in WITHOUT_HEADS:
        sizes["heads"] = 1
    if sizes["dim"] % sizes["heads"]:
        raise UserError(f"dim={sizes['dim']} does not divide into {sizes['heads']} heads")
    if kind == "sinusoidal-2d":  # a square grid, whose last row is whole
        length = sizes["trained"] = math.isqrt(length) ** 2
    built = PositionSizes(
        dim=sizes["dim"],
        heads=sizes["heads"],
        head_dim=sizes["dim"] // sizes["heads"],
        max_length=sizes["trained"],
        causal=fields.text("causal", "") == "1",
    )
    base = _base(fields)
    placed = drawn(scheme(kind, base), built)
    return _answer(placed, length, [kind, length, base, asdict(built)], traces)


def _answer(placed: Placed, length: int, asked: list[Any], traces: Traces) -> Response:
    name = "p" + hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:20]
    position, sizes, note = placed.position, placed.sizes, BEYOND[placed.kind]
    grid = None
    if placed.columns is not None:  # an image is shown whole
        length = sizes.max_length
        grid = {"columns": placed.columns, "before": length - placed.columns**2}
        if length > MOST_PATCHES:
            raise Problem(413, f"an image is {length} positions, at most {MOST_PATCHES} are shown")
    elif position.max_length is not None and length > position.max_length:
        length = position.max_length
    found = tables(placed, length)
    if isinstance(position, RelativePosition):
        found |= skew_steps(placed)
    manifest = {
        "trace": name,
        "scheme": placed.kind,
        "formula": formulas.placed(position, placed.scores),
        "note": note,
        "length": length,
        "trained": sizes.max_length,
        "dim": sizes.dim,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "causal": sizes.causal,
        "layers": placed.layers,
        "stacks": list(placed.stacks),
        "grid": grid,
        "tensors": sorted(found),
        "curves": curves(placed, found),
    }
    traces.keep(name, Trace(manifest, found))
    return json_answer(manifest)


def _size(fields: Fields, name: str) -> int:
    given = fields.number(name, MOST[name])
    if given == 0:
        raise Problem(400, f"'{name}' must be at least 1")
    return DEFAULT[name] if given is None else given


def _base(fields: Fields) -> float:
    try:
        base = float(fields.text("base", "10000"))
    except ValueError:
        base = math.nan
    if not 1 < base <= MOST_BASE:
        raise Problem(400, f"'base' must be a number above 1, up to {MOST_BASE:.0f}")
    return base


ROUTES = [Route("/api/positions", positions)]
