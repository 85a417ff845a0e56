"""Endpoint of the Music page: attention maps of a music model over the events of a piece."""

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

from manyheads.data.events import (
    EVENT,
    VELOCITIES,
    VOICES,
    ChoraleGrid,
    Encoding,
    Performance,
    parse_performance,
    parse_voices,
    write_midi,
)
from manyheads.data.music import MusicData
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.compose import compose
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.capture import Kind
from manyheads.models.gpt import Gpt
from manyheads.web.attention import trace_of
from manyheads.web.forward import ForwardPass, SizeLimit
from manyheads.web.guard import Limits
from manyheads.web.heads import record_attention
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.traces import Trace, Traces

SPLIT = "valid"
EVENTS = 256  # default length of the window
MOST_PIECES = 2**31
COMPOSED, COMPOSED_EVENTS = 8, 128  # pieces that replace those of the split; their length
MOST_MILLISECONDS = 3 * 3_600_000  # longest upload
UPLOAD = "the upload"

LayerMaps = Float[Tensor, "layers h t t"]


@dataclass(frozen=True)
class Event:
    """A token of a piece: its time in milliseconds and its pitch, if any."""

    word: str
    time: int
    pitch: int | None


def events_in(words: Sequence[str], encoding: Encoding) -> list[Event]:
    """The time and pitch of each token."""
    if isinstance(encoding, ChoraleGrid):
        return [
            Event(word, at // len(VOICES) * encoding.step, _pitch(word))
            for at, word in enumerate(words)
        ]
    events, now = [], 0
    for word in words:
        match = EVENT.fullmatch(word)
        keyed = match is not None and match[1] in ("on", "off")
        pitch = int(match[2]) if match is not None and keyed else None
        events.append(Event(word, now * encoding.step, pitch))
        if match is not None and match[1] == "shift":
            now += int(match[2])
    return events


def _pitch(word: str) -> int | None:
    return int(word[1:]) if word.startswith("p") else None


async def music(request: Request) -> Response:
    """POST {run, piece, begin?, events?} or {run, upload, …}: the manifest, with its trace.

    `piece` is an index in the run's validation split; `upload` is a MIDI file in base64.
    `begin` and `events` are the start and length of the window.
    """
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_music, fields, state.library, state.traces, state.limits)


def _music(fields: Fields, library: Library, traces: Traces, limits: Limits) -> Response:
    run, upload = fields.text("run"), fields.optional_text("upload")
    number = fields.number("piece", MOST_PIECES) or 0
    begin, count = fields.number("begin", 2**31) or 0, fields.number("events", limits.tokens)
    key = json.dumps([run, library.version(run), number, upload, begin, count])
    name = "m" + hashlib.sha256(key.encode()).hexdigest()[:20]
    trace = traces.find(name)
    if trace is None:
        with library.model(run) as opened:
            data, model = cast(MusicData, opened.run.data), cast(Gpt, opened.model)
            if "music" not in opened.run.spec.pages(opened.run):
                raise opened.unsupported("has a Music page", "a music model")
            words, about = _words(opened, number, upload)
            max_events = min(count or EVENTS, model.config.max_length - 1)
            part, first = window(words, begin, max_events, data.encoding.unit)
            about |= {"trace": name, "run": run, "begin": first, "words": len(words)}
            limit = SizeLimit(limits.tokens, limits.trace_bytes)
            trace = trace_piece(opened, part, data.encoding, about, limit)
        traces.keep(name, trace)
    return json_answer(trace.manifest)


