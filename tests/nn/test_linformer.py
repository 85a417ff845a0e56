"""Linformer: dense where nothing is reduced, blind to padding, no more than rank keys a query."""

from typing import Literal

import pytest
import torch
from textbook import POSITIONS, SCORES
from torch import Tensor

from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.capture import capture
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import attend
from manyheads.nn.exact_attention import AttentionFunction, AttentionSizes, Dense
from manyheads.nn.linformer import Linformer, LinformerCore
from manyheads.nn.masks import causal, full, make_mask, window
from manyheads.nn.positions import Position, PositionSizes
from manyheads.nn.scores import InnerScore, Score
from manyheads.summary import summarize

SHARES: list[Literal["all", "heads", "none"]] = ["all", "heads", "none"]
SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=4, key_dim=4, max_length=9)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def build(share: Literal["all", "heads", "none"] = "all", rank: int = 3) -> LinformerCore:
    return Linformer(rank, share).build(SIZES).double()


def inputs(length: int = 9, key_dim: int = 4) -> list[Tensor]:
    return [normal(2, 4, length, 4), normal(2, 2, length, key_dim), normal(2, 2, length, 4)]


def gradients(core: AttentionFunction, given: list[Tensor], score: Score) -> list[Tensor]:
    """The output, then the gradients of the inputs and of the score."""
    given = [x.clone().requires_grad_() for x in given]
    score.zero_grad()
    out = core(*given, make_mask(full, given[0].shape[2]), score, Position())
    (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
    return [out, *(x.grad for x in [*given, *score.parameters()] if x.grad is not None)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("score", SCORES)
def test_without_reduction_it_is_dense(score: str, share: Literal["all", "heads", "none"]) -> None:
    """With rank = n and E = F = I, forward and every gradient are dense's."""
    scored = SCORES[score][0].build(4, 4).double()
    core = build(share, rank=9)
    with torch.no_grad():
        for matrix in core.parameters():
            matrix.copy_(torch.eye(9))
    given = inputs(key_dim=SCORES[score][0].key_dim(4))
    found, expected = gradients(core, given, scored), gradients(Dense(), given, scored)
    assert len(found) == len(expected) == 4 + len(list(scored.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", SHARES)
def test_it_is_the_formula(share: Literal["all", "heads", "none"]) -> None:
    """softmax(q (E k)ᵀ) F v head by head; queries share their group's keys and its matrices."""
    core = build(share)
    q, k, v = inputs()
    out = core(q, k, v, make_mask(full, 9), InnerScore(0.5), Position())
    e, f = core.keys, core.keys if core.values is None else core.values
    for head in range(4):
        g = head // 2
        own_e, own_f = (e[g], f[g]) if share == "none" else (e, f)
        weights = (0.5 * q[:, head] @ (own_e @ k[:, g]).mT).softmax(-1)
        torch.testing.assert_close(out[:, head], weights @ (own_f @ v[:, g]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("share", "shapes"),
    [
        ("all", {"keys": (3, 9)}),
        ("heads", {"keys": (3, 9), "values": (3, 9)}),
        ("none", {"keys": (2, 3, 9), "values": (2, 3, 9)}),
    ],
)
def test_share_says_who_has_a_matrix(
    share: Literal["all", "heads", "none"], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Only what is shared by nobody has a matrix for each key/value head; each one learns."""
    core = build(share)
    assert {name: tuple(x.shape) for name, x in core.named_parameters()} == shapes
    assert core.state_dict().keys() == shapes.keys()
    core(*inputs(), make_mask(full, 9), InnerScore(0.5), Position()).square().sum().backward()
    assert all(x.grad is not None and (x.grad != 0).all() for x in core.parameters())


def test_it_begins_as_the_paper_says() -> None:
    """Entries of N(0, 1/rank)."""
    core = Linformer(64, "heads").build(AttentionSizes(**{**vars(SIZES), "max_length": 512}))
    for matrix in (x.detach() for x in core.parameters()):
        assert abs(float(matrix.std()) * 8 - 1) < 0.03
        assert abs(float(matrix.mean())) < 0.01


@pytest.mark.parametrize("share", SHARES)
def test_padding_changes_nothing(share: Literal["all", "heads", "none"]) -> None:
    """A padded row gives what its text alone gives, and junk in the padding no gradient."""
    core = build(share)
    given = [x.requires_grad_() for x in inputs()]
    real = (torch.arange(9) < 6).expand(2, -1)
    padded = core(*given, make_mask(full, 9, padding_mask=real), InnerScore(0.5), Position())[
        :, :, :6
    ]
    short = [x[:, :, :6] for x in given]
    alone = core(*short, make_mask(full, 6), InnerScore(0.5), Position())
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(padded.square().sum(), given):
        assert (gradient[:, :, 6:] == 0).all()
        assert (gradient[:, :, :6] != 0).any()


def test_nothing_real_gives_zeros_and_no_gradient() -> None:
    core = build()
    given = [x.requires_grad_() for x in inputs()]
    real = torch.tensor([[True] * 9, [False] * 9])
    out = core(*given, make_mask(full, 9, padding_mask=real), InnerScore(0.5), Position())
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
    found = torch.autograd.grad(out[1].sum(), [*given, *core.parameters()])
    assert all((gradient == 0).all() for gradient in found)


def test_weights_are_over_the_rank() -> None:
    """What capture shows: [b h t rank], each row a distribution, and what values are mixed by."""
    core = build("heads")
    q, k, v = inputs()
    sight = make_mask(full, 9)
    weights = core.weights(q, k, sight, InnerScore(0.5), Position())
    assert weights.shape == (2, 4, 9, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9).double())
    assert core.values is not None
    mixed = weights @ (core.values @ v).repeat_interleave(2, 1)
    out = core(q, k, v, sight, InnerScore(0.5), Position())
    torch.testing.assert_close(out, mixed, rtol=0, atol=1e-12)


def test_dropout_drops_weights() -> None:
    """Values that tell the mixtures apart show each weight dropped or grown by 1/(1 − p)."""
    sizes = AttentionSizes(heads=4, kv_heads=4, head_dim=9, key_dim=9, max_length=9)
    core = Linformer(9).build(sizes).double()
    with torch.no_grad():
        core.keys.copy_(torch.eye(9))
    q, k = normal(2, 4, 9, 9), normal(2, 4, 9, 9)
    v = torch.eye(9, dtype=torch.float64).expand(2, 4, -1, -1)
    sight, score = make_mask(full, 9), InnerScore(0.5)
    kept = core(q, k, v, sight, score, Position(), 0.25)
    kept = kept / core.weights(q, k, sight, score, Position())
    assert ((kept == 0) | ((kept - 1 / 0.75).abs() < 1e-10)).all()
    assert 0.15 < (kept == 0).double().mean() < 0.35


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"core\.rank=0 must be at least 1"):
        Linformer(0)
    with pytest.raises(UserError, match=r"core\.rank=10 .* at most 9 .*choose a smaller rank"):
        Linformer(10).build(SIZES)


def test_it_refuses_to_look_back_only() -> None:
    """A decoder is refused when it is built; a rule that hides keys, when it is asked."""
    sizes = {"vocab_size": 11, "dim": 8, "layers": 1, "heads": 2, "max_length": 9}
    with pytest.raises(UserError, match="must not see later ones: choose"):
        GptConfig(**sizes, attention=Linformer(3)).build()
    with pytest.raises(UserError, match="must not see later ones: choose"):
        Seq2SeqConfig(**sizes, attention=Linformer(3)).build()
    for rule in (causal, window(2)):
        with pytest.raises(UserError, match=f"not {rule.kind}: choose another core"):
            attend(*inputs(), core=build(), rule=rule)


@pytest.mark.parametrize("position", POSITIONS)
def test_it_refuses_positions_inside_attention(position: str) -> None:
    placed = POSITIONS[position][0].build(
        PositionSizes(dim=16, heads=4, head_dim=4, max_length=9, causal=False)
    )
    if position in ("none", "sinusoidal", "learned"):
        build().check(InnerScore(0.5), placed)
    else:
        with pytest.raises(UserError, match="no position: choose"):
            build().check(InnerScore(0.5), placed)


def test_it_refuses_what_is_too_long() -> None:
    with pytest.raises(UserError, match=r"10 positions, .* projects 9: .* model\.max_length"):
        attend(*inputs(length=10), core=build())


def bert(**settings: object) -> BertConfig:
    sizes = {"vocab_size": 13, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "max_length": 9}
    return BertConfig(**sizes, ffn_dim=16, attention=Linformer(3, "none"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("half", [False, True])
def test_an_encoder_trains(half: bool) -> None:
    """Finite gradients for every weight, also in mixed precision, and a loss that falls."""
    model = bert(attention_dropout=0.1).build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tokens = torch.randint(13, (4, 9))
    real = torch.arange(9) < torch.tensor([[9], [7], [4], [1]])
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(tokens, real)
        loss = torch.nn.functional.cross_entropy(logits[real].float(), tokens[real])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is None or weight.grad.isfinite().all()
        projections = [x for name, x in model.named_parameters() if ".core." in name]
        assert len(projections) == 4
        assert all(x.grad is not None and (x.grad != 0).any() for x in projections)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_maps_and_account_know_it() -> None:
    """capture shows the weights over the rank; the account counts the matrices of each layer."""
    model = bert().build().eval()
    with capture(model) as maps:
        model(torch.randint(13, (2, 7)))
    assert [x.shape for x in maps["self"]] == [(2, 4, 7, 3)] * 2
    own = sum(x.numel() for x in model.parameters())
    assert summarize(bert()).parameters == own
