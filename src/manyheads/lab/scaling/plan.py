"""The plan of a sweep: smaller models than the recipe's, fewer tokens, and the cost of each run.

The sweep predicts the recipe's run. Its models have 1/2, 1/4, … of the recipe's parameters, with
width and depth shrunk together. Its longest runs have so many tokens that none has more than a
quarter of the recipe's FLOPs; the others have 1/2, 1/4, … of these tokens.

Each run has its own complete schedule: an intermediate loss of a longer run is higher than that of
a run that ends there, as its learning rate is still high.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from manyheads.data.language import TextData
from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.models.gpt import GptConfig
from manyheads.run import Run
from manyheads.summary import summarize

LARGER = 4  # compute of the predicted run, relative to the largest run in the fit
FEWEST_STEPS = 8  # minimum for the shortest run
FEWEST_RUNS = 6  # one more than the law's five parameters
NARROWEST = 8
WIDE = 48  # channels from which on head sizes are multiples of 8
TARGET = "target"
_summary = lru_cache(maxsize=64)(summarize)  # cached for all runs of a size


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The number of model sizes and of amounts of data, and optionally a budget in seconds."""

    sizes: int = 4
    data: int = 4
    budget: float | None = None

    def __post_init__(self) -> None:
        check_at_least("--sizes", self.sizes, 2)
        check_at_least("--data", self.data, 2)
        check_above_zero("--budget", self.budget)
        if self.sizes * self.data < FEWEST_RUNS:
            raise UserError(
                f"--sizes {self.sizes} and --data {self.data} are {self.sizes * self.data} runs, "
                f"too few for a law of five numbers: give at least {FEWEST_RUNS}"
            )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a plan. N counts the weights of the blocks, without embedding and output layer."""

    name: str
    run: Run
    parameters: int
    tokens: int
    token_flops: int
    seconds: float = 0.0

    @property
    def flops(self) -> int:
        return self.token_flops * self.tokens

    @property
    def size(self) -> str:
        """The name of its model size, as "256x4"."""
        return f"{self.run.model.dim}x{self.run.model.layers}"


@dataclass(frozen=True)
class Plan:
    """The runs that the laws are fitted to, from small to large, and the one to be predicted."""

    fitted: tuple[Planned, ...]
    target: Planned

    @property
    def runs(self) -> tuple[Planned, ...]:
        return (*self.fitted, self.target)

    @property
    def flops(self) -> int:
        return sum(planned.flops for planned in self.runs)

    @property
    def seconds(self) -> float:
        return sum(planned.seconds for planned in self.runs)


def parse_time(text: str | None) -> float | None:
    """Seconds of a time such as 90s, 15m or 2h."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise UserError(f"--budget {text} must be a time, e.g. 90s, 15m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def check_recipe(run: Run) -> None:
    """Raise UserError for a recipe that a sweep cannot scale."""
    if run.task != "language" or not isinstance(run.data, TextData):
        raise UserError(
            "scale is for language models of text: take the recipe language, gpt-mini or "
            "shakespeare-char"
        )
    if not isinstance(run.model, GptConfig):
        raise UserError(f"scale needs model=gpt (not {run.model.kind}): leave it out")
    if run.init:
        raise UserError("scale trains every size from the beginning: leave out init=FOLDER")
    for name in ("head_dim", "kv_heads"):
        if getattr(run.model, name) is not None:
            raise UserError(
                f"model.{name} would have to grow with the model: leave it out, so that heads keep "
                "their size"
            )


def smaller(model: GptConfig, share: Fraction) -> GptConfig:
    """A model with about this share of the parameters, and the same aspect ratio and head size.

    N ~ layers · dim², so that each shrinks by the cube root; the width compensates for rounding
    the depth.
    """
    layers = max(1, round(model.layers * float(share) ** (1 / 3)))
    ideal = model.dim * math.sqrt(share * model.layers / layers)
    heads = max(1, round(ideal * model.heads / model.dim))
    # Fast kernels need head sizes that are multiples of 8; for small heads that is too coarse.
    part = heads * (8 if model.dim >= WIDE * model.heads else 4)
    dim = part * max(1, round(ideal / part))
    ffn_dim = model.ffn_dim and max(1, round(model.ffn_dim * dim / model.dim))
    if dim < NARROWEST:
        raise UserError(
            f"model.dim={model.dim} model.layers={model.layers} has no model of 1/"
            f"{share.denominator} of its size: lower --sizes, or take a larger one"
        )
    return dataclasses.replace(model, dim=dim, layers=layers, heads=heads, ffn_dim=ffn_dim)