def _words(opened: LoadedRun, number: int, upload: str | None) -> tuple[list[str], dict[str, Any]]:
    """The tokens of a piece of the validation split, or of an uploaded file.

    If the data cannot be read (the server may run in another folder than the training), the model
    composes the piece: the examples of its probes are too short.
    """
    data = cast(MusicData, opened.run.data)
    if upload is not None:
        try:
            content = base64.b64decode(upload, validate=True)
        except (binascii.Error, ValueError):
            raise UserError("the upload is not valid base64: choose a MIDI file") from None
        check_length(content, data.encoding)
        return data.encoding.words(content, UPLOAD), {"source": "upload"}
    try:
        pieces = _pieces(data)
    except UserError:
        return _composed(opened, number % COMPOSED), {"source": "model", "count": COMPOSED}
    if number >= len(pieces):
        raise Problem(400, f"'piece' must be an integer from 0 to {len(pieces) - 1}")
    return list(pieces[number]), {"source": SPLIT, "count": len(pieces)}


def _composed(opened: LoadedRun, number: int) -> list[str]:
    """A piece sampled from the model; each number is a seed."""
    encoding, model = cast(MusicData, opened.run.data).encoding, cast(Gpt, opened.model)
    most = min(COMPOSED_EVENTS, model.config.max_length - 1)
    decode = opened.decode(min_length=most, at_limit="truncate")
    generator = Generator(model, opened.tokenizer, decode)
    with torch.inference_mode():
        words = compose(generator, encoding, [], limit=most, sample=Sample(seed=number + 1))
    return words[: len(words) // encoding.unit * encoding.unit]


def check_length(content: bytes, encoding: Encoding) -> None:
    """Refuse a file with very long notes: a few bytes of MIDI can expand to many tokens."""
    grid = isinstance(encoding, ChoraleGrid)
    parts = parse_voices(content, UPLOAD) if grid else [parse_performance(content, UPLOAD)]
    end = max((note.end for part in parts for note in part), default=0)
    if end * encoding.step > MOST_MILLISECONDS:
        raise Problem(413, "the upload is longer than three hours: choose a shorter piece")


@lru_cache(maxsize=1)
def _pieces(data: MusicData) -> list[list[str]]:
    """The validation split of the last run, cached because reading it is slow."""
    return data.read(SPLIT).pieces_of_words


def window(words: list[str], begin: int, most: int, unit: int) -> tuple[list[str], int]:
    """At most `most` words from `begin`, rounded to whole time steps of `unit` words."""
    first = min(begin, max(0, len(words) - unit)) // unit * unit
    return words[first : first + max(unit, most // unit * unit)], first


def trace_piece(
    opened: LoadedRun, words: list[str], encoding: Encoding, about: dict[str, Any], limit: SizeLimit
) -> Trace:
    """Run words through the model, after an end token as in training."""
    model, tokenizer = opened.model, opened.tokenizer
    assert isinstance(model, Gpt)
    known = [tokenizer.token_id(word) for word in words]
    unknown = next((word for word, token in zip(words, known, strict=True) if token is None), None)
    if unknown is not None:
        raise UserError(
            f"'{unknown}' is not a token of this model: choose a piece with the same encoding"
        )
    end = SpecialTokens(tokenizer, opened.run.decode).end
    ids = [end, *(token for token in known if token is not None)]
    limit.check(ids, model, "the piece")
    limit.check_maps(model, len(ids))
    with torch.inference_mode(), record_attention(model) as record:
        logits = model(torch.tensor([ids], device=opened.device))
    log_probs = logits[0, :-1].float().log_softmax(-1)
    event_log_probs = [float(row[token]) for row, token in zip(log_probs, ids[1:], strict=True)]
    labels = tokenizer.subwords(ids)
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = {
        ("decoder", "self"): (labels, labels)
    }
    trace = trace_of(ForwardPass(record, {"log_probabilities": event_log_probs}, sides), about)
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
    """The mean weight at each distance back, over the queries with enough earlier keys."""
    length = weights.shape[-1]
    means = [weights.diagonal(-back, -2, -1).mean(-1) for back in range(length)]
    return torch.stack(means, dim=-1)


def _notes(parts: list[Performance], step: int) -> list[dict[str, Any]]:
    """Notes with times in milliseconds and the number of their part."""
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
