"""Every kernel equals its formula: outputs and gradients in float32, by Triton's interpreter."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.cases import CASES, worst_error

from manyheads import ops
from manyheads.kernels import biased_attention, decode_attention, gemv, layer_norm, topk
from manyheads.kernels.common import sum_rows
from manyheads.kernels.layer_norm import add_norm, prenorm
from manyheads.kernels.mlp import fused_mlp
from manyheads.kernels.selftest import passes, run_selftest
from manyheads.kernels.short_attention import dropout_mask, short_attention
from manyheads.kernels.softmax_grad import cross_entropy_grad

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # numpy's
SMALL = {"M": 32, "N": 16}
BLOCKS: dict[str, list[dict[Any, dict[str, Any]]]] = {  # to have several of them in small tensors
    "biased_attention": [
        {biased_attention: {name: [SMALL] * 2 for name in ("FORWARD", "KEYS", "QUERIES")}
         | {"BIAS": {"M": 32}}}
    ],
    "decode_attention": [
        {decode_attention: {"TARGET_PROGRAMS": programs, "MAX_UNSCANNED_KEYS": unscanned}}
        for programs, unscanned in ((256, 128), (8, 0), (1, 128))
    ],
    "gemv": [{gemv: {"BLOCK_ELEMENTS": 128, "MAX_COLUMNS": 64}}],
    "layer_norm": [{layer_norm: {"_processors": lambda x: 3, "WARPS_PER_PROCESSOR": 1}}, {}],
    "topk": [{}, {topk: {"MAX_LANES": 32, "MIN_COLUMNS_PER_PROGRAM": 50}}],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_their_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks, sizes in product(BLOCKS.get(name, [{}]), CASES[name]):
        for module, values in blocks.items():
            for constant, value in values.items():
                monkeypatch.setattr(module, constant, value)
        error = worst_error(name, sizes, "cpu", torch.float32)
        assert error < 1e-5, (blocks, sizes, error)
        monkeypatch.undo()


@pytest.mark.parametrize("name", CASES)
def test_selftests_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "MAX_COLUMNS", 128)  # the interpreter reduces number by number
    assert passes(lambda: run_selftest(name, torch.device("cpu")), name)


def test_every_kernel_has_cases() -> None:
    modules = Path(topk.__file__).parent.glob("*.py")
    kernels = {path.stem for path in modules if "@triton.jit" in path.read_text(encoding="utf-8")}
    assert kernels == {*CASES, "common"}


def test_dropout_depends_on_seed_row_head_and_query() -> None:
    x, keys = torch.randn(2, 3, 20, 64)
    mask, other = (dropout_mask(x, keys, torch.tensor([seed]), 0.3) for seed in (1, 2))
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
    for shifted in (other, mask.roll(1, 0), mask.roll(1, 1), mask.roll(1, 2), mask.roll(1, 3)):
        equal = (mask == shifted).double().mean()
        assert abs(float(equal) - (0.7**2 + 0.3**2)) < 0.05


@pytest.mark.parametrize("has_memory", [False, True])
def test_short_attention_is_a_well_formed_operator(has_memory: bool) -> None:
    """Fake tensors have the strides of the results, so that compiled code reads them right."""
    x = torch.randn(96 if not has_memory else 32, 5, 2).permute(2, 1, 0).requires_grad_()
    memory = torch.randn(2, 7, 64, requires_grad=True) if has_memory else None
    torch.library.opcheck(short_attention, (x, memory, 2, None, False, 0.3, None, 0.0))


def test_training_operators_are_well_formed() -> None:
    x, ones = torch.randn(16, 6).T, torch.ones(16)
    weights = torch.randn(8, 16), torch.randn(8), torch.randn(16, 8), torch.randn(16)
    torch.library.opcheck(add_norm, (x, x, ones, ones, None, 0.0, 1e-5))
    torch.library.opcheck(fused_mlp, (x, *weights, "gelu"))


def test_frozen_weights_get_no_gradient() -> None:
    x, w1, b1, w2, b2 = (torch.randn(s) for s in ((3, 8), (16, 8), (16,), (8, 16), (8,)))
    y = fused_mlp(x.requires_grad_(), w1, b1, w2.requires_grad_(), b2, "relu")[0]
    y.sum().backward()
    assert [w.grad is not None for w in (x, w1, b1, w2, b2)] == [True, False, False, True, False]


def test_a_norm_that_nothing_uses_has_no_gradient() -> None:
    x, weight = torch.randn(4, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    stream = prenorm(x, weight, torch.zeros(32), 1e-5, torch.float32)[1]
    grads = torch.autograd.grad(stream.cos().sum(), (x, weight), allow_unused=True)
    torch.testing.assert_close(grads[0], -x.sin())
    assert grads[1] is None


def test_sum_rows() -> None:
    for rows, width in product((1, 64, 65, 200), (1, 16, 50)):
        partial = torch.randn(rows, width)
        torch.testing.assert_close(sum_rows(partial), partial.sum(0), rtol=1e-5, atol=1e-5)


def test_ignored_rows_may_hold_anything() -> None:
    logits, labels = torch.randn(2, 300), torch.tensor([-1, 7])
    logits[0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    nll, uniform, grad = cross_entropy_grad(logits, labels, 300, 0.1, True)
    assert torch.isfinite(nll + uniform)
    assert (grad[0] == 0).all()
    assert (grad[1] != 0).all()


def test_splits_cover_the_keys_of_decoding() -> None:
    for keys, programs in product((1, 64, 65, 128, 700, 4000), (1, 12, 128, 256, 300)):
        splits, split_keys = decode_attention._split(keys, programs)
        assert splits * split_keys >= keys > (splits - 1) * split_keys
        assert splits == 1 or splits * programs <= decode_attention.TARGET_PROGRAMS


def test_splits_cover_a_row_of_logits() -> None:
    for rows, width, k in product((1, 5, 320), (1, 40, 3000, 50257), (1, 10, 32)):
        splits, split_width = topk._split(rows, width, k)
        assert (splits - 1) * split_width < width <= splits * split_width
        assert splits == 1 or width - (splits - 1) * split_width >= k
        assert splits == 1 or rows * splits <= topk.TARGET_PROGRAMS


def test_ops_are_the_same_by_kernels(request: pytest.FixtureRequest) -> None:
    z = torch.randn(6, 1000)
    plain = [ops.argmax(z), *ops.topk(z, 7), ops.logsumexp(z)]
    request.getfixturevalue("on_cpu")
    calls: Any = request.getfixturevalue("calls")
    by_kernels = [ops.argmax(z), *ops.topk(z, 7), ops.logsumexp(z)]
    for result, expected in zip(by_kernels, plain, strict=True):
        torch.testing.assert_close(result, expected)
    assert calls == ["topk", "topk"]


@pytest.mark.usefixtures("on_cpu")
def test_append_attention_is_for_few_rows_of_one_position() -> None:
    def supported(rows: int = 1, positions: int = 1, slots: int = 256, width: int = 64) -> bool:
        q, k, v = torch.randn(3, rows, 12, positions, width)
        caches = torch.randn(2, rows, 12, slots, width)
        counter = torch.zeros(rows * 12, dtype=torch.int32)
        position = torch.tensor([0])
        return ops.append_attention(q, k, v, *caches, position, counter, 1.0) is not None

    assert not supported()  # with gradients
    with torch.no_grad():
        assert supported()
        assert supported(rows=4)
        for other in ({"rows": 64}, {"positions": 2}, {"slots": 4096}, {"width": 48}):
            assert not supported(**other)
