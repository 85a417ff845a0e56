"""Beam search that asks for the likeliest hypothesis first, wherever it stands.

Of each sentence the open hypotheses lie in a heap, and the model is asked for the one of greatest
log P, whatever its length (Meister, Vieira and Cotterell, 2020, "Best-First Beam Search"). log P
only falls as a text grows: what is still to come of shorter ones is no likelier than what is taken
from the heap now, so that those of one length are taken in the order in which beam search ranks
them. Its beam are the first k of a length that do not end, and an end counts if it is among the
first k. What a beam holds beside the hypotheses that can still win is never asked for: a model that
is sure of itself is asked about once a token.

One cannot win whose log P over the greatest lp to come is no better than the n-th best score so
far. With a whole beam of some length what is shorter can only end before it, and has the lp there.

Sentences do not wait for each other: many are searched at once, one hypothesis of each at a time,
and others follow where some are done. A step with few rows costs hardly less than one with some
more: where few sentences are left, those that do not go straight on also ask for what may be taken
later, and the answers wait until then.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.decode.beam import Allowed, Decode, Hypothesis, length_penalty
from manyheads.decode.hypotheses import NEVER, continuations
from manyheads.decode.logits import log_mass

AT_ONCE = 256  # sentences, unless told fewer
HELD = 2**17  # hypotheses of all of them, if each asked for all that its beam can hold
FEWER = 4  # others follow when one of so many is done
FEW = 16  # hypotheses that a step asks for at little more cost than for one
Child = tuple[float, int, int]


@runtime_checkable
class Forest(Protocol):
    """A model before trees of hypotheses, one tree a sentence; they are told as in `TreeCache`."""

    def read(self, sentences: range) -> None:
        """Put these sentences behind those that are there."""

    def step(self, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> Float[Tensor, "n v"]:
        """Logits of the token after these hypotheses, as many of each tree."""

    def keep(self, trees: Sequence[int]) -> None:
        """Go on with these, in this order."""


@dataclass
class _Asked:
    """A hypothesis that the model is asked for, and then its best continuations, best first."""

    tokens: list[int]
    path: list[int]
    log: float
    logs: list[float] = field(default_factory=list)
    following: list[int] = field(default_factory=list)


class BestFirst:
    """Searches with given settings and special tokens."""

    def __init__(
        self,
        decode: Decode,
        *,
        start: int,
        end: int,
        banned: Sequence[int] = (),
        n_best: int | None = None,
    ) -> None:
        self.beam, self.alpha, self.penalty = decode.beam, decode.length_penalty, decode.penalty
        self.n_best = min(n_best or decode.beam, decode.beam)
        self.start, self.end = start, end
        self.allowed = Allowed(decode, end, banned)
        # Whether a hypothesis is to win by ending at its next token: with a falling lp none that
        # ends later can be better.
        self.soon = decode.stopping == "none-better-now" or self.alpha < 0
        # One may be the end, and enough others live on.
        self.wide = self.beam + 1 if self.beam > 1 else 1
        self._penalties: dict[int, list[float]] = {}

    def penalties(self, limit: int) -> list[float]:
        """lp at every length up to the limit."""
        if limit not in self._penalties:
            lp = (length_penalty(max(1, n), self.alpha, self.penalty) for n in range(limit + 1))
            self._penalties[limit] = [float(one) for one in lp]
        return self._penalties[limit]

    @torch.no_grad()
    def __call__(
        self,
        forest: Forest,
        limits: Sequence[int],
        rooms: Sequence[int] | None = None,
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[list[Hypothesis]]:
        """For each sentence its hypotheses, best first.

        `rooms` says how many sentences are searched at once where this one is the first of them.
        """
        results: list[list[Hypothesis]] = []
        trees: list[_Tree] = []
        while trees or len(results) < len(limits):
            read = len(results)
            room = rooms[min([read, *(tree.home for tree in trees)])] if rooms else AT_ONCE
            if read < len(limits) and len(trees) <= room - max(1, room // FEWER):
                new = range(read, min(len(limits), read + room - len(trees)))
                forest.read(new)
                trees += [_Tree(self, home, limits[home]) for home in new]
                results += [tree.ended for tree in trees[-len(new) :]]  # to be filled
            self._grow(forest, trees)
            most = min(self.beam, max(1, FEW // len(trees)))
            going = [place for place, tree in enumerate(trees) if tree.ask(most)]
            if len(going) < len(trees):
                kept = _closed_up(going)
                forest.keep(kept)
                trees = [trees[place] for place in kept]
                advance(len(results) - len(trees))
        return results

    def _grow(self, forest: Forest, trees: "list[_Tree]") -> None:
        """Ask the model for what each tree asks for, and tell it the best continuations."""
        most = max(len(tree.asking) for tree in trees)
        rows = [(tree, one) for tree in trees for one in tree.filled_up(most)]
        logits = forest.step([one.tokens[-1] for _, one in rows], [one.path for _, one in rows])
        total = log_mass(logits)
        places = torch.tensor([len(one.path) for _, one in rows], device=logits.device)
        ending = [len(one.path) == tree.limit for tree, one in rows]
        last = torch.tensor(ending, device=logits.device) if any(ending) else None
        self.allowed.apply(logits, total, places, last)
        before = torch.tensor([[one.log] for _, one in rows], device=logits.device)
        log, _, tokens = continuations(before, logits, total, self.wide)
        for (_, one), logs, following in zip(rows, log.tolist(), tokens.tolist(), strict=True):
            one.logs, one.following = logs, following


class _Tree:
    """The hypotheses of one sentence, from the empty one on.

    Those that were asked for have numbers. A heap has −log P of others, their parents' numbers, and
    which of the children they are: each comes into it when the one before it is taken.
    """

    def __init__(self, search: BestFirst, home: int, limit: int) -> None:
        self.search, self.home, self.limit = search, home, limit
        self.asked = [_Asked([search.start], [0], 0.0)]
        self.asking = self.asked[:]
        self.numbers: dict[tuple[int, int], int] = {}  # by parent and child
        self.heap: list[Child] = []
        self.ahead: list[Child] = []  # of all that were asked for, taken or not
        self.looked = 0  # at so many of them
        self.ended: list[Hypothesis] = []
        self.worst = NEVER  # score of the n-th best that has ended
        self.lp = search.penalties(limit)
        self.greatest = max(self.lp[1], self.lp[limit])
        # Of each length: how many were taken, how many of these were asked for, and the greatest
        # length at which a hypothesis of this one may still end.
        self.taken, self.beam = [0] * (limit + 1), [0] * (limit + 1)
        self.reach = [limit] * (limit + 1)

    def filled_up(self, most: int) -> list[_Asked]:
        """What it asks for, one of them several times if others ask for more."""
        return self.asking + self.asking[:1] * (most - len(self.asking))

    def ask(self, most: int) -> bool:
        """Find what the model is to be asked for next; False if no hypothesis can win any more."""
        self._push(self.heap, self.asking[0].path[-1], 0)
        if not self._take():
            return False
        if most > 1 and len(self.asked) > len(self.asking[0].path):  # it has not gone straight on
            self._look_ahead(most)
        return True

    def _push(self, heap: list[Child], parent: int, child: int) -> None:
        logs = self.asked[parent].logs
        if child < len(logs) and logs[child] > NEVER:
            heappush(heap, (-logs[child], parent, child))

    def _take(self) -> bool:
        """Go on to the next hypothesis that was not asked for yet; False if there is none."""
        most = self.search.beam
        while self.heap and -self.heap[0][0] / self.greatest > self.worst:
            negated, number, child = heappop(self.heap)
            parent = self.asked[number]
            log, token, length = -negated, parent.following[child], len(parent.path)
            self.taken[length] += 1
            ends = token == self.search.end or length == self.limit
            if ends and self.taken[length] <= most:
                self._end(parent, token, log)
            wanted = not ends and self.beam[length] < most and self._may_win(log, length)
            if wanted:
                self.beam[length] += 1
            if self.beam[length] < most:
                self._push(self.heap, number, child + 1)
            elif wanted:
                self._close(length)
            if wanted and (number, child) not in self.numbers:
                self.asking = [self._new(number, child)]
                return True
            if wanted:
                self._push(self.heap, self.numbers[number, child], 0)
        return False

    def _look_ahead(self, most: int) -> None:
        """Ask for others too that may be taken later, the likeliest first."""
        answered = self.asking[0].path[-1]
        for number in range(self.looked, answered):
            self._push(self.ahead, number, 0)
        self.looked = answered
        while self.ahead and len(self.asking) < most:
            negated, number, child = heappop(self.ahead)
            self._push(self.ahead, number, child + 1)
            parent = self.asked[number]
            length = len(parent.path)
            open_ = parent.following[child] != self.search.end and length < self.limit
            if (
                open_
                and (number, child) not in self.numbers
                and self.beam[length] < self.search.beam
                and self._may_win(-negated, length)
            ):
                self.asking.append(self._new(number, child))

    def _new(self, number: int, child: int) -> _Asked:
        parent = self.asked[number]
        self.numbers[number, child] = len(self.asked)
        path, tokens = [*parent.path, len(self.asked)], [*parent.tokens, parent.following[child]]
        self.asked.append(_Asked(tokens, path, parent.logs[child]))
        return self.asked[-1]

    def _may_win(self, log: float, length: int) -> bool:
        """Whether a hypothesis may still come among the n best."""
        reach = self.reach[length]
        ends = length + 1 if self.search.soon else reach
        return reach > length and log / self.lp[ends] > self.worst

    def _close(self, length: int) -> None:
        """With a whole beam of this length, those that are shorter must end before it."""
        for shorter in range(length - 1, -1, -1):
            if self.reach[shorter] < length:
                break
            self.reach[shorter] = length - 1

    def _end(self, parent: _Asked, token: int, log: float) -> None:
        score = log / self.lp[len(parent.path)]
        if score > self.worst:
            tokens = parent.tokens[1:] if token == self.search.end else [*parent.tokens[1:], token]
            insort(self.ended, Hypothesis(tokens, log, score), key=lambda one: -one.score)
            del self.ended[self.search.n_best :]
            if len(self.ended) == self.search.n_best:
                self.worst = self.ended[-1].score


def _closed_up(places: list[int]) -> list[int]:
    """The same places, the last of them where others have left a gap."""
    there = set(places)
    late = [place for place in places if place >= len(places)]
    return [place if place in there else late.pop() for place in range(len(places))]
