"""Beam search against greedy loops, brute force, a plain restatement, itself in other batches."""

import dataclasses
import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models
from torch import Tensor
from toys import (
    BANNED,
    CELLS,
    END,
    LONGEST,
    PAD,
    SCHEMES,
    START,
    WORDS,
    NextLogits,
    Recomputing,
    beam_search,
    chance,
    full_pass,
    same,
    searched,
    toy_model,
    toy_source,
    toy_tokenizer,
    toy_translator,
)

from manyheads.config import parse
from manyheads.decode import beam as beam_module
from manyheads.decode.beam import (
    NEVER,
    Decode,
    DecoderSession,
    Hypothesis,
    SpecialTokens,
    length_penalty,
)
from manyheads.decode.decoder import Seq2SeqSession
from manyheads.errors import UserError
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ops import logsumexp
from manyheads.tokenizer.tokenizer import Tokenizer

LENGTHS = (3, 8, 1, 5, 12, 7)
LIMITS = [11, 4, 9, 11, 6, 11]


def greedy(next_logits: NextLogits, sentence: int, limit: int, banned: Iterable[int]) -> list[int]:
    """The likeliest token that is not banned, again and again, until the end or the limit."""
    tokens: list[int] = []
    while len(tokens) < limit - 1:
        logits = next_logits(torch.tensor([sentence]), torch.tensor([[START, *tokens]]))[0]
        allowed = [token for token in range(len(logits)) if token not in set(banned)]
        best = max(allowed, key=lambda token: float(logits[token]))
        if best == END:
            break
        tokens.append(best)
    return tokens


def log_probability(next_logits: NextLogits, sentence: int, tokens: list[int]) -> float:
    """log P of the tokens and the end after them, one prefix at a time."""
    total, prefix = 0.0, [START]
    for token in [*tokens, END]:
        logits = next_logits(torch.tensor([sentence]), torch.tensor([prefix]))[0].double()
        total += float(logits.log_softmax(-1)[token])
        prefix.append(token)
    return total


def plain_search(
    next_logits: NextLogits, sentence: int, limit: int, banned: list[int], decode: Decode
) -> list[Hypothesis]:
    """Beam search with lists, as the settings define it."""

    def penalty(length: int) -> float:
        return float(length if decode.penalty == "length" else (5 + length) / 6) ** (
            decode.length_penalty
        )

    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[Hypothesis] = []
    for length in range(1, limit + 1):
        grown = []
        for log, tokens in alive:
            logits = next_logits(torch.tensor([sentence]), torch.tensor([[START, *tokens]]))[0]
            for token, more in enumerate(logits.double().log_softmax(-1).tolist()):
                if length == limit and decode.at_limit != "truncate":
                    allowed, more = token == END, more if decode.at_limit == "force-eos" else 0.0
                elif length == 1 and decode.forced_bos is not None:
                    allowed, more = token == decode.forced_bos, 0.0
                else:
                    too_early = token == END and length <= decode.min_length
                    allowed = token not in banned and not too_early
                if allowed:
                    grown.append((log + more, [*tokens, token]))
        grown = sorted(grown, reverse=True)[: 2 * decode.beam]
        for log, tokens in grown[: decode.beam]:
            if tokens[-1] == END or length == limit:
                written = tokens[:-1] if tokens[-1] == END else tokens
                ended.append(Hypothesis(written, log, log / penalty(length)))
        ended = sorted(ended, key=lambda h: -h.score)[: decode.beam]
        alive = [(log, tokens) for log, tokens in grown if tokens[-1] != END][: decode.beam]
        enough = len(ended) == decode.beam
        if alive and enough and decode.beam > 1 and decode.stopping == "heuristic":
            enough = alive[0][0] / penalty(length) <= ended[-1].score
        # To see what ever comes, this goes on to the limit.
        if enough and (decode.beam == 1 or decode.stopping != "exact"):
            break
    return ended


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return toy_source(*LENGTHS)


def one_by_one(
    model: Seq2Seq, source: Tensor, real: Tensor, limits: list[int], **decode: Any
) -> list[list[Hypothesis]]:
    """Each sentence alone, without padding."""
    found = []
    for row, limit in enumerate(limits):
        own = source[row : row + 1, real[row]]
        found += searched(model, own, torch.ones_like(own, dtype=torch.bool), [limit], **decode)
    return found


