"""BERT's 80/10/10 masking against 100 % masks: how well states of unmasked words can be probed."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.masking import Masked
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.reading import (
    FIRST,
    UNLABELLED,
    Labelled,
    Labeller,
    Labels,
    Rows,
    Size,
    Topics,
    draw,
    hidden_words,
    labelled_states,
    masked_loss,
    pretrained,
)
from manyheads.lab.claims.trial import learn
from manyheads.models.bert import Bert

RECIPES = {"80/10/10": Masked(), "masks alone": Masked(mask_fraction=1.0, random_fraction=0.0)}
READINGS = ("word", "sense", "tuned")
POINTS = 0.01
TEXTS, TEST_TEXTS = 8000, 500
WORD_TEXTS, SENSE_TEXTS = 100, 32  # labelled texts: few, so that accuracies can differ
PROBE_STEPS, PROBE_RATE, TUNING_STEPS, TUNING_RATE = 300, 1e-2, 100, 1e-3
SMALL = Size(dim=64, layers=2, longest=16, rows=64, steps=300, rate=5e-3)
LARGE = Size(dim=256, layers=4, longest=16, rows=256, steps=2000, rate=1e-3)


def read_off(model: Bert, seen: Labelled, new: Labelled, seed: int) -> float:
    """The accuracy on new texts of a linear probe, trained on the frozen states."""
    with torch.no_grad():
        (states, labels), (others, expected) = (labelled_states(model, x) for x in (seen, new))
    torch.manual_seed(seed)
    classes = int(max(labels.max(), expected.max())) + 1
    probe = nn.Linear(states.shape[-1], classes).to(states.device)
    random = np.random.default_rng(seed)

    def loss_of(step: int) -> Tensor:
        chosen = draw(len(states), 256, random).to(states.device)
        return F.cross_entropy(probe(states[chosen]), labels[chosen])

    learn(probe, loss_of, steps=PROBE_STEPS, rate=PROBE_RATE)
    return float((probe(others).argmax(-1) == expected).float().mean())


def readings(recipe: Masked, size: Size, seed: int, device: torch.device) -> dict[str, float]:
    """Accuracies of probes on unmasked words' states: the word, and which of its two senses."""
    language, random = Topics(seed=seed), np.random.default_rng(seed)
    rows, topics = language.draw(TEXTS, random)
    new, new_topics = language.draw(TEST_TEXTS, random)
    model = pretrained(rows, language.words, size, recipe, seed, device)

    def words(texts: Rows) -> Labelled:
        return Labelled(texts, texts.masked_fill(texts == FIRST, UNLABELLED))

    def senses(texts: Rows, of: Labels) -> Labelled:
        every = of[:, None].expand_as(texts)
        return Labelled(texts, every.masked_fill(~language.is_double(texts), UNLABELLED))

    sense, new_sense = senses(rows, topics)[:SENSE_TEXTS], senses(new, new_topics)
    hidden = hidden_words(new, language.words, RECIPES["masks alone"], np.random.default_rng(seed))
    with torch.no_grad():
        loss = float(masked_loss(model, new, *hidden))
    values = {
        "loss": loss,
        "word": read_off(model, words(rows[:WORD_TEXTS]), words(new), seed),
        "sense": read_off(model, sense, new_sense, seed),
    }
    tuned = Labeller(model, language.topics).to(device)
    tuned.fit(sense, batch=32, steps=TUNING_STEPS, rate=TUNING_RATE, seed=seed)
    return {**values, "tuned": tuned.accuracy(new_sense)}


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    by_recipe = {
        name: [readings(recipe, size, seed, setting.device) for seed in setting.seeds]
        for name, recipe in RECIPES.items()
    }
    numbers = {
        f"{reading}, {name}": [one[reading] for one in each]
        for name, each in by_recipe.items()
        for reading in (*READINGS, "loss")
    }
    return Measured(numbers=numbers)


def judge(measured: Measured) -> Judged:
    ours, theirs = RECIPES
    titles = {
        "word": "which word it is",
        "sense": "which sense it has",
        "tuned": "which sense, after fine-tuning",
    }
    leads = {
        reading: measured.mean(f"{reading}, {ours}") - measured.mean(f"{reading}, {theirs}")
        for reading in READINGS
    }
    why = "; ".join(
        f"{titles[reading]}: {measured.reported(f'{reading}, {ours}')} right with {ours}, "
        f"{measured.reported(f'{reading}, {theirs}')} with {theirs}"
        for reading in READINGS
    )
    ahead = [titles[reading] for reading in READINGS if leads[reading] >= POINTS]
    if not ahead:
        return Judged("fails", why)
    if len(ahead) < len(READINGS):
        return Judged("depends", f"holds only for {' and '.join(ahead)}; {why}")
    return Judged("holds", why)


CLAIM = Claim(
    sentence="BERT masks 80 % of the words that it has to predict, replaces 10 % and leaves 10 %: "
    "this gives good states of unmasked words, as fine-tuning sees no masks.",
    lectures="000",
    criterion="on texts without masks 80/10/10 is at least 1 point of accuracy ahead of 100 % "
    "masks: in predicting from an unmasked word's state the word, its sense, and its sense after "
    "fine-tuning",
    measure=measure,
    judge=judge,
)
