"""Cross-attention against gold alignments: words of tokens, the error rate, the best head."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from manyheads.evaluate.alignment import (
    AlignmentError,
    alignment_error,
    word_maps,
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


def spans(text: str, words: Iterable[str]) -> list[tuple[int, int]]:
    """Where the words stand in the text, one after the other."""
    found, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        found.append((start, end))
    return found


def pair(source: str, target: str, links: set[tuple[int, int]]) -> Pair:
    """A pair whose words are separated by `|` in place of or beside a space."""
    sides = []
    for side in (source, target):
        text = side.replace("|", "")
        sides.append((text, tuple(spans(text, [w.strip() for w in side.split("|")]))))
    (left, left_words), (right, right_words) = sides
    return Pair(left, right, left_words, right_words, frozenset(links))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pairs = sentences("en-de", "train", 60)
    return Bpe(vocab_size=330).train([text for p in pairs for text in (p.source, p.target)])


def model_for(tokenizer: Tokenizer) -> Seq2Seq:
    sizes = {"dim": 16, "layers": LAYERS, "heads": HEADS, "max_length": 128}
    return Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **sizes).build().eval()


class Told(Score):
    """A score that says what it was told: the attention of a batch, as logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        found = torch.full((*q.shape[:3], k.shape[2]), -30.0)
        found[:, :, : self.logits.shape[2], : self.logits.shape[3]] = self.logits
        return found


def tell(
    model: Seq2Seq, tokenizer: Tokenizer, pairs: list[Pair], links: list[set[tuple[int, int]]]
) -> None:
    """Let every head attend, at the step that writes a target token, to the tokens of the source
    words that are linked to its word."""
    sizes = [(len(tokenizer.encode(p.target)), len(tokenizer.encode(p.source))) for p in pairs]
    logits = torch.full((len(pairs), HEADS, *map(max, zip(*sizes, strict=True))), -30.0)
    for row, (p, own) in enumerate(zip(pairs, links, strict=True)):
        for i, j in own:
            for t, s in (
                (t, s)
                for t, (a, b) in enumerate(tokenizer.offsets(p.target))
                for s, (c, d) in enumerate(tokenizer.offsets(p.source))
                if overlap((a, b), p.target_words[j]) and overlap((c, d), p.source_words[i])
            ):
                logits[row, :, t, s] = 30.0
    for block in model.decoder.blocks:
        assert isinstance(block, Block)
        block.cross.core = Dense()  # which takes any score
        block.cross.score = Told(logits)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return min(one[1], other[1]) > max(one[0], other[0])


@pytest.mark.parametrize(
    ("text", "words", "tokens", "homes"),
    [
        # Subwords and the space before a word belong to the word.
        (
            "the dogs bark",
            ["the", "dogs", "bark"],
            ["the", " dog", "s", " ba", "rk"],
            [0, 1, 1, 2, 2],
        ),
        # Punctuation is a word of its own.
        ("Yes, dogs.", ["Yes", ",", "dogs", "."], ["Yes", ",", " dogs", "."], [0, 1, 2, 3]),
        # So is an elided word.
        ("l'arbre", ["l'", "arbre"], ["l", "'", "arb", "re"], [0, 0, 1, 1]),
        # A token over two words belongs to the one it covers more of, the first of equals.
        ("l'arbre", ["l'", "arbre"], ["l'arb", "re"], [1, 1]),
        ("l'arbre", ["l'", "arbre"], ["l'ar", "bre"], [0, 1]),
        # A bare space belongs to none.
        ("a  b", ["a", "b"], ["a", " ", " b"], [0, None, 1]),
        # A word may go without.
        ("ab", ["a", "b"], ["ab"], [0]),
    ],
    ids=["subwords", "marks", "elision", "across", "halves", "space", "without"],
)
def test_tokens_belong_to_words(
    text: str, words: list[str], tokens: list[str], homes: list[int | None]
) -> None:
    """A matrix of words and tokens, 1 where the token is part of the word, at most one a token."""
    found = words_of_tokens(spans(text, tokens), spans(text, words))
    wanted = torch.zeros(len(words), len(tokens))
    for column, home in enumerate(homes):
        if home is not None:
            wanted[home, column] = 1
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("languages", ["en-de", "en-fr"])
def test_every_word_of_the_phrasebook_has_tokens(tokenizer: Tokenizer, languages: str) -> None:
    """With a real tokenizer each token but a bare space has one word, each word has a token."""
    for p in sentences(languages, "train", 40):
        for text, words in ((p.source, p.source_words), (p.target, p.target_words)):
            tokens = tokenizer.offsets(text)
            found = words_of_tokens(tokens, words)
            blank = torch.tensor([not text[a:b].strip() for a, b in tokens])
            assert torch.equal(found.sum(0), (~blank).float())
            assert (found.sum(1) >= 1).all()


