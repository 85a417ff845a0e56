"""Causal self-attention: one pass trains all positions of a text, and none sees its future."""

from functools import partial

import torch
from torch.nn import functional as F

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, holds_if
from manyheads.lab.claims.clock import side_by_side
from manyheads.models.gpt import Gpt, GptConfig

VOCABULARY, ROWS = 100, 4
ROUNDS = 3


def model_of(length: int, seed: int) -> Gpt:
    torch.manual_seed(seed)
    config = GptConfig(
        vocab_size=VOCABULARY, dim=64, layers=2, heads=4, max_length=length, dropout=0.0
    )
    return config.build().double()


def losses(model: Gpt, tokens: torch.Tensor, *, at_once: bool) -> torch.Tensor:
    """−log P of each token after the first, by one pass or by a pass for each prefix."""
    if at_once:
        logits = model(tokens[:, :-1])
    else:
        ends = range(1, tokens.shape[1])
        logits = torch.stack([model(tokens[:, :end])[:, -1] for end in ends], dim=1)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def measure(setting: Setting) -> Measured:
    length = 128 if setting.large else 48
    numbers: dict[str, list[float]] = {"apart": [], "leak": [], "faster": []}
    for seed in setting.seeds:
        model = model_of(length, seed).to(setting.device)
        tokens = torch.randint(VOCABULARY, (ROWS, length), device=setting.device)
        ways = {"at once": partial(passes, model, tokens, at_once=True)}
        ways["each"] = partial(passes, model, tokens, at_once=False)
        pairs = zip(*(way() for way in ways.values()), strict=True)
        numbers["apart"].append(max(float((a - b).abs().max().detach()) for a, b in pairs))
        seconds = side_by_side(ways, ROUNDS, setting.device)
        numbers["faster"].append(seconds["each"] / seconds["at once"])
        numbers["leak"].append(leak(model, model.tokens(tokens).detach().requires_grad_()))
    return Measured(numbers=numbers)


def passes(model: Gpt, tokens: torch.Tensor, *, at_once: bool) -> list[torch.Tensor]:
    """The losses, and the gradient of their sum."""
    per_token = losses(model, tokens, at_once=at_once)
    return [per_token, *torch.autograd.grad(per_token.sum(), list(model.parameters()))]


def leak(model: Gpt, vectors: torch.Tensor) -> float:
    """The largest gradient of a state, in a random direction, with respect to a later word vector.

    Random, because a layer norm makes a state constant along (1, …, 1).
    """
    worst = 0.0
    tokens = torch.zeros(vectors.shape[:2], dtype=torch.long, device=vectors.device)
    handle = model.tokens.register_forward_hook(lambda *_: vectors)
    try:
        hidden = model.hidden(tokens)
    finally:
        handle.remove()
    directions = torch.randn_like(hidden)
    for place in range(hidden.shape[1] - 1):
        along = (hidden[:, place] * directions[:, place]).sum()
        [slope] = torch.autograd.grad(along, vectors, retain_graph=True)
        worst = max(worst, float(slope[:, place + 1 :].abs().max()))
    return worst


def judge(measured: Measured) -> Judged:
    return holds_if(
        measured.most("apart") < 1e-9
        and measured.most("leak") == 0
        and measured.least("faster") > 3,
        f"one pass gives the losses and gradients of a pass for each prefix to within "
        f"{measured.reported('apart')} and is {measured.reported('faster')} times as fast; the "
        f"largest gradient of a state with respect to a later word is {measured.reported('leak')}",
    )


CLAIM = Claim(
    sentence="With a causal mask one pass trains all positions of a text, with the results of a "
    "pass for each prefix, and nothing leaks from the future.",
    lectures="002, 003, 004",
    criterion="losses and gradients equal to 1e-9 in float64, a gradient of zero with respect to "
    "later words, at least three times as fast",
    measure=measure,
    judge=judge,
)
