"""Worked example: add a task with one new module and one line in the task table.

The task is to write a sentence in reverse. Everything between the two rules would be the new
module `tasks/reversal.py`; the line in `tasks/table.py` is `"reversal": reversal.SPEC`.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyheads.data.batching import Ragged, Shuffled, split
from manyheads.data.translation import Batch, Corpus, Frame, PhrasebookData
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores
from manyheads.loading import load_run
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec
from manyheads.tasks.table import TASKS
from manyheads.tasks.translation import translation_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss

# ----------------------------------------------------------------------- tasks/reversal.py


class ReversalTask:
    """Batches, loss and validation for the trainer (`train.loop.Task`)."""

    def __init__(
        self,
        run: RunSettings,
        part: Corpus,
        valid: Corpus,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        self.train, self.device, self.frame = run.train, device, Frame.of(tokenizer)
        self.data = tokenizer.encode_batch(part.sources)
        self.valid = tokenizer.encode_batch(valid.sources)
        self.order = Shuffled(len(self.data), run.train.batch_rows or 16, run.seed)
        self.per_epoch = self.order.per_epoch
        self.digest = hashlib.sha256("\n".join(part.sources).encode()).hexdigest()[:16]
        self.notes: list[str] = []

    def pairs(self, rows: list[list[int]]) -> Batch:
        end = self.frame.end
        sources = Ragged.of([[*ids, end] for ids in rows])
        targets = Ragged.of([[*reversed(ids), end] for ids in rows])
        every = np.arange(len(rows))
        batch = Batch.of(sources, targets, every, self.frame.start, self.frame.pad)
        return batch.to(self.device)

    def batches(self, step: int) -> list[Batch]:
        parts = split(self.order.rows(step), self.train.accumulate)
        return [self.pairs([self.data[row] for row in rows]) for rows in parts]

    def tokens(self, batch: Batch) -> int:
        return batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": batch.target_tokens}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Loss]:
        return {"tokens": translation_loss(model, batch, self.train.label_smoothing)}  # type: ignore[arg-type]

    def describe(self, step: int) -> str:
        return f"sentences {self.order.rows(step)[:5]} …"

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        loss = translation_loss(model, self.pairs(self.valid), 0.0)  # type: ignore[arg-type]
        return {"loss": float(loss.nll) / loss.count}


def evaluate(loaded: LoadedModel, data: PhrasebookData, split_name: str) -> Scores:
    """The share of words at their place."""
    translator, lines = loaded.translator(), data.read(split_name).sources
    right = total = 0
    for line, hypotheses in zip(lines, translator.search(lines, n_best=1), strict=True):
        wanted = loaded.tokenizer.encode(line)[::-1]
        written = hypotheses[0].tokens if hypotheses else []
        right += sum(a == b for a, b in zip(wanted, written, strict=False))
        total += len(wanted)
    signature = {"accuracy": "share of words at their place"}
    return {"accuracy": right / total, "signature": signature, "split": split_name}


SPEC = TaskSpec(
    task="reversal",
    models=(Seq2SeqConfig,),
    data=(PhrasebookData,),
    strings=lambda corpus: corpus.sources,
    prepare=ReversalTask,
    evaluate=evaluate,
    offers=("translate", "encode"),
)

# -------------------------------------------------------------------------------------------

RECIPE = """
task = "reversal"
data = {kind = "phrasebook", train_pairs = 400, valid_pairs = 20}
tokens = {kind = "words", vocab_size = 400}

[model]
dim = 32
layers = 1
heads = 2
max_length = 32
norm = "pre"
embed = {scale = "sqrt-dim"}

[train]
steps = 80
batch_rows = 16
schedule = "cosine"
learning_rate = 1e-2
label_smoothing = 0.0
warmup_steps = 5
validate_every = 80
save_every = 80
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(TASKS, "reversal", SPEC)  # the line in the table
    (tmp_path / "reversal.toml").write_text(RECIPE)
    return str(tmp_path / "reversal.toml")


def test_the_new_task_trains_and_is_scored(recipe: str, tmp_path: Path) -> None:
    run, folder = read_recipe(recipe), tmp_path / "run"
    trainer = make_trainer(run, folder, torch.device("cpu"))
    before = trainer.task.validate(trainer.model)["loss"]
    trainer.run()
    loaded: Any = load_run(folder)
    assert trainer.task.validate(loaded.model)["loss"] < before - 1
    assert run.data is not None
    scores = loaded.evaluate(run.data, "valid")
    assert scores["accuracy"] > 0.05
    with pytest.raises(UserError, match="decoder-only"):
        loaded.generator()


def test_settings_of_the_new_task_are_checked(recipe: str) -> None:
    for setting in ("data=text", "objective=masked", "model=gpt", "train.rdrop_alpha=1"):
        with pytest.raises(UserError, match=setting.split("=")[0]):
            read_recipe(recipe, [setting])
    with pytest.raises(UserError, match="did you mean 'reversal'"):
        read_recipe(recipe, ["task=reversl"])
