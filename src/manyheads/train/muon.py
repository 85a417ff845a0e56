"""Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for all other parameters.

    B ← μ B + (1 − μ) G        momentum, with G the gradient
    U ← (1 − μ) G + μ B        Nesterov
    W ← (1 − η λ) W − 0.2 η √max(rows, columns) · orthogonalise(U)

The update is that of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`: its entries have the size
of AdamW's, so that one learning rate serves both. Here matrices of the same shape are one batch,
which takes a tenth of the kernel launches, and the packed q, k and v are three matrices.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
    """About U Vᵀ of each matrix U S Vᵀ: singular values from 0.7 to 1.2, in bfloat16.

    Newton–Schulz iteration: X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, from X / ‖X‖.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def split_matrices(model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The matrices for Muon, and the rows of each part: weights of linear layers in blocks."""
    layers = {
        layer
        for block in model.modules()
        if isinstance(block, Block)
        for layer in block.modules()
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad
    }
    rows = {layer.weight: [len(layer.weight)] for layer in layers}
    for module in model.modules():
        if isinstance(module, SelfAttention | CrossAttention) and module.project in layers:
            packed = module.config.sizes
            rows[module.project.weight] = packed[isinstance(module, CrossAttention) :]
    return {p: rows[p] for p in model.parameters() if p in rows}


class MuonAdamW(torch.optim.AdamW):
    """One optimizer: groups with `rows`, the parts of each matrix, by Muon; the others by AdamW."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if "rows" in group:
                self._muon(group)
        self.param_groups = [group for group in groups if "rows" not in group]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects moments of each parameter

    @torch.no_grad()
    def _muon(self, group: dict[str, Any]) -> None:
        pairs = zip(group["params"], group["rows"], strict=True)
        reached = [(weight, rows) for weight, rows in pairs if weight.grad is not None]
        weights = [weight for weight, _ in reached]
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        batches: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (weight, rows), update in zip(reached, updates, strict=True):
            for part in zip(weight.split(rows), update.split(rows), strict=True):
                batches[part[0].shape].append(part)
        for shape, batch in batches.items():
            orthogonal = orthogonalise(torch.stack([update for _, update in batch]))
            parts = [part for part, _ in batch]
            rate = 0.2 * math.sqrt(max(shape)) * group["lr"]
            torch._foreach_add_(parts, list(orthogonal.to(parts[0].dtype)), alpha=-rate)
