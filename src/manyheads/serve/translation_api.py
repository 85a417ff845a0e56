"""The APIs of LibreTranslate (/translate, /languages, /detect) and DeepL (/v2/translate).

Errors of the first are {"error": text}, of the second {"message": text}.
"""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.serve.requests import collect, integer, key_in, read_fields, texts_of
from manyheads.serve.translating import MAX_ALTERNATIVES, NAMES, Translations, base
from manyheads.web.responses import Fields, Problem

MAX_TEXTS = 50  # DeepL's limit
UNSUPPORTED = ("glossary_id", "tag_handling")  # DeepL's options that change a translation


async def translate(request: Request) -> Response:
    """POST {q, source, target, format?, alternatives?, api_key?}; q is a text or a list."""
    fields = await read_fields(request)
    _check_key(request, fields)
    work = _work(request)
    texts, is_list = _required_texts(fields, "translate")
    source, target = fields.text("source", "auto"), fields.text("target", "")
    known = work.languages
    if source != "auto" and base(source) != base(known.source):
        raise Problem(400, f"{source[:20]} is not supported: this model reads {known.source}")
    if base(target) != base(known.target):
        raise Problem(
            400, f"'target' {target[:20]} is not supported: this model writes {known.target}"
        )
    if fields.text("format", "text") != "text":
        raise Problem(400, "'format' must be text: markup is not supported")
    alternatives = integer(fields, "alternatives", 0, 0, MAX_ALTERNATIVES) or 0
    parsed = await run_in_threadpool(work.make_request, texts, alternatives)
    translations = await collect(request, request.app.state.batcher, parsed)
    columns: dict[str, list[Any]] = {"translatedText": [ranked[0] for ranked in translations]}
    if alternatives:
        columns["alternatives"] = [
            [text for text in dict.fromkeys(ranked) if text != ranked[0]] for ranked in translations
        ]
    if source == "auto":
        columns["detectedLanguage"] = [_detected(work)] * len(translations)
    return JSONResponse({key: list_ if is_list else list_[0] for key, list_ in columns.items()})


def _required_texts(fields: Fields, purpose: str) -> tuple[list[str], bool]:
    if "q" not in fields.values:
        raise Problem(400, f"'q' is missing: send the text to {purpose}")
    return texts_of(fields, "q")


def _detected(work: Translations) -> dict[str, Any]:
    """The model has one source language, so nothing is detected."""
    return {"confidence": 0.0, "language": work.languages.source}


def _check_key(request: Request, fields: Fields) -> None:
    key = fields.values.get("api_key")
    if not request.app.state.door.lets_in(key if isinstance(key, str) else key_in(request.headers)):
        raise Problem(401, "the token is missing", "token")


async def languages(request: Request) -> Response:
    """GET: source and target language."""
    known = _work(request).languages
    rows = [
        {"code": code, "name": NAMES.get(base(code), code), "targets": targets}
        for code, targets in ((known.source, [known.target]), (known.target, []))
    ]
    return JSONResponse(rows)


async def detect(request: Request) -> Response:
    """POST {q}: the model's source language, with no confidence."""
    fields = await read_fields(request)
    _check_key(request, fields)
    _required_texts(fields, "detect")
    return JSONResponse([_detected(_work(request))])


def _work(request: Request) -> Translations:
    work = request.app.state.batcher.work
    if not isinstance(work, Translations):
        raise Problem(404, "this model continues texts: use /v1/completions")
    return work


async def deepl(request: Request) -> Response:
    """POST {text, target_lang, source_lang?}; text is a list, repeated in a form."""
    fields = await read_fields(request)
    work = _work(request)
    if "text" not in fields.values:
        raise Problem(400, "Parameter 'text' not specified.")
    texts, _ = texts_of(fields, "text")
    if len(texts) > MAX_TEXTS:
        raise Problem(413, f"'text' has {len(texts)} texts, more than the limit of {MAX_TEXTS}")
    known = work.languages
    if base(fields.text("target_lang", "")) != base(known.target):
        raise Problem(
            400, f"Value for 'target_lang' not supported: this model writes {known.target.upper()}"
        )
    source = fields.optional_text("source_lang")
    if source is not None and base(source) != base(known.source):
        raise Problem(
            400, f"Value for 'source_lang' not supported: this model reads {known.source.upper()}"
        )
    for name in UNSUPPORTED:
        if fields.values.get(name):
            raise Problem(400, f"'{name}' is not supported: leave it out")
    parsed = await run_in_threadpool(work.make_request, texts)
    translations = await collect(request, request.app.state.batcher, parsed)
    is_billed = fields.values.get("show_billed_characters") in (True, "true", "1")
    rows = [
        {
            "detected_source_language": base(known.source).upper(),
            "text": ranked[0],
            # DeepL's client expects a number.
            **({"billed_characters": len(text)} if is_billed else {}),
        }
        for text, ranked in zip(texts, translations, strict=True)
    ]
    return JSONResponse({"translations": rows})


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/languages", languages),
    Route("/detect", detect, methods=["POST"]),
    Route("/v2/translate", deepl, methods=["POST"]),
]
