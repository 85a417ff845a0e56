"""The grid: every score, rule, position, core and placement works like dense, or refuses."""

from functools import cache
from itertools import product
from typing import Literal, get_args

import pytest
import torch
from textbook import DOCUMENTS, POSITIONS, RULES, SCORES, Sees, refused
from torch import Tensor

from manyheads.decode.kv_cache import KVCache
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import AttentionFunctionConfig
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.flex import Flex
from manyheads.nn.masks import Rule, SameDocument, make_mask
from manyheads.nn.packed import Packed
from manyheads.nn.relative import PositionConfig
from manyheads.nn.residual import Norm
from manyheads.nn.scores import ScoreConfig
from manyheads.nn.tiled import Tiled

LENGTH = 6
STEPS = range(LENGTH)
CORES: dict[str, AttentionFunctionConfig] = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=4),
    "packed": Packed(),
}
GRID_POSITIONS = [name for name in POSITIONS if name != "rotary-interleaved"]
CELLS = list(product(SCORES, GRID_POSITIONS, CORES))
WORKING = [cell for cell in CELLS if not refused(*cell)]
REFUSING = [cell for cell in CELLS if refused(*cell)]
Placement = Literal["pre", "post"]
# The grid's rows are one sentence, and padding follows it: one list of documents for all rows.
GRID_RULES: dict[str, tuple[Rule, Sees]] = {
    **RULES,
    "same-document": (
        SameDocument(torch.tensor([[*DOCUMENTS[0], 2, 2]])),
        RULES["same-document"][1],
    ),
}
# Cores may know the full rule and the causal one without a mask; the others are masks alike.
PADDED = ("full", "causal", "either")


def build(score: str, position: str, core: str, placement: Placement, *, causal: bool) -> Stack:
    """One block of two heads of four channels, in float64; the seed fixes its weights."""
    torch.manual_seed(1)
    config = Architecture(
        dim=8,
        layers=1,
        heads=2,
        ffn_dim=8,
        max_length=2 * LENGTH,
        dropout=0.0,
        position=POSITIONS[position][0],
        score=SCORES[score][0],
        attention=CORES[core],
        norm=Norm(placement=placement),
    )
    return Stack(config, causal=causal).double()


