"""Text to token ids and back: byte-level BPE, WordPiece and characters.

All three take any text and give it back exactly: what was never seen in training falls back to
the bytes of its UTF-8 form, so nothing is ever unknown.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from manyheads.errors import BadData, Mistake
from manyheads.files import write_text
from manyheads.replay import Step, match_steps, merge_steps

# In the order of their ids.
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>"]

CONTINUATION = "##"

# GPT-2's split, with combining marks kept on their letters, English contractions only where the
# word ends (so French "c'est" and "l'eau" split at the apostrophe alike), numbers in groups of
# three, and a bound on every run, so that no word is long enough to be slow or refused.
WORDS = (
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"| ?[\p{L}\p{M}]{1,32}"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]{1,32}"
    r"|\s{1,32}(?!\S)"
    r"|\s{1,32}"
)
# The bound above, at four bytes to a character, and the space before the word.
LONGEST_WORD = 4 * 32 + 1


def _glyphs() -> list[str]:
    """A visible character for each byte, GPT-2's table: itself if it prints, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


GLYPHS = _glyphs()
BYTE_OF = {glyph: byte for byte, glyph in enumerate(GLYPHS)}
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}

# While WordPiece is trained, a glyph inside a word is a character of its own in Unicode's private
# area. The library's WordPiece trainer numbers the `##` symbols in the order of a hash table, so
# it gives another vocabulary in each process; its BPE trainer over this alphabet does not.
INSIDE = {ord(glyph): chr(0xE000 + byte) for byte, glyph in enumerate(GLYPHS)}
OUTSIDE = {ord(inside): chr(glyph) for glyph, inside in INSIDE.items()}


class Special:
    """The id of a special token, as an attribute of a tokenizer.

    It is looked up by content: ours, then those of files made elsewhere, the best first.
    """

    def __init__(self, *contents: str) -> None:
        self.contents = contents

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: "Tokenizer", owner: type) -> int:
        found = map(tokenizer.token_id, self.contents)
        number = next((number for number in found if number is not None), None)
        if number is None:
            looked = " ".join(self.contents)
            raise Mistake(f"this tokenizer has no {self.name} token ({looked}); use one that has")
        return number


