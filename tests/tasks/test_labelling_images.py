"""Images classified by their pixels: batches, normalisation, scores, commands, another size."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import resized
from tests.tasks.small_texts import CPU, QUARTERS, SIZES, STEPS, recipe_trainer, write_pictures
from tests.test_cli import call, mistake, result
from tests.train.small_runs import assert_same_bits

from manyheads.data.images import ImageData, ImageSet
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.models.heads import Classify
from manyheads.models.vit import Vit, VitConfig
from manyheads.run import Run
from manyheads.tasks.images import (
    ImageTask,
    class_indices,
    evaluate,
    fit_config,
    from_pixels,
    normalize,
    pixel_statistics,
    predict,
)
from manyheads.tasks.spec import LoadedModel
from manyheads.train.optimizer import Train

SMALL = (*STEPS, *SIZES, "model.image_size=8", "train.log_every=20")
QUICK = ("train.steps=60", "train.batch_rows=16", "train.validate_every=60", "train.save_every=60")
LEARNING = ("train.learning_rate=1e-2", "data.augment.crop_padding=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quarters")
    write_pictures(folder, 120)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "quarters"
    recipe_trainer("images", out, f"data.folder={folder}", *SMALL, *QUICK, *LEARNING).run()
    return out


def make_images(count: int = 12, channels: int = 2, classes: int = 3) -> ImageSet:
    random = np.random.default_rng(1)
    pixels = random.integers(0, 256, (count, channels, 8, 8), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % classes, [f"c{n}" for n in range(classes)])


def tiny(classes: int = 3, channels: int = 2, **changes: Any) -> VitConfig:
    head = Classify(labels=tuple(f"c{n}" for n in range(classes)))
    sizes: dict[str, Any] = {"dim": 8, "layers": 1, "heads": 2, "patch_size": 4, "image_size": 8}
    return VitConfig(**{**sizes, "channels": channels, "head": head, "dropout": 0.0, **changes})


def make_task(seed: int = 1, part: ImageSet | None = None, **train: Any) -> ImageTask:
    data = ImageData()
    data = replace(data, augment=replace(data.augment, crop_padding=2, flip=0.5))
    data = replace(data, mixing=replace(data.mixing, mixup=0.3, chance=0.5))
    part = part or make_images()
    settings = Train(**{"batch_rows": 4, **train})
    run = Run(task="images", data=data, tokens=None, model=tiny(), train=settings, seed=seed)
    return ImageTask(run, part, part, None, CPU)


@pytest.mark.parametrize(
    "way", [(), ("model.first=none", "model.position=sinusoidal-2d"), ("model.pooler.over=mean",)]
)
def test_quarters_are_learned(way: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    settings = (f"data.folder={folder}", *SMALL, *QUICK, *LEARNING, *way)
    recipe_trainer("images", tmp_path / "run", *settings).run()
    scores = load_torch_run(tmp_path / "run").evaluate(ImageData(folder=str(folder)), "valid")
    assert scores["accuracy"] == 1.0
    assert (np.array(scores["confusion"]["counts"]) == np.diag([3, 3, 3, 3])).all()
    assert "top5" not in scores  # of four classes


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    task, same, other = make_task(), make_task(), make_task(seed=2)
    for step in (0, 5):
        a, b, c = (each.batches(step)[0] for each in (task, same, other))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert not torch.equal(a.images, c.images)
        torch.testing.assert_close(a.labels.sum(1), torch.ones(4))
    assert not torch.equal(task.batches(0)[0].images, task.batches(3)[0].images)  # next epoch
    assert task.tokens(a) == 4 * 5
    assert make_task(batch_rows=None, batch_tokens=17).order.size == 3  # of 5 positions each


def test_normalized_pixels_have_mean_zero_and_deviation_one() -> None:
    part = make_images(500, channels=3)
    part.pixels[:, 1] //= 5
    part.pixels[:, 2] = 40  # a constant channel
    model = fit_config(tiny(channels=3, head=Classify()), part)
    x = normalize(from_pixels(part.pixels, CPU), model).double()
    means, deviations = x.mean((0, 2, 3)).tolist(), x.std((0, 2, 3), correction=0).tolist()
    assert means == pytest.approx([0, 0, 0], abs=1e-4)
    assert deviations == pytest.approx([1, 1, 0], abs=1e-4)
    assert model.head == Classify(labels=("c0", "c1", "c2"))
    preset = replace(model, pixel_mean=(0.5,) * 3, pixel_std=(0.25,) * 3, head=Classify())
    assert fit_config(preset, part).pixel_mean == (0.5,) * 3  # kept
    assert pixel_statistics(part.pixels) == (model.pixel_mean, model.pixel_std)


def test_scores_by_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    part, model = make_images(40, classes=7), tiny(classes=7).build()
    monkeypatch.setattr(ImageData, "read", lambda self, split: part)
    loaded: Any = type("Loaded", (LoadedModel,), {"labeller": lambda self: model})()
    scores = evaluate(loaded, ImageData(), "test")
    logits = predict(model, part.pixels)
    hits = hits_in_top = 0
    loss, counts = 0.0, [[0] * 7 for _ in range(7)]
    for row, label in zip(logits, part.labels.tolist(), strict=True):
        order = row.argsort(descending=True).tolist()
        hits, hits_in_top = hits + (order[0] == label), hits_in_top + (label in order[:5])
        counts[label][order[0]] += 1
        loss -= float(row.log_softmax(-1)[label]) / 40
    assert (scores["accuracy"], scores["top5"]) == (hits / 40, hits_in_top / 40)
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["confusion"] == {"classes": part.classes, "counts": counts}
    assert scores["signature"].keys() == {"accuracy", "loss", "top5"}
    assert (scores["split"], scores["examples"]) == ("test", 40)


def test_classes_are_matched_by_name() -> None:
    part = ImageSet(make_images(4).pixels, np.array([0, 1, 1, 0]), ["c2", "c0"])
    assert class_indices(part, ("c0", "c1", "c2")).tolist() == [2, 0, 0, 2]
    with pytest.raises(UserError, match="no class 'c2'"):
        class_indices(part, ("c0", "c1"))


def test_trained_weights_of_another_size_are_interpolated(
    trained: Path, folder: Path, tmp_path: Path
) -> None:
    larger = ("data.size=16", "model.image_size=16", f"model={trained}")
    settings = [f"data.folder={folder}", *STEPS, "train.steps=4", "train.batch_rows=8", *larger]
    trainer = recipe_trainer("images", tmp_path / "larger", *settings)
    start = load_torch_run(trained).model
    assert isinstance(start, Vit)
    expected = resized(start, 16).state_dict()
    for name, tensor in trainer.model.state_dict().items():  # the head too: the same classes
        assert torch.equal(tensor, expected[name]), name
    assert trainer.task.run.model.pixel_mean == start.config.pixel_mean  # type: ignore[attr-defined]
    trainer.run()
    recipe_trainer(str(tmp_path / "larger/run.toml"), tmp_path / "larger").run()  # at its end
    recipe_trainer("images", tmp_path / "other", *settings).run()
    assert_same_bits(tmp_path / "larger", tmp_path / "other")


def test_images_are_labelled_by_the_command(trained: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    files = []
    for number, name in enumerate(QUARTERS):
        pixels = np.full((8, 8), 50, dtype=np.uint8)
        row, column = divmod(number, 2)
        pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 200
        files.append(tmp_path / f"{name}.png")
        image.fromarray(pixels).save(files[-1])
    lines = [line.split("\t") for line in result("classify", trained, *files).splitlines()]
    assert [label for label, _, _ in lines] == [*QUARTERS]
    assert [file for _, _, file in lines] == [*map(str, files)]
    assert all(0.5 < float(probability) <= 1 for _, probability, _ in lines)
    label, *scores, file = result("classify", trained, "--scores", files[0]).strip().split("\t")
    assert (label, file) == (QUARTERS[0], str(files[0]))
    assert [score.split("=")[0] for score in scores] == [*QUARTERS]
    printed = json.loads(result("classify", trained, "--json", files[1]))
    assert printed.keys() == {"file", "label", "scores"}
    assert sum(printed["scores"].values()) == pytest.approx(1)
    # A folder stands for all its images. A broken or empty one does not stop the others.
    lines = result("classify", trained, tmp_path).splitlines()
    assert [line.split("\t")[2] for line in lines] == sorted(map(str, files))
    (tmp_path / "broken.png").write_bytes(b"")
    (tmp_path / "none").mkdir()
    for bad, expected in ((tmp_path / "broken.png", 3), (tmp_path / "none", 2)):
        code, stdout, stderr = call("classify", trained, bad, files[3])
        assert code == expected
        assert stdout.startswith(f"{QUARTERS[3]}\t")
        assert str(bad) in stderr
        assert stdout.count("\n") == stderr.count("\n") == 1


def test_evaluate_draws_the_confusion_matrix(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "confusion.png"
    words = ("evaluate", trained, "--split", "valid", "--json", "--plot", plot)
    scores = json.loads(result(*words))
    assert scores["accuracy"] == 1.0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads((trained / "scores.json").read_text()) == scores
    assert "--plot" in mistake("evaluate", trained, "--picture", tmp_path / "drawn.txt")
    lines = result("evaluate", trained, "--split", "valid", "--by-class").splitlines()
    assert sum("precision 1.0000  recall 1.0000" in line for line in lines) == len(QUARTERS)
    assert len({line.index("  ", line.index(line.strip())) for line in lines}) == 1  # aligned
