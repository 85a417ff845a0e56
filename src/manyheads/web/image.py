"""Endpoint of the Image page: attention maps and classes of a Vision Transformer."""

import base64
import binascii
import hashlib
import json
import zlib
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.images import ImageData, ImageSet, read_image
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.vit import Vit
from manyheads.nn.positions import Position
from manyheads.tasks.images import check_size, from_pixels, normalize
from manyheads.web.attention import trace_of
from manyheads.web.forward import ForwardPass, SizeLimit
from manyheads.web.guard import Limits
from manyheads.web.heads import record_attention
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces
from manyheads.web.watch import probe_examples

SPLIT = "valid"
FORMATS = ("PNG", "JPEG")
MOST_PIXELS = 2**24  # of an uploaded image, after decompression
MOST_PICTURES = 2**31

Picture = UInt8[np.ndarray, "channels height width"]


async def image(request: Request) -> Response:
    """POST {run, picture, hidden?} or {run, upload, hidden?}: the manifest, with its trace.

    `picture` is an index in the run's validation split; `upload` is a PNG or JPEG file in base64.
    `hidden` is a patch that is filled with the mean colour of the picture.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_image, fields, state.library, state.traces, state.limits)


def _image(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, upload = fields.text("run"), fields.optional_text("upload")
    number = fields.number("picture", MOST_PICTURES) or 0
    hidden = fields.number("hidden", limits.tokens)
    key = json.dumps([run, library.version(run), number, upload, hidden])
    name = "i" + hashlib.sha256(key.encode()).hexdigest()[:20]
    trace = traces.find(name)
    if trace is None:
        with library.model(run) as opened:
            opened.require("label")
            config = cast(Vit, opened.model).config
            if upload is not None:
                size = config.image_size
                pixels = decode_upload(upload, size, config.channels)
                about: dict[str, Any] = {"source": "upload"}
            else:
                pixels, about = load_image(opened, number)
            if hidden is not None:
                pixels = without_patch(pixels, hidden, config.side)
            limit = SizeLimit(limits.tokens, limits.trace_bytes)
            trace = trace_image(opened, pixels, {**about, "trace": name, "run": run}, limit)
        traces.keep(name, trace)
    return json_answer(trace.manifest)


def decode_upload(upload: str, size: int, channels: int) -> Picture:
    """The pixels of an uploaded file, preprocessed as in `manyheads classify`."""
    from PIL import Image

    broken = UserError("the upload is not a valid PNG or JPEG image: choose another file")
    try:
        content = base64.b64decode(upload, validate=True)
        with Image.open(BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
    except (binascii.Error, ValueError, OSError, SyntaxError, Image.DecompressionBombError):
        raise broken from None
    if width * height > MOST_PIXELS:
        raise Problem(413, f"the image has {width}×{height} pixels: make it smaller")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        path.write_bytes(content)
        try:
            return read_image(path, size, channels)
        except UserError:
            raise broken from None


def without_patch(pixels: Picture, patch: int, side: int) -> Picture:
    """The picture with one of its side² patches in its mean colour."""
    if patch >= side**2:
        raise Problem(400, f"'hidden' must be an integer from 0 to {side**2 - 1}")
    size = pixels.shape[-1] // side
    rows, columns = (slice(at * size, (at + 1) * size) for at in divmod(patch, side))
    changed = pixels.copy()
    changed[:, rows, columns] = pixels.mean((1, 2), keepdims=True)
    return changed


def load_image(opened: LoadedRun, number: int) -> tuple[Picture, dict[str, Any]]:
    """An image of the validation split, with its class."""
    data = opened.run.data
    if not isinstance(data, ImageData):
        raise UserError(f"{opened.folder.name} has no image data: upload an image")
    try:
        images, source = _read_split(data), SPLIT
    except UserError:
        # The server may run on another computer, or in another folder, than the training.
        recorded = _probe_pictures(opened.folder)
        if recorded is None:
            raise
        images, source = recorded, "probes"
    check_size(opened.model.config, images)  # type: ignore[arg-type]
    count = len(images.labels)
    if number >= count:
        raise Problem(400, f"'picture' must be an integer from 0 to {count - 1}")
    label = images.classes[int(images.labels[number])]
    return images.pixels[number], {"source": source, "count": count, "label": label}


def _probe_pictures(folder: Path) -> ImageSet | None:
    """The pictures that the probes of a run hold; None if there are none."""
    examples = [one for one in probe_examples(folder) if one.get("kind") == "images"]
    if not examples:
        return None
    classes = sorted({one["label"] for one in examples})
    stored = [
        np.frombuffer(zlib.decompress(base64.b64decode(one["pixels"])), np.uint8)
        for one in examples
    ]
    pixels = rearrange(np.stack(stored).reshape(-1, *examples[0]["size"]), "n h w c -> n c h w")
    labels = np.array([classes.index(one["label"]) for one in examples])
    return ImageSet(pixels, labels, classes)


@lru_cache(maxsize=1)
def _read_split(data: ImageData) -> ImageSet:
    """The validation split of the last run, cached because reading it is slow."""
    return data.read(SPLIT)


def trace_image(
    opened: LoadedRun, pixels: Picture, about: dict[str, Any], limit: SizeLimit
) -> Trace:
    """Run an image through the model: attention maps, classes and position similarities."""
    model = opened.model
    assert isinstance(model, Vit)
    config = model.config
    if config.positions > limit.tokens:
        raise Problem(413, f"an image has {config.positions} patches, more than {limit.tokens}")
    limit.check_maps(model, config.positions)
    like = next(model.parameters())
    batch = from_pixels(pixels[None], like.device)
    with torch.inference_mode(), record_attention(model) as record:
        hidden = model.hidden(normalize(batch, config).to(like.dtype))
        answer = model.head_output(hidden)
    classes: list[dict[str, Any]] = []
    if config.head is not None:
        probabilities = answer[0].float().softmax(-1).tolist()
        pairs = zip(config.head.labels, probabilities, strict=True)
        classes = [{"label": label, "probability": probability} for label, probability in pairs]
    before = ["class token"] if config.first == "token" else []
    side = range(1, config.side + 1)
    patches = [*before, *(f"row {row}, column {column}" for row in side for column in side)]
    forward_pass = ForwardPass(
        record, {"classes": classes}, {("encoder", "self"): (patches, patches)}
    )
    about |= {
        "size": config.image_size,
        "side": config.side,
        "before": len(before),
        "channels": config.channels,
    }
    trace = trace_of(forward_pass, about)
    trace.tensors["image.pixels"] = rearrange(batch[0].cpu(), "c h w -> h w c")
    cosines = similarity(model.encoder.position, config.positions, config.dim, like)
    if cosines is not None:
        trace.tensors["positions.similarity"] = cosines
    trace.manifest["tensors"] = sorted(trace.tensors)
    return trace


def similarity(
    position: Position, length: int, dim: int, like: Tensor
) -> Float[Tensor, "t t"] | None:
    """cos(p_i, p_j) of two position embeddings; None if the scheme adds none."""
    if type(position).embed is Position.embed:
        return None
    with torch.no_grad():
        positions = torch.arange(length, device=like.device)[None]
        added = position.embed(like.new_zeros(1, length, dim), positions)[0].float().cpu()
    unit = F.normalize(added, dim=-1)
    return unit @ unit.T


ROUTES = [Route("/api/image", image, methods=["POST"])]
