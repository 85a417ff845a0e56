"""Attention: every implementation equals its formula, or refuses.

`Dense` is compared with the plain loops of textbook.py, and every other implementation with
`Dense`, forward and backward: for each score, position and mask rule, in a full pass, a chunk and
a cached step, with and without padding, with key/value heads that are shared.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch
from textbook import POSITIONS, RULES, SCORES, Place, attention, refused, scaled_dot
from torch import Tensor
from torch.autograd import gradcheck

from manyheads import ops
from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.nn import local, masks, performer
from manyheads.nn.attend import AttentionFunctionConfig, attend, attention_weights
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    CrossAttention,
    Dense,
    Fused,
    SelfAttention,
    check_combination,
    exact_attention,
)
from manyheads.nn.block import Architecture
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import (
    AttentionMask,
    Both,
    Either,
    Globals,
    Rule,
    SameBlock,
    SameDocument,
    Window,
    causal,
    full,
    make_mask,
)
from manyheads.nn.performer import Performer, exponents
from manyheads.nn.positions import Position, PositionConfig, PositionSizes, Shaw, bias_by_distance
from manyheads.nn.scores import Additive, Bilinear, InnerScore, ScaledDot, Score, ScoreConfig
from manyheads.nn.tiled import Tiled

LENGTH = 11
SIZES = AttentionSizes(heads=2, kv_heads=1, head_dim=4, key_dim=4, max_length=LENGTH)
REAL = torch.ones(2, LENGTH, dtype=torch.bool)
REAL[0, 8:], REAL[1, 3:6] = False, False
DOCUMENTS = SameDocument(torch.tensor([[0] * 5 + [1] * 6, [4] * 2 + [5] * 6 + [7] * 3]))
# Some implementations treat these rules specially; the others are masks to all of them.
MAIN_RULES = {"full": full, "causal": causal, "documents": Both(causal, DOCUMENTS)}
MASKS: dict[str, Rule] = {
    **MAIN_RULES,
    "same-document": DOCUMENTS,
    "window": Window(2),
    "globals": Globals(2),
    "same-block": SameBlock(3),
    "either": Either(Window(1), Either(DOCUMENTS, Globals(2))),
}


class KernelScore(Score):
    """log φ(q)ᵀφ(k): a Performer is dense attention with this score."""

    def __init__(self, projection: Tensor, score: Score) -> None:
        super().__init__()
        assert isinstance(score, InnerScore)
        self.projection, self.root = projection, math.sqrt(score.scale)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = (exponents(x * self.root, self.projection) for x in (q, k))
        return (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(-1)


Reference = Callable[[Any, AttentionInputs], AttentionInputs]


def with_pattern(function: Any, inputs: AttentionInputs) -> AttentionInputs:
    """Dense inputs that equal local attention: the pattern is part of the mask."""
    mask, rule = inputs.mask, Both(inputs.mask.rule, function.pattern)
    mask = AttentionMask(rule, mask.query_positions, mask.key_positions, mask.padding_mask)
    return replace(inputs, mask=mask)


def with_kernel(function: Any, inputs: AttentionInputs) -> AttentionInputs:
    return replace(inputs, score=KernelScore(function.projection, inputs.score))


def with_zeros(function: Any, inputs: AttentionInputs) -> AttentionInputs:
    """Linformer's padding: keys and values that are zero, but still have weights."""
    mask = inputs.mask
    if mask.padding_mask is None:
        return inputs
    k, v = (x * mask.padding_mask[:, None, :, None] for x in (inputs.k, inputs.v))
    mask = AttentionMask(mask.rule, mask.query_positions, mask.key_positions)
    return replace(inputs, k=k, v=v, mask=mask)


def unchanged(function: Any, inputs: AttentionInputs) -> AttentionInputs:
    return inputs


# Settings with which an implementation equals `Dense`, once inputs are changed by the reference.
IMPLEMENTATIONS: dict[str, tuple[Any, Reference]] = {
    "dense": (Dense(), unchanged),
    "fused": (Fused(), unchanged),
    "tiled": (Tiled(block=4), unchanged),
    "local": (Local(size=4), with_pattern),
    "longformer": (Longformer(window=3), with_pattern),
    "longformer-globals": (Longformer(window=2, globals=3), with_pattern),
    "linformer": (Linformer(rank=LENGTH), with_zeros),
    "memory-compressed": (MemoryCompressed(stride=1, layers="M"), unchanged),
    "performer": (Performer(features=8), with_kernel),
}
EXACT = [name for name, (settings, _) in IMPLEMENTATIONS.items() if settings.exact]
LIMITED = {"linformer": ("full",), "memory-compressed": ("full", "causal")}
for approximation in ("performer", "local", "longformer", "longformer-globals"):
    LIMITED[approximation] = LIMITED["memory-compressed"]  # the mask rules that they have
