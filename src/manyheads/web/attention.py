"""Endpoints of the Attention page: a forward pass, its tensors, and the continuation of a text."""

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
from manyheads.web.forward import ForwardPass, SizeLimit, continuation, forward_text, sweep_heads
from manyheads.web.guard import Limits
from manyheads.web.heads import HeadId, rollout, statistics
from manyheads.web.library import Library
from manyheads.web.responses import Dtype, Fields, Problem, dtype_of, json_answer, tensor_answer
from manyheads.web.traces import Trace, Traces

SWEEP_SECONDS = 20.0  # at most, for one request
MOST_OFF = 4096  # more heads than any supported model has
BYTES: dict[Dtype, int] = {"f32": 4, "f16": 2, "u8": 1}
PACKING = Lock()  # one at a time: the intermediate tensors are larger than the responses


async def trace(request: Request) -> Response:
    """POST {run, text, target?, off?}: the manifest of a forward pass, with its trace name."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_trace, fields, state.library, state.traces, state.limits)


def _trace(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    off = sorted(set(fields.texts("off", MOST_OFF)))
    key = json.dumps([run, library.version(run), text, target, off])
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    trace = traces.find(name)
    if trace is None:
        limit = SizeLimit(limits.tokens, limits.trace_bytes)
        with library.model(run) as opened:
            forward_pass = forward_text(
                opened, text, target, [HeadId.parse(head) for head in off], limit
            )
        trace = trace_of(forward_pass, {"trace": name, "run": run, "text": text, "off": off})
        traces.keep(name, trace)
    return json_answer(trace.manifest)


async def continue_text(request: Request) -> Response:
    """POST {run, text, off?}: the continuation that a language model generates."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_continue_text, fields, state.library, state.limits)


def _continue_text(fields: Fields, library: Library, limits: Limits) -> Response:
    off = [HeadId.parse(head) for head in sorted(set(fields.texts("off", MOST_OFF)))]
    limit = SizeLimit(limits.tokens, limits.trace_bytes)
    with library.model(fields.text("run")) as opened:
        continued = continuation(opened, fields.text("text", ""), off, limit)
    return json_answer({"text": continued})


