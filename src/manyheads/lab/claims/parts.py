"""A sentence of several parts: which of them hold."""

from collections.abc import Mapping, Sequence

from manyheads.lab.claims.claim import Judged


def in_parts(parts: Mapping[str, bool], why: str, needed: Sequence[str] = ()) -> Judged:
    """Holds if all parts do; fails if none does, or one that is `needed` does not.

    Between these it depends, and the parts that hold are named.
    """
    held = [part for part, found in parts.items() if found]
    if len(held) == len(parts):
        return Judged("holds", why)
    if not held or not all(parts[part] for part in needed):
        return Judged("fails", why)
    return Judged("depends", f"holds only in this, that {listed(held)}: {why}")


def listed(names: Sequence[str]) -> str:
    """One, two and three."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
