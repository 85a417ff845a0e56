"""Claims about translation: tiny experiments, and broken models change the verdict."""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch

from manyheads.lab.claims import runner, translators, trial
from manyheads.lab.claims.claim import Setting
from manyheads.lab.claims.lectures import (
    attention_aligns,
    beam_size,
    bottleneck,
    five_scores,
    label_smoothing,
    tied_embeddings,
)
from manyheads.lab.claims.word_for_word import END, MARKS, START, Words

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
