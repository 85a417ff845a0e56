"""Translation: loss, training and validation, and the scores of a trained model.

L = −Σ_t log P(y_t | y_1, …, y_{t−1}, x)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.data.batching import batches_by_length, split
from manyheads.data.translation import (
    Batch,
    Corpus,
    EncodedPairs,
    FilesData,
    PhrasebookData,
    TranslationData,
)
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.decoder import GraphCache
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.errors import DataError, UserError
from manyheads.evaluate.alignment import AlignmentError, alignment_error
from manyheads.evaluate.scores import (
    Scores,
    add_plugin_metrics,
    bleu_tokenizer,
    loss_scores,
    missing_spaces,
    paired_scores,
    translation_scores,
)
from manyheads.models.capture import alignment_weights, has_cross_attention
from manyheads.models.decoder_only_seq2seq import EncoderDecoder, EncoderDecoderConfig
from manyheads.nn.shapes import Hidden
from manyheads.tasks.probes import translation_probe
from manyheads.tasks.spec import EXAMPLE, BaseTask, LoadedModel, RunSettings, TaskSpec, total_nll
from manyheads.tokenizer.bpe_dropout import BpeDropout
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.consistency import consistency, cut_off
from manyheads.train.metrics import Bar
from manyheads.train.optimizer import TooLong, Train
from manyheads.train.step import Loss, cross_entropy

COMPOSITIONAL = "compositional"
VERB_FINAL = "The student thinks that your father will hide the picture."
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][a-z0-9]{2,8})?")
NOT_LANGUAGES = ("txt", "raw", "tok", "ref", "src", "tgt", "out")
MULTIPLE = 2  # of lengths on a GPU: few shapes to capture as CUDA graphs, and little padding
# Two passes, other subwords, and blocks that are compiled or computed twice.
EXCLUDED_BY_GUIDED = (
    *("rdrop_alpha", "simcut_alpha", "bpe_dropout_copies"),
    *("compile", "activation_checkpointing"),
)
ALIGNED_PAIRS = 300  # enough for two digits of the alignment error


def translation_loss(model: EncoderDecoder, batch: Batch, smoothing: float) -> Loss:
    """−log P of every target token, given the source and the target tokens before it."""
    return _cross_entropy(model, _decode(model, batch), batch, smoothing)


def translation_losses(model: EncoderDecoder, batch: Batch, train: Train) -> dict[str, Loss]:
    """The loss terms: with R-Drop or SimCut also the divergence of two passes."""
    if train.guided_alignment:
        with alignment_weights(model) as recorded:
            tokens = translation_loss(model, batch, train.label_smoothing)
        return {"tokens": tokens, "alignment": alignment_loss(recorded[0][:, 0], batch, train)}
    if not (train.rdrop_alpha or train.simcut_alpha):
        return {"tokens": translation_loss(model, batch, train.label_smoothing)}
    doubled, count = batch.twice(), batch.target_tokens
    if train.rdrop_alpha:
        hidden = _decode(model, doubled)
        loss = _cross_entropy(model, hidden, doubled, train.label_smoothing)
        loss = Loss(loss.objective / 2, loss.nll / 2, count)
    else:
        with cut_off({model.tokens, model.target_table}, train.simcut_p):
            hidden = _decode(model, doubled)
        loss = _cross_entropy(model, hidden.chunk(2)[0], batch, train.label_smoothing)
    divergence = consistency(
        model.head.enter(hidden),
        model.head.matrix(model.target_table),
        batch.loss_mask,
        bias=model.head.bias,
        count=count,
        weight=train.rdrop_alpha / 2 or train.simcut_alpha,
        symmetric=bool(train.rdrop_alpha),
    )
    return {"tokens": loss, "agreement": divergence}


def alignment_loss(weights: Float[Tensor, "b t s"], batch: Batch, train: Train) -> Loss:
    """Guided alignment (Garg et al. 2019): −Σ_t Σ_s g_ts log a_ts, the rows of g sum to 1 or 0."""
    assert batch.links is not None
    gold = batch.links / batch.links.sum(-1, keepdim=True).clamp(min=1)
    loss = -(gold * weights.float().clamp(min=1e-9).log()).sum()
    return Loss(loss, loss.detach(), batch.target_tokens, train.guided_alignment)


def _decode(model: EncoderDecoder, batch: Batch) -> Hidden:
    """Teacher forcing: every position predicts its next token in one pass.

    Target padding needs no attention mask: it follows all real tokens, and attention is causal.
    """
    return model.decode(batch.target, model.encode(batch.source, batch.source_real))


def _cross_entropy(model: EncoderDecoder, hidden: Hidden, batch: Batch, smoothing: float) -> Loss:
    return cross_entropy(
        model.head.enter(hidden),
        model.head.matrix(model.target_table),
        batch.labels,
        bias=model.head.bias,
        smoothing=smoothing,
        loss_mask=batch.loss_mask,
        count=batch.target_tokens,
    )


def corpus_nll(model: EncoderDecoder, data: EncodedPairs, batch_tokens: int) -> tuple[float, int]:
    """Σ −log P of all targets, and their number of tokens."""
    device = next(model.parameters()).device
    batches = (
        data.batch(rows).to(device) for rows in batches_by_length(data.lengths, batch_tokens)
    )
    return total_nll(model, (translation_loss(model, batch, 0.0) for batch in batches))


class TranslationTask(BaseTask[Batch]):
    """Translation for the trainer; validation also has BLEU of greedy translations."""

    examples = "training pairs"

    def load(self, part: Corpus, valid: Corpus) -> None:
        train, max_length = self.train, self.run.model.max_length
        self.valid_corpus = valid
        self.graphs = GraphCache()  # one for all validations
        frame = SpecialTokens(self.tokenizer, self.run.decode).frame
        self.data, self.valid = (
            corpus.encoded(self.tokenizer, max_length, train.too_long, frame)
            for corpus in (part, valid)
        )
        copies = train.bpe_dropout_copies
        if copies > 1:
            segmenters = [
                BpeDropout(tokenizer, train.bpe_dropout, self.run.seed)
                for tokenizer in (self.tokenizer, self.tokenizer.target)
            ]
            self.data.add_bpe_dropout(part, segmenters, copies - 1, max_length)
        if train.guided_alignment:
            if getattr(part, "aligned", None) is None:  # prepared data has none either
                raise UserError(
                    "train.guided_alignment needs word links of two files: set data.alignment "
                    "next to data.source and data.target"
                )
            self.data.add_links(part, self.tokenizer)
        self.digest = self.data.digest()
        self.notes += [*self.data.notes, *self.valid.notes]
        self.order = self.data.order(train.batch_tokens * train.accumulate, self.run.seed)
        self.per_epoch = -(-self.order.per_epoch // copies)  # copies do not make an epoch longer

    def batches(self, step: int) -> list[Batch]:
        accumulate = self.train.accumulate
        batches = [self.data.batch(rows) for rows in split(self.rows(step), accumulate)]
        if self.device.type == "cuda":  # few shapes: each is captured as a CUDA graph
            largest = -(-self.order.most(step) // accumulate)
            batches = [batch.padded(largest, MULTIPLE) for batch in batches]
        return [batch.to(self.device) for batch in batches]

    def tokens(self, batch: Batch) -> int:
        return batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        train = self.train
        terms = ["tokens", *["agreement"] * bool(train.rdrop_alpha or train.simcut_alpha)]
        terms += ["alignment"] * bool(train.guided_alignment)
        return dict.fromkeys(terms, batch.target_tokens)

    def losses(self, model: Any, batch: Batch) -> dict[str, Loss]:
        return translation_losses(model, batch, self.train)

    def number(self, row: int) -> int:
        return self.data.numbers[row]

    def validate(self, model: Any) -> dict[str, float]:
        scores = loss_scores(*corpus_nll(model, self.valid, self.train.batch_tokens))
        rows = self.valid.rows[: self.run.decode.bleu_sentences]
        if rows:
            decode = replace(self.run.decode, beam=1)
            scores |= self.text_scores(Translator(model, self.tokenizer, decode, self.graphs), rows)
        return scores

    def text_scores(self, translator: BaseTranslator, rows: list[int]) -> dict[str, float]:
        """Scores of the model's translations of some validation pairs."""
        translations = translator.translate_long([self.valid_corpus.sources[row] for row in rows])
        targets = [self.valid_corpus.targets[row] for row in rows]
        tokenize = tokenizer_for(targets, self.run.data)
        return {"bleu": translation_scores(translations, targets, tokenize)["bleu"]}


