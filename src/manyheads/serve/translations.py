"""Translations: the APIs of LibreTranslate (/translate, /languages, /detect) and DeepL (/v2).

Errors of the first are {"error": text}, of the second {"message": text}. Texts of several requests
are translated in one batch.
"""

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.decode.beam import Hypothesis
from manyheads.decode.decoder import supports_cuda_graph
from manyheads.decode.translate import BREAKS, Annotation, Translator
from manyheads.errors import UserError
from manyheads.evaluate.alignment import annotate
from manyheads.exchange.ctranslate2 import Ctranslate2Translator
from manyheads.loading import LoadedRun
from manyheads.models.capture import has_cross_attention
from manyheads.run import Run
from manyheads.serve.requests import (
    collect,
    flag,
    key_in,
    number,
    read_fields,
    texts_of,
    work_of_kind,
)
from manyheads.serve.scheduler import Bounds, Job, Take, Work, run_batch, take_none
from manyheads.serve.search import SearchBatch, SentenceRow
from manyheads.tasks.translation import LANGUAGE, language_pair
from manyheads.web.responses import Fields, Problem

LISTED = """
    ar Arabic, cs Czech, da Danish, de German, el Greek, en English, es Spanish, et Estonian,
    fi Finnish, fr French, hi Hindi, hu Hungarian, it Italian, ja Japanese, ko Korean,
    lt Lithuanian, lv Latvian, nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian,
    ru Russian, sv Swedish, tr Turkish, uk Ukrainian, vi Vietnamese, zh Chinese
"""
NAMES = dict(pair.split() for pair in LISTED.split(","))
MAX_ALTERNATIVES = 10
MAX_TEXTS = 50  # DeepL's limit
UNSUPPORTED = ("glossary_id", "tag_handling")  # DeepL's options that change a translation


class Languages(NamedTuple):
    source: str
    target: str


def languages_of(run: Run, source: str | None, target: str | None) -> Languages:
    """Those of the options, or those that the run's data names."""
    of_data = language_pair(run.data)
    languages = Languages((source or of_data[0]).lower(), (target or of_data[1]).lower())
    for name, code in languages._asdict().items():
        if not code:
            raise UserError(
                "the run does not name its languages: add --source and --target, e.g. --source en "
                "--target de"
            )
        if not LANGUAGE.fullmatch(code):
            raise UserError(f"--{name} {code} is not a language code: use e.g. en or de")
    return languages


def base(code: str) -> str:
    """`en` for en-US, EN_gb and en."""
    return re.split("[-_]", code.lower())[0]


# --- The work of the model ------------------------------------------------------------------------


@dataclass(frozen=True)
class TranslationRequest:
    """Texts, each a list of lines, each a list of parts that fit the model.

    `tokens` is their size in a batch; `ranks` is how many translations of each. `alignment` and
    `confidence` request links and probabilities of words.
    """

    texts: list[list[list[str]]]
    tokens: int
    ranks: int = 1
    alignment: bool = False
    confidence: bool = False

    @property
    def parts(self) -> list[str]:
        return [part for text in self.texts for line in text for part in line]


@dataclass(frozen=True)
class Translation:
    """Translations of a text, best first; for the best, links (source word, target word) and P of
    each target word. Words are those between spaces, counted from 0 through all lines."""

    texts: list[str]
    links: list[tuple[int, int]]
    probabilities: list[float]


