"""Performer: unbiased, its error as 1/√features, its prefix sums the formula, causal, resumable."""

import math

import pytest
import torch
from textbook import POSITIONS, SCORES
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.capture import capture
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.attention import attend
from manyheads.nn.exact_attention import AttentionSizes
from manyheads.nn.masks import Rule, causal, full, make_mask, window
from manyheads.nn.performer import Draw, Performer, PerformerCore, draw_projection, exponents
from manyheads.nn.positions import Position, PositionSizes, Rotary
from manyheads.nn.scores import InnerScore, ScaledDot

DRAWS: list[Draw] = ["orthogonal", "independent"]
SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=4, key_dim=4, max_length=64, causal=True)
SCORE = InnerScore(0.5)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def build(settings: Performer | None = None) -> PerformerCore:
    return (settings or Performer(16, chunk=4)).build(SIZES).double()


def inputs(length: int = 11) -> list[Tensor]:
    return [normal(2, 4, length, 4), normal(2, 2, length, 4), normal(2, 2, length, 4)]


def estimates(features: int, draws: int, draw: Draw, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)ᵀ φ(k) of each pair, draw by draw: [draws, pairs]."""
    found = []
    for _ in range(draws):
        projection = draw_projection(features, q.shape[-1], draw).double()
        found.append((exponents(q, projection) + exponents(k, projection)).exp().mean(-1))
    return torch.stack(found)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_kernel_is_unbiased(draw: Draw) -> None:
    """Over many draws φ(q)ᵀ φ(k) averages to exp(q · k), of whichever sign that product is."""
    q = torch.tensor([[0.9, 0.0, 0.0], [0.9, 0.0, 0.0], [0.3, 0.5, -0.7]], dtype=torch.float64)
    k = torch.tensor([[0.8, 0.2, 0.0], [-0.8, 0.2, 0.0], [0.6, 0.3, -0.4]], dtype=torch.float64)
    found = estimates(5, 4000, draw, q, k)
    error = (found.mean(0) - (q * k).sum(-1).exp()).abs()
    assert (error < 4 * found.std(0) / math.sqrt(len(found))).all()


@pytest.mark.parametrize("draw", DRAWS)
def test_each_feature_is_gaussian(draw: Draw) -> None:
    """ω ~ N(0, I): mean 0 and variance 1 in every channel; a block at right angles if asked."""
    drawn = torch.stack([draw_projection(5, 3, draw) for _ in range(3000)])
    assert (drawn.mean(0).abs() < 4 / math.sqrt(3000)).all()
    assert ((drawn.square().mean(0) - 1).abs() < 4 * math.sqrt(2 / 3000)).all()
    straight = (drawn[:, 0] * drawn[:, 1]).sum(-1).abs() < 1e-5
    assert straight.all() if draw == "orthogonal" else not straight.any()
    assert not ((drawn[:, 0] * drawn[:, 3]).sum(-1).abs() < 1e-5).any()  # another block


def kernel_errors(draw: Draw) -> dict[int, float]:
    """By number of features: the RMS error of the kernel over draws and pairs.

    Of short vectors, as the tails of longer ones are too heavy for so few draws.
    """
    q, k = (torch.nn.functional.normalize(normal(16, 8), dim=-1) / 2 for _ in range(2))
    exact = (q * k).sum(-1).exp()
    found = {}
    for features, draws in ((8, 2000), (32, 500), (128, 500), (512, 500)):
        error = estimates(features, draws, draw, q, k) - exact
        found[features] = float(error.square().mean().sqrt())
    return found


def test_the_error_falls_with_the_root_of_the_features() -> None:
    """The slope of log error against log features is −½, and right angles only help."""
    errors = {}
    for draw in DRAWS:
        torch.manual_seed(0)  # the same pairs for both
        errors[draw] = kernel_errors(draw)
        x, y = (torch.tensor([*values]).log() for values in (errors[draw], errors[draw].values()))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        assert abs(slope + 0.5) < 0.1
    for features, error in errors["orthogonal"].items():
        assert error <= errors["independent"][features]


def quadratic(core: PerformerCore, given: list[Tensor], mask: Tensor, scale: float) -> Tensor:
    """φ(q)ᵀφ(k) for every pair, as the paper writes it, masked and normalised."""
    q, k, v = given
    root, m = math.sqrt(scale), len(core.projection)

    def phi(x: Tensor) -> Tensor:
        x = x * root
        return (x @ core.projection.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(m)

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (phi(q) @ phi(k).mT) * mask
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("rule", [causal, full])
@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_it_is_the_quadratic_formula(rule: Rule, chunk: int) -> None:
    """Forward and backward, wherever the chunks end, with shared keys and with padding."""
    core = build(Performer(16, chunk=chunk))
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, 3:6] = False
    for shown in (None, real):
        sight = make_mask(rule, 11, padding_mask=shown)
        mask = sight.as_bool()
        given = [x.requires_grad_() for x in inputs()]
        found = core(*given, sight, SCORE, Position())
        expected = quadratic(core, given, torch.ones(1) if mask is None else mask, SCORE.scale)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        g = normal(*found.shape)
        for a, b in zip(
            torch.autograd.grad(found, given, g),
            torch.autograd.grad(expected, given, g),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_no_gradient_comes_from_the_future() -> None:
    """Query i depends on keys and values up to i, on each of them, and on no later one."""
    core = build()
    q, k, v = (x.requires_grad_() for x in inputs())
    out = core(q, k, v, make_mask(causal, 11), SCORE, Position())
    for i in range(11):
        for gradient in torch.autograd.grad(out[:, :, i].sum(), [k, v], retain_graph=True):
            reached = (gradient != 0).any(-1)
            # The one key that the first query sees has the weight 1, whatever it is.
            assert reached[:, :, : i + 1].all() or i == 0
            assert not reached[:, :, i + 1 :].any()


def test_a_later_key_changes_nothing_before() -> None:
    """In float32 too, also when it outgrows all others."""
    core = Performer(16, chunk=4).build(SIZES)
    q, k, v = (x.float() for x in inputs())
    sight = make_mask(causal, 11)
    before = core(q, k, v, sight, SCORE, Position())
    k[:, :, 7], v[:, :, 7] = 0.01 * k[:, :, 7], 1e3
    k[:, :, 8:] *= 6
    after = core(q, k, v, sight, SCORE, Position())
    torch.testing.assert_close(after[:, :, :7], before[:, :, :7], rtol=0, atol=1e-4)
    assert ((after[:, :, 7:] - before[:, :, 7:]).abs() > 0.1).any()


def uneven(change: int, early: float, late: float) -> list[Tensor]:
    """Rows in float32 whose keys are of other lengths from position `change` on."""
    q, k, v = (torch.randn(1, 2, 40, 64) for _ in range(3))
    lengths = torch.where(torch.arange(40) < change, early, late)
    return [q, k * lengths[:, None], v]


UNEVEN = pytest.mark.parametrize(
    ("early", "late"), [(8.0, 0.1), (8.0, 0.0), (0.1, 8.0), (8.0, 8.0)]
)
WIDE = AttentionSizes(heads=2, kv_heads=2, head_dim=64, key_dim=64, max_length=64, causal=True)


@UNEVEN
@pytest.mark.parametrize("change", [16, 23, 1])
def test_what_follows_takes_nothing_away(change: int, early: float, late: float) -> None:
    """Exponents may differ by hundreds, between chunks and inside one: float32 is as float64."""
    core = Performer(32, chunk=16).build(WIDE)
    score = InnerScore(1 / 8)
    given = [x.requires_grad_() for x in uneven(change, early, late)]
    out = core(*given, make_mask(causal, 40), score, Position())
    assert not (out == 0).all(-1).any()
    part = core(*(x[:, :, :change] for x in given), make_mask(causal, change), score, Position())
    torch.testing.assert_close(out[:, :, :change], part, rtol=0, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), given)
    wide = [x.detach().double().requires_grad_() for x in given]
    core.double()
    exact = by_logarithms(core, wide, score.scale)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)
    for a, b in zip(found, torch.autograd.grad(exact.square().sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


def by_logarithms(core: PerformerCore, given: list[Tensor], scale: float) -> Tensor:
    """The causal formula from the logarithm of every pair's kernel, which nothing overflows."""
    q, k, v = given
    a, b = (exponents(x * math.sqrt(scale), core.projection) for x in (q, k))
    kernel = (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(-1)
    later = torch.ones(kernel.shape[-2:], dtype=torch.bool).triu(1)
    return kernel.masked_fill(later, -torch.inf).softmax(-1) @ v


@UNEVEN
def test_uneven_keys_through_a_cache(early: float, late: float) -> None:
    """Stretches and single steps, and what is shown of them, are the full pass in float32 too."""
    core = Performer(32, chunk=16).build(WIDE)
    score = InnerScore(1 / 8)
    q, k, v = uneven(23, early, late)
    whole = core(q, k, v, make_mask(causal, 40), score, Position())
    start = 0
    for length in (18, 12, 1, 9):
        end = start + length
        sight = make_mask(causal, length, start=start)
        step = q[:, :, start:end], k[:, :, :end]
        piece = core(*step, v[:, :, :end], sight, score, Position())
        torch.testing.assert_close(piece, whole[:, :, start:end], rtol=0, atol=1e-4)
        weights = core.weights(*step, sight, score, Position())
        torch.testing.assert_close(weights @ v[:, :, :end], piece, rtol=0, atol=1e-4)
        start = end


def test_uneven_keys_with_padding() -> None:
    """Padding before, between and behind them changes nothing, and gives no gradient."""
    core = Performer(32, chunk=16).build(WIDE)
    score = InnerScore(1 / 8)
    real = torch.ones(1, 40, dtype=torch.bool)
    real[:, :3], real[:, 20:25], real[:, 38:] = False, False, False
    given = [x.requires_grad_() for x in uneven(30, 8.0, 0.1)]
    out = core(*given, make_mask(causal, 40, padding_mask=real), score, Position())
    assert (out[:, :, :3] == 0).all()
    kept = real[0].nonzero()[:, 0]
    alone = core(*(x[:, :, kept] for x in given), make_mask(causal, len(kept)), score, Position())
    torch.testing.assert_close(out[:, :, kept], alone, rtol=0, atol=1e-4)
    for gradient in torch.autograd.grad(out[:, :, kept].sum(), given):
        assert gradient.isfinite().all()
        assert (gradient[:, :, ~real[0]] == 0).all()


def test_padding_costs_nothing() -> None:
    """What is no key is not taken for one that is far below all others."""
    core, spent = Performer(16, chunk=4).build(SIZES), []
    real = (torch.arange(11) > 4).expand(2, -1)
    for shown in (None, real):
        with FlopCounterMode(display=False) as counter:
            core(
                *(x.float() for x in inputs()),
                make_mask(causal, 11, padding_mask=shown),
                SCORE,
                Position(),
            )
        spent.append(counter.get_total_flops())
    assert spent[0] == spent[1] > 0


@pytest.mark.parametrize("rule", [causal, full])
def test_padding_changes_nothing(rule: Rule) -> None:
    """A padded row gives what its text alone gives, and junk in the padding no gradient."""
    core = build()
    given = inputs()
    for x in given:
        x[:, :, 7:] *= 40
        x.requires_grad_()
    real = (torch.arange(11) < 7).expand(2, -1)
    padded = core(*given, make_mask(rule, 11, padding_mask=real), SCORE, Position())[:, :, :7]
    alone = core(*(x[:, :, :7] for x in given), make_mask(rule, 7), SCORE, Position())
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(padded.square().sum(), given):
        assert (gradient[:, :, 7:] == 0).all()
        assert (gradient[:, :, :7] != 0).any()


@pytest.mark.parametrize("rule", [causal, full])
def test_a_query_that_sees_nothing_gets_zeros(rule: Rule) -> None:
    """Where the row begins with padding or has nothing else: zeros, and no gradient."""
    core = build()
    given = [x.requires_grad_() for x in inputs()]
    real = torch.ones(2, 11, dtype=torch.bool)
    real[0], real[1, :5] = False, rule is full
    out = core(*given, make_mask(rule, 11, padding_mask=real), SCORE, Position())
    blind = out[0] if rule is full else torch.cat([out[0], out[1, :, :5]], 1)
    assert (blind == 0).all()
    assert (out[1, :, 5:] != 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(blind.sum(), given, retain_graph=True))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), given))


