"""Best first, beam search finds what it finds by length, and asks the model for less."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
import torch
from manyheads.nn.int8 import in_int8
from test_beam import greedy
from torch import Tensor
from toys import (
    BANNED,
    END,
    SCHEMES,
    START,
    NextLogits,
    Recomputing,
    chance,
    full_pass,
    same,
    toy_model,
    toy_source,
    toy_tokenizer,
    toy_translator,
)

from manyheads.baselines.rnn import RnnConfig
from manyheads.data.batching import Ragged
from manyheads.decode import best_first, translate, tree_cache
from manyheads.decode.beam import Allowed, BeamSearch, Decode, Hypothesis, length_penalty
from manyheads.decode.best_first import BestFirst, Forest
from manyheads.decode.ensemble import together
from manyheads.decode.generate import Generator
from manyheads.decode.translate import Seq2SeqForest, Translator
from manyheads.decode.tree_cache import ROOM, TreeCache
from manyheads.errors import UserError
from manyheads.models.gpt import GptConfig

EVER, NOW = "none-better-ever", "none-better-now"
LINES = ["a b c", "h", "b b b b b b b", "", "c d e f g h a b", "g a", "d", "a b c", "e e d c"]


class Woods:
    """A forest without a cache, which asks a function for the logits after each prefix."""

    def __init__(self, next_logits: NextLogits) -> None:
        self.next_logits = next_logits
        self.trees: list[tuple[int, list[int]]] = []  # the sentence, and all tokens by number
        self.asked = self.steps = 0
        self.prefixes: list[tuple[int, ...]] = []  # each once a step

    def read(self, sentences: range) -> None:
        self.trees += [(sentence, []) for sentence in sentences]

    def step(self, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        self.asked, self.steps = self.asked + len(tokens), self.steps + 1
        found, each = [], len(tokens) // len(self.trees)
        now: set[tuple[int, ...]] = set()
        for row, (token, path) in enumerate(zip(tokens, paths, strict=True)):
            home, known = self.trees[row // each]
            if path[-1] == len(known):  # else it is asked for twice at once
                known.append(token)
            prefix = [known[number] for number in path]
            now.add((home, *prefix))
            found.append(self.next_logits(torch.tensor([home]), torch.tensor([prefix]))[0])
        self.prefixes += now
        return torch.stack(found)

    def keep(self, trees: Sequence[int]) -> None:
        self.trees = [self.trees[tree] for tree in trees]


def remembered(model: NextLogits, other: int = 0) -> NextLogits:
    """The same model, for other sentences and with an answer that is computed once."""
    found = cache(lambda home, prefix: model(torch.tensor([home + other]), torch.tensor([prefix])))
    return lambda homes, prefixes: torch.cat(
        [
            found(home, tuple(prefix))
            for home, prefix in zip(homes.tolist(), prefixes.tolist(), strict=True)
        ]
    )


def marked(search: type, decode: Decode, n_best: int | None = None) -> Any:
    return search(decode, start=START, end=END, banned=[0, 1], n_best=n_best)


def any_settings(draw: random.Random) -> dict[str, Any]:
    penalty = draw.choice(["gnmt", "length"])
    alphas = (0.0, 0.6, 1.0, 3.0) if penalty == "gnmt" else (-2.0, -0.5, 0.0, 0.5, 1.0, 2.0)
    return {
        "beam": draw.randint(2, 6),
        "penalty": penalty,
        "length_penalty": draw.choice(alphas),
        "shortest": draw.choice([0, 0, 1, 3, 20]),
        "first": draw.choice([None, None, 4]),
        "at_limit": draw.choice(["end", "free-end", "cut"]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_the_search_by_length_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the settings, limits and places, with none-better-ever; in all it asks for less,
    unless it asks ahead of time."""
    draw, rows, few = random.Random(seed), [0, 0], (1, 7, 16, 40)[seed % 4]
    monkeypatch.setattr(best_first, "FEW", few)
    for case in range(12):
        how = any_settings(draw) | {"stopping": EVER}
        limits = [draw.choice([1, 2, 3, 6, 9, 12]) for _ in range(4)]
        end, peak = draw.choice([-3, 0, 1, 3]), draw.choice([0.5, 2, 4])
        model = remembered(chance(draw.randint(5, 12), peak=peak, end=end), 1000 * seed + 10 * case)
        n_best = draw.randint(1, how["beam"])
        stepper = Recomputing(model, len(limits), how["beam"])
        wanted = marked(BeamSearch, Decode(**how), n_best)(stepper, torch.tensor(limits))
        woods = Woods(model)
        search = marked(BestFirst, Decode(order="best-first", **how), n_best)
        found = search(woods, limits, draw.choice([None, [1] * 4, [3, 2, 2, 1]]))
        same(found, [line[:n_best] for line in wanted])
        rows[0], rows[1] = rows[0] + sum(stepper.steps), rows[1] + woods.asked
    if few == 1:  # nobody looks ahead
        assert rows[1] < rows[0]