def sizes_of(run: Run, sweep: Sweep) -> list[Run]:
    """The recipe with each model of the sweep, from small to large, and last the recipe itself.

    A narrower model has a higher learning rate, by the paper's d^−½.
    """
    model, rate = run.model, run.train.learning_rate
    assert isinstance(model, GptConfig)
    runs = []
    for power in range(sweep.sizes, 0, -1):
        small = smaller(model, Fraction(1, 2**power))
        small_rate = None if rate is None else rate * math.sqrt(model.dim / small.dim)
        train = dataclasses.replace(run.train, learning_rate=small_rate)
        runs.append(dataclasses.replace(run, model=small, train=train))
    counts = [_summary(each.model).block_parameters for each in (*runs, run)]
    if sorted(set(counts)) != counts:
        raise UserError(
            f"model.dim={model.dim} model.layers={model.layers} is too small for {sweep.sizes} "
            "sizes below it: lower --sizes, or take a larger one"
        )
    return [*runs, run]


def _lasting(run: Run, steps: int) -> Run:
    """The same run over `steps` steps, with its schedule and warm-up rescaled."""
    train = run.train
    share = train.warmup_ratio
    if share is None and train.warmup_steps >= train.steps:
        raise UserError(
            f"train.steps={train.steps} end before the warm-up of {train.warmup_steps} steps: "
            "raise them, or lower train.warmup_steps"
        )
    share = train.warmup_steps / train.steps if share is None else share
    every = min(train.save_every, steps)
    lasting = dataclasses.replace(
        train,
        steps=steps,
        epochs=None,
        warmup_ratio=share,
        validate_every=steps,
        save_every=every,
        checkpoint="last",
    )
    return dataclasses.replace(run, train=lasting)


def make_plan(
    run: Run,
    sweep: Sweep,
    *,
    steps: int,
    step_tokens: int,
    seconds: Mapping[str, float] | None = None,
    valid_tokens: int = 0,
) -> Plan:
    """All runs of a sweep that ends with `steps` of the recipe.

    `seconds` has the time of a step for each size. Validation costs a third of training.
    """

    def planned(run_config: Run, steps: int, name: str = "") -> Planned:
        summary = _summary(run_config.model)
        plan = Planned(
            name=name or f"{run_config.model.dim}x{run_config.model.layers}-{steps}",
            run=_lasting(run_config, steps),
            parameters=summary.block_parameters,
            tokens=steps * step_tokens,
            token_flops=summary.training_flops["token"],
        )
        each = (seconds or {}).get(plan.size, 0.0)
        return dataclasses.replace(plan, seconds=each * (steps + valid_tokens / (3 * step_tokens)))

    *small, full = sizes_of(run, sweep)
    target = planned(full, steps, TARGET)
    largest = _summary(small[-1].model).training_flops["token"] * step_tokens
    longest = target.flops // (LARGER * largest)
    lengths = [longest // 2**power for power in range(sweep.data - 1, -1, -1)]
    if lengths[0] < FEWEST_STEPS:
        needed = math.ceil(steps * FEWEST_STEPS / max(1.0, longest / 2 ** (sweep.data - 1)))
        raise UserError(
            f"the shortest of {sweep.data} lengths would be {lengths[0]} steps, fewer than "
            f"{FEWEST_STEPS}: lower --data, or raise --budget or train.steps (about {needed})"
        )
    return Plan(
        tuple(planned(run_config, length) for run_config in small for length in lengths), target
    )


def steps_within(
    run: Run,
    sweep: Sweep,
    *,
    step_tokens: int,
    seconds: Mapping[str, float],
    valid_tokens: int = 0,
) -> int:
    """The number of steps of the recipe with which the sweep ends within the budget.

    The time of all runs is proportional to it, except for the validations.
    """
    assert sweep.budget is not None
    many = 1_000_000
    plan = make_plan(run, sweep, steps=many, step_tokens=step_tokens, seconds=seconds)
    each = [seconds[planned.size] for planned in plan.runs]
    left = sweep.budget - sum(each) * valid_tokens / (3 * step_tokens)
    if left <= 0:
        raise UserError(
            f"--budget {sweep.budget:.0f}s is less than the validations take: raise it, or give "
            "less text for validation"
        )
    return max(1, int(many * left / plan.seconds))
