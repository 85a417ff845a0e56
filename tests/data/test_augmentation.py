"""Augmentation: the effect of each operation on pixels, its frequency, and its randomness."""

import math
from itertools import product

import pytest
import torch
from tests.data.helpers import is_close
from torch import Tensor

from manyheads.data.augmentation import (
    BLEND,
    COLOUR,
    GEOMETRY,
    ROTATION,
    Augment,
    Mixing,
    augment,
    brightness,
    contrast,
    geometry,
    mix,
    posterise,
    sharpness,
    solarise,
    warp,
)

CHANGES = [
    Augment(crop_padding=2),
    Augment(flip=0.5),
    Augment(operations=2),
    Augment(crop_padding=2, flip=0.5, operations=3, strength=0.9),
]
MIXINGS = [Mixing(mixup=0.4), Mixing(cutmix=1.0), Mixing(mixup=0.4, cutmix=1.0, chance=0.7)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 8, channels: int = 3, height: int = 10, width: int = 12) -> Tensor:
    return torch.rand(count, channels, height, width, generator=seeded(99))


def test_by_default_nothing_changes_and_nothing_is_drawn() -> None:
    x, generator = images(), seeded()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    before = generator.get_state()
    assert torch.equal(augment(x, Augment(), generator), x)
    for off in (Mixing(), Mixing(mixup=1.0, cutmix=1.0, chance=0.0)):
        same, targets = mix(x, labels, 3, off, generator)
        assert torch.equal(same, x)
        assert torch.equal(targets, torch.eye(3)[labels])
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("settings", [*CHANGES, *MIXINGS])
def test_results_depend_on_the_generator_only(settings: Augment | Mixing) -> None:
    x, state = images(), torch.get_rng_state()
    before = x.clone()

    def change(seed: int) -> tuple[Tensor, Tensor]:
        if isinstance(settings, Augment):
            y = augment(x, settings, seeded(seed))
            return y, y
        return mix(x, torch.arange(8), 8, settings, seeded(seed))

    first, again, other = (change(seed) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first[0].shape, first[0].dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_from_0_to_1(channels: int, strength: float) -> None:
    x = images(64, channels).round(decimals=1)  # includes 0 and 1
    for seed in range(3):
        settings = Augment(crop_padding=3, flip=0.5, operations=4, strength=strength)
        y = augment(x, settings, seeded(seed))
        y, _ = mix(y, torch.zeros(64, dtype=torch.long), 1, MIXINGS[2], seeded(seed))
        assert bool(y.isfinite().all())
        assert 0 <= float(y.min()) <= float(y.max()) <= 1


def test_a_crop_is_a_shifted_image() -> None:
    x = images(200)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    y = augment(x, Augment(crop_padding=2), seeded())
    shifts = list(product(range(5), repeat=2))
    crops = torch.stack([padded[:, :, r : r + 10, c : c + 12] for r, c in shifts])
    is_equal = (crops == y).flatten(2).all(2)
    assert (is_equal.sum(0) == 1).all()
    assert is_equal.any(1).all()  # every shift occurs


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_flips_are_mirror_images_of_the_configured_frequency(probability: float) -> None:
    x = images(2000, 1, 3, 4)
    y = augment(x, Augment(flip=probability), seeded())
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (y == x).flatten(1).all(1)).all())
    assert is_close(int(mirrored.sum()), 2000, probability)


def rotation(angle: float, count: int = 1) -> Tensor:
    return geometry(torch.full((count,), angle / ROTATION), 9, 9)[4]


@pytest.mark.parametrize("side", [9, 10])
@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_rotations_by_right_angles(quarters: int, side: int) -> None:
    x = images(4, 2, side, side)
    turned = warp(x, rotation(quarters * math.pi / 2, 4))
    inside = (..., slice(1, -1), slice(1, -1))
    torch.testing.assert_close(turned[inside], torch.rot90(x, quarters, (2, 3))[inside])


def test_a_rotation_of_a_rectangle_does_not_distort() -> None:
    x, expected = torch.zeros(1, 1, 5, 9), torch.zeros(1, 1, 5, 9)
    x[0, 0, 2, 4:7] = 1  # from the centre two pixels to the right
    expected[0, 0, 0:3, 4] = 1  # counter-clockwise: upwards
    torch.testing.assert_close(warp(x, rotation(math.pi / 2)), expected, atol=1e-5, rtol=0)


