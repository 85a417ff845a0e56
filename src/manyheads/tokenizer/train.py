"""Learn a vocabulary from text: byte-level BPE, WordPiece, characters, bigrams and words.

All but words encode any text without loss; words are for comparison with published results. The
same lines give the same tokenizer, bit for bit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from manyheads.config import Between
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import (
    BYTE_TOKENS,
    CONTINUATION,
    GLYPHS,
    PAIR,
    SPECIALS,
    SPLIT,
    Tokenizer,
)

# The longest run of tokenizer.WORDS, at four bytes a character, and the space before the word.
LONGEST_WORD = 4 * 32 + 1

# While WordPiece is trained, a glyph inside a word is a character in Unicode's private use area.
# The library's WordPiece trainer numbers the `##` symbols in the order of a hash table, so its
# vocabulary differs between processes; its BPE trainer over this alphabet is deterministic.
INSIDE = {ord(glyph): chr(0xE000 + byte) for byte, glyph in enumerate(GLYPHS)}
OUTSIDE = {ord(inside): chr(glyph) for glyph, inside in INSIDE.items()}

# White space of Python's `str.split`, and its complement.
SPACE, NO_SPACE = r"[\s\x1C-\x1F]", r"[^\s\x1C-\x1F]"

BYTES = len(GLYPHS) + len(SPECIALS)
MEANING = "Most tokens of the vocabulary, special tokens included"


@dataclass(frozen=True, kw_only=True)
class Bpe:
    """Byte-level byte-pair encoding: the most frequent pair of neighbours becomes a symbol, again
    and again (Sennrich et al. 2016, over bytes as in GPT-2).
    """

    vocab_size: Annotated[int, Between(BYTES), MEANING] = 8000
    kind: ClassVar[str] = "bpe"

    def train(self, lines: Iterable[str]) -> Tokenizer:
        splitter = _splitter()
        trained = _learn_merges(_with_text(lines), splitter, GLYPHS, self.vocab_size)
        return _assemble(trained.model, splitter, decoders.ByteLevel(), spaced=True)


@dataclass(frozen=True, kw_only=True)
class WordPiece:
    """WordPiece as in BERT, over bytes: subwords inside a word begin with `##`, and a word is
    split by the longest known subword from the left.
    """

    vocab_size: Annotated[int, Between(BYTES + len(GLYPHS)), MEANING] = 8000
    kind: ClassVar[str] = "wordpiece"

    def train(self, lines: Iterable[str]) -> Tokenizer:
        # A "#" of the text is a word, so that "##" always means "continues the word".
        splitter = _splitter(pre_tokenizers.Split("#", "isolated"))
        split = map(splitter.pre_tokenize_str, _with_text(lines))
        marked = (" ".join(w[0] + w[1:].translate(INSIDE) for w, _ in words) for words in split)
        alphabet = [*GLYPHS, *INSIDE.values()]
        spaces = pre_tokenizers.WhitespaceSplit()
        trained = _learn_merges(marked, spaces, alphabet, self.vocab_size)
        vocabulary = {
            (CONTINUATION if ord(token[0]) in OUTSIDE else "") + token.translate(OUTSIDE): number
            for token, number in trained.get_vocab().items()
        }
        model = models.WordPiece(
            vocabulary,
            unk_token="<unk>",
            continuing_subword_prefix=CONTINUATION,
            max_input_chars_per_word=LONGEST_WORD,
        )
        continued = decoders.Replace(Regex(rf"\A{CONTINUATION}"), "")
        decoder = decoders.Sequence([continued, decoders.ByteLevel()])
        return _assemble(model, splitter, decoder, spaced=True)


@dataclass(frozen=True, kw_only=True)
class Characters:
    """The most frequent characters; any other is encoded as the bytes of its UTF-8 form."""

    vocab_size: Annotated[int, Between(BYTES), MEANING] = 1000
    kind: ClassVar[str] = "characters"

    def train(self, lines: Iterable[str]) -> Tokenizer:
        frequent = _most_frequent(chain.from_iterable(_with_text(lines)))
        return _with_bytes([*SPECIALS, *BYTE_TOKENS, *frequent][: self.vocab_size], [], None)


@dataclass(frozen=True, kw_only=True)
class Bigrams:
    """Words cut into pairs of characters from the left, the first pair with the space before it.

    As C2-50k of Sennrich et al. 2016, without its list of words that stay whole. A rare pair is
    its characters, a rare character its bytes.
    """

    vocab_size: Annotated[int, Between(BYTES), MEANING] = 8000
    kind: ClassVar[str] = "bigrams"

    def train(self, lines: Iterable[str]) -> Tokenizer:
        splitter = pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Split(Regex(PAIR), "isolated")])
        pairs = (pair for line in _with_text(lines) for pair, _ in splitter.pre_tokenize_str(line))
        counts: Counter[str] = Counter()
        for pair, count in Counter(pairs).items():
            for symbol in {*pair, pair[pair[0] == " " :], pair}:
                counts[symbol] += count
        # The parts of a symbol come before it, so that the limit keeps both or drops the symbol.
        frequent = sorted(filter(None, counts), key=lambda s: (-counts[s], len(s), s))
        kept = [*SPECIALS, *BYTE_TOKENS, *frequent][: self.vocab_size]
        merged = [symbol for symbol in kept[BYTES:] if len(symbol) > 1]
        merged.sort(key=lambda symbol: symbol[0] == " ")  # the space joins a pair, not a letter
        return _with_bytes(kept, [(s[0], s[1:]) for s in merged], splitter)


@dataclass(frozen=True, kw_only=True)
class Words:
    """The most frequent words between white space; any other is `<unk>`.

    Unknown words are lost, and white space is decoded as single spaces. `<unk>` in a text, as in
    the Penn Treebank, is the token.
    """

    vocab_size: Annotated[int, Between(len(SPECIALS) + 1), MEANING] = 50_000
    kind: ClassVar[str] = "words"

    def train(self, lines: Iterable[str]) -> Tokenizer:
        text = _with_text(line.strip() for line in lines)
        frequent = _most_frequent(word for line in text for word in line.split())
        words = (word for word in frequent if word not in SPECIALS)
        vocabulary = _numbered([*SPECIALS, *words][: self.vocab_size])
        model = models.WordLevel(vocabulary, unk_token="<unk>")
        spaces = pre_tokenizers.Split(Regex(rf"{SPACE}+"), "removed")
        # This model looks words up in the vocabulary, so "<pad>" in a text would be the token.
        names = "|".join(name for name in SPECIALS if name != "<unk>")
        special_word = Regex(rf"(?<!{NO_SPACE})(?:{names})(?!{NO_SPACE})")
        return _assemble(model, spaces, None, normalizers.Replace(special_word, "<unk>"))


Tokens = Bpe | WordPiece | Characters | Bigrams | Words


def _with_text(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, if they contain text."""
    rest = iter(lines)
    for line in rest:
        if line:
            return chain([line], rest)
    raise UserError("no text to train a tokenizer on: every line is empty; check the data files")


