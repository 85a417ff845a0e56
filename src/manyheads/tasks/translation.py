"""Translation: batches, loss and validation for the loop, and the scores of a finished run."""

import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from manyheads.data.batching import Batches, in_order_of_length, split
from manyheads.data.translation import (
    Batch,
    Corpus,
    EncodedPairs,
    FilesData,
    PhrasebookData,
    TranslationData,
)
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.cuda_graphs import GraphCache
from manyheads.decode.lines import translate_whole
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.errors import DataError, UserError
from manyheads.evaluate.alignment import AlignmentError, alignment_error
from manyheads.evaluate.scores import Scores, bleu_tokenizer, perplexity, translation_scores
from manyheads.models.capture import looks_across
from manyheads.models.decoder_only_seq2seq import EncoderDecoder, EncoderDecoderConfig
from manyheads.nn.embedding import LMHead
from manyheads.nn.shapes import Hidden
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec
from manyheads.tokenizer.bpe_dropout import Segmenter
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.loss import Loss, cross_entropy
from manyheads.train.progress import Bar
from manyheads.train.rdrop import rdrop_kl

COMPOSITIONAL = "compositional"
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][a-z0-9]{2,8})?")
MULTIPLE = 2  # lengths on a GPU: hardly more padding than any length, and seldom more shapes
ALIGNED_PAIRS = 300  # enough for two digits of the alignment error


def translation_loss(model: EncoderDecoder, batch: Batch, smoothing: float) -> Loss:
    """−log P of every target token, given its source and what stands before it."""
    return _prediction(model, _hidden(model, batch), batch, smoothing)


def translation_losses(
    model: EncoderDecoder, batch: Batch, smoothing: float, agreement: float
) -> dict[str, Loss]:
    """The same; with `agreement` of two readings, and how far apart they are."""
    if not agreement:
        return {"tokens": translation_loss(model, batch, smoothing)}
    two = batch.twice()
    hidden = _hidden(model, two)
    loss = _prediction(model, hidden, two, smoothing)
    apart = rdrop_kl(
        model.head.enter(hidden),
        model.head.matrix(model.target_table),
        batch.real,
        bias=model.head.bias,
        count=batch.target_tokens,
        weight=agreement / 2,
    )
    mean = Loss(loss.objective / 2, loss.nll / 2, batch.target_tokens)
    return {"tokens": mean, "agreement": apart}


def _hidden(model: EncoderDecoder, batch: Batch) -> Hidden:
    """Teacher forcing: every position predicts its next token at once.

    Padding of the target stands behind everything real, where no causal query looks: no mask
    is needed, but for the loss.
    """
    return model.decode(batch.target, model.encode(batch.source, batch.source_real))


def _prediction(model: EncoderDecoder, hidden: Hidden, batch: Batch, smoothing: float) -> Loss:
    return cross_entropy(
        model.head.enter(hidden),
        model.head.matrix(model.target_table),
        batch.wanted,
        bias=model.head.bias,
        smoothing=smoothing,
        loss_mask=batch.real,
        count=batch.target_tokens,
    )


def corpus_nll(model: EncoderDecoder, data: EncodedPairs, batch_tokens: int) -> tuple[float, int]:
    """Summed −log P of all targets, and their tokens."""
    model.eval()
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    with torch.no_grad():
        for rows in in_order_of_length(data.lengths, batch_tokens):
            loss = translation_loss(model, data.batch(rows).to(device), 0.0)
            total, tokens = total + float(loss.nll), tokens + loss.count
    return total, tokens


class TranslationTask:
    """What the training loop asks of translation."""

    def __init__(
        self,
        run: RunSettings,
        part: Corpus,
        valid: Corpus,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        train, max_length = run.train, run.model.max_length
        self.train, self.tokenizer, self.device = train, tokenizer, device
        self.decode, self.valid_corpus = run.decode, valid
        self.graphs = GraphCache()  # one for all validations
        frame = SpecialTokens(tokenizer, run.decode).frame
        self.data = EncodedPairs(part, tokenizer, max_length, train.too_long, frame)
        self.valid = EncodedPairs(valid, tokenizer, max_length, train.too_long, frame)
        copies = train.bpe_dropout_copies
        if copies > 1:
            cut = Segmenter(tokenizer, train.bpe_dropout, run.seed)
            self.data.cut_anew(part, cut, copies - 1, max_length)
        self.digest = self.data.digest()
        notes = [*part.notes, *valid.notes, *self.data.notes, *self.valid.notes]
        self.notes = list(dict.fromkeys(notes))  # a held-out share comes from the same files
        self.order = Batches(self.data.lengths, train.batch_tokens * train.accumulate, run.seed)
        self.per_epoch = -(-self.order.per_epoch // copies)  # of the pairs, however they are cut

    def batches(self, step: int) -> list[Batch]:
        parts = [
            self.data.batch(rows) for rows in split(self.order.rows(step), self.train.accumulate)
        ]
        if self.device.type == "cuda":  # where a pass is recorded for each shape
            most = -(-self.order.most(step) // self.train.accumulate)
            parts = [part.padded(most, MULTIPLE) for part in parts]
        return [part.to(self.device) for part in parts]

    def tokens(self, batch: Batch) -> int:
        return batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        terms = ("tokens", "agreement") if self.train.rdrop_alpha else ("tokens",)
        return dict.fromkeys(terms, batch.target_tokens)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Loss]:
        assert isinstance(model, EncoderDecoder)
        return translation_losses(model, batch, self.train.label_smoothing, self.train.rdrop_alpha)

    def describe(self, step: int) -> str:
        pairs = [self.data.numbers[row] for row in self.order.rows(step)]
        rest = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        return f"training pairs {', '.join(map(str, pairs[:5]))}{rest}"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, EncoderDecoder)
        nll, tokens = corpus_nll(model, self.valid, self.train.batch_tokens)
        scores = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}
        shown = self.decode.bleu_sentences
        if shown:
            how = replace(self.decode, beam=1)
            greedy = Translator(model, self.tokenizer, how, self.graphs)
            rows = self.valid.kept[:shown]
            written = translate_whole(greedy, [self.valid_corpus.sources[row] for row in rows])
            wanted = [self.valid_corpus.targets[row] for row in rows]
            found = translation_scores(written, wanted)
            scores["bleu"] = found["bleu"]
        return scores


