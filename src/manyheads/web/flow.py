"""Endpoints of the Flow page: a forward pass, module by module, with formula and code."""

import hashlib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

import manyheads
from manyheads.errors import UserError
from manyheads.fileio import replace_file
from manyheads.loading import LoadedRun
from manyheads.models.bert import Bert
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.forward import ForwardPass, SizeLimit, forward_text
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.outcome import head_parts
from manyheads.web.provenance import KINDS, Cell, provenance
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.trace import Column, Part, calls_of, forward_parts, stacks
from manyheads.web.traces import Trace, Traces

MOST_TOKENS = 256  # larger boxes are not readable
MAPS = 4  # maps stored per head: scores, mask or bias, their sum, weights
PACKAGE = Path(manyheads.__file__).parent


async def flow(request: Request) -> Response:
    """POST {run, text, target?}: all parts of the forward pass, and the name of its trace."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_flow, fields, state.library, state.traces, state.limits)


def _flow(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    key = json.dumps(["flow", run, library.version(run), text, target])
    name = hashlib.sha256(key.encode()).hexdigest()[:20]
    trace = traces.find(name)
    if trace is None:
        limit = SizeLimit(min(limits.tokens, MOST_TOKENS), limits.trace_bytes // MAPS)
        with library.model(run) as opened:
            trace = follow(opened, text, target, limit, {"trace": name, "run": run, "text": text})
        traces.keep(name, trace)
    return json_answer(trace.manifest)


async def boxes(request: Request) -> Response:
    """GET ?layer&head: the matrices of all boxes for that layer and head.

    Little-endian float32, box after box; X-Shape has their shapes in the same order.
    """
    fields = Fields.of_query(request)
    trace = request.app.state.traces.get(request.path_params["trace"])
    if "columns" not in trace.manifest:
        raise Problem(404, "this trace has no boxes: create one with POST /api/flow")
    layer, head = (fields.number(name, 2**20) or 0 for name in ("layer", "head"))
    tensors = await run_in_threadpool(box_tensors, trace, layer, head)
    shapes = ";".join(",".join(map(str, tensor.shape)) for tensor in tensors)
    body = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    headers = {"X-Shape": shapes, "X-Dtype": "f32"}
    return Response(body, media_type="application/octet-stream", headers=headers)


def box_tensors(trace: Trace, layer: int, head: int) -> list[Tensor]:
    """Each box as a matrix; a stack with fewer layers or heads uses its last one."""
    tensors = []
    for box in (box for column in trace.manifest["columns"] for box in column["boxes"]):
        if box["stage"] == "tokens":
            continue
        tensor = trace.tensors[box["name"]]
        if box["stage"] == "layer":
            tensor = tensor[min(layer, len(tensor) - 1)]
        if box["axes"].startswith("h"):
            tensor = tensor[min(head, len(tensor) - 1)]
        tensors.append(tensor)
    return tensors


async def cell(request: Request) -> Response:
    """GET ?box&layer&head&row&column: the terms of the sum that makes a cell of a box."""
    fields, state = Fields.of_query(request), request.app.state
    trace = state.traces.get(request.path_params["trace"])
    return await run_in_threadpool(_cell, fields, trace, state.library)


def _cell(fields: Fields, trace: Trace, library: Library) -> Response:
    box = fields.text("box")
    known = [item for column in trace.manifest.get("columns", []) for item in column["boxes"]]
    about = next((item for item in known if item["name"] == box), None)
    if about is None or about["stage"] == "tokens":
        raise Problem(404, "this trace has no such box: see the boxes of POST /api/flow")
    layer, head = (fields.number(name, 2**20) or 0 for name in ("layer", "head"))
    rows, columns = trace.tensors[box].shape[-2:]
    row = fields.number("row", rows - 1) or 0
    column = fields.number("column", columns - 1) or 0
    with library.model(trace.manifest["run"]) as opened, torch.inference_mode():
        terms = provenance(trace, opened.model, Cell(box, layer, head, row, column))
    return json_answer(_finite(terms))


def _finite(value: Any) -> Any:
    """JSON has no infinity: the mask's −∞ is sent as a string."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "-Infinity" if value == -math.inf else value


def follow(
    opened: LoadedRun, text: str, target: str | None, limit: SizeLimit, about: dict[str, Any]
) -> Trace:
    """Run a text through the model and return the trace of all its parts."""
    if not stacks(opened.model):
        raise opened.unsupported("has a Flow page", "a Transformer for text")
    with torch.inference_mode():
        with calls_of(opened.model) as seen:
            forward_pass = forward_text(opened, text, target, [], limit)
        columns = [
            _with_predicted_rows(item, forward_pass)
            for item in forward_parts(opened.model, seen, forward_pass.record)
        ]
        last = columns[-1]
        after = [*last.after, *head_parts(opened.model, last, seen, opened.tokenizer.target)]
    columns[-1] = replace(last, after=after)
    parts = [part for item in columns for part in (*item.before, *item.layers, *item.after)]
    tokenize = Tokenizer.framed if isinstance(opened.model, Bert) else Tokenizer.encode
    functions = [tokenize, *(item for part in parts if _is_shown(part) for item in part.code)]
    manifest = {
        **about,
        "output": forward_pass.output,
        "columns": [
            _column_json(
                item,
                (opened.tokenizer if item.name == "encoder" else opened.tokenizer.target).subwords(
                    item.ids
                ),
                tokenize,
            )
            for item in columns
        ],
        "code": {_qualified_name(item): source(item) for item in functions if _is_in_package(item)},
    }
    return Trace(manifest, {part.name: part.tensor for part in parts})