def _most_frequent(symbols: Iterable[str]) -> list[str]:
    """Each symbol once, the most frequent first, equals in the order of their characters."""
    counts = Counter(symbols)
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))


def _numbered(symbols: list[str]) -> dict[str, int]:
    return {symbol: number for number, symbol in enumerate(symbols)}


def _splitter(*further: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    glyphs = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([SPLIT, *further, glyphs])


def _learn_merges(
    lines: Iterable[str],
    splitter: pre_tokenizers.PreTokenizer,
    alphabet: list[str],
    vocab_size: int,
) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator(lines, trainer)
    return library


def _with_bytes(
    symbols: list[str],
    merges: list[tuple[str, str]],
    splitter: pre_tokenizers.PreTokenizer | None,
) -> Tokenizer:
    """Any other symbol is encoded as the bytes of its UTF-8 form."""
    model = models.BPE(_numbered(symbols), merges, unk_token="<unk>", byte_fallback=True)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _assemble(model, splitter, decoder, spaced=splitter is not None)


def _assemble(
    model: models.Model,
    splitter: pre_tokenizers.PreTokenizer | None,
    decoder: decoders.Decoder | None,
    normalizer: normalizers.Normalizer | None = None,
    *,
    spaced: bool = False,
) -> Tokenizer:
    """With `spaced`, words include the space before them, so a mask in a text does too."""
    library = tokenizers.Tokenizer(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if splitter is not None:
        library.pre_tokenizer = splitter
    if decoder is not None:  # without one, tokens are joined with spaces
        library.decoder = decoder
    mask = AddedToken("<mask>", lstrip=spaced, special=True)
    library.add_special_tokens([mask if name == mask.content else name for name in SPECIALS])
    return Tokenizer(library)
