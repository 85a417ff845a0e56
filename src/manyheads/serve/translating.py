"""Translations for programs: which languages a run knows, and texts put together into batches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.decode.beam import Hypothesis
from manyheads.decode.lines import BREAKS, pieces
from manyheads.decode.translate import BaseTranslator
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
MOST_ALTERNATIVES = 10


@dataclass(frozen=True)
class Languages:
    source: str
    target: str

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            code = getattr(self, name)
            if not LANGUAGE.fullmatch(code):
                raise UserError(f"--{name} {code} is not a language code: use e.g. en or de")

    @property
    def read(self) -> str:
        return base(self.source)

    @property
    def written(self) -> str:
        return base(self.target)


def base(code: str) -> str:
    """`en` of en-US, EN_gb and en."""
    return re.split("[-_]", code.lower())[0]


def languages_of(run: Run, source: str | None, target: str | None) -> Languages:
    """Those of the options, else those that the settings of the run's data name."""
    of_data = language_pair(run.data)
    pair = (source or of_data[0]).lower(), (target or of_data[1]).lower()
    if not all(pair):
        raise UserError(
            "the run does not name its languages: add --source and --target, e.g. --source en "
            "--target de"
        )
    return Languages(*pair)


@dataclass(frozen=True)
class Texts:
    """What one request wants translated: texts of lines of parts that the model reads at once."""

    texts: tuple[tuple[tuple[str, ...], ...], ...]
    rows: int
    tokens: int
    ranks: int = 1

    @property
    def parts(self) -> list[str]:
        return [part for text in self.texts for line in text for part in line]


class Translations(Work[Texts]):
    def __init__(self, opened: LoadedRun, languages: Languages, bounds: Bounds, beam: int | None):
        self.opened, self.languages, self.bounds = opened, languages, bounds
        self.beam = opened.run.decode.beam if beam is None else beam
        self._translators = {self.beam: opened.translator(beam=self.beam)}

    def ask(self, texts: Sequence[str], alternatives: int = 0) -> Texts:
        """Refuse here what cannot be computed: in a batch it would be its neighbours' fault too."""
        translator = self._translators[self.beam]
        tokens = sum(len(ids) for ids in translator.tokenizer.encode_batch(texts))
        if tokens > self.bounds.tokens:
            raise Problem(
                413,
                f"the text has {tokens} tokens, at most {self.bounds.tokens} are taken at once: "
                "send it in parts",
            )
        cut = tuple(
            tuple(
                tuple(pieces(translator, line)) if line.strip() else () for line in text.split("\n")
            )
            for text in texts
        )
        rows = sum(len(line) for text in cut for line in text)
        return Texts(cut, rows, tokens, 1 + alternatives)

    def fits(self, asks: Sequence[Texts]) -> bool:
        rows, tokens = sum(ask.rows for ask in asks), sum(ask.tokens for ask in asks)
        return (
            rows <= self.bounds.rows
            and tokens <= self.bounds.tokens
            and len({ask.ranks for ask in asks}) == 1
        )

    def compute(self, jobs: Sequence[Job[Texts]]) -> None:
        ranks = jobs[0].ask.ranks
        translator = self._translator(max(self.beam, ranks))
        found = translator.search([part for job in jobs for part in job.ask.parts], n_best=ranks)
        written = iter(self._decoded(translator, found, ranks))
        for job in jobs:
            for text in job.ask.texts:
                lines = [[next(written) for _ in line] for line in text]
                job.tell([_joined(lines, rank) for rank in range(ranks)])

    def _translator(self, beam: int) -> BaseTranslator:
        if beam not in self._translators:  # at most as many as alternatives may be asked for
            self._translators[beam] = self.opened.translator(beam=beam)
        return self._translators[beam]

    @staticmethod
    def _decoded(
        translator: BaseTranslator, found: Sequence[Sequence[Hypothesis]], ranks: int
    ) -> list[list[str]]:
        """The texts of each part, best first; where there are fewer, the last one again."""
        chosen = [
            [h[min(rank, len(h) - 1)].tokens if h else [] for rank in range(ranks)] for h in found
        ]
        texts = iter(
            translator.tokenizer.decode_batch([ids for ranked in chosen for ids in ranked])
        )
        return [[next(texts) for _ in range(ranks)] for _ in found]


def _joined(lines: Sequence[Sequence[Sequence[str]]], rank: int) -> str:
    return "\n".join(" ".join(part[rank].translate(BREAKS) for part in line) for line in lines)
