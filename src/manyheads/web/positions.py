"""Endpoint of the Positions page: the numbers that a position scheme adds, rotates or biases.

The scheme is built from its settings and evaluated through its own methods: `embed` on a vector of
zeros, `rotate` on a vector of ones, `score` with the same query at every position. No formula is
implemented twice.
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
from manyheads.nn.positions import (
    Alibi,
    AlibiPosition,
    BucketPosition,
    Buckets,
    GridPosition,
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
    Sinusoidal2d,
    SinusoidalPosition,
    skew,
)
from manyheads.web import formulas
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces

OF_RUN = "run"  # the trained scheme of a run
MOST = {"length": 512, "trained": 512, "dim": 512, "heads": 16}
DEFAULT = {"length": 64, "trained": 64, "dim": 64, "heads": 4}
MOST_BASE = 1e9
MOST_PATCHES = 1024
SKEWED = 8  # positions in the step-by-step view of the skew
CURVES = 4  # heads with a curve
QUERY_SEED = 1
WITHOUT_HEADS = ("sinusoidal", "learned", "sinusoidal-2d")

Matrix = Float[Tensor, "t s"]
Tables = dict[str, Tensor]
Curve = dict[str, Any]

BEYOND = {
    "none": "",
    "sinusoidal": "Defined for any length; the cosine depends only on the distance.",
    "learned": "No row after the last position: longer texts are refused.",
    "rotary": "Defined for any length; longer distances than in training are new to the model.",
    "shaw": "Distances are clipped to the largest one.",
    "t5": "All far distances share the last bucket.",
    "alibi": "The penalty stays linear: designed to extrapolate beyond the training length.",
    "relative": "Distances are clipped to the largest one.",
    "sinusoidal-2d": "Defined for any grid size.",
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
class BuiltScheme:
    """A position scheme with the sizes it was built for."""

    position: Position
    sizes: PositionSizes
    layers: int = 1
    stacks: tuple[str, ...] = ()
    columns: int | None = None  # grid columns, for image positions
    scores: str | None = None  # formula of the model's scores, if the scheme is from a run

    @property
    def kind(self) -> str:
        """Its name; a scheme of a plug-in has no row in the table."""
        return KINDS.get(type(self.position), type(self.position).__name__)


def scheme(kind: str, base: float) -> PositionConfig | Sinusoidal2d:
    """The configuration of a scheme by name."""
    schemes: dict[str, PositionConfig | Sinusoidal2d] = {
        "sinusoidal": Sinusoidal(base=base),
        "learned": Learned(),
        "rotary": Rotary(base=base, layout="interleaved"),
        "shaw": Shaw(),
        "t5": Buckets(),
        "alibi": Alibi(),
        "relative": Relative(),
        "sinusoidal-2d": Sinusoidal2d(base=base),
    }
    if kind not in schemes:
        raise Problem(
            400, f"'{kind[:40]}' is not a scheme: choose {', '.join(schemes)} or {OF_RUN}"
        )
    return schemes[kind]


def random_scheme(config: PositionConfig | Sinusoidal2d, sizes: PositionSizes) -> BuiltScheme:
    """A scheme at initialisation, its tables sampled with a fixed seed."""
    position = config.build(sizes)
    generator = torch.Generator().manual_seed(QUERY_SEED)
    with torch.no_grad():
        for table in position.parameters():
            table.normal_(std=table.shape[-1] ** -0.5, generator=generator)
    columns = position.columns if isinstance(position, GridPosition) else None
    return BuiltScheme(position, sizes, columns=columns)


def of_run(model: Any, stack: str | None, layer: int) -> BuiltScheme:
    """The scheme of a trained model in one stack and layer."""
    stacks = model.stacks()
    if not stacks:
        raise UserError("this model has no position encoding: it is recurrent or convolutional")
    name = stack or next(iter(stacks))
    chosen = stacks.get(name)
    if chosen is None:
        raise UserError(f"the model has no stack '{name[:40]}': it has {', '.join(stacks)}")
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
    return BuiltScheme(position, sizes, len(chosen.positions), tuple(stacks), columns, scores)


def tables(built: BuiltScheme, length: int) -> Tables:
    """The output of each method that the scheme implements.

    added [n, d]: `embed` of zeros; turned [n, c]: `rotate` of ones; scores [h, n, n]: `score` with
    the same query at every position, −∞ where a causal mask hides the key; cosines [n, n]
    of the rows of added or turned.
    """
    position, sizes = built.position, built.sizes
    kind, like = type(position), _like(position)
    positions = torch.arange(length)[None]
    result: Tables = {}
    with torch.no_grad():
        if kind.embed is not Position.embed:
            result["added"] = position.embed(like.new_zeros(1, length, sizes.dim), positions)[0]
        if kind.rotate is not Position.rotate:
            vectors = like.new_ones(1, 1, length, sizes.head_dim)
            result["turned"] = position.rotate(vectors, positions)[0, 0]
        if kind.score is not Position.score:
            queries = query(sizes).to(like)[:, :, None].expand(-1, -1, length, -1)
            bias = position.score(queries, positions, positions)
            assert bias is not None
            future = torch.ones(length, length, dtype=torch.bool).triu(1) & sizes.causal
            result["scores"] = bias[0].masked_fill(future.to(bias.device), -math.inf)
    for name in ("added", "turned"):
        if name in result:
            unit = F.normalize(result[name], dim=-1)
            result["cosines"] = unit @ unit.T
    return result


def _like(position: Position) -> Tensor:
    """A tensor with the dtype and device of the scheme."""
    return next(position.parameters(), torch.empty(0))


def query(sizes: PositionSizes) -> Float[Tensor, "1 h c"]:
    """A query for each head, sampled with a fixed seed."""
    generator = torch.Generator().manual_seed(QUERY_SEED + 1)
    return torch.randn(1, sizes.heads, sizes.head_dim, generator=generator)


def skew_steps(built: BuiltScheme) -> Tables:
    """The skew from Q Eᵀ to S_rel for each head: pad a column, reshape, slice."""
    position, sizes = built.position, built.sizes
    assert isinstance(position, RelativePosition)
    length = min(SKEWED, sizes.max_length)
    generator = torch.Generator().manual_seed(QUERY_SEED + 2)
    queries = torch.randn(1, sizes.heads, length, sizes.head_dim, generator=generator)
    queries = queries.to(_like(position))
    farthest = length - 1
    with torch.no_grad():
        products = position.distances.scores(queries, -farthest, farthest * position.both_ways)
        padded = F.pad(products, (1, 0))
        reshaped = padded.flatten(-2)[..., length:].unflatten(-1, products.shape[2:])
        steps = {"1": products, "2": padded, "3": reshaped, "4": skew(products)}
    return {f"skew.{step}": table[0] for step, table in steps.items()}


def curves(built: BuiltScheme, computed: Tables) -> list[Curve]:
    """The cosine, or the bias added to the scores, over the distance."""
    if "scores" in computed:
        bias, causal = computed["scores"][:CURVES], built.sizes.causal
        length = bias.shape[-1]
        back = bias[:, -1].tolist()  # the last query sees all earlier keys
        ahead = bias[:, 0, 1:].tolist()
        far = range(1 - length, 1 if causal else length)
        return [
            {
                "name": f"head {head + 1}",
                "points": list(zip(far, back[head] + ahead[head], strict=False)),
            }
            for head in range(len(bias))
        ]
    if "cosines" not in computed or built.columns is not None:
        return []
    cosines = computed["cosines"]
    means = [[k, float(cosines.diagonal(k).mean())] for k in range(len(cosines))]
    return [{"name": "mean over positions", "points": means}]


async def positions(request: Request) -> Response:
    """GET ?scheme&length&trained&dim&heads&base&causal, or ?scheme=run&run&stack&layer&length.

    Returns the manifest with the name of the trace that holds the tensors.
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
            built = of_run(opened.model, stack, layer)
            return _answer(built, length, ["run", run, version, stack, layer, length], traces)
    sizes = {name: _size(fields, name) for name in ("trained", "dim", "heads")}
    if kind in WITHOUT_HEADS:
        sizes["heads"] = 1
    if sizes["dim"] % sizes["heads"]:
        raise UserError(f"dim={sizes['dim']} does not divide into {sizes['heads']} heads")
    if kind == "sinusoidal-2d":  # a square grid with a complete last row
        length = sizes["trained"] = math.isqrt(length) ** 2
    built_sizes = PositionSizes(
        dim=sizes["dim"],
        heads=sizes["heads"],
        head_dim=sizes["dim"] // sizes["heads"],
        max_length=sizes["trained"],
        causal=fields.text("causal", "") == "1",
    )
    base = _base(fields)
    built = random_scheme(scheme(kind, base), built_sizes)
    return _answer(built, length, [kind, length, base, asdict(built_sizes)], traces)


