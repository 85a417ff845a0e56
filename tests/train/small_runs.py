"""Runs that train in a second, on a toy language pair: words in, their mirror images out."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train.loop import Trainer
from manyheads.train.sharded import load, sizes
from manyheads.train.step import ONE_PROCESS

WORDS = ("red", "blue", "green", "small", "big", "dog", "cat", "bird", "tree", "house")
CPU = torch.device("cpu")

# Data and a model for a run.
SMALL = """
[data]
kind = "files"
source = "{folder}/pairs.source"
target = "{folder}/pairs.target"
held_out = 0.1

[tokens]
kind = "bpe"
vocab_size = 300

[model]
dim = 16
layers = 1
heads = 2
ffn_dim = 32
max_length = 64
dropout = 0.1
"""

RECIPE = f"""{SMALL}
[train]
steps = 24
batch_tokens = 300
warmup_steps = 8
validate_every = 6
save_every = 6
log_every = 3

[decode]
beam = 2
bleu_sentences = 0
"""


def write_recipe(folder: Path, pairs: int = 150, text: str = RECIPE) -> Path:
    """A corpus of word lists and their mirror images, and a recipe that trains on it."""
    draw = random.Random(1)
    lists = [draw.choices(WORDS, k=draw.randint(1, 7)) for _ in range(pairs)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, order in (("source", 1), ("target", -1)):
        lines = "".join(" ".join(words[::order]) + "\n" for words in lists)
        (folder / f"pairs.{name}").write_text(lines, encoding="utf-8")
    recipe = folder / "recipe.toml"
    recipe.write_text(text.format(folder=folder), encoding="utf-8")
    return recipe


def trainer(recipe: Path, out: Path, *overrides: str) -> Trainer:
    """What `manyheads train RECIPE OVERRIDES --out OUT` makes before it runs."""
    return make_trainer(read_recipe(str(recipe), overrides), out, CPU)


def saved(out: Path) -> dict[str, Tensor]:
    """Every tensor that a run leaves: the model to use, last weights, moments, snapshots."""
    tensors = {}
    for path in [out / "model.safetensors", *sorted((out / "state").glob("*.safetensors"))]:
        tensors |= {f"{path.name} {name}": tensor for name, tensor in load_file(path).items()}
    for step in (out / "state").glob("step-*"):  # of FSDP
        state = {name: torch.empty(size.shape) for name, size in sizes(step).items()}
        load(step, state, ONE_PROCESS)
        tensors |= {f"last.safetensors {name}": tensor for name, tensor in state.items()}
    return tensors


def assert_same_bits(item: Path, other: Path) -> None:
    ours, theirs = saved(item), saved(other)
    assert ours.keys() == theirs.keys()
    assert any(" adam.exp_avg_sq." in name for name in ours)
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def hurt(actual: Trainer, step: int, action: Any) -> None:
    """Let something happen when the batches of a step are asked for."""
    batches = actual.task.batches

    def requested(number: int) -> list[Any]:
        if number == step:
            action()
        return batches(number)

    actual.task.batches = requested  # type: ignore[method-assign]
