"""Fine-tune few weights: freeze parameters by pattern, and LoRA (Hu et al. 2021).

LoRA trains W + (alpha / rank) · B A with W frozen, B [out, rank] and A [rank, in]. B starts at 0,
so training starts at the pretrained model. It is a parametrization of `weight`: every computation
that reads the weight gets the sum, and the merged model has the names of the original one.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manyheads.config import Count, Positive
from manyheads.errors import UserError

Patterns = tuple[str, ...]
ORIGINAL, UPDATE = ".parametrizations.weight.original", ".parametrizations.weight.0."


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of LoRA."""

    rank: Annotated[Count, "Rank of the update"] = 8
    alpha: Annotated[Positive, "The update is scaled by alpha / rank"] = 16.0
    targets: Annotated[Patterns, "Linear layers to adapt, by pattern"] = (
        "*encoder.*",
        "*decoder.*",
    )
    train: Annotated[Patterns, "Other parameters that stay trainable, by pattern"] = (
        "head.*",
        "pooler.*",
    )


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Settings of what is trained of a model that a run starts from."""

    freeze: Annotated[Patterns, "Frozen parameters, e.g. encoder.*"] = ()
    lora: Annotated[Lora | None, "LoRA: train low-rank updates only, e.g. finetune.lora.rank=8"] = (
        None
    )


class LowRank(nn.Module):
    """W → W + scale · B A."""

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = scale
        self.a = nn.Parameter(weight.new_empty(rank, columns))
        self.b = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


class Merged(nn.Module):
    """The merged weights, under the names that they have without LoRA."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tensors: dict[str, Tensor] = self.model.state_dict()
        adapted = [name for name in tensors if name.endswith(ORIGINAL)]
        with torch.no_grad():
            sums = {
                name: self.model.get_submodule(name.removesuffix(ORIGINAL)).weight
                for name in adapted
            }
        return {
            name.replace(ORIGINAL, ".weight"): sums.get(name, tensor)
            for name, tensor in tensors.items()
            if UPDATE not in name
        }

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Merged weights become the original ones, with updates of 0."""
        tensors = self.model.state_dict()
        for name, tensor in tensors.items():
            if UPDATE not in name:
                tensor.copy_(state_dict[name.replace(ORIGINAL, ".weight")])
            elif name.endswith(".b"):
                tensor.zero_()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_buffers(*args, **kwargs)


def matches(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def restrict(model: nn.Module, finetune: Finetune) -> nn.Module:
    """Freeze parameters and add LoRA; returns the module to save."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in finetune.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"finetune.freeze={pattern} matches none of: {', '.join(names[:6])}, …")
    lora = finetune.lora
    for name, parameter in model.named_parameters():
        is_trained = lora is None or matches(name, lora.train)
        parameter.requires_grad_(is_trained and not matches(name, finetune.freeze))
    if lora is not None:
        linears = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and matches(name, lora.targets)
        ]
        if not linears:
            raise UserError(f"finetune.lora.targets={','.join(lora.targets)} match no linear layer")
        for name, module in linears:
            if not matches(f"{name}.weight", finetune.freeze):
                update = LowRank(module.weight, lora.rank, lora.alpha / lora.rank)
                parametrize.register_parametrization(module, "weight", update)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("finetune freezes every parameter: leave some out of finetune.freeze")
    return model if lora is None else Merged(model)
