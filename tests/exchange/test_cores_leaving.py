"""Programs outside compute attention in full: a model goes out if its cores do, and only then."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from manyheads.decode.beam import Decode
from manyheads.errors import UserError
from manyheads.exchange import onnx
from manyheads.exchange.ctranslate2 import write_ctranslate2
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import to_huggingface
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Learned
from manyheads.nn.tiled import Tiled
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

for package in ("transformers", "ctranslate2", "onnx", "onnxscript"):
    pytest.importorskip(package)

SIZES: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 8, "max_length": 16}
SIZES |= {"vocab_size": 265}  # as the tokenizer has
GPT = GptConfig(**SIZES, position=Learned())  # which has a place in every format
INEXACT = [Local(4), Longformer(2), MemoryCompressed(), Linformer(4), Performer(8)]
EXACT = [kind() for kind in get_args(AttentionFunctionConfig) if kind.exact]
Writer = Callable[[nn.Module, Path], object]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Characters().train(["ab"])


@pytest.fixture(params=["object", "folder", "onnx", "ctranslate2"])
def write(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Writer:
    # Exporting graphs takes seconds, and nothing of it hangs on the cores that were chosen.
    monkeypatch.setattr(onnx, "_write", lambda graph, path: path.touch())
    writers: dict[str, Writer] = {
        "object": lambda model, folder: to_huggingface(model),
        "folder": lambda model, folder: write_huggingface(model, tokenizer, Decode(), folder),
        "onnx": onnx.write_onnx,
        "ctranslate2": lambda model, folder: write_ctranslate2(model, tokenizer, folder),  # type: ignore[arg-type]
    }
    return writers[str(request.param)]


def refused(write: Writer, model: nn.Module, folder: Path) -> str:
    """The one line that says why; nothing is written."""
    with pytest.raises(UserError) as caught:
        write(model, folder)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert not folder.exists()
    return line


def test_every_core_is_looked_at() -> None:
    assert {type(core) for core in (*EXACT, *INEXACT)} == set(get_args(AttentionFunctionConfig))
    assert {core.kind for core in EXACT} == {"dense", "fused", "tiled", "packed", "flex"}


@pytest.mark.parametrize("core", INEXACT, ids=lambda core: core.kind)
def test_what_sees_less_stays(core: Any, write: Writer, tmp_path: Path) -> None:
    """Wherever it was set, which is said."""
    side = replace(Seq2SeqConfig(**SIZES), encoder=StackOverrides(attention=core)).build()
    line = refused(write, side, tmp_path / "out")
    assert line.startswith(f"model.encoder.attention={core.kind} cannot be exported")
    assert "model.attention=fused" in line
    if isinstance(core, Linformer):
        return  # no decoder has it
    both = Seq2SeqConfig(**SIZES, attention=core, encoder=StackOverrides(attention=Dense()))
    for config in (both, replace(GPT, attention=core)):
        line = refused(write, config.build(), tmp_path / "out")
        assert line.startswith(f"model.attention={core.kind} cannot be exported")


@pytest.mark.parametrize("core", EXACT, ids=lambda core: core.kind)
def test_what_sees_everything_goes_out(core: Any, write: Writer, tmp_path: Path) -> None:
    sides = Seq2SeqConfig(
        **SIZES, encoder=StackOverrides(attention=core), decoder=StackOverrides(attention=core)
    )
    for number, config in enumerate((replace(GPT, attention=core), sides)):
        found = write(config.build().eval(), tmp_path / str(number))
        assert (tmp_path / str(number)).exists() or isinstance(found, nn.Module)


def test_the_core_of_a_side_is_no_part_of_what_goes_out() -> None:
    """How a side is computed changes no number there."""
    plain = Seq2SeqConfig(**SIZES).build().eval()
    sides = replace(
        plain.config,
        encoder=StackOverrides(attention=Dense()),
        decoder=StackOverrides(attention=Tiled(block=4)),
    )
    other = sides.build().eval()
    other.load_state_dict(plain.state_dict())
    one, two = to_huggingface(plain), to_huggingface(other)
    assert type(one) is type(two)
    assert one.config.to_dict() == two.config.to_dict()
    assert all(torch.equal(x, two.state_dict()[name]) for name, x in one.state_dict().items())


@pytest.mark.parametrize("core", [Fused(), Longformer(2), Performer(8)], ids=lambda core: core.kind)
def test_a_joined_model_stays_for_what_it_is(
    core: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = DecoderOnlySeq2SeqConfig(**SIZES, attention=core).build()
    for write in (
        lambda model, folder: to_huggingface(model),
        lambda model, folder: write_huggingface(model, tokenizer, Decode(), folder),
        onnx.write_onnx,
    ):
        line = refused(write, model, tmp_path / "out")
        assert "decoder" in line.lower()
        assert "core" not in line