def test_shifts_and_shears_move_pixels_by_their_matrices() -> None:
    x = images(1, 1, 9, 11)
    shift_x, shift_y, shear_x, shear_y, _ = geometry(torch.tensor([1.0]), 9, 11)
    assert float(shift_x[0, 0, 2]) == pytest.approx(11 * 150 / 331)
    assert float(shift_y[0, 1, 2]) == pytest.approx(9 * 150 / 331)
    assert float(shear_x[0, 0, 1]) == float(shear_y[0, 1, 0]) == pytest.approx(0.3)
    matrix = torch.eye(3)[None].clone()
    matrix[0, :2, 2] = torch.tensor([2.0, 1.0])  # columns, rows
    y = warp(x, matrix)
    torch.testing.assert_close(y[..., :8, :9], x[..., 1:, 2:])
    assert not y[..., 8:, :].any()
    assert not y[..., :, 9:].any()
    for entry in ((0, 1), (1, 0)):
        matrix = torch.eye(3)[None].clone()
        matrix[0, *entry] = 1.0
        y = warp(x, matrix)
        for step in (-2, 0, 3):  # rows, or columns, from the centre
            row, column = (4 + step, 5) if entry == (0, 1) else (4, 5 + step)
            torch.testing.assert_close(y[0, 0, row, column], x[0, 0, 4 + step, 5 + step])


def test_colours_follow_their_formulas() -> None:
    x = (images(2) * 255).round() / 255
    m = torch.tensor([1.0, 0.5]).reshape(2, 1, 1, 1)
    factor = 1 + BLEND * m
    torch.testing.assert_close(brightness(x, m), factor * x)
    torch.testing.assert_close(brightness(x, -m), (2 - factor) * x)
    mean = x.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(contrast(x, m), mean + factor * (x - mean))
    kernel = torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]]).expand(3, 1, 3, 3) / 13
    blurred = torch.nn.functional.conv2d(x, kernel, groups=3)
    sharp = blurred + factor * (x[..., 1:-1, 1:-1] - blurred)
    torch.testing.assert_close(sharpness(x, m)[..., 1:-1, 1:-1], sharp)
    levels = (x * 255).round().long()
    posters = torch.stack([levels[0] >> 4 << 4, levels[1] >> 2 << 2]) / 255
    torch.testing.assert_close(posterise(x, -m), posters)
    assert torch.equal(solarise(x, m), torch.stack([1 - x[0], x[1].where(x[1] <= 0.5, 1 - x[1])]))
    for colour in COLOUR:
        torch.testing.assert_close(colour(x, 0 * m), x)


def test_all_operations_are_equally_frequent() -> None:
    """With one operation per image each result is unique, and one in eleven is unchanged."""
    count, choices = 4000, GEOMETRY + len(COLOUR) + 1
    x = (images(1, 1, 7, 9) * 0.8 + 0.1).expand(count, 1, 7, 9)
    y = augment(x, Augment(operations=1, strength=1.0), seeded())
    results, counts = y.flatten(1).unique(dim=0, return_counts=True)
    unchanged = (results == x[0].flatten()).all(1)
    assert int(unchanged.sum()) == 1
    # All but the identity, posterise and solarise have two directions.
    once = torch.full((3,), count / choices)
    both = torch.full((2 * (choices - 3),), count / choices / 2)
    expected = torch.cat([both, once])
    assert len(counts) == len(expected)
    assert bool(((counts.sort().values - expected).abs() < 3.5 * expected.sqrt()).all())
    assert is_close(int(counts[unchanged]), count, 1 / choices)


