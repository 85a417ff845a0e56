"""Cross-attention against gold alignments: words of tokens, word maps, the error rate."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manyheads.decode.beam import Decode, Hypothesis
from manyheads.decode.translate import Translator
from manyheads.evaluate.alignment import (
    AlignmentError,
    alignment_error,
    annotate,
    word_maps,
    word_spans,
    words_of_tokens,
)
from manyheads.models.capture import capture
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.nn.attention import Dense
from manyheads.nn.block import Block
from manyheads.nn.scores import Score
from manyheads.phrasebook import Pair, sentences
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe

LAYERS, HEADS = 2, 2
Links = set[tuple[int, int]]


def spans(text: str, words: Iterable[str]) -> list[tuple[int, int]]:
    """The (start, end) of words that follow each other in the text."""
    result, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        result.append((start, end))
    return result


def pair(source: str, target: str, links: Links) -> Pair:
    """A pair of texts, with `|` between words."""
    sides = []
    for side in (source, target):
        text = side.replace("|", "")
        sides.append((text, tuple(spans(text, [word.strip() for word in side.split("|")]))))
    (left, left_words), (right, right_words) = sides
    return Pair(left, right, left_words, right_words, frozenset(links))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pairs = sentences("en-de", "train", 60)
    return Bpe(vocab_size=330).train([text for p in pairs for text in (p.source, p.target)])


def build(tokenizer: Tokenizer, max_length: int = 128) -> Seq2Seq:
    sizes = {"dim": 16, "layers": LAYERS, "heads": HEADS, "max_length": max_length}
    return Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **sizes).build().eval()


class FixedScore(Score):
    """Attention logits that do not depend on queries and keys."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        logits = torch.full((*q.shape[:3], k.shape[2]), -30.0)
        logits[:, :, : self.logits.shape[2], : self.logits.shape[3]] = self.logits
        return logits


def tokens_of(tokenizer: Tokenizer, text: str, word: tuple[int, int]) -> list[int]:
    """Positions of the tokens that overlap a word."""
    offsets = tokenizer.offsets(text)
    return [t for t, (start, end) in enumerate(offsets) if start < word[1] and end > word[0]]


def attend_to(model: Seq2Seq, tokenizer: Tokenizer, pairs: list[Pair], links: list[Links]) -> None:
    """Let every head attend from each target word to the source words that are linked to it."""
    sizes = [(len(tokenizer.encode(p.target)), len(tokenizer.encode(p.source))) for p in pairs]
    logits = torch.full((len(pairs), HEADS, *map(max, zip(*sizes, strict=True))), -30.0)
    for row, (p, pair_links) in enumerate(zip(pairs, links, strict=True)):
        for i, j in pair_links:
            for t in tokens_of(tokenizer, p.target, p.target_words[j]):
                logits[row, :, t, tokens_of(tokenizer, p.source, p.source_words[i])] = 30.0
    for block in model.decoder.blocks:
        assert isinstance(block, Block)
        block.cross.core = Dense()  # accepts any score
        block.cross.score = FixedScore(logits)


@pytest.mark.parametrize(
    ("text", "words", "tokens", "owners"),
    [
        ("the dogs bark", "the dogs bark", "the| dog|s| ba|rk", [0, 1, 1, 2, 2]),
        ("Yes, dogs.", "Yes , dogs .", "Yes|,| dogs|.", [0, 1, 2, 3]),
        # A token of two words belongs to the one that it overlaps more, the first of equals.
        ("l'arbre", "l' arbre", "l'arb|re", [1, 1]),
        ("l'arbre", "l' arbre", "l'ar|bre", [0, 1]),
        # A space belongs to no word; a word may have no token.
        ("a  b", "a b", "a| | b", [0, None, 1]),
        ("ab", "a b", "ab", [0]),
    ],
)
def test_tokens_belong_to_words(
    text: str, words: str, tokens: str, owners: list[int | None]
) -> None:
    matrix = words_of_tokens(spans(text, tokens.split("|")), spans(text, words.split()))
    assert matrix.sum().item() == sum(owner is not None for owner in owners)
    for column, owner in enumerate(owners):
        assert owner is None or matrix[owner, column] == 1


def test_word_maps_are_means_over_target_tokens_of_sums_over_source_tokens(
    tokenizer: Tokenizer,
) -> None:
    """Row w holds the attention at the steps that predict the tokens of w."""
    model, pairs = build(tokenizer), sentences("en-de", "train", 7)
    maps = list(word_maps(model, tokenizer, pairs, batch_size=3))
    assert [p for p, _ in maps] == pairs
    for (_, weights), (_, together) in zip(maps, word_maps(model, tokenizer, pairs), strict=True):
        torch.testing.assert_close(weights, together)  # the batch does not matter
    for p, weights in maps[:3]:
        source = torch.tensor([[*tokenizer.encode(p.source), tokenizer.end]])
        target = torch.tensor([[tokenizer.start, *tokenizer.encode(p.target)]])
        with torch.no_grad(), capture(model) as captured:
            model(source, target)
        attention = torch.stack(captured["cross"])[:, 0]
        assert weights.shape == (LAYERS, HEADS, len(p.target_words), len(p.source_words))
        for row, target_word in enumerate(p.target_words):
            steps = attention[:, :, tokens_of(tokenizer, p.target, target_word)]
            for column, source_word in enumerate(p.source_words):
                keys = tokens_of(tokenizer, p.source, source_word)
                expected = steps[..., keys].sum(-1).mean(-1)
                torch.testing.assert_close(weights[:, :, row, column], expected)


