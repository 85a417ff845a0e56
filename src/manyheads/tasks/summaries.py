"""Summaries by an encoder–decoder: translation from long to short, judged by ROUGE.

A document that does not fit the model is read as far as it does: cut at a token in training, and
behind the last sentence that fits (else word) where a summary is written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from manyheads.data.summaries import SummaryData, as_lines
from manyheads.data.translation import Corpus, EncodedPairs, FilesData
from manyheads.decode.lines import pieces, read_lines
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.evaluate.rouge import rouge_is_here, rouge_scorer, rouge_scores
from manyheads.evaluate.scores import Scores, perplexity
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.tasks import translation
from manyheads.tasks.spec import LoadedModel
from manyheads.tasks.translation import TranslationTask, corpus_nll, gives_loss
from manyheads.train.metrics import Bar


class SummaryTask(TranslationTask):
    """Trained as translation is; validation also has ROUGE-L, where rouge-score is installed."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, EncoderDecoder)
        nll, tokens = corpus_nll(model, self.valid, self.train.batch_tokens)
        scores = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}
        rows = self.valid.kept[: self.decode.bleu_sentences]
        if rows and rouge_is_here():
            how = replace(self.decode, beam=1)
            greedy = Translator(model, self.tokenizer, how, self.graphs)
            written = summarize(greedy, [self.valid_corpus.sources[row] for row in rows])
            wanted = references(self.valid_corpus)
            found = rouge_scores(written, [wanted[row] for row in rows], ["rougeL"])
            scores["rougeL"] = found["rougeL"]
        return scores


def references(corpus: Corpus) -> list[list[str]]:
    """What each summary is scored by, with its line ends."""
    several = corpus.references or [[target] for target in corpus.targets]
    return [[as_lines(one) for one in texts] for texts in several]


def beginning(translator: BaseTranslator, document: str) -> str:
    """As much of a document as the model can read at once."""
    return pieces(translator, document)[0]


def beginnings(
    translator: BaseTranslator, stream: Iterable[bytes], warn: Callable[[str], None]
) -> Iterator[bytes]:
    """A stream of documents, one a line, each as far as it is read."""
    for number, line in enumerate(read_lines(stream), start=1):
        read = beginning(translator, line)
        if len(read) < len(line):
            warn(
                f"line {number} is longer than the model's {translator.max_length} tokens: its "
                f"first {len(read)} of {len(line)} characters are read"
            )
        yield read.encode("utf-8")


def summarize(
    translator: BaseTranslator,
    documents: Sequence[str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The best summary of each document, with its line ends."""
    read = [beginning(translator, document) for document in documents]
    found = translator.search(read, advance, n_best=1)
    best = translator.tokenizer.decode_batch([h[0].tokens if h else [] for h in found])
    return [as_lines(text) for text in best]


def evaluate(loaded: LoadedModel, data: SummaryData | FilesData, split_name: str) -> Scores:
    """ROUGE-1, -2, -L and -Lsum of a split, and how likely the model finds its summaries.

    The loss is left out where another program runs the model, or eight bits do.
    """
    rouge_scorer()  # what is missing is said now, not after the summaries are written
    translator, corpus = loaded.translator(), data.read(split_name)
    with Bar("evaluate", len(corpus.sources)) as bar:
        written = summarize(translator, corpus.sources, lambda done: bar.update(done, "documents"))
    scores = rouge_scores(written, references(corpus))
    if isinstance(translator, Translator) and gives_loss(translator):
        tokenizer, frame = translator.tokenizer, translator.special_tokens.frame
        encoded = EncodedPairs(corpus, tokenizer, translator.max_length, "truncate", frame)
        nll, tokens = corpus_nll(translator.model, encoded, translator.decode.read_at_once)
        scores |= {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}
        kind, size = translator.tokenizer.kind, translator.tokenizer.vocab_size
        scores["signature"] |= {
            "loss": f"log-perplexity, which tables of summarisation often call perplexity|nats per "
            f"token ({kind}, {size} tokens)|first reference|cut:{translator.max_length} tokens",
            "perplexity": "e^loss",
        }
    return scores | {"split": split_name, "examples": len(corpus.sources)}


SPEC = replace(
    translation.SPEC,
    task="summaries",
    data=(SummaryData, FilesData),
    recipe="summaries",
    is_default=False,
    served_as="",
    prepare=SummaryTask,
    evaluate=evaluate,
)
