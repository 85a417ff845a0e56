"""The plan of a sweep: smaller models than the recipe's, fewer tokens, and what each run costs.

The recipe's own run is the one to be predicted. The models of the sweep have a half, a quarter, …
of its parameters, width and depth shrunk together; the longest runs of the sweep so many tokens
that none has more than a quarter of its FLOPs, the others a half of these, a quarter, ….

Each is a run of its own, with its schedule stretched over its own steps: in the middle of a
schedule the rate is still high, and the loss not that of a run that ends there.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from manyheads.data.language import TextData
from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.models.gpt import GptConfig
from manyheads.run import Run
from manyheads.summary import summarize

LARGER = 4  # how many times the compute of any run in the fit the predicted one has
FEWEST_STEPS = 8  # of the shortest run
FEWEST_RUNS = 6  # a law of five numbers needs one more
NARROWEST = 8
WIDE = 48  # of a head
TARGET = "target"
_account = lru_cache(maxsize=64)(summarize)  # once for all runs of a size


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How many sizes and how many amounts of data; and in how many seconds, where it matters."""

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
    """One run of a plan. N counts the weights of the blocks: no embedding, no output layer."""

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
        """What its model is called."""
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
        return sum(one.flops for one in self.runs)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.runs)


def check_recipe(run: Run) -> None:
    """Refuse what a sweep cannot be made of."""
    if run.task != "language" or not isinstance(run.data, TextData):
        raise UserError(
            "scale is for language models of text: take the recipe language, gpt-mini or "
            "shakespeare-char"
        )
    if run.init:
        raise UserError("scale trains every size from the beginning: leave out init=FOLDER")
    assert isinstance(run.model, GptConfig)  # as the task table has it
    for name in ("head_dim", "kv_heads"):
        if getattr(run.model, name) is not None:
            raise UserError(
                f"model.{name} would have to grow with the model: leave it out, so that heads keep "
                "their size"
            )


def smaller(model: GptConfig, share: Fraction) -> GptConfig:
    """A model with about this share of the parameters, of the same aspect and size of heads.

    N ~ layers · dim², so that each shrinks by the third root; the width makes up for what
    whole numbers take from the depth.
    """
    layers = max(1, round(model.layers * float(share) ** (1 / 3)))
    ideal = model.dim * math.sqrt(share * model.layers / layers)
    heads = max(1, round(ideal * model.heads / model.dim))
    # Fast kernels want the size of heads to be a multiple of 8; for small ones that is too coarse.
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
    """The recipe with each model of the sweep, from small to large, and last with its own.

    A narrower model learns at a higher rate, by the lectures' d^−½.
    """
    model, rate = run.model, run.train.learning_rate
    assert isinstance(model, GptConfig)
    found = []
    for power in range(sweep.sizes, 0, -1):
        small = smaller(model, Fraction(1, 2**power))
        own = None if rate is None else rate * math.sqrt(model.dim / small.dim)
        train = dataclasses.replace(run.train, learning_rate=own)
        found.append(dataclasses.replace(run, model=small, train=train))
    counts = [_account(one.model).block_parameters for one in (*found, run)]
    if sorted(set(counts)) != counts:
        raise UserError(
            f"model.dim={model.dim} model.layers={model.layers} is too small for {sweep.sizes} "
            "sizes below it: lower --sizes, or take a larger one"
        )
    return [*found, run]


def _lasting(run: Run, steps: int) -> Run:
    """The same run over so many steps: its schedule is stretched, warm-up included."""
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

    `seconds` is how long a step of each size takes. A validation costs a third of training.
    """

    def planned(one: Run, steps: int, name: str = "") -> Planned:
        found = _account(one.model)
        made = Planned(
            name=name or f"{one.model.dim}x{one.model.layers}-{steps}",
            run=_lasting(one, steps),
            parameters=found.block_parameters,
            tokens=steps * step_tokens,
            token_flops=found.training_flops["token"],
        )
        each = (seconds or {}).get(made.size, 0.0)
        return dataclasses.replace(made, seconds=each * (steps + valid_tokens / (3 * step_tokens)))

    *small, own = sizes_of(run, sweep)
    target = planned(own, steps, TARGET)
    largest = _account(small[-1].model).training_flops["token"] * step_tokens
    longest = target.flops // (LARGER * largest)
    lengths = [longest // 2**power for power in range(sweep.data - 1, -1, -1)]
    if lengths[0] < FEWEST_STEPS:
        needed = math.ceil(steps * FEWEST_STEPS / max(1.0, longest / 2 ** (sweep.data - 1)))
        raise UserError(
            f"the shortest of {sweep.data} lengths would be {lengths[0]} steps, fewer than "
            f"{FEWEST_STEPS}: lower --data, or raise --budget or train.steps (about {needed})"
        )
    return Plan(tuple(planned(one, length) for one in small for length in lengths), target)


def steps_within(
    run: Run,
    sweep: Sweep,
    *,
    step_tokens: int,
    seconds: Mapping[str, float],
    valid_tokens: int = 0,
) -> int:
    """How many steps of the recipe let the whole sweep end within the budget.

    All runs grow with them, so that the time does, but for that of the validations.
    """
    assert sweep.budget is not None
    many = 1_000_000
    plan = make_plan(run, sweep, steps=many, step_tokens=step_tokens, seconds=seconds)
    each = [seconds[one.size] for one in plan.runs]
    left = sweep.budget - sum(each) * valid_tokens / (3 * step_tokens)
    if left <= 0:
        raise UserError(
            f"--budget {sweep.budget:.0f}s is less than the validations take: raise it, or give "
            "less text for validation"
        )
    return max(1, int(many * left / plan.seconds))
