"""An encoder fine-tuned on GLUE by our loop and by `transformers`' Trainer, settings alike.

    python benchmarks/glue.py MODEL GLUE --tasks sst-2,cola --seeds 1,2,3 --by ours,theirs

MODEL is a folder of `transformers` (all-MiniLM-L6-v2, say), GLUE the folder of the tasks. Each
run prints one JSON object; `python benchmarks/glue.py --table FILE...` makes the table of them.
Both have AdamW, a linear decay after a tenth of warm-up, dropout and frames as MODEL says, texts
cut at 512 tokens, and are scored on the validation rows after the last step, by the same metrics.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.data.labelled import GLUE, LabelledData, class_indices
from manyheads.evaluate.labels import label_scores
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer

EPOCHS = {"sst-2": 1}  # three, where nothing else is said
ROWS, RATE, WARMUP, LONGEST = 32, 5e-5, 0.1, 512


def ours(model: str, data: LabelledData, seed: int, device: str) -> dict[str, Any]:
    epochs = EPOCHS.get(data.task, 3)
    settings = [
        *(f"model={model}", f"data.task={data.task}", f"data.folder={data.folder}"),
        *(f"seed={seed}", f"train.epochs={epochs}", f"train.batch_rows={ROWS}"),
        *(f"train.learning_rate={RATE}", f"train.warmup_ratio={WARMUP}"),
        *("train.validate_every=100000", "train.save_every=100000"),
    ]
    run = read_recipe("classify", settings)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        trainer = make_trainer(run, Path(folder), torch.device(device))
        trainer.run()
        seconds = time.monotonic() - began
        scores = load_torch_run(Path(folder), device).evaluate(data, "valid")
    return {"scores": _numbers(scores), "seconds": seconds, "steps": trainer.progress.step}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts of `transformers`' tokenizer with their labels."""

    def __init__(self, part: Any, names: tuple[str, ...], tokenizer: Any) -> None:
        pairs = [text if isinstance(text, tuple) else (text, None) for text in part.texts]
        first, second = [item for item, _ in pairs], [two for _, two in pairs]
        inputs = first if second[0] is None else (first, second)
        texts = (inputs,) if second[0] is None else inputs
        self.encoded = tokenizer(*texts, truncation=True, max_length=LONGEST)
        is_number = isinstance(part.labels[0], float)
        self.labels = part.labels if is_number else class_indices(part, names).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**{k: v[row] for k, v in self.encoded.items()}, "labels": self.labels[row]}


def theirs(model: str, data: LabelledData, seed: int, device: str) -> dict[str, Any]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(seed)
    part, valid = data.read("train"), data.read("valid")
    names = data.label_names(part)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names))
    rows, held_out = Rows(part, names, tokenizer), Rows(valid, names, tokenizer)
    epochs = EPOCHS.get(data.task, 3)
    steps = epochs * -(-len(rows) // ROWS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            seed=seed,
            num_train_epochs=epochs,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=256,
            learning_rate=RATE,
            warmup_steps=round(WARMUP * steps),
            lr_scheduler_type="linear",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        began = time.monotonic()
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(model=network, args=arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
        seconds = time.monotonic() - began
        answers: Any = trainer.predict(held_out).predictions
    regression = data.regression
    inputs = answers[:, 0].tolist() if regression else answers.argmax(-1).tolist()
    metrics = data.metrics(names)
    scores = label_scores(metrics, inputs, list(held_out.labels), len(names) - 1)
    return {"scores": _numbers(scores), "seconds": seconds, "steps": trainer.state.global_step}


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if isinstance(value, float)}


def table(paths: list[str]) -> None:
    """Mean and spread over the seeds: a row a task and metric, a column a loop."""
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for metric, value in record["scores"].items():
                row = scores.setdefault((record["task"], metric), {})
                row.setdefault(record["by"], []).append(value)
    columns = sorted({by for row in scores.values() for by in row})
    print(f"| task | metric | {' | '.join(columns)} |")
    print(f"|---|---|{'---|' * len(columns)}")
    for (task, metric), row in sorted(scores.items()):
        print(f"| {task} | {metric} | {' | '.join(_cell(row.get(by, [])) for by in columns)} |")


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    each = " ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * np.mean(values):.1f} ± {100 * spread:.1f} ({each})"


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        table(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--tasks", default="sst-2,cola,mrpc,rte,sts-b")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--by", default="ours,theirs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    inputs = parser.parse_args()
    loops = {"ours": ours, "theirs": theirs}
    for task in inputs.tasks.split(","):
        if task not in GLUE:
            sys.exit(f"unknown task {task}: choose among {', '.join(GLUE)}")
        data = LabelledData(task=task, folder=inputs.folder)
        for seed in map(int, inputs.seeds.split(",")):
            for by in inputs.by.split(","):
                result = loops[by](inputs.model, data, seed, inputs.device)
                print(json.dumps({"task": task, "seed": seed, "by": by, **result}), flush=True)


if __name__ == "__main__":
    main()