def test_two_operations_are_all_pairs_of_operations() -> None:
    x, count = images(1, 1, 7, 9), 6000
    changes = list(product(range(GEOMETRY + len(COLOUR) + 1), (-0.7, 0.7)))
    expected = []
    for both in product(changes, changes):
        matrix, y = torch.eye(3)[None], x
        for number, amount in both:
            if number < GEOMETRY:
                matrix = matrix @ geometry(torch.tensor([amount]), 7, 9)[number]
                y = warp(x, matrix)
        for number, amount in both:
            if 0 <= number - GEOMETRY < len(COLOUR):
                y = COLOUR[number - GEOMETRY](y, torch.tensor(amount)).clamp(0, 1)
        expected.append(y.flatten())
    settings = Augment(operations=2, strength=0.7)
    results = augment(x.expand(count, 1, 7, 9), settings, seeded()).flatten(1).unique(dim=0)
    is_near = (results[:, None] - torch.stack(expected)).abs().amax(2) < 1e-5
    assert bool(is_near.any(1).all())  # nothing else
    assert bool(is_near.any(0).all())  # nothing left out


def partner_of(labels: Tensor, targets: Tensor, row: int) -> int:
    """The row that an image was mixed with, by its targets: every row has its own class."""
    others = [n for n in targets[row].nonzero().flatten().tolist() if n != int(labels[row])]
    assert len(others) <= 1
    return int((labels == others[0]).nonzero()) if others else row


@pytest.mark.parametrize("alpha", [0.01, 0.4, 5.0])
def test_mixup_mixes_targets_like_pixels(alpha: float) -> None:
    x, labels = images(32), torch.randperm(32, generator=seeded(1))
    y, targets = mix(x, labels, 32, Mixing(mixup=alpha), seeded(2))
    torch.testing.assert_close(targets.sum(1), torch.ones(32))
    assert bool((targets >= 0).all())
    for row in range(32):
        other, weight = partner_of(labels, targets, row), targets[row, labels[row]]
        torch.testing.assert_close(y[row], weight * x[row] + (1 - weight) * x[other])


def test_the_targets_of_cutmix_are_fractions_of_pixels() -> None:
    x, labels = images(64), torch.randperm(64, generator=seeded(1))
    y, targets = mix(x, labels, 64, Mixing(cutmix=1.0), seeded(2))
    mixed = 0
    for row in range(64):
        other = partner_of(labels, targets, row)
        pasted = (y[row] != x[row]).all(0)
        assert torch.equal(y[row], torch.where(pasted, x[other], x[row]))
        assert int(pasted.sum()) == int(pasted.any(1).sum() * pasted.any(0).sum())  # a rectangle
        if other != row:
            fraction = pasted.sum().float() / pasted.numel()
            assert float(targets[row, labels[row]]) == float(1 - fraction)
            mixed += 1
    assert mixed > 32


def test_mixup_and_cutmix_alternate() -> None:
    count = 2000
    x, labels = images(count, 1, 12, 12), torch.arange(count)
    settings = Mixing(mixup=2.0, cutmix=1.0, chance=0.6)
    y, targets = mix(x, labels, count, settings, seeded())
    changed = (y != x).flatten(1)
    blended, unchanged = changed.all(1), ~changed.any(1)
    assert torch.equal(targets[unchanged], torch.eye(count)[labels[unchanged]])
    assert bool((targets[~unchanged].count_nonzero(1) == 2).all())
    # More than three errors: some rectangles have no pixel, or all.
    for actual, expected in ((blended, 0.3), (unchanged, 0.4), (~blended & ~unchanged, 0.3)):
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs(float(actual.double().mean()) - expected) < 3 * error + 0.01


@pytest.mark.parametrize("alpha", [1e-4, 0.2, 1.0, 8.0])
def test_weights_are_drawn_from_beta(alpha: float) -> None:
    """Mean ½ and variance 1 / (4 (2α + 1)), within three errors; small α does not underflow."""
    count = 4000
    x = (torch.arange(count) % 2 == 0).float().reshape(count, 1, 1, 1)
    labels = (torch.arange(count) % 2).long()
    # If the partner has the other class, the target of the own class is the weight.
    _, targets = mix(x, labels, 2, Mixing(mixup=alpha), seeded(5))
    weights = targets[torch.arange(count), labels]
    assert bool(weights.isfinite().all())
    order = torch.randperm(count, generator=seeded(5))
    weights = weights[labels != labels[order]].double()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(float(weights.mean()) - 0.5) < 3 * math.sqrt(variance / len(weights))
    fourth = float(((weights - 0.5) ** 4).mean())
    error = math.sqrt(max(fourth - variance**2, 0) / len(weights))
    assert abs(float(((weights - 0.5) ** 2).mean()) - variance) < 3 * error + 1e-3
