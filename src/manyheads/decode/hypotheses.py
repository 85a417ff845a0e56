"""What a step of beam search does to n sentences with k hypotheses each, in tensors alone."""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decode.logits import foremost

NEVER = float("-inf")
BLOCK = 64  # tokens of which a CPU looks at the best alone, unless it is among the best of all
LARGE = 1024  # vocabulary for which that pays
Stopping = Literal["beam-ended", "none-better-now", "none-better-ever"]
# Of a sentence each, or one for all.
Penalties = Float[Tensor, " #n"] | float


@dataclass
class Hypotheses:
    """The living ones of each sentence, what they cost, and the best that have ended."""

    limits: Int[Tensor, " n"]
    alive: Int[Tensor, "n k length"]
    alive_log: Float[Tensor, "n k"]
    ended: Int[Tensor, "n k room"]
    ended_log: Float[Tensor, "n k"]
    ended_score: Float[Tensor, "n k"]
    ended_length: Int[Tensor, "n k"]

    def done(
        self,
        length: Int[Tensor, " 1"] | int,
        stopping: Stopping,
        n_best: int,
        now: Penalties,
        greatest: Penalties,
    ) -> Bool[Tensor, " n"]:
        """The rule of stopping is met, or the n best are decided, or the limit is reached.

        log P only falls, so that a living hypothesis can come to no better score than its log P
        now over the `greatest` lp to come; `now` is that of a text of this length.
        """
        living = self.alive_log.amax(dim=1)
        decided = living / greatest <= self.ended_score[:, n_best - 1]
        done = decided | (self.limits <= length)
        worst = self.ended_score[:, -1]
        if stopping == "beam-ended":
            return done | (worst > NEVER)
        if stopping == "none-better-now":
            return done | ((worst > NEVER) & (living / now <= worst))
        return done


def continuations(
    alive_log: Float[Tensor, "n k"],
    logits: Float[Tensor, "rows v"],
    total: Float[Tensor, "rows 1"],
    most: int | None = None,
) -> tuple[Float[Tensor, "n w"], Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """The best of each sentence, in order: their log P, their parents, their tokens.

    Twice as many as the beam, unless told: even if every hypothesis ends, enough others live on.
    """
    k = alive_log.shape[1]
    most = most or 2 * k
    if logits.device.type == "cpu" and logits.shape[-1] >= LARGE:
        return _among_blocks(alive_log, logits, total, most)
    wide = min(most, logits.shape[-1])
    best, tokens = foremost(logits, wide)
    log = rearrange(alive_log, "n k -> (n k) 1") + (best - total)
    log = rearrange(log, "(n k) w -> n (k w)", k=k)
    log, order = foremost(log, min(most, log.shape[-1]))
    tokens = rearrange(tokens, "(n k) w -> n (k w)", k=k).gather(-1, order)
    return log, order // wide, tokens


def _among_blocks(
    alive_log: Float[Tensor, "n k"],
    logits: Float[Tensor, "rows v"],
    total: Float[Tensor, "rows 1"],
    wide: int,
) -> tuple[Float[Tensor, "n w"], Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """The same, where the greatest of a block is found many times as fast as the order of a row.

    The w best tokens are in the w blocks whose best are best, or in what no block has room for.
    """
    (n, k), blocks = alive_log.shape, logits.shape[-1] // BLOCK
    before, cut = alive_log.view(n * k, 1), blocks * BLOCK
    whole = logits[:, :cut].unflatten(1, (blocks, BLOCK))
    tallest = (before + (whole.amax(-1) - total)).view(n, k * blocks)
    chosen = tallest.topk(min(wide, k * blocks), sorted=False).indices
    parents, block = chosen // blocks, chosen % blocks
    rows = torch.arange(n)[:, None] * k + parents
    inside = before[rows] + (whole[rows, block] - total[rows])
    beyond = before + (logits[:, cut:] - total)
    log, order = torch.cat([inside.view(n, -1), beyond.view(n, -1)], 1).topk(wide)
    left = logits.shape[-1] - cut
    tokens = (block[..., None] * BLOCK + torch.arange(BLOCK)).view(n, -1)
    tokens = torch.cat([tokens, torch.arange(cut, cut + left).repeat(n, k)], 1)
    others = torch.arange(k).repeat_interleave(left).expand(n, -1)
    parents = torch.cat([parents.repeat_interleave(BLOCK, 1), others], 1)
    return log, parents.gather(1, order), tokens.gather(1, order)


def take(values: Int[Tensor, "n k length"], order: Int[Tensor, "n w"]) -> Int[Tensor, "n w length"]:
    return values.gather(1, repeat(order, "n w -> n w length", length=values.shape[2]))


def in_beam(ending: Bool[Tensor, "n w"], beam: int) -> Bool[Tensor, "n w"]:
    """Of the endings those that count: one beyond the first k would not have been kept."""
    return ending & (torch.arange(ending.shape[1], device=ending.device) < beam)
