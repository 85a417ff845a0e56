"""The experiment of each claim, made tiny: it gives what is judged, and broken parts show.

tests/lab/test_claims.py tests the criteria, and runs the experiments that take a moment.
"""

from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyheads.baselines.rnn import RnnLmConfig
from manyheads.data.masking import Masked
from manyheads.lab.claims import reading, translators, trial
from manyheads.lab.claims.claim import Setting
from manyheads.lab.claims.lectures import (
    approximations,
    attention_aligns,
    beam_size,
    both_directions,
    bottleneck,
    feed_forward_needed,
    five_scores,
    flash_moves_less,
    label_smoothing,
    layer_norm_speed,
    masking_recipe,
    norm_and_warmup,
    parallel_over_places,
    path_length,
    positions_beyond_training,
    pretraining_and_labels,
    rare_words,
    residuals,
    several_heads,
    squares_of_length,
    tied_embeddings,
    where_parameters_go,
)
from manyheads.lab.claims.word_for_word import END, START, Words
from manyheads.nn.attention import Dense, SelfAttention
from manyheads.nn.layers import Residual
from manyheads.nn.local import Longformer

CPU = torch.device("cpu")
ONCE = Setting(seeds=(1,))
TRANSLATOR = (
    *("data.train_pairs=200", "data.valid_pairs=20", "data.test_pairs=20"),
    *("tokens.vocab_size=400", "model.max_length=30", "train.too_long=skip"),
    *("model.dim=16", "model.ffn_dim=16", "model.layers=1", "model.heads=2"),
    *("train.batch_tokens=200", "train.steps=4", "train.warmup_steps=1"),
    "decode.bleu_sentences=0",
)
TRAINED = cache(trial.trained)  # several experiments need the same run
STACKS = {
    "2 layers": (
        layer_norm_speed.Stack(2, 4, (1e-3, 1e-2)),
        layer_norm_speed.Stack(2, 4, (1e-3, 1e-2), normed=False),
    )
}
HEADS: dict[str, object] = {
    "WIDE": 16,
    "WIDE_HEADS": 2,
    "SHORT": 4,
    "LONG": 8,
    "ROUNDS": 1,
    "STEPS": 2,
    "RATES": (1e-2,),
    "ROWS": 2,
    "DIM": 8,
    "TEST_TEXTS": 2,
}
FLASH: dict[str, object] = {
    "LENGTHS": (128, 512),
    "BLOCK": 64,
    "ROUNDS": 1,
    "COUNTED": 128,
    "FAST": 2**18,
    "SMALL_FAST": 2**16,
}
TINY: dict[ModuleType, dict[str, object]] = {
    approximations: {"LENGTH": 16, "STEPS": 2},
    attention_aligns: {"STEPS": 3},
    beam_size: {"BEAMS": (1, 4, 16)},
    both_directions: {
        "TRAIN_PAIRS": 300,
        "TEST_PAIRS": 50,
        "SMALL": replace(both_directions.SMALL, dim=16, layers=1, steps=3),
    },
    bottleneck: {"STEPS": 3},
    feed_forward_needed: {"LAYERS": 2, "DIM": 8, "ROWS": 2},
    five_scores: {"STEPS": 3, "TIMED_SHAPE": (1, 16, 64), "ROUNDS": 1},
    flash_moves_less: FLASH,
    label_smoothing: {},
    layer_norm_speed: {"SENTENCES": 40, "DIM": 8, "CASES": STACKS},
    masking_recipe: {
        "TEXTS": 200,
        "TEST_TEXTS": 50,
        "PROBE_STEPS": 5,
        "TUNING_STEPS": 3,
        "SMALL": replace(masking_recipe.SMALL, dim=16, layers=1, steps=3),
    },
    norm_and_warmup: {"SENTENCES": 40, "STEPS": 4, "DIM": 8, "LAYERS": 2, "WARMUP": 2},
    parallel_over_places: {
        "SMALL": parallel_over_places.Sizes(dim=64, tokens=32, lengths=(4, 32), rounds=1)
    },
    path_length: {"DISTANCES": (2, 8), "LIMIT": 60, "RATES": (1e-2,)},
    positions_beyond_training: {
        "SMALL": replace(
            positions_beyond_training.SMALL,
            length=8,
            dim=16,
            layers=1,
            steps=3,
            train_pairs=100,
            test_rows=8,
        )
    },
    pretraining_and_labels: {
        "TEXTS": 200,
        "TEST_TEXTS": 50,
        "TUNING_STEPS": 3,
        "SMALL": replace(pretraining_and_labels.SMALL, dim=16, layers=1, steps=3),
    },
    rare_words: {
        "ROOM": 32,
        "SMALL": replace(rare_words.SMALL, nouns=10, pairs=80, tested=2, dim=16, steps=2, rows=8),
    },
    residuals: {"SENTENCES": 40, "STEPS": 3, "DIM": 8, "DEPTHS": (1, 2), "RATES": (1e-2,)},
    several_heads: HEADS,
    squares_of_length: {
        "SMALL": replace(
            squares_of_length.SMALL,
            few=1,
            lengths=(8, 16),
            rows=1,
            length=4,
            widths=(64, 128),
            rounds=1,
        )
    },
    tied_embeddings: {"STEPS": 3, "TRAINED": 400, "VALID": 20},
    where_parameters_go: {"SIZES": ("gpt3-small", "gpt3-xl")},
}
# After so few steps nothing is learned, and that is no evidence for them.
UNLEARNED = (approximations, attention_aligns, bottleneck)
MEASURED_BELOW = (flash_moves_less, parallel_over_places, tied_embeddings)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translators, "SMALL", TRANSLATOR)
    monkeypatch.setattr(translators, "trained", TRAINED)
    for module, constants in TINY.items():
        for name, value in constants.items():
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    "module",
    [module for module in TINY if module not in MEASURED_BELOW],
    ids=lambda module: module.__name__.split(".")[-1],
)
def test_what_is_measured_can_be_judged(module: ModuleType) -> None:
    measured = module.CLAIM.measure(ONCE)
    assert all(len(values) == 1 for values in measured.numbers.values())
    judged = module.CLAIM.judge(measured)
    assert judged.why
    assert judged.verdict in ("holds", "depends", "fails")
    if module in UNLEARNED:
        assert judged.verdict == "fails"


