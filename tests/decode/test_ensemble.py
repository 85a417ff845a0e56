"""An ensemble generates what a search over the mean of the probabilities finds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_beam import plain_search
from torch import Tensor
from toys import (
    LONGEST,
    START,
    SUPPRESSED,
    beam_search,
    full_pass,
    same,
    toy_model,
    toy_source,
    toy_tokenizer,
)

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.beam import Decode
from manyheads.decode.decoder import after_sources
from manyheads.decode.ensemble import EnsembleSession, ensemble
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.errors import UserError

LINES = ["a b c", "h", "c d e f g h a b", "b b", "g a c e"]


def translators(*models: Any, **changes: Any) -> list[Translator]:
    decode = Decode(max_length_ratio=1.5, max_length_extra=3, suppress_tokens=(0, 1), **changes)
    return [Translator(model, toy_tokenizer(), decode) for model in models]


def test_tokens_have_the_mean_of_the_probabilities() -> None:
    """Models of several sizes, full passes against steps, while sentences leave the batch."""
    models = [toy_model(), toy_model("rotary"), toy_model(dim=32, layers=1, seed=5)]
    torch.manual_seed(3)
    source, padding = toy_source(3, 6, 2, 5, 4, 7, 1, 8, 2)
    passes = [full_pass(model, source, padding) for model in models]

    def mean(homes: Tensor, prefixes: Tensor) -> Tensor:
        with torch.no_grad():
            shares = [logits(homes, prefixes).double().softmax(-1) for logits in passes]
        return torch.stack(shares).mean(0).log()

    decode, limits = Decode(beam=3), [9, 7, 12, 10, 8, 11, 9, 6, 10]
    search = beam_search(decode)
    session = EnsembleSession([after_sources(model, source, padding) for model in models])
    results = search(session, START, torch.tensor(limits))
    same(results, [plain_search(mean, *row, SUPPRESSED, decode) for row in enumerate(limits)])
    single = search(after_sources(models[0], source, padding), START, torch.tensor(limits))
    assert [nbest[0].tokens for nbest in single] != [nbest[0].tokens for nbest in results]


def test_a_model_with_itself_is_the_model() -> None:
    [single] = translators(toy_model(), beam=3)
    same(ensemble([single, single]).search(LINES), single.search(LINES))
    assert ensemble([single]) is single


def test_the_order_of_members_does_not_matter() -> None:
    members, sample = translators(toy_model(), toy_model("alibi"), beam=3), Sample(seed=4)
    same(ensemble(members).search(LINES), ensemble(members[::-1]).search(LINES))
    samples = ensemble(members).sample(LINES, sample)
    assert samples == ensemble(members[::-1]).sample(LINES, sample)
    assert samples != members[0].sample(LINES, sample)


def test_a_recurrent_model_may_be_a_member() -> None:
    torch.manual_seed(2)
    rnn = RnnConfig(vocab_size=15, dim=16).build().double().eval()
    both = ensemble(translators(toy_model(), rnn, beam=2))
    assert both.max_length == min(LONGEST, rnn.config.max_length)
    assert len(both.translate(LINES)) == len(LINES)


def test_members_with_different_tokens_are_refused() -> None:
    first, second = translators(toy_model(), toy_model("rotary"))
    [larger] = translators(toy_model(vocab_size=16))
    for other, reason in (
        (replace(second, tokenizer=toy_tokenizer("<nothing>")), "different tokenizers"),
        (replace(second, decode=replace(second.decode, start=5)), "start and end tokens"),
        (larger, "vocabulary sizes"),
    ):
        with pytest.raises(UserError, match=reason):
            ensemble([first, other])
