"""Probes of a translation training: the numbers they record are those of the model."""

import base64
import contextlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.web.small_pages import SETTINGS

from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.evaluate.alignment import alignment_error
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture
from manyheads.phrasebook import Pair
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tasks.probes import crossings, probe_steps

WITH_WEIGHTS = (*SETTINGS, "data.valid_pairs=40", "train.probe_weights=true", "train.probes=6")


def train(folder: Path, *settings: str) -> Path:
    with contextlib.redirect_stderr(io.StringIO()):
        recipe = read_recipe("phrasebook", [*WITH_WEIGHTS, *settings])
        make_trainer(recipe, folder, torch.device("cpu")).run()
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "probes" / "probes.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def attention(sentence: dict[str, Any]) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(sentence["attention"]))
    return np.frombuffer(data, np.uint8).reshape(sentence["shape"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("probes") / "run")


def test_steps_are_logarithmic_with_both_ends() -> None:
    steps = sorted(probe_steps(800, 40))
    assert steps[0] == 0
    assert steps[-1] == 800
    assert 25 <= len(steps) <= 40
    assert np.all(np.diff(np.diff(steps[15:])) >= -1)  # ever farther apart


def test_crossings_count_changes_of_order() -> None:
    spans = ((0, 1), (2, 3), (4, 5))
    straight = Pair("a b c", "x y z", spans, spans, frozenset({(0, 0), (1, 1), (2, 2)}))
    reversed_order = Pair("a b c", "x y z", spans, spans, frozenset({(0, 2), (1, 1), (2, 0)}))
    assert (crossings(straight), crossings(reversed_order)) == (0, 3)


def test_the_last_probe_has_the_numbers_of_the_model(run: Path) -> None:
    last = lines(run)[-1]
    sentences = json.loads((run / "probes" / "sentences.json").read_text("utf-8"))
    loaded = load_torch_run(run)
    model: Any = loaded.model
    pairs = read_recipe("phrasebook", list(WITH_WEIGHTS)).data.read("valid").aligned
    by_source = {pair.source: pair for pair in pairs}
    chosen = [by_source[sentence["source"]] for sentence in sentences]
    assert np.allclose(
        last["alignment_error"], alignment_error(model, loaded.tokenizer, chosen).rates
    )
    for sentence, probe in zip(sentences, last["sentences"], strict=True):
        corpus = Corpus([sentence["source"]], [sentence["target"]])
        batch = EncodedPairs(corpus, loaded.tokenizer, 128, "refuse").batch(np.arange(1))
        with capture(model) as maps, torch.no_grad():
            logits = model(batch.source, batch.target, batch.source_real)
        expected = torch.stack(maps["cross"])[:, 0].numpy()
        assert np.abs(attention(probe) / 255 - expected).max() <= 0.5 / 255 + 1e-5
        log_probs = logits[0].log_softmax(-1).gather(-1, batch.labels[0][:, None])[:, 0]
        assert np.allclose(probe["reference_log_probs"], log_probs.numpy(), atol=1e-4)
        assert probe["text"] == loaded.translate([sentence["source"]], beam=1)[0] or (
            len(probe["tokens"]) > len(sentence["source_tokens"])  # cut at the probe's own limit
        )


def test_the_weights_of_each_probe_are_kept(run: Path) -> None:
    files = {int(path.stem) for path in (run / "probes" / "weights").glob("*.safetensors")}
    assert files == {line["step"] for line in lines(run)} == probe_steps(30, 6)


def test_training_is_the_same_without_probes(run: Path, tmp_path: Path) -> None:
    without = train(tmp_path / "run", "train.probes=0")
    assert not (without / "probes").exists()
    first, second = (load_torch_run(folder).model.state_dict() for folder in (run, without))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_drops_later_and_broken_lines(run: Path, tmp_path: Path) -> None:
    part = train(tmp_path / "run", "train.steps=15", "train.schedule=constant")
    path = part / "probes" / "probes.jsonl"
    later = json.dumps({"step": 99, "sentences": []})
    path.write_bytes(path.read_bytes() + f"{later}\n".encode() + b'\xff\n{"step": 15, "sen')
    train(part, "train.schedule=constant")
    steps = [line["step"] for line in lines(part)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 30
    assert {step for step in probe_steps(15, 6) if step <= 15} <= set(steps)