@dataclass(frozen=True)
class Evaluation:
    """The scores of a split, its translations, and alignment errors if it has gold alignments."""

    scores: Scores
    corpus: Corpus
    translations: list[str]
    alignment: AlignmentError | None


def target_likelihood(translator: BaseTranslator, corpus: Corpus, too_long: TooLong) -> Scores:
    """Loss and perplexity of the targets.

    Empty if no PyTorch model computes them (exports, int8, ensembles), or if every pair is longer
    than the model.
    """
    scorer = translator.in_torch()
    if scorer is None:
        return {}
    tokenizer, frame = scorer.tokenizer, scorer.special_tokens.frame
    try:
        pairs = EncodedPairs(corpus, tokenizer, scorer.max_length, too_long, frame)
    except DataError:
        return {}
    return dict(loss_scores(*corpus_nll(scorer.model, pairs, scorer.decode.forward_tokens)))


def language_pair(data: Any) -> tuple[str, str]:
    """The codes of source and target language that data names; "" if it names none."""
    if isinstance(data, PhrasebookData):
        source, _, target = data.pair.partition("-")
        return source, target
    if isinstance(data, FilesData):
        source, target = map(_language_of, data.languages)
        return source, target
    return "", ""


def _language_of(ending: str) -> str:
    """A code such as `en` or `zh_cn`, but not the ending of any text file."""
    code = ending.lower()
    return code if LANGUAGE.fullmatch(code) and code not in NOT_LANGUAGES else ""


