"""Several models write what a search over the mean of their probabilities writes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_beam import plain_search
from torch import Tensor
from toys import (
    BANNED,
    LONGEST,
    START,
    beam_search,
    full_pass,
    same,
    toy_model,
    toy_source,
    toy_tokenizer,
)

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.beam import Decode
from manyheads.decode.decoder import Seq2SeqSession
from manyheads.decode.ensemble import EnsembleSession, ensemble
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.errors import UserError

LINES = ["a b c", "h", "c d e f g h a b", "b b", "g a c e"]


def translators(*models: torch.nn.Module, **decode: Any) -> list[Translator]:
    how = Decode(
        **{"max_length_ratio": 1.5, "max_length_extra": 3, "suppress_tokens": (0, 1), **decode}
    )
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
    search = beam_search(decode)
    session = EnsembleSession([Seq2SeqSession(model, source, real) for model in models])
    found = search(session, START, torch.tensor(limits))
    wanted = [plain_search(mean, row, limit, BANNED, decode) for row, limit in enumerate(limits)]
    same(found, wanted)
    alone = search(Seq2SeqSession(models[0], source, real), START, torch.tensor(limits))
    assert [line[0].tokens for line in alone] != [line[0].tokens for line in found]


def test_a_model_with_itself_writes_what_it_writes_alone() -> None:
    [alone] = translators(toy_model(), beam=3)
    same(ensemble([alone, alone]).search(LINES), alone.search(LINES))
    assert ensemble([alone]) is alone


def test_who_stands_first_makes_no_difference() -> None:
    members = translators(toy_model(), toy_model("alibi"), beam=3)
    same(ensemble(members).search(LINES), ensemble(members[::-1]).search(LINES))
    sample = Sample(seed=4)
    drawn = ensemble(members).sample(LINES, sample)
    assert drawn == ensemble(members[::-1]).sample(LINES, sample)
    assert drawn != members[0].sample(LINES, sample)


def test_another_kind_of_model_may_be_among_them() -> None:
    """A recurrent one remembers states instead of keys."""
    torch.manual_seed(2)
    rnn = RnnConfig(vocab_size=15, dim=16).build().double().eval()
    both = ensemble(translators(toy_model(), rnn, beam=2))
    assert both.max_length == min(LONGEST, rnn.config.max_length)
    assert len(both.translate(LINES)) == len(LINES)


def test_what_cannot_write_together_is_refused() -> None:
    first, second = translators(toy_model(), toy_model("rotary"))
    with pytest.raises(UserError, match="different tokenizers"):
        ensemble([first, replace(second, tokenizer=toy_tokenizer("<nothing>"))])
    with pytest.raises(UserError, match="different start and end tokens"):
        ensemble([first, replace(second, decode=replace(second.decode, start=5))])
    larger = Translator(toy_model(vocab_size=16), first.tokenizer, first.decode)
    with pytest.raises(UserError, match="vocabulary sizes"):
        ensemble([first, larger])
