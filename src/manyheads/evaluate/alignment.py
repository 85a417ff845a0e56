"""Does attention learn alignment? Cross-attention against gold word alignments.

Each target word is linked to the source word that it attends to most (the weights of a word's
tokens averaged over the target side, summed over the source side). With predicted links A and
gold links G, the alignment error rate is 1 − 2 |A ∩ G| / (|A| + |G|).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.models.capture import capture
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.phrasebook import Pair
from manyheads.tokenizer.tokenizer import Tokenizer

Spans = Sequence[tuple[int, int]]
WordMap = Float[Tensor, "layers heads target_words source_words"]


@dataclass(frozen=True)
class AlignmentError:
    """Alignment error rates [layers, heads] of cross-attention, and the head that is best."""

    rates: list[list[float]]

    @property
    def best(self) -> float:
        return min(min(row) for row in self.rates)

    @property
    def best_head(self) -> tuple[int, int]:
        """(layer, head), counted from 0."""
        places = [(i, j) for i, row in enumerate(self.rates) for j in range(len(row))]
        return min(places, key=lambda place: self.rates[place[0]][place[1]])


def words_of_tokens(tokens: Spans, words: Spans) -> Float[Tensor, "words tokens"]:
    """1 where a token belongs to a word: it overlaps it most; spaces belong to none."""
    belongs = torch.zeros(len(words), len(tokens))
    for column, (start, end) in enumerate(tokens):
        overlaps = [min(end, b) - max(start, a) for a, b in words]
        best = int(np.argmax(overlaps))
        if overlaps[best] > 0:
            belongs[best, column] = 1.0
    return belongs


def word_maps(
    model: EncoderDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair], batch_size: int = 64
) -> Iterator[tuple[Pair, WordMap]]:
    """Cross-attention of every layer and head between the words of each pair, teacher-forced."""
    model.eval()
    corpus = Corpus([p.source for p in pairs], [p.target for p in pairs])
    encoded = EncodedPairs(corpus, tokenizer, model.config.max_length, "skip")
    device = next(model.parameters()).device
    for start in range(0, len(encoded.kept), batch_size):
        rows = np.arange(start, min(start + batch_size, len(encoded.kept)))
        batch = encoded.batch(rows).to(device)
        with torch.no_grad(), capture(model) as maps:
            model.decode(batch.target, model.encode(batch.source, batch.source_real))
        weights = torch.stack(maps["cross"]).float().cpu()
        for place, row in enumerate(rows):
            pair = pairs[encoded.kept[row]]
            source = words_of_tokens(tokenizer.offsets(pair.source), pair.source_words)
            target = words_of_tokens(tokenizer.offsets(pair.target), pair.target_words)
            target = target / target.sum(1, keepdim=True).clamp(min=1)
            own = weights[:, place, :, : target.shape[1], : source.shape[1]]
            yield pair, einsum(target, own, source, "w t, l h t s, v s -> l h w v")


def alignment_error(
    model: EncoderDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair]
) -> AlignmentError:
    """The alignment error rate of each layer and head over the pairs."""
    hits: Tensor | None = None
    total = 0
    for pair, weights in word_maps(model, tokenizer, pairs):
        gold = torch.zeros(weights.shape[2:])
        for i, j in pair.alignment:
            gold[j, i] = 1.0
        chosen = weights.argmax(-1, keepdim=True)
        right = gold.expand_as(weights).gather(-1, chosen).sum((-1, -2))
        hits = right if hits is None else hits + right
        total += len(pair.target_words) + len(pair.alignment)
    assert hits is not None
    return AlignmentError((1 - 2 * hits / total).tolist())
