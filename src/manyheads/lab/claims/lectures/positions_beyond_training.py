"""Position schemes on texts longer than any in training."""

from dataclasses import dataclass
from statistics import fmean

import torch
from torch.nn import functional as F

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.reading import Vocabulary, words_of
from manyheads.lab.claims.trial import learn
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.layers import EmbeddingConfig
from manyheads.nn.positions import Alibi, Learned, PositionConfig, Rotary, Sinusoidal
from manyheads.phrasebook import Pair, sentences

FACTORS = (1, 2, 4, 8)
TOLERANCE = 1.1
SCHEMES: tuple[PositionConfig, ...] = (Learned(), Sinusoidal(), Rotary(), Alibi())


@dataclass(frozen=True)
class Size:
    """The size of a model and its data; `length` is the number of words of a training text."""

    length: int
    dim: int
    layers: int
    steps: int
    rows: int
    rate: float
    train_pairs: int
    test_rows: int


SMALL = Size(32, 64, 2, 220, 32, 6e-3, 18_000, 32)
LARGE = Size(128, 256, 4, 3000, 64, 1e-3, 100_000, 128)


def stream(vocabulary: Vocabulary, pairs: list[Pair]) -> torch.Tensor:
    words = (word for pair in pairs for word in words_of(pair.source, pair.source_words))
    return torch.tensor([vocabulary.numbers[word] for word in words])


def loss(model: Gpt, texts: torch.Tensor, first: int) -> torch.Tensor:
    """The mean −log P of the words from position `first` on."""
    logits = model(texts[:, :-1])[:, first - 1 :]
    return F.cross_entropy(logits.flatten(0, 1), texts[:, first:].flatten())


@dataclass(frozen=True)
class Texts:
    """Training and test text as word ids below `words`."""

    train: torch.Tensor
    test: torch.Tensor
    words: int


def texts_for(size: Size, device: torch.device) -> Texts:
    tested = size.test_rows * size.length * FACTORS[-1] // 8  # sentences have more words than 8
    pairs = sentences("en-de", "train", size.train_pairs + tested)
    vocabulary = Vocabulary.of(pairs)
    train, test = (stream(vocabulary, part) for part in (pairs[tested:], pairs[:tested]))
    return Texts(train.to(device), test.to(device), len(vocabulary))


def later_losses(position: PositionConfig, texts: Texts, size: Size, seed: int) -> list[float]:
    """The loss in the later half of texts that are `factor` times as long as in training.

    Embeddings are scaled as each scheme's paper does: by √d with sinusoids, by 1 with learned
    vectors. Rows of the learned table past the trained length keep their random initialisation.
    """
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    longest = size.length * FACTORS[-1]
    config = GptConfig(
        vocab_size=texts.words,
        dim=size.dim,
        layers=size.layers,
        heads=4,
        max_length=longest,
        position=position,
        embed=EmbeddingConfig(scale="one" if position.kind == "learned" else "sqrt-dim"),
        dropout=0.0,
    )
    model = config.build().to(texts.train.device)

    def loss_of(step: int) -> torch.Tensor:
        last = len(texts.train) - size.length
        places = torch.randint(last, (size.rows, 1), generator=random) + torch.arange(size.length)
        return loss(model, texts.train[places.to(texts.train.device)], 1)

    learn(model, loss_of, steps=size.steps, rate=size.rate, warmup=size.steps // 10)
    rows = texts.test[: size.test_rows * longest].view(size.test_rows, longest)
    lengths = [factor * size.length for factor in FACTORS]
    with torch.no_grad():
        return [float(loss(model, rows[:, :length], length // 2)) for length in lengths]


def reach(losses: list[float]) -> float:
    """The largest measured factor up to which the loss stays within the tolerance."""
    count = 0
    while count < len(FACTORS) and losses[count] <= TOLERANCE * losses[0]:
        count += 1
    return float(FACTORS[count - 1])


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    texts = texts_for(size, setting.device)
    numbers, lines = {}, {}
    for position in SCHEMES:
        by_seed = [later_losses(position, texts, size, seed) for seed in setting.seeds]
        numbers[position.kind] = [reach(losses) for losses in by_seed]
        numbers[f"{position.kind} loss"] = [losses[0] for losses in by_seed]
        numbers[f"{position.kind} twice"] = [losses[1] / losses[0] for losses in by_seed]
        means = [fmean(column) for column in zip(*by_seed, strict=True)]
        lines[position.kind] = list(zip(FACTORS, means, strict=True))
    return Measured(
        numbers=numbers,
        lines=lines,
        across="length, in lengths of training",
        up="loss in the later half (nats a word)",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    names = ("sinusoidal", "rotary", "alibi")
    extrapolates = [name for name in names if measured.least(name) >= 2]
    reaches = ", ".join(f"{name} {measured.reported(name)}" for name in ("learned", *names))
    why = (
        f"the largest multiple of the trained length (up to {FACTORS[-1]}) at which the loss is at "
        f"most {100 * (TOLERANCE - 1):.0f} % higher: {reaches}"
    )
    if measured.most("learned") >= 2 or not extrapolates:
        return Judged("fails", why)
    if len(extrapolates) < len(names):
        return Judged("depends", f"holds only for {' and '.join(extrapolates)}; {why}")
    return Judged("holds", why)


CLAIM = Claim(
    sentence="Learned positions do not extrapolate beyond the trained length, and sinusoidal ones "
    "do; so do rotary and ALiBi, which encode distances, as their papers say.",
    lectures="001, 002, 003",
    criterion="in the later half of texts twice as long as any in training the loss is within "
    "10 % of that at the trained length, in every seed: with sinusoidal, rotary and ALiBi "
    "positions, and not with learned ones",
    measure=measure,
    judge=judge,
)
