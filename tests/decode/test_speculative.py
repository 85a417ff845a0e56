"""Speculative decoding: a draft changes neither the greedy text nor the distribution of texts."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import LIMIT, PROMPTS, schemes, toy_gpt
from tests.tasks.small_texts import SIZES, recipe_trainer
from tests.test_cli import call, mistake, result
from torch import Tensor
from toys import END, toy_tokenizer

from manyheads.decode.beam import Decode, LogitsConstraints
from manyheads.decode.generate import GREEDY, Generator
from manyheads.decode.sample import Sample, filtered
from manyheads.decode.speculative import Acceptance, CachedText, Speculation, Speculative
from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig


def with_draft(
    model: Gpt, draft: Gpt, ahead: int = 3, **decode: Any
) -> tuple[Generator, Speculative]:
    plain = Generator(model, toy_tokenizer(), Decode(**decode))
    return plain, Speculative(model, plain.tokenizer, plain.decode, draft=draft, ahead=ahead)


@schemes
def test_the_greedy_text_is_the_models(position: str, core: str) -> None:
    """Some proposals of another model are accepted, others rejected."""
    plain, fast = with_draft(toy_gpt(position, core), toy_gpt(seed=99, layers=1))
    expected = plain.sample(PROMPTS, LIMIT, GREEDY)
    assert fast.sample(PROMPTS, LIMIT, GREEDY) == expected
    assert list(fast.stream(PROMPTS[2], LIMIT)) == expected[2]
    assert 0 < fast.acceptance.accepted < fast.acceptance.proposed


@pytest.mark.parametrize("at_limit", ["force-eos", "force-eos-free", "truncate"])
@pytest.mark.parametrize("more", [{}, {"min_length": 5}, {"forced_bos": 9}], ids=str)
def test_constraints_hold_for_proposals(at_limit: str, more: dict[str, Any]) -> None:
    draft = toy_gpt(seed=3, layers=1)
    plain, fast = with_draft(toy_gpt(layers=1), draft, at_limit=at_limit, **more)
    for limit in (1, 2, LIMIT):
        expected = plain.sample(PROMPTS[:2], limit, GREEDY)
        assert fast.sample(PROMPTS[:2], limit, GREEDY) == expected


def test_a_draft_that_is_the_model_is_always_accepted() -> None:
    """And the model runs far fewer times."""
    _, fast = with_draft(toy_gpt("rotary"), toy_gpt("rotary"), ahead=4, min_length=20)
    passes: list[int] = []
    fast.model.decoder.register_forward_hook(lambda m, i, out: passes.append(1))
    for sample in (GREEDY, Sample(seed=2)):
        fast.sample([PROMPTS[0]], 20, sample)
    assert fast.acceptance.accepted == fast.acceptance.proposed > 0
    assert len(passes) == 2 * 4


def test_a_draft_with_fewer_positions_stops_proposing() -> None:
    draft = toy_gpt("learned", max_length=6)
    plain, fast = with_draft(toy_gpt("rotary"), draft, min_length=12)
    assert fast.sample(PROMPTS[:3], 12, GREEDY) == plain.sample(PROMPTS[:3], 12, GREEDY)
    assert fast.acceptance.proposed > 0


def test_a_seed_gives_the_same_text_in_any_batch() -> None:
    _, fast = with_draft(toy_gpt(layers=1), toy_gpt(seed=3, layers=1))
    texts = fast.sample(PROMPTS, LIMIT, Sample(seed=5))
    assert fast.sample(PROMPTS[2:], LIMIT, Sample(seed=5), first=2) == texts[2:]
    assert list(fast.stream(PROMPTS[1], LIMIT, Sample(seed=5), 1)) == texts[1]
    assert fast.sample(PROMPTS, LIMIT, Sample(seed=6)) != texts


class Chain(CachedText):
    """A Markov chain: logits depend on the last token only."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.max_length = table, None

    def logits(self, text: list[int], count: int) -> Tensor:
        return self.table[text[-count:]].clone()


@pytest.mark.parametrize(
    ("ahead", "changes"), [(1, {}), (3, {"temperature": 0.6}), (2, {"top_k": 2})], ids=str
)
def test_texts_have_the_distribution_of_the_model(ahead: int, changes: dict[str, Any]) -> None:
    """All texts of three tokens of a chain: χ² is at most 4 standard errors off."""
    torch.manual_seed(7)
    tokens, limit, draws = 4, 3, 1000
    model, draft = (1.5 * torch.randn(tokens, tokens) for _ in range(2))
    sample, acceptance = Sample(seed=1, **changes), Acceptance()
    constraints = LogitsConstraints(Decode(at_limit="truncate"), END, [], torch.device("cpu"))
    random = torch.Generator().manual_seed(4)
    text = Speculation(Chain(model), Chain(draft), constraints, sample, random, acceptance)
    counts = Counter(tuple(text.generate([0], limit, ahead)) for _ in range(draws))
    share = filtered(model, sample).softmax(-1)
    chi_square, cells = 0.0, 0
    texts = product(range(tokens), repeat=limit)
    for ended in {x[: x.index(END) + 1] if END in x else x for x in texts}:
        expected = float(draws)
        for before, token in zip((0, *ended), ended, strict=False):
            expected *= float(share[before, token])
        count = counts.pop(ended, 0)
        assert expected > 0 or not count
        if expected >= 4:  # χ² needs large counts
            chi_square, cells = chi_square + (count - expected) ** 2 / expected, cells + 1
    assert cells > 4
    assert chi_square <= cells + 4 * (2 * cells) ** 0.5
    assert not counts
    assert 0 < acceptance.accepted < acceptance.proposed


def test_a_draft_of_other_tokens_is_refused() -> None:
    other = GptConfig(vocab_size=99, dim=8, layers=1, heads=1).build()
    with pytest.raises(UserError, match="the same tokenizer"):
        with_draft(toy_gpt(), other)
    with pytest.raises(UserError, match="ahead"):
        with_draft(toy_gpt(), toy_gpt(), ahead=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model, a smaller one with its tokenizer, and one with another tokenizer."""
    folder = tmp_path_factory.mktemp("drafts")
    for name, text, layers in (("model", "banana", 2), ("draft", "banana", 1), ("other", "fig", 1)):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(f"{text} bandana\n" * 40, encoding="utf-8")
        settings = ("tokens=characters", "train.steps=1", "train.batch_rows=2")
        settings += (f"model.layers={layers}", f"data.folder={folder / name}")
        recipe_trainer("language", folder / f"run-{name}", *SIZES, *settings).run()
    return {name: folder / f"run-{name}" for name in ("model", "draft", "other")}


def test_the_command_takes_a_draft(runs: dict[str, Path]) -> None:
    command = ["generate", str(runs["model"]), "-p", "ban", "--temperature", "0"]
    expected = result(*command, "--max-new-tokens", "12")
    code, text, messages = call(*command, "--max-new-tokens", "12", "--draft", runs["draft"])
    assert (code, text) == (0, expected)
    assert "proposed tokens were accepted" in messages
    assert "another tokenizer" in mistake(*command, "--draft", str(runs["other"]))
    assert "--beam" in mistake(*command[:4], "--draft", str(runs["draft"]), "--beam", "2")
