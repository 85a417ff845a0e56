"""What a masked language model reads, written out by hand, and which rows come when."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.tasks.small_texts import write_texts

from manyheads.data.language import TextData, Texts
from manyheads.data.masking import Masked, Replaced
from manyheads.data.mlm import MaskedOrder, MaskedText
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words

LENGTH = 24
PAIRS = Masked(pairs="next-sentence", rate=0.5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder: Path = write_texts(tmp_path_factory.mktemp("texts"))
    return TextData(folder=str(folder), lines="sentences").read("train")


@pytest.fixture(scope="module")
def tokenizer(texts: Texts) -> Tokenizer:
    plain = Words().train(texts.strings())
    return plain.with_frame([plain.classify], [plain.separator])


def test_a_pair_in_its_frame_word_by_word(texts: Texts, tokenizer: Tokenizer) -> None:
    """<cls> first <sep> second <sep>, then padding; segment 1 begins after the first <sep>."""
    data = MaskedText(texts, tokenizer, PAIRS, max_length=LENGTH)
    framed = data.drawn_pairs(40, np.random.default_rng(3))
    drawn = data.pairs.draw(40, np.random.default_rng(3))  # type: ignore[union-attr]
    assert framed.segments is not None
    assert framed.lengths is not None
    for row in range(40):
        first = data.text.flat[drawn.first_start[row] : drawn.first_stop[row]].tolist()
        second = data.text.flat[drawn.second_start[row] : drawn.second_stop[row]].tolist()
        sep = [tokenizer.separator]
        whole = [tokenizer.classify, *first, *sep, *second, *sep]
        rest = framed.tokens.shape[1] - len(whole)
        assert framed.tokens[row].tolist() == whole + rest * [tokenizer.pad]
        assert framed.lengths[row] == len(whole) <= LENGTH
        ones = len(second) + 1
        zeros = len(whole) - ones
        assert framed.segments[row].tolist() == [0] * zeros + [1] * ones + [0] * rest
        text = [False, *[True] * len(first), False, *[True] * len(second), False]
        assert framed.text[row].tolist() == text + [False] * rest
    batch = framed.hidden(*data.hide(framed, np.random.default_rng(4)), np.arange(40))
    assert batch.other is not None
    assert batch.other.tolist() == [int(not follows) for follows in drawn.follows]
    assert 0 < sum(batch.other.tolist()) < 40


@pytest.mark.parametrize("objective", [PAIRS, Masked(rate=0.5), Replaced(rate=0.5)])
def test_no_special_token_is_ever_hidden(
    objective: Masked | Replaced, texts: Texts, tokenizer: Tokenizer
) -> None:
    order = MaskedOrder(MaskedText(texts, tokenizer, objective, max_length=LENGTH), 8, 1, "texts")
    special = [tokenizer.classify, tokenizer.separator, tokenizer.pad]
    for step in range(20):
        framed, inputs, places = order.at(step)
        assert not np.isin(framed.tokens[places], special).any()
        kept = np.isin(framed.tokens, special)
        assert (inputs[kept] == framed.tokens[kept]).all()
        assert places.any()
        if isinstance(objective, Replaced):  # its generator fills masks alone
            assert (inputs[places] == tokenizer.mask).all()


@pytest.mark.parametrize("pairs", ["none", "next-sentence"])
def test_static_rows_differ_and_come_again_as_they_were(
    pairs: str, texts: Texts, tokenizer: Tokenizer
) -> None:
    objective = Masked(masking="static", pairs=pairs)  # type: ignore[arg-type]
    data = MaskedText(texts, tokenizer, objective, max_length=LENGTH)
    order = MaskedOrder(data, 1, 1, "texts")
    count = order.windows.per_epoch
    seen: list[dict[bytes, int]] = []
    for epoch in range(2):
        rows: dict[bytes, int] = {}
        for step in range(epoch * count, (epoch + 1) * count):
            framed, inputs, places = order.at(step)
            length = framed.tokens.shape[1] if framed.lengths is None else int(framed.lengths[0])
            row = b"".join(x[:, :length].tobytes() for x in (framed.tokens, inputs, places))
            rows[row] = rows.get(row, 0) + 1
        seen.append(rows)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 0.9 * count


def test_dynamic_masking_hides_elsewhere_each_time(texts: Texts, tokenizer: Tokenizer) -> None:
    order = MaskedOrder(MaskedText(texts, tokenizer, Masked(), max_length=LENGTH), 4, 1, "texts")
    places = [order.at(step)[2] for step in range(5)]
    assert all(not np.array_equal(a, b) for a, b in pairwise(places))
    for one, other in zip(order.at(3)[1:], order.at(3)[1:], strict=True):
        assert np.array_equal(one, other)
