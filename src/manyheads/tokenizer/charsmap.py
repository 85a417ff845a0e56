"""SentencePiece's normalization by a map of strings: the longest source at each position.

The library of tokenizers has it as `Precompiled`, but looks up grapheme clusters and loses what
follows a source within one: "ó" with a second mark becomes "ó" only.
"""

import base64
import json
import re
from typing import Any

import tokenizers
from tokenizers import normalizers

PRINTABLE = range(0x20, 0x7F)
PRINTABLE_TEXT = re.compile(r"[\x20-\x7e]*")


class Charsmap:
    """The map is a trie of the UTF-8 sources (a double array, as in Darts), then the targets."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        self.units = memoryview(data[4 : 4 + size]).cast("I")
        self.targets = data[4 + size :]
        self.changes_ascii = any(self._match(bytes([x]), 0) for x in PRINTABLE)

    def normalize(self, text: str) -> tuple[str, list[int]]:
        """The normalized text, and the position in `text` that each character comes from."""
        if not self.changes_ascii and PRINTABLE_TEXT.fullmatch(text):
            return text, list(range(len(text)))
        data, parts, origins = text.encode(), [], []
        position = start = 0  # in characters, in bytes
        while position < len(text):
            target, stop = self._match(data, start) or (text[position], start)
            stop = max(stop, start + len(text[position].encode()))
            parts.append(target)
            origins += [position] * len(target)
            position, start = position + len(data[start:stop].decode()), stop
        return "".join(parts), origins

    def _match(self, data: bytes, start: int) -> tuple[str, int] | None:
        """The target of the longest source from `start` on, and the end of the source."""
        node, longest = _offset(self.units[0]), None
        for position in range(start, len(data)):
            node ^= data[position]
            unit = self.units[node]
            if unit & 0x800000FF != data[position]:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1:  # a source ends here
                longest = self.units[node] & 0x7FFFFFFF, position + 1
        if longest is None:
            return None
        target = self.targets[longest[0] : self.targets.index(0, longest[0])]
        return target.decode(), longest[1]


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


def take_charsmap(library: tokenizers.Tokenizer) -> Charsmap | None:
    """Remove a map at the beginning of a tokenizer's normalizer, and return it."""
    whole: Any = library.normalizer
    state = json.loads(whole.__getstate__())
    first, *rest = state.get("normalizers") or [state]
    if first.get("type") != "Precompiled":
        return None
    library.normalizer = normalizers.Sequence([whole[n + 1] for n in range(len(rest))])
    return Charsmap(base64.b64decode(first["precompiled_charsmap"]))
