"""Corrupted texts: the inputs of the encoder and the targets of the decoder."""

from collections.abc import Iterator
from itertools import chain, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tasks.small_texts import trainer, write_texts

from manyheads.tasks.pretraining import PretrainingTask

Example = tuple[list[int], list[int], list[int], int]


def make_task(name: str, folder: Path, *overrides: str) -> Any:
    task = trainer(name, write_texts(folder / "texts"), folder / "run", *overrides).task
    assert isinstance(task, PretrainingTask)
    return task


def examples(task: Any, steps: int = 5) -> Iterator[Example]:
    """Source and target without end tokens, the window of the text, and its start."""
    for step in range(steps):
        [batch] = task.batches(step)
        for row, start in enumerate(task.rows(step).tolist()):
            source = batch.source[row][batch.source_real[row]].tolist()[:-1]
            target = batch.labels[row][batch.loss_mask[row]].tolist()[:-1]
            window = task.text.flat[start : start + task.data.length].tolist()
            yield source, target, window, start


def test_source_and_target_of_span_corruption_make_the_window(tmp_path: Path) -> None:
    task = make_task("spans", tmp_path)
    sentinels = task.data.sentinels.tolist()
    for source, target, window, _ in examples(task):
        assert len(set(source) & set(sentinels)) == 3
        edges = [n for n, token in enumerate(target) if token in sentinels]
        spans = {target[a]: target[a + 1 : b] for a, b in pairwise(edges)}
        assert [*chain(*(spans.get(token, [token]) for token in source))] == window


def test_the_target_of_denoising_is_the_window(tmp_path: Path) -> None:
    task = make_task("denoising", tmp_path)
    for source, target, window, _ in examples(task):
        assert target == window != source
        left = [token for token in source if token != task.tokenizer.mask]
        assert not set(left) - set(window)
        assert len(left) < len(window)


@pytest.mark.parametrize("position", ["learned", "t5"])
def test_masks_for_empty_spans_do_not_exceed_the_model(position: str, tmp_path: Path) -> None:
    many = ("objective.mean_length=1", "objective.delete_rate=0", "objective.infill_rate=0.6")
    task = make_task("denoising", tmp_path, *many, f"model.position={position}")
    assert max(task.batches(step)[0].source.shape[1] for step in range(30)) == 16


def test_sentences_are_permuted_as_units(tmp_path: Path) -> None:
    task = make_task("denoising", tmp_path, "objective.infill_rate=0", "objective.delete_rate=0")
    moved = 0
    for source, target, window, start in examples(task, steps=4):
        edges = task.text.sentence_starts - start
        inside = edges[(edges > 0) & (edges < len(window))]
        parts = [part.tolist() for part in np.split(np.array(target), inside)]
        assert any(source == [*chain(*order)] for order in permutations(parts))
        moved += source != target
    assert moved > 4


@pytest.mark.parametrize("name", ["spans", "denoising"])
def test_every_step_corrupts_other_positions(name: str, tmp_path: Path) -> None:
    task = make_task(name, tmp_path, "train.batch_rows=1")
    special = np.array([*task.data.sentinels, task.tokenizer.mask])
    patterns = {tuple(np.isin(task.batches(n)[0].source[0], special)) for n in range(30)}
    assert len(patterns) > 12  # of few that are possible
