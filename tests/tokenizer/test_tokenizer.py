"""Tokenizers: exact round trips, words, special tokens, and traces that end in the encoding."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import SPECIALS, Tokenizer
from manyheads.tokenizer.train import Bigrams, Bpe, Characters, Tokens, WordPiece, Words

LINES = [
    "Der kleine Hund läuft schnell über die grüne Wiese .",
    "Die Hunde laufen , und der Mann läuft ihnen nach .",
    "The little dogs aren't running over the green meadow .",
    "Les petits chiens courent , c'est l'été et l'eau est froide .",
    "## Ein Titel #1 mit 12345 Zeichen !!",
] * 4

SETTINGS: dict[str, Tokens] = {
    "bpe": Bpe(vocab_size=380),
    "wordpiece": WordPiece(vocab_size=640),
    "characters": Characters(vocab_size=290),
    "bigrams": Bigrams(vocab_size=400),
}
TRAINED = {name: kind.train(LINES) for name, kind in SETTINGS.items()}
# Words are not exact, so that most tests below exclude them.
ALL: dict[str, Tokens] = {**SETTINGS, "words": Words(vocab_size=24)}
KNOWN = Words(vocab_size=24).train(LINES)

every_kind = pytest.mark.parametrize("tokenizer", TRAINED.values(), ids=TRAINED.keys())

# Any Unicode text, and text made of what is likely to break one.
WORDS = ["Hund", "läuft", "c'est", "'s", "#", "##", "<0x41>", "[MASK]", "▁", "Ġ", *SPECIALS]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\0", "\u00a0", "\u2028", "\ufeff", "\ufffd"]
MARKS = ["e\u0301", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "\U0010ffff", "\ue041"]
awkward = st.sampled_from([*WORDS, *SPACES, *MARKS])
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.one_of(awkward, st.text(max_size=3)), max_size=12).map("".join),
)


@every_kind
@settings(deadline=None)
@given(text=texts)
def test_decoding_is_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]
    assert tokenizer.decode_batch([ids, []]) == [text, ""]
    assert not set(ids) & set(range(len(SPECIALS)))
    assert all(number < tokenizer.vocab_size for number in ids)


@every_kind
@settings(deadline=None)
@given(text=texts)
def test_offsets_cover_the_text(tokenizer: Tokenizer, text: str) -> None:
    spans = tokenizer.offsets(text)
    assert len(spans) == len(tokenizer.encode(text))
    reached = 0
    for start, stop in spans:
        # A token begins where the last one ended, or inside that one's last character.
        assert start in (reached, reached - 1)
        assert start < stop
        reached = max(reached, stop)
    assert reached == len(text)


@pytest.mark.parametrize(
    ("kind", "subwords"),
    [
        (Bpe(), ["Der", " Hund", " ", "\\xf0", "\\x9f", "\\x98", "\\x80", " über"]),
        (WordPiece(), ["Der", " Hund", " ", "##\\xf0", "##\\x9f", "##\\x98", "##\\x80", " über"]),
        (Characters(), [*"Der Hund ", "\\xf0", "\\x9f", "\\x98", "\\x80", *" über"]),
    ],
)
def test_subwords_are_readable(kind: Tokens, subwords: list[str]) -> None:
    tokenizer = kind.train(LINES)
    assert tokenizer.subwords(tokenizer.encode("Der Hund 😀 über")) == subwords
    assert tokenizer.subwords([tokenizer.mask, tokenizer.end]) == ["<mask>", "</s>"]


@every_kind
def test_specials_have_the_first_ids_and_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert [tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown] == [0, 1, 2, 3]
    assert [tokenizer.mask, tokenizer.separator, tokenizer.classify] == [4, 5, 6]
    ids = [tokenizer.start, *tokenizer.encode("Der Hund"), tokenizer.end, tokenizer.pad]
    assert tokenizer.decode(ids) == "Der Hund"


@every_kind
@settings(deadline=None)
@given(text=texts)
def test_a_trace_ends_in_the_encoding(tokenizer: Tokenizer, text: str) -> None:
    steps = tokenizer.trace(text)
    assert list(steps[-1].subwords) == tokenizer.subwords(tokenizer.encode(text))
    assert (steps[0].merged, steps[0].rank) == ("", None)


def test_a_trace_of_bpe_merges_the_lowest_rank_then_the_leftmost() -> None:
    vocabulary = {symbol: number for number, symbol in enumerate(["a", "b", "aa", "ab"])}
    model = models.BPE(vocab=vocabulary, merges=[("a", "a"), ("a", "b")])
    steps = Tokenizer(tokenizers.Tokenizer(model)).trace("aaab")
    assert [step.subwords for step in steps] == [tuple("aaab"), ("aa", "a", "b"), ("aa", "ab")]
    assert [step.rank for step in steps] == [None, 0, 1]


def test_a_trace_of_wordpiece_has_the_tried_subwords() -> None:
    tokenizer = TRAINED["wordpiece"]
    steps = tokenizer.trace("Hundert Wiesen")
    assert steps[0].subwords == ("Hundert", " Wiesen")
    first = steps[1]
    assert first.subwords[0] == first.merged
    assert [*first.tried, first.merged] == [
        "Hundert"[:stop] for stop in range(7, len(first.merged) - 1, -1)
    ]
    assert all(tokenizer.token_id(piece) is None for piece in first.tried)


def test_traces_of_imported_tokenizers() -> None:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2}
    foreign = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(foreign).trace("playing played")[-1].subwords == ("play", "##ing", "[UNK]")
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0)], 0, False))
    with pytest.raises(UserError, match="Unigram"):
        Tokenizer(unigram).trace("a")


@every_kind
def test_a_saved_tokenizer_loads_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("older", encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        tokenizer.save(path)
        assert reader.read() == "older"  # an open file keeps its content
    loaded = Tokenizer.load(path)
    text = "  Der Hund</s> läuft 😀 <mask>\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("older", encoding="utf-8")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"disk full.*untouched"):
        TRAINED["bpe"].save(path)
    assert [entry.read_text("utf-8") for entry in tmp_path.iterdir()] == ["older"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: None,
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff\xfe\x00",
        lambda data: b'{"architectures": ["BertModel"]}',
        lambda data: b"[1, 2]",
        lambda data: data.replace(b'"type": "BPE"', b'"type": "Oracle"'),
    ],
    ids=["missing", "truncate", "empty", "binary", "foreign", "list", "model"],
)
def test_an_unusable_file_is_a_one_line_error(
    damage: Callable[[bytes], bytes | None], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    TRAINED["bpe"].save(path)
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_special_tokens_of_imported_files(tmp_path: Path) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "dog": 5}
    foreign = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.enable_truncation(2)
    foreign.enable_padding(length=9)
    foreign.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    specials = [loaded.pad, loaded.unknown, loaded.classify, loaded.separator, loaded.mask]
    assert specials == [0, 1, 2, 3, 4]
    assert loaded.encode("dog dog dog") == [5, 5, 5]
    with pytest.raises(UserError, match=r"no end token .*</s>"):
        _ = loaded.end


@pytest.mark.parametrize("name", ALL)
def test_further_special_tokens_come_last_and_stay(name: str, tmp_path: Path) -> None:
    before = {**TRAINED, "words": KNOWN}[name]
    assert before.sentinels() == []
    size, text = before.vocab_size, "der Hund <extra_id_1> ."
    more = before.with_specials([f"<extra_id_{number}>" for number in (0, 1, 2, 4)])
    more.save(tmp_path / "tokenizer.json")
    for tokenizer in (more, Tokenizer.load(tmp_path / "tokenizer.json")):
        assert tokenizer.sentinels() == [size, size + 1, size + 2]
        assert tokenizer.vocab_size == size + 4
        assert tokenizer.encode(text) == before.encode(text)  # spelled out, it is text
        assert tokenizer.decode([size, *tokenizer.encode("."), size + 1]) == "."
        assert tokenizer.kind == name
    assert before.vocab_size == size
    again = more.with_specials(["<extra_id_0>", "<extra_id_3>"])
    assert again.sentinels() == [size, size + 1, size + 2, size + 4, size + 3]


def test_a_vocabulary_with_holes_takes_no_further_special_tokens() -> None:
    """The library would give an id twice."""
    holes = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a"))
    with pytest.raises(UserError, match="holes"):
        Tokenizer(holes).with_specials(["<x>", "<y>"])


@every_kind
def test_half_a_surrogate_pair_is_a_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="Unicode"):
        tokenizer.encode("a\ud800")
    with pytest.raises(UserError, match="Unicode"):
        tokenizer.encode_batch(["a", "\udcff"])


def test_words_split_where_people_would() -> None:
    text = "c'est l'eau l'train it's über u\u0308ber 12345"
    tokenizer = Bpe(vocab_size=2000).train([text] * 3)
    shown = tokenizer.subwords(tokenizer.encode(text))
    french = ["c", "'", "est", " l", "'", "eau", " l", "'", "train"]
    assert shown == [*french, " it", "'s", " über", " u\u0308ber", " 123", "45"]