@pytest.mark.parametrize("rule", [causal, full])
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_large_vectors_stay_finite(rule: Rule, size: float) -> None:
    """Exponents of thousands neither overflow nor leave 0/0 behind, forward and backward."""
    core = Performer(16, chunk=4).build(SIZES)
    given = [(size * x).float().requires_grad_() for x in inputs()]
    out = core(*given, make_mask(rule, 11), SCORE, Position())
    assert out.isfinite().all()
    # A mean of values, whatever the weights.
    assert (out.abs().amax(2) <= given[2].abs().amax(2).repeat_interleave(2, 1) * 1.001).all()
    assert (out != 0).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), given))


def test_many_features_come_near_dense() -> None:
    """With thousands of features what is mixed, and by what, is nearly softmax attention."""
    q, k, v = inputs()
    q, k = q / 2, k / 2
    for rule in (causal, full):
        core = build(Performer(20_000))
        exact = attend(q, k, v, rule=rule, scale=0.5)
        assert (attend(q, k, v, rule=rule, core=core, scale=0.5) - exact).abs().max() < 0.1
        few = build(Performer(8))
        assert (attend(q, k, v, rule=rule, core=few, scale=0.5) - exact).abs().max() > 0.2
        negative = attend(q, k, v, rule=rule, core=core, scale=-0.5)
        assert (negative - attend(q, k, v, rule=rule, scale=-0.5)).abs().max() < 0.1


