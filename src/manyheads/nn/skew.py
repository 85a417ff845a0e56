"""From distances to pairs of positions and back, without an index for each pair.

A table with a column for each distance j − i and the square of all pairs (i, j) hold the same
numbers, each row moved one place further than the one above it. So a column of padding, and the
same memory read in rows of another length, turns one into the other: no numbers are gathered,
and none are added up at one place by many threads.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

Met = Float[Tensor, "b h t r"]
Stretched = Float[Tensor, "b h t c"]
Square = Float[Tensor, "b h t t"]


def skew(met: Met) -> Square:
    """out[i, j] = met[i, j − i + n − 1]: of n queries, the first column is the distance −(n−1).

    With one column of padding each row is one longer than those in which all of them are then
    read, and so begins one place further left than the row above it.
    Where the columns end at the distance 0, what stands at j > i means nothing.
    """
    length, columns = met.shape[2:]
    numbers = F.pad(met, (1, 0)).flatten(-2)[..., length:]
    return numbers.unflatten(-1, (length, columns))[..., :length]


def unskew(square: Square) -> Met:
    """out[i, d] = square[i, i + d − (n − 1)] for the 2n − 1 distances, 0 where there is no pair."""
    length = square.shape[2]
    numbers = F.pad(F.pad(square, (length - 1, 0)).flatten(-2), (0, length))
    return numbers.unflatten(-1, (length, 2 * length))[..., :-1]


def stretch(met: Met, lowest: int, first: int, last: int) -> Stretched:
    """The columns `first` … `last` of a table whose columns are the numbers from `lowest` on.

    A number beyond them has the last column on its side.
    """
    highest = lowest + met.shape[-1] - 1
    inside = met[..., max(first, lowest) - lowest : min(last, highest) - lowest + 1]
    before, after = max(0, lowest - first), max(0, last - highest)
    if not before and not after:
        return inside
    left = inside[..., :1].expand(*inside.shape[:-1], before)
    right = inside[..., -1:].expand(*inside.shape[:-1], after)
    return torch.cat([left, inside, right], dim=-1)


def shrink(met: Met, lowest: int, first: int, last: int) -> Stretched:
    """The other way: columns `first` … `last`, two or more; the ends have the sums of the rest."""
    highest = lowest + met.shape[-1] - 1
    met = F.pad(met, (max(0, lowest - first), max(0, last - highest)))
    lowest = min(lowest, first)
    left = met[..., : first - lowest + 1].sum(-1, keepdim=True)
    right = met[..., last - lowest :].sum(-1, keepdim=True)
    return torch.cat([left, met[..., first - lowest + 1 : last - lowest], right], dim=-1)