@dataclass(frozen=True)
class Evaluation:
    """The scores of a split, its translations, and where gold alignments are, their errors."""

    scores: Scores
    corpus: Corpus
    translations: list[str]
    alignment: AlignmentError | None


def gives_loss(translator: BaseTranslator) -> bool:
    """Whether it computes with an output layer as losses need it: no other program, no int8."""
    return isinstance(translator, Translator) and isinstance(translator.model.head, LMHead)


def _likelihood(translator: Translator, corpus: Corpus) -> Scores:
    """How likely the model finds the targets that it can read whole; nothing where it can none."""
    tokenizer, frame = translator.tokenizer, translator.special_tokens.frame
    try:
        encoded = EncodedPairs(corpus, tokenizer, translator.max_length, "skip", frame)
    except DataError:
        return {}
    nll, tokens = corpus_nll(translator.model, encoded, translator.decode.read_at_once)
    return {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}


def language_pair(data: Any) -> tuple[str, str]:
    """The codes of source and target language that data names; "" where it names none."""
    if isinstance(data, PhrasebookData):
        source, _, target = data.pair.partition("-")
        return source, target
    if isinstance(data, FilesData):
        return _language_of(data.source), _language_of(data.target)
    return "", ""


def _language_of(file: str) -> str:
    """The language in `en`, `train.en` or `train.en.gz`."""
    ending = PurePath(file.removesuffix(".gz")).name.rpartition(".")[2].lower()
    return ending if LANGUAGE.fullmatch(ending) else ""


def evaluate_translation(
    translator: BaseTranslator, data: TranslationData, split_name: str, tokenize: str = "auto"
) -> Evaluation:
    """BLEU, chrF, exact match and perplexity of a split, each as it was computed.

    With gold alignments also the alignment error of every head; the phrasebook's test also has
    its BLEU on word combinations that training never held. What needs the model's probabilities
    is left out where another program runs it or eight bits do; what needs its heads where another
    program does, where it frames texts in its own way, and where it has no cross-attention.
    """
    if tokenize == "auto":
        tokenize = bleu_tokenizer(re.split("[-_]", language_pair(data)[1])[0])
    corpus = data.read(split_name)
    with Bar("evaluate", len(corpus.sources)) as bar:
        written = translate_whole(
            translator, corpus.sources, lambda done: bar.update(done, "sentences")
        )
    scores = translation_scores(written, corpus.targets, tokenize)
    own = False
    if isinstance(translator, Translator):
        own = translator.special_tokens.own and looks_across(translator.model)
        if gives_loss(translator):
            scores |= _likelihood(translator, corpus)
    scores |= {"split": split_name, "examples": len(corpus.sources)}
    if corpus.name:
        scores["files"] = corpus.name
    if split_name == "test" and COMPOSITIONAL in data.splits():
        other = data.read(COMPOSITIONAL)
        translations = translate_whole(translator, other.sources)
        unseen = translation_scores(translations, other.targets, tokenize)
        scores["compositional_bleu"] = unseen["bleu"]
    error = None
    if corpus.aligned is not None and isinstance(translator, Translator) and own:
        some = corpus.aligned[:ALIGNED_PAIRS]
        error = alignment_error(translator.model, translator.tokenizer, some)
        scores["alignment_error"] = error.best
        scores["alignment_error_by_head"] = error.rates
    return Evaluation(scores, corpus, written, error)


def has_dropout(model: Any) -> bool:
    """True if two forward passes over the same text differ; each side may set its own dropout."""
    sides = [getattr(model, side, None) for side in ("encoder", "decoder")]
    of_sides = [getattr(side, "dropout", None) for side in sides]
    dropouts = [model.dropout if dropout is None else dropout for dropout in of_sides]
    return any([*dropouts, getattr(model, "attention_dropout", 0.0)])


def check(run: RunSettings) -> None:
    """R-Drop compares two forward passes; BPE-dropout needs merges."""
    if run.train.bpe_dropout_copies > 1 and run.tokens is not None and run.tokens.kind != "bpe":
        raise UserError("train.bpe_dropout_copies works only with tokens=bpe: leave it out")
    if run.train.rdrop_alpha and not has_dropout(run.model):
        raise UserError("train.rdrop_alpha needs dropout: set model.dropout")


def check_frame(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """Refuse a tokenizer without the tokens that texts begin and end with."""
    _ = SpecialTokens(tokenizer, run.decode).frame
    return tokenizer


def evaluate(
    loaded: LoadedModel, data: TranslationData, split_name: str, tokenize: str = "auto"
) -> Scores:
    return evaluate_translation(loaded.translator(), data, split_name, tokenize).scores


SPEC = TaskSpec(
    task="translation",
    models=EncoderDecoderConfig.__args__,
    data=(FilesData, PhrasebookData),
    train_settings=("rdrop_alpha", "bpe_dropout_copies"),
    recipe="translation",
    is_default=True,
    check=check,
    strings=lambda corpus: [*corpus.sources, *corpus.targets],
    fit_tokenizer=check_frame,
    prepare=TranslationTask,
    evaluate=evaluate,
    offers=("translate", "encode"),
    served_as="translations",
)
