"""SentencePiece models (Kudo & Richardson 2018): spiece.model, tokenizer.model, source.spm.

The file is a protocol buffer: subwords with scores (field 1), settings of training (2) and of
normalization (3). Unigram and BPE models give the ids of the `sentencepiece` library.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of subwords
TARGET = 0  # in addition: Marian's subwords that only the decoder generates
UNIGRAM, BPE = 1, 2
SPACE = "▁"
HIDDEN = "\uffff"  # before subwords of the target, so that no text contains them: not a character
SENTINELS = 100  # <extra_id_0> … of T5
# By type of model: the file, and the special tokens before and after a text.
Published = tuple[str, list[str], list[str]]
LLAMA: Published = ("tokenizer.model", ["<s>"], [])
PUBLISHED: dict[str, Published] = {
    "t5": ("spiece.model", [], ["</s>"]),
    "marian": ("source.spm", [], ["</s>"]),
    "llama": LLAMA,
    "mistral": LLAMA,
}


@dataclass(frozen=True)
class Subword:
    content: str
    score: float = 0.0
    type: int = NORMAL


def find_sentencepiece(folder: Path, kind: str, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer of a published folder of this model type, if it has a SentencePiece file."""
    name, *frame = PUBLISHED.get(kind, ("",))
    path = folder / name
    if not path.is_file():
        return None
    try:
        fields = list(_fields(path.read_bytes()))
        subwords = [_subword(value) for number, value in fields if number == 1]
        trainer, normalizer = (
            dict(_fields(b"".join(value for number, value in fields if number == part)))
            for part in (2, 3)
        )
    except (OSError, ValueError, IndexError, TypeError, struct.error) as error:
        raise DataError(f"{path} is not a SentencePiece model ({error}): copy it again") from None
    if kind == "marian":
        subwords = _numbered(subwords, folder / "vocab.json")
    tokenizer = _build(subwords, trainer, normalizer, path)
    if kind == "t5" and vocab_size is not None and vocab_size > len(subwords):
        count = min(SENTINELS, vocab_size - len(subwords))
        tokenizer = tokenizer.with_specials([f"<extra_id_{n}>" for n in reversed(range(count))])
    ids = [[tokenizer.token_id(content) for content in side] for side in frame]
    before, after = ([token for token in side if token is not None] for side in ids)
    return tokenizer.with_frame(before, after)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: an int, or bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        if position + size > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[position : position + size]
        position += size


def _subword(data: bytes) -> Subword:
    fields = dict(_fields(data))
    score = struct.unpack("<f", fields.get(2, bytes(4)))[0]
    return Subword(fields[1].decode(), score, fields.get(3, NORMAL))


def _numbered(subwords: list[Subword], path: Path) -> list[Subword]:
    """Marian's subwords by the ids of its vocab.json, which has those of the target too."""
    try:
        ids: dict[str, int] = json.loads(path.read_bytes())
        contents = sorted(ids, key=lambda content: ids[content])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}): copy it again") from None
    if [ids[content] for content in contents] != list(range(len(ids))):
        raise DataError(f"{path} has holes in its ids: copy it again")
    source = {subword.content: subword for subword in subwords}
    characters = {character for content in source for character in content}
    special = {"<unk>": UNKNOWN, "</s>": CONTROL, "<pad>": CONTROL}

    def type_of(content: str) -> int:
        if content.startswith(">>"):  # the code of a language
            return USER_DEFINED
        # An unknown character is looked up too.
        return NORMAL if len(content) == 1 and content not in characters else TARGET

    return [
        Subword(content, type=special[content])
        if content in special
        else source.get(content) or Subword(content, type=type_of(content))
        for content in contents
    ]


def _build(
    subwords: list[Subword], trainer: dict[int, Any], normalizer: dict[int, Any], path: Path
) -> Tokenizer:
    kind, fallback = trainer.get(3, UNIGRAM), bool(trainer.get(35))
    unknown = [n for n, subword in enumerate(subwords) if subword.type == UNKNOWN]
    if kind not in (UNIGRAM, BPE) or trainer.get(24) or len(unknown) != 1:
        raise UserError(f"{path}: only unigram and BPE models with spaces before words can be read")
    contents = [HIDDEN * (s.type == TARGET) + s.content for s in subwords]
    model: models.Model
    if kind == UNIGRAM:
        scored = [(text, s.score) for text, s in zip(contents, subwords, strict=True)]
        model = models.Unigram(scored, unknown[0], fallback)
    else:
        model = models.BPE(
            {content: number for number, content in enumerate(contents)},
            _merges(subwords),
            unk_token=contents[unknown[0]],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    library = tokenizers.Tokenizer(model)
    library.normalizer = _normalizer(normalizer)
    if kind == UNIGRAM:
        library.pre_tokenizer = _split_specials(subwords, fallback)
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.get(3, 1) else []
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(HIDDEN, ""),
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    special = [s.content for s in subwords if s.type in (UNKNOWN, CONTROL)]
    library.add_special_tokens(special)
    own = [s.content for s in subwords if s.type == USER_DEFINED]
    library.add_tokens([AddedToken(content, normalized=False) for content in own])
    return Tokenizer(library)


def _merges(subwords: list[Subword]) -> list[tuple[str, str]]:
    """Pairs that BPE merges, the best score of the result first."""
    scores = {s.content: -s.score for s in subwords if s.type in (NORMAL, USER_DEFINED)}
    return [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=lambda text: scores[text])
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]


def _normalizer(settings: dict[int, Any]) -> normalizers.Normalizer:
    """A map of characters, single spaces, a space in front, and SentencePiece's sign for spaces."""
    steps: list[normalizers.Normalizer] = []
    if settings.get(2):
        steps.append(normalizers.Precompiled(settings[2]))
    if settings.get(4, 1):
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if settings.get(3, 1):
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _split_specials(subwords: list[Subword], fallback: bool) -> pre_tokenizers.PreTokenizer:
    """For unigram models, which would encode a special token that a text spells out as that token.

    It is split between two characters that no subword contains and of which one is known, if there
    are such: then the text is encoded as without the split.
    """
    texts = [s.content for s in subwords if s.type == NORMAL]
    known = {text[n : n + size] for text in texts for n in range(len(text)) for size in (1, 2)}
    patterns = ["<(?=0x[0-9A-F]{2}>)"] if fallback else []
    for special in (s.content for s in subwords if s.type in (UNKNOWN, CONTROL)):
        fitting = [
            cut
            for cut in range(1, len(special))
            if special[cut - 1 : cut + 1] not in known and known & {*special[cut - 1 : cut + 1]}
        ]
        cut = fitting[0] if fitting else len(special) - 1
        patterns.append(f"{re.escape(special[:cut])}(?={re.escape(special[cut:])})")
    return pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")
