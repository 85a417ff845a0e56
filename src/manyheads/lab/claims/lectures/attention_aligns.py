"""Cross-attention as alignment: the source word with the largest weight against the gold links.

The translators are an LSTM with one attention and a Transformer, evaluated head by head; targets
sort words of two kinds. A head links each target word to the source word with its largest weight.
Each word has one link, so the alignment error rate 1 − 2 |A ∩ G| / (|A| + |G|) is the share of
wrong links. The baseline is the best guess from positions only: the source position from which
each target position's word comes most often.
"""

import torch
from torch import nn

from manyheads.baselines.rnn import Rnn, RnnConfig
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.word_for_word import Words, teach
from manyheads.models.capture import capture
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.nn.layers import EmbeddingConfig

WORDS, LENGTHS, LENGTH, ROWS = 40, (4, 6, 8, 10), 8, 200  # alignments use LENGTH
STEPS, LARGE_STEPS, POINTS = 900, 4000, 9
RATES = {"LSTM": 1e-2, "Transformer": 3e-3}


def model_of(name: str, vocabulary: int) -> Rnn | Seq2Seq:
    if name == "LSTM":
        return RnnConfig(vocab_size=vocabulary, dim=64, layers=1, tie="none", dropout=0.0).build()
    return Seq2SeqConfig(
        vocab_size=vocabulary,
        dim=64,
        layers=2,
        heads=4,
        ffn_dim=128,
        max_length=LENGTHS[-1] + 1,
        embed=EmbeddingConfig(scale="sqrt-dim"),
        tie="none",
        dropout=0.0,
    ).build()


@torch.no_grad()
def errors(model: nn.Module, words: Words, seed: int) -> list[list[float]]:
    """The alignment error of each layer and head on random sentences."""
    source, target, _ = words.sentences(ROWS, LENGTH, torch.Generator().manual_seed(seed))
    gold = words.places(source)[:, None, :LENGTH]
    with capture(model) as maps:
        model(source, target)
    chosen = [layer[:, :, :LENGTH].argmax(-1) for layer in maps["cross"]]
    return [(heads != gold).float().mean((0, 2)).tolist() for heads in chosen]


def place_error(words: Words, seed: int) -> float:
    """The error of the best guess from positions, estimated on many sentences of the length."""
    random = torch.Generator().manual_seed(seed)
    places = words.places(words.sentences(50 * ROWS, LENGTH, random)[0])[:, :LENGTH]
    counts = torch.stack([(places == place).sum(0) for place in range(LENGTH)])
    return 1 - float((counts.amax(0) / len(places)).mean())


def trained(
    name: str, words: Words, seed: int, setting: Setting
) -> tuple[nn.Module, list[tuple[int, list[list[float]]]]]:
    """A trained translator, and the errors of its heads at some steps of the training."""
    torch.manual_seed(seed)
    model = model_of(name, words.vocabulary).to(setting.device)
    steps = LARGE_STEPS if setting.large else STEPS
    history: list[tuple[int, list[list[float]]]] = []

    def watch(step: int) -> None:
        if step % max(1, steps // POINTS) == 0:
            history.append((step, errors(model, words, seed=0)))

    teach(model, words, LENGTHS, steps=steps, rate=RATES[name], seed=seed, watch=watch)
    return model, [*history, (steps, errors(model, words, seed=0))]


def measure(setting: Setting) -> Measured:
    numbers: dict[str, list[float]] = {}
    lines: dict[str, list[tuple[int, float]]] = {}
    for seed in setting.seeds:
        words = Words.of(WORDS, seed, setting.device, kinds=2)
        values = {"places": place_error(words, seed)}
        for name in RATES:
            model, history = trained(name, words, seed, setting)
            last = history[-1][1]
            heads = [(i, j) for i, row in enumerate(last) for j in range(len(row))]
            best = min(heads, key=lambda head: last[head[0]][head[1]])
            tested = errors(model, words, seed=1)
            values[f"{name}, untrained"] = min(map(min, history[0][1]))
            values[name] = tested[best[0]][best[1]]
            for i, row in enumerate(tested):
                values[f"{name}, best of layer {i + 1}"] = min(row)
            if seed == setting.seeds[0]:
                for i, j in heads:
                    label = name if len(heads) == 1 else f"{name}, layer {i + 1}, head {j + 1}"
                    lines[label] = [(step, rates[i][j]) for step, rates in history]
        for key, value in values.items():
            numbers.setdefault(key, []).append(value)
        lines.setdefault("positions only", [(x, values["places"]) for x, _ in history])
    return Measured(numbers=numbers, lines=lines, across="steps", up="alignment error")


def judge(measured: Measured) -> Judged:
    guess = measured.mean("places")
    learned = [name for name in RATES if measured.most(name) <= guess / 2]
    blank = all(measured.least(f"{name}, untrained") > guess / 2 for name in RATES)
    why = f"from positions only, {guess:.2g} of the links are wrong; " + ", ".join(
        f"{measured.reported(name)} in the best head of the {name} "
        f"({measured.reported(f'{name}, untrained')} untrained)"
        for name in RATES
    )
    if blank and len(learned) == len(RATES):
        return Judged("holds", why)
    if blank and learned:
        return Judged("depends", f"holds only in the {learned[0]}: {why}")
    return Judged("fails", why)


CLAIM = Claim(
    sentence="Attention learns to align: without supervision it comes to attend to the source word "
    "that the next target word translates.",
    lectures="001",
    criterion="with every seed the alignment error of the head that is best on other sentences is "
    "at most half that of the best guess from positions only, in an LSTM and in a Transformer; "
    "untrained heads have a larger error",
    measure=measure,
    judge=judge,
)
