"""SentencePiece models: the ids of the `sentencepiece` library, and folders with their texts."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import DataError
from manyheads.loading import load_run
from manyheads.phrasebook.corpus import sentences
from manyheads.tokenizer.sentencepiece import find_sentencepiece
from manyheads.tokenizer.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece")

ENGLISH, GERMAN = (
    [getattr(pair, side) for pair in sentences("en-de", "train", 400)]
    for side in ("source", "target")
)
WORDS = [
    *ENGLISH,
    *GERMAN,
    *["東京は日本の首都です。", "Größe, œuvre, ﬁne ① ½ ＡＢＣ", "русский язык", "한국어 문장"] * 9,
    *["## ==== ---", "x ** 2 ; </p> <b>", "1 200 34.5 %"] * 9,
]
T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
LLAMA |= {"remove_extra_whitespaces": False, "split_digits": True}
KINDS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "llama": LLAMA,
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 700},
    "normalized BPE": {"model_type": "bpe"},
    "lower case": {**T5, "normalization_rule_name": "nmt_nfkc_cf"},
    "no space in front": {**T5, "add_dummy_prefix": False, "character_coverage": 0.98},
}
FILES = {"t5": "spiece.model", "llama": "tokenizer.model"}
SCRIPTS = [
    *((0x300, 0x370), (0x1E00, 0x2200), (0x3040, 0x3100), (0x1100, 0x1200), (0xAC00, 0xD7A0)),
    *((0xFB00, 0xFE00), (0xFF00, 0xFFEF), (0x1F300, 0x1F700), (0x900, 0x980), (0x600, 0x700)),
    *((0x20, 0x250), (0, 0x20), (0xE000, 0x10FFFF)),
]


def trained(lines: list[str], **settings: Any) -> bytes:
    out = io.BytesIO()
    settings = {"vocab_size": 500, "minloglevel": 2, **settings}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **settings)
    return out.getvalue()


def odd(rng: random.Random) -> str:
    """Words, spaces of all kinds, runs, marks, scripts, and special tokens that are spelled out."""
    parts = []
    for _ in range(rng.randint(0, 8)):
        first, last = rng.choice(SCRIPTS)
        characters = [chr(rng.randrange(first, last)) for _ in range(rng.randint(1, 5))]
        accents = "".join(chr(rng.randrange(0x300, 0x330)) for _ in range(rng.randint(1, 3)))
        choices = [
            rng.choice(rng.choice(WORDS).split()),
            rng.choice(" \t\n\u3000\u00a0\u200b▁") * rng.randint(1, 5),
            rng.choice("aeo=-#.0 x") * rng.randint(1, 12),
            "".join(characters),
            rng.choice(["<s>", "</s>", "<unk>", "<pad>", "<0x41>", "<extra_id_0>"]),
            rng.choice("aeiouAO가ｶ") + accents,
        ]
        parts += [rng.choice(choices), rng.choice(["", " "])]
    return "".join(parts)


def loaded(folder: Path, kind: str, data: bytes, vocab_size: int = 500) -> Tokenizer:
    (folder / FILES[kind]).write_bytes(data)
    tokenizer = find_sentencepiece(folder, kind, vocab_size)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_ids_and_texts_are_those_of_the_library(name: str, count: int, tmp_path: Path) -> None:
    data = trained(WORDS, **KINDS[name])
    theirs = spm.SentencePieceProcessor(model_proto=data)
    ours = loaded(tmp_path, name if name in FILES else "llama", data)
    ours.save(tmp_path / "tokenizer.json")  # as a run keeps it
    ours, rng, ties = Tokenizer.load(tmp_path / "tokenizer.json"), random.Random(name), 0
    for _ in range(count):
        text = odd(rng)
        expected, actual = theirs.encode(text), ours.encode(text)
        if actual != expected:
            # Two segmentations of one score: the library adds in float32, ours in float64.
            difference = sum(map(theirs.get_score, expected)) - sum(map(theirs.get_score, actual))
            assert abs(difference) < 1e-3, ascii(text)
            assert expected.count(theirs.unk_id()) == actual.count(theirs.unk_id()), ascii(text)
            ties += 1
        if theirs.unk_id() not in expected:
            assert ours.decode(expected) == theirs.decode(expected), ascii(text)
    assert ties <= count / 250
    batch = [odd(rng) for _ in range(50)]
    assert ours.encode_batch(batch) == [ours.encode(text) for text in batch]


def test_offsets_are_of_the_original_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "t5", trained(WORDS, **T5))
    text = "  a\u3000ﬁ  ½ Größe"
    for start, stop in tokenizer.offsets(text):
        assert 0 <= start <= stop <= len(text)
    first, last = tokenizer.offsets(text)[0], tokenizer.offsets(text)[-1]
    assert text[slice(*first)].strip() == "a"
    assert last[1] == len(text)


def test_sentinels_and_special_tokens_of_t5(tmp_path: Path) -> None:
    data = trained(WORDS, **T5)
    tokenizer = loaded(tmp_path, "t5", data, vocab_size=628)
    assert tokenizer.vocab_size == 600
    assert tokenizer.sentinels() == list(range(599, 499, -1))
    assert (tokenizer.pad, tokenizer.end, tokenizer.unknown) == (0, 1, 2)
    assert tokenizer.frame() == ([], [1])
    llama = loaded(tmp_path, "llama", trained(WORDS, **LLAMA))
    assert llama.frame() == ([llama.start], [])


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    data = trained(WORDS, **T5)
    for damaged in (data[: len(data) // 2], b"no model", data[:40] + b"\xff" * 40):
        with pytest.raises(DataError, match=r"spiece\.model"):
            loaded(tmp_path, "t5", damaged)


# --- published folders ---


@pytest.mark.parametrize("family", ["t5", "llama", "marian"])
def test_a_published_folder_works_with_its_texts(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.exchange.folders import FAMILIES, MARKED, strengthen

    english, german = trained(ENGLISH, vocab_size=260), trained(GERMAN, vocab_size=280)
    marked = MARKED[family]
    if family == "marian":
        pieces = [
            spm.SentencePieceProcessor(model_proto=data).id_to_piece(list(range(3, size)))
            for data, size in ((english, 260), (german, 280))
        ]
        names = dict.fromkeys(["</s>", "<unk>", *pieces[0], *pieces[1], ">>de<<", "<pad>"])
        vocabulary = {name: number for number, name in enumerate(names)}
        (tmp_path / "source.spm").write_bytes(english)
        (tmp_path / "target.spm").write_bytes(german)
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        size, end, pad = len(vocabulary), 0, len(vocabulary) - 1
        marked = marked | {"pad_token_id": pad, "eos_token_id": end, "forced_eos_token_id": end}
        marked |= {"decoder_start_token_id": pad}
    else:
        data, size = trained(WORDS, **KINDS[family]), 500
        (tmp_path / FILES[family]).write_bytes(data)
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**sizes, "vocab_size": size, **marked}))
    strengthen(model)
    model.save_pretrained(tmp_path)
    run = load_run(tmp_path)
    texts = ["The small dog sees the tree.", "A cat sleeps, and 3 dogs look at it!", ""]
    if family == "llama":
        assert len(run.generate(texts[:2], max_new_tokens=4)) == 2
        return
    assert len(run.translate(texts[:2])) == 2
    if family == "marian":
        theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
        for text in [*texts, ">>de<< The dog", *ENGLISH, *GERMAN, "ｆｉｎｅ \u3000 ½ ▁ Ö"]:
            expected = theirs(text)["input_ids"]
            if vocabulary["<unk>"] in expected and text in GERMAN:
                continue  # it looks up neighbouring unknown characters together, we one by one
            assert [ids for ids, _ in run.tokenizer.framed([text])] == [expected], ascii(text)
        ids = [vocabulary[piece] for piece in pieces[1][40:60]]
        assert run.tokenizer.decode(ids) == theirs.decode(ids)
