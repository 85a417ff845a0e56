"""Translations: the languages of a run, and texts of several requests in one batch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.decode.beam import Hypothesis
from manyheads.decode.translate import BREAKS, BaseTranslator
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.run import Run
from manyheads.serve.batching import Bounds, Job, Work
from manyheads.tasks.translation import LANGUAGE, language_pair
from manyheads.web.responses import Problem

LISTED = """
    ar Arabic, cs Czech, da Danish, de German, el Greek, en English, es Spanish, et Estonian,
    fi Finnish, fr French, hi Hindi, hu Hungarian, it Italian, ja Japanese, ko Korean,
    lt Lithuanian, lv Latvian, nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian,
    ru Russian, sv Swedish, tr Turkish, uk Ukrainian, vi Vietnamese, zh Chinese
"""
NAMES = dict(pair.split() for pair in LISTED.split(","))
MAX_ALTERNATIVES = 10


@dataclass(frozen=True)
class Languages:
    source: str
    target: str

    def __post_init__(self) -> None:
        for name, code in (("source", self.source), ("target", self.target)):
            if not LANGUAGE.fullmatch(code):
                raise UserError(f"--{name} {code} is not a language code: use e.g. en or de")


def base(code: str) -> str:
    """`en` for en-US, EN_gb and en."""
    return re.split("[-_]", code.lower())[0]


def languages_of(run: Run, source: str | None, target: str | None) -> Languages:
    """Those of the options, or those that the run's data names."""
    of_data = language_pair(run.data)
    pair = (source or of_data[0]).lower(), (target or of_data[1]).lower()
    if not all(pair):
        raise UserError(
            "the run does not name its languages: add --source and --target, e.g. --source en "
            "--target de"
        )
    return Languages(*pair)


@dataclass(frozen=True)
class TranslationRequest:
    """Texts, each a list of lines, each a list of parts that fit the model.

    `rows` and `tokens` are their size in a batch; `ranks` is how many translations of each.
    """

    texts: tuple[tuple[tuple[str, ...], ...], ...]
    rows: int
    tokens: int
    ranks: int = 1

    @property
    def parts(self) -> list[str]:
        return [part for text in self.texts for line in text for part in line]


class Translations(Work[TranslationRequest]):
    def __init__(self, loaded: LoadedRun, languages: Languages, bounds: Bounds, beam: int | None):
        self.loaded, self.languages, self.bounds = loaded, languages, bounds
        self.beam = loaded.run.decode.beam if beam is None else beam
        self._translators = {self.beam: loaded.translator(beam=self.beam)}

    def make_request(self, texts: Sequence[str], alternatives: int = 0) -> TranslationRequest:
        """Refuse a request that cannot be computed: in a batch, others would fail with it."""
        translator = self._translators[self.beam]
        tokens = sum(len(ids) for ids in translator.tokenizer.encode_batch(texts))
        if tokens > self.bounds.tokens:
            raise Problem(
                413,
                f"the text has {tokens} tokens, more than the limit of {self.bounds.tokens}: "
                "send it in parts",
            )

        def parts(line: str) -> tuple[str, ...]:
            return tuple(translator.split(line)) if line.strip() else ()

        split = tuple(tuple(parts(line) for line in text.split("\n")) for text in texts)
        rows = sum(len(line) for text in split for line in text)
        return TranslationRequest(split, rows, tokens, 1 + alternatives)

    def fits(self, requests: Sequence[TranslationRequest]) -> bool:
        return (
            sum(request.rows for request in requests) <= self.bounds.rows
            and sum(request.tokens for request in requests) <= self.bounds.tokens
            and len({request.ranks for request in requests}) == 1
        )

    def compute(self, jobs: Sequence[Job[TranslationRequest]]) -> None:
        ranks = jobs[0].request.ranks
        beam = max(self.beam, ranks)
        if beam not in self._translators:  # at most MAX_ALTERNATIVES of them
            self._translators[beam] = self.loaded.translator(beam=beam)
        translator = self._translators[beam]
        parts = [part for job in jobs for part in job.request.parts]
        translations = iter(_decoded(translator, translator.search(parts, n_best=ranks), ranks))
        for job in jobs:
            for text in job.request.texts:
                lines = [[next(translations) for _ in line] for line in text]
                job.send([_joined(lines, rank) for rank in range(ranks)])


def _decoded(
    translator: BaseTranslator, hypotheses: Sequence[Sequence[Hypothesis]], ranks: int
) -> list[list[str]]:
    """The translations of each part, best first; the last one is repeated if there are fewer."""
    ids = [
        h[min(rank, len(h) - 1)].tokens if h else [] for h in hypotheses for rank in range(ranks)
    ]
    texts = iter(translator.tokenizer.decode_batch(ids))
    return [[next(texts) for _ in range(ranks)] for _ in hypotheses]


def _joined(lines: Sequence[Sequence[Sequence[str]]], rank: int) -> str:
    return "\n".join(" ".join(part[rank].translate(BREAKS) for part in line) for line in lines)
