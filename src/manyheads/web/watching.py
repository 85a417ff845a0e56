"""Looking on while beam search works: every continuation it weighed, and what became of it.

The search itself is that of decode/beam.py, and is not told. Around its stepper stands another
one, which sees each step's logits and weighs the continuations by the search's own rules; which of
them lived on is held against the tokens and rows that the search then asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import BeamSearch, Hypothesis, Stepper
from manyheads.decode.hypotheses import NEVER, continuations, in_beam
from manyheads.decode.logits import foremost, log_mass

State = Literal["kept", "ended", "pruned"]
ROOT = -1  # the parent of first tokens


@dataclass(frozen=True)
class Node:
    """A continuation: the token at place `step` (from 1) after those of its parents.

    `log_probability` and `score`, log P / lp, are of all tokens up to this one. It was kept in
    the beam, ended in it, or pruned: an ending that was not among the k best is pruned too.
    """

    step: int
    parent: int
    token: int
    log_probability: float
    score: float
    state: State


class Watch:
    """A stepper around the stepper of a search over one text."""

    def __init__(self, stepper: Stepper, search: BeamSearch, limit: int) -> None:
        self.stepper, self.beam_search, self.limit = stepper, search, limit
        self.nodes: list[Node] = []
        self.length = 0
        self._alive: Float[Tensor, "n k"] = torch.full((1, search.beam), NEVER)
        self._alive[:, 0] = 0.0
        self._rows = [ROOT] * search.beam  # the node that each living row ends with
        self._parents = [0] * search.beam
        self._chosen: list[int] | None = None  # rows that the search went on with

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        self._check(tokens.tolist())
        logits = self.stepper.step(tokens)
        self.length += 1
        self._weigh(logits.cpu())
        return logits

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        self._chosen = rows.tolist()
        self.stepper.reorder(rows)

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.stepper.keep_sentences(sentences)

    def _weigh(self, logits: Float[Tensor, "rows v"]) -> None:
        """Grow the tree by the continuations of this step."""
        k, length, search = self.beam_search.beam, self.length, self.beam_search
        # Copies: the search changes the logits in their place.
        seen = logits.repeat_interleave(k, 0) if length == 1 else logits.clone()
        total = log_mass(seen)
        last = torch.tensor([True]) if length == self.limit else None
        search.allowed.apply(seen, total, length, None if last is None else last.expand(k))
        log, parents, tokens = continuations(self._alive, seen, total)
        ending = search.allowed.ends(tokens, last)
        self._alive, order = foremost(log.masked_fill(ending, NEVER), k)
        kept = set(order[0][self._alive[0] > NEVER].tolist())
        ended = set(in_beam(ending, k)[0].nonzero()[:, 0].tolist())
        scores, places = (log / search.lp(length))[0].tolist(), {}
        for at, value in enumerate(log[0].tolist()):
            if value == NEVER:
                continue
            parent, token = self._rows[int(parents[0, at])], int(tokens[0, at])
            state: State = "kept" if at in kept else "ended" if at in ended else "pruned"
            places[at] = len(self.nodes)
            self.nodes.append(Node(length, parent, token, value, scores[at], state))
        self._rows = [places.get(at, ROOT) for at in order[0].tolist()]
        self._parents = parents[0][order[0]].tolist()

    def _check(self, tokens: list[int]) -> None:
        """The search lives on with the very hypotheses that were weighed as kept."""
        if self.length == 0:
            return
        rows = self._parents if self._chosen is None else self._chosen
        for row, node in enumerate(self._rows):
            if node == ROOT:
                continue  # a dead copy
            same_parent = self.length == 1 or rows[row] == self._parents[row]
            if self.nodes[node].token != tokens[row] or not same_parent:
                raise RuntimeError("the search went on with other hypotheses than were weighed")
        self._chosen = None

    def tokens(self, node: int) -> list[int]:
        """All tokens up to a node."""
        found = []
        while node != ROOT:
            found.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return found[::-1]


@dataclass(frozen=True)
class Watched:
    """What a search found, and the tree that it went through; `ends` are the nodes of the found."""

    found: list[Hypothesis]
    nodes: list[Node]
    ends: list[int]


@torch.no_grad()
def watched(search: BeamSearch, stepper: Stepper, limits: Int[Tensor, " 1"]) -> Watched:
    """The search over one text, with its tree."""
    watch = Watch(stepper, search, int(limits[0]))
    [found] = search(watch, limits)
    by_tokens = {
        tuple(_without(watch.tokens(number), search.end)): number
        for number, node in enumerate(watch.nodes)
        if node.state == "ended"
    }
    ends = [by_tokens[tuple(hypothesis.tokens)] for hypothesis in found]
    return Watched(found, watch.nodes, ends)


def _without(tokens: Sequence[int], end: int) -> list[int]:
    """What is written before the end; a text that was cut has none."""
    return list(tokens[:-1] if tokens and tokens[-1] == end else tokens)
