"""The checks of shapes and types that the import hook adds to every function, made quick.

`jaxtyping.jaxtyped` binds the arguments in Python and checks them twice, for the sake of its
messages; then a call of a small function takes fifteen times as long as without checks. Here a
call is checked once: by the same type checker, with axis letters of its own. Shapes of named and
fixed axes, almost all, are compared here. Where a test does not concern the core of the package,
which has tests of its own, calls of the core are not checked.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import jaxtyping
import torch
from jaxtyping._storage import get_shape_memo

_jaxtyped = jaxtyping.jaxtyped
# Axis letters that are bound inside it are forgotten after it; it has no state of its own.
_letters: Any = _jaxtyped("context")
# The packages with tests in folders of their own.
CORE = frozenset({"baselines", "data", "decode", "evaluate", "kernels", "models", "nn", "ops"})
CORE |= {"optimize", "phrasebook", "tasks", "tokenizer", "train"}
_trusted: set[str] = set()  # packages whose calls are not checked now
_ArrayType: Any = type(jaxtyping.Float[torch.Tensor, ""])
_is_instance = _ArrayType.__instancecheck__


@functools.cache
def _axes(array_type: Any) -> tuple[str | int, ...] | None:
    """Letters and sizes, or None for axes of other kinds: `...`, `*n`, `#t`, `t+1`."""
    axes = [getattr(axis, "name", getattr(axis, "size", None)) for axis in array_type.dims]
    plain = array_type.index_variadic is None and array_type.array_type is torch.Tensor
    plain = plain and not any(getattr(axis, "broadcastable", True) for axis in array_type.dims)
    return tuple(axes) if plain and None not in axes else None


@functools.cache
def _has_dtype(array_type: Any, dtype: torch.dtype) -> bool:
    return isinstance(torch.empty(0, dtype=dtype), array_type.dtype[torch.Tensor, "..."])


def is_instance(array_type: Any, x: Any) -> bool:
    """Replaces `isinstance` for types such as `Float[Tensor, "b t"]`; binds letters if x fits."""
    axes = _axes(array_type)
    if axes is None or not isinstance(x, torch.Tensor):
        return bool(_is_instance(array_type, x))
    if len(axes) != x.ndim or not _has_dtype(array_type, x.dtype):
        return False
    letters = get_shape_memo()[0]
    bound = dict(letters)
    for axis, size in zip(axes, x.shape, strict=True):
        if (axis if isinstance(axis, int) else bound.setdefault(axis, size)) != size:
            return False
    letters.update(bound)
    return True


_ArrayType.__instancecheck__ = is_instance


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
    has_letters = True
    package = part.__module__.removeprefix("manyheads.").partition(".")[0]

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal typed, has_letters
        if package in _trusted or jaxtyping.config.jaxtyping_disable:
            return part(*args, **kwargs)
        if typed is None:  # names that only mypy imports mean nothing
            hints = _hints(part)
            typed = part if hints is None else typechecker(part)
            has_letters = "jaxtyping" in str(hints)
        if not has_letters:
            return typed(*args, **kwargs)
        with _letters:
            return typed(*args, **kwargs)

    return call


def _hints(part: Any) -> dict[str, Any] | None:
    """The types that a function names, or None if one of them is not there."""
    try:
        return get_type_hints(part)
    except NameError:
        return None


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
