"""BPE-dropout: the same text in other subwords, determined by seed and copy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import assert_same_bits, hurt

from manyheads.data.translation import Corpus, EncodedPairs, PhrasebookData
from manyheads.errors import UserError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tokenizer.bpe_dropout import BpeDropout
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe, WordPiece
from manyheads.train.loop import Trainer

TEXTS = ["the dogs were sleeping", " Ünïcode 漢字 🙂\t x", "", "the the the the", "1234567 ... ---"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return PhrasebookData(train_pairs=150).read("train")


@pytest.fixture(scope="module")
def bpe(corpus: Corpus) -> Tokenizer:
    return Bpe(vocab_size=500).train([*corpus.sources, *corpus.targets])


def count(encoded: list[list[int]]) -> int:
    return sum(len(ids) for ids in encoded)


def test_more_dropout_gives_smaller_subwords_of_the_same_text(
    bpe: Tokenizer, corpus: Corpus
) -> None:
    texts = [*TEXTS, *corpus.sources, *corpus.targets]
    assert BpeDropout(bpe, 0.0, seed=1).encode_batch(texts, 0) == bpe.encode_batch(texts)
    totals = []
    for dropout in (0.0, 0.1, 0.5, 0.99):
        encoded = BpeDropout(bpe, dropout, seed=1).encode_batch(texts, 3)
        assert bpe.decode_batch(encoded) == texts
        totals.append(count(encoded))
    assert totals == sorted(set(totals))
    size = sum(len(text.encode()) for text in texts)
    assert 0.8 * size < totals[-1] <= size


def test_seed_and_copy_determine_the_encoding(bpe: Tokenizer, corpus: Corpus) -> None:
    def encode(seed: int, *copy: int) -> list[list[int]]:
        return BpeDropout(bpe, 0.2, seed).encode_batch(corpus.sources, *copy)

    used = BpeDropout(bpe, 0.2, 1)
    used.encode_batch(corpus.targets, 5)  # earlier calls change nothing
    assert used.encode_batch(corpus.sources, 0) == encode(1, 0)
    assert encode(1, 0) != encode(1, 1)
    assert encode(1, 0) != encode(2, 0)


def test_only_bpe_has_merges_to_drop(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="tokens=bpe"):
        BpeDropout(WordPiece(vocab_size=600).train(corpus.sources), 0.1, seed=1)
    for recipe, *settings in (
        ("phrasebook", "tokens=wordpiece", "train.bpe_dropout_copies=2"),
        ("phrasebook", "train.bpe_dropout=0.2"),
        ("gpt-mini", "data.folder=x", "train.bpe_dropout_copies=2"),
    ):
        with pytest.raises(UserError, match=r"tokens=bpe|train\.bpe_dropout_copies"):
            read_recipe(recipe, settings)


def test_copies_follow_the_original_pairs(bpe: Tokenizer, corpus: Corpus) -> None:
    plain, more = (EncodedPairs(corpus, bpe, 64) for _ in range(2))
    more.add_bpe_dropout(corpus, [BpeDropout(bpe, 0.3, seed=1)] * 2, 2, max_length=64)
    count = len(corpus.sources)
    for side, others in ((plain.sources, more.sources), (plain.targets, more.targets)):
        rows, all_rows = side.rows(), others.rows()
        assert all_rows[:count] == rows
        assert len(all_rows) == 3 * count
        assert all_rows[count : 2 * count] != rows != all_rows[2 * count :]
        for row, one in enumerate(all_rows):
            assert bpe.decode(one) == bpe.decode(rows[row % count])
            assert one[-1] == bpe.end
    assert more.numbers == plain.numbers * 3
    longest = int(plain.lengths.max())
    tight = EncodedPairs(corpus, bpe, longest)
    tight.add_bpe_dropout(corpus, [BpeDropout(bpe, 0.9, seed=1)] * 2, 1, max_length=longest)
    assert int(tight.lengths.max()) == longest  # a longer copy is the original
    assert tight.sources.rows()[count:] != plain.sources.rows()


def test_a_run_trains_on_all_copies_and_resumes(tmp_path: Path) -> None:
    settings = ("data.train_pairs=200", "data.valid_pairs=20", "decode.bleu_sentences=0")
    settings += ("train.bpe_dropout_copies=3", "train.bpe_dropout=0.3", "train.batch_tokens=400")
    settings += ("model.dim=16", "model.layers=1", "model.heads=2", "tokens.vocab_size=400")

    def trainer(folder: str, *more: str) -> Trainer:
        run = read_recipe("phrasebook", [*settings, "train.steps=8", "train.save_every=4", *more])
        return make_trainer(run, tmp_path / folder, torch.device("cpu"))

    one, broken, other = trainer("one"), trainer("broken"), trainer("other", "seed=2")
    tasks: Any = one.task, broken.task, other.task
    assert tasks[0].digest == tasks[1].digest != tasks[2].digest
    steps = tasks[0].order.per_epoch
    met = {row for step in range(steps) for row in tasks[0].order.rows(step).tolist()}
    assert met == set(range(600))
    assert tasks[0].per_epoch == -(-steps // 3)

    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    one.run()
    hurt(broken, 6, kill)
    with pytest.raises(Killed):
        broken.run()
    again = trainer("broken")
    assert again.progress.step == 4
    again.run()
    assert_same_bits(tmp_path / "broken", tmp_path / "one")
