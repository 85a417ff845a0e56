"""Training of vocabularies: deterministic, within their size, the most frequent symbols."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.tokenizer.test_tokenizer import ALL, KNOWN, LINES, texts

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import SPECIALS
from manyheads.tokenizer.train import Bigrams, Bpe, Characters, WordPiece, Words


def test_characters_keeps_the_most_frequent() -> None:
    tokenizer = Characters(vocab_size=len(SPECIALS) + 256 + 2).train(["aaa", "bb", "dccd"])
    assert [c for c in "abcd" if tokenizer.token_id(c) is not None] == ["a", "b"]


def test_bigrams_are_cut_from_the_left_of_each_word() -> None:
    """The row C2 of the lecture's table: Fo rs ch un gs in st it ut."""
    text = "das Forschungsinstitut"
    tokenizer = Bigrams().train([text])
    subwords = ["da", "s", " Fo", "rs", "ch", "un", "gs", "in", "st", "it", "ut"]
    assert tokenizer.subwords(tokenizer.encode(text)) == subwords
    assert tokenizer.subwords(tokenizer.encode("Foß")) == ["Fo", "\\xc3", "\\x9f"]
    assert tokenizer.kind == "bigrams"
    small = Bigrams(vocab_size=263 + 3).train(["abab", "cd"])
    assert [small.token_id(symbol) is not None for symbol in ("a", "b", "ab", "c")] == [
        *(True, True, True, False)
    ]


def test_the_same_text_gives_the_same_file(tmp_path: Path) -> None:
    # In other processes: hash seeds and thread counts must not matter.
    program = (
        "import sys; from pathlib import Path; from manyheads.tokenizer.train import *\n"
        "lines = Path(sys.argv[1]).read_text('utf-8').split('\\n')\n"
        f"for name, settings in {ALL!r}.items():\n"
        "    settings.train(lines).save(Path(sys.argv[2] + name))"
    )
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(LINES), encoding="utf-8")
    for threads in ("1", "4"):
        variables = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, str(corpus), str(tmp_path / threads)]
        subprocess.run(command, env=environment, check=True)
    for name in ALL:
        assert (tmp_path / f"1{name}").read_bytes() == (tmp_path / f"4{name}").read_bytes()


@pytest.mark.parametrize(
    ("kind", "least"), [(Bpe, 263), (WordPiece, 519), (Characters, 263), (Bigrams, 263), (Words, 8)]
)
def test_a_vocabulary_has_room_for_bytes_and_special_tokens(kind: type[Bpe], least: int) -> None:
    with pytest.raises(UserError, match=rf"tokens.vocab_size={least - 1} .*at least {least}"):
        parse(kind, {"vocab_size": least - 1}, "tokens")
    smallest = kind(vocab_size=least).train(LINES)
    assert smallest.vocab_size == least
    if least > 8:
        assert smallest.decode(smallest.encode("läuft 😀")) == "läuft 😀"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_no_text_is_refused(name: str, lines: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        ALL[name].train(iter(lines))


@settings(deadline=None)
@given(text=texts)
def test_words_are_tokens(text: str) -> None:
    """One token a word between white space; no text holds a special token but the unknown one."""
    words = [KNOWN.token_id(word) for word in text.split()]
    ids = [KNOWN.unknown if word is None or word < len(SPECIALS) else word for word in words]
    assert KNOWN.encode(text) == ids
    known = [word for word, token in zip(text.split(), ids, strict=True) if token > 6]
    assert KNOWN.decode(ids) == " ".join(known)


def test_words_keeps_the_most_frequent_and_takes_equals_by_name() -> None:
    words = Words(vocab_size=len(SPECIALS) + 3).train(["b c  a d", "d <unk> <pad> <unk>\t<unk>"])
    known = [words.content(number) for number in range(words.vocab_size)]
    assert known == [*SPECIALS, "d", "a", "b"]
    assert words.encode("a <unk> c d <pad>") == [8, 3, 3, 7, 3]
    assert Words().train(["a b"]).vocab_size == len(SPECIALS) + 2


def test_words_have_no_trace_and_a_mask_only_on_request() -> None:
    with pytest.raises(UserError, match="WordLevel"):
        KNOWN.trace("Hund")
    assert KNOWN.encode("der <mask>")[1] == KNOWN.unknown
    assert KNOWN.framed(["der <mask>"], specials=True)[0][0][1] == KNOWN.mask


@pytest.mark.parametrize("kind", [Bpe, WordPiece])
def test_a_mask_includes_the_space_before_its_word(kind: type[Bpe | WordPiece]) -> None:
    """As in training, where masked words include their space."""
    line = "The small dog sees the small cat"
    tokenizer = kind(vocab_size=700).train([line] * 3)
    text, masked = (
        tokenizer.framed([x], specials=True)[0][0] for x in (line, line.replace("dog", "<mask>"))
    )
    index = masked.index(tokenizer.mask)
    assert masked[:index] + masked[index + 1 :] == text[:index] + text[index + 1 :]
