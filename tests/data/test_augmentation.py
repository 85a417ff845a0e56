"""Augmentation: what each operation does to the pixels, how often, and from which draws alone."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.data.augmentation import (
    COLOUR,
    GEOMETRY,
    Augment,
    Mixing,
    augment,
    brightness,
    contrast,
    mix,
    posterise,
    rotation,
    sharpness,
    shear_across,
    shear_down,
    shift_across,
    shift_down,
    solarise,
    warp,
)
from manyheads.errors import UserError

EVERYTHING = Augment(crop_padding=2, flip=0.5, operations=3, strength=0.9, cutout=4)
KINDS = [
    Augment(crop_padding=2),
    Augment(crop_padding=2, padding="reflect"),
    Augment(flip=0.5),
    Augment(operations=2),
    Augment(cutout=4),
    EVERYTHING,
]
MIXINGS = [Mixing(mixup=0.4), Mixing(cutmix=1.0), Mixing(mixup=0.4, cutmix=1.0, chance=0.7)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 8, channels: int = 3, height: int = 10, width: int = 12) -> Tensor:
    return torch.rand(count, channels, height, width, generator=seeded(99))


def test_off_it_is_the_same_pictures() -> None:
    x, generator = pictures(), seeded()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    before = generator.get_state()
    assert torch.equal(augment(x, Augment(), generator), x)
    for off in (Mixing(), Mixing(mixup=1.0, cutmix=1.0, chance=0.0)):
        same, targets = mix(x, labels, 3, off, generator)
        assert torch.equal(same, x)
        assert torch.equal(targets, torch.eye(3)[labels])
    assert torch.equal(generator.get_state(), before)  # nothing was drawn


@pytest.mark.parametrize("settings", KINDS)
def test_the_same_seed_gives_the_same_bits(settings: Augment) -> None:
    x = pictures()
    before, torch_state = x.clone(), torch.get_rng_state()
    first, again, other = (augment(x, settings, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)  # what came in is left alone
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert first.shape == x.shape
    assert first.dtype == x.dtype


@pytest.mark.parametrize("settings", MIXINGS)
def test_mixing_hangs_on_the_generator_alone(settings: Mixing) -> None:
    x, labels, torch_state = pictures(), torch.arange(8), torch.get_rng_state()
    first, again, other = (mix(x, labels, 8, settings, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_from_0_to_1(channels: int, strength: float) -> None:
    x = pictures(64, channels).round(decimals=1)  # holds 0 and 1
    for seed in range(3):
        settings = Augment(crop_padding=3, flip=0.5, operations=4, strength=strength, cutout=3)
        y = augment(x, settings, seeded(seed))
        y, _ = mix(y, torch.zeros(64, dtype=torch.long), 1, MIXINGS[2], seeded(seed))
        assert bool(y.isfinite().all())
        assert 0 <= float(y.min()) <= float(y.max()) <= 1


@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_a_crop_is_a_shifted_picture(padding: Any) -> None:
    x, most = pictures(200), 2
    mode = {"zero": "constant", "reflect": "reflect"}[padding]
    padded = torch.nn.functional.pad(x, (most,) * 4, mode=mode)
    y = augment(x, Augment(crop_padding=most, padding=padding), seeded())
    found = set()
    for one, whole in zip(y, padded, strict=True):
        places = [
            (r, c)
            for r in range(2 * most + 1)
            for c in range(2 * most + 1)
            if torch.equal(one, whole[:, r : r + 10, c : c + 12])
        ]
        assert len(places) == 1
        found |= {*places}
    assert len(found) == (2 * most + 1) ** 2  # every place is taken


def test_a_padding_that_cannot_be_reflected() -> None:
    with pytest.raises(UserError, match="crop_padding=10"):
        augment(pictures(), Augment(crop_padding=10, padding="reflect"), seeded())
    assert augment(pictures(), Augment(crop_padding=10), seeded()).shape == pictures().shape


@pytest.mark.parametrize("chance", [0.1, 0.5, 1.0])
def test_flips_are_mirror_images_and_as_frequent_as_asked(chance: float) -> None:
    count = 2000
    x = pictures(count, 1, 3, 4)
    y = augment(x, Augment(flip=chance), seeded())
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (y == x).flatten(1).all(1)).all())
    error = math.sqrt(chance * (1 - chance) / count)
    assert abs(float(mirrored.double().mean()) - chance) <= 3 * error


@pytest.mark.parametrize("side", [9, 10])
@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_a_rotation_by_right_angles(quarters: int, side: int) -> None:
    x = pictures(4, 2, side, side)
    turned = warp(x, rotation(torch.full((4,), quarters * math.pi / 2)))
    inside = (..., slice(1, -1), slice(1, -1))
    torch.testing.assert_close(turned[inside], torch.rot90(x, quarters, (2, 3))[inside])


def test_a_rotation_of_an_oblong_turns_and_does_not_stretch() -> None:
    x = torch.zeros(1, 1, 5, 9)
    x[0, 0, 2, 4:7] = 1  # from the centre two pixels to the right
    y = warp(x, rotation(torch.tensor([math.pi / 2])))
    wanted = torch.zeros(1, 1, 5, 9)
    wanted[0, 0, 0:3, 4] = 1  # against the clock: upward
    torch.testing.assert_close(y, wanted, atol=1e-5, rtol=0)


def test_shifts_and_shears_take_pixels_from_where_they_say() -> None:
    x, height, width = pictures(1, 1, 9, 11), 9, 11
    for geometry, rows, columns in ((shift_across, 0, 1), (shift_down, 1, 0)):
        matrix = geometry(torch.tensor([1.0]), height, width)
        moved = matrix[0, 1, 2] if rows else matrix[0, 0, 2]
        assert float(moved) == pytest.approx((height if rows else width) * 150 / 331)
        matrix[0, :2, 2] = torch.tensor([2.0 * columns, 2.0 * rows])
        y = warp(x, matrix)
        taken = x[..., 2 * rows :, 2 * columns :]
        torch.testing.assert_close(y[..., : 9 - 2 * rows, : 11 - 2 * columns], taken)
        assert not y[..., 9 - 2 * rows :, :].any()
        assert not y[..., :, 11 - 2 * columns :].any()
    for shear, entry in ((shear_across, (0, 1)), (shear_down, (1, 0))):
        matrix = shear(torch.tensor([-1.0]), height, width)
        assert float(matrix[0, *entry]) == pytest.approx(-0.3)
        matrix[0, *entry] = 1.0
        y = warp(x, matrix)
        for step in (-2, 0, 3):  # that many rows, or columns, from the centre
            row, column = (4 + step, 5) if entry == (0, 1) else (4, 5 + step)
            there = (4 + step, 5 + step)
            torch.testing.assert_close(y[0, 0, row, column], x[0, 0, there[0], there[1]])


def test_colours_by_their_formulas() -> None:
    x = (pictures(2) * 255).round() / 255
    up, down, none = torch.tensor([1.0, 0.5]), -torch.tensor([1.0, 0.5]), torch.zeros(2)
    factor = torch.tensor([1.9, 1.45]).reshape(2, 1, 1, 1)
    torch.testing.assert_close(brightness(x, up), factor * x)
    torch.testing.assert_close(brightness(x, down), (2 - factor) * x)
    mean = x.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(contrast(x, up), mean + factor * (x - mean))
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]).expand(3, 1, 3, 3) / 13
    blurred = torch.nn.functional.conv2d(x, kernel, groups=3)
    inside = x[..., 1:-1, 1:-1]
    wanted = blurred + factor * (inside - blurred)
    torch.testing.assert_close(sharpness(x, up)[..., 1:-1, 1:-1], wanted)
    levels = (x * 255).round().long()
    wanted = torch.stack([levels[0] >> 4 << 4, levels[1] >> 2 << 2]) / 255
    torch.testing.assert_close(posterise(x, down), wanted)
    assert torch.equal(solarise(x, up), torch.stack([1 - x[0], x[1].where(x[1] <= 0.5, 1 - x[1])]))
    for colour in COLOUR:
        torch.testing.assert_close(colour(x, none), x)


def test_every_operation_is_drawn_as_often() -> None:
    """With one operation a picture: each leaves its own mark, and one in eleven is untouched."""
    count, choices = 4000, len(GEOMETRY) + len(COLOUR) + 1
    x = (pictures(1, 1, 7, 9) * 0.8 + 0.1).expand(count, 1, 7, 9)
    y = augment(x, Augment(operations=1, strength=1.0), seeded())
    kinds, counts = y.flatten(1).unique(dim=0, return_counts=True)
    untouched = (kinds == x[0].flatten()).all(1)
    assert int(untouched.sum()) == 1
    # Two directions of each, but leaving it, posterise and solarise have one.
    once = torch.full((3,), count / choices)
    each_way = torch.full((2 * (choices - 3),), count / choices / 2)
    wanted = torch.cat([each_way, once])
    assert len(counts) == len(wanted)
    assert bool(((counts.sort().values - wanted).abs() < 3.5 * wanted.sqrt()).all())
    assert abs(int(counts[untouched]) - count / choices) < 3 * math.sqrt(count / choices)


def test_two_operations_are_every_one_after_every_one() -> None:
    x, count = pictures(1, 1, 7, 9), 6000
    changes = [(one, sign) for one in (*GEOMETRY, *COLOUR, None) for sign in (-1.0, 1.0)]
    wanted = []
    for both in product(changes, changes):
        matrix, y = torch.eye(3)[None], x
        for geometry, sign in both:
            if geometry in GEOMETRY:
                matrix = matrix @ geometry(torch.tensor([0.7 * sign]), 7, 9)
                y = warp(x, matrix)
        for colour, sign in both:
            if colour in COLOUR:
                y = colour(y, torch.tensor([0.7 * sign])).clamp(0, 1)
        wanted.append(y.flatten())
    settings = Augment(operations=2, strength=0.7)
    found = augment(x.expand(count, 1, 7, 9), settings, seeded()).flatten(1).unique(dim=0)
    near = (found[:, None] - torch.stack(wanted)).abs().amax(2) < 1e-5
    assert bool(near.any(1).all())  # nothing else
    assert bool(near.any(0).all())  # nothing left out


def test_a_square_is_cut_out() -> None:
    x = pictures(300) * 0.5 + 0.5
    y = augment(x, Augment(cutout=4), seeded())
    gone = y == 0
    assert torch.equal(y[~gone], x[~gone])
    assert bool((gone.any(1) == gone.all(1)).all())  # all channels
    areas = gone[:, 0].sum((1, 2))
    rows, columns = gone[:, 0].any(2).sum(1), gone[:, 0].any(1).sum(1)
    assert torch.equal(areas, rows * columns)
    assert int(areas.max()) == 16
    assert int(areas.min()) == 4  # in a corner half of either side is beyond the edge


def partner_of(x: Tensor, labels: Tensor, targets: Tensor, row: int) -> int:
    """The row that a picture was mixed with, by its targets: every row has its own class."""
    others = [n for n in targets[row].nonzero().flatten().tolist() if n != int(labels[row])]
    assert len(others) <= 1
    return int((labels == others[0]).nonzero()) if others else row


@pytest.mark.parametrize("alpha", [0.01, 0.4, 5.0])
def test_mixup_mixes_targets_as_pixels(alpha: float) -> None:
    x, labels = pictures(32), torch.randperm(32, generator=seeded(1))
    y, targets = mix(x, labels, 32, Mixing(mixup=alpha), seeded(2))
    torch.testing.assert_close(targets.sum(1), torch.ones(32))
    assert bool((targets >= 0).all())
    for row in range(32):
        other = partner_of(x, labels, targets, row)
        share = targets[row, labels[row]]
        torch.testing.assert_close(y[row], share * x[row] + (1 - share) * x[other])


def test_the_share_of_cutmix_is_that_of_its_pixels() -> None:
    x, labels = pictures(64), torch.randperm(64, generator=seeded(1))
    y, targets = mix(x, labels, 64, Mixing(cutmix=1.0), seeded(2))
    mixed = 0
    for row in range(64):
        other = partner_of(x, labels, targets, row)
        pasted = (y[row] != x[row]).all(0)
        assert torch.equal(y[row], torch.where(pasted, x[other], x[row]))
        assert int(pasted.sum()) == int(pasted.any(1).sum() * pasted.any(0).sum())  # a rectangle
        if other != row:
            share = pasted.sum().float() / pasted.numel()
            assert float(targets[row, labels[other]]) == float(1 - (1 - share))
            assert float(targets[row, labels[row]]) == float(1 - share)
            mixed += 1
    assert mixed > 32


def test_both_ways_of_mixing_and_none() -> None:
    count = 2000
    x, labels = pictures(count, 1, 12, 12), torch.arange(count)
    settings = Mixing(mixup=2.0, cutmix=1.0, chance=0.6)
    y, targets = mix(x, labels, count, settings, seeded())
    changed = (y != x).flatten(1)
    blended, whole = changed.all(1), ~changed.any(1)
    assert torch.equal(targets[whole], torch.eye(count)[labels[whole]])  # labels survive
    assert torch.equal(targets[~whole].count_nonzero(1), torch.full([int((~whole).sum())], 2))
    # Beside three errors, for rectangles so small or large that no pixel or each is another's.
    for found, wanted in ((blended, 0.3), (whole, 0.4), (~blended & ~whole, 0.3)):
        error = math.sqrt(wanted * (1 - wanted) / count)
        assert abs(float(found.double().mean()) - wanted) < 3 * error + 0.01


def test_shares_are_drawn_from_beta() -> None:
    """Mean ½ and variance 1 / (4 (2α + 1)), to within three errors; small α gives numbers too."""
    count = 4000
    x = torch.zeros(count, 1, 1, 1)
    x[::2] = 1
    labels = (torch.arange(count) % 2).long()
    for alpha in (1e-4, 0.2, 1.0, 8.0):
        # Where the partner is of the other class, the target of the own class is the share.
        _, targets = mix(x, labels, 2, Mixing(mixup=alpha), seeded(5))
        own = targets[torch.arange(count), labels]
        assert bool(own.isfinite().all())
        order = torch.randperm(count, generator=seeded(5))
        shares = own[labels != labels[order]].double()
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(float(shares.mean()) - 0.5) < 3 * math.sqrt(variance / len(shares))
        fourth = float(((shares - 0.5) ** 4).mean())
        error = math.sqrt(max(fourth - variance**2, 0) / len(shares))
        assert abs(float(((shares - 0.5) ** 2).mean()) - variance) < 3 * error + 1e-3


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Augment, {"crop_padding": -1}),
        (Augment, {"operations": -1}),
        (Augment, {"cutout": -2}),
        (Augment, {"flip": 1.5}),
        (Augment, {"strength": math.nan}),
        (Mixing, {"mixup": -0.1}),
        (Mixing, {"cutmix": math.inf}),
        (Mixing, {"chance": 2.0}),
    ],
)
def test_numbers_without_sense_are_refused(kind: Callable[..., Any], settings: Any) -> None:
    [name] = settings
    with pytest.raises(UserError, match=rf"^data\.\w+\.{name}=") as caught:
        kind(**settings)
    assert "\n" not in str(caught.value)
