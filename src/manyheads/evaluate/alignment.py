"""Alignment error rate of cross-attention, against gold word alignments.

Each target word is linked to the source word that it attends to most (weights are averaged over
the tokens of a target word, summed over those of a source word). With predicted links A and gold
links G, AER = 1 − 2 |A ∩ G| / (|A| + |G|).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from manyheads.data.alignment import word_spans, words_of_tokens
from manyheads.data.batching import Ragged, batches_by_length
from manyheads.data.translation import Batch, Corpus, EncodedPairs
from manyheads.decode.beam import Hypothesis
from manyheads.decode.translate import Annotation, Translator
from manyheads.models.capture import Maps, alignment_layer, capture
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.phrasebook import Pair
from manyheads.tokenizer.tokenizer import Tokenizer

WordMap = Float[Tensor, "layers heads target_words source_words"]


@dataclass(frozen=True)
class AlignmentError:
    """Alignment error rates [layers, heads] of cross-attention, and the best head."""

    rates: list[list[float]]

    @property
    def best(self) -> float:
        return min(map(min, self.rates))

    @property
    def best_head(self) -> tuple[int, int]:
        """(layer, head), counted from 0."""
        layer, head = np.unravel_index(np.argmin(self.rates), np.shape(self.rates))
        return int(layer), int(head)


@torch.no_grad()
def word_maps(
    model: EncoderDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair], batch_size: int = 64
) -> Iterator[tuple[Pair, WordMap]]:
    """Cross-attention of every layer and head between the words of each pair, teacher-forced."""
    model.eval()
    device = next(model.parameters()).device
    corpus = Corpus([pair.source for pair in pairs], [pair.target for pair in pairs])
    encoded = EncodedPairs(corpus, tokenizer, model.config.max_length, "skip")
    rows = np.arange(len(encoded.rows))
    for batch_rows in np.split(rows, range(batch_size, len(rows), batch_size)):
        batch = encoded.batch(batch_rows).to(device)
        with capture(model) as maps:
            model.decode(batch.target, model.encode(batch.source, batch.source_real))
        weights = torch.stack(maps["cross"]).float().cpu()
        for index, row in enumerate(batch_rows):
            pair = pairs[encoded.rows[row]]
            source = words_of_tokens(tokenizer.offsets(pair.source), pair.source_words)
            target = words_of_tokens(tokenizer.target.offsets(pair.target), pair.target_words)
            target = target / target.sum(1, keepdim=True).clamp(min=1)
            pair_weights = weights[:, index, :, : target.shape[1], : source.shape[1]]
            yield pair, einsum(target, pair_weights, source, "w t, l h t s, v s -> l h w v")


def alignment_error(
    model: EncoderDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair]
) -> AlignmentError:
    hits: list[Tensor] = []
    total = 0
    for pair, weights in word_maps(model, tokenizer, pairs):
        gold = torch.zeros(weights.shape[2:])
        for source, target in pair.alignment:
            gold[target, source] = 1.0
        predicted = weights.argmax(-1, keepdim=True)
        hits.append(gold.expand_as(weights).gather(-1, predicted).sum((-1, -2)))
        total += len(pair.target_words) + len(pair.alignment)
    return AlignmentError((1 - 2 * torch.stack(hits).sum(0) / total).tolist())


def teacher_forced(model: EncoderDecoder, batch: Batch) -> tuple[Maps, Float[Tensor, "b t"]]:
    """The attention maps of a pass over sources and targets, and log P of every label."""
    with capture(model) as maps:
        logits = model(batch.source, batch.target, batch.source_real)
    log_probs = logits.float().log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return maps, log_probs


@torch.no_grad()
def annotate(
    translator: Translator,
    sentences: Sequence[str],
    hypotheses: Sequence[Hypothesis],
    *,
    alignment: bool,
) -> list[Annotation]:
    """log P of each token of some translations, and optionally links between words.

    Links come from a teacher-forced pass: from the head that guided alignment trained, otherwise
    from the mean of the heads of its layer.
    """
    model, tokenizer = translator.model.eval(), translator.tokenizer
    special = translator.special_tokens
    sources = Ragged.of([special.source(ids) for ids in tokenizer.encode_batch(sentences)])
    targets = Ragged.of([[*hypothesis.tokens, special.end] for hypothesis in hypotheses])
    results: dict[int, Annotation] = {}
    budget = translator.decode.forward_tokens
    for rows in batches_by_length(np.maximum(sources.lengths, targets.lengths), budget):
        batch = Batch.of(sources, targets, rows, special.start, special.padding)
        batch = batch.to(translator.device)
        maps, log_probs = teacher_forced(model, batch)
        weights = log_probs
        if alignment:
            heads = slice(0, 1 if translator.is_guided else None)
            weights = alignment_layer(maps["cross"])[:, heads].float().mean(1).cpu()
        for index, row in enumerate(rows.tolist()):
            tokens, sentence = hypotheses[row].tokens, sentences[row]
            ends = [len(tokenizer.decode(tokens[:end])) for end in range(len(tokens) + 1)]
            text, links, of_words = tokenizer.decode(tokens), [], list[float]()
            words, target_words = word_spans(sentence), word_spans(text)
            if target_words:
                to_target = words_of_tokens(list(pairwise(ends)), target_words)
                of_words = (to_target @ log_probs[index, : len(tokens)].cpu()).tolist()
            if alignment and words and target_words:
                to_source = words_of_tokens(tokenizer.offsets(sentence), words)
                first = 0 if translator.decode.source_start is None else 1
                used = weights[index, : len(tokens), first : first + to_source.shape[1]]
                best = einsum(to_target, used, to_source, "w t, t s, v s -> w v").argmax(-1)
                links = [(source, target) for target, source in enumerate(best.tolist())]
            scores = log_probs[index, : len(tokens) + 1].tolist()
            sizes = len(words), len(target_words)
            results[row] = Annotation(links, scores, *sizes, of_words)
    return [results[row] for row in range(len(sentences))]