def test_a_word_without_a_token_has_no_attention(tokenizer: Tokenizer) -> None:
    """One token covers both target words and belongs to the first."""
    assert len(tokenizer.encode("en")) == 1
    [(_, weights)] = word_maps(build(tokenizer), tokenizer, [pair("a |dog", "e|n", set())])
    assert (weights[:, :, 0] > 0).all()
    assert (weights[:, :, 1] == 0).all()


@pytest.mark.parametrize("languages", ["en-de", "en-fr"])
def test_gold_attention_finds_a_link_of_every_linked_word(
    tokenizer: Tokenizer, languages: str
) -> None:
    """With words of no or of several links: 1 − 2 · linked words / (words + links)."""
    model, pairs = build(tokenizer), sentences(languages, "train", 30)
    attend_to(model, tokenizer, pairs, [set(p.alignment) for p in pairs])
    linked = sum(len({j for _, j in p.alignment}) for p in pairs)
    total = sum(len(p.target_words) + len(p.alignment) for p in pairs)
    rates = torch.tensor(alignment_error(model, tokenizer, pairs).rates)
    torch.testing.assert_close(rates, torch.full((LAYERS, HEADS), 1 - 2 * linked / total))


@pytest.mark.parametrize(
    ("links", "hits"),
    [
        ([{(0, 0), (1, 1), (2, 2)}, {(0, 0), (1, 1), (1, 2)}], 6),
        ([{(0, 0), (2, 1), (1, 2)}, {(1, 0), (0, 1), (1, 2)}], 3),
        ([{(2, 0), (0, 1), (1, 2)}, {(1, 0), (0, 1), (0, 2)}], 1),
    ],
)
def test_the_error_rate_is_the_formula(tokenizer: Tokenizer, links: list[Links], hits: int) -> None:
    """1 − 2 |A ∩ G| / (|A| + |G|) with |A| = 6 target words and |G| = 3 + 4 gold links."""
    pairs = [
        pair("a |dog |barks", "ein |Hund |bellt", {(0, 0), (1, 1), (2, 2)}),
        pair("I |sleep", "moi |je |dors", {(0, 0), (0, 1), (1, 1), (1, 2)}),
    ]
    model = build(tokenizer)
    attend_to(model, tokenizer, pairs, links)
    rates = torch.tensor(alignment_error(model, tokenizer, pairs).rates)
    torch.testing.assert_close(rates, torch.full((LAYERS, HEADS), 1 - 2 * hits / (6 + 7)))


def test_the_best_head_has_the_lowest_rate() -> None:
    """(layer, head) counted from 0, the first of equals."""
    error = AlignmentError([[0.9, 0.4, 0.8], [0.7, 0.3, 0.3]])
    assert (error.best, error.best_head) == (0.3, (1, 1))


def test_pairs_longer_than_the_model_are_left_out(tokenizer: Tokenizer) -> None:
    pairs = sentences("en-de", "train", 12)
    lengths = [max(len(tokenizer.encode(text)) for text in (p.source, p.target)) for p in pairs]
    model = build(tokenizer, max_length=max(lengths))  # without room for the end token
    shorter = [p for p, length in zip(pairs, lengths, strict=True) if length < max(lengths)]
    assert [p for p, _ in word_maps(model, tokenizer, pairs)] == shorter


def test_annotations_are_links_of_attention_and_log_probabilities(
    tokenizer: Tokenizer,
) -> None:
    """Links of translations equal those of the word maps; log P sums to that of the search."""
    torch.manual_seed(3)
    model = build(tokenizer)
    for parameter in model.parameters():  # heads and layers that differ
        torch.nn.init.normal_(parameter, std=0.7)
    translator = Translator(model, tokenizer, Decode(beam=2, max_length_ratio=1.0))
    texts = [("The dog sees the tree.", "Der Hund sieht."), ("A cat", "Eine Katze schläft hier")]
    hypotheses = [Hypothesis(tokenizer.encode(target), 0.0, 0.0) for _, target in texts]
    sources = [source for source, _ in texts]
    pairs = [Pair(a, b, tuple(word_spans(a)), tuple(word_spans(b)), frozenset()) for a, b in texts]
    maps = [weights[LAYERS - 2] for _, weights in word_maps(model, tokenizer, pairs)]
    links = {}
    for is_guided in (False, True):
        aligner = replace(translator, is_guided=is_guided)
        results = annotate(aligner, sources, hypotheses, alignment=True)
        links[is_guided] = [result.links for result in results]
        for result, weights in zip(results, maps, strict=True):
            expected = (weights[0] if is_guided else weights.mean(0)).argmax(-1).tolist()
            assert result.links == [(j, i) for i, j in enumerate(expected)]
    assert links[False] != links[True]
    assert (results[0].source_words, results[0].target_words) == (5, 3)
    found = translator.search(sources)
    for rank in range(2):
        chosen = [nbest[rank] for nbest in found]
        for best, result in zip(
            chosen, annotate(translator, sources, chosen, alignment=False), strict=True
        ):
            assert len(result.log_probs) == len(best.tokens) + 1
            assert sum(result.log_probs) == pytest.approx(best.log_probability, abs=1e-3)
