"""What can be done at once: all places of a text, or one after another."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from manyheads.baselines.rnn import RnnLmConfig
from manyheads.lab.claims.claim import Claim, Judged, Measured, Points, Setting, in_parts
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.cost import exponent
from manyheads.models.gpt import GptConfig

VOCABULARY = 256
GAINS, KEEPS = 1.25, 2.0
TITLES = {"transformer": "Transformer", "lstm": "LSTM"}
NAMES = tuple(TITLES)
Speeds = dict[tuple[str, int], list[tuple[int, float]]]  # by model and threads
STEPS = "a Transformer's sequential operations do not grow with the text and an LSTM's do"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A fixed number of tokens per batch, in few long rows or many short ones."""

    dim: int
    tokens: int
    lengths: tuple[int, ...]
    rounds: int


SMALL = Sizes(dim=128, tokens=1024, lengths=(8, 32, 128, 512), rounds=3)
LARGE = Sizes(dim=512, tokens=16384, lengths=(16, 64, 256, 1024, 4096), rounds=5)


def models(dim: int, length: int, device: torch.device) -> dict[str, nn.Module]:
    """A Transformer of two blocks and an LSTM of three layers: 24 d² weights each."""
    gpt = GptConfig(
        vocab_size=VOCABULARY, dim=dim, layers=2, heads=dim // 64, max_length=length, dropout=0.0
    )
    lstm = RnnLmConfig(dropout=0.0, vocab_size=VOCABULARY, dim=dim, layers=3)
    return {"transformer": gpt.build().to(device), "lstm": lstm.build().to(device)}


def steps_in_a_row(loss: torch.Tensor) -> int:
    """The longest chain of dependent operations, which no number of workers makes shorter."""
    longest: dict[object, int] = {}
    waiting = [(loss.grad_fn, False)]
    while waiting:
        node, seen = waiting.pop()
        if node is None or (node in longest and not seen):
            continue
        before = [follower for follower, _ in node.next_functions if follower is not None]
        if not seen:
            waiting.append((node, True))
            waiting += [(follower, False) for follower in before if follower not in longest]
        else:
            longest[node] = 1 + max((longest.get(follower, 0) for follower in before), default=0)
    return longest[loss.grad_fn]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained_once(model: nn.Module, tokens: torch.Tensor, threads: int) -> Callable[[], object]:
    def act() -> object:
        torch.set_num_threads(threads)
        return torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))

    return act


def threads_of(setting: Setting) -> tuple[int, ...]:
    """CPU: one thread, and all threads. GPU: the current number."""
    if setting.device.type == "cuda":
        return (torch.get_num_threads(),)
    return 1, setting.threads or os.cpu_count() or 1


def steps_by_length(sizes: Sizes) -> dict[str, float]:
    """The exponent p of n^p with which the number of sequential steps grows."""
    chain: dict[str, list[tuple[int, int]]] = {name: [] for name in NAMES}
    for length in sizes.lengths:
        tokens = torch.randint(VOCABULARY, (1, length))
        # In float64: in float32 a fused kernel would hide the steps of an LSTM.
        for name, model in models(64, length, torch.device("cpu")).items():
            chain[name].append((length, steps_in_a_row(loss_of(model.double(), tokens))))
    return {name: exponent(points) or 0.0 for name, points in chain.items()}


def speeds(setting: Setting, sizes: Sizes) -> Speeds:
    """Training tokens per second at each length and number of threads, in wall-clock time.

    The number of torch threads is restored afterwards.
    """
    counts, before = threads_of(setting), torch.get_num_threads()
    speed: Speeds = {}
    try:
        for length in sizes.lengths:
            shape = sizes.tokens // length, length
            tokens = torch.randint(VOCABULARY, shape, device=setting.device)
            built = models(sizes.dim, length, setting.device)
            keys = [(name, count) for name in NAMES for count in counts]
            acts = {
                f"{name} {count}": trained_once(built[name], tokens, count) for name, count in keys
            }
            times = side_by_side(acts, sizes.rounds, setting.device, wall=True)
            for name, count in dict.fromkeys(keys):
                taken = times[f"{name} {count}"]
                speed.setdefault((name, count), []).append((length, sizes.tokens / taken))
    finally:
        torch.set_num_threads(before)
    return speed


