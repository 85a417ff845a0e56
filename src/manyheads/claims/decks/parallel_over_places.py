"""What can be done at once: all places of a text, or one after another."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from manyheads.claims.claim import Claim, Judged, Measured, Points, Setting
from manyheads.claims.clock import side_by_side
from manyheads.claims.recurrent import LstmConfig
from manyheads.cost import exponent
from manyheads.models.gpt import GptConfig

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The same tokens a batch, in few long rows or in many short ones."""

    dim: int
    tokens: int
    lengths: tuple[int, ...]
    rounds: int


SMALL = Sizes(dim=128, tokens=1024, lengths=(8, 32, 128, 512), rounds=4)
LARGE = Sizes(dim=512, tokens=16384, lengths=(16, 64, 256, 1024, 4096), rounds=5)


def models(dim: int, length: int, device: torch.device) -> dict[str, nn.Module]:
    """Two blocks have 24 d² weights, and so have three layers of LSTM."""
    gpt = GptConfig(
        vocab_size=VOCABULARY, dim=dim, layers=2, heads=dim // 64, max_length=length, dropout=0.0
    )
    lstm = LstmConfig(vocab_size=VOCABULARY, dim=dim, layers=3)
    return {"transformer": gpt.build().to(device), "lstm": lstm.build().to(device)}


def steps_in_a_row(loss: torch.Tensor) -> int:
    """The longest chain of operations of which each needs the one before: what no number of
    workers makes shorter."""
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


def trained_once(model: nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss_of(model, tokens), list(model.parameters()))


def measure(setting: Setting) -> Measured:
    sizes, names = LARGE if setting.large else SMALL, ("transformer", "lstm")
    numbers: dict[str, list[float]] = {}
    lines: dict[str, Points] = {}
    for seed in setting.seeds:
        torch.manual_seed(seed)
        chain: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        speed: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        for length in sizes.lengths:
            tokens = torch.randint(VOCABULARY, (sizes.tokens // length, length))
            # In float64, for which no kernel hides the steps of an LSTM in one; of any width.
            for name, model in models(64, length, torch.device("cpu")).items():
                steps = steps_in_a_row(loss_of(model.double(), tokens[:1]))
                chain[name].append((length, steps))
            tokens = tokens.to(setting.device)
            pair = models(sizes.dim, length, setting.device).items()
            acts = {name: trained_once(model, tokens) for name, model in pair}
            for name, taken in side_by_side(acts, sizes.rounds, setting.device).items():
                speed[name].append((length, sizes.tokens / taken))
        for name in names:
            numbers.setdefault(f"{name} steps, n", []).append(exponent(chain[name]) or 0.0)
            kept = speed[name][-1][1] / speed[name][0][1]
            numbers.setdefault(f"{name} keeps", []).append(kept)
        ratio = speed["transformer"][-1][1] / speed["lstm"][-1][1]
        numbers.setdefault("faster at the longest", []).append(ratio)
        lines = {"Transformer": speed["transformer"], "LSTM": speed["lstm"]}
    return Measured(
        numbers=numbers,
        lines=lines,
        across=f"length of a text, at {sizes.tokens} tokens a batch",
        up="training tokens a second",
        logarithmic=("across", "up"),
    )


def judge(measured: Measured) -> Judged:
    told = measured.told
    counted = measured.most("transformer steps, n") < 0.1 and measured.least("lstm steps, n") > 0.8
    gain = measured.mean("transformer keeps") / measured.mean("lstm keeps")
    why = (
        f"operations in a row grow as n^{told('transformer steps, n')} in a Transformer and as "
        f"n^{told('lstm steps, n')} in an LSTM; from the shortest texts to the longest it keeps "
        f"{told('transformer keeps')} of its tokens a second, the LSTM {told('lstm keeps')}, and "
        f"is {told('faster at the longest')} times as fast there"
    )
    if not counted:
        return Judged("fails", why)
    if gain >= 2 and measured.least("faster at the longest") > 1:
        return Judged("holds", why)
    return Judged(
        "depends", f"holds only of what could be done at once, not of the time here: {why}"
    )


CLAIM = Claim(
    sentence="Transformers are easier to parallelise than LSTMs: all places of a text are computed "
    "at once, and not one after another.",
    deck="000, 001, 002, 003, 004",
    criterion="operations that must follow each other grow with an exponent of the length below "
    "0.1 in a Transformer and above 0.8 in an LSTM; when as many tokens stand in longer texts, a "
    "Transformer keeps at least twice the share of its speed, and is the faster one",
    measure=measure,
    judge=judge,
)
