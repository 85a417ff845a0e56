"""The Vision Transformer: an image is a sequence of patches (ViT)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.models.heads import Answer, Classify, EncoderWithHead, Pooler, mean_of
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.grid_positions import Sinusoidal2d, resize_learned
from manyheads.nn.masks import full, make_mask
from manyheads.nn.positions import Learned, PositionConfig
from manyheads.nn.shapes import Hidden

Images = Float[Tensor, "b channels height width"]
Weights = dict[str, Tensor]
TABLE = "encoder.positions.0.table.weight"  # where learned positions are


@dataclass(frozen=True, kw_only=True)
class VitConfig(Architecture):
    """An encoder of square patches.

    `first` says what stands before them: a class token, whose state is that of the image, or
    nothing; then the mean of the patches is. Images that are given as pixels from 0 to 1 are
    brought to mean 0 and deviation 1 by `pixel_mean` and `pixel_deviation`, one number a channel,
    before the model sees them; a run takes them from its training data, or has them from the model
    that it begins with. Models from elsewhere may have a size that is no multiple of the patches:
    what is right of and below the last whole one is not seen.
    """

    position: PositionConfig | Sinusoidal2d = field(default_factory=Learned)  # type: ignore[assignment]
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    first: Literal["token", "none"] = "token"
    pixel_mean: tuple[float, ...] = ()
    pixel_deviation: tuple[float, ...] = ()
    head: Classify | None = field(default_factory=Classify)
    pooler: Pooler | None = None
    kind: ClassVar[str] = "vit"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()
        for name in ("image_size", "patch_size", "channels"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        if self.image_size < self.patch_size:
            raise UserError(
                f"model.image_size={self.image_size} holds no patch of {self.patch_size}: "
                "choose a smaller model.patch_size"
            )
        if self.first == "none" and self.pooler is not None and self.pooler.over == "first":
            raise UserError(
                "model.pooler.over=first reads the class token, which model.first=none leaves out: "
                "choose model.pooler.over=mean"
            )
        mean, deviation = self.pixel_mean, self.pixel_deviation
        if len(mean) != len(deviation) or len(mean) not in (0, self.channels):
            raise UserError(
                f"model.pixel_mean has {len(mean)} and model.pixel_deviation {len(deviation)} "
                f"numbers: give one for each of {self.channels} channels, or leave them out"
            )
        for number in mean:
            check_at_least("model.pixel_mean", number, 0)
        for number in deviation:
            check_above_zero("model.pixel_deviation", number)

    def check_whole(self) -> None:
        """Refuse a size of one's own choice that leaves an edge unseen."""
        if self.unseen:
            fits = self.image_size - self.unseen
            raise UserError(
                f"model.image_size={self.image_size} is no multiple of model.patch_size="
                f"{self.patch_size}, and the last {self.unseen} rows and columns would not be "
                f"seen: choose {fits} or {fits + self.patch_size}, as data.size too"
            )

    @property
    def unseen(self) -> int:
        """Rows, and columns, of an image that make no whole patch."""
        return self.image_size % self.patch_size

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Patches of an image, and the class token where there is one."""
        return self.side**2 + (self.first == "token")

    def build(self) -> "Vit":
        return Vit(self)


class Patches(nn.Module):
    """Cuts an image into patches, each projected to a vector, a class token before them or none."""

    def __init__(self, channels: int, dim: int, patch_size: int, *, token: bool = True) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.first = nn.Parameter(torch.zeros(dim)) if token else None

    def forward(self, images: Images) -> Hidden:
        patches = rearrange(self.project(images), "b d height width -> b (height width) d")
        if self.first is None:
            return patches
        first = repeat(self.first, "d -> b 1 d", b=images.shape[0])
        return torch.cat([first, patches], dim=1)


@runtime_checkable
class ReadsImages(Protocol):
    """What answers images as a `Vit` does: one, or another program that runs it."""

    config: VitConfig

    def __call__(self, images: Images) -> Answer: ...


class Vit(EncoderWithHead):
    """Gives the logits of its classes, or hidden states without a head."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        token = config.first == "token"
        self.patches = Patches(config.channels, config.dim, config.patch_size, token=token)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(replace(config, max_length=config.positions), causal=False)
        self.crown(config, config.head, config.pooler)
        initialise(self, config.init, config.layers)

    def stacks(self) -> dict[str, Stack]:
        return {"encoder": self.encoder}

    def hidden(self, images: Images) -> Hidden:
        size = self.config.image_size
        if images.shape[1:] != (self.config.channels, size, size):
            raise UserError(
                f"images of {list(images.shape[1:])} (channels, height, width), but the model "
                f"takes {[self.config.channels, size, size]}: resize them"
            )
        x = self.patches(images)
        mask = make_mask(full, x.shape[1], device=x.device)
        return self.encoder(
            self.dropout(self.encoder.position.embed(x, mask.query_positions)), mask
        )

    def answer(self, hidden: Hidden) -> Answer:
        """What the model gives for hidden states."""
        if self.config.head is None:
            return hidden
        plain_mean = self.config.first == "none" and self.pooler is None
        return self.head(mean_of(hidden, None) if plain_mean else self.pool(hidden))

    def forward(self, images: Images) -> Answer:
        return self.answer(self.hidden(images))


def resized(model: Vit, image_size: int) -> Vit:
    """The same model for images of another size, its learned positions interpolated."""
    config = replace(model.config, image_size=image_size)
    config.check_whole()
    other = config.build()
    like = next(model.parameters())
    other.to(like.device, like.dtype)
    other.load_state_dict(resized_weights(dict(model.state_dict()), model.config, other.config))
    return other.train(model.training)


def resized_weights(tensors: Weights, old: VitConfig, new: VitConfig) -> Weights:
    """Weights of a model for images of another size: all but learned positions hang on no size."""
    if not isinstance(new.position, Learned) or old.side == new.side:
        return tensors
    return {**tensors, TABLE: resize_learned(tensors[TABLE], old.side, new.side)}
