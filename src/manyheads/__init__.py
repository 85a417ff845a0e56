"""Manyheads trains, runs and explains Transformers.

    run = manyheads.train("phrasebook", ["train.steps=400"], out="runs/first")
    run = manyheads.load("runs/first")
    run.translate(["The small dog sees the tree."], beam=5)
    run.model, run.tokenizer                          # a PyTorch module, and its tokenizer

    attend, attention_weights    attention as functions of tensors
    build, presets               models by the name of their paper's configuration
    train, load                  recipes to run folders, run folders to models
    from_huggingface, to_huggingface
    capture                      attention weights and hidden states of a forward pass

Everything else is reached by its module. Names are imported when first used, so that the command
line answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.exchange.huggingface import from_huggingface, to_huggingface
    from manyheads.loading import load
    from manyheads.models.capture import capture
    from manyheads.nn.attend import attend, attention_weights
    from manyheads.presets import build, presets
    from manyheads.recipes import train

__version__ = "0.2.0"

_HOMES = {
    "attend": "manyheads.nn.attend",
    "attention_weights": "manyheads.nn.attend",
    "build": "manyheads.presets",
    "capture": "manyheads.models.capture",
    "from_huggingface": "manyheads.exchange.huggingface",
    "load": "manyheads.loading",
    "presets": "manyheads.presets",
    "to_huggingface": "manyheads.exchange.huggingface",
    "train": "manyheads.recipes",
}

__all__ = [
    "attend",
    "attention_weights",
    "build",
    "capture",
    "from_huggingface",
    "load",
    "presets",
    "to_huggingface",
    "train",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
