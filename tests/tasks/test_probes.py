"""Probes of a training: the numbers they record are those of the model."""

import base64
import contextlib
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tasks.small_texts import QUARTERS, trainer, write_texts
from tests.web.small_pages import SETTINGS

from manyheads.data.language import EncodedText
from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.decode.generate import Generator
from manyheads.evaluate.alignment import alignment_error
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tasks.images import from_pixels, normalize
from manyheads.tasks.probes import Probe, probe_steps

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


def train_case(name: str, texts: Path, folder: Path, *settings: str) -> Path:
    """One of the small runs of tests/tasks/small_texts.py, with probes."""
    settings = ("train.probes=6", "train.probe_weights=true", *settings)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer(name, texts, folder, *settings).run()
    return folder


def sentences_of(folder: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(
        (folder / "probes" / "sentences.json").read_text("utf-8")
    )
    return read


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), documents=60)


def test_a_language_model_continues_fixed_prompts(texts: Path, tmp_path: Path) -> None:
    run = train_case("causal stream", texts, tmp_path / "run")
    assert [line["step"] for line in lines(run)] == sorted(probe_steps(12, 6))
    loaded, last = load_torch_run(run), lines(run)[-1]
    model: Any = loaded.model
    valid = EncodedText(loaded.run.data.read("valid"), loaded.tokenizer, ends=True).flat.tolist()
    windows = [valid[at : at + 16] for at in range(len(valid))]
    examples = sentences_of(run)
    assert len(examples) == 4
    generator = Generator(model, loaded.tokenizer, loaded.decode(beam=1))
    for example, probe in zip(examples, last["sentences"], strict=True):
        ids, half = example["ids"], len(example["source_tokens"])
        assert ids in windows
        assert loaded.tokenizer.subwords(ids) == example["source_tokens"] + example["target_tokens"]
        with capture(model) as maps, torch.no_grad():
            logits = model(torch.tensor([ids]))
        expected = torch.stack(maps["self"])[:, 0].numpy()
        assert np.abs(attention(probe) / 255 - expected).max() <= 0.5 / 255 + 1e-5
        log_probs = logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert np.allclose(probe["reference_log_probs"], log_probs.numpy(), atol=1e-4)
        [[written]] = generator.search([ids[:half]], len(ids) - half, n_best=1)
        assert probe["text"] == loaded.tokenizer.decode(written.tokens)
        assert len(probe["log_probs"]) == len(probe["tokens"]) == len(written.tokens)
        with torch.no_grad():
            logits = model(torch.tensor([[*ids[:half], *written.tokens]]))[0, half - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(written.tokens)[:, None])[:, 0]
        assert np.allclose(probe["log_probs"], own.numpy(), atol=1e-4)


@pytest.mark.parametrize("first", ["token", "none"])
def test_a_classifier_names_fixed_pictures(texts: Path, tmp_path: Path, first: str) -> None:
    run = train_case("pictures", texts, tmp_path / "run", f"model.first={first}")
    loaded, last, examples = load_torch_run(run), lines(run)[-1], sentences_of(run)
    model: Any = loaded.model
    assert {example["label"] for example in examples} == set(QUARTERS)
    side = model.config.side
    for example, probe in zip(examples, last["sentences"], strict=True):
        data = zlib.decompress(base64.b64decode(example["pixels"]))
        pixels = np.frombuffer(data, np.uint8).reshape(example["size"]).transpose(2, 0, 1)
        images = normalize(from_pixels(pixels[None].copy(), torch.device("cpu")), model.config)
        with capture(model) as maps, torch.no_grad():
            shares = model(images)[0].softmax(-1)
        recorded = dict(probe["probabilities"])
        names = model.config.head.labels
        assert np.allclose([recorded[name] for name in names], shares, atol=1e-4)
        truth = names.index(example["label"])
        assert np.isclose(probe["reference_log_probs"][0], float(shares[truth].log()), atol=1e-4)
        weights = torch.stack(maps["self"])[:, 0]
        looks = weights[:, :, 0, 1:] if first == "token" else weights.mean(2)
        greatest = looks.amax(-1, keepdim=True)
        assert np.allclose(probe["maxima"], greatest[..., 0], atol=1e-5)
        expected = (looks / greatest).unflatten(-1, (side, side))
        assert np.abs(attention(probe) / 255 - expected.numpy()).max() <= 0.5 / 255 + 1e-4


@pytest.mark.parametrize("name", ["causal stream", "pictures"])
def test_no_probe_changes_a_training(
    texts: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by drawing random numbers, in a trainer whose steps do not seed their own."""
    drawn = []

    class DrawingProbe(Probe):
        def __init__(
            self, task: Any, folder: Path, examples: Any, measure: Callable[[Any], Any]
        ) -> None:
            def measure_and_draw(model: Any) -> Any:
                drawn.append((torch.rand(3), np.random.rand()))
                return measure(model)

            super().__init__(task, folder, examples, measure_and_draw)

    monkeypatch.setattr("manyheads.tasks.probes.Probe", DrawingProbe)
    monkeypatch.setattr("manyheads.train.loop.seed_step", lambda *_: None)
    states, models = [], []
    for folder, probes in (("with", 6), ("without", 0)):
        torch.manual_seed(1)
        np.random.seed(1)
        run = train_case(
            name, texts, tmp_path / folder, f"train.probes={probes}", "model.dropout=0.2"
        )
        states.append(np.random.rand())
        models.append(load_torch_run(run).model.state_dict())
        assert (run / "probes").exists() == bool(probes)
        assert len(drawn) == len(probe_steps(12, 6))
    assert states[0] == states[1]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