def save_activations(
    loaded: LoadedRun,
    texts: Sequence[str],
    target: str | None,
    patterns: Sequence[str],
    out: Path,
    *,
    numbered: bool,
) -> dict[str, Tensor]:
    """Write the tensors whose names match a pattern to a safetensors file, and the tokens."""
    tensors, tokens = {}, {}
    for line, text in enumerate(texts, start=1):
        try:
            trace = follow(loaded, text, target, SizeLimit(2**31, 2**40), {})
        except Problem as error:  # too long for the model
            raise UserError(f"text {line}: {error}") from None
        prefix = f"{line}/" if numbered else ""
        for column in trace.manifest["columns"]:
            tokens[f"{prefix}{column['name']}.tokens"] = json.dumps(column["tokens"])
        for name, tensor in trace.tensors.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                tensors[prefix + name] = tensor.contiguous()
    if not tensors:
        known = ", ".join(trace.tensors) if texts else "the file is empty"
        raise UserError(f"--only {' '.join(patterns)} names no tensor of {known}")
    replace_file(out, lambda partial: save_file(tensors, partial, tokens))
    return tensors


def _with_predicted_rows(column: Column, forward_pass: ForwardPass) -> Column:
    """Label the queries of cross-attention with predicted tokens, as the Attention page does."""
    predicted, _ = forward_pass.sides.get(("decoder", "cross"), ([], []))
    layers = [
        replace(part, rows=tuple(predicted))
        if part.name.startswith("decoder.cross.") and part.axes in ("h t c", "h t s", "t s")
        else part
        for part in column.layers
    ]
    return replace(column, layers=layers)


def _column_json(column: Column, subwords: list[str], split: Callable[..., Any]) -> dict[str, Any]:
    """A column as JSON; its first box holds the tokens."""
    formula = "text → subwords → ids: rows of the embedding table E"
    ids = Part(f"{column.name}.tokens", "Tokens", "t", torch.tensor(column.ids), formula, (split,))
    heads = [part.tensor.shape[1] for part in column.layers if part.axes.startswith("h")]
    layers = len(column.layers[0].tensor) if column.layers else 0
    return {
        "name": column.name,
        "ids": column.ids,
        "tokens": subwords,
        "layers": layers,
        "heads": max(heads, default=1),
        **_stream(column),
        "boxes": [
            _box(ids, "tokens"),
            *(_box(part, "before") for part in column.before),
            *(_box(part, "layer") for part in column.layers if _is_shown(part)),
            *(_box(part, "after") for part in column.after),
        ],
    }


def _is_shown(part: Part) -> bool:
    """False for the input of a layer: it is the output of the layer before."""
    return not part.name.endswith(".layer.input")


def _stream(column: Column) -> dict[str, Any]:
    """The residual stream: mean ‖x‖ after each part, and one colour scale for all of it.

    `norms` has one number for each layer. `scale` is the 99 % quantile of |x| and of |output|.
    """
    parts = {part.name: part.tensor for part in (*column.before, *column.layers)}
    order = list(parts)
    names = [f"{column.name}.input"]
    for kind in KINDS:
        norm, total = f"{column.name}.{kind}.norm", f"{column.name}.{kind}.sum"
        if total in parts:
            names.append(total if order.index(norm) < order.index(total) else norm)
    outputs = [f"{column.name}.{kind}.output" for kind in KINDS]
    sizes = [parts[name].abs().flatten() for name in (*names, *outputs) if name in parts]
    sample = torch.cat([size[:: max(1, len(size) // 2**18)] for size in sizes])
    return {
        "stream": names,
        "norms": {name: parts[name].norm(dim=-1).mean(-1).reshape(-1).tolist() for name in names},
        "scale": float(sample.quantile(0.99)),
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
        "code": [_qualified_name(function) for function in part.code if _is_in_package(function)],
    }


def _qualified_name(code: Callable[..., Any]) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _is_in_package(code: Callable[..., Any]) -> bool:
    """True if the function is defined in this package; other sources are not shown."""
    return code.__module__.partition(".")[0] == PACKAGE.name


def source(code: Callable[..., Any]) -> dict[str, str]:
    """The source of a function, with file and line."""
    plain = inspect.unwrap(code)
    lines, first = inspect.getsourcelines(plain)
    path = Path(inspect.getfile(plain)).relative_to(PACKAGE.parent)
    return {"at": f"{path.as_posix()}:{first}", "text": textwrap.dedent("".join(lines))}


ROUTES = [
    Route("/api/flow", flow, methods=["POST"]),
    Route("/api/flow/{trace}/boxes", boxes),
    Route("/api/flow/{trace}/cell", cell),
]