def plain_best_first(
    model: NextLogits, sentence: int, limit: int, decode: Decode, n_best: int
) -> tuple[list[Hypothesis], int]:
    """The definition with one heap of all continuations, and how often the model was asked."""
    lp = [float(length_penalty(max(1, n), decode.length_penalty)) for n in range(limit + 2)]
    heap: list[tuple[float, int, list[int], bool]] = [(0.0, 0, [START], False)]
    taken, alive, order = [0] * (limit + 1), [0] * (limit + 1), count(1)
    ended: list[Hypothesis] = []
    asked = 0
    while heap:
        negated, _, tokens, ends = heappop(heap)
        log, length = -negated, len(tokens) - 1
        worst = ended[n_best - 1].score if len(ended) >= n_best else -torch.inf
        taken[length] += 1
        if ends and taken[length] <= decode.beam:
            written = tokens[1:-1] if tokens[-1] == END else tokens[1:]
            ended.append(Hypothesis(written, log, log / lp[length]))
            ended.sort(key=lambda one: -one.score)
        far = length + 1 if decode.stopping == NOW else limit
        if ends or alive[length] == decode.beam or log / lp[far] <= worst:
            continue
        alive[length] += 1
        asked += 1
        logits = model(torch.tensor([sentence]), torch.tensor([tokens])).clone()
        total = logits.logsumexp(-1, keepdim=True)
        last = torch.tensor([length + 1 == limit])
        Allowed(decode, END, [0, 1]).apply(logits, total, length + 1, last)
        for token, share in enumerate((logits - total)[0].tolist()):
            if share > -torch.inf:
                ending = token == END or length + 1 == limit
                heappush(heap, (-(log + share), next(order), [*tokens, token], ending))
    return ended[:n_best], asked


@pytest.mark.parametrize("stopping", [EVER, NOW])
@pytest.mark.parametrize("n_best", [1, 3])
def test_it_is_the_definition(stopping: str, n_best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_first, "FEW", 1)
    limits, rows = [9, 1, 6, 9, 12, 2], [0, 0]
    for end, at_limit in ((0, "end"), (2, "cut"), (-3, "free-end"), (-4, "end")):
        how: dict[str, Any] = {"stopping": stopping, "at_limit": at_limit, "shortest": 1}
        model = remembered(chance(9, end=end))
        decode = Decode(beam=3, order="best-first", length_penalty=1.0, **how)
        woods = Woods(model)
        found = marked(BestFirst, decode, n_best)(woods, limits)
        plain = [
            plain_best_first(model, i, limit, decode, n_best) for i, limit in enumerate(limits)
        ]
        same(found, [line for line, _ in plain])
        rows[0], rows[1] = rows[0] + sum(asked for _, asked in plain), rows[1] + woods.asked
    # What is behind a whole beam of greater length is not asked for either.
    assert rows[1] < rows[0]


