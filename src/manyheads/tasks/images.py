"""Classes for pictures: training with augmentation, validation, and which class is taken for which.

Pixels are numbers from 0 to 1, x = (pixel − mean) / deviation is what the model sees, and
L = −Σ_k q_k log p_k its loss; q is the class of a picture, or of two where they are mixed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.augmentation import augment, mix
from manyheads.data.batching import Rows, Shuffled, split
from manyheads.data.images import ImageData, Pictures
from manyheads.errors import DataError, UserError
from manyheads.evaluate.scores import Scores
from manyheads.models.heads import Classify
from manyheads.models.vit import Images, ReadsImages, Vit, VitConfig
from manyheads.tasks.spec import LoadedModel, RunSettings, TaskSpec
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.step import Loss

Pixels = UInt8[np.ndarray, "n channels height width"]
Classes = Int[np.ndarray, " n"]
Chances = Float[Tensor, "n labels"]

AT_ONCE = {"cpu": 64, "cuda": 1024}  # pictures that are only looked at
AUGMENTATION = 3  # parts what is drawn for pictures from the order of the rows
TOP = 5
# What the published models take for the mean and the deviation where theirs are not told.
UNTOLD = 0.5


def check_size(model: VitConfig, part: Pictures) -> None:
    """Refuse pictures that the model does not read, with how to bring the two together."""
    channels, height, width = part.pixels.shape[1:]
    size = model.image_size
    if (channels, height, width) != (model.channels, size, size):
        own = f"model.image_size={height} model.channels={channels} or " * (height == width)
        raise UserError(
            f"pictures of {channels}×{height}×{width} (channels, height, width), and the model "
            f"reads {model.channels}×{size}×{size}: set {own}data.size={size} "
            f"data.channels={model.channels}"
        )


def fitted(model: VitConfig, part: Pictures) -> VitConfig:
    """The settings of a model with what its training data decides: classes, mean and deviation.

    A model that has a mean and a deviation, as trained ones do, keeps them: its weights go by them.
    """
    if not model.pixel_mean:  # a size of one's own choice
        model.check_whole()
    check_size(model, part)
    labels, head = tuple(part.classes), model.head
    if head is None:
        raise UserError("task=images needs model.head=classify: leave model.head out")
    if head.labels not in (Classify().labels, labels):
        raise UserError(
            f"model.head.labels={','.join(head.labels)} are not the classes of the pictures "
            f"({','.join(labels)}): leave them out"
        )
    if not model.pixel_mean:
        mean, deviation = pixel_spread(part.pixels)
        model = replace(model, pixel_mean=mean, pixel_deviation=deviation)
    return replace(model, head=replace(head, labels=labels))


def pixel_spread(pixels: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel; a channel of one value has deviation 1."""
    values = np.arange(256) / 255
    mean, deviation = [], []
    for channel in range(pixels.shape[1]):
        # Counted by value, in parts: exact, and no copy of all of it in a wider type.
        parts = (pixels[n : n + 1024, channel] for n in range(0, len(pixels), 1024))
        counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
        share = counts / np.sum(counts)
        mean.append(round(float(share @ values), 6))
        spread = math.sqrt(float(share @ (values - share @ values) ** 2))
        deviation.append(round(spread, 6) or 1.0)
    return tuple(mean), tuple(deviation)


def seen(images: Images, config: VitConfig) -> Images:
    """Pixels from 0 to 1 as the model sees them."""
    untold = (UNTOLD,) * config.channels
    spreads = zip(config.pixel_mean or untold, config.pixel_deviation or untold, strict=True)
    planes = zip(images.unbind(1), spreads, strict=True)
    # Channel by channel, so that no number has to be brought to the device.
    return torch.stack([(plane - mean) / deviation for plane, (mean, deviation) in planes], 1)


@dataclass(frozen=True)
class ImageBatch:
    """Pictures from 0 to 1, and for each the share of every class in it."""

    images: Float[Tensor, "b channels height width"]
    wanted: Float[Tensor, "b labels"]