@pytest.mark.parametrize(
    ("length", "alpha", "penalty"),
    [(1, 0.6, 1.0), (7, 1.0, 2.0), (7, 0.5, 2**0.5), (13, 2.0, 9.0), (31, 0.0, 1.0), (1, 9.0, 1.0)],
)
def test_length_penalty_is_that_of_gnmt(length: int, alpha: float, penalty: float) -> None:
    """lp(y) = ((5 + |y|) / 6)^α, of a number and of a tensor."""
    assert length_penalty(float(length), alpha) == pytest.approx(penalty)
    found = length_penalty(torch.tensor([float(length)]), alpha)
    assert float(found) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("length", "alpha", "penalty"), [(1, 3.0, 1.0), (8, 1.0, 8.0), (9, 0.5, 3.0), (4, -1.0, 0.25)]
)
def test_length_penalty_by_length(length: int, alpha: float, penalty: float) -> None:
    """lp(y) = |y|^α, of a number and of a tensor; it may reward short texts."""
    assert length_penalty(length, alpha, "length") == pytest.approx(penalty)
    found = length_penalty(torch.tensor([length]), alpha, "length")
    assert float(found) == pytest.approx(penalty)


def test_a_gpu_writes_more_at_once_unless_told() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    unless_told, told = Decode(), Decode(batch_tokens=7)
    assert unless_told.forward_tokens == unless_told.decode_tokens(cpu)
    assert unless_told.decode_tokens(cpu) < unless_told.decode_tokens(gpu)
    assert told.forward_tokens == told.decode_tokens(cpu) == told.decode_tokens(gpu) == 7


def test_sessions_keep_the_protocol() -> None:
    assert isinstance(Seq2SeqSession(toy_model(), *toy_source(2)), DecoderSession)
    assert isinstance(Recomputing(chance(5), 1), DecoderSession)


@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_beam_one_is_greedy(position: str, core: str) -> None:
    """Beam 1 writes what a greedy loop over uncached full passes writes."""
    model, (source, real) = toy_model(position, core), batch()
    with torch.no_grad():
        wanted = [
            greedy(full_pass(model, source, real), row, limit, BANNED)
            for row, limit in enumerate(LIMITS)
        ]
    found = searched(model, source, real, LIMITS, beam=1)
    assert [[h.tokens for h in line] for line in found] == [[tokens] for tokens in wanted]
    assert len({len(tokens) for tokens in wanted}) > 2


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("beam", [40, 47])
def test_a_beam_that_holds_everything_is_brute_force(beam: int, alpha: float) -> None:
    """All 40 sentences of at most 3 tokens of 3 words, in order of log P / lp, and no others."""
    words, limit, sentences = [3, 4, 5], 4, 3
    model = chance(7)
    wanted = []
    for sentence in range(sentences):
        line = []
        for size in range(limit):
            for tokens in map(list, product(words, repeat=size)):
                log = log_probability(model, sentence, tokens)
                score = log / ((5 + size + 1) / 6) ** alpha
                line.append(Hypothesis(tokens, log, score))
        wanted.append(sorted(line, key=lambda h: -h.score))
    decode = Decode(beam=beam, length_penalty=alpha)
    search = beam_search(decode, [0, 1, 6])
    found = search(Recomputing(model, sentences), START, torch.tensor([limit] * sentences))
    assert [len(line) for line in found] == [40] * sentences
    same(found, wanted)


