"""The Vision Transformer: image representation, patch positions, and other image sizes."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import resized
from torch import Tensor

from manyheads.config import override_all
from manyheads.errors import UserError
from manyheads.models.heads import Classify, Pooler
from manyheads.models.vit import Vit, VitConfig
from manyheads.nn.block import PositionSizes
from manyheads.nn.positions import Sinusoidal2d

TINY: dict[str, Any] = {
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "ffn_dim": 24,
    "dropout": 0.0,
    "image_size": 12,
    "patch_size": 4,
    "channels": 2,
}
LABELS = Classify(labels=("a", "b", "c"))
WAYS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean of the patches": {"first": "none"},
    "pooled mean": {"first": "none", "pooler": Pooler(over="mean")},
    "rows and columns": {"position": Sinusoidal2d()},
    "rows and columns, no token": {"position": Sinusoidal2d(), "first": "none"},
}


def images(count: int = 3, size: int = 12) -> Tensor:
    return torch.rand(count, 2, size, size)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_reach_every_part(way: str) -> None:
    model = VitConfig(**TINY, head=LABELS, **WAYS[way]).build()
    answers = model(images())
    assert answers.shape == (3, 3)
    answers.logsumexp(-1).sum().backward()
    still = [
        name for name, item in model.named_parameters() if item.grad is None or not item.grad.any()
    ]
    assert not still


def test_the_class_token_alone_is_read() -> None:
    model = VitConfig(**TINY, head=LABELS).build()
    hidden = model.hidden(images())
    assert hidden.shape == (3, 10, 16)
    other = torch.cat([hidden[:, :1], torch.randn(3, 9, 16)], dim=1)
    torch.testing.assert_close(model.head_output(other), model.head_output(hidden))


@pytest.mark.parametrize("before", [0, 1])
def test_waves_of_rows_and_columns_by_plain_loops(before: int) -> None:
    rows, dim, base = 3, 12, 50.0
    sizes = PositionSizes(dim=dim, heads=1, head_dim=dim, max_length=rows**2 + before, causal=False)
    position = Sinusoidal2d(base=base).build(sizes)
    x = torch.randn(2, rows**2 + before, dim, dtype=torch.float64)
    actual = position.embed(x, torch.arange(rows**2 + before)[None])
    expected = x.clone()
    half = dim // 2
    for row in range(rows):
        for column in range(rows):
            at = before + row * rows + column
            for start, place in ((0, row), (half, column)):
                for pair in range(half // 2):
                    angle = place / base ** (2 * pair / half)
                    expected[:, at, start + 2 * pair] += math.sin(angle)
                    expected[:, at, start + 2 * pair + 1] += math.cos(angle)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual[:, :before], x[:, :before], rtol=0, atol=0)


def test_patches_that_change_places_change_the_answer() -> None:
    """With positions of either kind; without any the mean of the patches would not notice."""
    inputs = images()
    mirrored = torch.cat([inputs[..., 4:8], inputs[..., :4], inputs[..., 8:]], dim=-1)
    for position, same in (("none", True), ("learned", False), ("sinusoidal-2d", False)):
        plain = VitConfig(**TINY, head=LABELS, first="none")
        model = override_all(plain, [f"position={position}"]).build().eval()
        assert torch.allclose(model(inputs), model(mirrored), atol=1e-6) is same, position


@pytest.mark.parametrize(("old", "new"), [(12, 20), (20, 12), (12, 12)])
def test_interpolated_positions_equal_those_of_transformers(old: int, new: int) -> None:
    transformers = pytest.importorskip("transformers")
    from manyheads.exchange.huggingface import from_huggingface

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=old,
        patch_size=4,
        num_channels=2,
    )
    torch.manual_seed(3)
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval().double()
    torch.nn.init.normal_(theirs.embeddings.position_embeddings)
    torch.nn.init.normal_(theirs.embeddings.cls_token)
    ours = from_huggingface(theirs)
    assert isinstance(ours, Vit)
    pixels = torch.randn(2, 2, new, new, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(pixels, interpolate_pos_encoding=True).last_hidden_state
        actual = resized(ours.double().eval(), new)(pixels)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_resized_model_keeps_all_but_its_positions() -> None:
    model = VitConfig(**TINY, head=LABELS).build().eval()
    other = resized(model, 20)
    assert other.config == replace(model.config, image_size=20)
    assert not other.training
    assert other(images(size=20)).shape == (3, 3)
    with pytest.raises(UserError, match="resize"):
        other(images())
    before, after = model.state_dict(), other.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["encoder.positions.0.table.weight"]
    waves = resized(VitConfig(**TINY, head=LABELS, position=Sinusoidal2d()).build(), 20)
    assert waves(images(size=20)).shape == (3, 3)


def test_an_edge_is_seen_or_refused() -> None:
    """A model from elsewhere may leave one out, as `transformers` does; nobody may choose to."""
    config = VitConfig(**{**TINY, "image_size": 14}, head=LABELS)
    assert (config.side, config.unseen) == (3, 2)
    model, inputs = config.build().eval(), images(size=14)
    other = inputs.clone()
    other[..., 12:, :], other[..., 12:] = 1.0, 0.0
    assert torch.equal(model(inputs), model(other))
    advice = r"model\.patch_size=4.* 12 or 16"
    with pytest.raises(UserError, match=advice):
        config.check_image_size()
    uncropped = VitConfig(**TINY, head=LABELS)
    uncropped.check_image_size()
    with pytest.raises(UserError, match=advice):
        resized(uncropped.build(), 14)
    assert resized(model, 16)(images(size=16)).shape == (3, 3)