class Translations(Work[TranslationRequest]):
    """Translates; in PyTorch, requests that arrive while a batch runs join it.

    CTranslate2 searches batches of its own. Its workers have one thread each, which for small
    batches is faster than one worker with all threads.
    """

    paths = "/translate or /v2/translate"

    def __init__(self, loaded: LoadedRun, languages: Languages, bounds: Bounds, beam: int | None):
        self.languages, self.bounds = languages, bounds
        engine = replace(loaded.engine, workers=torch.get_num_threads())
        loaded = loaded.with_engine(engine)
        self.translator = loaded.translator(**({} if beam is None else {"beam": beam}))
        if isinstance(self.translator, Ctranslate2Translator):
            self.workers = self.translator.model.workers
        self._scoring = Lock()
        self._scorer, self._is_copy = self.translator.in_torch(), False

    def make_request(
        self,
        texts: Sequence[str],
        alternatives: int = 0,
        *,
        alignment: bool = False,
        confidence: bool = False,
    ) -> TranslationRequest:
        """Refuse a request that cannot be computed: in a batch, others would fail with it."""
        if (alignment or confidence) and self._scorer is None:
            raise Problem(
                400, "'alignment' and 'confidence' need the weights in float32: leave them out"
            )
        if alignment and self._scorer and not has_cross_attention(self._scorer.model):
            raise Problem(400, "'alignment' needs a model with cross-attention: leave it out")
        tokens = sum(len(ids) for ids in self.translator.tokenizer.encode_batch(texts))
        if tokens > self.bounds.tokens:
            raise Problem(
                413,
                f"the text has {tokens} tokens, more than the limit of {self.bounds.tokens}: "
                "send it in parts",
            )
        split = [
            [self.translator.split(line) if line.strip() else [] for line in text.split("\n")]
            for text in texts
        ]
        return TranslationRequest(split, tokens, 1 + alternatives, alignment, confidence)

    def fits(
        self, requests: Sequence[TranslationRequest], running: Sequence[SentenceRow] = ()
    ) -> bool:
        jobs = dict.fromkeys(row.job for row in running)
        requests = [*requests, *(job.request for job in jobs)]
        return (
            sum(len(request.parts) for request in requests) <= self.bounds.rows
            and sum(request.tokens for request in requests) <= self.bounds.tokens
            and len({request.ranks for request in requests}) == 1
        )

    def compute(
        self, jobs: Sequence[Job[TranslationRequest]], take: Take[TranslationRequest] = take_none
    ) -> None:
        ranks, decode = jobs[0].request.ranks, self.translator.decode
        decode = replace(decode, beam=max(decode.beam, ranks))
        translator: Any = replace(cast(Any, self.translator), decode=decode)
        if isinstance(translator, Translator) and supports_cuda_graph(translator.model):
            translator.model.eval()

            def more(running: list[SentenceRow]) -> list[SentenceRow]:
                return self._rows(take(partial(self.fits, running=running)))

            run_batch(SearchBatch(translator, ranks, self._finish), self._rows(jobs), more)
            return
        parts = [part for job in jobs for part in job.request.parts]
        hypotheses = iter(translator.search(parts, n_best=ranks))
        for job in jobs:
            self._answer(job, list(islice(hypotheses, len(job.request.parts))))

    def _rows(self, jobs: Sequence[Job[TranslationRequest]]) -> list[SentenceRow]:
        rows = []
        for job in jobs:
            results: dict[int, list[Hypothesis]] = {}
            parts = enumerate(job.request.parts)
            rows += [SentenceRow(job, number, part, results) for number, part in parts]
            if not job.request.parts:
                self._answer(job, [])
        return rows

    def _finish(self, row: SentenceRow, hypotheses: list[Hypothesis]) -> None:
        """The last sentence of a job that leaves the batch sends the answer."""
        row.results[row.number] = hypotheses
        if row.job.cancelled:
            row.job.end()
        elif len(row.results) == len(row.job.request.parts):
            self._answer(row.job, [row.results[number] for number in sorted(row.results)])

    def _answer(self, job: Job[TranslationRequest], results: list[list[Hypothesis]]) -> None:
        """Send the translations of each text; missing ranks repeat the last one."""
        request, tokenizer = job.request, self.translator.tokenizer
        annotations = iter(self._annotate(request, results))
        hypotheses = iter(results)
        for text in request.texts:
            lines: list[list[list[str]]] = []
            links, log_probs, before = list[tuple[int, int]](), list[float](), (0, 0)
            for line in text:
                lines.append([])
                for _ in line:
                    ids = [hypothesis.tokens for hypothesis in next(hypotheses)] or [[]]
                    ids += ids[-1:] * (request.ranks - len(ids))
                    lines[-1].append([x.translate(BREAKS) for x in tokenizer.decode_batch(ids)])
                    if (added := next(annotations, None)) is not None:
                        links += [(i + before[0], j + before[1]) for i, j in added.links]
                        log_probs += added.word_log_probs
                        before = before[0] + added.source_words, before[1] + added.target_words
            ranked = [
                "\n".join(" ".join(part[rank] for part in line) for line in lines)
                for rank in range(request.ranks)
            ]
            job.send(Translation(ranked, links, [round(math.exp(x), 4) for x in log_probs]))
        job.end()

    def _annotate(
        self, request: TranslationRequest, results: list[list[Hypothesis]]
    ) -> list[Annotation]:
        """Links and probabilities of the best translations, if they are requested."""
        if not results or not (request.alignment or request.confidence):
            return []
        with self._scoring:  # capturing attention changes the modules of the model
            assert self._scorer is not None
            if self.workers > 1 and not self._is_copy:  # the others may be searching
                self._scorer = replace(self._scorer, model=copy.deepcopy(self._scorer.model))
                self._is_copy = True
            best = [nbest[0] if nbest else Hypothesis([], 0.0, 0.0) for nbest in results]
            return annotate(self._scorer, request.parts, best, alignment=request.alignment)


