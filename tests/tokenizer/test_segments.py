"""A text cut in other ways is the same text, and which way is drawn is settled by the seed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import assert_same_bits, hurt

from manyheads.data.translation import Corpus, EncodedPairs, PhrasebookData
from manyheads.errors import UserError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tokenizer.bpe_dropout import Segmenter
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


def lengths(found: list[list[int]]) -> list[int]:
    return [len(ids) for ids in found]


def test_with_no_merge_left_out_it_is_the_tokenizer(bpe: Tokenizer, corpus: Corpus) -> None:
    texts = [*TEXTS, *corpus.sources, *corpus.targets]
    assert Segmenter(bpe, 0.0, seed=1).encode_batch(texts, 0) == bpe.encode_batch(texts)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_nothing_of_a_text_is_lost(bpe: Tokenizer, corpus: Corpus, share: float) -> None:
    texts = [*TEXTS, *corpus.sources[:50]]
    found = Segmenter(bpe, share, seed=1).encode_batch(texts, 3)
    assert bpe.decode_batch(found) == texts
    assert sum(lengths(found)) > sum(lengths(bpe.encode_batch(texts)))


def test_the_more_is_left_out_the_smaller_the_pieces(bpe: Tokenizer, corpus: Corpus) -> None:
    totals = [
        sum(lengths(Segmenter(bpe, share, seed=1).encode_batch(corpus.targets, 0)))
        for share in (0.0, 0.1, 0.3, 0.6, 0.9)
    ]
    assert totals == sorted(totals)
    letters = sum(len(text.encode()) for text in corpus.targets)
    assert 0.8 * letters < totals[-1] <= letters


def test_seed_and_copy_settle_it(bpe: Tokenizer, corpus: Corpus) -> None:
    texts = corpus.sources

    def cut(seed: int, *copy: int) -> list[list[int]]:
        return Segmenter(bpe, 0.2, seed).encode_batch(texts, *copy)

    assert cut(1, 0) == cut(1, 0)
    one = Segmenter(bpe, 0.2, 1)
    one.encode_batch(corpus.targets, 5)  # whatever was cut before
    assert one.encode_batch(texts, 0) == cut(1, 0)
    assert cut(1, 0) != cut(1, 1)
    assert cut(1, 0) != cut(2, 0)


def test_only_merges_can_be_left_out(corpus: Corpus) -> None:
    pieces = WordPiece(vocab_size=600).train(corpus.sources)
    with pytest.raises(UserError, match="tokens=bpe"):
        Segmenter(pieces, 0.1, seed=1)
    for settings in (["tokens=wordpiece"], ["tokens=characters"]):
        with pytest.raises(UserError, match="tokens=bpe"):
            read_recipe("phrasebook", [*settings, "train.bpe_dropout_copies=2"])
    with pytest.raises(UserError, match=r"train\.bpe_dropout_copies"):
        read_recipe("phrasebook", ["train.bpe_dropout=0.2"])
    with pytest.raises(UserError, match=r"train\.bpe_dropout_copies"):
        read_recipe("gpt-mini", ["data.folder=x", "train.bpe_dropout_copies=2"])


def test_copies_come_after_the_pairs_as_they_are(bpe: Tokenizer, corpus: Corpus) -> None:
    plain, more = (EncodedPairs(corpus, bpe, 64) for _ in range(2))
    more.cut_anew(corpus, Segmenter(bpe, 0.3, seed=1), 2, max_length=64)
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
    tight.cut_anew(corpus, Segmenter(bpe, 0.9, seed=1), 1, max_length=longest)
    assert int(tight.lengths.max()) == longest  # what would be longer stays as it was
    assert tight.sources.rows()[count:] != plain.sources.rows()


def test_a_run_reads_all_copies_and_resumes(tmp_path: Path) -> None:
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