implementations = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MIN_BLOCK", 4)
    monkeypatch.setattr(performer, "CHUNK", 4)


def build(
    name: str, key_dim: int = 4, *, head_dim: int = 4, looks_back: bool = False
) -> AttentionFunction:
    """The implementation, its projections and kernels (if any) being the identity."""
    torch.manual_seed(1)
    causal = looks_back and name != "linformer"
    sizes = replace(SIZES, key_dim=key_dim, head_dim=head_dim, causal=causal)
    function: AttentionFunction = IMPLEMENTATIONS[name][0].build(sizes)
    if isinstance(function, torch.nn.Module):
        function.double()
        with torch.no_grad():
            for weight in function.parameters():
                eye = torch.eye(weight.shape[1])
                weight.copy_(eye if weight.ndim == 2 else eye[None, :, :, None])
    return function


def parts(score: str, position: str, head_dim: int, looks_back: bool) -> tuple[Score, Position]:
    """A score and a position for two heads, in float64."""
    torch.manual_seed(2)
    sizes = PositionSizes(
        dim=2 * head_dim, heads=2, head_dim=head_dim, max_length=LENGTH, causal=looks_back
    )
    return (
        SCORES[score][0].build(2, head_dim).double(),
        POSITIONS[position][0].build(sizes).double(),
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(result: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def passes(rule: str) -> list[tuple[int, Tensor | None]]:
    """(first query, padding mask): full passes, chunks and cached steps."""
    if rule in MAIN_RULES:
        return [(0, None), (0, REAL), (6, None), (6, REAL), (LENGTH - 1, REAL)]
    return [(0, None), (6, REAL)]


def run(
    function: AttentionFunction, inputs: AttentionInputs, reference: Reference | None = None
) -> list[Tensor]:
    """The output at real queries, and the gradients of q, k, v and all parameters.

    With a reference, those of `Dense`.
    """
    tensors = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    call = AttentionInputs(*tensors, inputs.mask, inputs.score, inputs.position)
    out = function(call) if reference is None else Dense()(reference(function, call))
    if inputs.mask.padding_mask is not None:
        out = out * inputs.mask.padding_mask[:, None, -out.shape[2] :, None]
    loss = (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum()
    inputs_and_weights = [*tensors, *inputs.score.parameters(), *inputs.position.parameters()]
    grads = torch.autograd.grad(loss, inputs_and_weights, allow_unused=True)
    pairs = zip(grads, inputs_and_weights, strict=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in pairs)]


def inputs_of(
    score: str, position: str, rule: str, start: int, real: Tensor | None
) -> AttentionInputs:
    score_module, position_module = parts(score, position, 4, MASKS[rule].is_causal)
    q, k = normal(2, 2, LENGTH - start, 4), normal(2, 1, LENGTH, SCORES[score][0].key_dim(4))
    mask = make_mask(MASKS[rule], LENGTH - start, start=start, padding_mask=real)
    return AttentionInputs(q, k, normal(2, 1, LENGTH, 4), mask, score_module, position_module)


@cache
def by_dense(
    score: str, position: str, rule: str, number: int
) -> tuple[AttentionInputs, list[Tensor]]:
    inputs = inputs_of(score, position, rule, *passes(rule)[number])
    return inputs, run(Dense(), inputs)


# ---------------------------------------------------------------------------------------------
# Equal to the formula


@pytest.mark.parametrize("rule", RULES)
def test_dense_is_the_textbook(rule: str) -> None:
    """Weights and output of the plain loops, for every score and position."""
    real = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
    for score, position in product(SCORES, POSITIONS):
        if refused(score, position, "dense"):
            continue
        score_module, position_module = parts(score, position, 4, rule == "causal")
        q, k = normal(2, 2, 4, 4), normal(2, 1, 6, SCORES[score][0].key_dim(4))
        v = normal(2, 1, 6, 4)
        settings: Any = {"score": score_module, "position": position_module, "rule": RULES[rule][0]}
        plain = SCORES[score][1](score_module), RULES[rule][1], POSITIONS[position][1]
        place = plain[2](position_module)
        weights, out = attention(q, k, v, plain[0], plain[1], place, real)
        close(attention_weights(q, k, **settings, real=real), weights)
        close(attend(q, k, v, **settings, real=real), out)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "dense"])
