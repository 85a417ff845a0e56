"""A growing cache compiles nothing: the key by which Triton compiles does not change with it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.kernels import append_attention, decode_attention


class Launches:
    """Stands for a kernel; `keys` are those of the variants that Triton would compile."""

    def __init__(self, kernel: Any) -> None:
        self.names = kernel.arg_names
        self.unspecialized = kernel.kwargs.get("do_not_specialize") or []
        self.keys: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: object) -> "Launches":
        return self

    def __call__(self, *args: Any, **constants: Any) -> None:
        pairs = zip(self.names, args, strict=False)
        variant = [self._variant(name, value) for name, value in pairs]
        self.keys.add((*variant, *sorted(constants.items())))

    def _variant(self, name: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, float):
            return (float,)
        is_long = value >= 2**31
        return (is_long,) if name in self.unspecialized else (is_long, value == 1, value % 16 == 0)


def growing_caches() -> Iterator[tuple[Tensor, Tensor]]:
    """Keys of 3 rows as a growing cache holds them, contiguous and as part of a buffer."""
    for keys in (2, 3, 15, 16, 17, 63, 64, 65, 128, 129, 200, 333, 512, 700, 2047):
        k = torch.zeros(3, 2, keys, 32)
        yield k, k
        buffer = torch.zeros(3, 2, keys + keys // 2, 32)
        yield buffer[:, :, :keys], buffer[:, :, :keys]


@pytest.mark.parametrize("mask_rows", [None, 1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_over_a_growing_cache_is_compiled_once(
    mask_rows: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, merge = (Launches(getattr(decode_attention, name)) for name in ("_attend", "_merge"))
    monkeypatch.setattr(decode_attention, "_attend", attend)
    monkeypatch.setattr(decode_attention, "_merge", merge)
    q = torch.zeros(rows, 4, 1, 32)
    for k, v in growing_caches():
        sizes = None if mask_rows is None else (min(rows, mask_rows), 1, 1, k.shape[2])
        mask = None if sizes is None else torch.ones(sizes, dtype=torch.bool)
        decode_attention.decode_attention(q, k[:rows], v[:rows], mask, 1.0)
    assert len(attend.keys) == 1
    assert len(merge.keys) == 1


def test_static_caches_of_all_sizes_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(append_attention._append_attention)
    monkeypatch.setattr(append_attention, "_append_attention", launches)
    q = torch.zeros(1, 4, 1, 32)
    counter, position = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.long)
    for slots in (64, 128, 256, 512, 1024):
        caches = torch.zeros(2, 1, 4, slots, 32)
        append_attention.append_attention(q, q, q, caches[0], caches[1], position, counter, 1.0)
    assert len(launches.keys) == 1
