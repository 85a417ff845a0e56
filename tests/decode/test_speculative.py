"""A draft that proposes changes nothing: the greedy text, and how likely every other one is."""

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
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample, filtered
from manyheads.decode.speculative import Acceptance, CachedText, Speculation, Speculative
from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig


def helped(model: Gpt, draft: Gpt, ahead: int = 3, **decode: Any) -> tuple[Generator, Speculative]:
    plain = Generator(model, toy_tokenizer(), Decode(**decode))
    return plain, Speculative(model, plain.tokenizer, plain.decode, draft=draft, ahead=ahead)


@schemes
def test_the_greedy_text_is_that_of_the_model(position: str, core: str) -> None:
    """Whatever the draft proposes: another model's text, taken in part."""
    draft = toy_gpt("sinusoidal", "fused", seed=99, layers=1)
    plain, fast = helped(toy_gpt(position, core), draft)
    greedy = Sample(temperature=0.0)
    wanted = plain.sample(PROMPTS, LIMIT, greedy)
    assert fast.sample(PROMPTS, LIMIT, greedy) == wanted
    assert list(fast.stream(PROMPTS[2], LIMIT)) == wanted[2]
    assert 0 < fast.acceptance.accepted < fast.acceptance.proposed


@pytest.mark.parametrize("at_limit", ["force-eos", "force-eos-free", "truncate"])
@pytest.mark.parametrize("more", [{}, {"min_length": 5}, {"forced_bos": 9}], ids=str)
def test_the_rules_of_the_text_are_those_of_the_model(at_limit: str, more: dict[str, Any]) -> None:
    plain, fast = helped(toy_gpt(layers=1), toy_gpt(seed=3, layers=1), at_limit=at_limit, **more)
    greedy = Sample(temperature=0.0)
    for limit in (1, 2, LIMIT):
        wanted = plain.sample(PROMPTS[:2], limit, greedy)
        assert fast.sample(PROMPTS[:2], limit, greedy) == wanted


def test_a_draft_that_is_the_model_is_always_right() -> None:
    """Every proposal is taken, drawn or not, and the model reads far fewer times."""
    _, fast = helped(toy_gpt("rotary"), toy_gpt("rotary"), ahead=4, min_length=20)
    passes: list[int] = []
    fast.model.decoder.register_forward_hook(lambda m, i, out: passes.append(1))
    for sample in (Sample(temperature=0.0), Sample(seed=2)):
        fast.sample([PROMPTS[0]], 20, sample)
    assert fast.acceptance.accepted == fast.acceptance.proposed > 0
    assert len(passes) == 2 * 4


def test_a_draft_with_fewer_positions_stops_proposing() -> None:
    """Beyond its table the model goes on alone."""
    plain, fast = helped(toy_gpt("rotary"), toy_gpt("learned", max_length=6), min_length=12)
    greedy = Sample(temperature=0.0)
    assert fast.sample(PROMPTS[:3], 12, greedy) == plain.sample(PROMPTS[:3], 12, greedy)
    assert fast.acceptance.proposed > 0


def test_a_seed_is_a_text() -> None:
    """The same whatever is written beside it; another one for another seed."""
    _, fast = helped(toy_gpt(layers=1), toy_gpt(seed=3, layers=1))
    whole = fast.sample(PROMPTS, LIMIT, Sample(seed=5))
    assert fast.sample(PROMPTS[2:], LIMIT, Sample(seed=5), first=2) == whole[2:]
    assert list(fast.stream(PROMPTS[1], LIMIT, Sample(seed=5), 1)) == whole[1]
    assert fast.sample(PROMPTS, LIMIT, Sample(seed=6)) != whole


class Chain(CachedText):
    """Logits that hang on the last token alone."""

    max_length = None

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def logits(self, text: list[int], count: int) -> Tensor:
        return self.table[text[-count:]].clone()


@pytest.mark.parametrize(
    ("ahead", "chosen"), [(1, {}), (3, {"temperature": 0.6}), (2, {"top_k": 2})], ids=str
)
def test_texts_are_as_frequent_as_the_model_alone_makes_them(
    ahead: int, chosen: dict[str, Any]
) -> None:
    """All texts of three tokens of a chain, by enumeration: χ² is no more than 4 errors off."""
    torch.manual_seed(7)
    tokens, limit, draws = 4, 3, 1000
    model, draft = (1.5 * torch.randn(tokens, tokens) for _ in range(2))
    sample, acceptance = Sample(seed=1, **chosen), Acceptance()
    constraints = LogitsConstraints(Decode(at_limit="truncate"), END, [], torch.device("cpu"))
    random = torch.Generator().manual_seed(4)
    text = Speculation(Chain(model), Chain(draft), constraints, sample, random, acceptance)
    counts = Counter(tuple(text.generate([0], limit, ahead)) for _ in range(draws))
    share = filtered(model, sample).softmax(-1)
    chi_square, cells = 0.0, 0
    for written in {_to_end(text) for text in product(range(tokens), repeat=limit)}:
        expected = float(draws)
        for before, token in zip((0, *written), written, strict=False):
            expected *= float(share[before, token])
        found = counts.pop(written, 0)
        assert expected > 0 or not found
        if expected >= 4:  # of rarer ones a count says little
            chi_square, cells = chi_square + (found - expected) ** 2 / expected, cells + 1
    assert cells > 4
    assert chi_square <= cells + 4 * (2 * cells) ** 0.5
    assert not counts
    assert 0 < acceptance.accepted < acceptance.proposed


def _to_end(text: tuple[int, ...]) -> tuple[int, ...]:
    return text[: text.index(END) + 1] if END in text else text


def test_what_cannot_help_is_refused() -> None:
    """A draft of other tokens; proposing nothing."""
    other = GptConfig(vocab_size=99, dim=8, layers=1, heads=1).build()
    with pytest.raises(UserError, match="the same tokenizer"):
        helped(toy_gpt(), other)
    with pytest.raises(UserError, match="ahead"):
        helped(toy_gpt(), toy_gpt(), ahead=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model, a smaller one with its tokenizer, and one of other words."""
    folder = tmp_path_factory.mktemp("drafts")
    made = {}
    for name, text, changes in (
        ("model", "banana bandana\n", ("model.layers=2",)),
        ("draft", "banana bandana\n", ()),
        ("other", "orange\n", ()),
    ):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text * 40, encoding="utf-8")
        settings = ("tokens=characters", "train.steps=1", "train.batch_rows=2", *changes)
        where = f"data.folder={folder / name}"
        made[name] = folder / f"run-{name}"
        recipe_trainer("language", made[name], *SIZES, where, *settings).run()
    return made


def test_the_command_writes_the_same_and_tells_how_often(runs: dict[str, Path]) -> None:
    command = ["generate", str(runs["model"]), "-p", "ban", "--temperature", "0"]
    alone = result(*command, "--max-new-tokens", "12")
    code, fast, said = call(*command, "--max-new-tokens", "12", "--draft", runs["draft"])
    assert (code, fast) == (0, alone)
    assert "proposed tokens were accepted" in said


def test_the_command_refuses_what_cannot_help(runs: dict[str, Path]) -> None:
    command = ("generate", str(runs["model"]), "-p", "ban", "--draft")
    assert "another tokenizer" in mistake(*command, str(runs["other"]))
    assert "leave out --beam" in mistake(*command, str(runs["draft"]), "--beam", "2")
