"""Runs with first weights, one for each page that is for a kind of model; none is trained."""

from pathlib import Path
from typing import Any

import torch
from tests.data.small_music import write_chorales, write_performances
from tests.tasks.small_texts import write_pictures
from torch import nn

from manyheads.data.events import ChoraleGrid
from manyheads.data.images import ImageData
from manyheads.data.music import MusicData
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.layers import Norm
from manyheads.nn.positions import Learned, Relative
from manyheads.run import Run, save_run
from manyheads.tasks.images import fit_config
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe, Words

SENTENCE = "The small dog sees the tree."
SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 32, "dropout": 0.0}


def make_models(folder: Path) -> Path:
    """A decoder of each kind, `reader` and `labels`, `pictures`, `chorales` and `piano`.

    Weights are larger than first ones: so no two tokens are about as likely, and what is compared
    cannot be equal by chance.
    """
    torch.manual_seed(3)
    tokenizer = Bpe(vocab_size=320).train([SENTENCE, "A dog and a cat.", "Der kleine Hund."] * 9)
    text = {**SIZES, "vocab_size": tokenizer.vocab_size, "max_length": 64}
    labels = Classify(labels=("bad", "good"))
    for name, task, config in (
        ("translator", "translation", Seq2SeqConfig(**text)),
        ("joined", "translation", DecoderOnlySeq2SeqConfig(**text)),
        ("writer", "language", GptConfig(**text, position=Learned())),
        ("post", "language", GptConfig(**text, norm=Norm(placement="post"), position=Relative())),
        ("reader", "text", BertConfig(**text)),
        ("labels", "classification", BertConfig(**text, head=labels)),
    ):
        run = Run(task=task, data=None, tokens=Bpe(vocab_size=320), model=config)  # type: ignore[arg-type]
        save_run(run, tokenizer, _strong(config.build()), folder / name)
    _pictures(folder)
    _music(folder)
    return folder


def _strong(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def _pictures(folder: Path) -> None:
    place = folder / "data" / "pictures"
    write_pictures(place)
    data = ImageData(folder=str(place))
    sizes = VitConfig(**SIZES, image_size=8, patch_size=2, channels=1)
    config = fit_config(sizes, data.read("train"))
    run = Run(task="images", data=data, tokens=None, model=config)
    save_run(run, None, _strong(config.build()), folder / "pictures")


def _music(folder: Path) -> None:
    chorales = write_chorales(folder / "data" / "chorales")
    piano = write_performances(folder / "data" / "piano")
    for name, data in (
        ("chorales", MusicData(folder=str(chorales), file="chorales.json", encoding=ChoraleGrid())),
        ("piano", MusicData(folder=str(piano))),
    ):
        tokenizer: Tokenizer = Words().train([" ".join(data.encoding.vocabulary())])
        sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, "max_length": 64}
        config = GptConfig(**sizes, position=Relative())
        run = Run(task="language", data=data, tokens=Words(), model=config)
        save_run(run, tokenizer, _strong(config.build()), folder / name)
