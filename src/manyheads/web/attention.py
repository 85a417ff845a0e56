"""The Attention page's questions: a text through a model, and the tensors of that pass."""

import hashlib
import json
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor
from torch.nn import functional

from manyheads.models.capture import Kind
from manyheads.web.forward import Pass, Room, continuation, look
from manyheads.web.guard import Limits
from manyheads.web.heads import Place, rollout, statistics
from manyheads.web.library import Library
from manyheads.web.responses import Dtype, Fields, Problem, dtype_of, json_answer, tensor_answer
from manyheads.web.traces import Trace, Traces

MOST_OFF = 4096  # heads of the largest models here
BYTES: dict[Dtype, int] = {"f32": 4, "f16": 2, "u8": 1}
PACKING = Lock()  # one after another: what is made on the way is larger than the answers


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
    return json_answer(kept.manifest)


async def goes_on(request: Request) -> Response:
    """POST {run, text, off?}: what a language model writes after a text."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_goes_on, fields, state.library, state.limits)


def _goes_on(fields: Fields, library: Library, limits: Limits) -> Response:
    off = [Place.parse(one) for one in sorted(set(fields.texts("off", MOST_OFF)))]
    room = Room(limits.tokens, limits.trace_bytes)
    with library.model(fields.text("run")) as opened:
        written = continuation(opened, fields.text("text", ""), off, room)
    return json_answer({"text": written})


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
        maps.append(
            {
                "name": place,
                "layers": layers,
                "heads": heads,
                "rows": _labels(rows, queries),
                "columns": _labels(columns, keys),
                "statistics": statistics(weights, kind),
                "rollout": kind == "self" and queries == keys,
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
    """GET ?layer&head&dtype&side&own: the numbers of a tensor of a trace, or of a layer or head.

    With `side` a map has at most so many rows and columns: see `pooled`. With `own=1` each map is
    divided by its own greatest number: what is small in all of a long text is then seen in bytes.
    """
    fields = Fields.of_query(request)
    kept = request.app.state.traces.get(request.path_params["trace"])
    return await run_in_threadpool(
        _tensor, fields, kept, request.path_params["name"], request.app.state.limits
    )


def _tensor(fields: Fields, kept: Trace, name: str, limits: Limits) -> Response:
    dtype, side = dtype_of(fields.text("dtype", "f32")), fields.number("side", 2**20)
    if side == 0:
        raise Problem(400, "'side' must be at least 1")
    with PACKING:
        return _packed(fields, tensor_of(kept, name), name, dtype, side, limits)


def _packed(
    fields: Fields, found: Tensor, name: str, dtype: Dtype, side: int | None, limits: Limits
) -> Response:
    chosen = found
    for index in ("layer", "head"):
        number = fields.number(index, len(chosen) - 1)
        if number is None:
            break
        chosen = chosen[number]
    if side is not None and chosen.ndim > 2:
        chosen = pooled(chosen, side)
    size = chosen.numel() * BYTES[dtype]
    if size > limits.answer_bytes:
        most = limits.answer_bytes >> 20
        raise Problem(413, f"these are {size >> 20} MiB, at most {most} MiB: ask for a layer")
    if fields.number("own", 1) and chosen.ndim > 1:
        chosen = by_greatest(chosen)
    shares = name.endswith((".weights", ".rollout"))  # what lies between 0 and 1 by its nature
    low, high = (0.0, 1.0) if shares else (None, None)
    return tensor_answer(chosen, dtype, low, high)


def tensor_of(kept: Trace, name: str) -> Tensor:
    """A tensor of a trace by its name; a rollout is computed from its maps when it is asked for."""
    found = kept.tensors.get(name)
    if found is not None:
        return found
    place, _, what = name.rpartition(".")
    rolled = [one["name"] for one in kept.manifest.get("maps", []) if one["rollout"]]
    if what == "rollout" and place in rolled:
        return rollout(kept.tensors[f"{place}.weights"])
    there = ", ".join(sorted([*kept.tensors, *(f"{one}.rollout" for one in rolled)]))
    raise Problem(404, f"the trace has no such tensor: it has {there}")


def pooled(maps: Float[Tensor, "*n t s"], side: int) -> Float[Tensor, "*n i j"]:
    """Large maps for small pictures: a cell is the greatest of those that it stands for."""
    rows, columns = (min(side, size) for size in maps.shape[-2:])
    if (rows, columns) == maps.shape[-2:]:
        return maps
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    smaller = functional.adaptive_max_pool2d(flat, (rows, columns))
    return smaller.reshape(*maps.shape[:-2], rows, columns)


def by_greatest(maps: Float[Tensor, "*n t s"]) -> Float[Tensor, "*n t s"]:
    """Each map as shares of its greatest number; one of zeros stays so."""
    greatest = maps.amax((-2, -1), keepdim=True)
    return maps / greatest.where(greatest > 0, torch.ones_like(greatest))


ROUTES = [
    Route("/api/trace", trace, methods=["POST"]),
    Route("/api/trace/{trace}/tensor/{name}", tensor),
    Route("/api/continue", goes_on, methods=["POST"]),
]
