"""Text to token ids and back.

Byte-level BPE, WordPiece, characters and bigrams (learned in train.py) encode any text without
loss: symbols outside the vocabulary become the bytes of their UTF-8 form. Word vocabularies, and
tokenizers made elsewhere, may lose some of it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from manyheads.errors import DataError, UserError
from manyheads.fileio import write_text
from manyheads.tokenizer.charsmap import take_charsmap
from manyheads.tokenizer.trace import Ranks, Step, match_steps, merge_steps, symbols

# In the order of their ids.
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>"]

CONTINUATION = "##"
TARGET = "target_tokenizer"  # key of tokenizer.json, if source and target are separate

# GPT-2's split, with combining marks kept on their letters, English contractions only at the end
# of a word (so that French "c'est" and "l'eau" split at the apostrophe alike), numbers in groups
# of three, and a bound on every run, so that no word is long enough to be slow or refused.
WORDS = (
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"| ?[\p{L}\p{M}]{1,32}"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]{1,32}"
    r"|\s{1,32}(?!\S)"
    r"|\s{1,32}"
)
SPLIT = pre_tokenizers.Split(Regex(WORDS), "isolated")
PAIR = r" ?\S{1,2}|\s"


def _glyphs() -> list[str]:
    """A visible character for each byte, GPT-2's table: itself if it prints, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


GLYPHS = _glyphs()
BYTE_OF = {glyph: byte for byte, glyph in enumerate(GLYPHS)}
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}

# The library's names of the kinds that train.py learns.
KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "WordLevel": "words"}


class Special:
    """The id of a special token, as an attribute of a tokenizer.

    It is looked up by content: first ours, then those of other tokenizers in order of preference.
    """

    def __init__(self, *contents: str) -> None:
        self.contents = contents

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: "Tokenizer", owner: type) -> int:
        for content in self.contents:
            if (number := tokenizer.token_id(content)) is not None:
                return number
        contents = " ".join(self.contents)
        raise UserError(f"this tokenizer has no {self.name} token ({contents}); use one that has")


