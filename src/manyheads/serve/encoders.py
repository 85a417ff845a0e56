"""Encoders and classifiers: the API of OpenAI for embeddings (/v1/embeddings), and /classify.

POST /classify takes texts, or an image in base64, and returns labels with the probabilities of all
labels. Errors are {"error": text}, those of /v1/embeddings as OpenAI's.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.loading import LoadedRun
from manyheads.serve.requests import (
    check_model,
    check_size,
    collect,
    read_fields,
    texts_of,
    work_of_kind,
)
from manyheads.serve.scheduler import Bounds, Job, Take, Work, take_none
from manyheads.tasks.encode import Prediction
from manyheads.tasks.images import class_probabilities
from manyheads.web.image import decode_upload
from manyheads.web.responses import Problem


@dataclass(frozen=True)
class EncodeRequest:
    texts: list[str]
    tokens: int
    result: Literal["embedding", "label"]


class Encodings(Work[EncodeRequest]):
    """Vectors and labels of texts."""

    paths = "/v1/embeddings or /classify"

    def __init__(self, loaded: LoadedRun, bounds: Bounds) -> None:
        self.encoder, self.bounds = loaded.encoder(), bounds

    def make_request(
        self, texts: list[str], result: Literal["embedding", "label"]
    ) -> EncodeRequest:
        if result == "label":
            _ = self.encoder.labels  # refuses a model without them
        if not texts or not all(text.strip() for text in texts):
            field = "input" if result == "embedding" else "text"
            raise Problem(400, f"'{field}' must be texts, none of them empty")
        tokens = sum(len(ids) for ids, _ in self.encoder.tokenizer.framed(texts))
        check_size(len(texts), tokens, self.bounds)
        return EncodeRequest(texts, tokens, result)

    def fits(self, requests: Sequence[EncodeRequest]) -> bool:
        return (
            sum(len(request.texts) for request in requests) <= self.bounds.rows
            and sum(request.tokens for request in requests) <= self.bounds.tokens
            and len({request.result for request in requests}) == 1
        )

    def compute(
        self, jobs: Sequence[Job[EncodeRequest]], take: Take[EncodeRequest] = take_none
    ) -> None:
        texts = [text for job in jobs for text in job.request.texts]
        embeds = jobs[0].request.result == "embedding"
        results = iter(self.encoder.embed(texts) if embeds else self.encoder.classify(texts))
        for job in jobs:
            for _ in job.request.texts:
                job.send(next(results))


class ImageLabels(Work[np.ndarray]):
    """The classes of images [channels height width]."""

    paths = "/classify"

    def __init__(self, loaded: LoadedRun, bounds: Bounds) -> None:
        self.model, self.bounds = loaded.labeller(), bounds

    def fits(self, requests: Sequence[np.ndarray]) -> bool:
        return len(requests) <= self.bounds.rows

    def compute(self, jobs: Sequence[Job[np.ndarray]], take: Take[np.ndarray] = take_none) -> None:
        pixels = np.stack([job.request for job in jobs])
        for job, chances in zip(jobs, class_probabilities(self.model, pixels), strict=True):
            job.send(chances)


# --- The routes -----------------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    """POST {input, encoding_format?}; input is a text or a list of texts."""
    fields = await read_fields(request)
    encodings = work_of_kind(request, Encodings)
    name = check_model(request, fields)
    texts, _ = texts_of(fields, "input")
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise Problem(400, f"'encoding_format' must be float or base64: {form[:20]}")
    if fields.values.get("dimensions") is not None:
        raise Problem(400, "'dimensions' is not supported: leave it out")
    parsed = await run_in_threadpool(encodings.make_request, texts, "embedding")
    vectors: list[np.ndarray] = await collect(request, request.app.state.scheduler, parsed)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": parsed.tokens, "total_tokens": parsed.tokens}
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})


def _encoded(vector: np.ndarray, form: str) -> Any:
    vector = vector.astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if form == "base64" else vector.tolist()


async def classify(request: Request) -> Response:
    """POST {text} (a text or a list; a tab separates a pair) or, to an image model, {image}."""
    fields = await read_fields(request)
    served: Any = work_of_kind(request, Encodings, ImageLabels)
    scheduler = request.app.state.scheduler
    if isinstance(served, ImageLabels):
        config = served.model.config
        image = await run_in_threadpool(
            decode_upload, fields.text("image"), config.image_size, config.channels
        )
        [chances] = await collect(request, scheduler, image)
        return JSONResponse({"label": max(chances, key=chances.__getitem__), "scores": chances})
    texts, is_list = texts_of(fields, "text")
    parsed = await run_in_threadpool(served.make_request, texts, "label")
    results = [_labels(answer) for answer in await collect(request, scheduler, parsed)]
    return JSONResponse({"results": results} if is_list else results[0])


def _labels(predictions: list[Prediction]) -> dict[str, Any]:
    """The label of a text; a tagger has one for each token."""
    rows = [{"label": one.label, "scores": one.scores} for one in predictions]
    if len(predictions) == 1 and not predictions[0].piece:
        return rows[0]
    return {"tokens": [{"token": p.piece, **row} for p, row in zip(predictions, rows, strict=True)]}


ROUTES = [
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/classify", classify, methods=["POST"]),
]
