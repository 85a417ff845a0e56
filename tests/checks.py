"""The checks of shapes and types that the import hook adds to every function, made quick.

`jaxtyping.jaxtyped` binds the arguments in Python and checks them twice, for the sake of its
messages; then a call of a small function takes fifteen times as long as without checks. Here a
call is checked once: by the same type checker, with axis letters of its own. Where a test does not
concern the core of the package, which has tests of its own, calls of the core are not checked.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
# Axis letters that are bound inside it are forgotten after it; it has no state of its own.
_letters: Any = _jaxtyped("context")
# The packages with tests in folders of their own.
CORE = frozenset({"baselines", "data", "decode", "evaluate", "kernels", "models", "nn", "ops"})
CORE |= {"optimize", "phrasebook", "tasks", "tokenizer", "train"}
_trusted: set[str] = set()  # packages whose calls are not checked now


def checked(part: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Replaces `jaxtyping.jaxtyped`: checks a function, or the fields of a dataclass."""
    if part is None:
        return functools.partial(checked, typechecker=typechecker)
    if inspect.isclass(part):
        if dataclasses.is_dataclass(part) and not hasattr(part.__init__, "__wrapped__"):
            part.__init__ = checked(part.__init__, typechecker=typechecker)  # type: ignore[misc]
        return part
    if "triton" in part.__globals__:  # Triton reads the source of its functions
        return part
    if inspect.isgeneratorfunction(part):  # it yields after its call
        return _jaxtyped(part, typechecker=typechecker)
    typed: Any = None  # made in the first call: most functions are never called
    package = part.__module__.removeprefix("manyheads.").partition(".")[0]

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal typed
        if package in _trusted or jaxtyping.config.jaxtyping_disable:
            return part(*args, **kwargs)
        if typed is None:  # names that only mypy imports mean nothing
            typed = typechecker(part) if _named(part) else part
        with _letters:
            return typed(*args, **kwargs)

    return call


def _named(part: Any) -> bool:
    """Whether every type that a function names is there."""
    try:
        get_type_hints(part)
    except NameError:
        return False
    return True


@contextmanager
def unchecked() -> Iterator[None]:
    """For what cannot bear checks (sizes are symbols while a graph is traced), and for draws by
    the thousand through functions that a smaller draw has checked."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextmanager
def trusting(packages: frozenset[str]) -> Iterator[None]:
    """For tests of other packages than these."""
    _trusted.update(packages)
    try:
        yield
    finally:
        _trusted.difference_update(packages)
