"""Beam search: BLEU and log P as the beam grows, and the effect of the length penalty.

No lecture makes this claim: the paper uses beam search, and others found that wider beams do not
help.
"""

from statistics import fmean

from manyheads.data.translation import Corpus
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, in_parts
from manyheads.lab.claims.translators import bleu, read, translator, written
from manyheads.lab.claims.trial import Trial

BEAMS = (1, 2, 4, 16)
USUAL, WIDEST = 4, BEAMS[-1]
PENALTY = 0.6  # the paper's
MORE = 0.5  # BLEU points that count as a better translation


def searched(
    trial: Trial, corpus: Corpus, beam: int, penalty: float = 0.0
) -> tuple[float, float, float]:
    """BLEU, log P per sentence, and generated tokens per reference token."""
    hypotheses = written(trial, corpus, beam, penalty)
    reference_tokens = sum(map(len, trial.opened.tokenizer.encode_batch(corpus.targets)))
    likelihood = fmean(hypothesis.log_probability for hypothesis in hypotheses)
    return (
        bleu(trial, corpus, hypotheses),
        likelihood,
        sum(len(hypothesis.tokens) for hypothesis in hypotheses) / reference_tokens,
    )


def measure(setting: Setting) -> Measured:
    names = ("greedy", f"beam {USUAL}", f"beam {WIDEST}", "likelier", "length", "penalised length")
    numbers: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[int, list[float]] = {beam: [] for beam in BEAMS}
    for seed in setting.seeds:
        trial = translator(setting, seed)
        corpus = read(trial, "test")
        results = {beam: searched(trial, corpus, beam) for beam in BEAMS}
        penalised = searched(trial, corpus, WIDEST, PENALTY)
        scores = [results[beam][0] for beam in (1, USUAL, WIDEST)]
        likelier = results[WIDEST][1] - results[1][1]
        values = (*scores, likelier, results[WIDEST][2], penalised[2])
        for name, value in zip(names, values, strict=True):
            numbers[name].append(value)
        for beam in BEAMS:
            curves[beam].append(results[beam][0])
    lines = {"without a length penalty": [(beam, fmean(curves[beam])) for beam in BEAMS]}
    return Measured(numbers=numbers, lines=lines, across="beam", up="BLEU", logarithmic=("across",))


def judge(measured: Measured) -> Judged:
    def grows(before: str, after: str) -> bool:
        """True if it does with every seed."""
        pairs = zip(measured.numbers[before], measured.numbers[after], strict=True)
        return all(first < second for first, second in pairs)

    usual, widest = f"beam {USUAL}", f"beam {WIDEST}"
    more = measured.mean(widest) - measured.mean(usual)
    parts = {
        "a beam is better than none": grows("greedy", usual),
        "a wide beam finds likelier translations": measured.least("likelier") > 0,
        "a wide beam finds no better ones": more <= MORE,
        "the length penalty lengthens": grows("length", "penalised length"),
    }
    why = (
        f"BLEU {measured.reported('greedy')} greedy, {measured.reported(usual)} with {usual}, "
        f"{measured.reported(widest)} with {widest} ({more:+.2f}), whose translations are "
        f"{measured.reported('likelier')} nats likelier than the greedy ones, and "
        f"{measured.reported('length')} times as long as the references "
        f"({measured.reported('penalised length')} with the length penalty)"
    )
    return in_parts(parts, why, needed=["a beam is better than none"])


CLAIM = Claim(
    sentence="Beam search translates better than greedy search; a still wider beam finds likelier "
    "translations but not better ones, and a length penalty keeps them from becoming short.",
    lectures="none",
    criterion="with every seed BLEU of beam 4 is above that of greedy search, log P of beam 16 is "
    "above that of greedy search, and beam 16 generates more tokens with a penalty of 0.6 than "
    "without; on average BLEU of beam 16 is at most 0.5 above that of beam 4",
    measure=measure,
    judge=judge,
)
