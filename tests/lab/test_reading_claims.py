"""Claims about encoders: small runs give the judged numbers, broken parts change the verdict."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from manyheads.data.masking import Masked
from manyheads.lab.claims import reading
from manyheads.lab.claims.claim import Judged, Measured, Setting
from manyheads.lab.claims.lectures import (
    both_directions,
    masking_recipe,
    positions_beyond_training,
    pretraining_and_labels,
    rare_words,
)

ONCE = Setting(seeds=(1,))
Tiny = Callable[[pytest.MonkeyPatch], ModuleType]


def tiny_both_directions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(both_directions, "TRAIN_PAIRS", 300)
    monkeypatch.setattr(both_directions, "TEST_PAIRS", 50)
    small = replace(both_directions.SMALL, dim=16, layers=1, steps=3)
    monkeypatch.setattr(both_directions, "SMALL", small)
    return both_directions


def tiny_masking_recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, count in (("TEXTS", 200), ("TEST_TEXTS", 50), ("PROBE_STEPS", 5)):
        monkeypatch.setattr(masking_recipe, name, count)
    monkeypatch.setattr(masking_recipe, "TUNING_STEPS", 3)
    small = replace(masking_recipe.SMALL, dim=16, layers=1, steps=3)
    monkeypatch.setattr(masking_recipe, "SMALL", small)
    return masking_recipe


def tiny_positions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    small = positions_beyond_training.SMALL
    small = replace(small, length=8, dim=16, layers=1, steps=3, train_pairs=100, test_rows=8)
    monkeypatch.setattr(positions_beyond_training, "SMALL", small)
    return positions_beyond_training


def tiny_pretraining(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, count in (("TEXTS", 200), ("TEST_TEXTS", 50), ("TUNING_STEPS", 3)):
        monkeypatch.setattr(pretraining_and_labels, name, count)
    small = replace(pretraining_and_labels.SMALL, dim=16, layers=1, steps=3)
    monkeypatch.setattr(pretraining_and_labels, "SMALL", small)
    return pretraining_and_labels


def tiny_rare_words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    small = replace(rare_words.SMALL, nouns=10, pairs=80, tested=2, dim=16, steps=2, rows=8)
    monkeypatch.setattr(rare_words, "ROOM", 32)
    monkeypatch.setattr(rare_words, "SMALL", small)
    return rare_words


TINY = (
    *(tiny_both_directions, tiny_masking_recipe, tiny_positions, tiny_pretraining),
    tiny_rare_words,
)


@pytest.mark.parametrize("tiny", TINY)
def test_a_small_run_gives_what_is_judged(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = tiny(monkeypatch).CLAIM
    measured = claim.measure(ONCE)
    assert all(len(values) == 1 for values in measured.numbers.values())
    assert claim.judge(measured).verdict in ("holds", "depends", "fails")


def judged(module: ModuleType, **numbers: float) -> Judged:
    actual: Judged = module.CLAIM.judge(
        Measured(numbers={name.replace("_", " "): [value] for name, value in numbers.items()})
    )
    return actual


def test_every_double_word_has_two_topics_and_every_clear_one_has_one() -> None:
    language = reading.Topics(topics=4, clear=20, double=12, plain=5)
    rows, topics = language.draw(3000, np.random.default_rng(1))
    met: dict[int, set[int]] = {}
    for row, topic in zip(rows[:, 1:].tolist(), topics.tolist(), strict=True):
        for word in row:
            met.setdefault(word - reading.FIRST - 1, set()).add(topic)
    assert [len(met[word]) for word in range(37)] == [1] * 20 + [2] * 12 + [4] * 5
    double = set(rows[language.is_double(rows)].tolist())
    assert double == {word + reading.FIRST + 1 for word in range(20, 32)}


def test_only_words_are_hidden_and_only_they_are_scored() -> None:
    language = reading.Topics()
    rows, _ = language.draw(50, np.random.default_rng(1))
    rows[:, -3:] = reading.PAD
    inputs, places = reading.hidden_words(
        rows,
        language.words,
        Masked(mask_fraction=1.0, random_fraction=0.0),
        np.random.default_rng(2),
    )
    assert not places[:, 0].any()
    assert not places[:, -3:].any()
    assert bool((inputs[places] == reading.MASK).all())
    assert bool((inputs[~places] == rows[~places]).all())


def test_a_causal_reader_of_words_never_knows_what_comes() -> None:
    torch.manual_seed(1)
    size = replace(both_directions.SMALL, dim=16, layers=1)
    rows = torch.randint(3, 20, (4, 9))
    later = torch.cat([rows[:, :5], torch.randint(3, 20, (4, 4))], 1)
    for both in (True, False):
        model = both_directions.reader(both, 20, size, 1).eval()
        same = torch.allclose(model.hidden(rows)[:, :5], model.hidden(later)[:, :5])
        assert same is not both


def test_rare_compounds_are_not_in_training() -> None:
    requested = rare_words.compounds(rare_words.SMALL, 1)
    assert not set(requested.rare.targets) & set(requested.train.targets)
    assert all(requested.train.targets.count(target) >= 5 for target in requested.common.targets)
