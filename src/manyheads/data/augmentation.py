"""Training pictures made more various: shifted, mirrored, changed (RandAugment), cut out, mixed.

Everything is drawn from the generator that is given, on the generator's device, so that the
pictures of a step are a pure function of (seed, step), the draws the same for every device.
Pictures hold values from 0 to 1; each has its own draws, and no loop goes over pictures.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from torch import Generator, Tensor
from torch.nn import functional as F

from manyheads.errors import UserError, check_at_least

Images = Float[Tensor, "b channels height width"]
Bytes = UInt8[Tensor, "b channels height width"]
Amounts = Float[Tensor, " b"]
Counts = Int[Tensor, " b"]
Matrices = Float[Tensor, "b 3 3"]
Inside = Bool[Tensor, "b height width"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What becomes of each training picture; as it stands, nothing.

    In this order: it is moved by up to `crop_padding` pixels each way, with `padding` beyond its
    edge; mirrored with chance `flip`; changed by so many random `operations` (RandAugment), each
    `strength` of the way to AutoAugment's greatest change; and a black square of `cutout` pixels
    a side is laid on it, in part beyond its edge.
    """

    crop_padding: int = 0
    padding: Literal["zero", "reflect"] = "zero"
    flip: float = 0.0
    operations: int = 0
    strength: float = 0.5
    cutout: int = 0
    kind: ClassVar[str] = "augment"

    def __post_init__(self) -> None:
        for name in ("crop_padding", "operations", "cutout"):
            check_at_least(f"data.augment.{name}", getattr(self, name), 0)
        for name in ("flip", "strength"):
            _check_part(f"data.augment.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Pictures mixed with others of their batch, and their labels with them; as it stands, not.

    `mixup` and `cutmix` are the α of the Beta(α, α) that shares are drawn from, 0 for never. Each
    picture is mixed with the given `chance`, where both are on in either way half of the time.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    chance: float = 1.0
    kind: ClassVar[str] = "mixing"

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            check_at_least(f"data.mixing.{name}", getattr(self, name), 0)
        _check_part("data.mixing.chance", self.chance)


def _check_part(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name}={value} must be from 0 to 1")


def augment(images: Images | Bytes, settings: Augment, generator: Generator) -> Images:
    """The pictures of a batch, each changed as the settings say; bytes are taken over 255."""
    x = images if images.is_floating_point() else images / 255
    if settings.crop_padding:
        x = crop(x, settings.crop_padding, settings.padding, generator)
    if settings.flip:
        x = flip(x, settings.flip, generator)
    if settings.operations:
        x = operate(x, settings.operations, settings.strength, generator)
    if settings.cutout:
        x = cut_out(x, settings.cutout, generator)
    return x


def crop(
    images: Images, padding: int, beyond: Literal["zero", "reflect"], generator: Generator
) -> Images:
    """y[i, j] = x[i + r, j + c], with r and c from −padding to padding: a crop of the padded x."""
    batch, _, height, width = images.shape
    if beyond == "reflect" and padding >= min(height, width):
        raise UserError(f"data.augment.crop_padding={padding} must be below {min(height, width)}")
    mode = "reflect" if beyond == "reflect" else "constant"
    padded = F.pad(images, (padding, padding, padding, padding), mode=mode)
    across = _whole(2 * padding + 1, batch, generator).to(images.device)
    down = _whole(2 * padding + 1, batch, generator).to(images.device)
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = across[:, None] + torch.arange(width, device=images.device)
    each = torch.arange(batch, device=images.device)
    taken = padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return rearrange(taken, "b height width channels -> b channels height width").contiguous()


def flip(images: Images, chance: float, generator: Generator) -> Images:
    """y[i, j] = x[i, width − 1 − j], for some pictures."""
    chosen = _uniform(len(images), generator).to(images.device) < chance
    return torch.where(_of_pictures(chosen), images.flip(-1), images)


def cut_out(images: Images, side: int, generator: Generator) -> Images:
    """y = 0 in a square around a pixel drawn evenly, y = x elsewhere (Cutout)."""
    batch, _, height, width = images.shape
    rows = _whole(height, batch, generator) - side // 2
    columns = _whole(width, batch, generator) - side // 2
    box = _box(rows, columns, rows + side, columns + side, height, width)
    return images.masked_fill(rearrange(box.to(images.device), "b h w -> b 1 h w"), 0)


def operate(images: Images, operations: int, strength: float, generator: Generator) -> Images:
    """RandAugment: each picture goes through operations drawn evenly, all equally strong.

    An operation with two directions takes either. The geometric ones of a picture are composed
    and sampled once, before those of colour; one of the choices is to leave it as it is.
    """
    batch, _, height, width = images.shape
    choices = len(GEOMETRY) + len(COLOUR) + 1
    chosen, amounts = [], []
    for _ in range(operations):
        chosen.append(_whole(choices, batch, generator).to(images.device))
        sign = 1.0 - 2.0 * _whole(2, batch, generator).to(images)
        amounts.append(strength * sign)
    matrices = torch.eye(3).to(images).expand(batch, 3, 3)
    for which, amount in zip(chosen, amounts, strict=True):
        for number, geometry in enumerate(GEOMETRY):
            step = matrices @ geometry(amount, height, width)
            matrices = torch.where((which == number)[:, None, None], step, matrices)
    moved = torch.stack(chosen).lt(len(GEOMETRY)).any(0)
    images = torch.where(_of_pictures(moved), warp(images, matrices), images)
    for which, amount in zip(chosen, amounts, strict=True):
        for number, colour in enumerate(COLOUR, start=len(GEOMETRY)):
            changed = colour(images, amount).clamp(0, 1)
            images = torch.where(_of_pictures(which == number), changed, images)
    return images


def warp(images: Images, matrices: Matrices) -> Images:
    """y(p) = x(M p) with p = (column, row, 1) in pixels from the centre, zero beyond the edge.

    Between pixels it is interpolated bilinearly.
    """
    height, width = images.shape[-2:]
    # affine_grid counts from −1 to 1 along either side, whatever their lengths.
    sides = torch.tensor([width / 2, height / 2, 1.0]).to(matrices)
    grid = F.affine_grid(
        (matrices * sides / sides[:, None])[:, :2], list(images.shape), align_corners=False
    )
    return F.grid_sample(images, grid.to(images), align_corners=False).clamp(0, 1)


# The greatest changes of AutoAugment's table of operations, which strength 1 stands for.
SHEAR = 0.3
SHIFT = 150 / 331  # of the side
ROTATION = math.radians(30)
BLEND = 0.9
BITS = 4  # that posterising takes away


def shift_across(amount: Amounts, height: int, width: int) -> Matrices:
    """M = [[1, 0, c], [0, 1, 0], [0, 0, 1]], c the columns moved."""
    return _with(amount, {(0, 2): amount * SHIFT * width})


def shift_down(amount: Amounts, height: int, width: int) -> Matrices:
    """M = [[1, 0, 0], [0, 1, r], [0, 0, 1]], r the rows moved."""
    return _with(amount, {(1, 2): amount * SHIFT * height})


def shear_across(amount: Amounts, height: int, width: int) -> Matrices:
    """M = [[1, s, 0], [0, 1, 0], [0, 0, 1]]: a row moves by s for each row from the centre."""
    return _with(amount, {(0, 1): amount * SHEAR})


def shear_down(amount: Amounts, height: int, width: int) -> Matrices:
    """M = [[1, 0, 0], [s, 1, 0], [0, 0, 1]]: the same with columns."""
    return _with(amount, {(1, 0): amount * SHEAR})


def rotate(amount: Amounts, height: int, width: int) -> Matrices:
    return rotation(amount * ROTATION)


def rotation(angle: Amounts) -> Matrices:
    """M = [[cos a, −sin a, 0], [sin a, cos a, 0], [0, 0, 1]]: against the clock; rows go down."""
    cosine, sine = angle.cos(), angle.sin()
    return _with(angle, {(0, 0): cosine, (0, 1): -sine, (1, 0): sine, (1, 1): cosine})


def _with(amount: Amounts, entries: dict[tuple[int, int], Amounts]) -> Matrices:
    matrices = torch.eye(3).to(amount).repeat(len(amount), 1, 1)
    for (row, column), values in entries.items():
        matrices[:, row, column] = values
    return matrices


def brightness(images: Images, amount: Amounts) -> Images:
    """y = (1 + m) x."""
    return images * (1 + BLEND * _of_pictures(amount))


def contrast(images: Images, amount: Amounts) -> Images:
    """y = x̄ + (1 + m)(x − x̄), x̄ the mean of the picture."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (1 + BLEND * _of_pictures(amount)) * (images - mean)


def sharpness(images: Images, amount: Amounts) -> Images:
    """y = x̃ + (1 + m)(x − x̃), x̃ blurred: a pixel counts 5, its eight neighbours 1 each, over 13."""
    around = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    blurred = (9 * around + 4 * images) / 13
    return blurred + (1 + BLEND * _of_pictures(amount)) * (images - blurred)


def posterise(images: Images, amount: Amounts) -> Images:
    """y = ⌊255 x / 2ⁿ⌋ 2ⁿ / 255: the n lowest of eight bits are dropped."""
    step = 2 ** _of_pictures((amount.abs() * BITS).round())
    return ((255 * images).round() / step).floor() * step / 255


def solarise(images: Images, amount: Amounts) -> Images:
    """y = 1 − x where x > 1 − |m|, y = x elsewhere."""
    return torch.where(images > 1 - _of_pictures(amount).abs(), 1 - images, images)


GEOMETRY = (shift_across, shift_down, shear_across, shear_down, rotate)
COLOUR = (brightness, contrast, sharpness, posterise, solarise)


def mix(
    images: Images, labels: Counts, classes: int, settings: Mixing, generator: Generator
) -> tuple[Images, Float[Tensor, "b classes"]]:
    """(pictures, targets): mixed with those of a random order of the batch; targets add up to 1."""
    hot = F.one_hot(labels.long(), classes).to(images.dtype)
    if not (settings.mixup or settings.cutmix) or not settings.chance:
        return images, hot
    batch = len(images)
    order = torch.randperm(batch, generator=generator, device=generator.device).to(images.device)
    mixed = (_uniform(batch, generator) < settings.chance).to(images.device)
    blends = torch.full_like(mixed, settings.mixup > 0)
    if settings.mixup and settings.cutmix:
        blends = (_uniform(batch, generator) < 0.5).to(images.device)
    y, own = images, torch.ones(batch).to(images)
    if settings.mixup:
        blended, share = mixup(images, images[order], settings.mixup, generator)
        y = torch.where(_of_pictures(mixed & blends), blended, y)
        own = torch.where(mixed & blends, share, own)
    if settings.cutmix:
        pasted, share = cutmix(images, images[order], settings.cutmix, generator)
        y = torch.where(_of_pictures(mixed & ~blends), pasted, y)
        own = torch.where(mixed & ~blends, share, own)
    return y, own[:, None] * hot + (1 - own[:, None]) * hot[order]


def mixup(
    images: Images, others: Images, alpha: float, generator: Generator
) -> tuple[Images, Amounts]:
    """y = λ x + (1 − λ) x′ with λ from Beta(α, α), and λ, the share of x (mixup)."""
    share = _beta(alpha, len(images), generator).to(images)
    weight = _of_pictures(share)
    return weight * images + (1 - weight) * others, share


def cutmix(
    images: Images, others: Images, alpha: float, generator: Generator
) -> tuple[Images, Amounts]:
    """y = x with a rectangle of x′, and the share of pixels that are still those of x (CutMix).

    The rectangle has √(1 − λ) of either side, λ from Beta(α, α), around a pixel drawn evenly;
    what would be beyond the edge is left out, so the share is counted.
    """
    batch, _, height, width = images.shape
    part = (1 - _beta(alpha, batch, generator)).clamp(min=0).sqrt()
    tall, wide = (part * height).long(), (part * width).long()
    top = _whole(height, batch, generator) - tall // 2
    left = _whole(width, batch, generator) - wide // 2
    box = _box(top, left, top + tall, left + wide, height, width).to(images.device)
    share = 1 - box.sum((1, 2)).to(images) / (height * width)
    return torch.where(rearrange(box, "b h w -> b 1 h w"), others, images), share


def _box(
    top: Counts, left: Counts, bottom: Counts, right: Counts, height: int, width: int
) -> Inside:
    """Whether a pixel is in the rectangle: top ≤ row < bottom and left ≤ column < right."""
    rows = torch.arange(height, device=top.device)
    columns = torch.arange(width, device=top.device)
    tall = (rows >= top[:, None]) & (rows < bottom[:, None])
    wide = (columns >= left[:, None]) & (columns < right[:, None])
    return tall[:, :, None] & wide[:, None, :]


def _beta(alpha: float, count: int, generator: Generator) -> Amounts:
    """Draws of Beta(α, α) = g / (g + g′), both of Gamma(α).

    Gamma(α) = Gamma(α + 1) · u^(1/α) is taken in logarithms: for a small α it is nearer to zero
    than numbers go, and the quotient would have no value.
    """
    shape = torch.full((2, count), alpha + 1, dtype=torch.float64, device=generator.device)
    uniform = torch.rand(shape.shape, generator=generator, dtype=torch.float64, device=shape.device)
    gamma = torch._standard_gamma(shape, generator=generator)
    logs = gamma.log() + (1 - uniform).log() / alpha
    return (logs[0] - logs[1]).sigmoid()


def _uniform(count: int, generator: Generator) -> Amounts:
    return torch.rand(count, generator=generator, device=generator.device)


def _whole(below: int, count: int, generator: Generator) -> Counts:
    return torch.randint(below, (count,), generator=generator, device=generator.device)


def _of_pictures(values: Float[Tensor, " b"] | Bool[Tensor, " b"]) -> Tensor:
    """A value for each picture, to be used on all its pixels."""
    return rearrange(values, "b -> b 1 1 1")
