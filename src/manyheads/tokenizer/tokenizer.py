"""Text to token ids and back.

Byte-level BPE, WordPiece and characters, learned in vocabularies.py, take any text and give it
back exactly: what was never seen in training falls back to the bytes of its UTF-8 form, so
nothing is ever unknown. Whole words, and tokenizers made elsewhere, may lose some of it.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from manyheads.errors import DataError, UserError
from manyheads.fileio import write_text
from manyheads.tokenizer.trace import Step, match_steps, merge_steps, symbols

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
SPLIT = pre_tokenizers.Split(Regex(WORDS), "isolated")


def _glyphs() -> list[str]:
    """A visible character for each byte, GPT-2's table: itself if it prints, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


GLYPHS = _glyphs()
BYTE_OF = {glyph: byte for byte, glyph in enumerate(GLYPHS)}
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}

# The library's names of what vocabularies.py learns.
KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "WordLevel": "words"}


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
            raise UserError(f"this tokenizer has no {self.name} token ({looked}); use one that has")
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
        return self._encoding(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(texts)]

    def encode_words(self, texts: Sequence[str]) -> list[tuple[list[int], list[bool]]]:
        """The ids of each text as `encode_batch` gives them, and True where a word begins.

        A word is what the tokenizer splits off before it looks for pieces, for ours a run of
        letters with the space before it; one that splits nothing off has the same words.
        """
        found = []
        for text, encoding in zip(texts, self._encodings(texts), strict=True):
            words: list[int | None] = list(encoding.word_ids)
            if self._inner.pre_tokenizer is None:
                starts = [start for _, (start, _) in SPLIT.pre_tokenize_str(text)]
                words = [bisect_right(starts, start) for start, _ in encoding.offsets]
            begins = [word != before for before, word in pairwise([None, *words])]
            found.append((encoding.ids, begins))
        return found

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
        except Exception as error:  # the library raises nothing narrower
            raise _not_encoded(error) from error
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

    def with_specials(self, contents: Sequence[str]) -> "Tokenizer":
        """The same, with these special tokens at the end; those that are there already stay."""
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        inner.add_special_tokens(list(contents))
        new = [content for content in contents if self.token_id(content) is None]
        if any((inner.token_to_id(content) or 0) < self.vocab_size for content in new):
            # The library counts tokens to find the next id, and would give one twice.
            raise UserError(
                "this tokenizer has ids without tokens, so that no special ones can be added: "
                "use one that numbers its tokens without holes"
            )
        return Tokenizer(inner)

    def sentinels(self) -> list[int]:
        """The tokens that stand for spans in T5's texts: `<extra_id_0>`, `<extra_id_1>` and on."""
        found: list[int] = []
        while (token := self.token_id(f"<extra_id_{len(found)}>")) is not None:
            found.append(token)
        return found

    def takes_space(self, token: int) -> bool:
        """Whether a special token is read together with the spaces before it."""
        added = self._inner.get_added_tokens_decoder().get(token)
        return added is not None and bool(added.lstrip)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special tokens leave no trace."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
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
            steps = list(merge_steps(self.words(text), model["vocab"], self.ranks))
        elif model["type"] == "WordPiece":
            steps = list(match_steps(self.words(text), model))
        else:
            raise UserError(f"no replay for a {model['type']} tokenizer: only BPE and WordPiece")
        if list(steps[-1].pieces) != self._encoding(text).tokens:
            raise UserError("no replay for this tokenizer: it splits by rules of its own")
        return [step.shown(self._readable) for step in steps]

    def words(self, text: str) -> list[str]:
        """What is cut into pieces, each by itself, in the symbols of the vocabulary."""
        normalizer, splitter = self._inner.normalizer, self._inner.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        if splitter is None:
            return [text]
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    def symbols(self, word: str) -> list[str]:
        return list(symbols(word, self._layout["model"]["vocab"]))

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        """Which neighbours BPE merges, the first ones first."""
        merges = self._layout["model"]["merges"]
        return {(left, right): rank for rank, (left, right) in enumerate(merges)}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (a foreign vocabulary may have holes)."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def ordinary(self) -> Int[np.ndarray, " tokens"]:
        """The ids that are no special tokens, in rising order."""
        added = self._inner.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        known = set(self._inner.get_vocab(with_added_tokens=True).values())
        return np.array(sorted(known - special), dtype=np.int64)

    @cached_property
    def kind(self) -> str:
        """The kind as the settings name it (bpe, words, …), or else the library's name."""
        model = self._layout["model"]
        if model["type"] == "BPE" and model["byte_fallback"] and not model["merges"]:
            return "characters"
        return KINDS.get(model["type"], model["type"])

    def token_id(self, content: str) -> int | None:
        """The id of a token by its exact content in the vocabulary."""
        return self._inner.token_to_id(content)

    def content(self, number: int) -> str | None:
        """The exact content of a token by its id; None where a foreign vocabulary has a hole."""
        return self._inner.id_to_token(number)

    def save(self, path: Path) -> None:
        write_text(path, self.to_json())

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json, ours or one made elsewhere."""
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(f"{path}: cannot read it ({error.strerror})") from error
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: no whole tokenizer.json ({reason}); copy it again") from error

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._inner.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise _not_encoded(error) from error

    def _encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        try:
            return self._inner.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise _not_encoded(error) from error

    @cached_property
    def _layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = json.loads(self._inner.to_str())
        return layout

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = self._layout["decoder"] or {"decoders": []}
        return {part["type"] for part in decoder.get("decoders", [decoder])}

    def _readable(self, token: str) -> str:
        if "ByteFallback" in self._decoders and token in BYTE_PIECES:
            return bytes([BYTE_PIECES[token]]).decode("utf-8", "backslashreplace")
        if "ByteLevel" not in self._decoders:
            return token
        if not BYTE_OF.keys() >= set(token):  # a token added as it is
            return token
        # The "##" of a continuation are glyphs of themselves, so they stay.
        return bytes(BYTE_OF[glyph] for glyph in token).decode("utf-8", "backslashreplace")


def _not_encoded(error: Exception) -> UserError:
    if isinstance(error, TypeError):
        # A lone surrogate is what Python's str can hold and UTF-8 cannot.
        return UserError(
            "the text is not valid Unicode (half of a surrogate pair); read it as UTF-8"
        )
    return UserError(f"this tokenizer cannot read the text ({error}): use the model's own")
