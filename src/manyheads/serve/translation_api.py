"""LibreTranslate's interface (/translate, /languages, /detect) and DeepL's (/v2/translate).

Errors of the first are {"error": text}, of the second {"message": text}.
"""

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
MOST_TEXTS = 50  # of DeepL
NOT_DONE = ("glossary_id", "tag_handling")  # options of DeepL that would change a translation


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


async def deepl(request: Request) -> Response:
    """POST {text, target_lang, source_lang?}; text is a list, in a form given again and again."""
    fields = await read(request)
    work = _work(request)
    if "text" not in fields.values:
        raise Problem(400, "Parameter 'text' not specified.")
    texts, _ = several(fields, "text")
    if len(texts) > MOST_TEXTS:
        raise Problem(413, f"'text' has {len(texts)} texts, at most {MOST_TEXTS} are taken")
    known = work.languages
    if base(fields.text("target_lang", "")) != known.written:
        raise Problem(
            400, f"Value for 'target_lang' not supported: this model writes {known.target.upper()}"
        )
    source = fields.optional_text("source_lang")
    if source is not None and base(source) != known.read:
        raise Problem(
            400, f"Value for 'source_lang' not supported: this model reads {known.source.upper()}"
        )
    for name in NOT_DONE:
        if fields.values.get(name):
            raise Problem(400, f"'{name}' is not done here: leave it out")
    ask = await run_in_threadpool(work.ask, texts)
    found = await whole_answer(request, request.app.state.batcher, ask)
    counted = fields.values.get("show_billed_characters") in (True, "true", "1")
    translations = [
        {
            "detected_source_language": known.read.upper(),
            "text": ranked[0],
            # Their own client wants it and reads a number. It counts what was sent.
            **({"billed_characters": len(text)} if counted else {}),
        }
        for text, ranked in zip(texts, found, strict=True)
    ]
    return JSONResponse({"translations": translations})


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/languages", languages),
    Route("/detect", detect, methods=["POST"]),
    Route("/v2/translate", deepl, methods=["POST"]),
]
