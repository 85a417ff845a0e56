"""Residual connections: the depth up to which a stack learns, and its gradient norms."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.phrases import Curve, Phrases, ended, phrases, tuned, writer
from manyheads.lab.claims.trial import learn
from manyheads.lab.landscape import without_residuals

SENTENCES, ROWS, LENGTH, DIM = 3000, 16, 16, 32
DEPTHS, LARGE_DEPTHS = (1, 2, 4, 12), (1, 2, 4, 8, 16, 32)
STEPS, LARGE_STEPS, WARMUP = 150, 600, 20
RATES = (3e-3, 1e-2)
LEARNED = 0.5  # nats below the unigram entropy
KINDS = ("with", "without")


def losses(setting: Setting, text: Phrases, kind: str, depth: int, rate: float, seed: int) -> Curve:
    model = writer(text, layers=depth, dim=DIM, length=LENGTH, seed=seed)
    loss_of = text.loss_of(model, ROWS, LENGTH, seed)
    steps = LARGE_STEPS if setting.large else STEPS
    with nullcontext() if kind == "with" else without_residuals(model):
        return learn(model, loss_of, steps=steps, rate=rate, warmup=WARMUP)


def slopes(text: Phrases, kind: str, depth: int, seed: int) -> list[float]:
    """‖∂L/∂x‖ before the first block and after each, relative to the last; untrained."""
    model = writer(text, layers=depth, dim=DIM, length=LENGTH, seed=seed)
    states: list[Tensor] = []

    def enter(block: nn.Module, inputs: tuple[object, ...]) -> None:
        assert isinstance(inputs[0], Tensor)
        states.append(inputs[0])

    def leave(block: nn.Module, inputs: tuple[object, ...], state: Tensor) -> None:
        states.append(state)

    model.decoder.blocks[0].register_forward_pre_hook(enter)
    for block in model.decoder.blocks:
        block.register_forward_hook(leave)
    with nullcontext() if kind == "with" else without_residuals(model):
        loss = text.loss_of(model, ROWS, LENGTH, seed)(0)
    sizes = [float(slope.norm()) for slope in torch.autograd.grad(loss, states)]
    return [size / sizes[-1] for size in sizes]


def deepest(nats: dict[int, list[float]], place: int) -> float:
    """The largest depth up to which all stacks learn."""
    layers = 0
    for depth, each in nats.items():
        if each[place] < LEARNED:
            break
        layers = depth
    return float(layers)


def measure(setting: Setting) -> Measured:
    text = phrases(SENTENCES, setting.device)
    depths = LARGE_DEPTHS if setting.large else DEPTHS
    numbers: dict[str, list[float]] = {"layers": [float(depths[-1])] * len(setting.seeds)}
    lines = {}
    for kind in KINDS:
        nats = {}
        for depth in depths:
            run = partial(losses, setting, text, kind, depth)
            _, curves = tuned(run, RATES, setting.seeds)
            nats[depth] = [text.entropy - ended(curve) for curve in curves]
        places = range(len(setting.seeds))
        numbers[f"deepest {kind}"] = [deepest(nats, place) for place in places]
        numbers[f"nats {kind}"] = nats[depths[-1]]
        numbers[f"slope {kind}"] = [
            slopes(text, kind, depths[-1], seed)[0] for seed in setting.seeds
        ]
        lines[f"{kind} residuals"] = [
            (depth, sum(each) / len(each)) for depth, each in nats.items()
        ]
    return Measured(
        numbers=numbers,
        lines=lines,
        across="layers",
        up="nats learned",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    most = measured.least("layers")
    trains = measured.least("deepest with") == most and measured.most("deepest without") <= most / 4
    open_, closed = measured.numbers["slope with"], measured.numbers["slope without"]
    passes = all(a >= 0.1 and b < 0.1 * a for a, b in zip(open_, closed, strict=True))
    why = (
        f"stacks learn up to {measured.reported('deepest with')} layers with residual connections "
        f"and {measured.reported('deepest without')} without, {most:.0f} tried; the gradient "
        "before "
        f"the first layer, as a share of that after the last, is "
        f"{measured.reported('slope with')} and {measured.reported('slope without')}"
    )
    if trains and not passes:
        return Judged(
            "depends", f"holds for the depth up to which stacks learn, not for gradients: {why}"
        )
    return Judged("holds" if trains and passes else "fails", why)


CLAIM = Claim(
    sentence="Residual connections let gradients pass through a deep stack, so that it trains; "
    "without them only shallow stacks train.",
    lectures="000, 001, 002",
    criterion="with residual connections the deepest stack ends 0.5 nats or more below the unigram "
    "entropy, without them none above a quarter of that depth, each at its best rate; the gradient "
    "before the first layer is at least 0.1 of that after the last, and ten times that of the "
    "stack without; it depends if only the first half is true",
    measure=measure,
    judge=judge,
)
