"""Continuous batching of encoder–decoders: sentences join and leave a running beam search.

Each step fills k slots of the cache, one for each hypothesis, in all rows alike. A sentence that
joins later is padded on the left, as the rows of a language model are (continuous.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.decode.beam import Beams, BeamSearch, Hypothesis
from manyheads.decode.decoder import ModelSession
from manyheads.decode.translate import Translator
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import CrossAttention
from manyheads.nn.masks import full, make_mask
from manyheads.nn.shapes import Hidden
from manyheads.serve.continuous import LeftPaddedCache, cat_padded
from manyheads.serve.scheduler import Job


@dataclass(eq=False)
class SentenceRow:
    """A sentence of a job, and the results of all sentences of that job by number."""

    job: Job[Any]
    number: int
    sentence: str
    results: dict[int, list[Hypothesis]]


class SearchSession(ModelSession):
    """The decoder of an encoder–decoder; the cache has keys and values of the sources."""

    cache: LeftPaddedCache

    def __init__(
        self, model: Any, beams: int, source: Int[Tensor, "n s"], padding: Bool[Tensor, "n s"]
    ) -> None:
        super().__init__(model, LeftPaddedCache(source.new_zeros(len(source)), beams))
        self._set_sources(padding)
        states = model.encode(source, padding).states
        for part in model.decoder.modules():
            if isinstance(part, CrossAttention):
                keys, values = part.project_kv(states)
                self.cache.cross_kv(part, lambda pair=(keys, values): pair)  # type: ignore[misc]

    def _set_sources(self, padding: Bool[Tensor, "n s"]) -> None:
        mask = make_mask(full, padding.shape[1], padding_mask=padding, device=padding.device)
        self.padding = padding
        self.memory = EncoderOutput(padding, mask)  # the states of the sources are not needed

    def hidden(self, tokens: Int[Tensor, "n k"]) -> Hidden:
        hidden: Hidden = self.model.decode(tokens, self.memory, cache=self.cache)
        return hidden

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.cache.select_rows(sentences)
        self._set_sources(self.padding[sentences])

    def join(self, other: "SearchSession") -> None:
        self.cache.join(other.cache)
        paddings = (x.padding[..., None] for x in (self, other))
        self._set_sources(cat_padded(*paddings)[..., 0])


class SearchBatch:
    """Sentences that are translated together, one token of each hypothesis a step.

    `finish` gets each row that leaves with its hypotheses.
    """

    session: SearchSession
    beams: Beams

    def __init__(
        self,
        translator: Translator,
        n_best: int,
        finish: Callable[[SentenceRow, list[Hypothesis]], None],
    ) -> None:
        self.translator, self.finish, self.rows = translator, finish, list[SentenceRow]()
        self.search = BeamSearch(translator.decode, translator.constraints, n_best)

    def join(self, rows: list[SentenceRow]) -> None:
        if not rows:
            return
        texts, limits = self.translator.batch([row.sentence for row in rows])
        session = SearchSession(self.translator.model, self.search.beam, *texts)
        beams = Beams(self.search, len(rows), int(limits.max()), limits.device)
        beams.begin(self.translator.special_tokens.start, limits)
        if self.rows:
            self.session.join(session)
            self.beams.join(beams)
        else:
            self.session, self.beams = session, beams
        self.rows = self.rows + rows

    def step(self) -> None:
        self.beams.step(self.session)
        done = self.beams.done.tolist()
        leaves = [end or row.job.cancelled for end, row in zip(done, self.rows, strict=True)]
        if any(leaves):
            self._leave(torch.tensor(leaves, device=self.beams.done.device))

    def _leave(self, leaves: Bool[Tensor, " n"]) -> None:
        gone, left = (x.nonzero()[:, 0] for x in (leaves, ~leaves))
        results = self.beams.hypotheses(gone, int(self.beams.length[gone].max()))
        for index, hypotheses in zip(gone.tolist(), results, strict=True):
            self.finish(self.rows[index], hypotheses)
        self.rows = [self.rows[index] for index in left.tolist()]
        if self.rows:
            self.beams.keep(left)
            self.session.keep_sentences(left)