class ImageTask:
    """What the training loop asks of a model of images."""

    def __init__(
        self,
        run: RunSettings,
        part: Pictures,
        valid: Pictures,
        tokenizer: Tokenizer | None,
        device: torch.device,
    ) -> None:
        model, train = run.model, run.train
        self.data, self.model, self.train = run.data, model, train
        self.seed, self.device, self.names = run.seed, device, model.head.labels
        self.pixels, self.labels = part.pixels, places(part, self.names)
        self.valid, self.valid_labels = valid.pixels, places(valid, self.names)
        rows = train.batch_rows or max(1, train.batch_tokens // model.positions)
        self.order = Shuffled(len(self.labels), rows * train.accumulate, run.seed)
        self.per_epoch = self.order.per_epoch
        self.digest = part.digest()
        self.notes = list(dict.fromkeys([*part.notes, *valid.notes]))

    def batches(self, step: int) -> list[ImageBatch]:
        rows = self.order.rows(step)
        whole = self._drawn(rows, step)
        parts = split(np.arange(len(rows)), self.train.accumulate)
        return [ImageBatch(whole.images[part], whole.wanted[part]) for part in parts]

    def _drawn(self, rows: Rows, step: int) -> ImageBatch:
        """Augmented as a whole, so that it hangs on nothing but the seed and the step."""
        draw = np.random.default_rng([self.seed, step, AUGMENTATION])
        # A generator of the CPU, whatever the device: the same draws everywhere.
        generator = torch.Generator().manual_seed(int(draw.integers(2**63)))
        images = from_pixels(self.pixels[rows], self.device)
        labels = torch.from_numpy(self.labels[rows]).to(self.device)
        images = augment(images, self.data.augment, generator)
        return ImageBatch(*mix(images, labels, len(self.names), self.data.mixing, generator))

    def tokens(self, batch: ImageBatch) -> int:
        return len(batch.images) * self.model.positions

    def counts(self, batch: ImageBatch) -> dict[str, int]:
        return {"classes": len(batch.images)}

    def losses(self, model: nn.Module, batch: ImageBatch) -> dict[str, Loss]:
        images = seen(batch.images, self.model).to(next(model.parameters()).dtype)
        return {"classes": class_loss(model(images), batch.wanted, self.train.label_smoothing)}

    def describe(self, step: int) -> str:
        rows = ", ".join(map(str, self.order.rows(step)[:5] + 1))
        return f"pictures {rows} … of the training split"

    def validate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Vit)
        logits = all_logits(model, self.valid)
        wanted = torch.from_numpy(self.valid_labels)
        right = (logits.argmax(-1) == wanted).double().mean()
        return {"loss": float(F.cross_entropy(logits, wanted)), "accuracy": float(right)}


def from_pixels(pixels: Pixels, device: torch.device) -> Images:
    """From 0 to 1."""
    return torch.from_numpy(pixels).to(device).float() / 255


def class_loss(
    logits: Float[Tensor, "b labels"], wanted: Float[Tensor, "b labels"], smoothing: float = 0.0
) -> Loss:
    """−Σ_k q_k log p_k, a sum over the pictures; smoothing gives ε of q to all classes alike."""
    logits = logits.float()
    plain = F.cross_entropy(logits, wanted, reduction="sum")
    if not smoothing:
        return Loss(plain, plain.detach(), len(wanted))
    smoothed = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing)
    return Loss(smoothed, plain.detach(), len(wanted))


def places(part: Pictures, names: Sequence[str]) -> Classes:
    """The class number of each picture: where its class stands among the names."""
    unknown = [one for one in part.classes if one not in names]
    if unknown:
        raise DataError(
            f"the model knows no class '{unknown[0]}' ({', '.join(names[:10])}"
            f"{' …' if len(names) > 10 else ''}): give pictures of its own classes"
        )
    numbers = np.array([names.index(one) for one in part.classes], dtype=np.int64)
    return numbers[part.labels]


@torch.no_grad()
def all_logits(model: ReadsImages, pixels: Pixels) -> Chances:
    """What the model says of pictures, without any augmentation."""
    like = torch.empty(0)  # as graphs take them
    if isinstance(model, nn.Module):
        like = next(model.eval().parameters())
    size = AT_ONCE.get(like.device.type, AT_ONCE["cuda"])
    found = []
    for start in range(0, len(pixels), size):
        images = from_pixels(pixels[start : start + size], like.device)
        found.append(model(seen(images, model.config).to(like.dtype)).float().cpu())
    return torch.cat(found)


def class_chances(model: ReadsImages, pixels: Pixels) -> list[dict[str, float]]:
    """The probability of every class for each picture."""
    assert model.config.head is not None
    names = model.config.head.labels
    rows = all_logits(model, pixels).softmax(-1).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def evaluate_images(model: ReadsImages, data: ImageData, split_name: str) -> Scores:
    """Accuracy and loss on a split, and how often each class (row) is taken for each (column)."""
    part = data.read(split_name)
    check_size(model.config, part)
    assert model.config.head is not None
    names = model.config.head.labels
    logits, wanted = all_logits(model, part.pixels), torch.from_numpy(places(part, names))
    given = logits.argmax(-1)
    scores: Scores = {
        "accuracy": float((given == wanted).double().mean()),
        "loss": float(F.cross_entropy(logits, wanted)),
    }
    signature = {
        "accuracy": "share of pictures whose likeliest class is theirs",
        "loss": "−log p of the class, in nats, mean over the pictures",
    }
    if len(names) > TOP:
        among = logits.topk(TOP).indices == wanted[:, None]
        scores["top5"] = float(among.any(-1).double().mean())
        signature["top5"] = "share of pictures whose class is among the five likeliest"
    pairs = np.bincount((wanted * len(names) + given).numpy(), minlength=len(names) ** 2)
    counts = pairs.reshape(len(names), len(names)).tolist()
    scores["confusion"] = {"classes": list(names), "counts": counts}
    return scores | {"signature": signature, "split": split_name, "examples": len(wanted)}


def evaluate(loaded: LoadedModel, data: ImageData, split_name: str) -> Scores:
    return evaluate_images(loaded.labeller(), data, split_name)


SPEC = TaskSpec(
    task="images",
    models=(VitConfig,),
    data=(ImageData,),
    recipe="images",
    reads_text=False,
    is_default=True,
    fit_model=lambda run, part: fitted(run.model, part),
    prepare=ImageTask,
    finetune=lambda config, run: replace(config, head=Classify()),
    evaluate=evaluate,
    offers=("label",),
)
