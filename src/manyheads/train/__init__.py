"""Training: the loss, optimizer and schedule, checkpoints, and one loop for every task.

Calling this module, `manyheads.train("phrasebook", ["train.steps=400"], out="runs/first")`, trains
a recipe: see `manyheads.recipes.train`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Importing this module puts it in place of the function `manyheads.train`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("manyheads").__getattr__("train")(*args, **options)


sys.modules[__name__].__class__ = _Callable