def test_equals_dense(name: str, position: str) -> None:
    """Output and every gradient, for each score and mask rule that the implementation has."""
    reference = IMPLEMENTATIONS[name][1]
    cells = [(s, rule) for s in SCORES for rule in MASKS if not refused(s, position, name)]
    for score, rule in cells:
        function = build(name, SCORES[score][0].key_dim(4), looks_back=MASKS[rule].is_causal)
        for number in range(len(passes(rule))):
            inputs, expected = by_dense(score, position, rule, number)
            check_combination(function, inputs.score, inputs.position)
            if rule not in LIMITED.get(name, MASKS) and inputs.mask.rule is not full:
                with pytest.raises(UserError, match="has no mask rule"):
                    function(inputs)
                continue
            if reference is not unchanged:
                expected = run(function, inputs, reference)
            for ours, theirs in zip(run(function, inputs), expected, strict=True):
                close(ours, theirs)


@implementations
def test_refuses_what_it_cannot_compute(name: str) -> None:
    for score, position in product(SCORES, POSITIONS):
        if refused(score, position, name):
            with pytest.raises(UserError, match=r"model\.\w+"):
                check_combination(build(name), *parts(score, position, 4, False))


def test_attend_refuses_what_a_model_refuses() -> None:
    """Additive scores of rotated queries and keys depend on more than their distance."""
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    with pytest.raises(UserError, match=r"model\.score"):
        attend(q, k, v, score=Additive().build(2, 4).double(), position="rotary")


def test_nothing_is_missing() -> None:
    """Every score, position, mask rule and implementation is in this suite."""
    assert {type(config) for config, _ in SCORES.values()} == set(get_args(ScoreConfig))
    assert {type(config) for config, _ in POSITIONS.values()} == set(get_args(PositionConfig))
    assert {type(settings) for settings, _ in IMPLEMENTATIONS.values()} == set(
        get_args(AttentionFunctionConfig)
    )
    classes = {kind for kind in vars(masks).values() if isinstance(kind, type)}
    rules = {kind for kind in classes if issubclass(kind, Rule)} - {Rule, masks._Pair}
    assert {type(rule) for rule in MASKS.values()} | {type(rule) for rule, _ in RULES.values()} == (
        rules
    )


@pytest.mark.parametrize("name", ["dense", "tiled"])
@pytest.mark.parametrize("score", SCORES)
def test_derivatives(score: str, name: str) -> None:
    """Finite differences agree with backward, for the inputs and all parameters."""
    for rule, position in (("full", "none"), ("window", "shaw"), ("causal", "t5")):
        score_module, position_module = parts(score, position, 2, rule == "causal")
        q, v = normal(1, 2, 2, 2), normal(1, 2, 3, 2)
        k = normal(1, 2, 3, SCORES[score][0].key_dim(2))
        tensors = [x.requires_grad_() for x in (q, k, v)]
        mask = make_mask(
            RULES[rule][0], 2, start=1, padding_mask=torch.tensor([[True, False, True]])
        )

        def output(*tensors: Tensor, parts: Any = (mask, score_module, position_module)) -> Tensor:
            return IMPLEMENTATIONS[name][0](AttentionInputs(*tensors[:3], *parts))

        weights = [*score_module.parameters(), *position_module.parameters()]
        assert gradcheck(output, (*tensors, *weights))


# ---------------------------------------------------------------------------------------------
# Properties


@implementations
def test_no_gradient_from_the_future(name: str) -> None:
    """A causal query depends on no later key or value."""
    if name == "linformer":
        pytest.skip("is never causal")
    function = build(name, looks_back=True)
    if name == "memory-compressed":
        function = MemoryCompressed(stride=3, layers="M").build(replace(SIZES, causal=True))
        function.double()  # type: ignore[attr-defined]
    q, k, v = normal(2, 2, LENGTH, 4), normal(2, 1, LENGTH, 4), normal(2, 1, LENGTH, 4)
    tensors = k.requires_grad_(), v.requires_grad_()
    mask = make_mask(causal, LENGTH)
    out = function(AttentionInputs(q, k, v, mask, InnerScore(0.5), Position()))
    for i in range(LENGTH):
        for grad in torch.autograd.grad(out[:, :, i].square().sum(), tensors, retain_graph=True):
            assert not grad[:, :, i + 1 :].any()


