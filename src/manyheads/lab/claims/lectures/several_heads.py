"""Several heads against one head of the same total width: cost and accuracy."""

from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, in_parts
from manyheads.lab.claims.clock import side_by_side
from manyheads.lab.claims.trial import learn
from manyheads.models.bert import BertConfig
from manyheads.models.heads import Tag
from manyheads.nn.block import Block
from manyheads.nn.masks import full, make_mask
from manyheads.summary import summarize

# The cost is measured at the width of the base Transformer.
WIDE, WIDE_HEADS, VOCABULARY = 512, 8, 1000
SHORT, LONG, ROUNDS = 128, 1024, 5
LIMIT = 1.5
# The task: at each position, predict the words 1, 2, … positions before.
WORDS, PLACES, LENGTH, ROWS = 16, 4, 24, 32
DIM, STEPS, LARGE_STEPS, WARMUP = 32, 300, 1000, 20
RATES = (1e-2, 3e-2)
TEST_TEXTS = 256  # texts on which errors are counted


def config_of(heads: int) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY, dim=WIDE, layers=1, heads=heads, max_length=LONG, dropout=0.0
    )


def counted(heads: int) -> tuple[int, int]:
    """Parameters and FLOPs of a forward pass, by the model summary."""
    summary = summarize(config_of(heads), LONG)
    return summary.parameters, summary.sequence_flops


def pass_of(heads: int, length: int, setting: Setting, seed: int) -> Callable[[], None]:
    """A function that runs self-attention forward and backward."""
    torch.manual_seed(seed)
    stack = config_of(heads).build().to(setting.device).encoder
    block, position = stack.blocks[0], stack.position
    assert isinstance(block, Block)
    sight = make_mask(full, length, device=setting.device)
    x = torch.randn(1, length, WIDE, device=setting.device)

    def there_and_back() -> None:
        block.attention(x, sight, position).sum().backward()

    return there_and_back


def slower(length: int, setting: Setting, seed: int) -> float:
    """The time of several heads divided by that of one."""
    acts = {heads: pass_of(heads, length, setting, seed) for heads in (1, WIDE_HEADS)}
    named = {str(heads): act for heads, act in acts.items()}
    times = side_by_side(named, ROUNDS, setting.device)
    return times[str(WIDE_HEADS)] / times["1"]


def scores_and_labels(
    model: nn.Module, rows: int, random: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits and labels of the preceding words."""
    words = torch.randint(WORDS, (rows, LENGTH), generator=random).to(device)
    before = torch.stack([words.roll(back, 1) for back in range(1, PLACES + 1)], -1)
    scores = model(words).unflatten(-1, (PLACES, WORDS))
    return scores[:, PLACES:].flatten(0, 2), before[:, PLACES:].flatten()


def errors(heads: int, rate: float, setting: Setting, seed: int) -> float:
    """The error rate of a trained layer."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS,
        dim=DIM,
        layers=1,
        heads=heads,
        max_length=LENGTH,
        dropout=0.0,
        head=Tag(labels=tuple(map(str, range(PLACES * WORDS)))),
    )
    model, random = config.build().to(setting.device), torch.Generator().manual_seed(seed)
    steps = LARGE_STEPS if setting.large else STEPS
    learn(
        model,
        lambda step: F.cross_entropy(*scores_and_labels(model, ROWS, random, setting.device)),
        steps=steps,
        rate=rate,
        warmup=WARMUP,
    )
    with torch.no_grad():
        scores, labels = scores_and_labels(model, TEST_TEXTS, random, setting.device)
    return float((scores.argmax(-1) != labels).float().mean())


def measure(setting: Setting) -> Measured:
    one_head, several_heads = counted(1), counted(WIDE_HEADS)
    numbers = {
        "parameters": [several_heads[0] / one_head[0]] * len(setting.seeds),
        "FLOPs": [several_heads[1] / one_head[1]] * len(setting.seeds),
        "time, short": [slower(SHORT, setting, seed) for seed in setting.seeds],
        "time, long": [slower(LONG, setting, seed) for seed in setting.seeds],
    }
    line = []
    for heads in (1, 2, PLACES, 2 * PLACES):
        tried = [[errors(heads, rate, setting, seed) for seed in setting.seeds] for rate in RATES]
        best = min(tried, key=sum)
        line.append((heads, fmean(best)))
        numbers[f"errors, {heads} heads" if heads > 1 else "errors, 1 head"] = best
    return Measured(
        numbers=numbers,
        lines={f"asked for {PLACES} places": line},
        across="heads of one total width",
        up="share of errors",
    )


def judge(measured: Measured) -> Judged:
    equal = all(measured.mean(name) == 1 for name in ("parameters", "FLOPs"))
    short, long = (measured.most(f"time, {length}") <= LIMIT for length in ("short", "long"))
    one_head, several_heads = (
        measured.numbers[f"errors, {name}"] for name in ("1 head", f"{PLACES} heads")
    )
    better = all(2 * few <= many for few, many in zip(several_heads, one_head, strict=True))
    why = (
        f"{WIDE_HEADS} heads have {measured.reported('parameters')} times the parameters and "
        f"{measured.reported('FLOPs')} times the FLOPs of one, take "
        f"{measured.reported('time, short')} "
        f"times its time over {SHORT} words and {measured.reported('time, long')} over {LONG:,}; "
        "asked "
        f"for {PLACES} places at once, {PLACES} heads err in {fmean(several_heads):.2g} of the "
        "cases and "
        f"one in {measured.reported('errors, 1 head')}"
    )
    parts = {
        "they learn more": better,
        "they have the parameters and FLOPs of one": equal,
        f"they take about its time over {SHORT} words": short,
        f"they take about its time over {LONG:,} words": long,
    }
    return in_parts(parts, why, needed=list(parts)[:2])


CLAIM = Claim(
    sentence="Several heads cost about as much as one head of the same total width, and learn more "
    "if a word has to attend to several positions at once.",
    lectures="000, 001, 003",
    criterion="equal parameters and FLOPs, at most 1.5 times the time over 128 words and over "
    "1,024, at most half the errors in predicting 4 positions at once, each at its best rate",
    measure=measure,
    judge=judge,
)
