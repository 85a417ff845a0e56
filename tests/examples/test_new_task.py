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

from manyheads.data.batching import Ragged, Rows, Shuffled
from manyheads.data.translation import Batch, Corpus, Frame, PhrasebookData
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, loss_scores
from manyheads.loading import load_run
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tasks.spec import BaseTask, LoadedModel, TaskSpec, total_nll
from manyheads.tasks.table import TASKS
from manyheads.tasks.translation import translation_loss
from manyheads.train.step import Loss

# ----------------------------------------------------------------------- tasks/reversal.py


class ReversalTask(BaseTask[Batch]):
    """Batches, loss and validation for the trainer (`train.step.Task`)."""

    examples = "sentences"

    def load(self, part: Corpus, valid: Corpus) -> None:
        self.frame = Frame.of(self.tokenizer)
        self.data = self.tokenizer.encode_batch(part.sources)
        self.valid = self.tokenizer.encode_batch(valid.sources)
        self.order = Shuffled(len(self.data), self.train.batch_rows or 16, self.run.seed)
        self.per_epoch = self.order.per_epoch
        self.digest = hashlib.sha256("\n".join(part.sources).encode()).hexdigest()[:16]

    def pairs(self, rows: list[list[int]]) -> Batch:
        end = self.frame.end
        sources = Ragged.of([[*ids, end] for ids in rows])
        targets = Ragged.of([[*reversed(ids), end] for ids in rows])
        every = np.arange(len(rows))
        batch = Batch.of(sources, targets, every, self.frame.start, self.frame.pad)
        return batch.to(self.device)

    def batch(self, rows: Rows) -> Batch:
        return self.pairs([self.data[row] for row in rows])

    def tokens(self, batch: Batch) -> int:
        return batch.target_tokens

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": batch.target_tokens}

    def losses(self, model: Any, batch: Batch) -> dict[str, Loss]:
        return {"tokens": translation_loss(model, batch, self.train.label_smoothing)}

    def validate(self, model: Any) -> dict[str, float]:
        losses = (translation_loss(model, batch, 0.0) for batch in [self.pairs(self.valid)])
        return loss_scores(*total_nll(model, losses))


def evaluate(loaded: LoadedModel, data: PhrasebookData, split_name: str) -> Scores:
    """The share of words at their place."""
    translator, lines = loaded.translator(), data.read(split_name).sources
    right = total = 0
    for line, hypotheses in zip(lines, translator.search(lines, n_best=1), strict=True):
        expected = loaded.tokenizer.encode(line)[::-1]
        written = hypotheses[0].tokens if hypotheses else []
        right += sum(a == b for a, b in zip(expected, written, strict=False))
        total += len(expected)
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
