"""Beam search: what is found as a beam grows, and what the length penalty is for.

No deck says it: the paper searches so, and others found that wider beams do not help.
"""

from statistics import fmean

from manyheads.data.translation import Corpus
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, in_parts
from manyheads.lab.claims.translators import bleu, read, translator, written
from manyheads.lab.claims.trial import Trial

BEAMS = (1, 2, 4, 16)
USUAL, WIDEST = 4, BEAMS[-1]
PENALTY = 0.6  # the paper's
MORE = 0.5  # BLEU that would be a better translation


def searched(
    trial: Trial, corpus: Corpus, beam: int, penalty: float = 0.0
) -> tuple[float, float, float]:
    """BLEU, log P a sentence, and tokens written for each token of the references."""
    found = written(trial, corpus, beam, penalty)
    wanted = sum(map(len, trial.opened.tokenizer.encode_batch(corpus.targets)))
    likelihood = fmean(one.log_probability for one in found)
    return bleu(trial, corpus, found), likelihood, sum(len(one.tokens) for one in found) / wanted


def measure(setting: Setting) -> Measured:
    names = ("greedy", f"beam {USUAL}", f"beam {WIDEST}", "likelier", "length", "penalised length")
    numbers: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[int, list[float]] = {beam: [] for beam in BEAMS}
    for seed in setting.seeds:
        trial = translator(setting, seed)
        corpus = read(trial, "test")
        found = {beam: searched(trial, corpus, beam) for beam in BEAMS}
        penalised = searched(trial, corpus, WIDEST, PENALTY)
        scores = [found[beam][0] for beam in (1, USUAL, WIDEST)]
        likelier = found[WIDEST][1] - found[1][1]
        values = (*scores, likelier, found[WIDEST][2], penalised[2])
        for name, value in zip(names, values, strict=True):
            numbers[name].append(value)
        for beam in BEAMS:
            curves[beam].append(found[beam][0])
    lines = {"without a length penalty": [(beam, fmean(curves[beam])) for beam in BEAMS]}
    return Measured(numbers=numbers, lines=lines, across="beam", up="BLEU", logarithmic=("across",))


def judge(measured: Measured) -> Judged:
    def grows(before: str, after: str) -> bool:
        """With every seed."""
        pairs = zip(measured.numbers[before], measured.numbers[after], strict=True)
        return all(first < second for first, second in pairs)

    usual, widest = f"beam {USUAL}", f"beam {WIDEST}"
    more = measured.mean(widest) - measured.mean(usual)
    parts = {
        "a beam is better than none": grows("greedy", usual),
        "a wide one finds what is likelier": measured.least("likelier") > 0,
        "a wide one finds nothing better": more <= MORE,
        "the length penalty lengthens": grows("length", "penalised length"),
    }
    why = (
        f"BLEU {measured.told('greedy')} greedy, {measured.told(usual)} with {usual}, "
        f"{measured.told(widest)} with {widest} ({more:+.2f}), whose translations are "
        f"{measured.told('likelier')} nats likelier than the greedy ones, and "
        f"{measured.told('length')} times as long as the references "
        f"({measured.told('penalised length')} with the length penalty)"
    )
    return in_parts(parts, why, needed=["a beam is better than none"])


CLAIM = Claim(
    sentence="Beam search translates better than taking the likeliest token each time; a still "
    "wider beam finds likelier translations and not better ones, and a length penalty keeps them "
    "from growing short.",
    deck="none",
    criterion="with every seed BLEU of beam 4 above that of greedy, log P of beam 16 above that of "
    "greedy, and beam 16 longer with a penalty of 0.6 than with none; in the mean BLEU of beam 16 "
    "at most 0.5 above that of beam 4",
    measure=measure,
    judge=judge,
)