def test_brute_force_of_a_transformer() -> None:
    """With a real decoder: all 9 sentences of at most one token of 8 words, and their order."""
    model, (source, real) = toy_model(), toy_source(4, 2)
    words = range(len(BANNED) + 1, len(BANNED) + 1 + len(WORDS))
    wanted = []
    with torch.no_grad():
        for row in range(2):
            line = []
            for size in range(2):
                for tokens in map(list, product(words, repeat=size)):
                    log = log_probability(full_pass(model, source, real), row, tokens)
                    line.append(Hypothesis(tokens, log, log / ((6 + size) / 6) ** 0.6))
            wanted.append(sorted(line, key=lambda h: -h.score))
    same(searched(model, source, real, [2, 2], beam=12), wanted)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_the_search_with_tensors_is_the_search_with_lists(beam: int, alpha: float) -> None:
    """A batch of pure chance gives what a plain loop over one sentence gives, end likely or not."""
    limits = [9, 1, 6, 9, 2, 7]
    for end in (0.0, 2.0, -3.0):
        model, decode = chance(8, end=end), Decode(beam=beam, length_penalty=alpha)
        search = beam_search(decode, [0, 1])
        found = search(Recomputing(model, len(limits)), START, torch.tensor(limits))
        wanted = [
            plain_search(model, row, limit, [0, 1], decode) for row, limit in enumerate(limits)
        ]
        same(found, wanted)


DEFINITIONS: list[dict[str, Any]] = [
    {"stopping": stopping, "penalty": penalty, "length_penalty": alpha, **more}
    for stopping in ("early", "heuristic", "exact")
    for penalty, alpha, more in [
        ("gnmt", 0.6, {"at_limit": "truncate"}),
        ("gnmt", 3.0, {"min_length": 3}),
        ("length", 0.0, {"at_limit": "force-eos-free", "forced_bos": 4}),
        ("length", 1.0, {"at_limit": "truncate", "forced_bos": 5, "min_length": 2}),
        ("length", 2.0, {}),
        ("length", -1.0, {"at_limit": "truncate"}),
        ("length", -0.5, {"at_limit": "force-eos-free", "min_length": 2}),
    ]
]


@pytest.mark.parametrize("chosen", DEFINITIONS, ids=str)
def test_every_definition_is_its_plain_search(chosen: dict[str, Any]) -> None:
    """Penalty, stopping, limit, first token and shortest text mean what a plain loop makes them."""
    limits = [10, 1, 6, 10, 2, 7]
    for beam, end in ((1, 1.0), (3, 2.0), (4, -2.0)):
        model, decode = chance(9, end=end), Decode(beam=beam, **chosen)
        search = beam_search(decode, [0, 1])
        found = search(Recomputing(model, len(limits)), START, torch.tensor(limits))
        wanted = [
            plain_search(model, row, limit, [0, 1], decode) for row, limit in enumerate(limits)
        ]
        same(found, wanted)


def test_definitions_differ() -> None:
    """None of the choices is another one by another name, but for this: with α ≤ 0 a score only
    falls as a text grows, so that none better now is none better ever."""
    limits = torch.tensor([10] * 40)
    texts = set()
    for chosen in DEFINITIONS:
        search = beam_search(Decode(beam=3, **chosen), [0, 1])
        found = search(Recomputing(chance(9, end=1.0), len(limits)), START, limits)
        texts.add(str([h.tokens for line in found for h in line]))
    falling = [chosen for chosen in DEFINITIONS if chosen["length_penalty"] <= 0]
    assert len(texts) == len(DEFINITIONS) - len(falling) // 3


@pytest.mark.parametrize("stopping", ["heuristic", "exact"])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1.0])
def test_n_best_of_every_stopping_rule_are_those_of_the_beam(stopping: str, alpha: float) -> None:
    """Asking for fewer hypotheses stops earlier and changes none of them."""
    limits, steps = torch.tensor([12] * 20), []
    decode = Decode(beam=4, penalty="length", length_penalty=alpha, stopping=stopping)
    found = []
    for n_best in (1, 4):
        search = beam_search(decode, [0, 1], n_best)
        session = Recomputing(chance(8, peak=3.0, end=1.0), len(limits))
        found.append([line[:1] for line in search(session, START, limits)])
        steps.append(sum(session.steps))
    same(*found)
    assert steps[0] < steps[1]


def test_texts_may_begin_with_tokens_of_their_own() -> None:
    """A start for each sentence is the search from each of them, in any batch."""
    starts, model, decode = [3, 6, 3, 4], chance(8, end=1.0), Decode(beam=3)

    def alone(home: int) -> list[Hypothesis]:
        search = beam_search(decode, [0, 1])
        only: NextLogits = lambda homes, prefixes: model(homes + home, prefixes)  # noqa: E731
        return search(Recomputing(only, 1), starts[home], torch.tensor([9]))[0]

    search = beam_search(decode, [0, 1])
    found = search(Recomputing(model, 4), torch.tensor(starts), torch.tensor([9] * 4))
    same(found, [alone(home) for home in range(4)])


