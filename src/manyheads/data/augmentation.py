"""Augmentation of training images: crop, flip, RandAugment, mixup and CutMix.

All randomness comes from the generator that is passed in, one of the CPU, so that the images of a
step are a pure function of (seed, step) with the same draws on every device. Pixels are numbers
from 0 to 1; each image has its own draws, and no loop goes over images.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn import functional as F

from manyheads.config import Fraction, Natural, NonNegative

Images = Float[Tensor, "b channels height width"]
Amounts = Float[Tensor, " b"]
Counts = Int[Tensor, " b"]
Matrices = Float[Tensor, "b 3 3"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Changes of each training image, in the order of the fields; by default none."""

    crop_padding: Annotated[Natural, "Shift by up to so many pixels each way"] = 0
    flip: Annotated[Fraction, "Probability of a horizontal flip"] = 0.0
    operations: Annotated[Natural, "Number of random operations (RandAugment)"] = 0
    strength: Annotated[Fraction, "Strength of the operations; 1 is AutoAugment's maximum"] = 0.5
    kind: ClassVar[str] = "augment"
    REMOVED: ClassVar[dict[str, tuple[Any, ...]]] = {"padding": ("zero",), "cutout": (0,)}


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mix images of a batch and their labels; by default not.

    With both mixup and cutmix, each is used half of the time.
    """

    mixup: Annotated[NonNegative, "α of mixup's Beta(α, α); 0 is off"] = 0.0
    cutmix: Annotated[NonNegative, "α of CutMix's Beta(α, α); 0 is off"] = 0.0
    chance: Annotated[Fraction, "Probability of mixing an image"] = 1.0
    kind: ClassVar[str] = "mixing"


def augment(images: Images, settings: Augment, generator: Generator) -> Images:
    """The images of a batch, each changed as configured."""
    if settings.crop_padding:
        images = crop(images, settings.crop_padding, generator)
    if settings.flip:
        images = flip(images, settings.flip, generator)
    if settings.operations:
        images = rand_augment(images, settings.operations, settings.strength, generator)
    return images


def crop(images: Images, padding: int, generator: Generator) -> Images:
    """y[i, j] = x[i + r, j + c], with r and c from −padding to padding, and 0 beyond the edge."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    left = _integers(2 * padding + 1, batch, generator).to(images.device)
    top = _integers(2 * padding + 1, batch, generator).to(images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    index = torch.arange(batch, device=images.device)
    cropped = padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return rearrange(cropped, "b height width channels -> b channels height width").contiguous()


def flip(images: Images, probability: float, generator: Generator) -> Images:
    """y[i, j] = x[i, width − 1 − j], for some images."""
    chosen = _uniform(len(images), generator).to(images.device) < probability
    return torch.where(_per_image(chosen), images.flip(-1), images)


def rand_augment(images: Images, operations: int, strength: float, generator: Generator) -> Images:
    """RandAugment: each image gets operations drawn uniformly, all of the same strength.

    An operation with two directions takes either. The geometric ones of an image are composed
    and applied once, before those of colour; one of the choices is the identity.
    """
    batch, _, height, width = images.shape
    chosen, amounts = [], []
    for _ in range(operations):
        chosen.append(_integers(GEOMETRY + len(COLOUR) + 1, batch, generator).to(images.device))
        sign = 1.0 - 2.0 * _integers(2, batch, generator).to(images)
        amounts.append(strength * sign)
    matrices = torch.eye(3).to(images).expand(batch, 3, 3)
    for choice, amount in zip(chosen, amounts, strict=True):
        for number, matrix in enumerate(geometry(amount, height, width)):
            is_chosen = (choice == number)[:, None, None]
            matrices = torch.where(is_chosen, matrices @ matrix, matrices)
    is_moved = torch.stack(chosen).lt(GEOMETRY).any(0)
    images = torch.where(_per_image(is_moved), warp(images, matrices), images)
    for choice, amount in zip(chosen, amounts, strict=True):
        for number, colour in enumerate(COLOUR, start=GEOMETRY):
            changed = colour(images, _per_image(amount)).clamp(0, 1)
            images = torch.where(_per_image(choice == number), changed, images)
    return images


def warp(images: Images, matrices: Matrices) -> Images:
    """y(p) = x(M p) with p = (column, row, 1) in pixels from the centre, zero beyond the edge.

    Values between pixels are interpolated bilinearly.
    """
    height, width = images.shape[-2:]
    # affine_grid has coordinates from −1 to 1 along either side.
    sides = torch.tensor([width / 2, height / 2, 1.0]).to(matrices)
    grid = F.affine_grid(
        (matrices * sides / sides[:, None])[:, :2], list(images.shape), align_corners=False
    )
    return F.grid_sample(images, grid.to(images), align_corners=False).clamp(0, 1)


# The greatest changes in AutoAugment's table of operations, at strength 1.
SHEAR = 0.3
SHIFT = 150 / 331  # of the side
ROTATION = math.radians(30)
BLEND = 0.9
BITS = 4  # removed by posterise

GEOMETRY = 5  # operations


def geometry(amount: Amounts, height: int, width: int) -> Float[Tensor, "5 b 3 3"]:
    """The matrices M of each geometric operation; entries not in the table are the identity's."""
    cosine, sine = (amount * ROTATION).cos(), (amount * ROTATION).sin()
    operations: tuple[dict[tuple[int, int], Amounts], ...] = (
        {(0, 2): amount * SHIFT * width},  # shift columns
        {(1, 2): amount * SHIFT * height},  # shift rows
        # Shear: a row moves in proportion to its distance from the centre.
        {(0, 1): amount * SHEAR},
        {(1, 0): amount * SHEAR},  # the same for columns
        {(0, 0): cosine, (0, 1): -sine, (1, 0): sine, (1, 1): cosine},  # counter-clockwise
    )
    matrices = torch.eye(3).to(amount).repeat(GEOMETRY, len(amount), 1, 1)
    for number, entries in enumerate(operations):
        for (row, column), values in entries.items():
            matrices[number, :, row, column] = values
    return matrices


# Operations of colour: m is an amount per image, from −1 to 1, and b is BLEND.


def brightness(x: Images, m: Tensor) -> Images:
    """y = (1 + b m) x."""
    return x * (1 + BLEND * m)


def contrast(x: Images, m: Tensor) -> Images:
    """y = x̄ + (1 + b m)(x − x̄), x̄ the mean of the image."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (1 + BLEND * m) * (x - mean)


def sharpness(x: Images, m: Tensor) -> Images:
    """y = x̃ + (1 + b m)(x − x̃), x̃ blurred: weight 5/13 for a pixel, 1/13 for its 8 neighbours."""
    around = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    blurred = (9 * around + 4 * x) / 13
    return blurred + (1 + BLEND * m) * (x - blurred)


def posterise(x: Images, m: Tensor) -> Images:
    """y = ⌊255 x / 2ⁿ⌋ 2ⁿ / 255: drop the n lowest of eight bits, n the nearest to BITS |m|."""
    step = 2 ** (m.abs() * BITS).round()
    return ((255 * x).round() / step).floor() * step / 255


def solarise(x: Images, m: Tensor) -> Images:
    """y = 1 − x where x > 1 − |m|, y = x elsewhere."""
    return torch.where(x > 1 - m.abs(), 1 - x, x)


COLOUR = (brightness, contrast, sharpness, posterise, solarise)


def mix(
    images: Images, labels: Counts, classes: int, settings: Mixing, generator: Generator
) -> tuple[Images, Float[Tensor, "b classes"]]:
    """(images, targets): mixed with a permutation of the batch; targets add up to 1."""
    one_hot = F.one_hot(labels.long(), classes).to(images.dtype)
    if not (settings.mixup or settings.cutmix) or not settings.chance:
        return images, one_hot
    batch = len(images)
    order = torch.randperm(batch, generator=generator).to(images.device)
    is_mixed = (_uniform(batch, generator) < settings.chance).to(images.device)
    is_mixup = torch.full_like(is_mixed, settings.mixup > 0)
    if settings.mixup and settings.cutmix:
        is_mixup = (_uniform(batch, generator) < 0.5).to(images.device)
    y, weight = images, torch.ones(batch).to(images)
    for function, alpha, chosen in (
        (mixup, settings.mixup, is_mixed & is_mixup),
        (cutmix, settings.cutmix, is_mixed & ~is_mixup),
    ):
        if alpha:
            mixed, mixed_weight = function(images, images[order], alpha, generator)
            y = torch.where(_per_image(chosen), mixed, y)
            weight = torch.where(chosen, mixed_weight, weight)
    return y, weight[:, None] * one_hot + (1 - weight[:, None]) * one_hot[order]


def mixup(
    images: Images, others: Images, alpha: float, generator: Generator
) -> tuple[Images, Amounts]:
    """y = λ x + (1 − λ) x′ with λ from Beta(α, α), and λ, the weight of x (mixup)."""
    weight = _beta(alpha, len(images), generator).to(images)
    weights = _per_image(weight)
    return weights * images + (1 - weights) * others, weight


def cutmix(
    images: Images, others: Images, alpha: float, generator: Generator
) -> tuple[Images, Amounts]:
    """y = x with a rectangle of x′, and the fraction of pixels that are those of x (CutMix).

    The rectangle has √(1 − λ) of either side, λ from Beta(α, α), around a uniformly drawn pixel;
    it is clipped at the edge, so the fraction is counted.
    """
    batch, _, height, width = images.shape
    side = (1 - _beta(alpha, batch, generator)).clamp(min=0).sqrt()
    heights, widths = (side * height).long(), (side * width).long()
    top = (_integers(height, batch, generator) - heights // 2)[:, None]
    left = (_integers(width, batch, generator) - widths // 2)[:, None]
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows = (rows >= top) & (rows < top + heights[:, None])
    in_columns = (columns >= left) & (columns < left + widths[:, None])
    box = (in_rows[:, None, :, None] & in_columns[:, None, None, :]).to(images.device)
    weight = 1 - box.sum((1, 2, 3)).to(images) / (height * width)
    return torch.where(box, others, images), weight


def _beta(alpha: float, count: int, generator: Generator) -> Amounts:
    """Samples of Beta(α, α) = g / (g + g′), both of Gamma(α).

    Gamma(α) = Gamma(α + 1) · u^(1/α) is computed in logarithms: for a small α it underflows, and
    the quotient would be 0/0.
    """
    shape = torch.full((2, count), alpha + 1, dtype=torch.float64)
    uniform = torch.rand(shape.shape, generator=generator, dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=generator)
    logs = gamma.log() + (1 - uniform).log() / alpha
    return (logs[0] - logs[1]).sigmoid()


def _uniform(count: int, generator: Generator) -> Amounts:
    return torch.rand(count, generator=generator)


def _integers(below: int, count: int, generator: Generator) -> Counts:
    return torch.randint(below, (count,), generator=generator)


def _per_image(values: Float[Tensor, " b"] | Bool[Tensor, " b"]) -> Tensor:
    """A value for each image, shaped to broadcast over its pixels."""
    return rearrange(values, "b -> b 1 1 1")
