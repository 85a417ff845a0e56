"""Where the parameters and the FLOPs of a Transformer go as it grows: GPT-3's eight sizes."""

from itertools import pairwise

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.presets import GPT3_SIZES, preset
from manyheads.summary import ModelSummary, summarize

SIZES = ("gpt3-small", *GPT3_SIZES)
PAIRS = ("attention scores", "attention mixing")  # what each query does with each key: n²
PARTS = {
    "feed-forward": ("feed-forward",),
    "projections of attention": ("attention",),
    "scores and mixing": PAIRS,
    "head": ("head",),
}


def share(found: ModelSummary, *parts: str) -> float:
    """Of all forward FLOPs of a token."""
    return sum(found.flops["token"].get(part, 0) for part in parts) / found.forward_flops["token"]


def overtakes(found: ModelSummary) -> float:
    """The length from which on scores and mixing, whose FLOPs a token grow with it, have more of
    them than the feed-forward."""
    flops = found.flops["token"]
    return flops["feed-forward"] / (sum(flops[part] for part in PAIRS) / found.length)


def measure(setting: Setting) -> Measured:
    sizes = [summarize(preset(name)) for name in SIZES]
    widths = [share(found, "feed-forward") for found in sizes]
    parameters = [found.feedforward_share["parameters"] for found in sizes]
    majority = [
        found.parameters / 1e9 for found, part in zip(sizes, widths, strict=True) if part > 0.5
    ]
    numbers = {
        "parameters, least": min(parameters),
        "parameters, most": max(parameters),
        "compute, smallest": widths[0],
        "compute, largest": widths[-1],
        "growth": min(after - before for before, after in pairwise(widths)),
        "majority from": min(majority, default=float("inf")),
        "overtaken at, smallest": overtakes(sizes[0]),
        "overtaken at, largest": overtakes(sizes[-1]),
        "embeddings, smallest": sizes[0].parts["embedding"] / sizes[0].parameters,
        "embeddings, largest": sizes[-1].parts["embedding"] / sizes[-1].parameters,
    }
    lines = {
        name: [(found.parameters, share(found, *parts)) for found in sizes]
        for name, parts in PARTS.items()
    }
    return Measured(
        numbers={name: [value] * len(setting.seeds) for name, value in numbers.items()},
        lines=lines,
        across="parameters",
        up=f"share of forward FLOPs at {sizes[0].length} tokens",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    first, last = measured.mean("compute, smallest"), measured.mean("compute, largest")
    thirds = measured.least("parameters, least") > 0.66 and measured.most("parameters, most") < 0.68
    small, large = (measured.mean(f"overtaken at, {size}") for size in ("smallest", "largest"))
    why = (
        f"it has {measured.told('parameters, least')} of the blocks' parameters in all sizes of "
        f"GPT-3; of the FLOPs at 2,048 tokens {first:.0%} in the smallest and {last:.0%} in the "
        f"largest, and scores with mixing overtake it at {small:,.0f} and at {large:,.0f} tokens"
    )
    if not (thirds and last > 0.5 and measured.least("growth") > 0):
        return Judged("fails", why)
    if first > 0.5:
        return Judged("holds", why)
    begins = measured.mean("majority from")
    return Judged("depends", f"of compute it holds only from {begins:.2g} billion on: {why}")


CLAIM = Claim(
    sentence="The feed-forward, four times as wide inside, is where two thirds of a block's "
    "parameters and most of the compute go, and the larger the model, the more of it.",
    deck="000, 001, 002",
    criterion="0.66 to 0.68 of the blocks' parameters and more than half of the forward FLOPs in "
    "each size of GPT-3, growing from size to size",
    measure=measure,
    judge=judge,
)