@pytest.mark.parametrize("beam", [1, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_a_batch_is_its_sentences(position: str, core: str, beam: int) -> None:
    """What a sentence gets hangs neither on its neighbours nor on its place nor on padding."""
    model, (source, real) = toy_model(position, core), batch()
    alone = one_by_one(model, source, real, LIMITS, beam=beam)
    assert len({len(line[0].tokens) for line in alone}) > 2
    same(searched(model, source, real, LIMITS, beam=beam), alone)
    for order in ([5, 4, 3, 2, 1, 0], [4, 1, 4], [3, 0]):
        limits = [LIMITS[row] for row in order]
        found = searched(model, source[order], real[order], limits, beam=beam)
        same(found, [alone[row] for row in order])


@pytest.mark.parametrize("early", [{0}, {4}, {7, 0, 2}, {1, 2, 3, 4, 5, 6, 7}])
@pytest.mark.parametrize("beam", [1, 3])
def test_neighbours_may_finish_early_or_late(
    beam: int, early: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence that is done stays as it is until enough of its neighbours are done as well,
    also where what it might still find would be ranked higher."""
    monkeypatch.setattr(beam_module, "SHRINK", 4)
    decode = Decode(beam=beam, length_penalty=6.0)
    short, long = chance(8, end=3.0), chance(8, end=-9.0)

    def model(homes: Tensor, prefixes: Tensor) -> Tensor:
        ends = torch.isin(homes, torch.tensor([*early]))[:, None]
        return torch.where(ends, short(homes, prefixes), long(homes, prefixes))

    limits = [14, 11, 14, 9, 12, 14, 13, 10]
    search = beam_search(decode, [0, 1])
    session = Recomputing(model, len(limits))
    found = search(session, START, torch.tensor(limits))
    wanted = [plain_search(model, row, limit, [0, 1], decode) for row, limit in enumerate(limits)]
    same(found, wanted)
    # A single finished sentence did wait in the batch, several did leave it.
    whole = len(limits) * beam
    assert (session.steps[5] == whole) == (len(early) == 1)
    assert session.steps[-1] < whole


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("n_best", [1, 2])
def test_stopping_when_the_best_are_decided_changes_none_of_them(n_best: int, alpha: float) -> None:
    """The n best are those of the whole search, found in fewer steps."""
    decode, limits = Decode(beam=5, length_penalty=alpha), torch.tensor([12] * 30)
    found, steps = [], []
    for wanted in (n_best, 5):
        search = beam_search(decode, [0, 1], wanted)
        session = Recomputing(chance(8, peak=3.0, end=1.0), len(limits))
        found.append([line[:n_best] for line in search(session, START, limits)])
        steps.append(sum(session.steps))
    same(*found)
    assert steps[0] <= steps[1]
    if alpha < 1:  # a strong penalty lets little be decided early
        assert steps[0] < steps[1]


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_cached_steps_are_full_passes(position: str, core: str) -> None:
    """The cache, its reordering and its shrinking change nothing in any cell of the grid."""
    model, (source, real), beam = toy_model(position, core), batch(), 3
    search = beam_search(Decode(beam=beam), BANNED)
    with torch.no_grad():
        session = Recomputing(full_pass(model, source, real), len(LENGTHS))
        wanted = search(session, START, torch.tensor(LIMITS))
    same(searched(model, source, real, LIMITS, beam=beam), wanted)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_scores_are_those_of_teacher_forcing(alpha: float) -> None:
    """score = log P(tokens and end | source) / lp, from one pass over the whole hypothesis."""
    model, (source, real) = toy_model("rotary"), batch()
    found = searched(model, source, real, LIMITS, beam=4, length_penalty=alpha)
    for row, line in enumerate(found):
        for hypothesis in line:
            target = torch.tensor([[START, *hypothesis.tokens]])
            wanted = torch.tensor([*hypothesis.tokens, END])
            with torch.no_grad():
                logits = model(source[row : row + 1], target, real[row : row + 1])[0]
            log = float(logits.log_softmax(-1).gather(1, wanted[:, None]).sum())
            assert hypothesis.log_probability == pytest.approx(log, abs=2e-5)
            penalty = ((5 + len(wanted)) / 6) ** alpha
            assert hypothesis.score == pytest.approx(log / penalty, abs=2e-5)


@pytest.mark.parametrize("beam", [2, 5])
@pytest.mark.parametrize(("position", "core"), SCHEMES)
def test_hypotheses_are_sorted_distinct_and_within_their_limits(
    position: str, core: str, beam: int
) -> None:
    """As many as the beam, best first, no two alike, no banned token, end within the limit."""
    model, (source, real) = toy_model(position, core), batch()
    found = searched(model, source, real, LIMITS, beam=beam)
    for line, limit in zip(found, LIMITS, strict=True):
        assert len(line) == beam
        scores = [h.score for h in line]
        assert scores == sorted(scores, reverse=True)
        assert all(math.isfinite(score) for score in scores)
        assert len({tuple(h.tokens) for h in line}) == beam
        assert max(len(h.tokens) for h in line) <= limit - 1
        assert not {token for h in line for token in h.tokens} & {*BANNED, END}


def test_the_limit_forces_an_end_that_counts() -> None:
    """A model that never ends by itself is ended at the limit and pays the end's price."""
    never = -12.0
    model = chance(6, end=never)
    search = beam_search(Decode(beam=3), [0, 1])
    found = search(Recomputing(model, 2), START, torch.tensor([1, 4]))
    assert [h.tokens for h in found[0]] == [[]]
    assert [len(h.tokens) for h in found[1]] == [3, 3, 3]
    for row, line in enumerate(found):
        for h in line:
            log = log_probability(model, row, h.tokens)
            assert h.log_probability == pytest.approx(log, abs=1e-4)
            assert log < -5


def test_banned_tokens_keep_their_share() -> None:
    """log P is the model's own: forbidding a token does not make the others likelier."""
    logits = torch.tensor([0.0, 0.0, 1.0, 5.0, 2.0])
    search = beam_search(Decode(beam=1), [0, 1, 3])
    found = search(Recomputing(lambda h, p: logits.expand(len(h), -1), 1), START, torch.tensor([2]))
    share = logits.log_softmax(-1)
    assert found[0][0].tokens == [4]
    assert found[0][0].log_probability == pytest.approx(float(share[4] + share[END]))


def test_the_end_cannot_be_banned() -> None:
    """A tokenizer whose separator is its end must still be able to end."""
    search = beam_search(Decode(beam=2), [0, 1, END])
    found = search(Recomputing(chance(6, end=4.0), 1), START, torch.tensor([5]))
    assert len(found[0]) == 2


@pytest.mark.parametrize("batch_tokens", [1, 20, 60, 4096])
def test_the_size_of_batches_does_not_matter(batch_tokens: int) -> None:
    """A translator gives the same n-best lists, in the order of its sentences, in any batches."""
    lines = ["a b c", "h", "b b b b b b b", "", "c d e f g h a b", "g a", "d", "a b c"]
    alone = [toy_translator(beam=3).search([line])[0] for line in lines]
    same(toy_translator(beam=3, batch_tokens=batch_tokens).search(lines), alone)
    assert len({tuple(line[0].tokens) for line in alone}) > 3


def test_a_tokenizer_without_padding_will_do() -> None:
    """Shorter rows are filled up with the end, and nobody looks there."""
    lines = ["a b c d e f", "h", "", "c c"]
    usual = toy_translator(beam=3, suppress_tokens=tuple(BANNED))
    bare = dataclasses.replace(usual, tokenizer=toy_tokenizer(pad="<fill>"))
    with pytest.raises(UserError, match="no pad token"):
        assert bare.tokenizer.pad
    assert (usual.special_tokens.padding, bare.special_tokens.padding) == (PAD, END)
    same(bare.search(lines), usual.search(lines))


def test_no_sentence_is_no_work() -> None:
    """An empty list of sentences is answered by an empty list."""
    assert toy_translator().search([]) == []
    assert toy_translator().translate([]) == []


def test_searching_keeps_no_graph() -> None:
    """Nothing of a search is recorded for a backward pass: neither the encoder nor the decoder."""
    translator = toy_translator()
    recorded: list[bool] = []
    for stack in (translator.model.encoder, translator.model.decoder):
        stack.register_forward_hook(lambda m, i, out: recorded.append(out.requires_grad))
    translator.search(["a b"])
    assert recorded
    assert not any(recorded)


@pytest.mark.parametrize(
    ("source", "longest", "limit"), [(1, 100, 8), (10, 100, 26), (90, 100, 100), (3, 2, 2)]
)
def test_limits_follow_the_source(source: int, longest: int, limit: int) -> None:
    """ratio · source + extra tokens, at most as many as the model has positions for."""
    assert Decode(max_length_ratio=2.0, max_length_extra=6).limit(source, longest) == limit


@pytest.mark.parametrize("wrong", [{"beam": 0}, {"max_length_extra": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    """A beam of none and a translation of no length are mistakes, named by their setting."""
    with pytest.raises(UserError, match=f"decode.{next(iter(wrong))}"):
        parse(Decode, wrong, "decode")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length_penalty": -1.0}, "from 0 to 10 with decode.penalty=gnmt"),
        ({"length_penalty": 6.0, "penalty": "length"}, "from -5 to 5 with decode.penalty=length"),
        ({"length_penalty": math.nan}, "decode.length_penalty"),
        ({"min_length": -1}, "decode.min_length"),
        ({"start": -1}, "decode.start"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], said: str) -> None:
    """The line names the setting and the range."""
    with pytest.raises(UserError, match=said):
        parse(Decode, wrong, "decode")


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    """Before anything is computed, by the name of their setting."""
    for wrong in ({"start": 15}, {"forced_bos": 99}, {"end": 15}, {"suppress_tokens": (3, 15)}):
        with pytest.raises(UserError, match=f"decode.{next(iter(wrong))}="):
            toy_translator(**wrong).translate(["a b"])


def test_a_translator_writes_with_the_tokens_of_its_settings() -> None:
    """Start, end, first and what stands before a source may be others than the tokenizer's."""
    plain = toy_translator(beam=2)
    same(
        toy_translator(beam=2, start=START, end=END, suppress_tokens=tuple(BANNED)).search(
            ["a b c"]
        ),
        plain.search(["a b c"]),
    )
    words = {"start": 8, "end": 9, "forced_bos": 10, "suppress_tokens": (0, 12)}
    found = toy_translator(beam=3, **words).search(["a b c", "h"])
    for line in found:
        assert {h.tokens[0] for h in line} == {10}
        assert not {0, 9, 12} & {token for h in line for token in h.tokens}
    model, source = plain.model, torch.tensor([[11, 7, 8, 9, END]])
    limit = plain.decode.limit(5, LONGEST)
    same(
        toy_translator(beam=3, source_start=11).search(["a b c"]),
        searched(model, source, source > 0, [limit], beam=3),
    )


def test_a_tokenizer_need_not_have_every_special_token() -> None:
    """What is never written is what there is: files from elsewhere have fewer special tokens."""
    inner = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    marks = SpecialTokens(Tokenizer(inner), Decode())
    assert (marks.end, marks.suppressed) == (1, [0, 1])
    with pytest.raises(UserError, match="no start token"):
        _ = marks.start
    assert SpecialTokens(Tokenizer(inner), Decode(start=2, suppress_tokens=())).suppressed == []


def test_a_learned_table_is_never_left() -> None:
    """A limit of all positions is reached without asking for one more."""
    model = toy_model("learned")
    source, real = toy_source(LONGEST, 2)
    found = searched(model, source, real, [LONGEST, LONGEST], beam=2)
    assert max(len(h.tokens) for line in found for h in line) <= LONGEST - 1


def test_logsumexp_of_large_and_small_logits() -> None:
    torch.manual_seed(1)
    logits = 9 * torch.randn(6, 700)
    logits[0] += 1000
    logits[1] -= 1000
    logits[2, 3:] = NEVER
    wanted = logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logsumexp(logits).double(), wanted, rtol=1e-6, atol=1e-6)