class Tokenizer:
    """A trained tokenizer: text to ids and back, and a window on how it splits."""

    pad = Special("<pad>", "[PAD]", "<|pad|>")
    start = Special(
        "<s>", "[BOS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"
    )
    end = Special("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>")
    unknown = Special("<unk>", "[UNK]", "<|unk|>")
    mask = Special("<mask>", "[MASK]", "<|mask|>")
    separator = Special("<sep>", "[SEP]", "</s>")
    classify = Special("<cls>", "[CLS]", "<s>")

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Special tokens that a user's text spells out are text; the file does not hold this.
        inner.encode_special_tokens = True
        # Files from elsewhere may cut or pad what they encode.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no special token added."""
        return self._encoding(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in parallel."""
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise _not_unicode() from error
        return [encoding.ids for encoding in encodings]

    def framed(
        self,
        texts: Sequence[str | tuple[str, str]],
        longest: int | None = None,
        *,
        specials: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """Texts and pairs of texts in the tokenizer's frame: ids, and which text each is of.

        What is longer than `longest` is cut, of a pair the longer text first; the frame stays.
        With `specials`, special tokens that a text spells out are special tokens.
        """
        self._inner.encode_special_tokens = not specials
        if longest is not None:
            self._inner.enable_truncation(longest)
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=True)
        except TypeError as error:
            raise _not_unicode() from error
        finally:
            self._inner.encode_special_tokens = True
            self._inner.no_truncation()
        return [(encoding.ids, encoding.type_ids) for encoding in encodings]

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that this tokenizer puts before and after a text."""
        whole = self._inner.encode("a", add_special_tokens=True)
        added = whole.special_tokens_mask
        text = added.index(0) if 0 in added else len(added)
        after = [token for token, own in zip(whole.ids, added, strict=True) if own][text:]
        return whole.ids[:text], after

    def with_frame(self, before: Sequence[int], after: Sequence[int]) -> "Tokenizer":
        """The same, with these tokens before a text, and after each of one or two."""
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        first, last = ([str(self.content(token)) for token in side] for side in (before, after))
        one, two = [*first, "$A", *last], ["$B:1", *(f"{name}:1" for name in last)]
        marks = [(str(self.content(token)), token) for token in {*before, *after}]
        inner.post_processor = TemplateProcessing(one, [*one, *two], marks)
        return Tokenizer(inner)

    def takes_space(self, token: int) -> bool:
        """Whether a special token is read together with the spaces before it."""
        added = self._inner.get_added_tokens_decoder().get(token)
        return added is not None and bool(added.lstrip)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special tokens leave no trace."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of ids, in parallel."""
        return self._inner.decode_batch([list(ids) for ids in batch], skip_special_tokens=True)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token lies in the text, in characters; part of a character is all of it."""
        return [(start, stop) for start, stop in self._encoding(text).offsets]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as people read it, spaces as they are: `" dog"`.

        A continuation keeps its `##`, and a byte that is no character by itself is `\\xc3`.
        """
        tokens = (self._inner.id_to_token(token) for token in ids)
        return [self._readable(token) if token is not None else "" for token in tokens]

    def replay(self, text: str) -> list[Step]:
        """How a word or a sentence is split, one state after the other, words from left to right.

        BPE goes up from single symbols, one merge a step; WordPiece goes down from whole words,
        one longest known piece a step; characters are there at once. The last state is what
        `encode` gives. Meant for looking: the states of a long text are many and large.
        """
        model = self._layout["model"]
        if model["type"] == "BPE":
            steps = list(merge_steps(self._words(text), model["vocab"], self._ranks))
        elif model["type"] == "WordPiece":
            steps = list(match_steps(self._words(text), model))
        else:
            raise Mistake(f"no replay for a {model['type']} tokenizer, only for BPE and WordPiece")
        if list(steps[-1].pieces) != self._encoding(text).tokens:
            raise Mistake("no replay for this tokenizer: it splits by rules of its own")
        return [step.shown(self._readable) for step in steps]

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (a foreign vocabulary may have holes)."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact content in the vocabulary."""
        return self._inner.token_to_id(content)

    def content(self, number: int) -> str | None:
        """The exact content of a token by its id; None where a foreign vocabulary has a hole."""
        return self._inner.id_to_token(number)

    def save(self, path: Path) -> None:
        """Write the tokenizer whole or not at all."""
        write_text(path, self.to_json())

    def to_json(self) -> str:
        """What a tokenizer.json holds."""
        return self._inner.to_str(pretty=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json, ours or one made elsewhere."""
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise BadData(f"{path}: no tokenizer.json to read there ({error.strerror})") from error
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise BadData(
                f"{path}: not a whole tokenizer.json ({reason}); copy it again or train it anew"
            ) from error

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._inner.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise _not_unicode() from error

    @cached_property
    def _layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = json.loads(self._inner.to_str())
        return layout

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        merges = self._layout["model"]["merges"]
        return {(left, right): rank for rank, (left, right) in enumerate(merges)}

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = self._layout["decoder"] or {"decoders": []}
        return {part["type"] for part in decoder.get("decoders", [decoder])}

    def _words(self, text: str) -> list[str]:
        normalizer, splitter = self._inner.normalizer, self._inner.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        if splitter is None:
            return [text]
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    def _readable(self, token: str) -> str:
        if "ByteFallback" in self._decoders and token in BYTE_PIECES:
            return bytes([BYTE_PIECES[token]]).decode("utf-8", "backslashreplace")
        if "ByteLevel" not in self._decoders:
            return token
        if not BYTE_OF.keys() >= set(token):  # a token added as it is
            return token
        # The "##" of a continuation are glyphs of themselves, so they stay.
        return bytes(BYTE_OF[glyph] for glyph in token).decode("utf-8", "backslashreplace")


def _not_unicode() -> Mistake:
    # A lone surrogate is what Python's str can hold and UTF-8 cannot.
    return Mistake("the text is not valid Unicode (half of a surrogate pair); read it as UTF-8")


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
        return _assemble(trained.model, splitter, decoders.ByteLevel())


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
        return _assemble(model, splitter, decoders.Sequence([continued, decoders.ByteLevel()]))


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
        counts: Counter[str] = Counter()
        for line in _with_text(lines):
            counts.update(line)
        frequent = sorted(counts, key=lambda character: (-counts[character], character))
        symbols = [*SPECIALS, *BYTE_PIECES, *frequent][: self.vocab_size]
        model = models.BPE(
            vocab={symbol: number for number, symbol in enumerate(symbols)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return _assemble(model, None, decoder)


Tokens = Bpe | WordPiece | Characters


def _check_size(vocab_size: int, kind: str, alphabet: int) -> None:
    least = alphabet + len(SPECIALS)
    if vocab_size < least:
        raise Mistake(
            f"tokens.vocab_size={vocab_size} is too small: {kind} needs at least {least} "
            f"({alphabet} for the bytes, {len(SPECIALS)} special tokens)"
        )


def _with_text(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, once it is sure that there is a text in them."""
    rest = iter(lines)
    for line in rest:
        if line:
            return chain([line], rest)
    raise Mistake("no text to train a tokenizer on: every line is empty; check the data files")


def _splitter(*further: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    glyphs = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([words, *further, glyphs])


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
    model: models.Model, splitter: pre_tokenizers.PreTokenizer | None, decoder: decoders.Decoder
) -> Tokenizer:
    inner = tokenizers.Tokenizer(model)
    if splitter is not None:
        inner.pre_tokenizer = splitter
    inner.decoder = decoder
    inner.add_special_tokens(SPECIALS)
    return Tokenizer(inner)
