"""Tokenizer folders that `transformers` writes: the same ids for odd strings."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.exchange.folders import TOKENIZERS
from tests.tokenizer.test_sentencepiece import odd

from manyheads.tokenizer.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

# Their class, and the family whose test tokenizer gives its vocabulary.
KINDS = {
    "WordPiece": ("BertTokenizer", "bert"),
    "BPE of bytes": ("GPT2Tokenizer", "gpt2"),
    "BPE of bytes with a frame": ("RobertaTokenizer", "roberta"),
    "BPE of bytes, normalized": ("Qwen2Tokenizer", "gpt2"),
}


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind: str, count: int, tmp_path: Path) -> None:
    """With the special tokens around a text; those that it spells out are text."""
    name, family = KINDS[kind]
    model = json.loads(TOKENIZERS[family]().to_str())["model"]
    merges = {"merges": [tuple(pair) for pair in model["merges"]]} if "merges" in model else {}
    made = getattr(transformers, name)(vocab=model["vocab"], **merges)
    made.save_pretrained(tmp_path)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours, rng = Tokenizer.load(tmp_path / "tokenizer.json"), random.Random(kind)
    for text in [odd(rng) for _ in range(count)]:
        expected = theirs(text, split_special_tokens=True)["input_ids"]
        assert [ids for ids, _ in ours.framed([text])] == [expected], ascii(text)
        assert ours.encode(text) == theirs.encode(
            text, split_special_tokens=True, add_special_tokens=False
        ), ascii(text)