@pytest.mark.parametrize("rule", [causal, full])
def test_weights_are_what_values_are_mixed_by(rule: Rule) -> None:
    core = build()
    q, k, v = inputs()
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, :2] = False
    sight = make_mask(rule, 11, padding_mask=real)
    weights = core.weights(q, k, sight, SCORE, Position())
    assert weights.shape == (2, 4, 11, 11)
    out = core(q, k, v, sight, SCORE, Position())
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out, rtol=0, atol=1e-12)


def gpt(core: Performer, **settings: object) -> GptConfig:
    sizes = {"vocab_size": 13, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "max_length": 32}
    return GptConfig(**sizes, ffn_dim=16, dropout=0.0, attention=core, **settings)  # type: ignore[arg-type]


def test_a_cached_step_is_the_full_pass() -> None:
    """A prompt, a stretch and single tokens through the cache give the logits of one pass."""
    model: Gpt = gpt(Performer(16, chunk=4), position=Rotary()).build().double().eval()
    tokens = torch.randint(13, (2, 11))
    whole, cache = model(tokens), KVCache()
    pieces = [model(piece, cache=cache) for piece in tokens.split([5, 3, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-10)


def test_redraw_comes_after_so_many_training_passes() -> None:
    """Not before, never in evaluation, and the passes after it see other features."""
    core = build(Performer(16, redraw=3))
    given, sight = inputs(), make_mask(causal, 11)
    first, seen = core.projection.clone(), []
    for mode in (True, False, True, False, True, False, True):
        core.train(mode)
        core(*given, sight, SCORE, Position())
        seen.append(torch.equal(core.projection, first))
    assert seen == [True, True, True, True, False, False, False]
    assert core.projection.dtype == torch.float64
    fixed = build(Performer(16))
    first = fixed.projection.clone()
    for _ in range(5):
        fixed(*given, sight, SCORE, Position())
    assert torch.equal(fixed.projection, first)
    assert fixed.state_dict().keys() == {"projection"}


def test_a_backward_pass_after_a_redraw_is_its_own() -> None:
    """Several passes may be under way when features are drawn anew."""
    core = build(Performer(16, redraw=1))
    given = [x.requires_grad_() for x in inputs()]
    sight = make_mask(full, 11)
    first = core.projection
    out = core(*given, sight, SCORE, Position())
    core(*given, sight, SCORE, Position())
    found = torch.autograd.grad(out.sum(), given)
    core.projection = first
    again = core(*given, sight, SCORE, Position())
    for a, b in zip(found, torch.autograd.grad(again.sum(), given), strict=True):
        assert torch.equal(a, b)


def test_a_run_resumes_with_the_same_bits() -> None:
    """Saved weights and the random state are all that later passes and redraws hang on."""
    given, sight = [x.float() for x in inputs()], make_mask(causal, 11)

    def passes(core: PerformerCore, count: int) -> list[Tensor]:
        return [core(*given, sight, SCORE, Position()) for _ in range(count)]

    core = Performer(16, redraw=3).build(SIZES)
    passes(core, 5)
    saved = {name: x.clone() for name, x in core.state_dict().items()}
    state = torch.get_rng_state()
    expected = passes(core, 5)
    torch.manual_seed(99)
    resumed = Performer(16, redraw=3).build(SIZES)
    resumed.load_state_dict(saved)
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(passes(resumed, 5), expected, strict=True))
    assert not torch.equal(expected[0], expected[-1])


def test_what_it_cannot_honour_it_refuses() -> None:
    for name in SCORES:
        core, scored = build(), SCORES[name][0].build(4, 4)
        if name in ("dot", "scaled-dot"):
            core.check(scored, Position())
        else:
            with pytest.raises(UserError, match=r"choose model\.score=scaled-dot or dot"):
                core.check(scored, Position())
    sizes = PositionSizes(dim=16, heads=4, head_dim=4, max_length=9, causal=False)
    for name in POSITIONS:
        placed = POSITIONS[name][0].build(sizes)
        if name in ("shaw", "t5", "alibi", "relative"):
            with pytest.raises(UserError, match=r"choose one .*model\.position=rotary"):
                build().check(SCORE, placed)
        else:
            build().check(SCORE, placed)
    with pytest.raises(UserError, match=r"choose model\.attention_dropout=0"):
        gpt(Performer(), attention_dropout=0.1).build()
    with pytest.raises(UserError, match="rule like window: choose another core"):
        attend(*inputs(), core=build(), rule=window(2))
    for wrong in ({"features": 0}, {"redraw": 0}, {"chunk": 0}):
        with pytest.raises(UserError, match=f"core.{next(iter(wrong))}=0 must be at least 1"):
            Performer(**wrong)


@pytest.mark.parametrize("half", [False, True])
def test_an_encoder_trains(half: bool) -> None:
    """Finite gradients for every weight, also in mixed precision, and a loss that falls."""
    config = BertConfig(
        vocab_size=13, dim=16, layers=2, heads=4, ffn_dim=16, max_length=9, attention=Performer(16)
    )
    model = config.build()
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
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_half_precision_is_rounded_once() -> None:
    """bfloat16 in and out, autocast on: the float64 result, off by the rounding of the output."""
    core = Performer(16, chunk=4).build(SIZES)
    given = [x.bfloat16() for x in inputs()]
    for rule in (causal, full):
        with torch.autocast("cpu", torch.bfloat16):
            out = core(*given, make_mask(rule, 11), SCORE, Position())
        assert out.dtype == torch.bfloat16
        precise = build()
        precise.load_state_dict(core.state_dict())
        exact = precise(*(x.double() for x in given), make_mask(rule, 11), SCORE, Position())
        torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=1e-5)


def test_maps_show_the_estimated_weights() -> None:
    """capture leaves what is computed as it was, and shows causal rows that sum to 1."""
    model = gpt(Performer(16, redraw=1), score=ScaledDot(scale=0.3)).build().eval()
    tokens = torch.randint(13, (2, 7))
    with capture(model) as maps:
        seen = model(tokens)
    assert torch.equal(seen, model(tokens))
    for shown in maps["self"]:
        assert shown.shape == (2, 4, 7, 7)
        torch.testing.assert_close(shown.sum(-1), torch.ones(2, 4, 7))
        assert (shown.triu(1) == 0).all()
