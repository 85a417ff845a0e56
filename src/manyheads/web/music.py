"""The Music page's questions: a piece through a model of music, and where its events look."""

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from manyheads.data.events import EVENT, VOICES, ChoraleGrid, Encoding
from manyheads.data.midi import (
    VELOCITIES,
    Performance,
    parse_performance,
    parse_voices,
    write_midi,
)
from manyheads.data.music import MusicData
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.loading import TorchRun
from manyheads.models.capture import Kind
from manyheads.models.gpt import Gpt
from manyheads.web.attention import trace_of
from manyheads.web.forward import Pass, Room
from manyheads.web.guard import Limits
from manyheads.web.heads import recorded
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces

SPLIT = "valid"
EVENTS = 256  # words of a piece that are looked at unless told
MOST_PIECES = 2**31
MOST_MILLISECONDS = 3 * 3_600_000  # of an upload
UPLOAD = "the upload"

LayerMaps = Float[Tensor, "layers h t t"]


@dataclass(frozen=True)
class Event:
    """A word of a piece: when it is, in milliseconds, and its pitch where it has one."""

    word: str
    time: int
    pitch: int | None


def events_in(words: Sequence[str], encoding: Encoding) -> list[Event]:
    """Where each word stands in time and pitch."""
    if isinstance(encoding, ChoraleGrid):
        return [
            Event(word, at // len(VOICES) * encoding.step, _pitch(word))
            for at, word in enumerate(words)
        ]
    events, now = [], 0
    for word in words:
        found = EVENT.fullmatch(word)
        keyed = found is not None and found[1] in ("on", "off")
        pitch = int(found[2]) if found is not None and keyed else None
        events.append(Event(word, now * encoding.step, pitch))
        if found is not None and found[1] == "shift":
            now += int(found[2])
    return events


def _pitch(word: str) -> int | None:
    return int(word[1:]) if word.startswith("p") else None


async def music(request: Request) -> Response:
    """POST {run, piece, begin?, events?} or {run, upload, …}: what there is to see, and its trace.

    `piece` numbers those of the run's validation split from 0; `upload` is a MIDI file in base64.
    `begin` and `events` say which of its words are looked at.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_music, fields, state.library, state.traces, state.limits)


def _music(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, upload = fields.text("run"), fields.optional_text("upload")
    number = fields.number("piece", MOST_PIECES) or 0
    begin, many = fields.number("begin", 2**31) or 0, fields.number("events", limits.tokens)
    asked = json.dumps([run, library.version(run), number, upload, begin, many])
    name = "m" + hashlib.sha256(asked.encode()).hexdigest()[:20]
    kept = traces.find(name)
    if kept is None:
        with library.model(run) as opened:
            data, model = cast(MusicData, opened.run.data), cast(Gpt, opened.model)
            if "music" not in opened.run.spec.pages(opened.run):
                raise opened.unsupported("reads music", "a language model of music")
            words, about = _words(data, number, upload)
            most = min(many or EVENTS, model.config.max_length - 1)
            part, first = stretch(words, begin, most, data.encoding.unit)
            about |= {"trace": name, "run": run, "begin": first, "words": len(words)}
            room = Room(limits.tokens, limits.trace_bytes)
            kept = listened(opened, part, data.encoding, about, room)
        traces.keep(name, kept)
    return json_answer(kept.manifest)


def _words(data: MusicData, number: int, upload: str | None) -> tuple[list[str], dict[str, Any]]:
    """The words of a piece of the validation split, or of an uploaded file."""
    if upload is not None:
        try:
            content = base64.b64decode(upload, validate=True)
        except (binascii.Error, ValueError):
            raise UserError("the upload is no base64: choose a MIDI file") from None
        check_length(content, data.encoding)
        return data.encoding.words(content, UPLOAD), {"source": "upload"}
    pieces = _pieces(data)
    if number >= len(pieces):
        raise Problem(400, f"'piece' must be a whole number from 0 to {len(pieces) - 1}")
    return list(pieces[number]), {"source": SPLIT, "count": len(pieces)}


def check_length(content: bytes, encoding: Encoding) -> None:
    """Refuse a file whose notes last for days: a few bytes can say so, and words are many more."""
    grid = isinstance(encoding, ChoraleGrid)
    parts = parse_voices(content, UPLOAD) if grid else [parse_performance(content, UPLOAD)]
    end = max((note.end for part in parts for note in part), default=0)
    if end * encoding.step > MOST_MILLISECONDS:
        raise Problem(413, "the upload is longer than three hours: choose a shorter piece")


@lru_cache(maxsize=1)
def _pieces(data: MusicData) -> list[list[str]]:
    """Of the run that was last looked at: a whole split is long to read."""
    return data.read(SPLIT).pieces_of_words


def stretch(words: list[str], begin: int, most: int, unit: int) -> tuple[list[str], int]:
    """At most so many words from one on; of a chorale whole sixteenths."""
    first = min(begin, max(0, len(words) - unit)) // unit * unit
    return words[first : first + max(unit, most // unit * unit)], first


def listened(
    opened: TorchRun, words: list[str], encoding: Encoding, about: dict[str, Any], room: Room
) -> Trace:
    """Words after the end of another piece, as in training, through the model once."""
    model, tokenizer = opened.model, opened.tokenizer
    assert isinstance(model, Gpt)
    known = [tokenizer.token_id(word) for word in words]
    strange = next((word for word, one in zip(words, known, strict=True) if one is None), None)
    if strange is not None:
        raise UserError(
            f"'{strange}' is no token of this model: choose a piece of its own encoding"
        )
    end = SpecialTokens(tokenizer, opened.run.decode).end
    ids = [end, *(one for one in known if one is not None)]
    room.check(ids, model, "the piece")
    room.check_maps(model, len(ids))
    with torch.inference_mode(), recorded(model) as record:
        logits = model(torch.tensor([ids], device=opened.device))
    chances = logits[0, :-1].float().log_softmax(-1)
    each = [float(row[token]) for row, token in zip(chances, ids[1:], strict=True)]
    labels = tokenizer.subwords(ids)
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = {
        ("decoder", "self"): (labels, labels)
    }
    trace = trace_of(Pass(record, {"log_probabilities": each}, sides), about)
    weights = trace.tensors["decoder.self.weights"]
    trace.tensors["decoder.self.distance"] = by_distance(weights)
    parts = encoding.parts(words)
    trace.manifest.update(
        encoding=encoding.kind,
        events=[asdict(event) for event in events_in(words, encoding)],
        notes=_notes(parts, encoding.step),
        midi=base64.b64encode(_midi(parts, encoding.step)).decode(),
    )
    return trace


def by_distance(weights: LayerMaps) -> Float[Tensor, "layers h t"]:
    """The mean weight at each distance back, over the queries that have one so far before them."""
    length = weights.shape[-1]
    means = [weights.diagonal(-back, -2, -1).mean(-1) for back in range(length)]
    return torch.stack(means, dim=-1)


def _notes(parts: list[Performance], step: int) -> list[dict[str, Any]]:
    """Notes in milliseconds, each with its part."""
    return [
        {
            "start": note.start * step,
            "end": note.end * step,
            "pitch": note.pitch,
            "loud": note.velocity / VELOCITIES,
            "part": part,
        }
        for part, notes in enumerate(parts)
        for note in notes
    ]


def _midi(parts: list[Performance], step: int) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "music.mid"
        write_midi(parts, path, step)
        return path.read_bytes()


ROUTES = [Route("/api/music", music, methods=["POST"])]
