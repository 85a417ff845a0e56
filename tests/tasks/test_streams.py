"""Language models: packed documents are read alone, and every token is predicted once."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.models.tiny import PARTS, VOCAB, tiny, words
from tests.tasks.small_texts import CPU
from torch import Tensor

from manyheads.data.language import Document, EncodedText, Texts
from manyheads.data.masking import Causal
from manyheads.errors import DataError, UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.relative import Relative
from manyheads.tasks.language import LanguageBatch, SlidingWindows, language_loss, stream_nll
from manyheads.tokenizer.train import Words

# Two rows, in which the second document begins elsewhere; a third one is cut by the end.
SIZES = ((3, 5, 4), (6, 1, 5))
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(s)) for s in SIZES])


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_a_packed_document_has_the_states_that_it_has_alone(position: str, core: str) -> None:
    config = tiny(GptConfig, position, core)
    if isinstance(config.position, Relative):  # a period counts from the beginning of a row
        position_alone = dataclasses.replace(config.position, period=None)
        config = dataclasses.replace(config, position=position_alone)
    model = config.build().double()
    tokens = words(*DOCUMENTS.shape)
    packed = model.hidden(tokens, documents=DOCUMENTS)
    for row, sizes in enumerate(SIZES):
        for own, states in zip(tokens[row].split(sizes), packed[row].split(sizes), strict=True):
            alone = model.hidden(own[None])[0]
            torch.testing.assert_close(states, alone, rtol=0, atol=1e-10)
    assert not torch.allclose(packed, model.hidden(tokens))


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_no_gradient_between_documents(position: str, core: str) -> None:
    """The state at t depends on what its own document has up to t, and on nothing else."""
    model = tiny(GptConfig, position, core).build().double()
    entered: list[Tensor] = []
    model.tokens.register_forward_hook(lambda module, given, out: entered.append(out))
    length = DOCUMENTS.shape[1]
    own = torch.arange(length)
    for documents in DOCUMENTS:
        # The same in each row: row t shows position t.
        states = model.hidden(
            words(1, length).expand(length, -1), documents=documents.repeat(length, 1)
        )
        read = (states[own, own] * torch.randn(8, dtype=torch.float64)).sum()
        (gradient,) = torch.autograd.grad(read, entered.pop())
        allowed = (documents[:, None] == documents) & (own[:, None] >= own)
        assert torch.equal((gradient != 0).any(-1), allowed)


def stream(count: int, documents: int = 1) -> EncodedText:
    """A text of so many tokens, ends included, in documents of random sizes."""
    random = np.random.default_rng(count)
    cuts = np.sort(random.choice(np.arange(1, count // 2), documents - 1, replace=False)) * 2
    sizes = np.diff([0, *cuts, count])
    lines = [" ".join(map(str, random.integers(9, size=size - 1))) for size in sizes]
    texts = Texts([Document([line], "text", 1) for line in lines], "sentences")
    tokenizer = Words().train([" ".join(map(str, range(9)))])
    text = EncodedText(texts, tokenizer, ends=True)
    assert len(text.flat) == count
    assert tokenizer.vocab_size < VOCAB
    return text


def tiny_gpt(context: int, position: str = "sinusoidal") -> Gpt:
    return tiny(GptConfig, position, max_length=context).build().double()


def nll(model: Gpt, before: np.ndarray, token: int) -> float:
    """−log P of one token after some others."""
    with torch.no_grad():
        logits = model(torch.from_numpy(before.astype(np.int64))[None])[0, -1]
    return -float(logits.log_softmax(-1)[token])


@pytest.mark.parametrize("tokens", [2, 3, 7, 16])
def test_every_token_but_the_first_is_predicted_once(tokens: int) -> None:
    for context in range(1, 20):
        for stride in (None, *range(1, 22)):
            passes = SlidingWindows.over(tokens, context, stride)
            assert passes.length == min(context, tokens - 1)
            predicted = [
                start + passes.length + 1 - ahead
                for start, new in zip(passes.starts, passes.new, strict=True)
                for ahead in range(new, 0, -1)
            ]
            assert predicted == list(range(1, tokens))
            assert passes.starts.min() >= 0
            # After the first, a window moves by the stride: that many tokens have it all before.
            moves = np.diff(passes.starts)[:-1]
            assert set(moves) <= {min(stride or context, passes.length)}


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_the_sum_is_that_of_single_predictions(stride: int | None, position: str) -> None:
    model, text = tiny_gpt(5, position), stream(18)
    passes = SlidingWindows.over(18, 5, stride)
    expected = 0.0
    for start, new in zip(passes.starts, passes.new, strict=True):
        for place in range(start + passes.length + 1 - new, start + passes.length + 1):
            expected += nll(model, text.flat[start:place], text.flat[place])
    for batch_tokens in (1, 12, 1000):
        found = stream_nll(model, text, Causal(), batch_tokens=batch_tokens, stride=stride)
        assert found == (pytest.approx(expected, abs=1e-9), 17)


def test_a_stride_of_one_gives_every_token_all_the_context_there_is() -> None:
    model, text = tiny_gpt(4), stream(13)
    expected = sum(
        nll(model, text.flat[max(0, place - 4) : place], text.flat[place]) for place in range(1, 13)
    )
    total, tokens = stream_nll(model, text, Causal(), batch_tokens=9, stride=1)
    assert (total, tokens) == (pytest.approx(expected, abs=1e-9), 12)
    assert total != pytest.approx(stream_nll(model, text, Causal(), batch_tokens=9)[0], abs=1e-3)


def test_packed_documents_are_scored_without_each_other() -> None:
    model, text = tiny_gpt(7), stream(20, documents=4)
    home = text.document_of(np.arange(20))
    expected = 0.0
    for place in range(1, 20):
        start = max((place - 1) // 7 * 7, int(text.document_starts[home[place - 1]]))
        if place > 14:  # the last window ends with the text
            start = max(12, int(text.document_starts[home[place - 1]]))
        if home[place] == home[place - 1]:  # the first token of a document is not predicted
            expected += nll(model, text.flat[start:place], text.flat[place])
    total, tokens = stream_nll(model, text, Causal(packing="documents"), batch_tokens=14)
    assert (total, tokens) == (pytest.approx(expected, abs=1e-9), 16)


def test_a_stream_shorter_than_the_context() -> None:
    model, text = tiny_gpt(30), stream(6)
    expected = sum(nll(model, text.flat[:place], text.flat[place]) for place in range(1, 6))
    for stride in (None, 1, 100):
        total, tokens = stream_nll(model, text, Causal(), batch_tokens=100, stride=stride)
        assert (total, tokens) == (pytest.approx(expected, abs=1e-9), 5)


def test_what_cannot_be_scored_is_refused() -> None:
    alone = Texts([Document([], "text", 1)], "text", name="short.txt")
    text = EncodedText(alone, Words().train(["one"]), ends=True)
    with pytest.raises(DataError, match=r"short.txt: one token has nothing before it"):
        stream_nll(tiny_gpt(4), text, Causal(), batch_tokens=9)
    with pytest.raises(UserError, match="stride=0"):
        stream_nll(tiny_gpt(4), stream(6), Causal(), batch_tokens=9, stride=0)


def test_the_loss_of_a_batch_is_that_of_its_logits() -> None:
    model, text = tiny_gpt(6), stream(40, documents=5)
    for objective in (Causal(), Causal(packing="documents")):
        batch = LanguageBatch.of(text, np.array([0, 9, 30]), 6, objective, CPU)
        assert torch.equal(batch.wanted[:, :-1], batch.tokens[:, 1:])
        logits = model.logits(model.hidden(batch.tokens, documents=batch.documents))
        home = text.document_of(np.array([0, 9, 30])[:, None] + np.arange(7))
        same = torch.from_numpy(home[:, 1:] == home[:, :-1])
        scored = torch.ones_like(same) if batch.documents is None else same
        expected = torch.nn.functional.cross_entropy(
            logits[scored], batch.wanted[scored], reduction="sum", label_smoothing=0.1
        )
        loss = language_loss(model, batch, 0.1)
        torch.testing.assert_close(loss.objective, expected)
        assert loss.count == batch.count == int(scored.sum())
        if batch.documents is not None:
            assert batch.documents.unique().numel() > 2
            other = dataclasses.replace(batch, documents=None)
            assert language_loss(model, other, 0.1).objective != loss.objective
