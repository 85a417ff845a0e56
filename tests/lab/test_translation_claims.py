"""Claims about translation: tiny experiments, and broken models change the verdict."""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from manyheads.data.translation import Corpus
from manyheads.lab.claims import runner, translators, trial, word_for_word
from manyheads.lab.claims.claim import Measured, Setting
from manyheads.lab.claims.lectures import (
    attention_aligns,
    beam_size,
    bottleneck,
    five_scores,
    label_smoothing,
    tied_embeddings,
)
from manyheads.lab.claims.word_for_word import END, MARKS, START, Words
from manyheads.nn.scores import AdditiveScore, InnerScore

CPU = torch.device("cpu")
ONCE = Setting(seeds=(1,))
TINY = (
    *("data.train_pairs=200", "data.valid_pairs=20", "data.test_pairs=20"),
    *("tokens.vocab_size=400", "model.max_length=30", "train.too_long=skip"),
    *("model.dim=16", "model.ffn_dim=16", "model.layers=1", "model.heads=2"),
    *("train.batch_tokens=200", "train.steps=4", "train.warmup_steps=1"),
    "decode.bleu_sentences=0",
)
TRAINED = cache(trial.trained)  # here several ask for the same


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translators, "SMALL", TINY)
    monkeypatch.setattr(translators, "trained", TRAINED)
    monkeypatch.setattr(beam_size, "BEAMS", (1, 4, 16))
    for module in (attention_aligns, bottleneck, five_scores, tied_embeddings):
        monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr(tied_embeddings, "TRAINED", 400)
    monkeypatch.setattr(tied_embeddings, "VALID", 20)
    monkeypatch.setattr(five_scores, "TIMED_SHAPE", (1, 16, 64))
    monkeypatch.setattr(five_scores, "ROUNDS", 1)


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# --- what the experiments are made of ---


def test_a_target_has_the_words_of_its_source() -> None:
    words = Words.of(10, 1, CPU)
    source, target, expected = words.sentences(5, 6, random())
    assert expected.equal(words.table[source])
    assert (target[:, 0] == START).all()
    assert target[:, 1:].equal(expected[:, :-1])
    assert (source[:, -1] == END).all()
    assert words.table.sort().values.equal(torch.arange(10 + MARKS))


def test_words_of_the_second_kind_go_to_the_end_in_their_order() -> None:
    words = Words.of(10, 1, CPU, kinds=2)
    source, _, expected = words.sentences(20, 6, random())
    back = words.table.argsort()
    for row, target, places in zip(source, expected, words.places(source), strict=True):
        said = back[target]
        assert said.equal(row[places])
        assert places[-1] == 6
        for kind in (0, 1):
            local = row[:-1][row[:-1] % 2 == kind]
            assert said[:-1][said[:-1] % 2 == kind].equal(local)
        assert all(a % 2 <= b % 2 for a, b in pairwise(said[:-1].tolist()))


def test_accuracy_is_that_of_what_a_model_says() -> None:
    words = Words.of(10, 1, CPU)

    class Knows(nn.Module):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return nn.functional.one_hot(words.table[source], words.vocabulary).float()

    class Guesses(nn.Module):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return torch.zeros(*source.shape, words.vocabulary)

    assert word_for_word.accuracy(Knows(), words, 5) == 1
    assert word_for_word.accuracy(Guesses(), words, 5) < 0.2


def test_the_guess_by_places_is_sure_where_places_tell() -> None:
    assert attention_aligns.place_error(Words.of(10, 1, CPU, kinds=1), 1) == 0
    assert attention_aligns.place_error(Words.of(10, 1, CPU, kinds=2), 1) > 0.5


def test_the_same_vector_reaches_the_decoder_from_every_place() -> None:
    torch.manual_seed(1)
    model = bottleneck.model_of(12, attention=False, large=False).double()
    source, target, _ = Words.of(10, 1, CPU).sentences(2, 6, random())
    seen: list[Tensor] = []
    model.attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    model(source, target)
    memory = model.encode(source)
    assert seen[0].equal(seen[0][:, :1].expand_as(seen[0]))
    half = model.config.dim // 2
    assert seen[0][:, 0, :half].equal(memory.states[:, -1, :half])
    assert seen[0][:, 0, half:].equal(memory.states[:, 0, half:])


def test_stretches_are_means() -> None:
    assert trial.stretches([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [(2, 2.0), (4, 6.0)]
    assert trial.stretches([2.0]) == [(1, 2.0)]


# --- each experiment as a whole ---


MODULES = (attention_aligns, beam_size, bottleneck, five_scores, label_smoothing)


@pytest.mark.parametrize("name", [module.__name__.split(".")[-1] for module in MODULES])
def test_what_is_measured_can_be_judged(name: str, tiny: None) -> None:
    claim = runner.find(name.replace("_", "-"))
    measured = claim.measure(ONCE)
    assert all(len(values) == 1 for values in measured.numbers.values())
    assert all(math.isfinite(value) for [value] in measured.numbers.values())
    assert measured.lines
    judged = claim.judge(measured)
    assert judged.why
    if name in ("attention_aligns", "bottleneck"):  # nothing is learned in so few steps
        assert judged.verdict == "fails"


def test_a_head_that_is_not_tied_is_found(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, build = tied_embeddings.CLAIM, tied_embeddings.model_of
    measured = claim.measure(ONCE)
    assert 0.25 < measured.least("saved") < 0.5
    assert claim.judge(measured).verdict != "fails"
    monkeypatch.setattr(
        tied_embeddings, "model_of", lambda words, tie, setting: build(words, "none", setting)
    )
    assert claim.judge(claim.measure(ONCE)).verdict == "fails"


def test_perplexity_and_bleu_are_of_the_same_sentences(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    full = translators.read

    def noted(trial: trial.Trial, split: str) -> Corpus:
        read.append(split)
        return full(trial, split)

    monkeypatch.setattr(translators, "read", noted)
    label_smoothing.measure(ONCE)
    assert read == ["test"] * 4  # BLEU and perplexity, of two


def test_a_form_dearer_than_the_additive_one_is_found() -> None:
    names = [f"{name}, {kind}" for name in five_scores.RATES for kind in five_scores.SCORES]
    numbers = {name: [1.0] for name in names}
    numbers |= {f"time, {kind}": [1.0] for kind in five_scores.SCORES}
    numbers |= {"time, additive": [3.0], "time, bilinear": [4.0]}
    judged = five_scores.judge(Measured(numbers=numbers))
    assert judged.verdict == "fails"


def test_a_wide_beam_may_be_a_little_better_by_chance() -> None:
    numbers = {"greedy": [50.0], "beam 4": [52.0], "likelier": [0.5]}
    numbers |= {"length": [0.9], "penalised length": [0.95]}
    verdicts = {
        more: beam_size.judge(Measured(numbers={**numbers, "beam 16": [52.0 + more]})).verdict
        for more in (-1.0, 0.4, 0.6)
    }
    assert verdicts == {-1.0: "holds", 0.4: "holds", 0.6: "depends"}


def test_an_additive_score_that_is_none_is_found(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(five_scores, "TIMED_SHAPE", (1, 64, 64))  # beside which starting is nothing
    monkeypatch.setattr(five_scores, "ROUNDS", 5)
    assert five_scores.costs(1, ONCE)["additive"] > 2
    monkeypatch.setattr(AdditiveScore, "forward", lambda self, q, k: InnerScore(1.0)(q, k))
    assert five_scores.costs(1, ONCE)["additive"] < 2
