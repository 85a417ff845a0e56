"""How a vocabulary is learned from text: byte-level BPE, WordPiece, characters and whole words.

The first three lose nothing of any text; whole words are for comparing with what was published.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import (
    BYTE_PIECES,
    CONTINUATION,
    GLYPHS,
    SPECIALS,
    SPLIT,
    Tokenizer,
)

# The longest run of tokens.WORDS, at four bytes to a character, and the space before the word.
LONGEST_WORD = 4 * 32 + 1

# While WordPiece is trained, a glyph inside a word is a character of its own in Unicode's private
# area. The library's WordPiece trainer numbers the `##` symbols in the order of a hash table, so
# it gives another vocabulary in each process; its BPE trainer over this alphabet does not.
INSIDE = {ord(glyph): chr(0xE000 + byte) for byte, glyph in enumerate(GLYPHS)}
OUTSIDE = {ord(inside): chr(glyph) for glyph, inside in INSIDE.items()}

# What Python's `str.split` takes for white space, and what it does not.
SPACE, NO_SPACE = r"[\s\x1C-\x1F]", r"[^\s\x1C-\x1F]"


@dataclass(frozen=True, kw_only=True)
class Bpe:
    """Byte-level byte-pair encoding: the commonest pair of neighbours becomes a symbol, again and
    again (Sennrich et al. 2016, over bytes as in GPT-2). `vocab_size` is the most there can be.
    """

    vocab_size: int = 8000
    kind: ClassVar[str] = "bpe"

    def __post_init__(self) -> None:
        _check_size(self.vocab_size, "byte-level BPE", len(GLYPHS))

    def train(self, lines: Iterable[str]) -> Tokenizer:
        """Learn the merges; the same lines give the same tokenizer, bit for bit."""
        splitter = _splitter()
        trained = _learn_merges(_with_text(lines), splitter, GLYPHS, self.vocab_size)
        return _assemble(trained.model, splitter, decoders.ByteLevel(), spaced=True)


@dataclass(frozen=True, kw_only=True)
class WordPiece:
    """WordPiece as in BERT, over bytes: pieces inside a word begin with `##`, and a word is split
    by the longest known piece from the left. `vocab_size` is the most there can be.
    """

    vocab_size: int = 8000
    kind: ClassVar[str] = "wordpiece"

    def __post_init__(self) -> None:
        _check_size(self.vocab_size, "WordPiece over bytes", 2 * len(GLYPHS))

    def train(self, lines: Iterable[str]) -> Tokenizer:
        """Learn the pieces; the same lines give the same tokenizer, bit for bit."""
        # A "#" of the text is a word of its own: so "##" always means "continues the word".
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
    """Single characters, the most frequent ones; any other is the bytes of its UTF-8 form.
    `vocab_size` is the most there can be, bytes and special tokens included.
    """

    vocab_size: int = 1000
    kind: ClassVar[str] = "characters"

    def __post_init__(self) -> None:
        _check_size(self.vocab_size, "a character vocabulary", len(BYTE_PIECES))

    def train(self, lines: Iterable[str]) -> Tokenizer:
        """Count the characters; the same lines give the same tokenizer, bit for bit."""
        frequent = _most_frequent(chain.from_iterable(_with_text(lines)))
        symbols = _numbered([*SPECIALS, *BYTE_PIECES, *frequent][: self.vocab_size])
        model = models.BPE(vocab=symbols, merges=[], unk_token="<unk>", byte_fallback=True)
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return _assemble(model, None, decoder)


@dataclass(frozen=True, kw_only=True)
class Words:
    """Whole words between white space, the most frequent ones; any other is `<unk>`.
    `vocab_size` is the most there can be, special tokens included.

    This loses what it does not know, and white space comes back as single spaces. A text that
    spells `<unk>`, as the Penn Treebank's does, means the token.
    """

    vocab_size: int = 50_000
    kind: ClassVar[str] = "words"

    def __post_init__(self) -> None:
        _check_size(self.vocab_size, "a vocabulary of words", 1, "a word")

    def train(self, lines: Iterable[str]) -> Tokenizer:
        """Count the words; the same lines give the same tokenizer, bit for bit."""
        text = _with_text(line.strip() for line in lines)
        frequent = _most_frequent(word for line in text for word in line.split())
        words = (word for word in frequent if word not in SPECIALS)
        symbols = _numbered([*SPECIALS, *words][: self.vocab_size])
        model = models.WordLevel(symbols, unk_token="<unk>")
        spaces = pre_tokenizers.Split(Regex(rf"{SPACE}+"), "removed")
        # This model looks a whole word up, so a text that spells <pad> would get the token.
        spelled = "|".join(name for name in SPECIALS if name != "<unk>")
        alone = Regex(rf"(?<!{NO_SPACE})(?:{spelled})(?!{NO_SPACE})")
        return _assemble(model, spaces, None, normalizers.Replace(alone, "<unk>"))


Tokens = Bpe | WordPiece | Characters | Words


def _check_size(vocab_size: int, kind: str, alphabet: int, what: str = "the bytes") -> None:
    least = alphabet + len(SPECIALS)
    if vocab_size < least:
        raise UserError(
            f"tokens.vocab_size={vocab_size} is too small: {kind} needs at least {least} "
            f"({alphabet} for {what}, {len(SPECIALS)} special tokens)"
        )


def _with_text(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, once it is sure that there is a text in them."""
    rest = iter(lines)
    for line in rest:
        if line:
            return chain([line], rest)
    raise UserError("no text to train a tokenizer on: every line is empty; check the data files")


def _most_frequent(symbols: Iterable[str]) -> list[str]:
    """Each symbol once, the commonest first, equals in the order of their characters."""
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
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator(lines, trainer)
    return inner


def _assemble(
    model: models.Model,
    splitter: pre_tokenizers.PreTokenizer | None,
    decoder: decoders.Decoder | None,
    normalizer: normalizers.Normalizer | None = None,
    *,
    spaced: bool = False,
) -> Tokenizer:
    """With `spaced` words carry the space before them, and so a mask in a text takes its own."""
    inner = tokenizers.Tokenizer(model)
    if normalizer is not None:
        inner.normalizer = normalizer
    if splitter is not None:
        inner.pre_tokenizer = splitter
    if decoder is not None:  # without one, tokens are joined with spaces
        inner.decoder = decoder
    mask = AddedToken("<mask>", lstrip=spaced, special=True)
    inner.add_special_tokens([mask if name == mask.content else name for name in SPECIALS])
    return Tokenizer(inner)
