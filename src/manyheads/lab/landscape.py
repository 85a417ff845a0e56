"""The loss around trained weights (Li et al. 2018), with residual connections and without.

    f(α, β) = L(θ + α δ + β η)

δ and η are random directions, normalised filter by filter: d_i ← d_i ‖θ_i‖ / ‖d_i‖, a filter being
a row of a weight matrix; vectors (biases, norms) stay where they are. Without residuals the same
weights compute x ← f(x) in place of x ← x + f(x): nothing is retrained, so that the second
surface shows the effect of the sum for these weights, not the result of another training.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.data.language import EncodedText, TextData
from manyheads.data.masking import Causal
from manyheads.data.translation import EncodedPairs, FilesData, PhrasebookData
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError, check_at_least
from manyheads.loading import LoadedRun
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.nn.layers import Residual
from manyheads.tasks.language import LanguageBatch, SlidingWindows, language_loss
from manyheads.tasks.translation import translation_loss

PAIRS = 64  # size of the held-out batch
WINDOWS, WINDOW = 8, 128  # held-out windows of a language model, and their length

Surface = Float[Tensor, "size size"]
Direction = dict[str, Tensor]


def held_out_loss(opened: LoadedRun) -> Callable[[], float]:
    """A function that computes the mean −log P on one batch of the run's validation split."""
    run, model = opened.run, opened.model.eval()
    if isinstance(run.data, PhrasebookData | FilesData) and isinstance(model, EncoderDecoder):
        frame = SpecialTokens(opened.tokenizer, run.decode).frame
        corpus = run.data.read("valid")
        most = model.config.max_length
        pairs = EncodedPairs(corpus, opened.tokenizer, most, "skip", frame)
        batch = pairs.batch(np.arange(min(PAIRS, len(pairs.rows)))).to(opened.device)
        return lambda: _mean(translation_loss(model, batch, 0.0))
    if isinstance(run.data, TextData) and isinstance(model, Gpt):
        text = EncodedText(run.data.read("valid"), opened.tokenizer, ends=True)
        objective = run.objective if isinstance(run.objective, Causal) else Causal()
        passes = SlidingWindows.over(len(text.flat), min(WINDOW, model.config.max_length))
        starts = passes.starts[:WINDOWS]
        windows = LanguageBatch.of(text, starts, passes.length, objective, opened.device)
        return lambda: _mean(language_loss(model, windows))
    raise opened.unsupported("has a landscape", "a translator or a language model with its data")


def _mean(loss: object) -> float:
    nll, count = loss.nll, loss.count  # type: ignore[attr-defined]
    return float(nll) / float(count)


def direction(model: nn.Module, random: torch.Generator) -> Direction:
    """A random direction whose filters have the norms of the weights' filters."""
    directions = {}
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            directions[name] = torch.zeros_like(weight)
            continue
        drawn = torch.randn(weight.shape, generator=random).to(weight)
        rows, weights = drawn.flatten(1), weight.detach().flatten(1)
        scale = weights.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
        directions[name] = (rows * scale).view_as(weight)
    return directions


@contextmanager
def moved(model: nn.Module) -> Iterator[Callable[[float, Direction, float, Direction], None]]:
    """Yields a function that sets the weights to θ + α δ + β η; restores θ exactly at the end."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def put(alpha: float, delta: Direction, beta: float, eta: Direction) -> None:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(weights[name] + alpha * delta[name] + beta * eta[name])

    try:
        yield put
    finally:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(weights[name])


@contextmanager
def without_residuals(model: nn.Module) -> Iterator[None]:
    """Within this context every x + f(x) of the model is f(x); the norms stay."""
    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    if not residuals:
        raise UserError("this model has no residual connections to cut")

    def cut(residual: Residual) -> Callable[..., Tensor]:
        def forward(x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
            if residual.placement == "pre":
                return residual.dropout(part(residual.norm(x)))
            return residual.norm(residual.dropout(part(x)))

        return forward

    for residual in residuals:
        residual.forward = cut(residual)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for residual in residuals:
            del residual.forward  # uncovers the method of the class


@torch.no_grad()
def landscape(
    opened: LoadedRun,
    *,
    size: int,
    reach: float,
    seed: int,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Surface]:
    """The surfaces with and without residuals at size × size points, −reach … reach each way."""
    check_at_least("--size", size, 3)
    if size % 2 == 0:
        raise UserError(f"--size {size} must be odd: the trained weights stand in the middle")
    random = torch.Generator().manual_seed(seed)
    delta, eta = direction(opened.model, random), direction(opened.model, random)
    loss = held_out_loss(opened)
    offsets = torch.linspace(-reach, reach, size).tolist()
    done = 0

    def surface() -> Surface:
        nonlocal done
        losses = torch.zeros(size, size)
        with moved(opened.model) as put:
            for row, beta in enumerate(offsets):
                for column, alpha in enumerate(offsets):
                    put(alpha, delta, beta, eta)
                    losses[row, column] = loss()
                done += size
                advance(done)
        return losses

    with_residuals = surface()
    with without_residuals(opened.model):
        without = surface()
    return {"as it was trained": with_residuals, "the same weights, residuals cut": without}
