"""The tree of a beam search: every candidate token, and whether it was kept."""

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
    """A candidate: the token at position `step` (from 1) after the tokens of its parents.

    `log_probability` and `score` = log P / lp cover all tokens up to this one. The candidate was
    kept in the beam, ended in it, or pruned. End tokens outside the k best are pruned too.
    """

    step: int
    parent: int
    token: int
    log_probability: float
    score: float
    state: State


class Tree:
    """The candidates of a search over one text, step by step."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.nodes: list[Node] = []
        self._rows = [ROOT] * search.beam  # the last node of each active hypothesis

    def add(self, length: int, candidates: Candidates) -> None:
        """The candidates of one step of the search."""
        log, parents, tokens, ending, living = (x[0].tolist() for x in candidates)
        surviving = {at for at in living if log[at] > NEVER and not ending[at]}
        scores = (candidates.log / self.search.lp(length))[0].tolist()
        numbers: dict[int, int] = {}
        for at, value in enumerate(log):
            if value == NEVER:
                continue
            ended = ending[at] and at < self.search.beam
            state: State = "kept" if at in surviving else "ended" if ended else "pruned"
            numbers[at] = len(self.nodes)
            parent = self._rows[parents[at]]
            self.nodes.append(Node(length, parent, tokens[at], value, scores[at], state))
        self._rows = [numbers.get(at, ROOT) for at in living]

    def tokens(self, node: int) -> list[int]:
        """All tokens up to a node."""
        reversed_tokens = []
        while node != ROOT:
            reversed_tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return reversed_tokens[::-1]


@dataclass(frozen=True)
class TracedSearch:
    """The results of a search and its tree; `ends` are the last nodes of the results."""

    hypotheses: list[Hypothesis]
    nodes: list[Node]
    ends: list[int]


@torch.no_grad()
def trace_search(
    search: BeamSearch, session: DecoderSession, start: int, limits: Int[Tensor, " 1"]
) -> TracedSearch:
    """Run the search over one text and record its tree."""
    tree, end = Tree(search), search.constraints.end
    [hypotheses] = search(session, start, limits, tree.add)
    by_tokens = {
        tuple(_without(tree.tokens(number), end)): number
        for number, node in enumerate(tree.nodes)
        if node.state == "ended"
    }
    ends = [by_tokens[tuple(hypothesis.tokens)] for hypothesis in hypotheses]
    return TracedSearch(hypotheses, tree.nodes, ends)


def _without(tokens: Sequence[int], end: int) -> list[int]:
    """The tokens without the end token, if there is one."""
    return list(tokens[:-1] if tokens and tokens[-1] == end else tokens)
