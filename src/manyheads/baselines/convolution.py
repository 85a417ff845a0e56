"""Convolutions over places: each vector is made from those near it, whichever place that is.

    y_t = b + Σ_{j=0}^{k−1} W_j x_{t + (j − a) δ}

with k vectors read δ places apart, and zeros where there are none. Centred, a = (k − 1) / 2;
causal, a = k − 1: no vector knows of a later place, and a step needs the last (k − 1) δ alone.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.errors import UserError, check_at_least
from manyheads.nn.shapes import Hidden, PaddingMask
from manyheads.nn.states import StateCache


def check_kernel(kernel: int) -> None:
    check_at_least("model.kernel", kernel, 1)
    if kernel % 2 == 0:
        raise UserError(f"model.kernel={kernel} must be odd: an encoder sees as far on either side")


class Convolution(nn.Module):
    """`outer` channels from `width`; with a cache it goes on after the places that it has read."""

    def __init__(
        self, width: int, outer: int, kernel: int, *, dilation: int = 1, causal: bool, gain: float
    ) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, outer, kernel, dilation=dilation)
        reach = (kernel - 1) * dilation
        self.before, self.after = (reach, 0) if causal else (reach // 2, reach // 2)
        nn.init.normal_(self.inner.weight, std=gain * (kernel * width) ** -0.5)
        nn.init.zeros_(self.inner.bias)  # type: ignore[arg-type]

    def forward(
        self, x: Hidden, real: PaddingMask | None = None, cache: StateCache | None = None
    ) -> Tensor:
        if real is not None:
            x = hidden_behind(x, real)
        held = None if cache is None else cache.state(self)
        if held is None:
            past = x.new_zeros(x.shape[0], self.before, x.shape[2])
        else:
            past = rearrange(held[0], "p b d -> b p d")
        after = x.new_zeros(x.shape[0], self.after, x.shape[2])
        read = torch.cat([past, x, after], dim=1)
        if cache is not None:
            newest = read[:, read.shape[1] - self.before :]
            cache.set_state(self, (rearrange(newest, "b p d -> p b d"),))
        return rearrange(self.inner(rearrange(read, "b t d -> b d t")), "b d t -> b t d")


def hidden_behind(x: Hidden, real: PaddingMask) -> Hidden:
    """Zeros in the place of padding, as beyond the ends of a text that stands alone."""
    return x.masked_fill(~real[..., None], 0.0)
