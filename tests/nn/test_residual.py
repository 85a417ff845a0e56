"""Where the norm stands, and what it computes."""

import pytest
import torch
from torch import Tensor, nn

from manyheads.nn.residual import Norm, Residual


def vectors(*shape: int) -> Tensor:
    return 3 + 2 * torch.randn(*shape, dtype=torch.float64)


def shake(module: nn.Module) -> nn.Module:
    """Gains and shifts that are not one and zero, so that forgetting them shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return gain * (x - mean) / (variance + eps) ** 0.5 + shift


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_layer_norm_by_hand(eps: float) -> None:
    """γ (x − μ) / √(σ² + ε) + β, over the channels of each position."""
    norm, x = shake(Norm(eps=eps).build(6)), vectors(2, 3, 6)
    expected = layer_norm(x, norm.weight, norm.bias, eps)  # type: ignore[arg-type]
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_rms_norm_by_hand(eps: float) -> None:
    """γ x / √(mean(x²) + ε): no mean is taken off, nothing is added."""
    norm, x = shake(Norm(form="rms", eps=eps).build(6)), vectors(2, 3, 6)
    expected = norm.weight * x / ((x**2).sum(-1, keepdim=True) / 6 + eps) ** 0.5
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-10)
    assert len(list(norm.parameters())) == 1


@pytest.mark.parametrize("form", ["layer", "rms"])
def test_placements_are_their_equations(form: str) -> None:
    """pre: x + f(Norm(x)); post: Norm(x + f(x))."""
    x = vectors(2, 3, 6)
    for placement in ("pre", "post"):
        norm = Norm(placement=placement, form=form)  # type: ignore[arg-type]
        residual = Residual(6, norm, dropout=0.0)
        shake(residual)
        expected = (
            x + residual.norm(x).tanh() if placement == "pre" else residual.norm(x + x.tanh())
        )
        torch.testing.assert_close(residual(x, torch.tanh), expected)


def test_the_residual_stream_is_open_in_pre_norm() -> None:
    """A part that gives zero leaves a pre-norm stream as it was, and a post-norm one normed."""
    x = vectors(2, 3, 6)
    pre, post = (Residual(6, Norm(placement=p), 0.0).double() for p in ("pre", "post"))
    assert torch.equal(pre(x, torch.zeros_like), x)
    torch.testing.assert_close(post(x, torch.zeros_like), post.norm(x))


def test_only_pre_norm_ends_with_one_more() -> None:
    """Pre-norm leaves the stream unnormed and needs a last norm; post-norm does not."""
    assert isinstance(Norm(placement="pre").build_last(4), nn.LayerNorm)
    assert isinstance(Norm(placement="pre", form="rms").build_last(4), nn.RMSNorm)
    assert isinstance(Norm(placement="post").build_last(4), nn.Identity)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_is_on_the_part_alone(placement: str) -> None:
    """Dropout takes away what the part adds, never the stream itself."""
    residual = Residual(6, Norm(placement=placement), dropout=0.999999)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 6)
    gone = residual(x, torch.ones_like)
    torch.testing.assert_close(gone, x if placement == "pre" else residual.norm(x))
    residual.eval()
    assert not torch.allclose(residual(x, torch.exp), gone)