def _answer(built: BuiltScheme, length: int, key: list[Any], traces: Traces) -> Response:
    name = "p" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]
    position, sizes, note = built.position, built.sizes, BEYOND.get(built.kind, "")
    grid = None
    if built.columns is not None:  # show all patches of an image
        length = sizes.max_length
        grid = {"columns": built.columns, "before": length - built.columns**2}
        if length > MOST_PATCHES:
            raise Problem(
                413, f"an image has {length} positions; at most {MOST_PATCHES} can be shown"
            )
    elif position.max_length is not None and length > position.max_length:
        length = position.max_length
    computed = tables(built, length)
    if isinstance(position, RelativePosition):
        computed |= skew_steps(built)
    manifest = {
        "trace": name,
        "scheme": built.kind,
        "formula": formulas.position(position, built.scores),
        "note": note,
        "base": getattr(position, "base", None),
        "layout": getattr(position, "layout", None),
        "length": length,
        "trained": sizes.max_length,
        "dim": sizes.dim,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "causal": sizes.causal,
        "layers": built.layers,
        "stacks": list(built.stacks),
        "grid": grid,
        "tensors": sorted(computed),
        "curves": curves(built, computed),
    }
    traces.keep(name, Trace(manifest, computed))
    return json_answer(manifest)


def _size(fields: Fields, name: str) -> int:
    value = fields.number(name, MOST[name])
    if value == 0:
        raise Problem(400, f"'{name}' must be at least 1")
    return DEFAULT[name] if value is None else value


def _base(fields: Fields) -> float:
    try:
        base = float(fields.text("base", "10000"))
    except ValueError:
        base = math.nan
    if not 1 < base <= MOST_BASE:
        raise Problem(400, f"'base' must be a number above 1, up to {MOST_BASE:.0f}")
    return base


ROUTES = [Route("/api/positions", positions)]