# --- The routes -----------------------------------------------------------------------------------


async def translate(request: Request) -> Response:
    """POST {q, source, target, format?, alternatives?, alignment?, confidence?, api_key?}.

    `q` is a text or a list. `alignment` and `confidence` are not LibreTranslate's.
    """
    fields = await read_fields(request)
    _check_key(request, fields)
    work = work_of_kind(request, Translations)
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
    alternatives = number(fields, "alternatives", 0, 0, MAX_ALTERNATIVES)
    details = {name: flag(fields, name) for name in ("alignment", "confidence")}
    parsed = await run_in_threadpool(work.make_request, texts, alternatives, **details)
    translations: list[Translation] = await collect(request, request.app.state.scheduler, parsed)
    columns: dict[str, list[Any]] = {"translatedText": [x.texts[0] for x in translations]}
    if alternatives:
        columns["alternatives"] = [
            [text for text in dict.fromkeys(x.texts) if text != x.texts[0]] for x in translations
        ]
    if parsed.alignment:
        columns["alignment"] = [x.links for x in translations]
    if parsed.confidence:
        columns["confidence"] = [
            [
                {"word": word, "probability": probability}
                for word, probability in zip(x.texts[0].split(), x.probabilities, strict=False)
            ]
            for x in translations
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
    known = work_of_kind(request, Translations).languages
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
    return JSONResponse([_detected(work_of_kind(request, Translations))])


async def deepl(request: Request) -> Response:
    """POST {text, target_lang, source_lang?}; text is a list, repeated in a form."""
    fields = await read_fields(request)
    work = work_of_kind(request, Translations)
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
    translations = await collect(request, request.app.state.scheduler, parsed)
    is_billed = fields.values.get("show_billed_characters") in (True, "true", "1")
    rows = [
        {
            "detected_source_language": base(known.source).upper(),
            "text": translation.texts[0],
            # DeepL's client expects a number.
            **({"billed_characters": len(text)} if is_billed else {}),
        }
        for text, translation in zip(texts, translations, strict=True)
    ]
    return JSONResponse({"translations": rows})


ROUTES = [
    Route("/translate", translate, methods=["POST"]),
    Route("/languages", languages),
    Route("/detect", detect, methods=["POST"]),
    Route("/v2/translate", deepl, methods=["POST"]),
]
