"""Mixture of experts: many feed-forwards, of which a router chooses one or two for each token.

    y = Σ_{e ∈ top k} g_e FFN_e(x),   p = softmax(x W_r)
    g = p for one expert (Switch), p over the sum of the chosen for several (GShard)

In training each expert has room for a share of the tokens and what does not fit is dropped (the
residual carries it on); a balance loss, E · Σ_e f_e P_e, where f_e is the share of tokens whose
first choice is e and P_e the mean of p_e, is least where all experts have the same work. In use
nothing is dropped, so that what a token becomes hangs on no other token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import UserError, check_above_zero, check_at_least, check_share
from manyheads.nn.feedforward import ACTIVATIONS, Activation, Gated, Plain
from manyheads.nn.shapes import Hidden

Flat = Float[Tensor, "n d"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """So many plain feed-forwards, of which `top` serve a token.

    In training an expert takes `capacity` times its even share; `balance` is the weight of the
    balance loss.
    """

    experts: int = 8
    top: Literal[1, 2] = 1
    capacity: float = 1.25
    balance: float = 0.01
    activation: Activation = "relu"
    dropout: float = 0.0
    kind: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        check_at_least("feedforward.experts", self.experts, 1)
        check_above_zero("feedforward.capacity", self.capacity)
        check_at_least("feedforward.balance", self.balance, 0)
        check_share("feedforward.dropout", self.dropout)
        if self.top > self.experts:
            raise UserError(f"feedforward.top={self.top} of {self.experts} experts: choose fewer")

    def build(self, dim: int, hidden: int, bias: bool) -> nn.Module:
        return ExpertFeedForward(self, dim, hidden, bias)


FeedForwardConfig = Plain | Gated | Experts


class Projections(nn.Module):
    """One projection an expert, side by side in one tensor."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(experts, 1, outputs)) if bias else None

    def forward(self, x: Float[Tensor, "e m i"]) -> Float[Tensor, "e m o"]:
        if self.bias is None:
            return torch.bmm(x, self.weight.to(x.dtype))
        return torch.baddbmm(self.bias.to(x.dtype), x, self.weight.to(x.dtype))

    def of(self, expert: int, x: Float[Tensor, "m i"]) -> Float[Tensor, "m o"]:
        bias = None if self.bias is None else self.bias[expert, 0]
        return F.linear(x, self.weight[expert].T, bias)


@dataclass(frozen=True)
class Routing:
    """What a pass in training has to tell: its balance loss, and how many places were refused."""

    loss: Float[Tensor, ""]
    dropped: Int[Tensor, ""]
    places: int


class ExpertFeedForward(nn.Module):
    """Each token through the experts that its router chose."""

    routing: Routing | None = None

    def __init__(self, config: Experts, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.inner = Projections(config.experts, dim, hidden, bias)
        self.outer = Projections(config.experts, hidden, dim, bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Hidden) -> Hidden:
        flat = rearrange(x, "b t d -> (b t) d")
        # At least in float32: small differences between large scores decide.
        scores = self.router(flat)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        gates, chosen = scores.topk(self.config.top)
        if self.config.top > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        mixed = self._with_room if self.training else self._with_all
        return mixed(flat, scores, gates.to(x.dtype), chosen).view_as(x)

    def _with_room(
        self,
        flat: Flat,
        scores: Float[Tensor, "n e"],
        gates: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
    ) -> Flat:
        """All experts at once, over as many places each; first choices are placed first."""
        config, (tokens, top) = self.config, chosen.shape
        room = max(1, math.ceil(config.capacity * top * tokens / config.experts))
        wanted = chosen.T.flatten()  # every first choice, then every second
        queue = F.one_hot(wanted, config.experts)
        place = (queue.cumsum(0) * queue).sum(-1) - 1  # behind those who came before
        fits = place < room
        # One place more than there is takes what is refused, and is cut off again.
        slot = torch.where(fits, wanted * room + place, config.experts * room)
        read = flat.new_zeros(config.experts * room + 1, flat.shape[1])
        read = read.index_copy(0, slot, flat.repeat(top, 1))
        work = rearrange(read[:-1], "(e m) d -> e m d", e=config.experts)
        done = rearrange(self._experts(work), "e m d -> (e m) d")
        done = torch.cat([done, done.new_zeros(1, done.shape[1])])
        found = done[slot] * (gates.T.flatten() * fits)[:, None].to(done.dtype)
        first = F.one_hot(chosen[:, 0], config.experts).to(scores.dtype).mean(0)
        even = config.experts * (first * scores.mean(0)).sum()
        self.routing = Routing(config.balance * even, (~fits).sum(), len(wanted))
        return rearrange(found, "(k n) d -> k n d", k=top).sum(0).to(flat.dtype)

    def _with_all(
        self,
        flat: Flat,
        scores: Float[Tensor, "n e"],
        gates: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
    ) -> Flat:
        """One expert after the other, over all that chose it."""
        mixed = torch.zeros_like(flat)
        for expert in range(self.config.experts):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            inner = self.activation(self.inner.of(expert, flat[token]))
            found = self.outer.of(expert, inner) * gates[token, choice, None]
            mixed = mixed.index_add(0, token, found.to(mixed.dtype))
        return mixed

    def _experts(self, work: Float[Tensor, "e m d"]) -> Float[Tensor, "e m d"]:
        return self.outer(self.dropout(self.activation(self.inner(work))))


def take_routing(model: nn.Module) -> list[Routing]:
    """What the experts of a model have to tell of their last pass; asked once, it is gone."""
    found = []
    for module in model.modules():
        if isinstance(module, ExpertFeedForward) and module.routing is not None:
            found.append(module.routing)
            module.routing = None
    return found
