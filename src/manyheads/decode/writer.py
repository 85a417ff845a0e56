"""Writing by recorded steps: what `collect`, `draw` and `BeamSearch` write by a stepper."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.decode.beam import Allowed, BeamSearch, Hypothesis
from manyheads.decode.cuda_graphs import Recordings, room_for, rows_for, source_room_for
from manyheads.decode.sample import Sampler
from manyheads.decode.search import Searching
from manyheads.decode.static_cache import FixedCache
from manyheads.decode.steady import Drawing, GptSteps, Seq2SeqSteps, Steps, Texts
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.embedding import Head
from manyheads.optimize import for_inference

Rows = Int[Tensor, " rows"]


class Writer:
    """A model, and what has been recorded of it."""

    def __init__(self, recordings: Recordings, model: nn.Module) -> None:
        self.recordings, self.model = recordings, model

    @property
    def serves(self) -> bool:
        """Whether steps are to be recorded and those of this model can be."""
        return self.recordings.serve(self.model)

    @torch.no_grad()
    def collect(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler, allowed: Allowed
    ) -> list[list[int]]:
        """What is drawn for each row, without the end."""
        most = int(limits.max())
        with self._drawing(texts, most, sampler, allowed) as drawing:
            drawing.steps.read(texts)
            drawing.begin(newest, limits, sampler.chances(most))
            return drawing.collect(len(limits), most)

    def follow(
        self, texts: Texts, newest: Rows, limits: Rows, sampler: Sampler, allowed: Allowed
    ) -> Iterator[Rows]:
        """One token a row and step; a row that is done has the end. It reads at the first step."""
        most = int(limits.max())
        with self._drawing(texts, most, sampler, allowed) as drawing:
            with torch.no_grad():  # inside: whoever takes the tokens may want gradients
                drawing.steps.read(texts)
                drawing.begin(newest, limits, sampler.chances(most))
            yield from drawing.follow(len(limits), most)

    @torch.no_grad()
    def search(
        self, texts: Texts, search: BeamSearch, limits: Int[Tensor, " n"]
    ) -> list[list[Hypothesis]]:
        """For each sentence its hypotheses, best first."""
        shape = self._shape(texts, search.beam, int(limits.max()))

        def make(pool: Any) -> Searching:
            steps, compile = self._steps(*shape, pool), self.recordings.compiled
            return Searching(steps, search, pool, compile=compile)

        key = ("search", *shape, *search.settings)
        with self.recordings.lent(self.model, key, make) as searching:
            searching.steps.read(texts)
            return searching(search.start, limits)

    def _drawing(
        self, texts: Texts, most: int, sampler: Sampler, allowed: Allowed
    ) -> AbstractContextManager[Drawing]:
        shape, sample = self._shape(texts, 1, most), replace(sampler.sample, seed=0)

        def make(pool: Any) -> Drawing:
            steps, compile = self._steps(*shape, pool), self.recordings.compiled
            return Drawing(steps, allowed, sample, pool, compile=compile)

        key = ("draw", *shape, *allowed.settings, sample)
        return self.recordings.lent(self.model, key, make)

    def _shape(self, texts: Texts, beams: int, most: int) -> tuple[int, int, int, int]:
        """Sentences, beams, room for what is written and before it, and for sources."""
        width = texts[0].shape[1]
        before, source = (0, source_room_for(width)) if len(texts) > 1 else (width, 0)
        return rows_for(len(texts[0])), beams, room_for(before + most), source

    def _steps(self, sentences: int, beams: int, room: int, source_room: int, pool: Any) -> Steps:
        device = next(self.model.parameters()).device
        cache, model = FixedCache(sentences, beams, room, device, source_room), self.model
        if sentences * beams == 1 and isinstance(model.head, Head):
            model = self._for_one_row(model)
        if isinstance(model, Gpt):
            return GptSteps(model, cache, pool)
        assert isinstance(model, Seq2Seq)
        return Seq2SeqSteps(model, cache, pool)

    def _for_one_row(self, model: nn.Module) -> nn.Module:
        return for_inference(model, rows=1, compiled=self.recordings.compiled)
