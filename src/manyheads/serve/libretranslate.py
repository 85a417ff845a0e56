"""LibreTranslate's interface: /translate, /languages, /detect. Errors are {"error": text}."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.serve.requests import key_in, read, several, whole, whole_answer
from manyheads.serve.translating import MOST_ALTERNATIVES, NAMES, Translations, base
from manyheads.web.responses import Fields, Problem

# Nothing is detected where there is one language to read.
UNDETECTED = 0.0


async def translate(request: Request) -> Response:
    """POST {q, source, target, format?, alternatives?, api_key?}; q is a text or a list."""
    fields = await read(request)
    _check_key(request, fields)
    work = _work(request)
    texts, listed = several(fields, "q")
    if "q" not in fields.values:
        raise Problem(400, "there is no 'q': send the text to translate")
    source, target = fields.text("source", "auto"), fields.text("target", "")
    _check_languages(work, source, target)
    if fields.text("format", "text") != "text":
        raise Problem(400, "'format' must be text: markup is not translated here")
    alternatives = whole(fields, "alternatives", 0, 0, MOST_ALTERNATIVES) or 0
    ask = await run_in_threadpool(work.ask, texts, alternatives)
    found = await whole_answer(request, request.app.state.batcher, ask)
    best, others = [ranked[0] for ranked in found], [_others(ranked) for ranked in found]
    answer: dict[str, Any] = {"translatedText": best if listed else best[0]}
    if alternatives:
        answer["alternatives"] = others if listed else others[0]
    if source == "auto":
        one = _detected(work)
        answer["detectedLanguage"] = [one] * len(best) if listed else one
    return JSONResponse(answer)


def _others(ranked: list[str]) -> list[str]:
    """What differs from the best one and from each other."""
    return [text for text in dict.fromkeys(ranked) if text != ranked[0]]


def _detected(work: Translations) -> dict[str, Any]:
    return {"confidence": UNDETECTED, "language": work.languages.source}


def _check_languages(work: Translations, source: str, target: str) -> None:
    known = work.languages
    if source != "auto" and base(source) != known.read:
        raise Problem(400, f"{source[:20]} is not supported: this model reads {known.source}")
    if base(target) != known.written:
        raise Problem(
            400, f"'target' {target[:20]} is not supported: this model writes {known.target}"
        )


def _check_key(request: Request, fields: Fields) -> None:
    door = request.app.state.door
    given = fields.values.get("api_key")
    if not door.lets_in(given if isinstance(given, str) else key_in(request.headers)):
        raise Problem(401, "this needs the token", "token")


async def languages(request: Request) -> Response:
    """GET: the language that is read, and the one that it is translated into."""
    known = _work(request).languages
    about = [
        {"code": code, "name": NAMES.get(base(code), code), "targets": targets}
        for code, targets in ((known.source, [known.target]), (known.target, []))
    ]
    return JSONResponse(about)


async def detect(request: Request) -> Response:
    """POST {q}: the one language that this model reads, with no confidence."""
    fields = await read(request)
    _check_key(request, fields)
    several(fields, "q")
    return JSONResponse([_detected(_work(request))])


def _work(request: Request) -> Translations:
    work = request.app.state.batcher.work
    if not isinstance(work, Translations):
        raise Problem(404, "this model continues texts and translates none: ask /v1/completions")
    return work


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/languages", languages),
    Route("/detect", detect, methods=["POST"]),
]
