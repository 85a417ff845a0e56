"""Variants of the lectures: places of positions, an LSTM language model, two vocabularies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import VOCAB, tiny, words
from tests.test_cli import TINY, call, result
from torch import nn

from manyheads.baselines.rnn import RnnLmConfig
from manyheads.config import override_all
from manyheads.decode.beam import Decode
from manyheads.decode.generate import Generator
from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.loading import load_run
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.tokenizer.train import Words

PLACES = ("concatenate", "every-layer")


def variant(kind: Any, place: str, position: str = "learned") -> Any:
    torch.manual_seed(4)
    config = override_all(tiny(kind, position), [f"embed.position={place}"])
    return config.build().double()


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_positions_enter_where_they_should(position: str) -> None:
    tokens, places = words(2, 7), torch.arange(7)[None]
    for place in PLACES:
        model = variant(GptConfig, place, position)
        p = model.decoder.position.embed(torch.zeros(2, 7, 8).double(), places)
        x = model.tokens(tokens)
        inputs: list[torch.Tensor] = []
        for block in model.decoder.blocks:
            block.register_forward_pre_hook(lambda block, args, seen=inputs: seen.append(args[0]))
            block.register_forward_hook(lambda block, args, out, seen=inputs: seen.append(out))
        model(tokens)
        first, output, second, _ = inputs
        if place == "concatenate":
            assert isinstance(model.embedding.project, nn.Linear)
            left, right = model.embedding.project.weight.chunk(2, dim=1)
            expected = x @ left.T + p @ right.T + model.embedding.project.bias
            torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
            assert torch.equal(second, output)
        else:
            torch.testing.assert_close(first, x + p, rtol=0, atol=1e-12)
            torch.testing.assert_close(second, output + p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", PLACES)
def test_cached_passes_equal_full_ones(place: str) -> None:
    model = variant(GptConfig, place)
    tokens, cache = words(2, 9), KVCache()
    parts = [model(chunk, cache=cache) for chunk in tokens.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("place", PLACES)
def test_positions_that_are_not_added_cannot_move(place: str) -> None:
    with pytest.raises(UserError, match="rotary"):
        override_all(tiny(Seq2SeqConfig, "rotary"), [f"embed.position={place}"])


# --- a language model of LSTMs ---


def small_rnn(**changes: Any) -> Any:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 2, "dropout": 0.0}
    return RnnLmConfig(**sizes | {"max_length": 16} | changes).build().eval()


def test_an_rnn_continues_from_its_state() -> None:
    model = small_rnn().double()
    tokens, cache = words(2, 9), KVCache()
    parts = [model.logits(model.hidden(x, cache=cache)) for x in tokens.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-12)


def test_beam_search_of_an_rnn_scores_what_it_finds() -> None:
    tokenizer = Words(vocab_size=VOCAB).train(["a b c d e f g h i j"])
    model = small_rnn()
    generator = Generator(model, tokenizer, Decode(beam=3, length_penalty=0.0))
    prompts = [[7, 8, 9], [10]]
    for prompt, hypotheses in zip(prompts, generator.search(prompts, 4), strict=True):
        assert len(hypotheses) > 1
        for best in hypotheses:
            text = torch.tensor([[*prompt, *best.tokens, tokenizer.end]])
            logits = model(text)[0].detach().log_softmax(-1)
            steps = range(len(prompt) - 1, text.shape[1] - 1)
            score = sum(float(logits[at, text[0, at + 1]]) for at in steps)
            assert best.log_probability == pytest.approx(score, abs=1e-4)


def test_commands_know_an_rnn_language_model(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("one two three four five six seven\n" * 60, encoding="utf-8")
    settings = ["model=rnn-lm", "model.dim=16", "model.max_length=16", "tokens=words"]
    settings += ["train.steps=60", "train.batch_rows=8", "train.learning_rate=0.02"]
    settings += ["train.warmup_steps=2", "train.validate_every=60", f"data.file={text}"]
    result("train", "language", *settings, "--out", run, "--device", "cpu")
    assert "perplexity" in result("evaluate", run, "--split", "valid", "--device", "cpu")
    words = ("generate", run, "-p", "one two three", "--temperature", "0", "--max-new-tokens", "4")
    assert result(*words, "--device", "cpu").split()[-3:] == ["four", "five", "six"]
    assert "recurrent" in result("info", run)
    code, _, err = call("train", "language", *settings, "objective.packing=documents", "-o", run)
    assert code == 2
    assert "objective.packing=stream" in err


# --- a vocabulary for each side of a translator ---

SEPARATE = ("tokens.vocab_size=270", "target_tokens=words", "target_tokens.vocab_size=50")


def test_each_side_has_a_vocabulary(tmp_path: Path) -> None:
    run, stdin = tmp_path / "run", b"The dog sleeps.\nThe big cat sees the tree.\n"
    words = ("train", "phrasebook", *TINY, *SEPARATE, "model.tie=target")
    result(*words, "--out", run, "--device", "cpu")
    loaded = load_run(run)
    source, target = loaded.tokenizer, loaded.tokenizer.target
    assert (source.kind, target.kind) == ("bpe", "words")
    sizes = source.vocab_size, target.vocab_size
    assert sizes == (270, 50) == (loaded.run.model.vocab_size, loaded.run.model.target_vocabulary)
    text = loaded.run.data.read("train").targets[0]
    assert source.decode(target.encode(text)) == target.decode(target.encode(text)) != ""
    expected = result("translate", run, "--engine", "torch", "--device", "cpu", stdin=stdin)
    assert result("translate", run, "--engine", "ctranslate2", stdin=stdin) == expected
    known = {str(target.content(number)) for number in target.ordinary.tolist()}
    assert set(expected.split()) <= known
    assert "bleu" in result("evaluate", run, "--device", "cpu")
    code, _, err = call("export", run, "--to", "huggingface", "--out", tmp_path / "hf")
    assert code == 2, err
    code, _, err = call("distill", run, "--out", tmp_path / "small")
    assert code == 2, err
    resumed = call(*words, "train.steps=8", "--out", run, "--device", "cpu")
    assert resumed[0] == 0, resumed[2]


def test_one_embedding_cannot_serve_two_vocabularies(tmp_path: Path) -> None:
    code, _, err = call("train", "phrasebook", *TINY, *SEPARATE, "--out", tmp_path / "run")
    assert code == 2
    assert "model.tie=target" in err
