"""DeepL's interface: /v2/translate. Errors are {"message": text}."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.serve.requests import read, several, whole_answer
from manyheads.serve.translating import Translations, base
from manyheads.web.responses import Problem

MOST_TEXTS = 50
NOT_DONE = ("glossary_id", "tag_handling")  # what would change a translation, and does not here


async def translate(request: Request) -> Response:
    """POST {text, target_lang, source_lang?}; text is a list, in a form given again and again."""
    fields = await read(request)
    work = request.app.state.batcher.work
    if not isinstance(work, Translations):
        raise Problem(404, "this model continues texts and translates none: ask /v1/completions")
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


ROUTES = [Route("/v2/translate", translate, methods=["POST"])]
