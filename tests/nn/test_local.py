"""Windows and blocks: dense attention under their pattern, at a cost linear in the length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from textbook import POSITIONS, SCORES, refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.capture import capture
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import attend
from manyheads.nn.exact_attention import AttentionFunction, Dense
from manyheads.nn.local import LEAST_BLOCK, Local, Longformer
from manyheads.nn.masks import (
    AttentionMask,
    Globals,
    Rule,
    SameBlock,
    SameDocument,
    Window,
    both,
    causal,
    either,
    full,
    make_mask,
    prefix,
)
from manyheads.nn.positions import Position, PositionSizes
from manyheads.nn.scores import InnerScore, Score

CORES: dict[str, tuple[Local | Longformer, Rule]] = {
    "local": (Local(size=8), SameBlock(8)),
    "window": (Longformer(window=5), Window(5)),
    "wide window": (Longformer(window=40), Window(40)),
    "globals": (Longformer(window=3, globals=4), either(Window(3), Globals(4))),
    "many globals": (Longformer(window=3, globals=60), either(Window(3), Globals(60))),
}
cores = pytest.mark.parametrize("name", CORES)
CELLS = [(s, p) for s in SCORES for p in POSITIONS if not refused(s, p, "dense")]
DOT = InnerScore(0.5)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def gradients(
    core: AttentionFunction,
    inputs: list[Tensor],
    sight: AttentionMask,
    score: Score,
    position: Position,
) -> list[Tensor]:
    """The output, then the gradients of the inputs and of every parameter."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    score.zero_grad()
    position.zero_grad()
    out = core(*inputs, sight, score, position)
    out.backward(torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out))
    found = [*inputs, *score.parameters(), *position.parameters()]
    return [
        out.detach(),
        *(torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in found),
    ]


def equals_dense(
    name: str,
    inputs: list[Tensor],
    sight: AttentionMask,
    score: Score = DOT,
    position: Position | None = None,
) -> None:
    """Output and gradients are those of the dense core under rule and pattern."""
    core, pattern = CORES[name]
    near = AttentionMask(
        both(sight.rule, pattern), sight.query_positions, sight.key_positions, sight.padding_mask
    )
    position = position or Position()
    found = gradients(core, inputs, sight, score, position)
    expected = gradients(Dense(), inputs, near, score, position)
    for one, other in zip(found, expected, strict=True):
        agree(one, other)


def rules(length: int) -> dict[str, Rule]:
    documents = torch.arange(length) // torch.tensor([[7], [length], [13]])
    return {
        "full": full,
        "causal": causal,
        "prefix": prefix(11),
        "documents": both(causal, SameDocument(documents)),
        "documents and more": either(SameDocument(documents), prefix(2)),
        "the same documents in each row": SameDocument(documents[:1]),
    }


@cores
@pytest.mark.parametrize("length", [1, 7, 9, 32, 33, 75, 96])
def test_equals_dense_under_the_pattern(name: str, length: int) -> None:
    """Whatever the rule, and wherever blocks and windows end in the row."""
    inputs = [normal(3, 2, length, 4) for _ in range(3)]
    for rule in rules(length).values():
        equals_dense(name, inputs, make_mask(rule, length))


@cores
@pytest.mark.parametrize("padding", ["behind", "in front", "between", "a whole row"])
def test_padding_is_not_there(name: str, padding: str) -> None:
    """Also where it fills a block; a query that sees nothing gives zeros and no gradient."""
    inputs, index = [normal(2, 2, 75, 4) for _ in range(3)], torch.arange(75)
    padded = {
        "behind": index >= 35,
        "in front": index < 38,
        "between": (index > 10) & (index < 60),
        "a whole row": index >= 0,
    }[padding]
    real = torch.stack([~padded, index < 70])
    for rule in (full, causal):
        equals_dense(name, inputs, make_mask(rule, 75, padding_mask=real))
        junk = [torch.where(real[:, None, :, None], x, 1e3) for x in inputs[1:]]
        core = CORES[name][0]
        agree(
            core(inputs[0], *junk, make_mask(rule, 75, padding_mask=real), DOT, Position()),
            core(*inputs, make_mask(rule, 75, padding_mask=real), DOT, Position()),
        )


