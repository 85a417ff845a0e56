"""Post-norm needs a learning-rate warm-up, pre-norm does not."""

from functools import cache, partial
from typing import Literal

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.phrases import Curve, Phrases, ended, phrases, tuned, writer
from manyheads.lab.claims.trial import learn, stretches
from manyheads.nn.layers import Norm

Placement = Literal["post", "pre"]
SENTENCES, ROWS, LENGTH = 3000, 16, 16
LAYERS, DIM, STEPS, WARMUP = 6, 32, 260, 90
LARGE_LAYERS, LARGE_DIM, LARGE_STEPS = 12, 64, 1500
LOSES, KEEPS = 2 / 3, 0.9
# Learning rates around the best of each.
RATES: dict[Placement, tuple[float, ...]] = {"post": (1e-3, 3e-3), "pre": (3e-3, 1e-2)}
LEARNED = 0.5  # nats below the unigram entropy; a model that gains less has not trained


def losses(
    setting: Setting, text: Phrases, norm: Norm, warmup: int, rate: float, seed: int
) -> Curve:
    layers, dim, steps = LAYERS, DIM, STEPS
    if setting.large:
        layers, dim, steps = LARGE_LAYERS, LARGE_DIM, LARGE_STEPS
    model = writer(text, layers=layers, dim=dim, length=LENGTH, seed=seed, norm=norm)
    loss_of = text.loss_of(model, ROWS, LENGTH, seed)
    return learn(model, loss_of, steps=steps, rate=rate, warmup=warmup)


def measure(setting: Setting) -> Measured:
    text = phrases(SENTENCES, setting.device)
    numbers: dict[str, list[float]] = {}
    lines: dict[str, list[tuple[int, float]]] = {}
    for placement, rates in RATES.items():
        run = cache(partial(losses, setting, text, Norm(placement=placement)))
        best, curves = tuned(partial(run, WARMUP), rates, setting.seeds)
        _, plain = tuned(partial(run, 0), rates, setting.seeds)
        same = [run(0, best, seed) for seed in setting.seeds]
        learned = [text.entropy - ended(curve) for curve in curves]
        numbers[f"{placement}, nats learned"] = learned
        for name, others in (("same rate", same), ("own rate", plain)):
            numbers[f"{placement}, {name}"] = [
                (text.entropy - ended(curve)) / with_warmup
                for curve, with_warmup in zip(others, learned, strict=True)
            ]
        lines[f"{placement}-norm, warm-up"] = stretches(curves[0])
        lines[f"{placement}-norm, none"] = stretches(same[0])
    return Measured(numbers=numbers, lines=lines, across="step", up="loss, nats")


def judge(measured: Measured) -> Judged:
    trained = all(measured.least(f"{norm}, nats learned") >= LEARNED for norm in RATES)
    pre = min(measured.least("pre, same rate"), measured.least("pre, own rate")) >= KEEPS
    same_loses, best_loses = (
        measured.most(f"post, {rate}") <= LOSES for rate in ("same rate", "own rate")
    )
    why = (
        f"as a share of the nats learned with warm-up, post-norm learns "
        f"{measured.reported('post, same rate')} "
        f"without it at the same rate and {measured.reported('post, own rate')} at the rate that "
        "is "
        f"best for it, pre-norm {measured.reported('pre, same rate')} and "
        f"{measured.reported('pre, own rate')}"
    )
    if trained and pre and same_loses and not best_loses:
        return Judged("depends", f"holds only if the rate is not tuned again: {why}")
    return Judged("holds" if trained and pre and same_loses and best_loses else "fails", why)


CLAIM = Claim(
    sentence="A stack with its norms after each sum (post-norm) needs a warm-up of the learning "
    "rate; with the norms before each part (pre-norm) it does not, as Xiong et al. found.",
    lectures="004",
    criterion="without warm-up post-norm learns at most two thirds of the nats below the unigram "
    "entropy that it learns with it, pre-norm at least 0.9 of them, each at its best rate; it "
    "depends if this is true only at the rate that is best with warm-up; with warm-up both learn "
    "0.5 nats or more",
    measure=measure,
    judge=judge,
)