def best(speed: Speeds, name: str, place: int) -> float:
    """The speed at one length, with the best number of threads for the model."""
    return max(points[place][1] for (other, _), points in speed.items() if other == name)


def measure(setting: Setting) -> Measured:
    sizes = LARGE if setting.large else SMALL
    numbers: dict[str, list[float]] = {}
    lines: dict[str, Points] = {}
    one, most = threads_of(setting)[0], threads_of(setting)[-1]
    for seed in setting.seeds:
        torch.manual_seed(seed)
        steps, speed = steps_by_length(sizes), speeds(setting, sizes)
        ends = {name: [best(speed, name, place) for place in (0, -1)] for name in NAMES}
        longest = {key: points[-1][1] for key, points in speed.items()}
        values = {f"{name} steps, n": steps[name] for name in NAMES}
        values |= {f"{name} keeps": ends[name][1] / ends[name][0] for name in NAMES}
        values["faster at the longest"] = ends["transformer"][1] / ends["lstm"][1]
        if setting.device.type != "cuda":
            values["threads"] = float(most)
        if most > one:
            for name in NAMES:
                values[f"{name} speed-up"] = longest[name, most] / longest[name, one]
        for name, value in values.items():
            numbers.setdefault(name, []).append(value)
        lines = {
            TITLES[name] + ("" if setting.device.type == "cuda" else f", threads: {count}"): points
            for (name, count), points in speed.items()
        }
    return Measured(
        numbers=numbers,
        lines=lines,
        across=f"length of a text, at {sizes.tokens} tokens a batch",
        up="training tokens a second, by the clock on the wall",
        logarithmic=("across", "up"),
    )


def judge(measured: Measured) -> Judged:
    reported, mean = measured.reported, measured.mean
    counted = measured.most("transformer steps, n") < 0.1 and measured.least("lstm steps, n") > 0.8
    parts = {STEPS: counted}
    where, gained = "on a GPU", ""
    if measured.numbers.get("threads") and mean("threads") == 1:
        where, gained = "with one thread of a CPU", "; for several threads: --threads 2"
        parts["several threads of a CPU speed the Transformer up more"] = False
    elif "threads" in measured.numbers:
        where = f"with {mean('threads'):.0f} threads of a CPU"
        gain = mean("transformer speed-up")
        more = gain > 1 and gain >= GAINS * mean("lstm speed-up")
        parts[f"{where} the Transformer gains more"] = more
        where += ", or with one where that is faster"
        gained = (
            f"; in the longest texts {mean('threads'):.0f} threads are "
            f"{reported('transformer speed-up')} times as fast as one for the Transformer and "
            f"{reported('lstm speed-up')} times for the LSTM (a GPU has thousands of them: --large "
            f"--device cuda)"
        )
    keeps = mean("transformer keeps") / mean("lstm keeps") >= KEEPS
    parts["the Transformer keeps more of its speed as texts grow longer"] = keeps
    parts["it is faster on the longest texts"] = measured.least("faster at the longest") > 1
    why = (
        f"sequential operations grow as n^{reported('transformer steps, n')} in a Transformer "
        "and as "
        f"n^{reported('lstm steps, n')} in an LSTM; {where}, from the shortest texts to the "
        "longest "
        f"the Transformer keeps {reported('transformer keeps')} of its tokens a second and the "
        "LSTM "
        f"{reported('lstm keeps')}, and in the longest the Transformer is "
        f"{reported('faster at the longest')} times as fast as the LSTM{gained}"
    )
    return in_parts(parts, why, needed=[STEPS])


CLAIM = Claim(
    sentence="Transformers are easier to parallelise than LSTMs: all positions of a text are "
    "computed at once, not one after another.",
    lectures="000, 001, 002, 003, 004",
    criterion="the number of sequential operations grows with an exponent of the length below 0.1 "
    "in a Transformer and above 0.8 in an LSTM; when the same tokens form longer texts, a "
    "Transformer keeps at least twice the share of its speed, and is faster in every seed; on a "
    "CPU several threads speed it up, and at least 1.25 times as much as the LSTM",
    measure=measure,
    judge=judge,
)