def test_maps_have_a_row_a_target_word_and_the_weight_of_whole_words(tokenizer: Tokenizer) -> None:
    """Rows are means over a word's tokens, columns sums; only the end token's weight is missing."""
    model = model_for(tokenizer)
    pairs = sentences("en-de", "train", 7)
    found = list(word_maps(model, tokenizer, pairs, batch_size=3))
    assert [p for p, _ in found] == pairs
    for p, weights in found:
        assert weights.shape == (LAYERS, HEADS, len(p.target_words), len(p.source_words))
        total = weights.sum(-1)
        assert (total < 1).all()
        assert (total > 0.5).all()
    whole = list(word_maps(model, tokenizer, pairs))
    for (_, one), (_, other) in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_a_word_is_aligned_by_the_steps_that_write_it(tokenizer: Tokenizer) -> None:
    """Row w: what the decoder attends to while it has read the tokens before each of w's."""
    model = model_for(tokenizer)
    for p, weights in word_maps(model, tokenizer, sentences("en-de", "train", 3)):
        source = torch.tensor([[*tokenizer.encode(p.source), tokenizer.end]])
        target = torch.tensor([[tokenizer.start, *tokenizer.encode(p.target)]])
        with torch.no_grad(), capture(model) as maps:
            model(source, target)
        for layer, attention in enumerate(maps["cross"]):
            for row, word in enumerate(p.target_words):
                steps = [
                    t for t, own in enumerate(tokenizer.offsets(p.target)) if overlap(own, word)
                ]
                for column, other in enumerate(p.source_words):
                    read = [
                        s
                        for s, own in enumerate(tokenizer.offsets(p.source))
                        if overlap(own, other)
                    ]
                    mean = attention[0][:, steps][:, :, read].sum(-1).mean(-1)
                    torch.testing.assert_close(weights[layer, :, row, column], mean)


def test_attention_that_is_the_gold_alignment_makes_no_error(tokenizer: Tokenizer) -> None:
    """Where gold links pair the words off one to one, the error rate is 0 in every head."""
    pairs = [
        pair("the |old |dog|.", "der |alte |Hund|.", {(0, 0), (1, 1), (2, 2), (3, 3)}),
        pair("I |have |slept", "ich |geschlafen |habe", {(0, 0), (1, 2), (2, 1)}),
        pair("the |tree |sleeps", "l'|arbre |dort", {(0, 0), (1, 1), (2, 2)}),
    ]
    model = model_for(tokenizer)
    tell(model, tokenizer, pairs, [set(p.alignment) for p in pairs])
    found = alignment_error(model, tokenizer, pairs)
    assert torch.tensor(found.rates).abs().max() < 1e-6
    assert found.best < 1e-6


@pytest.mark.parametrize("languages", ["en-de", "en-fr"])
def test_gold_attention_finds_a_link_of_every_linked_word(
    tokenizer: Tokenizer, languages: str
) -> None:
    """With words of no or of several links: 1 − 2 · linked words / (words + links)."""
    pairs = sentences(languages, "train", 30)
    model = model_for(tokenizer)
    tell(model, tokenizer, pairs, [set(p.alignment) for p in pairs])
    linked = sum(len({j for _, j in p.alignment}) for p in pairs)
    total = sum(len(p.target_words) + len(p.alignment) for p in pairs)
    wanted = torch.full((LAYERS, HEADS), 1 - 2 * linked / total)
    torch.testing.assert_close(torch.tensor(alignment_error(model, tokenizer, pairs).rates), wanted)


@pytest.mark.parametrize(
    ("chosen", "hits"),
    [
        ([{(0, 0), (1, 1), (2, 2)}, {(0, 0), (1, 1), (1, 2)}], 6),
        ([{(0, 0), (2, 1), (1, 2)}, {(1, 0), (0, 1), (1, 2)}], 3),
        ([{(2, 0), (0, 1), (1, 2)}, {(1, 0), (0, 1), (0, 2)}], 1),
    ],
    ids=["all", "half", "one"],
)
def test_the_error_rate_is_the_formula(
    tokenizer: Tokenizer, chosen: list[set[tuple[int, int]]], hits: int
) -> None:
    """1 − 2 |A ∩ G| / (|A| + |G|) with |A| = 6 target words and |G| = 3 + 4 gold links."""
    pairs = [
        pair("a |dog |barks", "ein |Hund |bellt", {(0, 0), (1, 1), (2, 2)}),
        pair("I |sleep", "moi |je |dors", {(0, 0), (0, 1), (1, 1), (1, 2)}),
    ]
    model = model_for(tokenizer)
    tell(model, tokenizer, pairs, chosen)
    found = torch.tensor(alignment_error(model, tokenizer, pairs).rates)
    right = sum(len(own & p.alignment) for own, p in zip(chosen, pairs, strict=True))
    assert right == hits
    torch.testing.assert_close(found, torch.full((LAYERS, HEADS), 1 - 2 * hits / (6 + 7)))


def test_an_untrained_model_is_near_chance(tokenizer: Tokenizer) -> None:
    """Heads of random weights do about as well as a link drawn for each target word."""
    pairs = sentences("en-de", "train", 60)
    hits = sum(len(p.alignment) / len(p.source_words) for p in pairs)
    total = sum(len(p.target_words) + len(p.alignment) for p in pairs)
    chance = 1 - 2 * hits / total
    rates = []
    for seed in range(4):
        torch.manual_seed(seed)
        rates += alignment_error(model_for(tokenizer), tokenizer, pairs).rates
    mean = float(torch.tensor(rates).mean())
    assert chance > 0.7
    assert mean == pytest.approx(chance, abs=0.08)


def test_the_best_head_has_the_lowest_rate() -> None:
    """(layer, head) counted from 0, the first of equals."""
    error = AlignmentError([[0.9, 0.4, 0.8], [0.7, 0.3, 0.3]])
    assert error.best == 0.3
    assert error.best_head == (1, 1)


def test_too_long_pairs_are_left_out(tokenizer: Tokenizer) -> None:
    """A pair that the model has no room for is skipped, and the others keep their words."""
    pairs = sentences("en-de", "train", 12)
    longest = max(len(tokenizer.encode(text)) for p in pairs for text in (p.source, p.target))
    sizes = {"dim": 16, "layers": 1, "heads": 1, "max_length": longest}
    model = Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **sizes).build()
    found = [p for p, _ in word_maps(model, tokenizer, pairs)]
    assert found == [
        p
        for p in pairs
        if max(len(tokenizer.encode(text)) for text in (p.source, p.target)) < longest
    ]
    assert 0 < len(found) < len(pairs)