@pytest.mark.parametrize("stopping", [EVER, NOW])
def test_what_is_asked_ahead_of_time_saves_steps(
    stopping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence: it finds the same, and no hypothesis is asked for in two steps."""
    model, steps, found = remembered(chance(9, end=-1.0)), [], []
    decode = Decode(beam=4, order="best-first", length_penalty=1.0, stopping=stopping)
    for few in (1, 16):
        monkeypatch.setattr(best_first, "FEW", few)
        woods = Woods(model)
        found.append(marked(BestFirst, decode, 1)(woods, [12]))
        steps.append(woods.steps)
        assert len(set(woods.prefixes)) == len(woods.prefixes)
    same(*found)
    assert steps[1] < steps[0] / 2


def test_none_better_now_asks_for_less_and_may_miss_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_first, "FEW", 1)
    rows, found = {}, {}
    for stopping in (EVER, NOW):
        decode = Decode(beam=4, order="best-first", length_penalty=2.0, stopping=stopping)
        woods = Woods(chance(9, end=1.0))
        found[stopping] = marked(BestFirst, decode, 1)(woods, [12] * 12)
        rows[stopping] = woods.asked
    assert rows[NOW] < rows[EVER] / 2
    scores = {name: [line[0].score for line in lines] for name, lines in found.items()}
    assert scores[NOW] != scores[EVER]
    assert all(now <= ever + 1e-6 for now, ever in zip(scores[NOW], scores[EVER], strict=True))


def test_a_model_that_is_sure_is_asked_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_first, "FEW", 1)
    limits, model = [12] * 12, remembered(chance(20, peak=12.0, end=10.0))
    woods, stepper = Woods(model), Recomputing(model, len(limits), 5)
    decode = Decode(beam=5, stopping=EVER)
    found = marked(BestFirst, replace(decode, order="best-first"), 1)(woods, limits)
    marked(BeamSearch, decode, 1)(stepper, torch.tensor(limits))
    written = sum(1 + len(line[0].tokens) for line in found)
    assert written <= woods.asked < 1.5 * written
    assert woods.asked < sum(stepper.steps) / 2


@pytest.mark.parametrize("stopping", ["beam-ended", EVER, NOW])
def test_beam_one_is_greedy(stopping: str) -> None:
    limits, model = [11, 4, 9, 1, 6], remembered(chance(9, end=1.0))
    decode = Decode(beam=1, order="best-first", stopping=stopping, length_penalty=3.0)
    found = marked(BestFirst, decode)(Woods(model), limits)
    wanted = [greedy(model, row, limit, [0, 1]) for row, limit in enumerate(limits)]
    assert [[h.tokens for h in line] for line in found] == [[tokens] for tokens in wanted]
    assert toy_translator(beam=1, order="best-first", stopping=stopping).translate(LINES) == (
        toy_translator(beam=1).translate(LINES)
    )


def test_forests_are_forests() -> None:
    assert isinstance(Woods(chance(5)), Forest)
    assert isinstance(Seq2SeqForest(toy_model(), Ragged.of([[7, END]]), 0), Forest)


@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_translators_find_the_same_in_any_company(position: str, core: str) -> None:
    """Sentences come and go, alone or among others, and move in the cache."""
    by_length = toy_translator(position, core, beam=3, stopping=EVER, shortest=2)
    wanted = by_length.search(LINES)
    assert len({tuple(h.tokens) for line in wanted for h in line}) > 9
    how = replace(by_length.decode, order="best-first")
    same(replace(by_length, decode=how).search(LINES), wanted)
    few = replace(by_length, decode=replace(how, batch_tokens=20))
    same(few.search(LINES[::-1], n_best=1), [line[:1] for line in wanted[::-1]])


@pytest.mark.parametrize("changes", [{"kv_heads": 1}, {"core": "dense"}, {"decoder_layers": 1}])
def test_other_shapes_of_models(changes: dict[str, Any]) -> None:
    core = changes.pop("core", "fused")
    layers = changes.pop("decoder_layers", 2)
    model = toy_model("rotary", core, layers=layers, **changes)
    by_length = Translator(model, toy_tokenizer(), Decode(beam=4, stopping=EVER, longest_extra=5))
    ours = replace(by_length, decode=replace(by_length.decode, order="best-first"))
    same(ours.search(LINES), by_length.search(LINES))


@pytest.mark.parametrize("eight", [False, True])
def test_in_float32_and_in_eight_bits(eight: bool) -> None:
    """With weights as a CPU reads them best, and with so many tokens that blocks are looked at."""
    model = toy_model("sinusoidal", dim=32, vocab_size=1100).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)  # so that no rounding decides
    how = Decode(beam=4, stopping=EVER, longest_extra=6, banned=tuple(BANNED))
    by_length = Translator(in_int8(model) if eight else model, toy_tokenizer(), how)
    ours = replace(by_length, decode=replace(how, order="best-first"))
    same(ours.search(LINES, n_best=2), [line[:2] for line in by_length.search(LINES)])


def test_hypotheses_are_those_of_full_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far apart in the tree, one or several at a time, one of them twice: what is laid out for one
    is put away for another and comes back. Sentences come later, leave and move."""
    monkeypatch.setattr(tree_cache, "ROOM", 2)
    model, (source, real) = toy_model("learned"), toy_source(5, 3, 8)
    sources = Ragged.of([row[own].tolist() for row, own in zip(source, real, strict=True)])
    forest, next_logits = Seq2SeqForest(model, sources, 0), full_pass(model, source, real)
    draw, trees = random.Random(1), [[([START], [0])] for _ in range(3)]
    homes, new, again = [0, 1], 1, 0
    with torch.no_grad():
        forest.read(range(2))
        for turn in range(50):
            asked = [
                (home, one)
                for home in homes
                for one in [*trees[home][-new:], *again * trees[home][-new:][:1]]
            ]
            tokens, paths = zip(*(one for _, one in asked), strict=True)
            logits = forest.step([one[-1] for one in tokens], paths)
            for row, (home, (prefix, _)) in enumerate(asked):
                wanted = next_logits(torch.tensor([home]), torch.tensor([prefix]))[0]
                torch.testing.assert_close(logits[row], wanted, atol=1e-5, rtol=1e-5)
            new, again = (1, 0) if turn < 15 else (draw.randint(1, 3), draw.randint(0, 1))
            for tree in (trees[home] for home in homes):
                known = [one for one in tree[-4:] if len(one[0]) < 20] or tree[:9]
                for parent, path in draw.choices(known, k=new):
                    tree.append(([*parent, draw.randint(7, 14)], [*path, len(tree)]))
            if turn == 8:
                homes = [0, 1, 2]
                forest.read(range(2, 3))
            if turn == 40:
                homes = [2, 1]
                forest.keep(homes)


def test_what_a_sentence_held_is_for_the_next_one() -> None:
    """Many sentences, two at a time, need no more slots than the hypotheses of two."""
    held = []

    class Watched(Seq2SeqForest):
        def keep(self, trees: Sequence[int]) -> None:
            super().keep(trees)
            held.append(self.cache._most)

    translator = toy_translator(beam=2, order="best-first", stopping=EVER, batch_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translate, "Seq2SeqForest", Watched)
        translator.search(["a b c", "d e f"] * 12)
    assert len(held) > 10
    assert held[-1] == held[2] <= 4 * tree_cache.ROOM


def test_it_tells_how_far_it_is() -> None:
    told: list[int] = []
    translator = toy_translator(beam=2, order="best-first", stopping=EVER, batch_tokens=30)
    translator.search(LINES, told.append)
    assert told == sorted(told)
    assert told[-1] == len(LINES)
    assert translator.search([]) == []


def test_whole_beams_are_no_rule_for_it() -> None:
    with pytest.raises(UserError, match=r"none-better-ever or decode\.stopping=none-better-now"):
        Decode(order="best-first")
    assert not Decode(order="best-first", beam=1).best_first


def test_what_searches_by_length_alone_refuses_it() -> None:
    how = Decode(beam=2, order="best-first", stopping=EVER)
    tokenizer = toy_tokenizer()
    rnn = RnnConfig(vocab_size=15, dim=16).build()
    gpt = GptConfig(vocab_size=15, dim=16, layers=1, heads=2).build()
    one = Translator(toy_model(), tokenizer, how)
    for search in (
        lambda: Translator(rnn, tokenizer, how).translate(["a"]),
        lambda: together([one, one]).translate(["a"]),
        lambda: Generator(gpt, tokenizer, how).search([[7]], 3),
        lambda: BeamSearch(how, start=START, end=END),
    ):
        with pytest.raises(UserError, match=r"set decode\.order=length"):
            search()
    alone = replace(how, beam=1)
    assert len(Translator(rnn, tokenizer, alone).translate(["a"])) == 1


def test_the_room_of_short_texts_is_not_that_of_long_ones_before() -> None:
    cache, owner = TreeCache(torch.device("cpu")), torch.nn.Identity()

    def read(rows: int) -> None:
        cache.add([{owner: (torch.zeros(rows, 2, 3, 4), torch.zeros(rows, 2, 3, 4))}])

    def step(paths: list[list[int]]) -> tuple[Tensor, Tensor]:
        cache.ask(paths)
        new = torch.randn(len(paths), 2, 1, 4)
        found = cache.extend(owner, new, new)
        cache.advance(1)
        return found

    read(1)
    for place in range(3 * ROOM):
        keys, _ = step([list(range(place + 1))])
        assert keys.shape[2] == place + 1
        assert keys[0, :, :place].ne(0).all()
    cache.keep([], 0)
    read(50)
    step([[0]] * 50)
    assert cache._laid[owner][0].shape[:2] == (50, ROOM)
