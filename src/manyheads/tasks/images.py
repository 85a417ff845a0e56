"""Classification of images: training with augmentation, accuracy and confusion.

The model sees x = (pixel − mean) / std of pixels from 0 to 1. L = −Σ_k q_k log p_k, where q is the
class of an image, or of two that are mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.augmentation import augment, mix
from manyheads.data.batching import Shuffled, split
from manyheads.data.files import join_names
from manyheads.data.images import ImageData, ImageSet
from manyheads.errors import DataError, UserError
from manyheads.evaluate.labels import class_report
from manyheads.evaluate.scores import Scores, add_plugin_metrics
from manyheads.models.heads import Classify
from manyheads.models.vit import Images, Vit, VitConfig
from manyheads.tasks.classification import label_loss, with_labels
from manyheads.tasks.probes import image_probe
from manyheads.tasks.spec import BaseTask, LoadedModel, TaskSpec
from manyheads.train.step import Loss

Pixels = UInt8[np.ndarray, "n channels height width"]

BATCH_IMAGES = {"cpu": 64, "cuda": 1024}  # in evaluation
AUGMENTATION = 3  # separates this random stream from others of the same seed and step
TOP = 5
DEFAULT_MEAN = 0.5  # and standard deviation, as published models have them


def check_size(model: VitConfig, part: ImageSet) -> None:
    """Refuse images of another size than the model's, with the settings that fix it."""
    shape, size = part.pixels.shape[1:], model.image_size
    if shape != (model.channels, size, size):
        channels, height, width = shape
        fix = f"model.image_size={height} model.channels={channels} or " * (height == width)
        raise UserError(
            f"images of {channels}×{height}×{width} (channels, height, width) do not fit the "
            f"model's {model.channels}×{size}×{size}: set {fix}data.size={size} "
            f"data.channels={model.channels}"
        )


def fit_config(model: VitConfig, part: ImageSet) -> VitConfig:
    """The settings with what the training data decides: classes, pixel mean and deviation.

    A trained model keeps its mean and deviation, which its weights depend on.
    """
    if not model.pixel_mean:  # not a trained model: the size was chosen here
        model.check_image_size()
    check_size(model, part)
    if model.head is None:
        raise UserError("task=images needs model.head=classify: leave model.head out")
    head = with_labels(model.head, tuple(part.classes), "the images")
    if not model.pixel_mean:
        mean, deviation = pixel_statistics(part.pixels)
        model = replace(model, pixel_mean=mean, pixel_std=deviation)
    return replace(model, head=head)


