"""Labelled texts as batches: rows that are too long, and the loss."""

from types import SimpleNamespace

import pytest
import torch

from manyheads.data.labelled import Labelled
from manyheads.errors import DataError
from manyheads.models.heads import Classify
from manyheads.tasks.classification import EncodedLabels, label_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words

TEXTS = ["one two", "one two three four five", "two"]
PART = Labelled(texts=[*TEXTS], labels=["a", "b", "a"], lines=[2, 3, 4], name="t.tsv")
MODEL = SimpleNamespace(max_length=5, head=Classify(labels=("a", "b")))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    plain = Words().train(TEXTS)
    return plain.with_frame([plain.classify], [plain.separator])


def test_a_long_text_is_truncated_left_out_or_refused(tokenizer: Tokenizer) -> None:
    truncated = EncodedLabels(PART, tokenizer, MODEL, "truncate")
    assert truncated.tokens.lengths.tolist() == [4, 5, 3]
    words = tokenizer.encode("one two three")
    assert truncated.tokens.flat[4:9].tolist() == [
        *(tokenizer.classify, *words, tokenizer.separator),
    ]
    assert (truncated.labels.tolist(), len(truncated.notes)) == ([0, 1, 0], 1)
    skipped = EncodedLabels(PART, tokenizer, MODEL, "skip")
    assert (skipped.tokens.lengths.tolist(), skipped.labels.tolist()) == ([4, 3], [0, 0])
    assert (skipped.lines, len(skipped.notes)) == ([2, 4], 1)
    with pytest.raises(DataError, match=r"t.tsv: line 3 has 7 tokens.*max_length=5"):
        EncodedLabels(PART, tokenizer, MODEL, "refuse")


def test_the_loss_is_its_formula() -> None:
    logits, probabilities = torch.randn(4, 5), torch.rand(4, 5).softmax(-1)
    labels = probabilities.argmax(-1)
    log_p = logits.log_softmax(-1)
    for target, q in ((probabilities, probabilities), (labels, torch.eye(5)[labels])):
        loss = label_loss(logits, target, 0.2)
        torch.testing.assert_close(loss.nll, -(q * log_p).sum())
        torch.testing.assert_close(loss.objective, -((0.8 * q + 0.2 / 5) * log_p).sum())
        assert loss.count == 4
    numbers = torch.randn(4)
    squares = (logits[:, 0] - numbers).square().sum()
    torch.testing.assert_close(label_loss(logits[:, :1], numbers, 0.2).objective, squares)
