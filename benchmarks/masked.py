"""Masked language modelling: logits of the masked positions only against logits for every token.

A step is forward, backward and update of a BERT-mini (4 layers of 256) with BERT's vocabulary.
The usual way computes the logits of all positions and lets cross-entropy ignore the unmasked ones;
ours applies the output layer to the masked positions only. Both begin with the same weights and the
same batch, so their first losses are equal; then they take turns in one process, and a figure is
the median ratio of paired rounds.

    OMP_NUM_THREADS=1 python benchmarks/masked.py
    python benchmarks/masked.py --device cuda
"""

import argparse
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.batching import map_tensors
from manyheads.data.masking import mask_tokens
from manyheads.models.bert import Bert
from manyheads.recipes import read_recipe
from manyheads.tasks.pretraining import MaskedBatch, masked_losses
from manyheads.train.loop import precision_of
from manyheads.train.optimizer import build_optimizer

VOCABULARY, LENGTH, RATE = 30_522, 128, 0.15
ROWS = {"cpu": 32, "cuda": 512}
STEPS = {"cpu": 1, "cuda": 10}  # a round: a GPU is not waited for after each step
MASK, SPECIAL = 103, 1000  # BERT's mask, and how many ids are not words
SEED = 1


def a_batch(rows: int, device: torch.device) -> MaskedBatch:
    random = np.random.default_rng(SEED)
    local = random.integers(SPECIAL, VOCABULARY, (rows, LENGTH))
    inputs, places = mask_tokens(
        local,
        np.ones_like(local, dtype=bool),
        random,
        rate=RATE,
        mask_fraction=0.8,
        random_fraction=0.1,
        mask=MASK,
        ordinary=np.arange(SPECIAL, VOCABULARY),
    )
    where = np.flatnonzero(places)
    expected = local.reshape(-1)[where]
    plain = (torch.from_numpy(array) for array in (inputs, where, expected))
    tokens, at, hidden = plain
    batch = MaskedBatch(tokens, None, None, at, hidden, None, local.size, len(at))
    return map_tensors(batch, lambda x: x.to(device))


def at_the_places(model: Bert, batch: MaskedBatch) -> Tensor:
    loss = masked_losses(model, batch)["masked"]
    return loss.objective / loss.count


def of_all_logits(model: Bert, batch: MaskedBatch) -> Tensor:
    labels = torch.full_like(batch.tokens.flatten(), -100)
    labels[batch.positions] = batch.labels
    return F.cross_entropy(model(batch.tokens).flatten(0, 1), labels, ignore_index=-100)


class Contender:
    """One of the two methods, with its own weights and optimizer."""

    def __init__(self, model: Bert, loss: Callable[[Bert, MaskedBatch], Tensor]) -> None:
        train = read_recipe("bert-mini").train
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = build_optimizer(self.model, train)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-4
        self.device = next(model.parameters()).device
        self.dtype = precision_of(train, self.device)

    def step(self, batch: MaskedBatch) -> Tensor:
        half = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, self.dtype, enabled=half):
            loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seconds(self, batch: MaskedBatch, steps: int) -> float:
        """Mean seconds per step."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, help="texts a batch; 32 on a CPU, 512 on a GPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(SEED)
    config = read_recipe("bert-mini").model
    model = dataclasses.replace(
        config, vocab_size=VOCABULARY, max_length=LENGTH, dropout=0.0, next_sentence=None
    ).build()
    assert isinstance(model, Bert)
    batch = a_batch(arguments.rows or ROWS[device.type], device)
    ours, usual = (Contender(model.to(device), loss) for loss in (at_the_places, of_all_logits))
    first = [float(side.step(batch)) for side in (ours, usual)]  # also warms up
    closeness = 1e-3 if ours.dtype == torch.bfloat16 else 1e-5
    assert abs(first[0] - first[1]) < closeness * first[1], first
    steps = STEPS[device.type]
    times = [
        (ours.seconds(batch, steps), usual.seconds(batch, steps)) for _ in range(arguments.rounds)
    ]
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "precision": str(ours.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "layers": config.layers,
        "dim": config.dim,
        "vocabulary": VOCABULARY,
        "batch": list(batch.tokens.shape),
        "masked": len(batch.positions),
        "seed": SEED,
        "rounds": arguments.rounds,
        "first_losses": first,
        "seconds_at_the_places": statistics.median(item for item, _ in times),
        "seconds_of_all_logits": statistics.median(other for _, other in times),
        "times_as_fast": statistics.median(other / item for item, other in times),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
