"""Endpoints of the Watch page: the probes of a training, and heads removed at a step of it."""

import json
from pathlib import Path
from typing import Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.decode.generate import Generator
from manyheads.decode.translate import Translator
from manyheads.loading import LoadedRun
from manyheads.models.gpt import Gpt
from manyheads.tasks.probes import (
    FOLDER,
    PROBES,
    SENTENCES,
    continue_prompts,
    score,
    score_texts,
)
from manyheads.web.heads import HeadId, knocked_out
from manyheads.web.library import Library
from manyheads.web.responses import Fields, Problem, json_answer
from manyheads.web.runs import kept_steps, read_records

MOST_OFF = 64  # heads to remove in one request


async def probes(request: Request) -> Response:
    """GET ?run&since&version: the examples, and the probes after byte `since` of their file.

    With `last=1` only the last probe, for a small picture.
    """
    fields = Fields.of_query(request)
    library: Library = request.app.state.library
    return await run_in_threadpool(_probes, fields, library)


def _probes(fields: Fields, library: Library) -> Response:
    folder = library.find(fields.text("run")) / FOLDER
    since = fields.number("since", 2**53) or 0
    answer = read_records(folder / PROBES, since, fields.text("version", ""), _parse)
    answer["sentences"] = probe_examples(folder.parent)
    if fields.number("last", 1):
        answer["records"] = answer["records"][-1:]
    answer["weights"] = kept_steps(folder.parent)
    return JSONResponse(answer)


def probe_examples(folder: Path) -> list[dict[str, Any]]:
    """The examples of a run's probes; none if they cannot be read."""
    try:
        examples = json.loads((folder / FOLDER / SENTENCES).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return examples if isinstance(examples, list) else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        is_probe = isinstance(record["step"], int) and isinstance(record["sentences"], list)
        return record if is_probe else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


async def removed(request: Request) -> Response:
    """POST {run, step, sentence, off}: output and log P without heads, at a step."""
    fields = await Fields.of_body(request)
    library: Library = request.app.state.library
    return await run_in_threadpool(_removed, fields, library)


def _removed(fields: Fields, library: Library) -> Response:
    run, step = fields.text("run"), fields.number("step", 2**53) or 0
    number = fields.number("sentence", 2**10) or 0
    names = fields.values.get("off")
    if not isinstance(names, list) or len(names) > MOST_OFF:
        raise Problem(400, f"'off' must be a list of at most {MOST_OFF} heads")
    heads_off = [HeadId.parse(str(name)) for name in names]
    sentences = probe_examples(library.find(run))
    if number >= len(sentences):
        raise Problem(400, f"'sentence' must be an integer from 0 to {len(sentences) - 1}")
    if "source" not in sentences[number]:
        raise Problem(400, f"{run} has pictures as examples: choose a run that reads text")
    with library.model(f"{run}@{step}") as opened, torch.inference_mode():
        return json_answer(_without(opened, opened.model, heads_off, sentences[number]))


def _without(
    opened: LoadedRun, model: Any, heads_off: list[HeadId], sentence: dict[str, Any]
) -> dict[str, Any]:
    if isinstance(model, Gpt):
        return _continuation_without(opened, model, heads_off, sentence)
    decode = opened.decode(beam=1, max_length_ratio=1.0, max_length_extra=6)
    translator = Translator(model, opened.tokenizer, decode)
    special, tokenizer = translator.special_tokens, translator.tokenizer
    source = special.source(tokenizer.encode(sentence["source"]))
    with knocked_out(model, heads_off):
        hypotheses = translator.search([sentence["source"]], n_best=1)[0]
        _, log_probs = score(
            model, special, [source], [tokenizer.target.encode(sentence["target"])]
        )
    text = tokenizer.decode(hypotheses[0].tokens) if hypotheses else ""
    return {"text": text, "reference_log_probs": log_probs[0]}


def _continuation_without(
    opened: LoadedRun, model: Gpt, heads_off: list[HeadId], sentence: dict[str, Any]
) -> dict[str, Any]:
    ids, prompt = sentence["ids"], sentence["ids"][: len(sentence["source_tokens"])]
    generator = Generator(model, opened.tokenizer, opened.decode(beam=1))
    with knocked_out(model, heads_off):
        [output] = continue_prompts(generator, [prompt], len(ids))
        _, log_probs = score_texts(model, [ids])
    return {"text": opened.tokenizer.decode(output), "reference_log_probs": log_probs[0]}


ROUTES = [
    Route("/api/probes", probes),
    Route("/api/probes/removed", removed, methods=["POST"]),
]
