"""Errors of the user and of data: one clear line and an exit code, never a traceback."""

import importlib
import math
from typing import Any


class UserError(ValueError):
    """A wrong command or setting: one line that names the problem and the fix. Exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        """One line for any terminal, whatever the names and texts in it hold."""
        return "".join(sign if sign.isprintable() else " " for sign in super().__str__())


class DataError(UserError):
    """A file that exists and cannot be used: corpus, checkpoint, run folder. Exit code 3."""

    exit_code = 3


def import_optional(name: str, extra: str) -> Any:
    """Import a package that one of our optional extras installs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"this needs {package}: pip install 'manyheads[{extra}]'") from None


def check_at_least(name: str, value: float | int | None, least: int) -> None:
    """Refuse a number that is below, NaN or infinite. None is a number left out."""
    if value is not None and not least <= value < math.inf:
        raise UserError(f"{name}={value} must be at least {least}")


def check_above_zero(name: str, value: float | int | None) -> None:
    """Refuse a number that is not above 0, NaN or infinite. None is a number left out."""
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{name}={value} must be a finite number above 0")
