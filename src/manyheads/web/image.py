"""The Image page's question: a picture through a Vision Transformer, and where its patches look."""

import base64
import binascii
import hashlib
import json
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
from manyheads.loading import TorchRun
from manyheads.models.vit import Vit
from manyheads.nn.positions import Position
from manyheads.tasks.images import check_size, from_pixels, normalize
from manyheads.web.attention import trace_of
from manyheads.web.forward import Pass, Room
from manyheads.web.guard import Limits
from manyheads.web.heads import recorded
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces

SPLIT = "valid"
FORMATS = ("PNG", "JPEG")
MOST_PIXELS = 2**24  # of an uploaded picture, once it is unpacked
MOST_PICTURES = 2**31

Picture = UInt8[np.ndarray, "channels height width"]


async def image(request: Request) -> Response:
    """POST {run, picture} or {run, upload}: what there is to see of it, and its trace.

    `picture` numbers those of the run's validation split from 0; `upload` is a PNG or JPEG file in
    base64.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_image, fields, state.library, state.traces, state.limits)


def _image(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, upload = fields.text("run"), fields.optional_text("upload")
    number = fields.number("picture", MOST_PICTURES) or 0
    asked = json.dumps([run, library.version(run), number, upload])
    name = "i" + hashlib.sha256(asked.encode()).hexdigest()[:20]
    kept = traces.find(name)
    if kept is None:
        with library.model(run) as opened:
            opened.require("label")
            config = cast(Vit, opened.model).config
            if upload is not None:
                size = config.image_size
                pixels = unpacked(upload, size, config.channels)
                about: dict[str, Any] = {"source": "upload"}
            else:
                pixels, about = of_split(opened, number)
            room = Room(limits.tokens, limits.trace_bytes)
            kept = looked_at(opened, pixels, {**about, "trace": name, "run": run}, room)
        traces.keep(name, kept)
    return json_answer(kept.manifest)


def unpacked(upload: str, size: int, channels: int) -> Picture:
    """An uploaded file, brought to what the model reads as `classify` does it."""
    from PIL import Image

    broken = UserError("the upload is broken, or no PNG or JPEG picture: choose another file")
    try:
        content = base64.b64decode(upload, validate=True)
        with Image.open(BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
    except (binascii.Error, ValueError, OSError, SyntaxError, Image.DecompressionBombError):
        raise broken from None
    if width * height > MOST_PIXELS:
        raise Problem(413, f"the picture has {width}×{height} pixels: make it smaller")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        path.write_bytes(content)
        try:
            return read_image(path, size, channels)
        except UserError:
            raise broken from None


def of_split(opened: TorchRun, number: int) -> tuple[Picture, dict[str, Any]]:
    """A picture of the validation split, and which class it is of."""
    data = opened.run.data
    if not isinstance(data, ImageData):
        raise UserError(f"{opened.folder.name} came without pictures: upload one")
    pictures = _pictures(data)
    check_size(opened.model.config, pictures)  # type: ignore[arg-type]
    count = len(pictures.labels)
    if number >= count:
        raise Problem(400, f"'picture' must be a whole number from 0 to {count - 1}")
    label = pictures.classes[int(pictures.labels[number])]
    return pictures.pixels[number], {"source": SPLIT, "count": count, "label": label}


@lru_cache(maxsize=1)
def _pictures(data: ImageData) -> ImageSet:
    """Of the run that was last looked at: a whole split is long to read."""
    return data.read(SPLIT)


def looked_at(opened: TorchRun, pixels: Picture, about: dict[str, Any], room: Room) -> Trace:
    """A picture through the model, once: its maps, its classes, and what its positions are like."""
    model = opened.model
    assert isinstance(model, Vit)
    config = model.config
    if config.positions > room.tokens:
        raise Problem(413, f"a picture is {config.positions} patches, too many to be shown")
    room.check_maps(model, config.positions)
    like = next(model.parameters())
    pictured = from_pixels(pixels[None], like.device)
    with torch.inference_mode(), recorded(model) as record:
        hidden = model.hidden(normalize(pictured, config).to(like.dtype))
        answer = model.head_output(hidden)
    classes: list[dict[str, Any]] = []
    if config.head is not None:
        chances = answer[0].float().softmax(-1).tolist()
        pairs = zip(config.head.labels, chances, strict=True)
        classes = [{"label": label, "probability": chance} for label, chance in pairs]
    before = ["class token"] if config.first == "token" else []
    side = range(1, config.side + 1)
    patches = [*before, *(f"row {row}, column {column}" for row in side for column in side)]
    found = Pass(record, {"classes": classes}, {("encoder", "self"): (patches, patches)})
    about |= {
        "size": config.image_size,
        "side": config.side,
        "before": len(before),
        "channels": config.channels,
    }
    trace = trace_of(found, about)
    trace.tensors["image.pixels"] = rearrange(pictured[0].cpu(), "c h w -> h w c")
    similar = similarity(model.encoder.position, config.positions, config.dim, like)
    if similar is not None:
        trace.tensors["positions.similarity"] = similar
    trace.manifest["tensors"] = sorted(trace.tensors)
    return trace


def similarity(
    position: Position, length: int, dim: int, like: Tensor
) -> Float[Tensor, "t t"] | None:
    """cos(p_i, p_j) of what is added at two positions; None where nothing is added."""
    if type(position).embed is Position.embed:
        return None
    with torch.no_grad():
        places = torch.arange(length, device=like.device)[None]
        added = position.embed(like.new_zeros(1, length, dim), places)[0].float().cpu()
    unit = F.normalize(added, dim=-1)
    return unit @ unit.T


ROUTES = [Route("/api/image", image, methods=["POST"])]
