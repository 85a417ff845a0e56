"""A folder of runs small enough to be made while a test waits: one of each kind of model."""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.recipes import read_recipe
from manyheads.run import Run, make_trainer, read_run, save_run
from manyheads.tokenizer.tokenizer import Tokenizer

SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 32, "max_length": 128}
SETTINGS = (
    *("data.train_pairs=200", "data.valid_pairs=4", "data.test_pairs=3", "tokens.vocab_size=600"),
    *("model.dim=16", "model.heads=2", "model.ffn_dim=32", "model.max_length=128"),
    *("train.steps=30", "train.batch_tokens=600", "train.warmup_steps=10", "train.log_every=5"),
    *("train.validate_every=30", "train.save_every=30", "train.learning_rate=0.02"),
    *("decode.beam=1", "decode.bleu_sentences=0"),
)
SENTENCE = "The small dog sees the tree."


def made_once(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A function that fills a folder: its first call in a process does, later ones copy that."""
    first: list[TemporaryDirectory[str]] = []

    @wraps(make)
    def copied(folder: Path) -> Path:
        if not first:
            first.append(TemporaryDirectory())
            make(Path(first[0].name))
        return Path(shutil.copytree(first[0].name, folder, dirs_exist_ok=True))

    return copied


@made_once
def make_runs(folder: Path) -> Path:
    """`translator`, trained for some steps, and `writer` and `reader` with first weights."""
    torch.manual_seed(1)
    with contextlib.redirect_stderr(io.StringIO()):
        recipe = read_recipe("phrasebook", SETTINGS)
        make_trainer(recipe, folder / "translator", torch.device("cpu")).run()
    run = read_run(folder / "translator")
    tokenizer = Tokenizer.load(folder / "translator" / "tokenizer.json")
    shared = {**SIZES, "vocab_size": tokenizer.vocab_size, "dropout": 0.0}
    for name, task, config in (
        ("deep/writer", "language", GptConfig(**shared)),
        ("reader", "text", BertConfig(**shared)),
    ):
        other: Run = replace(run, task=task, data=None, model=config)
        save_run(other, tokenizer, config.build(), folder / name)
    return folder
