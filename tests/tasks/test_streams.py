"""Language models: packed documents do not see each other; every token is predicted once."""

import numpy as np
import pytest
import torch
from tests.models.tiny import PARTS, VOCAB, tiny, words
from tests.tasks.small_texts import CPU
from torch import Tensor

from manyheads.data.language import EncodedText, Texts
from manyheads.data.masking import Causal
from manyheads.errors import DataError, UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.tasks.language import LanguageBatch, SlidingWindows, language_loss, stream_nll
from manyheads.tokenizer.train import Words

# Two rows, in which the second document begins elsewhere; a third one is cut by the end.
SIZES = ((3, 5, 4), (6, 1, 5))
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(s)) for s in SIZES])


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_a_packed_document_has_the_states_of_an_unpacked_one(position: str, core: str) -> None:
    model = tiny(GptConfig, position, core).build().double()
    tokens = words(*DOCUMENTS.shape)
    packed = model.hidden(tokens, documents=DOCUMENTS)
    for row, sizes in enumerate(SIZES):
        parts = zip(tokens[row].split(sizes), packed[row].split(sizes), strict=True)
        for document, states in parts:
            unpacked = model.hidden(document[None])[0]
            torch.testing.assert_close(states, unpacked, rtol=0, atol=1e-10)
    assert not torch.allclose(packed, model.hidden(tokens))


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_no_gradient_flows_between_documents_or_from_the_future(position: str, core: str) -> None:
    model = tiny(GptConfig, position, core).build().double()
    embeddings: list[Tensor] = []
    model.tokens.register_forward_hook(lambda module, inputs, out: embeddings.append(out))
    length = DOCUMENTS.shape[1]
    index = torch.arange(length)
    for documents in DOCUMENTS:
        # The same text in each row: row t shows the state at position t.
        tokens = words(1, length).expand(length, -1)
        states = model.hidden(tokens, documents=documents.repeat(length, 1))
        total = (states[index, index] * torch.randn(8, dtype=torch.float64)).sum()
        (gradient,) = torch.autograd.grad(total, embeddings.pop())
        allowed = (documents[:, None] == documents) & (index[:, None] >= index)
        assert torch.equal((gradient != 0).any(-1), allowed)


def stream(count: int, documents: int = 1) -> EncodedText:
    """A text of so many tokens, end tokens included, in documents of random sizes."""
    random = np.random.default_rng(count)
    cuts = np.sort(random.choice(np.arange(1, count // 2), documents - 1, replace=False)) * 2
    sizes = np.diff([0, *cuts, count])
    lines = [" ".join(map(str, random.integers(9, size=size - 1))) for size in sizes]
    texts = Texts([[line] for line in lines], "sentences")
    tokenizer = Words().train([" ".join(map(str, range(9)))])
    assert tokenizer.vocab_size < VOCAB
    text = EncodedText(texts, tokenizer, ends=True)
    assert len(text.flat) == count
    return text


def tiny_gpt(context: int, position: str = "sinusoidal") -> Gpt:
    return tiny(GptConfig, position, max_length=context).build().double()


@torch.no_grad()
def token_nll(model: Gpt, context: np.ndarray, token: int) -> float:
    """−log P of one token after its context."""
    logits = model(torch.from_numpy(context.astype(np.int64))[None])[0, -1]
    return -float(logits.log_softmax(-1)[token])


@pytest.mark.parametrize("tokens", [2, 3, 7, 16])
def test_windows_predict_every_token_but_the_first_once(tokens: int) -> None:
    for context in range(1, 20):
        for stride in (None, *range(1, 22)):
            windows = SlidingWindows.over(tokens, context, stride)
            assert windows.length == min(context, tokens - 1)
            ends = windows.starts + windows.length + 1
            predicted = [
                position
                for end, new in zip(ends, windows.new, strict=True)
                for position in range(end - new, end)
            ]
            assert predicted == list(range(1, tokens))
            assert windows.starts.min() >= 0
            assert {*np.diff(windows.starts)[:-1]} <= {min(stride or context, windows.length)}


@pytest.mark.parametrize(
    ("count", "context", "stride"),
    [(18, 5, None), (18, 5, 2), (18, 5, 9), (13, 4, 1), (6, 30, None), (6, 30, 1)],
)
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_the_nll_of_a_stream_is_the_sum_of_single_predictions(
    count: int, context: int, stride: int | None, position: str
) -> None:
    """A stride of 1 gives every token the largest context; the batch size does not matter."""
    model, text = tiny_gpt(context, position), stream(count)
    windows = SlidingWindows.over(count, context, stride)
    expected = 0.0
    for start, new in zip(windows.starts, windows.new, strict=True):
        end = start + windows.length + 1
        for t in range(end - new, end):
            assert stride != 1 or t - start == min(t, windows.length)
            expected += token_nll(model, text.flat[start:t], text.flat[t])
    for batch_tokens in (1, 12, 1000):
        result = stream_nll(model, text, [windows], Causal(), batch_tokens)
        assert result == (pytest.approx(expected, abs=1e-9), count - 1)


def test_packed_documents_are_scored_without_each_other() -> None:
    model, text = tiny_gpt(7), stream(20, documents=4)
    document = text.document_of(np.arange(20))
    expected = 0.0
    for t in range(1, 20):
        window = 12 if t > 14 else (t - 1) // 7 * 7  # the last window ends with the text
        start = max(window, int(text.document_starts[document[t - 1]]))
        if document[t] == document[t - 1]:  # the first token of a document is not predicted
            expected += token_nll(model, text.flat[start:t], text.flat[t])
    windows = SlidingWindows.over(20, 7)
    result = stream_nll(model, text, [windows], Causal(packing="documents"), 14)
    assert result == (pytest.approx(expected, abs=1e-9), 16)


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(DataError, match="one token"):
        SlidingWindows.over(1, 4)
    with pytest.raises(UserError, match="stride=0"):
        SlidingWindows.over(6, 4, 0)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_the_loss_of_a_batch_is_that_of_its_logits(packing: str) -> None:
    model, text, starts = tiny_gpt(6), stream(40, documents=5), np.array([0, 9, 30])
    batch = LanguageBatch.of(text, starts, 6, Causal(packing=packing), CPU)  # type: ignore[arg-type]
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    logits = model.logits(model.hidden(batch.tokens, documents=batch.documents))
    mask = torch.ones_like(batch.tokens, dtype=torch.bool)
    if packing == "documents":
        document = text.document_of(starts[:, None] + np.arange(7))
        mask = torch.from_numpy(document[:, 1:] == document[:, :-1])
        assert not mask.all()
    expected = torch.nn.functional.cross_entropy(
        logits[mask], batch.labels[mask], reduction="sum", label_smoothing=0.1
    )
    loss = language_loss(model, batch, 0.1)
    torch.testing.assert_close(loss.objective, expected)
    assert loss.count == batch.count == int(mask.sum())
