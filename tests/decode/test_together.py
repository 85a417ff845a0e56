"""Several models write what a search over the mean of their probabilities writes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_beam import plain_beam
from torch import Tensor
from toys import BANNED, LONGEST, full_pass, same, toy_model, toy_source, toy_tokenizer

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.beam import BeamSearch, Decode
from manyheads.decode.ensemble import Steppers, together
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Seq2SeqStepper, Translator
from manyheads.errors import UserError

LINES = ["a b c", "h", "c d e f g h a b", "b b", "g a c e"]


def translators(*models: torch.nn.Module, **decode: Any) -> list[Translator]:
    how = Decode(**{"longest_ratio": 1.5, "longest_extra": 3, "banned": (0, 1), **decode})
    return [Translator(model, toy_tokenizer(), how) for model in models]  # type: ignore[arg-type]


@pytest.mark.parametrize("beam", [1, 3])
def test_each_token_is_by_the_mean_of_the_probabilities(beam: int) -> None:
    """Models of other sizes too, whole passes against steps, while sentences leave the batch."""
    models = [toy_model(), toy_model("rotary"), toy_model(dim=32, layers=1, seed=5)]
    torch.manual_seed(3)
    source, real = toy_source(3, 6, 2, 5, 4, 7, 1, 8, 2)
    passes = [full_pass(model, source, real) for model in models]

    def mean(homes: Tensor, prefixes: Tensor) -> Tensor:
        with torch.no_grad():
            shares = [one(homes, prefixes).double().softmax(-1) for one in passes]
        return torch.stack(shares).mean(0).log()

    decode, limits = Decode(beam=beam), [9, 7, 12, 10, 8, 11, 9, 6, 10]
    search = BeamSearch(decode, start=1, end=2, banned=BANNED)
    steps = Steppers([Seq2SeqStepper(model, source, real) for model in models])
    found = search(steps, torch.tensor(limits))
    wanted = [plain_beam(mean, row, limit, BANNED, decode) for row, limit in enumerate(limits)]
    same(found, wanted)
    alone = search(Seq2SeqStepper(models[0], source, real), torch.tensor(limits))
    assert [line[0].tokens for line in alone] != [line[0].tokens for line in found]


def test_a_model_with_itself_writes_what_it_writes_alone() -> None:
    [alone] = translators(toy_model(), beam=3)
    same(together([alone, alone]).search(LINES), alone.search(LINES))
    assert together([alone]) is alone


def test_who_stands_first_makes_no_difference() -> None:
    members = translators(toy_model(), toy_model("alibi"), beam=3)
    same(together(members).search(LINES), together(members[::-1]).search(LINES))
    sample = Sample(seed=4)
    drawn = together(members).sample(LINES, sample)
    assert drawn == together(members[::-1]).sample(LINES, sample)
    assert drawn != members[0].sample(LINES, sample)


def test_another_kind_of_model_may_be_among_them() -> None:
    """A recurrent one remembers states instead of keys."""
    torch.manual_seed(2)
    rnn = RnnConfig(vocab_size=15, dim=16).build().double().eval()
    both = together(translators(toy_model(), rnn, beam=2))
    assert both.max_length == min(LONGEST, rnn.config.max_length)
    assert len(both.translate(LINES)) == len(LINES)


def test_what_cannot_write_together_is_refused() -> None:
    first, second = translators(toy_model(), toy_model("rotary"))
    with pytest.raises(UserError, match="different tokenizers"):
        together([first, replace(second, tokenizer=toy_tokenizer("<nothing>"))])
    with pytest.raises(UserError, match="begin and end texts with different tokens"):
        together([first, replace(second, decode=replace(second.decode, start=5))])
    larger = Translator(toy_model(vocab_size=16), first.tokenizer, first.decode)
    with pytest.raises(UserError, match="different numbers of them"):
        together([first, larger])
