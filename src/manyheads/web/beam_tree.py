"""The tree of a beam search: every continuation it weighed, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.decode.beam import NEVER, BeamSearch, Candidates, DecoderSession, Hypothesis

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


class Tree:
    """The continuations of a search over one text, step by step."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.nodes: list[Node] = []
        self._rows = [ROOT] * search.beam  # the node that each living hypothesis ends with

    def add(self, length: int, candidates: Candidates) -> None:
        """The candidates of one step of the search."""
        log, parents, tokens, ending, living = (x[0].tolist() for x in candidates)
        kept = {at for at in living if log[at] > NEVER and not ending[at]}
        scores = (candidates.log / self.search.lp(length))[0].tolist()
        numbers: dict[int, int] = {}
        for at, value in enumerate(log):
            if value == NEVER:
                continue
            ended = ending[at] and at < self.search.beam
            state: State = "kept" if at in kept else "ended" if ended else "pruned"
            numbers[at] = len(self.nodes)
            parent = self._rows[parents[at]]
            self.nodes.append(Node(length, parent, tokens[at], value, scores[at], state))
        self._rows = [numbers.get(at, ROOT) for at in living]

    def tokens(self, node: int) -> list[int]:
        """All tokens up to a node."""
        found = []
        while node != ROOT:
            found.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return found[::-1]


@dataclass(frozen=True)
class TracedSearch:
    """What a search found, and the tree that it went through; `ends` are the nodes of the found."""

    found: list[Hypothesis]
    nodes: list[Node]
    ends: list[int]


@torch.no_grad()
def trace_search(
    search: BeamSearch, session: DecoderSession, start: int, limits: Int[Tensor, " 1"]
) -> TracedSearch:
    """The search over one text, with its tree."""
    tree, end = Tree(search), search.constraints.end
    [found] = search(session, start, limits, tree.add)
    by_tokens = {
        tuple(_without(tree.tokens(number), end)): number
        for number, node in enumerate(tree.nodes)
        if node.state == "ended"
    }
    ends = [by_tokens[tuple(hypothesis.tokens)] for hypothesis in found]
    return TracedSearch(found, tree.nodes, ends)


def _without(tokens: Sequence[int], end: int) -> list[int]:
    """What is written before the end; a text that was cut has none."""
    return list(tokens[:-1] if tokens and tokens[-1] == end else tokens)