@implementations
def test_blind_queries_give_zeros(name: str) -> None:
    """The output of a query without keys is zero, and so are its gradients, never NaN."""
    rule = full if name == "linformer" else causal
    function = build(name, looks_back=rule is causal)
    q, k, v = (normal(2, heads, LENGTH, 4).requires_grad_() for heads in (2, 1, 1))
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0], real[1, :2] = False, False
    mask = make_mask(rule, LENGTH, padding_mask=real)
    out = function(AttentionInputs(q, k, v, mask, InnerScore(0.5), Position()))
    assert not out[0].any()
    assert out[1, :, 2:].all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(grad.isfinite().all() and not grad[0].any() for grad in grads)
    if rule is causal:
        assert not out[1, :, :2].any()
        assert not any(grad[1, :, :2].any() for grad in grads)


@implementations
def test_dropout_drops_or_scales_each_weight(name: str) -> None:
    """Each weight is dropped or divided by 1 − p, by the seed only."""
    if name == "performer":
        with pytest.raises(UserError, match="attention_dropout=0"):
            IMPLEMENTATIONS[name][0].build(replace(SIZES, dropout=0.1))
        return
    function = build(name, LENGTH, head_dim=LENGTH)
    rule = full if name == "linformer" else causal
    q, k = normal(40, 2, LENGTH, LENGTH), normal(40, 1, LENGTH, LENGTH)
    v = torch.eye(LENGTH, dtype=torch.float64).expand(40, 1, -1, -1)
    inputs = AttentionInputs(q, k, v, make_mask(rule, LENGTH), InnerScore(0.1), Position(), 0.25)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return function(inputs)

    weights = function.weights(inputs)
    factors = (drawn(1) / weights)[weights > 0]
    assert ((factors == 0) | ((factors - 1 / 0.75).abs() < 1e-9)).all()
    assert 0.22 < (factors == 0).double().mean() < 0.28
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@implementations
def test_weights_average_the_values(name: str) -> None:
    """`weights`, which `capture` shows, are those that the output is made of."""
    function = build(name)
    inputs = inputs_of("scaled-dot", "none", "full", 0, REAL)
    weights, v = function.weights(inputs), inputs.v
    expected = run(function, inputs)[0]
    shown = REAL[:, None, :, None]
    v = v * shown if name == "linformer" else v
    close((weights @ v) * shown, expected)
    assert (weights >= 0).all()
    close(weights.sum(-1, keepdim=True) * shown, shown.double().expand(-1, 2, -1, -1))


POSITION_CELLS = [
    (name, position)
    for name, position in product(IMPLEMENTATIONS, POSITIONS)
    if name != "linformer" and not refused("scaled-dot", position, name)
]


