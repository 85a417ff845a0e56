"""Where the parameters and the FLOPs of a Transformer go as it grows: GPT-3's eight sizes."""

from itertools import pairwise

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.presets import preset, presets
from manyheads.summary import ModelSummary, summarize

SIZES = tuple(name for name in presets() if name.startswith("gpt3-"))
PAIRS = ("attention scores", "attention mixing")  # cost n² per sequence
PARTS = {
    "feed-forward": ("feed-forward",),
    "projections of attention": ("attention",),
    "scores and mixing": PAIRS,
    "head": ("head",),
}


def share(summary: ModelSummary, *parts: str) -> float:
    """The share of these parts in the forward FLOPs of a token."""
    return (
        sum(summary.flops["token"].get(part, 0) for part in parts) / summary.forward_flops["token"]
    )


def overtakes(summary: ModelSummary) -> float:
    """The length from which on scores and mixing take more FLOPs per token than the "
    "feed-forward."""
    flops = summary.flops["token"]
    return flops["feed-forward"] / (sum(flops[part] for part in PAIRS) / summary.length)


def measure(setting: Setting) -> Measured:
    sizes = [summarize(preset(name)) for name in SIZES]
    widths = [share(summary, "feed-forward") for summary in sizes]
    parameters = [summary.feedforward_share["parameters"] for summary in sizes]
    majority = [
        summary.parameters / 1e9 for summary, part in zip(sizes, widths, strict=True) if part > 0.5
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
        name: [(summary.parameters, share(summary, *parts)) for summary in sizes]
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
        f"the feed-forward has {measured.reported('parameters, least')} of the blocks' "
        "parameters in "
        f"all sizes of GPT-3, and {first:.0%} (smallest) to {last:.0%} (largest) of the FLOPs at "
        f"2,048 tokens; scores and mixing overtake it at {small:,.0f} and at {large:,.0f} tokens"
    )
    if not (thirds and last > 0.5 and measured.least("growth") > 0):
        return Judged("fails", why)
    if first > 0.5:
        return Judged("holds", why)
    begins = measured.mean("majority from")
    return Judged(
        "depends", f"for compute it holds only from {begins:.2g} billion parameters on: {why}"
    )


CLAIM = Claim(
    sentence="The feed-forward network, four times as wide inside, has two thirds of a block's "
    "parameters and most of the compute, and its share grows with the model.",
    lectures="000, 001, 002",
    criterion="0.66 to 0.68 of the blocks' parameters and more than half of the forward FLOPs in "
    "each size of GPT-3, growing from size to size",
    measure=measure,
    judge=judge,
)
