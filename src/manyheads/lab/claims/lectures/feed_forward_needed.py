"""Attention without a feed-forward: depth averages again what was averaged already."""

from contextlib import nullcontext

import torch

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.landscape import without_residuals
from manyheads.models.bert import BertConfig
from manyheads.nn.block import Block
from manyheads.nn.layers import EmbeddingConfig
from manyheads.nn.masks import full, make_mask
from manyheads.nn.scores import ScaledDot

LAYERS, DIM, HEADS = 12, 64, 4
ROWS, LENGTH, VOCABULARY = 8, 32, 100
SHARP = 1.0  # in place of 1/√c: attention that looks at few words from the start
FLOOR = 1e-16  # rounding, where a picture ends
ENDS = ("feed-forward", "residuals", "both")  # what might end it
# Whether there is a feed-forward, whether there are residuals, the scale of the scores.
KINDS = {
    "attention": (False, False, None),
    "sharp attention": (False, False, SHARP),
    "with feed-forward": (True, False, None),
    "with residuals": (False, True, None),
    "with both": (True, True, None),
}


def apart(x: torch.Tensor) -> float:
    """‖X − 1 x̄ᵀ‖ / ‖X‖: what tells the words of a text apart, as a share of all they are."""
    return float((x - x.mean(1, keepdim=True)).norm() / x.norm())


def by_depth(
    setting: Setting, seed: int, *, feedforward: bool, residual: bool, scale: float | None
) -> list[float]:
    """How far apart the words are before the first layer and after each, weights as they begin."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        dim=DIM,
        layers=LAYERS,
        heads=HEADS,
        max_length=LENGTH,
        dropout=0.0,
        score=ScaledDot(scale=scale),
        embed=EmbeddingConfig(scale="sqrt-dim"),
    )
    model = config.build().double().to(setting.device).eval()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH)).to(setting.device)
    sight, position = make_mask(full, LENGTH, device=setting.device), model.encoder.position
    with torch.no_grad(), nullcontext() if residual else without_residuals(model):
        x = model.embedding(model.tokens, tokens, position, sight.query_positions)
        distances = [apart(x)]
        for block in model.encoder.blocks:
            assert isinstance(block, Block)
            x = block.attention_residual(x, lambda y, b=block: b.attention(y, sight, position))
            x = block.feedforward_residual(x, block.feedforward) if feedforward else x
            distances.append(apart(x))
    return distances


def measure(setting: Setting) -> Measured:
    curves_by_kind = {
        kind: [
            by_depth(setting, seed, feedforward=feedforward, residual=residual, scale=scale)
            for seed in setting.seeds
        ]
        for kind, (feedforward, residual, scale) in KINDS.items()
    }
    lines = {
        kind: [
            (depth, max(FLOOR, sum(at) / len(at)))
            for depth, at in enumerate(zip(*curves, strict=True))
        ]
        for kind, curves in curves_by_kind.items()
    }
    return Measured(
        numbers={kind: [curve[-1] for curve in curves] for kind, curves in curves_by_kind.items()},
        lines=lines,
        across="layers",
        up="remaining difference between words, as a share",
        logarithmic=("up",),
    )


def judge(measured: Measured) -> Judged:
    averaged = max(measured.most("attention"), measured.most("sharp attention")) < 0.01
    ends = {kind: measured.least(f"with {kind}") > 0.1 for kind in ENDS}
    why = (
        f"share of the differences between words after {LAYERS} layers: "
        f"{measured.reported('attention')} with attention only "
        f"({measured.reported('sharp attention')} if it is sharp), "
        f"{measured.reported('with feed-forward')} with a feed-forward after each, "
        f"{measured.reported('with residuals')} with residual connections and no feed-forward, "
        f"{measured.reported('with both')} with both"
    )
    if averaged and ends["feed-forward"]:
        return Judged("holds", why)
    if averaged and ends["residuals"]:
        only = "pure attention, which averages: residual connections end that, not the feed-forward"
        return Judged("depends", f"holds only for {only}: {why}")
    if averaged and ends["both"]:
        return Judged("depends", f"holds only with residual connections in addition: {why}")
    return Judged("fails", why)


CLAIM = Claim(
    sentence="Layers of pure attention only average, so that the words of a text become alike with "
    "depth; a feed-forward network after each layer prevents that.",
    lectures="001, 002",
    criterion="with untrained weights, 12 layers of attention, also of sharp attention, leave less "
    "than 1 % of the differences between words, with a feed-forward more than 10 %; it depends if "
    "residual connections prevent the averaging and a feed-forward does not, or only both do",
    measure=measure,
    judge=judge,
)
