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

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.exchange.huggingface import from_huggingface, to_huggingface
    from manyheads.loading import load
    from manyheads.models.capture import capture
    from manyheads.nn.attend import attend, attention_weights
    from manyheads.presets import build, presets
    from manyheads.recipes import train

__version__ = "0.1.0"

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


class _CallableModule(ModuleType):
    """A submodule with the name of a public function, `train` or `presets`: a call is that of it.

    Importing the submodule makes it an attribute of this package, in place of the function.
    """

    def __call__(self, *args: Any, **named: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOMES[name]), name)(*args, **named)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted([*__all__, *(name for name in super().__dir__() if name.startswith("__"))])


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
