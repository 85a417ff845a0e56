"""Manyheads trains, runs and shows Transformers.

The names below are the public surface; everything else is reached by its module. They are
imported when first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.exchange.huggingface import from_huggingface, to_huggingface
    from manyheads.loading import load
    from manyheads.models.capture import capture
    from manyheads.nn.attend import attend, attention_weights
    from manyheads.presets import build, presets

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
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyheads' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