def tokenizer_for(references: Sequence[str], *data: Any) -> str:
    """BLEU's tokenizer for the first target language that data names, or for the references."""
    languages = [language_pair(part)[1] for part in data]
    language = re.split("[-_]", next(filter(None, languages), ""))[0]
    return bleu_tokenizer(language, references)


def evaluate_translation(
    translator: BaseTranslator,
    data: TranslationData,
    split_name: str,
    tokenize: str = "auto",
    metrics: Sequence[str] = ("bleu", "chrf"),
    *,
    confidence: bool = False,
    against: BaseTranslator | None = None,
    trained_on: TranslationData | None = None,
) -> Evaluation:
    """BLEU, chrF, exact match and, if the model gives them, loss and perplexity of a split.

    BLEU's tokenizer follows from the target language, which `data` or `trained_on` names, unless
    `tokenize` names one. `against` is a baseline for a paired test.
    A test set of the phrasebook adds the BLEU of its compositional split. Gold alignments add the
    alignment error of every head, for PyTorch models with cross-attention and our special tokens.
    """
    corpus = data.read(split_name)
    if tokenize == "auto":
        tokenize = tokenizer_for(corpus.targets, data, trained_on)
    references = corpus.references or [[target] for target in corpus.targets]
    with Bar("evaluate", len(corpus.sources)) as bar:
        translations = translator.translate_long(
            corpus.sources, lambda done: bar.update(done, "sentences")
        )
    scores = translation_scores(translations, references, tokenize, metrics, confidence=confidence)
    if note := missing_spaces(metrics, tokenize, corpus.targets):
        scores["note"] = note
    if against is not None:
        baseline = against.translate_long(corpus.sources)
        scores["paired"] = paired_scores(baseline, translations, references, tokenize, metrics)
    scores |= target_likelihood(translator, corpus, "skip")
    scores |= {"split": split_name, "examples": len(corpus.sources)}
    if corpus.name:
        scores["files"] = corpus.name
    if split_name == "test" and COMPOSITIONAL in data.splits():
        unseen = data.read(COMPOSITIONAL)
        translated = translator.translate_long(unseen.sources)
        unseen_scores = translation_scores(translated, unseen.targets, tokenize)
        scores["compositional_bleu"] = unseen_scores["bleu"]
    error, scorer, aligned = None, translator.in_torch(), (corpus.aligned or [])[:ALIGNED_PAIRS]
    is_ours = scorer is not None and scorer.special_tokens.are_default
    if aligned and scorer is not None and is_ours and has_cross_attention(scorer.model):
        error = alignment_error(scorer.model, scorer.tokenizer, aligned)
        scores["alignment_error"] = error.best
        scores["alignment_error_by_head"] = error.rates
    return Evaluation(scores, corpus, translations, error)