@pytest.mark.parametrize(("name", "position"), POSITION_CELLS)
@torch.no_grad()
def test_cached_is_full(name: str, position: str) -> None:
    """A language model in chunks and single steps gives the logits of one pass."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 9, "dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 8}
    settings = IMPLEMENTATIONS[name][0]
    if name == "memory-compressed":
        settings = MemoryCompressed(stride=2, size=4)
    config = GptConfig(
        **sizes,  # type: ignore[arg-type]
        max_length=LENGTH,
        position=POSITIONS[position][0],
        attention=settings,
    )
    model, tokens = config.build().double().eval(), torch.randint(9, (2, LENGTH))
    for chunks in ([1] * LENGTH, [6, 1, 4]):
        cache = KVCache()
        steps = [model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]
        close(torch.cat(steps, dim=1), model(tokens))


@implementations
@torch.no_grad()
def test_padding_changes_nothing(name: str) -> None:
    """An encoder gives each text of a padded batch what it gives the text in a batch of one."""
    torch.manual_seed(4)
    sizes = {"vocab_size": 9, "dim": 8, "heads": 2, "layers": 2, "max_length": LENGTH}
    config = BertConfig(**sizes, head=None, attention=IMPLEMENTATIONS[name][0])  # type: ignore[arg-type]
    model, tokens = config.build().double().eval(), torch.randint(9, (3, LENGTH))
    lengths = [LENGTH, 7, 2]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    together = model(tokens, real)
    for row, length in enumerate(lengths):
        close(together[row, :length], model(tokens[row : row + 1, :length])[0])


# ---------------------------------------------------------------------------------------------
# Multi-head attention


def head_sizes(**settings: Any) -> Any:
    return Architecture(
        **{"dim": 6, "heads": 3, "max_length": LENGTH, "attention": Dense(), **settings}
    ).attention_config()


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 2), (1, 2), (3, 4)])
def test_self_attention_is_separate_heads(kv_heads: int, head_dim: int) -> None:
    """Concat(head_1 … head_h) W^O with head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)."""
    module = SelfAttention(head_sizes(kv_heads=kv_heads, head_dim=head_dim)).double()
    x = normal(2, 5, 6)
    projected = (x @ module.project.weight.T + module.project.bias).detach()
    q, k, v = (part.split(head_dim, -1) for part in projected.split(module.config.sizes, -1))
    heads = []
    for i in range(3):
        group = i * kv_heads // 3
        tensors = [x[:, None] for x in (q[i], k[group], v[group])]
        _, out = attention(*tensors, scaled_dot(None), lambda row, i, j: j <= i, Place(None))
        heads.append(out[:, 0])
    expected = torch.cat(heads, dim=-1) @ module.output.weight.T + module.output.bias
    close(module(x, make_mask(causal, 5), Position()), expected)


@implementations
def test_cross_attention_is_exact(name: str) -> None:
    """Queries from x, keys and values from the memory; approximations are for self-attention."""
    config = head_sizes(attention=IMPLEMENTATIONS[name][0])
    module = CrossAttention(config, memory_dim=8).double()
    memory, real = normal(2, 4, 8), torch.tensor([[True] * 4, [True, True, False, False]])
    k, v = module.project_kv(memory)
    for targets in (2, 4, 7):
        x = normal(2, targets, 6)
        q = module.query(x).view(2, targets, 3, 2).transpose(1, 2)
        weights = (q @ k.mT / 2**0.5).masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
        expected = module.output((weights @ v).transpose(1, 2).reshape(2, targets, 6))
        close(module(x, memory, make_mask(full, 4, padding_mask=real)), expected)


def test_sizes_of_heads() -> None:
    with pytest.raises(UserError, match=r"kv_heads=2.*heads=3"):
        head_sizes(kv_heads=2)
    module = SelfAttention(head_sizes(score=Bilinear(key_size=5)))
    assert module.project.weight.shape == (3 * (2 + 5 + 2), 6)
    assert isinstance(exact_attention(ScaledDot().build(3, 2), Position()), Fused)
    assert isinstance(exact_attention(Additive().build(3, 2), Position()), Dense)


# ---------------------------------------------------------------------------------------------
# `attend`

THREE = ["dense", "fused", "tiled"]


@pytest.mark.parametrize("implementation", THREE)
def test_lecture_scaled_dot_example(implementation: str) -> None:
    """q·k = 112 and 96 with 64 channels: scores 14 and 12, weights 0.88 and 0.12."""
    q = torch.ones(1, 1, 1, 64)
    k = torch.stack([torch.full((64,), 112 / 64), torch.full((64,), 96 / 64)])[None, None]
    weights = attention_weights(q, k).flatten()
    assert weights.tolist() == pytest.approx([0.881, 0.119], abs=5e-4)
    v = torch.randn(1, 1, 2, 64)
    out = attend(q, k, v, implementation=implementation)[0, 0, 0]
    close(out, 0.881 * v[0, 0, 0] + 0.119 * v[0, 0, 1], atol=5e-3)


def test_lecture_causal_mask_example() -> None:
    """The row (1, 1, −1, 0) becomes (½, ½, 0, 0) under a causal mask."""
    scores = torch.tensor(
        [[2.0, 0.0, 1.0, -1.0], [1.0, 1.0, -1.0, 0.0], [0.0, 2.0, 1.0, 1.0], [1.0, 0.0, 0.0, 2.0]]
    )
    q, k = torch.eye(4)[None, None], scores.T[None, None]
    close(attention_weights(q, k, score="dot")[0, 0], scores.softmax(-1), atol=1e-6)
    weights = attention_weights(q, k, score="dot", rule="causal")
    assert weights[0, 0, 1].tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0])
    assert weights[0, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("implementation", THREE)
def test_soft_look_up(implementation: str) -> None:
    """At a low temperature a query that equals one of several orthogonal keys gets its value."""
    keys, values = torch.eye(5)[None, None], torch.randn(1, 1, 5, 5)
    sharp = attend(keys, keys, values, scale=200.0, implementation=implementation)
    torch.testing.assert_close(sharp, values)
    blurred = attend(keys[:, :, :1], keys, values, scale=0.0, implementation=implementation)
    torch.testing.assert_close(blurred[0, 0, 0], values[0, 0].mean(0))


@pytest.mark.parametrize("name", EXACT)
def test_more_queries_than_keys(name: str) -> None:
    q, k, v = normal(1, 1, 5, 4), normal(1, 1, 2, 4), normal(1, 1, 2, 4)
    one_by_one = torch.cat([attend(q[:, :, [i]], k, v) for i in range(5)], dim=2)
    close(attend(q, k, v, implementation=IMPLEMENTATIONS[name][0]), one_by_one)


def test_scale_replaces_the_root() -> None:
    q, k, v = normal(1, 1, 2, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    close(attend(q, k, v, scale=0.5), attend(q, k, v))
    close(attend(q, k, v, scale=1.0), attend(q, k, v, score="dot"))
    with pytest.raises(UserError, match="scale"):
        attend(q, k, v, score=Additive().build(1, 4).double(), scale=1.0)
    for scale in (math.nan, math.inf):
        with pytest.raises(UserError, match="scale"):
            attend(q, k, v, scale=scale)


def test_parts_by_name_as_settings_and_built() -> None:
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4)
    alibi = parts("scaled-dot", "alibi", 4, True)[1]
    expected = attend(q, k, v, rule=causal, position=alibi, implementation=Tiled())
    for implementation in ({"implementation": "tiled"}, {"core": "tiled"}):  # core: the 0.1 name
        close(attend(q, k, v, rule="causal", position="alibi", **implementation), expected)
    with pytest.raises(UserError, match="did you mean 'tiled'"):
        attend(q, k, v, implementation="tilde")
    close(attend(q, k, v, position="sinusoidal"), attend(q, k, v))  # added to embeddings only


@pytest.mark.parametrize(
    "part",
    [
        *({"score": part} for part in ("bilinear", "reduced-rank", "additive", Bilinear())),
        *({"position": part} for part in ("shaw", "t5", "learned", Shaw(max_distance=2))),
        *({"implementation": part} for part in ("linformer", "performer", "memory-compressed")),
    ],
)
def test_parts_with_weights_must_be_built(part: dict[str, Any]) -> None:
    """Their weights would differ in every call, and a part may differ between layers."""
    q, k, v = (normal(1, 2, 300, 8) for _ in range(3))
    with pytest.raises(UserError, match=r"build it once.*\(\)\.build\("):
        attend(q, k, v, **part)


@pytest.mark.parametrize("rule", [full, causal], ids=str)
def test_half_precision_on_a_cpu(rule: Rule) -> None:
    """If gradients are needed `fused` computes in float32, with and without autocast."""
    exact = [torch.randn(2, 4, 7, 16, dtype=torch.bfloat16) for _ in range(3)]
    real = torch.arange(7)[None] < torch.tensor([[7], [4]])
    results = []
    for implementation, dtype in (("fused", torch.bfloat16), ("dense", torch.float64)):
        tensors = [x.clone().to(dtype).requires_grad_() for x in exact]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = attend(*tensors, rule=rule, real=real, implementation=implementation)
        assert out.dtype == dtype
        grads = torch.autograd.grad((out.double() * torch.arange(1, 17)).sum(), tensors)
        results.append([out.detach(), *grads])
    for result, expected in zip(*results, strict=True):
        assert (result.double() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("position", POSITIONS)
def test_bias_by_distance(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of distances has the bias of every pair, if the scheme claims that it suffices.

    Kernels get both from `fused`.
    """
    _, module = parts("scaled-dot", position, 4, False)
    q, positions = normal(1, 2, 6, 4), torch.arange(6)[None]
    bias = module.score(q, positions, positions)
    assert module.is_relative_bias == (position in ("t5", "alibi"))
    assert module.has_bias == (bias is not None)
    if bias is not None and module.is_relative_bias:
        table = bias_by_distance(module, q)
        close(bias[0], table[:, positions - positions.T + 5])
        calls: list[dict[str, Any]] = []
        monkeypatch.setattr(ops, "attention", lambda *tensors, **call: calls.append(call) or q)
        attend(q, q, q, position=module, implementation="fused")
        close(calls[0]["bias"](), bias)
        close(calls[0]["bias_table"](), table)