@pytest.mark.parametrize(("score", "position"), CELLS)
def test_every_score_and_position(score: str, position: str) -> None:
    """As dense has them, with keys and values that heads share, and their weights learn."""
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=70, causal=False)
    scored = SCORES[score][0].build(2, 4).double()
    placed = POSITIONS[position][0].build(sizes).double()
    key_dim = SCORES[score][0].key_dim(4)
    inputs = [normal(2, 2, 70, 4), normal(2, 1, 70, key_dim), normal(2, 1, 70, 4)]
    real = torch.arange(70) < torch.tensor([[70], [61]])
    for name in ("local", "globals"):
        equals_dense(name, inputs, make_mask(full, 70), scored, placed)
        equals_dense(name, inputs, make_mask(causal, 70, padding_mask=real), scored, placed)


@cores
def test_a_chunk_is_part_of_the_whole(name: str) -> None:
    """Queries at the last positions, few or many, are answered as in the pass over all."""
    inputs = [normal(2, 2, 75, 4) for _ in range(3)]
    real = torch.arange(75) >= torch.tensor([[0], [9]])
    for rule in (full, both(causal, SameDocument(torch.arange(75)[None] // 50))):
        for start in (0, 1, 40, 74):
            sight = make_mask(rule, 75 - start, start=start, padding_mask=real)
            equals_dense(name, [inputs[0][:, :, start:], *inputs[1:]], sight)


def test_keys_that_are_all_too_far() -> None:
    """A step whose own neighbourhood is not among the keys sees nothing, and gives zeros."""
    q, k, v = normal(1, 2, 1, 4), normal(1, 2, 9, 4), normal(1, 2, 9, 4)
    sight = AttentionMask(full, torch.tensor([[50]]), torch.arange(9)[None])
    for core in (Local(size=8), Longformer(window=5)):
        assert (core(q, k, v, sight, DOT, Position()) == 0).all()


SEES: dict[str, Callable[[int, int], bool]] = {
    "local": lambda i, j: j <= i and i // 8 == j // 8,
    "window": lambda i, j: i - 5 <= j <= i,
    "wide window": lambda i, j: i - 40 <= j <= i,
    "globals": lambda i, j: j <= i and (i - j <= 3 or j < 4),
    "many globals": lambda i, j: j <= i and (i - j <= 3 or j < 60),
}


@cores
def test_causality_by_gradient(name: str) -> None:
    """A position depends on what rule and pattern name, and on nothing else: never on later."""
    length = 70
    k, v = (normal(1, 1, length, 2).expand(length, -1, -1, -1).clone() for _ in range(2))
    q = normal(1, 1, length, 2).expand(length, -1, -1, -1)
    out = CORES[name][0](
        q, k.requires_grad_(), v.requires_grad_(), make_mask(causal, length), DOT, Position()
    )
    own = torch.arange(length)
    out[own, 0, own].sum().backward()  # row n shows what position n depends on
    assert k.grad is not None
    assert v.grad is not None
    sees = [[SEES[name](i, j) for j in range(length)] for i in range(length)]
    assert (v.grad[:, 0] != 0).any(-1).tolist() == sees
    assert not ((k.grad[:, 0] != 0).any(-1) & ~torch.tensor(sees)).any()


@pytest.mark.parametrize(
    ("name", "position"),
    [("local", "shaw"), ("window", "rotary"), ("wide window", "t5"), ("globals", "alibi")],
)
@torch.no_grad()
def test_steps_give_the_logits_of_one_pass(name: str, position: str) -> None:
    """Through a cache, by one token and by several, a language model says the same."""
    config = GptConfig(
        vocab_size=9,
        dim=8,
        layers=2,
        heads=2,
        kv_heads=1,
        ffn_dim=8,
        max_length=45,
        position=POSITIONS[position][0],
        attention=CORES[name][0],
    )
    model, tokens = config.build().double().eval(), torch.randint(9, (2, 45))
    expected = model(tokens)
    for sizes in ([1] * 45, [34, 1, 9, 1]):
        cache = KVCache()
        steps = [model(chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)]
        agree(torch.cat(steps, dim=1), expected)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("position", ["none", "shaw", "t5", "alibi"])
@pytest.mark.parametrize("core", [Local(size=32), Longformer(window=16, globals=4)])
def test_nothing_is_as_large_as_the_square(core: Local | Longformer, position: str) -> None:
    """Forward and backward, masks and biases included: n times what a block sees, a head."""
    length, heads, channels = 2048, 2, 4
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=length, causal=False)
    placed = POSITIONS[position][0].build(sizes)
    documents = SameDocument(torch.arange(length)[None] // 100)
    inputs = [torch.randn(1, heads, length, channels) for _ in range(3)]
    for rule in (full, causal, both(causal, documents)):
        sight = make_mask(rule, length, padding_mask=torch.arange(length)[None] < length - 5)
        with Largest() as largest:
            gradients(core, inputs, sight, DOT, placed)
        assert 0 < largest.elements <= heads * length * (LEAST_BLOCK + 2 * 16 + 4)


@pytest.mark.parametrize("core", [Local(size=32), Longformer(window=16, globals=4)])
@torch.no_grad()
def test_a_step_meets_few_keys(core: Local | Longformer) -> None:
    """Of all cached positions it asks where they are, and takes the keys of the near ones."""
    length, channels = 4096, 8
    q, (k, v) = torch.randn(1, 2, 1, channels), torch.randn(2, 1, 2, length, channels)
    sight = make_mask(causal, 1, start=length - 1)
    with Largest() as largest:
        core(q, k, v, sight, DOT, Position())
    assert length <= largest.elements <= 2 * length < k.numel()


@cores
@torch.no_grad()
def test_capture_shows_the_pattern(name: str) -> None:
    """The weights are 0 where nothing is seen and sum to 1, and the model says what it said."""
    core, pattern = CORES[name]
    config = BertConfig(
        vocab_size=9, dim=8, layers=2, heads=2, ffn_dim=8, max_length=70, attention=core
    )
    model, tokens = config.build().eval(), torch.randint(9, (2, 70))
    plain = model(tokens)
    with capture(model) as maps:
        captured = model(tokens)
    agree(captured, plain)
    seen = make_mask(pattern, 70).as_bool()
    assert seen is not None
    assert len(maps["self"]) == 2
    for weights in maps["self"]:
        assert torch.equal(weights > 0, seen.expand_as(weights))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 70))


@cores
def test_dropout_drops_or_scales_each_weight(name: str) -> None:
    """By the seed, and each weight is gone or grown by 1/(1 − p), none counted twice."""
    core, q, k = CORES[name][0], normal(1, 2, 70, 70), normal(1, 2, 70, 70) / 9
    v = torch.eye(70, dtype=torch.float64).expand(1, 2, -1, -1)
    sight = make_mask(causal, 70)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return core(q, k, v, sight, DOT, Position(), 0.25)

    weights = core.weights(q, k, sight, DOT, Position())
    kept = (drawn(1) / weights)[weights > 0]
    assert ((kept == 0) | ((kept - 1 / 0.75).abs() < 1e-10)).all()
    assert 0.15 < (kept == 0).double().mean() < 0.35
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_a_model_trains_with_dropout() -> None:
    """Every weight gets a finite gradient, the same for the same seed."""
    config = GptConfig(
        vocab_size=9,
        dim=8,
        layers=1,
        heads=2,
        ffn_dim=8,
        max_length=70,
        attention_dropout=0.3,
        attention=Longformer(window=5, globals=2),
    )
    model, tokens = config.build(), torch.randint(9, (2, 70))
    drawn = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens).logsumexp(-1).sum().backward()
        drawn.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(drawn[0]) == len(list(model.parameters()))
    for one, other in zip(*drawn, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_by_name() -> None:
    """With the settings that they have unless told, all is near in a short row."""
    q, k, v = (normal(1, 2, 9, 4) for _ in range(3))
    for name in ("local", "longformer"):
        agree(attend(q, k, v, rule="causal", core=name), attend(q, k, v, rule="causal"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Local(size=0), "core.size=0 must be at least 1"),
        (lambda: Longformer(window=0), "core.window=0 must be at least 1"),
        (lambda: Longformer(globals=-1), "core.globals=-1 must be at least 0"),
        (lambda: SameBlock(0), "same-block size=0 must be at least 1"),
    ],
)
def test_settings_that_mean_nothing(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        build()
