"""Experiments on translation: a small Transformer for the phrasebook's short sentences.

With short sentences, a model learns enough within seconds to be compared with another.
"""

from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.decode.beam import Hypothesis
from manyheads.evaluate.scores import translation_scores
from manyheads.lab.claims.claim import Setting
from manyheads.lab.claims.trial import Trial, trained
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.tasks.translation import corpus_nll

RECIPE = "phrasebook"
BATCH_TOKENS = 2000  # for evaluation
SMALL = (
    *("data.train_pairs=10000", "data.valid_pairs=200", "data.test_pairs=600"),
    *("tokens.vocab_size=2000", "model.max_length=14", "train.too_long=skip"),
    *("model.dim=96", "model.ffn_dim=192", "model.layers=1", "model.tie=none"),
    *("train.batch_tokens=300", "train.steps=600", "train.warmup_steps=60"),
    *("train.learning_rate=8e-3", "decode.bleu_sentences=0"),
)
LARGE = (
    *("model.max_length=64", "train.too_long=skip", "decode.bleu_sentences=0"),
    *("train.steps=2000", "train.learning_rate=3e-3"),
)


def words_of(setting: Setting) -> tuple[str, ...]:
    """The overrides of the recipe."""
    return LARGE if setting.large else SMALL


def translator(setting: Setting, seed: int, *changes: str) -> Trial:
    """A translator of the setting's size, trained with these overrides."""
    return trained(RECIPE, *words_of(setting), *changes, seed=seed, device=setting.device)


def read(trial: Trial, split: str) -> Corpus:
    """The pairs of a split that fit into the model's maximum length."""
    run = trial.opened.run
    assert run.data is not None  # a recipe has them
    corpus = run.data.read(split)
    assert isinstance(corpus, Corpus)
    assert corpus.aligned is not None  # the phrasebook knows its alignments
    fitting = EncodedPairs(corpus, trial.opened.tokenizer, run.model.max_length, "skip").rows
    pairs = [corpus.aligned[row] for row in fitting]
    return Corpus([pair.source for pair in pairs], [pair.target for pair in pairs], pairs)


def written(
    trial: Trial, corpus: Corpus, beam: int = 1, length_penalty: float = 0.6
) -> list[Hypothesis]:
    """The best hypothesis of each source."""
    search = trial.opened.translator(beam=beam, length_penalty=length_penalty).search
    return [hypotheses[0] for hypotheses in search(corpus.sources, n_best=1)]


def bleu(trial: Trial, corpus: Corpus, hypotheses: list[Hypothesis]) -> float:
    texts = trial.opened.tokenizer.decode_batch([hypothesis.tokens for hypothesis in hypotheses])
    score: float = translation_scores(texts, corpus.targets)["bleu"]
    return score


def greedy_bleu(trial: Trial) -> float:
    """BLEU of greedy translations of the test split."""
    corpus = read(trial, "test")
    return bleu(trial, corpus, written(trial, corpus))


def reference_loss(trial: Trial) -> float:
    """The mean −log P per token of the test split's references."""
    run, model = trial.opened.run, trial.opened.model
    assert isinstance(model, EncoderDecoder)
    data = EncodedPairs(read(trial, "test"), trial.opened.tokenizer, run.model.max_length)
    total, tokens = corpus_nll(model, data, BATCH_TOKENS)
    return total / tokens
