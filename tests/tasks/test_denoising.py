"""Broken texts: what the encoder reads and the decoder writes, inside what the model holds."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from tests.tasks.small_texts import trainer, write_texts

from manyheads.data.masking import restore_spans
from manyheads.data.translation import Batch
from manyheads.tasks.denoising import DenoisingTask


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Source and target of each row, without their ends."""
    sources = batch.source_real if batch.source_real is not None else batch.source >= 0
    return [
        (
            batch.source[row][sources[row]].tolist()[:-1],
            batch.labels[row][batch.loss_mask[row]].tolist()[:-1],
        )
        for row in range(len(batch.source))
    ]


def made(name: str, folder: Path, *overrides: str) -> DenoisingTask:
    task = trainer(name, write_texts(folder / "texts"), folder / "run", *overrides).task
    assert isinstance(task, DenoisingTask)
    return task


def test_spans_and_what_they_stand_for_are_a_stretch_of_the_text(tmp_path: Path) -> None:
    task = made("spans", tmp_path)
    sentinels = task.data.sentinels
    for step in range(5):
        [batch] = task.batches(step)
        for (source, target), start in zip(rows(batch), task.order.starts(step), strict=True):
            whole = task.data.text.flat[start : start + task.data.length]
            restored = restore_spans(np.array(source), np.array(target), sentinels)
            assert restored.tolist() == whole.tolist()
            assert len(set(source) & set(sentinels.tolist())) == 3


def test_a_denoiser_writes_the_text_as_it_was(tmp_path: Path) -> None:
    task = made("denoising", tmp_path)
    changed = 0
    for step in range(5):
        [batch] = task.batches(step)
        for (source, target), start in zip(rows(batch), task.order.starts(step), strict=True):
            whole = task.data.text.flat[start : start + task.data.length].tolist()
            assert target == whole
            left = [token for token in source if token != task.data.tokenizer.mask]
            assert not set(left) - set(whole)
            assert len(left) < len(whole)
            changed += source != whole
    assert changed == 30


@pytest.mark.parametrize("position", ["learned", "t5"])
def test_masks_for_nothing_make_no_text_longer_than_the_model_reads(
    position: str, tmp_path: Path
) -> None:
    many = ("objective.mean_length=1", "objective.delete_rate=0", "objective.infill_rate=0.6")
    task = made("denoising", tmp_path, *many, f"model.position={position}")
    lengths = [task.batches(step)[0].source.shape[1] for step in range(30)]
    assert max(lengths) == 16


def test_sentences_change_places_whole(tmp_path: Path) -> None:
    """Without other noise a source is its stretch's sentences in another order."""
    task = made("denoising", tmp_path, "objective.infill_rate=0", "objective.delete_rate=0")
    edges, moved = task.data.text.sentence_starts, 0
    for step in range(4):
        [batch] = task.batches(step)
        for (source, target), start in zip(rows(batch), task.order.starts(step), strict=True):
            stop = start + task.data.length
            inside = [int(edge - start) for edge in edges if start < edge < stop]
            pieces = [part.tolist() for part in np.split(np.array(target), inside)]
            for order in permutations(pieces):
                if [token for piece in order for token in piece] == source:
                    break
            else:
                pytest.fail("no order of the sentences gives the source")
            moved += source != target
    assert moved > 4


@pytest.mark.parametrize("name", ["spans", "denoising"])
def test_every_step_breaks_elsewhere(name: str, tmp_path: Path) -> None:
    task = made(name, tmp_path, "train.batch_rows=1")
    special = np.array([*task.data.sentinels, task.data.tokenizer.mask])
    found = [tuple(np.isin(task.batches(n)[0].source[0], special)) for n in range(30)]
    assert len(set(found)) > 12  # of few that are possible
