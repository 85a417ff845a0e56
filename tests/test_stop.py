"""`manyheads generate` ends at a stop text, and reports when it exceeds the trained length."""

from pathlib import Path

import pytest
import torch
from tests.test_cli import result

from manyheads.decode.beam import Decode
from manyheads.models.gpt import GptConfig
from manyheads.nn.positions import Sinusoidal
from manyheads.run import Run, save_run
from manyheads.tokenizer.train import Words

CONTEXT = 12
PROMPT = ("--prompt", "a b", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model over ten words, as it was made."""
    torch.manual_seed(1)
    tokenizer = Words().train(["a b c d e f g h i j"])
    sizes = {"vocab_size": tokenizer.vocab_size, "dim": 16, "layers": 1, "heads": 2, "ffn_dim": 16}
    config = GptConfig(**sizes, max_length=CONTEXT, position=Sinusoidal())
    decode = Decode(min_length=7)
    run = Run(task="language", data=None, tokens=None, model=config, decode=decode)
    out = tmp_path_factory.mktemp("run")
    save_run(run, tokenizer, config.build(), out)
    return out


@pytest.mark.parametrize("way", [("--seed", "3"), ("--temperature", "0"), ("--beam", "2")])
def test_a_text_ends_before_a_stop_text(folder: Path, way: tuple[str, str]) -> None:
    words = ("generate", folder, *PROMPT, *way)
    text = result(*words).removesuffix("\n")
    new = text.removeprefix("a b")
    assert len(new.split()) == 7
    stop = new[3:7]  # from the middle of a text, over several tokens
    ended = "a b" + new[: new.find(stop)]
    assert result(*words, "--stop", stop) == ended + "\n"
    assert result(*words, "--stop", "nowhere", "--stop", stop) == ended + "\n"
    assert result(*words, "--stop", "nowhere") == text + "\n"
    assert result(*words, "--stop", new[:2]) == "a b\n"