async def sweep(request: Request) -> Response:
    """POST {run, text, target?}: log P of the same target without each head."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_sweep, fields, state.library, state.limits)


def _sweep(fields: Fields, library: Library, limits: Limits) -> Response:
    limit = SizeLimit(limits.tokens, limits.trace_bytes)
    text, target = fields.text("text", ""), fields.optional_text("target")
    with library.model(fields.text("run")) as opened:
        return json_answer(sweep_heads(opened, text, target, limit, SWEEP_SECONDS))


def trace_of(forward_pass: ForwardPass, about: dict[str, Any]) -> Trace:
    """The trace of a forward pass: its tensors, and the manifest that lists them."""
    tensors = forward_pass.tensors()
    maps = []
    for name, weights in sorted(tensors.items(), key=_in_reading_order):
        prefix, _, suffix = name.rpartition(".")
        if suffix != "weights":
            continue
        stack, _, kind_name = prefix.rpartition(".")
        kind: Kind = "self" if kind_name == "self" else "cross"
        layers, heads, queries, keys = weights.shape
        rows, columns = forward_pass.sides.get((stack, kind), ([], []))
        maps.append(
            {
                "name": prefix,
                "layers": layers,
                "heads": heads,
                "rows": _labels(rows, queries),
                "columns": _labels(columns, keys),
                "statistics": statistics(weights, kind),
                "rollout": kind == "self" and queries == keys,
            }
        )
    if not maps:
        raise Problem(
            400,
            "cannot show attention maps whose shape differs between layers",
        )
    return Trace({**about, "maps": maps, "output": forward_pass.output}, tensors)


def _in_reading_order(item: tuple[str, Any]) -> tuple[bool, bool, str]:
    """Sort key: encoder first, cross-attention last."""
    return not item[0].startswith("encoder"), ".cross." in item[0], item[0]


def _labels(known: list[str], count: int) -> list[str]:
    """Tokens as labels, or numbers if the attention changes the number of keys."""
    return known if len(known) == count else [str(number) for number in range(1, count + 1)]


async def tensor(request: Request) -> Response:
    """GET ?layer&head&dtype&side&normalize: a tensor of a trace, or one layer or head of it.

    `side` limits the rows and columns of a map (see `pooled`). `normalize=1` divides each map by
    its maximum, so that the small weights of a long text stay visible as bytes.
    """
    fields = Fields.of_query(request)
    trace = request.app.state.traces.get(request.path_params["trace"])
    return await run_in_threadpool(
        _tensor, fields, trace, request.path_params["name"], request.app.state.limits
    )


def _tensor(fields: Fields, trace: Trace, name: str, limits: Limits) -> Response:
    dtype, side = dtype_of(fields.text("dtype", "f32")), fields.number("side", 2**20)
    if side == 0:
        raise Problem(400, "'side' must be at least 1")
    with PACKING:
        return _packed(fields, tensor_of(trace, name), name, dtype, side, limits)


def _packed(
    fields: Fields, tensor: Tensor, name: str, dtype: Dtype, side: int | None, limits: Limits
) -> Response:
    chosen = tensor
    for index in ("layer", "head"):
        number = fields.number(index, len(chosen) - 1)
        if number is None:
            break
        chosen = chosen[number]
    if side is not None and chosen.ndim > 2:
        chosen = pooled(chosen, side)
    size = chosen.numel() * BYTES[dtype]
    if size > limits.answer_bytes:
        max_mib = limits.answer_bytes >> 20
        raise Problem(
            413, f"the tensor has {size >> 20} MiB, more than {max_mib} MiB: request one layer"
        )
    if fields.number("normalize", 1) and chosen.ndim > 1:
        chosen = divided_by_maximum(chosen)
    is_weights = name.endswith((".weights", ".rollout"))  # always between 0 and 1
    low, high = (0.0, 1.0) if is_weights else (None, None)
    return tensor_answer(chosen, dtype, low, high)


def tensor_of(trace: Trace, name: str) -> Tensor:
    """A tensor of a trace by name; a rollout is computed from the maps on request."""
    stored = trace.tensors.get(name)
    if stored is not None:
        return stored
    prefix, _, suffix = name.rpartition(".")
    rolled = [item["name"] for item in trace.manifest.get("maps", []) if item["rollout"]]
    if suffix == "rollout" and prefix in rolled:
        return rollout(trace.tensors[f"{prefix}.weights"])
    available = ", ".join(sorted([*trace.tensors, *(f"{item}.rollout" for item in rolled)]))
    raise Problem(404, f"tensor not found in the trace, which has {available}")


def pooled(maps: Float[Tensor, "*n t s"], side: int) -> Float[Tensor, "*n i j"]:
    """Max-pool maps to at most `side` rows and columns."""
    rows, columns = (min(side, size) for size in maps.shape[-2:])
    if (rows, columns) == maps.shape[-2:]:
        return maps
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    smaller = functional.adaptive_max_pool2d(flat, (rows, columns))
    return smaller.reshape(*maps.shape[:-2], rows, columns)


def divided_by_maximum(maps: Float[Tensor, "*n t s"]) -> Float[Tensor, "*n t s"]:
    """Each map divided by its maximum; a map of zeros stays zero."""
    maximum = maps.amax((-2, -1), keepdim=True)
    return maps / maximum.where(maximum > 0, torch.ones_like(maximum))


ROUTES = [
    Route("/api/trace", trace, methods=["POST"]),
    Route("/api/trace/{trace}/tensor/{name}", tensor),
    Route("/api/sweep", sweep, methods=["POST"]),
    Route("/api/continue", continue_text, methods=["POST"]),
]