def run(stack: Stack, rule: Rule, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the gradient by the input of (row n, position n) alone for each row n."""
    x = x.clone().requires_grad_()
    sight = make_mask(rule, x.shape[1], padding_mask=real)
    out = stack(stack.position.embed(x, sight.query_positions), sight)
    own = torch.arange(LENGTH)
    (out[own, own] * torch.linspace(-1, 2, 8, dtype=x.dtype)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@cache
def sentence() -> Tensor:
    """The same six vectors in each row: row n then shows what position n depends on."""
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(LENGTH, 8, dtype=torch.float64, generator=generator)
    return vectors.expand(LENGTH, -1, -1)


@cache
def by_dense(
    score: str, position: str, placement: Placement, causal: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    stack = build(score, position, "dense", placement, causal=causal)
    return {name: run(stack, rule, sentence()) for name, (rule, _) in rules(causal).items()}


def rules(causal: bool) -> dict[str, tuple[Rule, Sees]]:
    """Those for a stack that looks back only, or the others."""
    return {name: pair for name, pair in GRID_RULES.items() if pair[0].is_causal == causal}


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("score", "position", "core"), WORKING)
def test_cell_works(score: str, position: str, core: str, placement: Placement) -> None:
    """Under every rule the cell agrees with dense and looks only where it may, never at padding."""
    x = sentence()
    junk = torch.cat([x, 5 * torch.randn(LENGTH, 2, 8, dtype=torch.float64)], dim=1)
    real = (torch.arange(LENGTH + 2) < LENGTH).expand(LENGTH, -1)
    for causal in (True, False):
        dense = by_dense(score, position, placement, causal)
        stack = build(score, position, core, placement, causal=causal)
        for name, (rule, sees) in rules(causal).items():
            out, gradient = dense[name] if core == "dense" else run(stack, rule, x)
            agree(out, dense[name][0])
            agree(gradient, dense[name][1])
            depends = (gradient != 0).any(-1).tolist()
            # The residual carries each position to itself, seen or not.
            assert depends == [[i == j or sees(0, i, j) for j in STEPS] for i in STEPS]
            if name not in PADDED:
                continue
            padded, padded_gradient = run(stack, rule, junk, real)
            agree(padded[:, :LENGTH], out)
            agree(padded_gradient[:, :LENGTH], gradient)
            assert (padded_gradient[:, LENGTH:] == 0).all()


@pytest.mark.parametrize(("score", "position", "core"), WORKING)
@torch.no_grad()
def test_cell_steps(score: str, position: str, core: str) -> None:
    """Token after token through a cache gives the logits of one full pass."""
    torch.manual_seed(3)
    config = GptConfig(
        vocab_size=9,
        dim=8,
        layers=1,
        heads=2,
        ffn_dim=8,
        max_length=LENGTH,
        position=POSITIONS[position][0],
        score=SCORES[score][0],
        attention=CORES[core],
    )
    model, tokens = config.build().double().eval(), torch.randint(9, (2, LENGTH))
    cache = KVCache()
    steps = [model(tokens[:, [n]], cache=cache) for n in STEPS]
    agree(torch.cat(steps, dim=1), model(tokens))


def across(score: str, core: str, source: Tensor, real: Tensor) -> list[Tensor]:
    """Logits and every gradient of a model that looks across at a padded source."""
    torch.manual_seed(4)
    config = Seq2SeqConfig(
        vocab_size=9,
        dim=8,
        layers=1,
        heads=2,
        ffn_dim=8,
        dropout=0.0,
        tie="target",
        score=SCORES[score][0],
        attention=CORES[core],
    )
    model, target = config.build().double(), torch.randint(9, (3, LENGTH))
    logits = model(source, target, real)
    (logits * torch.linspace(-1, 2, 9, dtype=logits.dtype)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [logits.detach(), *gradients]


ACROSS = [pair for pair in product(SCORES, CORES) if not refused(pair[0], "none", pair[1])]


@pytest.mark.parametrize(("score", "core"), ACROSS)
def test_cell_looks_across(score: str, core: str) -> None:
    """Cross-attention to a longer, padded source: like dense, and blind to the padding."""
    source, lengths = torch.randint(9, (3, LENGTH + 3)), torch.tensor([[LENGTH + 3], [5], [2]])
    real = torch.arange(LENGTH + 3) < lengths
    found = across(score, core, source, real)
    for one, other in zip(found, across(score, "dense", source, real), strict=True):
        agree(one, other)
    changed = across(score, core, torch.where(real, source, (source + 1) % 9), real)
    agree(changed[0], found[0])


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(("score", "position", "core"), REFUSING)
def test_cell_refuses(score: str, position: str, core: str, placement: Placement) -> None:
    """A cell that cannot work says why when it is built."""
    with pytest.raises(ValueError, match=r"\w+ .*(choose|model\.)"):
        build(score, position, core, placement, causal=True)


def kinds_of(rule: type[Rule]) -> set[type[Rule]]:
    """The package's rules below this one; tests may have rules of their own."""
    below = rule.__subclasses__()
    own = {kind for kind in below if kind.__module__.startswith("manyheads.")}
    return own.union(*(kinds_of(kind) for kind in below))


def test_the_grid_is_whole() -> None:
    """Every score, rule, position and core stands in the grid, and most cells work."""
    assert {type(config) for config, _ in SCORES.values()} == set(get_args(ScoreConfig))
    assert {type(config) for config, _ in POSITIONS.values()} == set(get_args(PositionConfig))
    # FlexAttention has no backward here and is the fused core: tests/nn/test_flex.py.
    exact = {core for core in get_args(AttentionFunctionConfig) if core.exact} - {Flex}
    assert {type(core) for core in CORES.values()} == exact
    # A search has a rule of its own for hypotheses, which no model is built with.
    rules = {rule for rule in kinds_of(Rule) if rule.__module__ == Rule.__module__}
    assert {type(rule) for rule, _ in GRID_RULES.values()} == rules
    assert len(GRID_POSITIONS) == len(get_args(PositionConfig))
    assert (len(WORKING), len(REFUSING)) == (126, 34)