# --- broken parts change the verdict ---


def test_broken_parts_change_what_depth_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict() -> str:
        return feed_forward_needed.judge(feed_forward_needed.measure(ONCE)).verdict

    with monkeypatch.context() as broken:  # residual connections that are none
        broken.setattr(Residual, "forward", lambda self, x, part: part(self.norm(x)))
        assert verdict() == "fails"
    with monkeypatch.context() as broken:  # attention that looks nowhere else
        broken.setattr(SelfAttention, "forward", lambda self, x, sight, position, cache=None: x)
        assert verdict() == "fails"


def test_what_a_window_cannot_reach_is_not_learned() -> None:
    torch.manual_seed(1)
    config = replace(path_length.transformer(8).config, attention=Longformer(window=1))
    random = torch.Generator().manual_seed(1)
    assert path_length.steps_needed(config.build(), 8, 1e-2, 60, random) == 60


def test_a_model_that_goes_place_by_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = parallel_over_places.measure(replace(ONCE, threads=2))
    assert measured.numbers["transformer steps, n"] == [0]
    assert measured.numbers["lstm steps, n"][0] > 0.8
    assert measured.numbers["threads"] == [2]
    assert parallel_over_places.judge(measured).verdict in ("holds", "depends", "fails")

    def recurrent(dim: int, length: int, device: torch.device) -> dict[str, nn.Module]:
        vocabulary = parallel_over_places.VOCABULARY
        config = RnnLmConfig(dropout=0.0, vocab_size=vocabulary, dim=dim, layers=1)
        return {"transformer": config.build(), "lstm": config.build()}

    monkeypatch.setattr(parallel_over_places, "models", recurrent)
    single = parallel_over_places.measure(replace(ONCE, threads=1))
    assert "lstm speed-up" not in single.numbers
    assert parallel_over_places.judge(single).verdict == "fails"


def test_the_matrix_is_found_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = flash_moves_less.measure(ONCE)
    assert flash_moves_less.judge(measured).verdict in ("holds", "depends")
    assert measured.least("dense memory, n") > 1.7
    monkeypatch.setattr(flash_moves_less, "Tiled", lambda block: Dense())
    assert flash_moves_less.judge(flash_moves_less.measure(ONCE)).verdict == "fails"


def test_a_head_that_is_not_tied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, build = tied_embeddings.CLAIM, tied_embeddings.model_of
    measured = claim.measure(ONCE)
    assert 0.25 < measured.least("saved") < 0.5
    assert claim.judge(measured).verdict != "fails"
    monkeypatch.setattr(
        tied_embeddings, "model_of", lambda words, tie, setting: build(words, "none", setting)
    )
    assert claim.judge(claim.measure(ONCE)).verdict == "fails"


# --- what the experiments are made of ---


def test_an_lstm_of_the_claims_reads_only_the_past() -> None:
    torch.manual_seed(1)
    model = RnnLmConfig(dropout=0.0, vocab_size=9, dim=8, layers=2).build()
    tokens = torch.randint(9, (2, 6))
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 9
    assert torch.equal(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(tokens)[:, 4:], model(other)[:, 4:])


def test_the_labels_are_the_preceding_words() -> None:
    class Echo(nn.Module):
        """Logits of the word at each position itself, for every predicted offset."""

        def forward(self, words: Tensor) -> Tensor:
            hot = nn.functional.one_hot(words, several_heads.WORDS).float()
            return hot.repeat(1, 1, several_heads.PLACES)

    random = torch.Generator().manual_seed(1)
    scores, expected = several_heads.scores_and_labels(Echo(), 2, random, CPU)
    places = several_heads.LENGTH - several_heads.PLACES
    local = scores.argmax(-1).view(2, places, -1)
    before = expected.view(2, places, -1)
    for back in range(1, several_heads.PLACES + 1):
        assert torch.equal(before[:, back:, back - 1], local[:, :-back, 0])


def test_a_target_has_the_words_of_its_source() -> None:
    words = Words.of(10, 1, CPU)
    source, target, expected = words.sentences(5, 6, torch.Generator().manual_seed(1))
    assert expected.equal(words.table[source])
    assert (target[:, 0] == START).all()
    assert target[:, 1:].equal(expected[:, :-1])
    assert (source[:, -1] == END).all()


def test_only_words_are_hidden_and_only_they_are_scored() -> None:
    language = reading.Topics()
    rows, _ = language.draw(50, np.random.default_rng(1))
    rows[:, -3:] = reading.PAD
    every = Masked(mask_fraction=1.0, random_fraction=0.0)
    inputs, places = reading.hidden_words(rows, language.words, every, np.random.default_rng(2))
    assert not places[:, 0].any()
    assert not places[:, -3:].any()
    assert bool((inputs[places] == reading.MASK).all())
    assert bool((inputs[~places] == rows[~places]).all())


def test_rare_compounds_are_not_in_training() -> None:
    requested = rare_words.compounds(rare_words.SMALL, 1)
    assert not set(requested.rare.targets) & set(requested.train.targets)
    assert all(requested.train.targets.count(target) >= 5 for target in requested.common.targets)
