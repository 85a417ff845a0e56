"""Beam search against greedy loops, brute force, a plain restatement, and other batches."""

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models
from torch import Tensor
from toys import (
    CELLS,
    END,
    LONGEST,
    PAD,
    SCHEMES,
    START,
    SUPPRESSED,
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
from manyheads.decode.decoder import after_sources
from manyheads.errors import UserError
from manyheads.ops import logsumexp
from manyheads.tokenizer.tokenizer import Tokenizer

LENGTHS = (3, 8, 1, 5, 12, 7)
LIMITS = [11, 4, 9, 11, 6, 11]
# All stopping rules with several penalties, limits, first tokens and minimum lengths.
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


def log_probability(next_logits: NextLogits, sentence: int, tokens: list[int]) -> float:
    """log P of the tokens and the end after them, one prefix at a time."""
    total, prefix = 0.0, [START]
    for token in [*tokens, END]:
        logits = next_logits(torch.tensor([sentence]), torch.tensor([prefix]))[0].double()
        total += float(logits.log_softmax(-1)[token])
        prefix.append(token)
    return total


def plain_search(
    next_logits: NextLogits, sentence: int, limit: int, suppressed: list[int], decode: Decode
) -> list[Hypothesis]:
    """Beam search with lists, as the settings define it."""

    def penalty(length: int) -> float:
        base = float(length if decode.penalty == "length" else (5 + length) / 6)
        return base**decode.length_penalty

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
                    allowed = token not in suppressed and not too_early
                if allowed:
                    grown.append((log + more, [*tokens, token]))
        grown = sorted(grown, reverse=True)[: 2 * decode.beam]
        for log, tokens in grown[: decode.beam]:
            if tokens[-1] == END or length == limit:
                text = tokens[:-1] if tokens[-1] == END else tokens
                ended.append(Hypothesis(text, log, log / penalty(length)))
        ended = sorted(ended, key=lambda h: -h.score)[: decode.beam]
        alive = [(log, tokens) for log, tokens in grown if tokens[-1] != END][: decode.beam]
        enough = len(ended) == decode.beam
        if alive and enough and decode.beam > 1 and decode.stopping == "heuristic":
            enough = alive[0][0] / penalty(length) <= ended[-1].score
        # "exact" continues to the limit here.
        if enough and (decode.beam == 1 or decode.stopping != "exact"):
            break
    return ended


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return toy_source(*LENGTHS)


@pytest.mark.parametrize(
    ("length", "alpha", "gnmt", "by_length"),
    [(1, 0.6, 1.0, 1.0), (7, 1.0, 2.0, 7.0), (7, 0.5, 2**0.5, 7**0.5), (13, 2.0, 9.0, 169.0)],
)
def test_length_penalty(length: int, alpha: float, gnmt: float, by_length: float) -> None:
    """((5 + |y|) / 6)^α or |y|^α, of a number and of a tensor."""
    for value in (length, torch.tensor([length])):
        assert float(length_penalty(value, alpha)) == pytest.approx(gnmt)
        assert float(length_penalty(value, alpha, "length")) == pytest.approx(by_length)


def test_batch_sizes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    default, chosen = Decode(), Decode(batch_tokens=7)
    assert default.forward_tokens == default.decode_tokens(cpu) < default.decode_tokens(gpu)
    assert chosen.forward_tokens == chosen.decode_tokens(cpu) == chosen.decode_tokens(gpu) == 7


def test_sessions_implement_the_protocol() -> None:
    assert isinstance(after_sources(toy_model(), *toy_source(2)), DecoderSession)
    assert isinstance(Recomputing(chance(5), 1), DecoderSession)


def test_beam_one_is_greedy() -> None:
    """The likeliest token that is not suppressed, again and again, until the end or the limit."""
    model, limits, texts = chance(8, end=1.0), [9, 1, 6, 9, 2, 7], []
    for sentence, limit in enumerate(limits):
        tokens: list[int] = []
        while len(tokens) < limit - 1 and END not in tokens:
            logits = model(torch.tensor([sentence]), torch.tensor([[START, *tokens]]))[0]
            tokens.append(max(range(2, 8), key=logits.tolist().__getitem__))
        texts.append([token for token in tokens if token != END])
    session = Recomputing(model, len(limits))
    results = beam_search(Decode(beam=1), [0, 1])(session, START, torch.tensor(limits))
    assert [[h.tokens for h in nbest] for nbest in results] == [[text] for text in texts]
    assert len({len(text) for text in texts}) > 2


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_a_beam_that_holds_everything_is_brute_force(alpha: float) -> None:
    """All 40 texts of at most 3 tokens out of 3 words, in order of log P / lp, and no others."""
    words, limit, model = [3, 4, 5], 4, chance(7)
    expected = []
    for sentence in range(3):
        hypotheses = []
        for size in range(limit):
            for tokens in map(list, product(words, repeat=size)):
                log = log_probability(model, sentence, tokens)
                hypotheses.append(Hypothesis(tokens, log, log / ((6 + size) / 6) ** alpha))
        expected.append(sorted(hypotheses, key=lambda h: -h.score))
    for beam in (40, 47):
        search = beam_search(Decode(beam=beam, length_penalty=alpha), [0, 1, 6])
        results = search(Recomputing(model, 3), START, torch.tensor([limit] * 3))
        same(results, expected)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
def test_every_definition_is_its_plain_search(definition: dict[str, Any]) -> None:
    """Penalty, stopping, limit, first token and minimum length; beam 1 is greedy search."""
    limits = [10, 1, 6, 10, 2, 7]
    for beam, end in ((1, 1.0), (3, 2.0), (4, -2.0), (5, 0.0)):
        model, decode = chance(9, end=end), Decode(beam=beam, **definition)
        results = beam_search(decode, [0, 1])(
            Recomputing(model, len(limits)), START, torch.tensor(limits)
        )
        same(results, [plain_search(model, *row, [0, 1], decode) for row in enumerate(limits)])


def test_definitions_differ() -> None:
    """Except that with α ≤ 0 scores only fall, so that "heuristic" equals "exact"."""
    limits, texts = torch.tensor([10] * 40), set()
    for definition in DEFINITIONS:
        search = beam_search(Decode(beam=3, **definition), [0, 1])
        results = search(Recomputing(chance(9, end=1.0), len(limits)), START, limits)
        texts.add(str([h.tokens for nbest in results for h in nbest]))
    falling = [definition for definition in DEFINITIONS if definition["length_penalty"] <= 0]
    assert len(texts) == len(DEFINITIONS) - len(falling) // 3


@pytest.mark.parametrize("stopping", ["early", "heuristic", "exact"])
@pytest.mark.parametrize(
    ("penalty", "alpha"), [("gnmt", 0.6), ("length", -1.0), ("length", 0.0), ("length", 1.0)]
)
def test_fewer_hypotheses_stop_earlier_and_are_the_same(
    stopping: str, penalty: str, alpha: float
) -> None:
    limits = torch.tensor([12] * 20)
    decode = Decode(beam=4, penalty=penalty, length_penalty=alpha, stopping=stopping)
    results, steps = [], []
    for n_best in (1, 2, 4):
        session = Recomputing(chance(8, peak=3.0, end=1.0), len(limits))
        results.append(beam_search(decode, [0, 1], n_best)(session, START, limits))
        steps.append(sum(session.steps))
    for n_best, hypotheses in zip((1, 2), results, strict=False):
        first, best = ([nbest[:n_best] for nbest in x] for x in (hypotheses, results[-1]))
        same(first, best)
    assert steps == sorted(steps)
    # "early" with α ≥ 1 decides little before it stops.
    assert steps[0] < steps[-1] or (stopping, alpha) == ("early", 1.0)


def test_each_sentence_may_have_its_start_token() -> None:
    starts, model, decode = [3, 6, 3, 4], chance(8, end=1.0), Decode(beam=3)
    expected = []
    for number, start in enumerate(starts):
        shifted: NextLogits = lambda homes, p, n=number: model(homes + n, p)  # type: ignore[misc]  # noqa: E731
        search = beam_search(decode, [0, 1])
        expected += search(Recomputing(shifted, 1), start, torch.tensor([9]))
    results = beam_search(decode, [0, 1])(
        Recomputing(model, 4), torch.tensor(starts), torch.tensor([9] * 4)
    )
    same(results, expected)


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_cached_steps_are_full_passes(position: str, core: str) -> None:
    """The cache, its reordering and its shrinking change nothing."""
    model, (source, padding) = toy_model(position, core), batch()
    for beam in (1, 3):
        with torch.no_grad():
            session = Recomputing(full_pass(model, source, padding), len(LENGTHS))
            expected = beam_search(Decode(beam=beam))(session, START, torch.tensor(LIMITS))
        same(searched(model, source, padding, LIMITS, beam=beam), expected)
        assert len({len(nbest[0].tokens) for nbest in expected}) > 2


@pytest.mark.parametrize(
    ("position", "core", "beam"), [(*scheme, (1, 5)[n % 2]) for n, scheme in enumerate(SCHEMES)]
)
def test_a_batch_is_its_sentences(position: str, core: str, beam: int) -> None:
    """Results depend neither on the other sentences nor on the order nor on padding."""
    model, (source, padding) = toy_model(position, core), batch()
    single = []
    for row, limit in enumerate(LIMITS):
        text = source[row : row + 1, padding[row]]
        single += searched(model, text, torch.ones_like(text) > 0, [limit], beam=beam)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [4, 1, 4]):
        limits = [LIMITS[row] for row in order]
        results = searched(model, source[order], padding[order], limits, beam=beam)
        same(results, [single[row] for row in order])


