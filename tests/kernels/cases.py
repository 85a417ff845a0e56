"""Sizes with which kernels are compared with their formulas, in addition to their self-tests.

tests/kernels/test_kernels.py runs them in Triton's interpreter, tests/test_gpu.py those of ON_GPU
on a device, where every further variant of a kernel takes a second to compile.
"""

from importlib import import_module
from typing import Any

import torch

from manyheads.kernels.selftest import FUSED_ACTIVATIONS, Inputs, relative_error

CASES: dict[str, list[tuple[Any, ...]]] = {
    # rows, heads, key/value heads, channels of a head, slots
    "append_attention": [
        (1, 1, 1, 16, 300),
        (2, 4, 2, 16, 9),
        (2, 4, 2, 32, 70),
        (1, 3, 3, 16, 70),
    ],
    # length, channels of a head, causal, lengths of padded sequences
    "biased_attention": [
        (16, 16, False, None),
        (16, 16, True, (16, 9)),
        *((50, 16, causal, lengths) for causal in (False, True) for lengths in (None, (50, 43))),
        (128, 16, True, (128, 121)),  # a multiple of all block sizes
    ],
    # rows, heads, key/value heads, queries, keys, (rows, queries) of the mask
    "decode_attention": [
        (1, 1, 1, 1, 40, None),
        (2, 3, 3, 1, 64, (1, 1)),
        (2, 4, 2, 1, 65, (2, 1)),
        (3, 2, 2, 5, 130, (3, 5)),
        (3, 2, 2, 5, 130, (3, 1)),
        (1, 8, 1, 3, 90, (1, 3)),
        (1, 2, 2, 1, 700, (1, 1)),
        (1, 2, 2, 1, 700, None),
    ],
    # outputs, inputs
    "gemv": [(1, 8), (13, 40), (5, 150)],
    # dropout, shape
    "layer_norm": [
        *((0.0, *shape) for shape in ((3, 5, 64), (7, 48), (23, 512), (2, 2048))),
        *((0.3, *shape) for shape in ((3, 5, 64), (2, 512))),
    ],
    # activation, shape
    "mlp": [(kind, *shape) for kind in FUSED_ACTIVATIONS for shape in ((3, 5, 16), (700, 32))],
    # queries, keys, channels of a head, causal, lengths of padded keys, dropout
    "short_attention": [
        (5, 5, 16, True, None, 0.0),
        (5, 5, 16, False, (1, 5), 0.0),
        (16, 16, 32, True, (16, 12), 0.0),
        (64, 64, 16, False, (0, 60), 0.0),  # one row is padding only
        (64, 64, 16, True, (64, 60), 0.0),
        (7, 40, 16, False, (38,), 0.0),  # the rows share a padding mask
        (1, 33, 32, False, (33, 29), 0.0),
        (128, 128, 64, False, None, 0.0),
        (9, 40, 64, False, (40, 30), 0.1),
        (20, 9, 32, False, None, 0.3),
        (100, 100, 16, True, None, 0.1),
    ],
    # classes, padding, smoothing, scale of the logits, training
    "softmax_grad": [
        (classes, padding, smoothing, scale, training)
        for classes, padding in ((7, 5), (300, 5), (9000, 5), (8192, 0), (16390, 8195))
        for smoothing, scale, training in ((0.0, 3.0, True), (0.1, 300.0, True), (0.1, 3.0, False))
    ],
    # rows, width, k, ties
    "topk": [
        *((rows, width, k, k > 1) for rows, width in ((3, 6), (4, 33)) for k in (1, 6)),
        *((2, 200, k, ties) for k, ties in ((1, True), (10, False), (32, True))),
    ],
}
ON_GPU: dict[str, list[tuple[Any, ...]]] = {
    "biased_attention": [(128, 64, True, (128, 40)), (200, 128, False, None)],
    "decode_attention": [(3, 4, 4, 5, 200, (3, 5)), (3, 8, 1, 3, 64, (1, 1))],
    "layer_norm": [(0.3, 9, 2048)],
    "mlp": [("gelu", 700, 32)],
    "short_attention": CASES["short_attention"][-4:],
    "softmax_grad": [(50257, 47, 0.1, 3.0, True)],
    "topk": [(4, 50257, 10, True)],
}


def worst_error(name: str, sizes: tuple[Any, ...], device: str, dtype: torch.dtype) -> float:
    """The largest relative error of a case."""
    case = import_module(f"manyheads.kernels.{name}").case
    pairs = case(Inputs(torch.device(device), dtype), *sizes)
    return max(relative_error(result, expected) for result, expected in pairs)