def pixel_statistics(pixels: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel; a constant channel has deviation 1."""
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        # A histogram, some images at a time: exact, and without a copy in a wider type.
        parts = (pixels[n : n + 1024, channel] for n in range(0, len(pixels), 1024))
        counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
        frequencies = counts / np.sum(counts)
        mean = float(frequencies @ values)
        deviation = float(np.sqrt(frequencies @ (values - mean) ** 2))
        means.append(round(mean, 6))
        deviations.append(round(deviation, 6) or 1.0)
    return tuple(means), tuple(deviations)


def from_pixels(pixels: Pixels, device: torch.device) -> Images:
    """Bytes as numbers from 0 to 1."""
    return torch.from_numpy(pixels).to(device).float() / 255


def normalize(images: Images, config: VitConfig) -> Images:
    """(pixel − mean) / deviation of each channel."""
    default = (DEFAULT_MEAN,) * config.channels
    means, deviations = config.pixel_mean or default, config.pixel_std or default
    # Channel by channel: the numbers need not be copied to the device.
    channels = zip(images.unbind(1), means, deviations, strict=True)
    return torch.stack([(channel - mean) / deviation for channel, mean, deviation in channels], 1)


@dataclass(frozen=True)
class ImageBatch:
    """Images from 0 to 1, and for each the probability of every class."""

    images: Float[Tensor, "b channels height width"]
    labels: Float[Tensor, "b labels"]


class ImageTask(BaseTask[ImageBatch]):
    """Image classification for the trainer."""

    examples = "training images"

    def load(self, part: ImageSet, valid: ImageSet) -> None:
        model, train = self.run.model, self.train
        names = model.head.labels
        self.pixels, self.labels = part.pixels, class_indices(part, names)
        self.valid, self.valid_labels = valid.pixels, class_indices(valid, names)
        rows = train.batch_rows or max(1, train.batch_tokens // model.positions)
        self.order = Shuffled(len(self.labels), rows * train.accumulate, self.run.seed)
        self.per_epoch = self.order.per_epoch
        self.digest = part.digest()

    def batches(self, step: int) -> list[ImageBatch]:
        """Augmented before it is split, so that it depends only on seed and step."""
        rows, data = self.rows(step), self.run.data
        random = np.random.default_rng([self.run.seed, step, AUGMENTATION])
        # A generator of the CPU, whatever the device: the same random numbers everywhere.
        generator = torch.Generator().manual_seed(int(random.integers(2**63)))
        images = from_pixels(self.pixels[rows], self.device)
        images = augment(images, data.augment, generator)
        indices = torch.from_numpy(self.labels[rows]).to(self.device)
        classes = len(self.run.model.head.labels)
        images, labels = mix(images, indices, classes, data.mixing, generator)
        parts = split(np.arange(len(rows)), self.train.accumulate)
        return [ImageBatch(images[part], labels[part]) for part in parts]

    def tokens(self, batch: ImageBatch) -> int:
        positions: int = self.run.model.positions
        return len(batch.images) * positions

    def counts(self, batch: ImageBatch) -> dict[str, int]:
        return {"classes": len(batch.images)}

    def losses(self, model: nn.Module, batch: ImageBatch) -> dict[str, Loss]:
        images = normalize(batch.images, self.run.model).to(next(model.parameters()).dtype)
        return {"classes": label_loss(model(images), batch.labels, self.train.label_smoothing)}

    def normalized(self, rows: Sequence[int]) -> Images:
        """Validation images as the model sees them."""
        return normalize(from_pixels(self.valid[rows], self.device), self.run.model)

    def validate(self, model: Any) -> dict[str, float]:
        logits, labels = predict(model, self.valid), torch.from_numpy(self.valid_labels)
        correct = (logits.argmax(-1) == labels).double().mean()
        return {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(correct)}


def class_indices(part: ImageSet, names: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The index of each image's class among the names."""
    unknown = [name for name in part.classes if name not in names]
    if unknown:
        raise DataError(
            f"the model has no class '{unknown[0]}' {join_names(names)}: use images of its classes"
        )
    return np.array([names.index(name) for name in part.classes], dtype=np.int64)[part.labels]


@torch.no_grad()
def predict(model: Vit, pixels: Pixels) -> Float[Tensor, "n labels"]:
    """Logits of images, without augmentation."""
    like = next(model.eval().parameters())
    size = BATCH_IMAGES.get(like.device.type, BATCH_IMAGES["cuda"])
    logits = []
    for start in range(0, len(pixels), size):
        images = from_pixels(pixels[start : start + size], like.device)
        logits.append(model(normalize(images, model.config).to(like.dtype)).float().cpu())
    return torch.cat(logits)


def class_probabilities(model: Vit, pixels: Pixels) -> list[dict[str, float]]:
    """The probability of every class for each image."""
    assert model.config.head is not None
    names = model.config.head.labels
    rows = predict(model, pixels).softmax(-1).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def evaluate(
    loaded: LoadedModel, data: ImageData, split_name: str, *, by_class: bool = False
) -> Scores:
    """Accuracy and loss of a split, and its confusion matrix: true class by predicted class."""
    model, part = loaded.labeller(), data.read(split_name)
    check_size(model.config, part)
    assert model.config.head is not None
    names = model.config.head.labels
    logits, labels = predict(model, part.pixels), torch.from_numpy(class_indices(part, names))
    predictions = logits.argmax(-1)
    scores: Scores = {
        "accuracy": float((predictions == labels).double().mean()),
        "loss": float(F.cross_entropy(logits, labels)),
    }
    signature = {
        "accuracy": "share of pictures whose likeliest class is theirs",
        "loss": "−log p of the class, in nats, mean over the pictures",
    }
    if len(names) > TOP:
        in_top = (logits.topk(TOP).indices == labels[:, None]).any(-1)
        scores["top5"] = float(in_top.double().mean())
        signature["top5"] = "share of pictures whose class is among the five likeliest"
    cells = (labels * len(names) + predictions).bincount(minlength=len(names) ** 2)
    counts = cells.view(len(names), len(names)).tolist()
    scores["confusion"] = {"classes": list(names), "counts": counts}
    scores |= {"signature": signature, "split": split_name, "examples": len(labels)}
    predicted, correct = ([names[index] for index in side] for side in (predictions, labels))
    if by_class:
        scores["classes"] = class_report(predicted, correct, names)
    return add_plugin_metrics(scores, "images", predicted, correct)


SPEC = TaskSpec(
    task="images",
    models=(VitConfig,),
    data=(ImageData,),
    recipe="images",
    reads_text=False,
    is_default=True,
    fit_model=lambda run, part: fit_config(run.model, part),
    prepare=ImageTask,
    probe=image_probe,
    finetune=lambda config, run: replace(config, head=Classify()),
    evaluate=evaluate,
    scoring=("plot", "by_class"),
    offers=("label",),
    served_as="images",
)
