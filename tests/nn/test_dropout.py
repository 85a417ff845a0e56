"""Dropout of attention weights reaches every core that holds weights or hands them to a kernel."""

import pytest
import torch

from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.exact_attention import AttentionSizes, Dense, Fused
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import AttentionMask, full
from manyheads.nn.packed import Packed
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScaledDot
from manyheads.nn.tiled import Tiled

LENGTH = 12
SIZES = AttentionSizes(heads=2, kv_heads=2, head_dim=4, key_dim=4, max_length=LENGTH)
CORES = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=5),
    "packed": Packed(),
    "local": Local(4),
    "local, one block": Local(16),
    "longformer": Longformer(2),
    "longformer, all near": Longformer(16),
    "compressed": MemoryCompressed(layers="M"),
    "linformer": Linformer(rank=4),
}


@pytest.mark.parametrize("name", CORES)
def test_weights_are_dropped(name: str) -> None:
    torch.manual_seed(1)
    core = CORES[name].build(SIZES)
    q, k, v = torch.randn(3, 2, 2, LENGTH, 4)
    places = torch.arange(LENGTH)[None]
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 1]])
    sight = AttentionMask(full, places, places, real, square=True)
    given = (q, k, v, sight, ScaledDot().build(2, 4), Position())
    with torch.no_grad():
        kept, dropped = core(*given), core(*given, 0.5)
        torch.manual_seed(2)
        one = core(*given, 0.5)
        torch.manual_seed(2)
        same = core(*given, 0.5)
    assert not torch.allclose(kept, dropped)
    assert torch.equal(one, same)