@pytest.mark.parametrize("early", [{4}, {7, 0, 2}, {1, 2, 3, 4, 5, 6, 7}])
@pytest.mark.parametrize("beam", [1, 3])
def test_other_sentences_may_finish_early_or_late(
    beam: int, early: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished sentence does not change while it waits to leave the batch."""
    monkeypatch.setattr(beam_module, "SHRINK", 4)
    decode = Decode(beam=beam, length_penalty=6.0)
    short, long = chance(8, end=3.0), chance(8, end=-9.0)

    def model(homes: Tensor, prefixes: Tensor) -> Tensor:
        ends = torch.isin(homes, torch.tensor([*early]))[:, None]
        return torch.where(ends, short(homes, prefixes), long(homes, prefixes))

    limits = [14, 11, 14, 9, 12, 14, 13, 10]
    session = Recomputing(model, len(limits))
    results = beam_search(decode, [0, 1])(session, START, torch.tensor(limits))
    same(results, [plain_search(model, *row, [0, 1], decode) for row in enumerate(limits)])
    # A single finished sentence waits in the batch, several leave it.
    rows = len(limits) * beam
    assert (session.steps[5] == rows) == (len(early) == 1)
    assert session.steps[-1] < rows


def test_hypotheses_have_the_scores_of_teacher_forcing() -> None:
    """log P / lp by one pass; sorted, distinct, within their limits, no suppressed token."""
    model, (source, padding) = toy_model("rotary"), batch()
    results = searched(model, source, padding, LIMITS, beam=4, length_penalty=1.5)
    for row, (nbest, limit) in enumerate(zip(results, LIMITS, strict=True)):
        scores = [h.score for h in nbest]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(h.tokens) for h in nbest}) == 4
        for h in nbest:
            assert len(h.tokens) < limit
            assert not {*h.tokens} & {*SUPPRESSED, END}
            target = torch.tensor([[START, *h.tokens]])
            labels = torch.tensor([*h.tokens, END])
            with torch.no_grad():
                logits = model(source[row : row + 1], target, padding[row : row + 1])[0]
            log = float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())
            assert h.log_probability == pytest.approx(log, abs=2e-5)
            assert h.score == pytest.approx(log / ((5 + len(labels)) / 6) ** 1.5, abs=2e-5)


def test_suppressed_tokens_keep_their_probability() -> None:
    """log P is the model's: suppressing a token does not make the others likelier."""
    logits = torch.tensor([0.0, 0.0, 1.0, 5.0, 2.0])
    session = Recomputing(lambda homes, prefixes: logits.expand(len(homes), -1), 1)
    [[best]] = beam_search(Decode(beam=1), [0, 1, 3])(session, START, torch.tensor([2]))
    log_probs = logits.log_softmax(-1)
    assert best.tokens == [4]
    assert best.log_probability == pytest.approx(float(log_probs[4] + log_probs[END]))


def test_the_end_cannot_be_suppressed() -> None:
    """A tokenizer whose separator is its end must still be able to end."""
    search = beam_search(Decode(beam=2), [0, 1, END])
    assert len(search(Recomputing(chance(6, end=4.0), 1), START, torch.tensor([5]))[0]) == 2


@pytest.mark.parametrize("batch_tokens", [1, 20, 4096])
def test_translations_do_not_depend_on_batch_size(batch_tokens: int) -> None:
    lines = ["a b c", "h", "b b b b b b b", "", "c d e f g h a b", "g a", "d", "a b c"]
    single = [toy_translator(beam=3).search([line])[0] for line in lines]
    same(toy_translator(beam=3, batch_tokens=batch_tokens).search(lines), single)
    assert len({tuple(nbest[0].tokens) for nbest in single}) > 3
    assert toy_translator().search([]) == toy_translator().translate([]) == []


def test_a_tokenizer_without_padding_uses_its_end() -> None:
    lines = ["a b c d e f", "h", "", "c c"]
    usual = toy_translator(beam=3, suppress_tokens=tuple(SUPPRESSED))
    bare = dataclasses.replace(usual, tokenizer=toy_tokenizer(pad="<fill>"))
    assert (usual.special_tokens.padding, bare.special_tokens.padding) == (PAD, END)
    same(bare.search(lines), usual.search(lines))


def test_searching_records_no_gradients() -> None:
    translator, recorded = toy_translator(), list[bool]()
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam": 0},
        {"max_length_extra": 0},
        {"length_penalty": -1.0},
        {"length_penalty": 6.0, "penalty": "length"},
        {"length_penalty": math.nan},
        {"min_length": -1},
        {"start": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"decode.{next(iter(wrong))}"):
        parse(Decode, wrong, "decode")


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    for wrong in ({"start": 15}, {"forced_bos": 99}, {"end": 15}, {"suppress_tokens": (3, 15)}):
        with pytest.raises(UserError, match=f"decode.{next(iter(wrong))}="):
            toy_translator(**wrong).translate(["a b"])


def test_a_translator_uses_the_tokens_of_its_settings() -> None:
    """Start, end, first token and source start may differ from the tokenizer's."""
    default = toy_translator(beam=2).search(["a b c"])
    explicit = toy_translator(beam=2, start=START, end=END, suppress_tokens=tuple(SUPPRESSED))
    same(explicit.search(["a b c"]), default)
    words = {"start": 8, "end": 9, "forced_bos": 10, "suppress_tokens": (0, 12)}
    for nbest in toy_translator(beam=3, **words).search(["a b c", "h"]):
        assert {h.tokens[0] for h in nbest} == {10}
        assert not {0, 9, 12} & {token for h in nbest for token in h.tokens}
    translator, source = toy_translator(beam=3, source_start=11), torch.tensor([[11, 7, 8, 9, END]])
    limit = translator.decode.limit(5, LONGEST)
    same(
        translator.search(["a b c"]),
        searched(translator.model, source, source > 0, [limit], beam=3),
    )


def test_a_tokenizer_need_not_have_every_special_token() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    special = SpecialTokens(Tokenizer(library), Decode())
    assert (special.end, special.suppressed) == (1, [0, 1])
    with pytest.raises(UserError, match="no start token"):
        _ = special.start
    explicit = SpecialTokens(Tokenizer(library), Decode(start=2, suppress_tokens=()))
    assert (explicit.start, explicit.suppressed) == (2, [])


def test_a_learned_table_is_never_exceeded() -> None:
    source, padding = toy_source(LONGEST, 2)
    results = searched(toy_model("learned"), source, padding, [LONGEST, LONGEST], beam=2)
    assert max(len(h.tokens) for nbest in results for h in nbest) < LONGEST


def test_logsumexp_of_large_and_small_logits() -> None:
    torch.manual_seed(1)
    logits = 9 * torch.randn(6, 700)
    logits[0] += 1000
    logits[1] -= 1000
    logits[2, 3:] = NEVER
    expected = logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logsumexp(logits).double(), expected, rtol=1e-6, atol=1e-6)
