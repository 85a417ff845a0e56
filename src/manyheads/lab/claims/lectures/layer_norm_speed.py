"""Layer normalisation and the number of training steps to reach a loss."""

from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

from torch import nn

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, listed
from manyheads.lab.claims.phrases import Curve, Initial, Phrases, ended, phrases, tuned, writer
from manyheads.lab.claims.trial import learn, stretches
from manyheads.models.gpt import Gpt
from manyheads.nn.layers import Residual

SENTENCES, ROWS, LENGTH, DIM = 3000, 16, 16, 32
WARMUP, LARGER = 20, 4
FASTER = 0.75
LEARNED = 0.5  # nats below the unigram entropy; a model that gains less has not trained


@dataclass(frozen=True)
class Stack:
    """A stack, its training steps, and learning rates around its best."""

    layers: int
    steps: int
    rates: tuple[float, ...]
    normed: bool = True
    initial: Initial = "xavier"


DEEP = Stack(8, 150, (1e-2, 3e-2))
KINDS = ("with", "without")  # norms
CASES = {
    "2 layers": (Stack(2, 400, (1e-2, 3e-2)), Stack(2, 400, (3e-3, 1e-2), normed=False)),
    "8 layers": (DEEP, Stack(8, 150, (3e-4, 1e-3, 3e-3), normed=False)),
    "8 layers, small at first without norms": (
        DEEP,
        Stack(8, 150, (3e-3, 1e-2, 3e-2), normed=False, initial="normal-scaled"),
    ),
}


def unnormed(model: Gpt) -> Gpt:
    """Remove every norm of the model."""
    for part in model.modules():
        if isinstance(part, Residual):
            part.norm = nn.Identity()
    model.decoder.last_norm = nn.Identity()
    return model


def losses(setting: Setting, text: Phrases, stack: Stack, rate: float, seed: int) -> Curve:
    model = writer(
        text, layers=stack.layers, dim=DIM, length=LENGTH, seed=seed, initial=stack.initial
    )
    model = model if stack.normed else unnormed(model)
    steps = LARGER * stack.steps if setting.large else stack.steps
    loss_of = text.loss_of(model, ROWS, LENGTH, seed)
    return learn(model, loss_of, steps=steps, rate=rate, warmup=WARMUP)


def steps_to(losses: Curve, target: float) -> int:
    """The first step at which the mean over the last tenth of the training reaches the target."""
    span = max(1, len(losses) // 10)
    for step in range(span, len(losses)):
        if fmean(losses[step - span : step]) <= target:
            return step
    return len(losses)


def share(normed: Curve, plain: Curve) -> float:
    """Steps with norms per step without, to the lowest loss that both reach."""
    target = max(ended(normed), ended(plain))
    return steps_to(normed, target) / steps_to(plain, target)


def measure(setting: Setting) -> Measured:
    text = phrases(SENTENCES, setting.device)
    numbers: dict[str, list[float]] = {"entropy": [text.entropy] * len(setting.seeds)}
    lines: dict[str, list[tuple[int, float]]] = {}

    @cache
    def trained(stack: Stack) -> list[Curve]:
        return tuned(partial(losses, setting, text, stack), stack.rates, setting.seeds)[1]

    for name, stacks in CASES.items():
        curves_by_kind = [trained(stack) for stack in stacks]
        pairs = list(zip(*curves_by_kind, strict=True))
        if all(ended(curve) <= text.entropy - LEARNED for pair in pairs for curve in pair):
            numbers[f"{name}, steps"] = [share(normed, plain) for normed, plain in pairs]
        for kind, curves in zip(KINDS, curves_by_kind, strict=True):
            numbers[f"{name}, loss {kind}"] = [ended(curve) for curve in curves]
            lines[f"{name}, {kind} norms"] = stretches(curves[0])
    return Measured(
        numbers=numbers, lines=lines, across="step", up="loss, nats", logarithmic=("up",)
    )


def judge(measured: Measured) -> Judged:
    enough = measured.mean("entropy") - LEARNED
    trains = {
        (name, kind): measured.most(f"{name}, loss {kind}") <= enough
        for name in CASES
        for kind in KINDS
    }
    both = [name for name in CASES if all(trains[name, kind] for kind in KINDS)]
    never = [name for name in CASES if trains[name, "with"] and not trains[name, "without"]]
    faster = [name for name in both if measured.most(f"{name}, steps") <= FASTER]
    why = "; ".join(_summary(measured, name, name in both) for name in CASES)
    why += f" (the unigram entropy is {measured.reported('entropy')} nats)"
    if len(faster) == len(CASES):
        return Judged("holds", why)
    parts = [f"norms are faster with {listed(faster)}"] if faster else []
    parts += [f"models without norms do not train with {listed(never)}"] if never else []
    if not parts:
        return Judged("fails", why)
    return Judged("depends", f"only part of it holds: {listed(parts)}; {why}")


def _summary(measured: Measured, name: str, both: bool) -> str:
    steps = "steps cannot be compared"
    if both:
        share = measured.reported(f"{name}, steps")
        steps = f"norms take {share} of the steps without, to the loss that both reach"
    end, other = (measured.reported(f"{name}, loss {kind}") for kind in KINDS)
    return f"with {name}, {steps}, and in the end the loss is {end} nats, without norms {other}"


CLAIM = Claim(
    sentence="Layer normalisation makes a model train faster.",
    lectures="000, 001",
    criterion="with layer norms the loss that both models reach takes at most three quarters of "
    "the steps, each at its best rate, in every seed: with 2 layers, with 8, and with 8 and a "
    "smaller initialisation without norms; steps are compared if both end 0.5 nats or more below "
    "the unigram entropy, and it depends if only the stack with norms does",
    measure=measure,
    judge=judge,
)
