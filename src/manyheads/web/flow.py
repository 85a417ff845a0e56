"""The Flow page's question: a text through a model, part by part, with formula and code."""

import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

import manyheads
from manyheads.loading import TorchRun
from manyheads.models.bert import Bert
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import Room, look
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.outcome import crowned
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.trace import Column, Part, calls_of, journey, stacks
from manyheads.web.traces import Trace, Traces

MOST_TOKENS = 256  # more than that are no boxes that a person reads
MAPS = 4  # scores, what is added to them, their sum and the weights are all kept
PACKAGE = Path(manyheads.__file__).parent


async def flow(request: Request) -> Response:
    """POST {run, text, target?}: every part of this pass in order, and the name of its trace."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_flow, fields, state.library, state.traces, state.limits)


def _flow(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    asked = json.dumps(["flow", run, library.version(run), text, target])
    name = hashlib.sha256(asked.encode()).hexdigest()[:20]
    kept = traces.find(name)
    if kept is None:
        room = Room(min(limits.tokens, MOST_TOKENS), limits.trace_bytes // MAPS)
        with library.model(run) as opened:
            kept = follow(opened, text, target, room, {"trace": name, "run": run, "text": text})
        traces.keep(name, kept)
    return json_answer(kept.manifest)


async def boxes(request: Request) -> Response:
    """GET ?layer&head: the numbers of all boxes, as one reads them in that layer and head.

    Little-endian float32, box after box; X-Shape has their shapes in the same order.
    """
    fields = Fields.of_query(request)
    kept = request.app.state.traces.get(request.path_params["trace"])
    if "columns" not in kept.manifest:
        raise Problem(404, "this trace has no boxes: ask for one by POST /api/flow")
    layer, head = (fields.number(name, 2**20) or 0 for name in ("layer", "head"))
    found = await run_in_threadpool(near, kept, layer, head)
    shapes = ";".join(",".join(map(str, one.shape)) for one in found)
    body = b"".join(one.contiguous().numpy().tobytes() for one in found)
    headers = {"X-Shape": shapes, "X-Dtype": "f32"}
    return Response(body, media_type="application/octet-stream", headers=headers)


def near(kept: Trace, layer: int, head: int) -> list[Tensor]:
    """Each box as a matrix; a stack with fewer layers or heads has its last one."""
    found = []
    for box in (box for column in kept.manifest["columns"] for box in column["boxes"]):
        if box["stage"] == "tokens":
            continue
        tensor = kept.tensors[box["name"]]
        if box["stage"] == "layer":
            tensor = tensor[min(layer, len(tensor) - 1)]
        if box["axes"].startswith("h"):
            tensor = tensor[min(head, len(tensor) - 1)]
        found.append(tensor)
    return found


def follow(
    opened: TorchRun, text: str, target: str | None, room: Room, about: dict[str, Any]
) -> Trace:
    """A text through the model of a run; what is kept of it are all its parts."""
    if not stacks(opened.model):
        raise opened.unsupported("is followed here", "a Transformer of text")
    with torch.inference_mode():
        with calls_of(opened.model) as seen:
            found = look(opened, text, target, [], room)
        columns = journey(opened.model, seen, found.record)
        last = columns[-1]
        after = [*last.after, *crowned(opened.model, last, seen, opened.tokenizer)]
    columns[-1] = replace(last, after=after)
    parts = [part for one in columns for part in (*one.before, *one.layers, *one.after)]
    own = Tokenizer.framed if isinstance(opened.model, Bert) else Tokenizer.encode
    told = [own, *(one for part in parts for one in part.code)]
    manifest = {
        **about,
        "output": found.output,
        "columns": [_told(one, opened.tokenizer.subwords(one.ids), own) for one in columns],
        "code": {_named(one): source(one) for one in told if _is_own(one)},
    }
    return Trace(manifest, {part.name: part.tensor for part in parts})


def _told(column: Column, pieces: list[str], split: Callable[..., Any]) -> dict[str, Any]:
    """A column as the page reads it; its first box are the tokens themselves."""
    formula = "text → pieces → ids: the rows of E that are looked up"
    ids = Part(f"{column.name}.tokens", "Tokens", "t", torch.tensor(column.ids), formula, (split,))
    heads = [part.tensor.shape[1] for part in column.layers if part.axes.startswith("h")]
    layers = len(column.layers[0].tensor) if column.layers else 0
    return {
        "name": column.name,
        "ids": column.ids,
        "tokens": pieces,
        "layers": layers,
        "heads": max(heads, default=1),
        "boxes": [
            _box(ids, "tokens"),
            *(_box(part, "before") for part in column.before),
            *(_box(part, "layer") for part in column.layers),
            *(_box(part, "after") for part in column.after),
        ],
    }


def _box(part: Part, stage: str) -> dict[str, Any]:
    shape = list(part.tensor.shape[1:] if stage == "layer" else part.tensor.shape)
    if part.all is not None:
        shape[-1] = part.all
    return {
        "name": part.name,
        "title": part.title,
        "stage": stage,
        "axes": part.axes,
        "shape": shape,
        "rows": part.rows,
        "columns": part.columns,
        "words": part.words,
        "formula": part.formula,
        "code": [_named(one) for one in part.code if _is_own(one)],
    }


def _named(code: Callable[..., Any]) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _is_own(code: Callable[..., Any]) -> bool:
    """Only what is Manyheads' own is shown: a layer of PyTorch has no source here."""
    return code.__module__.partition(".")[0] == PACKAGE.name


def source(code: Callable[..., Any]) -> dict[str, str]:
    """The text of a function, and where it stands in the package."""
    plain = inspect.unwrap(code)
    lines, first = inspect.getsourcelines(plain)
    path = Path(inspect.getfile(plain)).relative_to(PACKAGE.parent)
    return {"at": f"{path.as_posix()}:{first}", "text": textwrap.dedent("".join(lines))}


ROUTES = [
    Route("/api/flow", flow, methods=["POST"]),
    Route("/api/flow/{trace}/boxes", boxes),
]
