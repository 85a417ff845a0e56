"""Weight tying: a language model whose head is its embedding, u = h Eᵀ, against an untied one.

Each learns the phrasebook's English word by word, at the better of two learning rates. UMass
CS 685 *Transformers (II)* ties the two without numbers; Press and Wolf (2017) have them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.reading import PAD, Vocabulary, short
from manyheads.lab.claims.trial import learn, stretches
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.positions import Rotary

TRAINED, VALID, LONGEST = 4000, 400, 10  # sentences, and words per sentence
ROWS, DIM, STEPS, WARMUP = 32, 64, 400, 20
LARGE_DIM, LARGE_STEPS = 256, 4000
RATES = (3e-3, 1e-2)
TIES = ("all", "none")


def loss_of(model: Gpt, rows: Tensor) -> Tensor:
    """The mean −log P of each word given those before it."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD)


def model_of(words: int, tie: str, setting: Setting) -> Gpt:
    config = GptConfig(
        vocab_size=words,
        dim=LARGE_DIM if setting.large else DIM,
        layers=1,
        heads=4,
        max_length=LONGEST + 1,
        position=Rotary(),
        dropout=0.0,
        tie="all" if tie == "all" else "none",
    )
    return config.build().to(setting.device)


@dataclass(frozen=True)
class Texts:
    """Sentences as word ids, and the vocabulary size."""

    train: Tensor
    valid: Tensor
    words: int

    @staticmethod
    def read(device: torch.device) -> "Texts":
        pairs = short("train", TRAINED, LONGEST), short("valid", VALID, LONGEST)
        vocabulary = Vocabulary.of([*pairs[0], *pairs[1]])
        train, valid = (vocabulary.rows(some, LONGEST).to(device) for some in pairs)
        return Texts(train, valid, len(vocabulary))


def taught(
    texts: Texts, tie: str, rate: float, seed: int, setting: Setting
) -> tuple[int, float, list[float]]:
    """The number of parameters, the validation loss, and each step's training loss."""
    torch.manual_seed(seed)
    model = model_of(texts.words, tie, setting)
    random = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        return loss_of(model, texts.train[torch.randint(TRAINED, (ROWS,), generator=random)])

    steps = LARGE_STEPS if setting.large else STEPS
    losses = learn(model, loss, steps=steps, rate=rate, warmup=WARMUP)
    with torch.no_grad():
        valid = float(loss_of(model, texts.valid))
    return sum(parameter.numel() for parameter in model.parameters()), valid, losses


def measure(setting: Setting) -> Measured:
    texts = Texts.read(setting.device)
    numbers: dict[str, list[float]] = {"saved": []}
    lines = {}
    for seed in setting.seeds:
        sizes = {}
        for tie, name in zip(TIES, ("tied", "untied"), strict=True):
            trainings = [taught(texts, tie, rate, seed, setting) for rate in RATES]
            sizes[name], valid, losses = min(trainings, key=lambda training: training[1])
            numbers.setdefault(name, []).append(valid)
            if seed == setting.seeds[0]:
                lines[f"{name}, in training"] = stretches(losses)
        numbers["saved"].append(1 - sizes["tied"] / sizes["untied"])
    return Measured(numbers=numbers, lines=lines, across="steps", up="nats a word")


def judge(measured: Measured) -> Judged:
    saves = measured.least("saved") >= 0.25
    as_good = measured.mean("tied") <= 1.01 * measured.mean("untied")
    why = (
        f"{measured.reported('saved')} of the parameters are saved, and the validation loss is "
        f"{measured.reported('tied')} nats tied, {measured.reported('untied')} untied"
    )
    if saves and not as_good:
        return Judged("depends", f"holds for the size, not for the loss: {why}")
    return Judged("holds" if saves and as_good else "fails", why)


CLAIM = Claim(
    sentence="A language model can use its transposed embedding as the output layer: this saves "
    "many parameters and does not make the model worse, as Press and Wolf found.",
    lectures="none",
    criterion="at least a quarter of the parameters saved, and a mean validation loss at most 1 % "
    "higher, each at the better of two learning rates",
    measure=measure,
    judge=judge,
)
