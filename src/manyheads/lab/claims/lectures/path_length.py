"""Training steps needed to learn to carry a value over a distance."""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.nn import functional as F

from manyheads.baselines.rnn import LanguageModel, RnnLm, RnnLmConfig
from manyheads.lab.claims.claim import Claim, Judged, Measured, Points, Setting
from manyheads.lab.claims.trial import learn
from manyheads.models.gpt import Gpt, GptConfig

VALUES, FILLERS, ROWS = 8, 8, 32
DISTANCES, LARGE_DISTANCES = (8, 32, 96), (8, 32, 128, 512)
LIMIT, LARGE_LIMIT = 300, 3000
RATES = (3e-3, 1e-2)  # the one with which a model learns sooner counts
LEARNED, LATELY = 0.2, 10  # nats, in the mean of so many steps; by chance it is log 8


class Learned(Exception):
    """Training can stop."""


def transformer(distance: int) -> Gpt:
    """A Transformer with about as many weights as the LSTM."""
    vocabulary = VALUES + FILLERS + 1
    config = GptConfig(
        vocab_size=vocabulary, dim=32, layers=2, heads=2, max_length=distance + 1, dropout=0.0
    )
    return config.build()


def lstm(distance: int) -> RnnLm:
    return RnnLmConfig(dropout=0.0, vocab_size=VALUES + FILLERS + 1, dim=56, layers=1).build()


def keeping(distance: int) -> RnnLm:
    """An LSTM whose gates are initialised to keep a state for T steps (chrono initialisation).

    b_f = log T, b_i = −log T: each step replaces about 1/T of the state (Tallec and Ollivier 2018).
    """
    model = lstm(distance)
    model.set_gates(math.log(distance), -math.log(distance))
    return model


MODELS: dict[str, Callable[[int], LanguageModel]] = {
    "transformer": transformer,
    "lstm": lstm,
    "keeping": keeping,
}


def texts(distance: int, random: torch.Generator) -> torch.Tensor:
    """A value, random fillers, and at the end the token that asks for the value."""
    tokens = torch.randint(VALUES, VALUES + FILLERS, (ROWS, distance + 1), generator=random)
    tokens[:, 0] = torch.randint(VALUES, (ROWS,), generator=random)
    tokens[:, -1] = VALUES + FILLERS
    return tokens


def steps_needed(
    model: LanguageModel, distance: int, rate: float, limit: int, random: torch.Generator
) -> int:
    """Steps until the model predicts the value at the end of the text, at most `limit`."""
    device, losses = model.tokens.weight.device, [math.inf]

    def loss_of(step: int) -> torch.Tensor:
        if step >= LATELY and sum(losses[-LATELY:]) / LATELY < LEARNED:
            raise Learned
        tokens = texts(distance, random).to(device)
        logits = F.linear(model.hidden(tokens)[:, -1], model.tokens.weight)
        loss = F.cross_entropy(logits, tokens[:, 0])
        losses.append(float(loss.detach()))
        return loss

    with suppress(Learned):
        learn(model, loss_of, steps=limit, rate=rate, warmup=20)
    return len(losses) - 1


def measure(setting: Setting) -> Measured:
    distances = LARGE_DISTANCES if setting.large else DISTANCES
    limit = LARGE_LIMIT if setting.large else LIMIT
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in MODELS}
    for name, build in MODELS.items():
        for distance in distances:
            taken[name][distance] = []
            for seed in setting.seeds:
                best = limit
                for rate in RATES:
                    torch.manual_seed(seed)
                    model, random = build(distance).to(setting.device), torch.Generator()
                    random.manual_seed(seed)
                    best = min(best, steps_needed(model, distance, rate, best, random))
                taken[name][distance].append(float(best))
    numbers = {
        f"{name}, {end}": taken[name][distance]
        for name in MODELS
        for end, distance in (("near", distances[0]), ("far", distances[-1]))
    }
    lines: dict[str, Points] = {
        label: [(distance, sum(each) / len(each)) for distance, each in taken[name].items()]
        for label, name in (
            ("Transformer", "transformer"),
            ("LSTM", "lstm"),
            ("LSTM with gates initialised for the distance", "keeping"),
        )
    }
    numbers["limit"] = [float(limit)] * len(setting.seeds)
    numbers["distance"] = [float(distances[-1])] * len(setting.seeds)
    numbers["shortest"] = [float(distances[0])] * len(setting.seeds)
    return Measured(
        numbers=numbers,
        lines=lines,
        across="distance",
        up=f"steps until learned, at most {limit}",
        logarithmic=("across", "up"),
    )


def judge(measured: Measured) -> Judged:
    limit, reported = measured.mean("limit"), measured.reported
    learned = measured.most("transformer, far") < limit and all(
        measured.most(f"{name}, near") < limit for name in MODELS
    )
    times = {
        name: measured.mean(f"{name}, far") / measured.mean("transformer, far")
        for name in ("lstm", "keeping")
    }

    def steps(name: str) -> str:
        return reported(name) + (" or more" if measured.most(name) >= limit else "")

    why = (
        f"over {measured.mean('distance'):.0f} positions a Transformer learns it in "
        f"{steps('transformer, far')} steps, an LSTM of as many parameters in "
        f"{steps('lstm, far')}, and one with gates initialised for the distance in "
        f"{steps('keeping, far')} ({times['lstm']:.2g} and {times['keeping']:.2g} times as many); "
        f"over {measured.mean('shortest'):.0f} in {steps('transformer, near')}, "
        f"{steps('lstm, near')} and {steps('keeping, near')}"
    )
    if not learned or times["lstm"] < 3:
        return Judged("fails", why)
    if times["keeping"] < 3:
        return Judged(
            "depends", f"holds only if the LSTM is not initialised for the distance: {why}"
        )
    return Judged("holds", why)


CLAIM = Claim(
    sentence="Transformers capture long-distance dependencies more easily than LSTMs: any two "
    "positions of a text are one step apart, however far they are from each other.",
    lectures="001, 003",
    criterion="a Transformer learns to carry a value over the longest distance in every seed, and "
    "an LSTM, also one with gates initialised for the distance, needs on average at least three "
    "times as many steps; all of them learn the shortest distance",
    measure=measure,
    judge=judge,
)
