"""The best continuations, found by looking at blocks, are those found by ordering every row."""

import pytest
import torch

from manyheads.decode import hypotheses
from manyheads.decode.hypotheses import BLOCK, LARGE, NEVER, continuations
from manyheads.decode.logits import log_mass


@pytest.mark.parametrize("vocabulary", [LARGE, LARGE + 1, LARGE + BLOCK - 1, 17 * BLOCK + 5])
@pytest.mark.parametrize("beam", [1, 2, 5, 40])
def test_blocks_have_the_same_continuations(
    vocabulary: int, beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(vocabulary + beam)
    logits = 3 * torch.randn(4 * beam, vocabulary)
    logits[1, torch.rand(vocabulary) < 0.9] = NEVER  # few may be written
    logits[0, -1] += 20  # one of those that no block has room for
    alive = torch.randn(4, beam) - 5
    alive[2, 1:] = NEVER  # one living hypothesis, as at first
    total = log_mass(logits)
    log, parents, tokens = continuations(alive, logits, total)
    monkeypatch.setattr(hypotheses, "LARGE", vocabulary + 1)
    wanted, *_ = continuations(alive, logits, total)
    assert torch.equal(log, wanted)
    # Equal numbers may stand in another order, but each stands where it is said to.
    rows = torch.arange(4)[:, None] * beam + parents
    again = alive.flatten()[rows] + (logits[rows, tokens] - total[rows, 0])
    assert torch.equal(log, again)
    pairs = parents * vocabulary + tokens
    assert all(len(set(row.tolist())) == 2 * beam for row in pairs)


@pytest.mark.parametrize("most", [1, 6, 40])
def test_as_many_as_are_told(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one hypothesis each, also more than there are blocks."""
    torch.manual_seed(most)
    alive, logits = torch.randn(5, 1), 3 * torch.randn(5, LARGE + 7)
    total = log_mass(logits)
    best, places = (alive + logits.log_softmax(-1)).topk(most)
    for large in (LARGE, 2 * LARGE):
        monkeypatch.setattr(hypotheses, "LARGE", large)
        log, parents, tokens = continuations(alive, logits, total, most)
        torch.testing.assert_close(log, best)
        assert torch.equal(tokens, places)
        assert not parents.any()


def test_the_mass_is_what_the_exponentials_sum_to() -> None:
    torch.manual_seed(1)
    logits = 9 * torch.randn(6, 700)
    logits[0] += 1000
    logits[1] -= 1000
    logits[2, 3:] = NEVER
    wanted = logits.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(log_mass(logits).double(), wanted, rtol=1e-6, atol=1e-6)
