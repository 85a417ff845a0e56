"""Mixture of experts: many feed-forward layers, of which a router chooses one or two per token.

    y = Σ_{e ∈ top k} g_e FFN_e(x),   p = softmax(x W_r)
    g = p for one expert (Switch), p over the sum of the chosen for several (GShard)

In training each expert has a capacity, and tokens beyond it are dropped (only the residual
connection carries them). The balance loss E · Σ_e f_e P_e, where f_e is the share of tokens whose
first choice is e and P_e the mean of p_e, is least if all experts have the same load. In inference
nothing is dropped, so that the result of a token does not depend on other tokens.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count, NonNegative, Positive
from manyheads.errors import UserError
from manyheads.nn.layers import ACTIVATIONS, Activation, Gated, InnerDropout, Plain
from manyheads.nn.shapes import Hidden

Flat = Float[Tensor, "n d"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of plain feed-forward layers."""

    experts: Annotated[Count, "Feed-forward layers in each block"] = 8
    top: Annotated[Literal[1, 2], "Experts per token"] = 1
    capacity: Annotated[Positive, "Tokens an expert takes in training, in even shares"] = 1.25
    balance: Annotated[NonNegative, "Weight of the balance loss"] = 0.01
    activation: Annotated[Activation, "Activation function"] = "relu"
    dropout: InnerDropout = 0.0
    kind: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        if self.top > self.experts:
            raise UserError(f"feedforward.top={self.top} of {self.experts} experts: choose fewer")

    def build(self, dim: int, ffn_dim: int, bias: bool) -> nn.Module:
        return ExpertFeedForward(self, dim, ffn_dim, bias)


FeedForwardConfig = Plain | Gated | Experts


class Projections(nn.Module):
    """A projection for each expert, in one tensor."""

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
    """Statistics of a training pass: the balance loss, and how many choices were dropped."""

    loss: Float[Tensor, ""]
    dropped: Int[Tensor, ""]
    places: int  # choices: tokens × top


class ExpertFeedForward(nn.Module):
    """Each token through the experts that the router chooses for it."""

    routing: Routing | None = None

    def __init__(self, config: Experts, dim: int, ffn_dim: int, bias: bool) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.inner = Projections(config.experts, dim, ffn_dim, bias)
        self.outer = Projections(config.experts, ffn_dim, dim, bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Hidden) -> Hidden:
        flat = rearrange(x, "b t d -> (b t) d")
        # At least in float32: small differences between large scores decide.
        scores = self.router(flat)
        probs = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        gates, chosen = probs.topk(self.config.top)
        if self.config.top > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        if not self.training:
            return self._each_expert(flat, gates.to(x.dtype), chosen).view_as(x)
        y, dropped = self._with_capacity(flat, gates.to(x.dtype), chosen)
        first = F.one_hot(chosen[:, 0], self.config.experts).to(probs.dtype).mean(0)
        balance = self.config.experts * (first * probs.mean(0)).sum()
        self.routing = Routing(self.config.balance * balance, dropped, chosen.numel())
        return y.view_as(x)

    def _with_capacity(
        self, flat: Flat, gates: Float[Tensor, "n k"], chosen: Int[Tensor, "n k"]
    ) -> tuple[Flat, Int[Tensor, ""]]:
        """All experts at once, each with as many slots; first choices get slots first."""
        experts, (tokens, top) = self.config.experts, chosen.shape
        capacity = max(1, math.ceil(self.config.capacity * top * tokens / experts))
        choices = chosen.T.flatten()  # every first choice, then every second
        queue = F.one_hot(choices, experts)
        place = (queue.cumsum(0) * queue).sum(-1) - 1  # in the queue of the chosen expert
        fits = place < capacity
        # Dropped choices go to one extra slot, which is cut off.
        slot = torch.where(fits, choices * capacity + place, experts * capacity)
        inputs = flat.new_zeros(experts * capacity + 1, flat.shape[1])
        inputs = inputs.index_copy(0, slot, flat.repeat(top, 1))
        inner = self.activation(self.inner(rearrange(inputs[:-1], "(e m) d -> e m d", e=experts)))
        outputs = self.outer(self.dropout(inner))
        outputs = F.pad(rearrange(outputs, "e m d -> (e m) d"), (0, 0, 0, 1))
        weighted = outputs[slot] * (gates.T.flatten() * fits)[:, None].to(outputs.dtype)
        y = rearrange(weighted, "(k n) d -> k n d", k=top).sum(0).to(flat.dtype)
        return y, (~fits).sum()

    def _each_expert(
        self, flat: Flat, gates: Float[Tensor, "n k"], chosen: Int[Tensor, "n k"]
    ) -> Flat:
        """One expert after the other, over all tokens that chose it."""
        y = torch.zeros_like(flat)
        for expert in range(self.config.experts):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            inner = self.activation(self.inner.of(expert, flat[token]))
            weighted = self.outer.of(expert, inner) * gates[token, choice, None]
            y = y.index_add(0, token, weighted.to(y.dtype))
        return y


def take_routing(model: nn.Module) -> list[Routing]:
    """The routing statistics of the last training pass; each is returned once."""
    taken = []
    for module in model.modules():
        if isinstance(module, ExpertFeedForward) and module.routing is not None:
            taken.append(module.routing)
            module.routing = None
    return taken
