"""The Attention page's questions: a text through a model, and the tensors of that pass."""

import hashlib
import json
from typing import Any

from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor
from torch.nn import functional

from manyheads.view.capture import Kind
from manyheads.web.answers import Fields, Problem, dtype_of, tensor_answer
from manyheads.web.guard import Limits
from manyheads.web.heads import Place, rollout, statistics
from manyheads.web.library import Library
from manyheads.web.passes import Pass, Room, look
from manyheads.web.traces import Trace, Traces

MOST_OFF = 4096  # heads of the largest models here


async def trace(request: Request) -> Response:
    """POST {run, text, target?, off?}: what there is to see of this pass, and its name."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_trace, fields, state.library, state.traces, state.limits)


def _trace(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    off = sorted(set(fields.texts("off", MOST_OFF)))
    asked = json.dumps([run, library.version(run), text, target, off])
    name = hashlib.sha256(asked.encode()).hexdigest()[:20]
    kept = traces.find(name)
    if kept is None:
        room = Room(limits.tokens, limits.trace_bytes)
        with library.model(run) as opened:
            found = look(opened, text, target, [Place.parse(one) for one in off], room)
        kept = trace_of(found, {"trace": name, "run": run, "text": text, "off": off})
        traces.keep(name, kept)
    return JSONResponse(kept.manifest)


def trace_of(found: Pass, about: dict[str, Any]) -> Trace:
    """A pass as what is kept of it: its tensors, and the manifest that names them."""
    tensors = found.tensors()
    maps = []
    for name, weights in sorted(tensors.items(), key=_in_reading_order):
        place, _, what = name.rpartition(".")
        if what != "weights":
            continue
        stack, _, word = place.rpartition(".")
        kind: Kind = "self" if word == "self" else "cross"
        layers, heads, queries, keys = weights.shape
        rows, columns = found.sides.get((stack, kind), ([], []))
        if kind == "self" and queries == keys:
            tensors[f"{place}.rollout"] = rollout(weights)
        maps.append(
            {
                "name": place,
                "layers": layers,
                "heads": heads,
                "rows": _labels(rows, queries),
                "columns": _labels(columns, keys),
                "statistics": statistics(weights, kind),
                "rollout": f"{place}.rollout" in tensors,
            }
        )
    if not maps:
        raise Problem(400, "the layers of this model have maps of different shapes: none is shown")
    return Trace({**about, "maps": maps, "output": found.output}, tensors)


def _in_reading_order(item: tuple[str, Any]) -> tuple[bool, bool, str]:
    """The encoder first, and what a decoder looks at elsewhere last."""
    return not item[0].startswith("encoder"), ".cross." in item[0], item[0]


def _labels(known: list[str], count: int) -> list[str]:
    """Tokens as labels; a core that makes something else of the keys has numbers."""
    return known if len(known) == count else [str(number) for number in range(1, count + 1)]


async def tensor(request: Request) -> Response:
    """GET ?layer&head&dtype&side: the numbers of a tensor of a trace, or of a layer or head of it.

    With `side` a map has at most so many rows and columns: see `pooled`.
    """
    fields = Fields.of_query(request)
    kept = request.app.state.traces.get(request.path_params["trace"])
    found = kept.tensors.get(request.path_params["name"])
    if found is None:
        there = ", ".join(sorted(kept.tensors))
        raise Problem(404, f"the trace has no such tensor: it has {there}")
    name, dtype = request.path_params["name"], dtype_of(fields.text("dtype", "f32"))
    chosen = found
    for index in ("layer", "head"):
        number = fields.number(index, len(chosen) - 1)
        if number is None:
            break
        chosen = chosen[number]
    shares = name.endswith((".weights", ".rollout"))  # what lies between 0 and 1 by its nature
    low, high = (0.0, 1.0) if shares else (None, None)
    side = fields.number("side", 2**20)
    if side == 0:
        raise Problem(400, "'side' must be at least 1")
    if side is not None and chosen.ndim > 2:
        chosen = await run_in_threadpool(pooled, chosen, side)
    return await run_in_threadpool(tensor_answer, chosen, dtype, low, high)


def pooled(maps: Float[Tensor, "*n t s"], side: int) -> Float[Tensor, "*n i j"]:
    """Large maps for small pictures: a cell is the greatest of those that it stands for."""
    rows, columns = (min(side, size) for size in maps.shape[-2:])
    if (rows, columns) == maps.shape[-2:]:
        return maps
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    smaller = functional.adaptive_max_pool2d(flat, (rows, columns))
    return smaller.reshape(*maps.shape[:-2], rows, columns)


ROUTES = [
    Route("/api/trace", trace, methods=["POST"]),
    Route("/api/trace/{trace}/tensor/{name}", tensor),
]
