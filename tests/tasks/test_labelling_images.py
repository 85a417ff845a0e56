"""Pictures learned from their pixels: batches, normalisation, scores, commands, another size."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tasks.small_texts import CPU, QUARTERS, SIZES, STEPS, recipe_trainer, write_pictures
from tests.test_cli import call, mistake, result
from tests.train.small_runs import assert_same_bits

from manyheads.commands.encode import classify_pictures
from manyheads.data.images import ImageData, Pictures
from manyheads.errors import UserError
from manyheads.lab.compare import table_of
from manyheads.loading import load_torch_run
from manyheads.models.heads import Classify
from manyheads.models.vit import Vit, VitConfig, resized
from manyheads.run import Run, read_run
from manyheads.tasks.images import (
    ImageTask,
    all_logits,
    class_loss,
    evaluate_images,
    fitted,
    from_pixels,
    pixel_spread,
    places,
    seen,
)
from manyheads.train.optimizer import Train

SMALL = (*STEPS, *SIZES, "model.image_size=8", "train.log_every=20")
QUICK = ("train.steps=60", "train.batch_rows=16", "train.validate_every=60", "train.save_every=60")
LEARNING = ("train.learning_rate=1e-2", "data.augment.crop_padding=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("quarters")
    write_pictures(found, 120)
    return found


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "quarters"
    recipe_trainer("images", out, f"data.folder={folder}", *SMALL, *QUICK, *LEARNING).run()
    return out


def pictures(count: int = 12, channels: int = 2, classes: int = 3) -> Pictures:
    draw = np.random.default_rng(1)
    pixels = draw.integers(0, 256, (count, channels, 8, 8), dtype=np.uint8)
    return Pictures(pixels, np.arange(count) % classes, [f"c{n}" for n in range(classes)])


def tiny(classes: int = 3, channels: int = 2, **changes: Any) -> VitConfig:
    head = Classify(labels=tuple(f"c{n}" for n in range(classes)))
    sizes: dict[str, Any] = {"dim": 8, "layers": 1, "heads": 2, "patch_size": 4, "image_size": 8}
    return VitConfig(**{**sizes, "channels": channels, "head": head, "dropout": 0.0, **changes})


def task(seed: int = 1, part: Pictures | None = None, **train: Any) -> ImageTask:
    data = ImageData()
    data = replace(data, augment=replace(data.augment, crop_padding=2, flip=0.5))
    data = replace(data, mixing=replace(data.mixing, mixup=0.3, chance=0.5))
    part = part or pictures()
    settings = Train(**{"batch_rows": 4, **train})
    run = Run(task="images", data=data, tokens=None, model=tiny(), train=settings, seed=seed)
    return ImageTask(run, part, part, None, CPU)


@pytest.mark.parametrize(
    "way", [(), ("model.first=none", "model.position=sinusoidal-2d"), ("model.pooler.over=mean",)]
)
def test_bright_quarters_are_told_apart(way: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    settings = (f"data.folder={folder}", *SMALL, *QUICK, *LEARNING, *way)
    recipe_trainer("images", tmp_path / "run", *settings).run()
    model = load_torch_run(tmp_path / "run").model
    assert isinstance(model, Vit)
    scores = evaluate_images(model, ImageData(folder=str(folder)), "valid")
    assert scores["accuracy"] == 1.0
    counts = np.array(scores["confusion"]["counts"])
    assert (counts == np.diag([3, 3, 3, 3])).all()
    assert "top5" not in scores  # of four classes it would say nothing


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    one, same, other = task(), task(), task(seed=2)
    for step in (0, 5):
        a, b, c = (each.batches(step)[0] for each in (one, same, other))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.wanted, b.wanted)
        assert not torch.equal(a.images, c.images)
        torch.testing.assert_close(a.wanted.sum(1), torch.ones(4))
    assert not torch.equal(one.batches(0)[0].images, one.batches(3)[0].images)  # the next epoch
    assert one.tokens(a) == 4 * 5
    assert task(batch_rows=None, batch_tokens=17).order.size == 3  # patches and token of three


def test_what_the_model_sees_has_mean_zero_and_deviation_one() -> None:
    part = pictures(500, channels=3)
    part.pixels[:, 1] //= 5
    part.pixels[:, 2] = 40  # a channel of one value
    model = fitted(tiny(channels=3, head=Classify()), part)
    x = seen(from_pixels(part.pixels, CPU), model).double()
    means, deviations = x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)
    torch.testing.assert_close(means, torch.zeros(3).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        deviations, torch.tensor([1.0, 1.0, 0.0]).double(), atol=1e-4, rtol=0
    )
    assert model.head == Classify(labels=("c0", "c1", "c2"))
    told = replace(model, pixel_mean=(0.5,) * 3, pixel_deviation=(0.25,) * 3, head=Classify())
    assert fitted(told, part).pixel_mean == (0.5,) * 3  # what is told stays
    assert pixel_spread(part.pixels) == (model.pixel_mean, model.pixel_deviation)


def test_the_loss_by_plain_loops() -> None:
    logits = torch.randn(4, 5)
    wanted = torch.rand(4, 5).softmax(-1)
    plain = smooth = 0.0
    for z, q in zip(logits.tolist(), wanted.tolist(), strict=True):
        total = math.log(sum(map(math.exp, z)))
        plain -= sum(share * (one - total) for one, share in zip(z, q, strict=True))
        mixed = [0.8 * share + 0.2 / 5 for share in q]
        smooth -= sum(share * (one - total) for one, share in zip(z, mixed, strict=True))
    found = class_loss(logits, wanted, 0.2)
    assert (float(found.nll), float(found.objective)) == pytest.approx((plain, smooth), rel=1e-5)
    assert found.count == 4


def test_scores_by_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    part = pictures(40, classes=7)
    model = tiny(classes=7).build()
    monkeypatch.setattr(ImageData, "read", lambda self, split: part)
    scores = evaluate_images(model, ImageData(), "test")
    logits = all_logits(model, part.pixels).tolist()
    right = among = 0
    counts = [[0] * 7 for _ in range(7)]
    for row, label in zip(logits, part.labels.tolist(), strict=True):
        order = sorted(range(7), key=lambda n, row=row: -row[n])  # type: ignore[misc]
        right, among = right + (order[0] == label), among + (label in order[:5])
        counts[label][order[0]] += 1
    assert scores["accuracy"] == right / 40
    assert scores["top5"] == among / 40
    assert scores["confusion"] == {"classes": part.classes, "counts": counts}
    assert scores["signature"].keys() == {"accuracy", "loss", "top5"}
    assert (scores["split"], scores["examples"]) == ("test", 40)


def test_a_validation_is_the_scores_of_all_its_pictures() -> None:
    torch.manual_seed(2)
    model, found = tiny().build().eval(), task(part=pictures(17))
    logits = all_logits(model, found.valid)
    rows = zip(logits.log_softmax(-1), found.valid_labels.tolist(), strict=True)
    right = [(int(row.argmax()) == label, -float(row[label])) for row, label in rows]
    scores = found.validate(model)
    assert 0 < scores["accuracy"] < 1
    assert scores["accuracy"] == pytest.approx(np.mean([hit for hit, _ in right]))
    assert scores["loss"] == pytest.approx(np.mean([loss for _, loss in right]), rel=1e-5)


def test_classes_are_matched_by_name() -> None:
    part = Pictures(pictures(4).pixels, np.array([0, 1, 1, 0]), ["c2", "c0"])
    assert places(part, ("c0", "c1", "c2")).tolist() == [2, 0, 0, 2]
    with pytest.raises(UserError, match="knows no class 'c2'"):
        places(part, ("c0", "c1"))


def test_a_run_keeps_what_its_data_decided(trained: Path) -> None:
    model = read_run(trained).model
    assert isinstance(model, VitConfig)
    assert isinstance(model.head, Classify)
    assert model.head.labels == QUARTERS
    assert len(model.pixel_mean) == len(model.pixel_deviation) == 1
    assert not (trained / "tokenizer.json").exists()


def test_a_start_of_another_size_is_interpolated(
    trained: Path, folder: Path, tmp_path: Path
) -> None:
    larger = ("data.size=16", "model.image_size=16", f"model={trained}")
    settings = [f"data.folder={folder}", *STEPS, "train.steps=4", "train.batch_rows=8", *larger]
    found = recipe_trainer("images", tmp_path / "larger", *settings)
    start = load_torch_run(trained).model
    assert isinstance(start, Vit)
    wanted = resized(start, 16)
    for name, tensor in found.model.state_dict().items():  # the head too: the same classes
        assert torch.equal(tensor, wanted.state_dict()[name]), name
    assert found.task.model.pixel_mean == start.config.pixel_mean  # type: ignore[attr-defined]
    found.run()
    again = recipe_trainer(str(tmp_path / "larger/run.toml"), tmp_path / "larger")
    again.run()  # settled and at its end: nothing is done anew
    other = recipe_trainer("images", tmp_path / "other", *settings)
    other.run()
    assert_same_bits(tmp_path / "larger", tmp_path / "other")


def test_pictures_are_labelled_by_the_command(trained: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    files = []
    for number, name in enumerate(QUARTERS):
        pixels = np.full((8, 8), 50, dtype=np.uint8)
        row, column = divmod(number, 2)
        pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 200
        files.append(tmp_path / f"{name}.png")
        image.fromarray(pixels).save(files[-1])
    lines = [line.split("\t") for line in result("classify", trained, *files).splitlines()]
    assert [(label, file) for label, _, file in lines] == [
        (name, str(file)) for name, file in zip(QUARTERS, files, strict=True)
    ]
    assert all(0.5 < float(chance) <= 1 for _, chance, _ in lines)
    label, *scores, file = result("classify", trained, "--scores", files[0]).strip().split("\t")
    assert (label, file) == (QUARTERS[0], str(files[0]))
    assert [one.split("=")[0] for one in scores] == [*QUARTERS]
    found = json.loads(result("classify", trained, "--json", files[1]))
    assert found.keys() == {"file", "label", "scores"}
    assert sum(found["scores"].values()) == pytest.approx(1)
    # One that cannot be read is said in a line, and the others are answered.
    (tmp_path / "empty.png").write_bytes(b"")
    code, printed, said = call("classify", trained, tmp_path / "empty.png", files[3])
    assert code == 3
    assert printed.startswith(f"{QUARTERS[3]}\t")
    assert printed.count("\n") == said.count("\n") == 1
    assert "empty.png" in said
    # Of a folder all are labelled; one without pictures is said to be one.
    (tmp_path / "empty.png").unlink()
    lines = result("classify", trained, tmp_path).splitlines()
    assert [line.split("\t")[2] for line in lines] == sorted(map(str, files))
    (tmp_path / "none").mkdir()
    code, printed, said = call("classify", trained, tmp_path / "none", files[3])
    assert code == 2
    assert printed.startswith(f"{QUARTERS[3]}\t")
    assert f"{tmp_path / 'none'} is a folder, and no picture" in said


def test_an_edge_that_is_not_seen_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model from elsewhere may have such a size."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((10, 10), dtype=np.uint8)).save(tmp_path / "x.png")
    opened = load_torch_run(trained)
    assert isinstance(opened.model, Vit)
    config = replace(opened.model.config, image_size=10)
    edged = replace(opened, model=config.build(), run=replace(opened.run, model=config))
    for one, said in ((opened, ""), (edged, "the model ignores the last 2 rows and columns")):
        classify_pictures(one, [tmp_path / "x.png"], scores=False, as_json=False)
        assert capsys.readouterr().err.startswith(said)


def test_graphs_label_and_score_as_the_run_does(
    trained: Path, folder: Path, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("onnxruntime")
    graphs, file = tmp_path / "graphs", tmp_path / "one.png"
    result("export", trained, "--to", "onnx", "--out", graphs)
    draw = np.random.default_rng(3)
    image.fromarray(draw.integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(file)
    one, other = (
        json.loads(result("classify", run, "--json", file, "--device", "cpu"))
        for run in (trained, graphs)
    )
    assert other["label"] == one["label"]
    assert other["scores"] == pytest.approx(one["scores"], abs=1e-5)
    ours, theirs = (
        json.loads(result("evaluate", run, "--split", "valid", "--json", "--device", "cpu"))
        for run in (trained, graphs)
    )
    assert theirs["confusion"] == ours["confusion"]
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    # Settings of another model beside them are said, and not answered by.
    settings = graphs / "run.toml"
    lines = settings.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if "# check sum" not in line)
    settings.write_text(text.replace("image_size = 8", "image_size = 12"), encoding="utf-8")
    assert "does not take the images of [1, 12, 12]" in mistake("classify", graphs, file, code=3)


def test_compare_shows_the_five_likeliest() -> None:
    rows = [{"settings": "a", "parameters": 5, "accuracy": 0.25, "top5": 0.75}]
    table = table_of(rows, "test")
    found = {column.header: [*column.cells] for column in table.columns}
    assert found["accuracy"] == ["0.250"]
    assert found["top5"] == ["0.750"]


def test_a_run_of_pictures_is_scored_and_drawn(trained: Path, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "confusion.png"
    words = ("evaluate", trained, "--split", "valid", "--json", "--picture", drawn)
    found = json.loads(result(*words))
    assert found["accuracy"] == 1.0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert json.loads((trained / "scores.json").read_text()) == found
    assert "must end in" in mistake("evaluate", trained, "--picture", tmp_path / "drawn.txt")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (("model.image_size=12",), "set model.image_size=8 model.channels=1 or data.size=12"),
        (("model.channels=3",), "data.size=8 data.channels=3"),
        (("model.image_size=10", "data.size=10"), "choose 8 or 12, as data.size too"),
        (("model.head=none",), "needs model.head=classify"),
        (("model.head.labels=a,b,c",), "not the classes of the pictures"),
        (("tokens=words",), "leave out tokens"),
        (("model.pixel_mean=0.1,0.2",), "pixel_mean"),
        (("data.folder=none-such",), "none-such"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    settings: tuple[str, ...], advice: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ("train", "images", f"data.folder={folder}", *SMALL, *settings, "--out", out)
    code, printed, said = call(*words)
    assert code in (2, 3)
    assert printed == ""
    assert said.startswith("manyheads: ")
    assert said.count("\n") == 1
    assert advice in said
    assert not out.exists()


def test_commands_for_texts_and_for_pictures_are_told_apart(trained: Path) -> None:
    assert "classify RUN a.png" in mistake("classify", trained)
    assert "model of images" in mistake("embed", trained, "--out", "x.npy", stdin=b"a\n")
    assert "--beam works only with translators" in mistake("evaluate", trained, "--beam", "2")