def evaluate(
    loaded: LoadedModel,
    data: TranslationData,
    split_name: str,
    *,
    bleu_tokenize: str = "auto",
    metric: Sequence[str] = ("bleu", "chrf"),
    confidence: bool = False,
    against: LoadedModel | None = None,
) -> Scores:
    result = evaluate_translation(
        loaded.translator(),
        data,
        split_name,
        bleu_tokenize,
        metric,
        confidence=confidence,
        against=None if against is None else against.translator(),
        trained_on=loaded.run.data,
    )
    references = result.corpus.references or [[target] for target in result.corpus.targets]
    return add_plugin_metrics(result.scores, "translation", result.translations, references)


def has_dropout(model: Any) -> bool:
    """True if two forward passes over the same text differ; encoder and decoder may override."""
    stacks = [getattr(model, stack, None) for stack in ("encoder", "decoder")]
    overrides = [getattr(stack, "dropout", None) for stack in stacks]
    dropouts = [model.dropout if dropout is None else dropout for dropout in overrides]
    return any([*dropouts, getattr(model, "attention_dropout", 0.0)])


def check(run: RunSettings) -> None:
    """R-Drop compares two forward passes; BPE-dropout needs merges; links are of words."""
    if run.train.bpe_dropout_copies > 1 and run.tokens is not None and run.tokens.kind != "bpe":
        raise UserError("train.bpe_dropout_copies works only with tokens=bpe: leave it out")
    if run.target_tokens is not None and getattr(run.model, "tie", "") != "target":
        # An untied output would work too, but has a third matrix for no purpose.
        raise UserError(
            "target_tokens needs model=seq2seq with model.tie=target: source and target then have "
            "a matrix each"
        )
    for name in EXCLUDED_BY_GUIDED if run.train.guided_alignment else ():
        if getattr(run.train, name) not in (getattr(Train, name), "no"):
            raise UserError(f"train.{name} and train.guided_alignment exclude each other: set one")
    if run.train.rdrop_alpha and not has_dropout(run.model):
        raise UserError("train.rdrop_alpha needs dropout: set model.dropout")


def check_frame(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """Refuse a tokenizer without the tokens that texts begin and end with."""
    _ = SpecialTokens(tokenizer, run.decode).frame
    return tokenizer


SPEC = TaskSpec(
    task="translation",
    models=EncoderDecoderConfig.__args__,
    data=(FilesData, PhrasebookData),
    train_settings=("rdrop_alpha", "simcut_alpha", "guided_alignment", "bpe_dropout_copies"),
    recipe="translation",
    is_default=True,
    check=check,
    strings=lambda corpus: [*corpus.sources, *corpus.targets],
    fit_tokenizer=check_frame,
    prepare=TranslationTask,
    probe=translation_probe,
    evaluate=evaluate,
    scoring=("beam", "int8", "bleu_tokenize", "metric", "confidence", "against"),
    offers=("translate", "encode"),
    served_as="translations",
    example=lambda run: VERB_FINAL if isinstance(run.data, PhrasebookData) else EXAMPLE,
)