class Tokenizer:
    """A trained tokenizer: text to ids and back, and how it splits."""

    pad = Special("<pad>", "[PAD]", "<|pad|>")
    start = Special(
        "<s>", "[BOS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"
    )
    end = Special("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>")
    unknown = Special("<unk>", "[UNK]", "<|unk|>")
    mask = Special("<mask>", "[MASK]", "<|mask|>")
    separator = Special("<sep>", "[SEP]", "</s>")
    classify = Special("<cls>", "[CLS]", "<s>")

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        # A special token that a user's text spells out is text; the file does not store this.
        library.encode_special_tokens = True
        # Files made elsewhere may truncate or pad.
        library.no_truncation()
        library.no_padding()
        self._normalizer = library.normalizer  # before the map is taken out
        self._charsmap = None if self._normalizer is None else take_charsmap(library)
        self._library = library
        self._target: Tokenizer | None = None

    # --- Encode and decode ---

    def encode(self, text: str) -> list[int]:
        return self._encoding(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _encoding_errors():
            normalized = [self._normalized(text) for text in texts]
            # Without offsets, which take half of the time.
            encodings = self._library.encode_batch_fast(normalized, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def framed(
        self,
        texts: Sequence[str | tuple[str, str]],
        longest: int | None = None,
        *,
        specials: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """Texts or pairs of texts with the tokenizer's special tokens: ids and segment ids.

        Texts longer than `longest` are truncated, the longer one of a pair first; special tokens
        stay. With `specials`, special tokens that a text spells out are special tokens.
        """
        self._library.encode_special_tokens = not specials
        if longest is not None:
            self._library.enable_truncation(longest)
        try:
            with _encoding_errors():
                normalized = [self._normalized(text) for text in texts]
                encodings = self._library.encode_batch(normalized, add_special_tokens=True)
        finally:
            self._library.encode_special_tokens = True
            self._library.no_truncation()
        return [(encoding.ids, encoding.type_ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return self.target._library.decode(list(ids), skip_special_tokens=True)

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        library = self.target._library
        return library.decode_batch([list(ids) for ids in batch], skip_special_tokens=True)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each token in characters; part of a character counts as all of it."""
        offsets = self._encoding(text).offsets
        if self._charsmap is None:
            return [(start, stop) for start, stop in offsets]
        origins = [*self._charsmap.normalize(text)[1], len(text)]
        return [(origins[start], origins[stop]) for start, stop in offsets]

    # --- Separate vocabularies of a translator ---

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of target texts: this one, unless source and target are separate.

        A pair encodes sources and decodes targets; `target` encodes targets.
        """
        return self._target or self

    def with_target(self, target: "Tokenizer") -> "Tokenizer":
        """A copy for sources whose targets have another vocabulary."""
        pair = Tokenizer(tokenizers.Tokenizer.from_str(self._own_json()))
        pair._target = target
        return pair

    # --- Special tokens ---

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that this tokenizer puts before and after a text."""
        encoding = self._library.encode("a", add_special_tokens=True)
        is_special = encoding.special_tokens_mask
        text = is_special.index(0) if 0 in is_special else len(is_special)
        special = [token for token, yes in zip(encoding.ids, is_special, strict=True) if yes]
        return encoding.ids[:text], special[text:]

    def with_frame(self, before: Sequence[int], after: Sequence[int]) -> "Tokenizer":
        """A copy with these tokens before a text, and after each of one or two."""
        library = tokenizers.Tokenizer.from_str(self._own_json())
        first, last = ([str(self.content(token)) for token in side] for side in (before, after))
        single, second = [*first, "$A", *last], ["$B:1", *(f"{name}:1" for name in last)]
        special = [(str(self.content(token)), token) for token in {*before, *after}]
        library.post_processor = TemplateProcessing(single, [*single, *second], special)
        return Tokenizer(library)

    def with_specials(self, contents: Sequence[str]) -> "Tokenizer":
        """A copy with further special tokens at the end of the vocabulary."""
        library = tokenizers.Tokenizer.from_str(self._own_json())
        library.add_special_tokens(list(contents))
        new = [content for content in contents if self.token_id(content) is None]
        if any((library.token_to_id(content) or 0) < self.vocab_size for content in new):
            # The library counts tokens to find the next id, and would assign one twice.
            raise UserError(
                "this tokenizer has holes in its ids, so special tokens cannot be added: use one "
                "without holes"
            )
        return Tokenizer(library)

    def sentinels(self) -> list[int]:
        """T5's sentinel tokens: `<extra_id_0>`, `<extra_id_1>` and so on."""
        tokens: list[int] = []
        while (token := self.token_id(f"<extra_id_{len(tokens)}>")) is not None:
            tokens.append(token)
        return tokens

    def takes_space(self, token: int) -> bool:
        """True if a special token includes the spaces before it."""
        added = self._library.get_added_tokens_decoder().get(token)
        return added is not None and bool(added.lstrip)

    # --- Subwords and vocabulary ---

    def subwords(self, ids: Sequence[int]) -> list[str]:
        """Each token in readable form, with its spaces: `" dog"`.

        A continuation keeps its `##`; a byte that is only part of a character is `\\xc3`.
        """
        tokens = (self._library.id_to_token(token) for token in ids)
        return [self._readable(token) if token is not None else "" for token in tokens]

    def trace(self, text: str) -> list[Step]:
        """How a text is split, state by state, words from left to right.

        BPE starts from symbols, one merge a step; WordPiece from words, one longest known subword
        a step. The last state is that of `encode`. Meant for short texts: a long one has many
        large states.
        """
        model = self._layout["model"]
        if model["type"] == "BPE":
            steps = list(merge_steps(self.words(text), model["vocab"], self.ranks))
        elif model["type"] == "WordPiece":
            steps = list(match_steps(self.words(text), model))
        else:
            raise UserError(f"no trace of a {model['type']} tokenizer: only BPE and WordPiece")
        if list(steps[-1].subwords) != self._encoding(text).tokens:
            raise UserError("no trace of this tokenizer: it has rules that are not known here")
        return [step.map(self._readable) for step in steps]

    def words(self, text: str) -> list[str]:
        """The words that are split into subwords, in the symbols of the vocabulary."""
        normalizer, splitter = self._library.normalizer, self._library.pre_tokenizer
        text = self._normalized(text)
        text = normalizer.normalize_str(text) if normalizer is not None else text
        if splitter is None:
            return [text]
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    def symbols(self, word: str) -> list[str]:
        """The symbols that BPE starts from."""
        return symbols(word, self._layout["model"]["vocab"])

    @cached_property
    def ranks(self) -> Ranks:
        """The pairs that BPE merges, with their order."""
        pairs = self._layout["model"]["merges"]
        return {(left, right): rank for rank, (left, right) in enumerate(pairs)}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (an imported vocabulary may have holes)."""
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def ordinary(self) -> Int[np.ndarray, " tokens"]:
        """The ids of tokens that are not special, in ascending order."""
        added = self._library.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        ids = set(self._library.get_vocab(with_added_tokens=True).values())
        return np.array(sorted(ids - special), dtype=np.int64)

    @cached_property
    def kind(self) -> str:
        """The kind in the words of the settings (bpe, words, …), or else the library's name."""
        model = self._layout["model"]
        if model["type"] == "BPE" and model["byte_fallback"] and not model["merges"]:
            return "characters"
        splits = (self._layout["pre_tokenizer"] or {}).get("pretokenizers", [])
        if any(split.get("pattern") == {"Regex": PAIR} for split in splits):
            return "bigrams"
        return KINDS.get(model["type"], model["type"])

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact content in the vocabulary."""
        return self._library.token_to_id(content)

    def content(self, number: int) -> str | None:
        """The exact content of a token by its id; None for a hole in the vocabulary."""
        return self._library.id_to_token(number)

    # --- Files ---

    def save(self, path: Path) -> None:
        write_text(path, self.to_json())

    def to_json(self) -> str:
        if self._target is not None:
            pair = json.loads(self._own_json()) | {TARGET: json.loads(self._target.to_json())}
            return json.dumps(pair, ensure_ascii=False, indent=2) + "\n"
        return self._own_json()

    def _own_json(self) -> str:
        """Without the tokenizer of targets."""
        stripped, self._library.normalizer = self._library.normalizer, self._normalizer
        text = self._library.to_str(pretty=True)
        self._library.normalizer = stripped
        return f"{text}\n"

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a tokenizer.json, ours or one made elsewhere."""
        try:
            text, target = path.read_text(encoding="utf-8"), None
            if f'\n  "{TARGET}": {{' in text:  # a pair; the library refuses unknown keys
                pair = json.loads(text)
                target = cls(tokenizers.Tokenizer.from_str(json.dumps(pair.pop(TARGET))))
                text = json.dumps(pair)
            tokenizer = cls(tokenizers.Tokenizer.from_str(text))
            tokenizer._target = target
            return tokenizer
        except OSError as error:
            raise DataError(f"{path}: cannot read it ({error.strerror})") from error
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not a tokenizer.json ({reason}); copy it again") from error

    def _encoding(self, text: str) -> tokenizers.Encoding:
        with _encoding_errors():
            return self._library.encode(self._normalized(text), add_special_tokens=False)

    def _normalized(self, text: Any) -> Any:
        """A text, or a pair of texts, after a SentencePiece map of characters."""
        if self._charsmap is None:
            return text
        if isinstance(text, tuple):
            return tuple(self._charsmap.normalize(part)[0] for part in text)
        return self._charsmap.normalize(text)[0]

    @cached_property
    def _layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = json.loads(self._library.to_str())
        return layout

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = self._layout["decoder"] or {"decoders": []}
        return {part["type"] for part in decoder.get("decoders", [decoder])}

    def _readable(self, token: str) -> str:
        data = None
        if "ByteFallback" in self._decoders and token in BYTE_TOKENS:
            data = bytes([BYTE_TOKENS[token]])
        elif "ByteLevel" in self._decoders and BYTE_OF.keys() >= set(token):
            # The "##" of a continuation are glyphs of themselves, so they stay.
            data = bytes(BYTE_OF[glyph] for glyph in token)
        return token if data is None else data.decode("utf-8", "backslashreplace")


@contextmanager
def _encoding_errors() -> Iterator[None]:
    """Turn errors of the library into one-line errors."""
    try:
        yield
    except TypeError as error:  # a lone surrogate: Python's str can hold it, UTF-8 cannot
        raise UserError(
            "the text is not valid Unicode (half of a surrogate pair); read it as UTF-8"
        ) from error
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"this tokenizer cannot encode the text ({error}): use the model's tokenizer"
        ) from error
