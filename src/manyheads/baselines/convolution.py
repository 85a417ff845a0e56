"""Convolutions over positions, with a cache for decoding.

    y_t = b + Σ_{j=0}^{k−1} W_j x_{t + (j − a) δ}

for kernel size k and dilation δ, with zeros beyond the ends. Centred: a = (k − 1) / 2. Causal:
a = k − 1, so that no output depends on a later input; a step needs the last (k − 1) δ inputs.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.nn.attention import StateCache
from manyheads.nn.shapes import Hidden, PaddingMask


def check_kernel(kernel: int) -> None:
    if kernel % 2 == 0:
        raise UserError(f"model.kernel={kernel} must be odd: the encoder's kernels are centred")


class Convolution(nn.Module):
    """A centred or causal convolution; with a cache, it continues after the cached inputs."""

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
            x = zero_padding(x, real)
        cached = None if cache is None else cache.state(self)
        if cached is None:
            past = x.new_zeros(x.shape[0], self.before, x.shape[2])
        else:
            past = rearrange(cached[0], "p b d -> b p d")
        future = x.new_zeros(x.shape[0], self.after, x.shape[2])
        x = torch.cat([past, x, future], dim=1)
        if cache is not None:
            newest = x[:, x.shape[1] - self.before :]
            cache.set_state(self, (rearrange(newest, "b p d -> p b d"),))
        return rearrange(self.inner(rearrange(x, "b t d -> b d t")), "b d t -> b t d")


def zero_padding(x: Hidden, real: PaddingMask) -> Hidden:
    """Zeros at padding, as beyond the ends of a text without padding."""
    return x.masked_fill(~real[..., None], 0.0)
