"""The Vision Transformer: an image is a sequence of patches (ViT)."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count, NonNegative, Positive
from manyheads.errors import UserError
from manyheads.models.heads import Classify, EncoderWithHead, HeadOutput, Pooler, mean_of
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.masks import full, make_mask
from manyheads.nn.positions import Learned, PositionConfig, Sinusoidal2d
from manyheads.nn.shapes import Hidden

Images = Float[Tensor, "b channels height width"]
Weights = dict[str, Tensor]
TABLE = "encoder.positions.0.table.weight"  # learned positions


@dataclass(frozen=True, kw_only=True)
class VitConfig(Architecture):
    """An encoder of square patches.

    Pixels from 0 to 1 are normalised by `pixel_mean` and `pixel_std`, one number per channel, which
    a run takes from its training data. An imported model may have an image size that is not a
    multiple of the patch size: rows and columns after the last patch are ignored.
    """

    position: Annotated[PositionConfig | Sinusoidal2d, "Position scheme"] = field(  # type: ignore[assignment]
        default_factory=Learned
    )
    image_size: Annotated[Count, "Height and width of an image, in pixels"] = 224
    patch_size: Annotated[Count, "Height and width of a patch, in pixels"] = 16
    channels: Annotated[Count, "Colour channels"] = 3
    first: Annotated[
        Literal["token", "none"], "A class token before the patches, or the mean of the patches"
    ] = "token"
    pixel_mean: Annotated[tuple[NonNegative, ...], "Mean of each channel"] = ()
    pixel_std: Annotated[tuple[Positive, ...], "Standard deviation of each channel"] = ()
    head: Annotated[Classify | None, "Classifier; none: hidden states"] = field(
        default_factory=Classify
    )
    pooler: Annotated[Pooler | None, "Projection of the class token or of the mean"] = None
    kind: ClassVar[str] = "vit"

    RENAMED: ClassVar[dict[str, str]] = {**Architecture.RENAMED, "pixel_deviation": "pixel_std"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()
        if self.embed.position == "concatenate":
            raise UserError("model.embed.position=concatenate works only with tokens: leave it out")
        if self.image_size < self.patch_size:
            raise UserError(
                f"model.patch_size={self.patch_size} is larger than model.image_size="
                f"{self.image_size}: lower it"
            )
        if self.first == "none" and self.pooler is not None and self.pooler.over == "first":
            raise UserError(
                "model.pooler.over=first needs a class token, and model.first=none has none: set "
                "model.pooler.over=mean"
            )
        counts = len(self.pixel_mean), len(self.pixel_std)
        if counts not in ((0, 0), (self.channels, self.channels)):
            raise UserError(
                f"model.pixel_mean has {counts[0]} and model.pixel_std {counts[1]} numbers: set "
                f"one for each of {self.channels} channels, or none"
            )

    def check_image_size(self) -> None:
        """Refuse to train with a size that is not a multiple of the patch size."""
        if self.unseen:
            multiple = self.image_size - self.unseen
            raise UserError(
                f"model.image_size={self.image_size} is not a multiple of model.patch_size="
                f"{self.patch_size}: set model.image_size and data.size to {multiple} or "
                f"{multiple + self.patch_size}"
            )

    @property
    def unseen(self) -> int:
        """Rows, and columns, after the last patch, which the model ignores."""
        return self.image_size % self.patch_size

    @property
    def side(self) -> int:
        """Patches along one side of an image."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Patches of an image, and the class token if there is one."""
        return self.side**2 + (self.first == "token")

    def build(self) -> "Vit":
        return Vit(self)


class Patches(nn.Module):
    """Projects each patch to a vector; adds the class token, if any, before them."""

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


class Vit(EncoderWithHead):
    """Gives the logits of the classes, or hidden states without a head."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        token = config.first == "token"
        self.patches = Patches(config.channels, config.dim, config.patch_size, token=token)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(replace(config, max_length=config.positions), causal=False)
        self.build_head(config, config.head, config.pooler)
        initialise(self, config.init, config.layers)

    def hidden(self, images: Images) -> Hidden:
        size = self.config.image_size
        if images.shape[1:] != (self.config.channels, size, size):
            raise UserError(
                f"images have shape {list(images.shape[1:])} (channels, height, width), and the "
                f"model takes {[self.config.channels, size, size]}: resize them"
            )
        x = self.patches(images)
        mask = make_mask(full, x.shape[1], device=x.device)
        return self.encoder(
            self.dropout(self.encoder.position.embed(x, mask.query_positions)), mask
        )

    def head_output(self, hidden: Hidden) -> HeadOutput:
        """The model's output for hidden states."""
        if self.config.head is None:
            return hidden
        plain_mean = self.config.first == "none" and self.pooler is None
        return self.head(mean_of(hidden, None) if plain_mean else self.pool(hidden))

    def forward(self, images: Images) -> HeadOutput:
        return self.head_output(self.hidden(images))


def resize_learned(table: Float[Tensor, "n d"], old: int, new: int) -> Float[Tensor, "_ d"]:
    """Learned vectors of a grid of old × old patches for one of new × new, by bicubic resampling.

    Rows of the table before the patches stay unchanged.
    """
    before, grid = table[: len(table) - old**2], table[len(table) - old**2 :]
    image = rearrange(grid, "(row column) d -> 1 d row column", row=old)
    resized = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([before, rearrange(resized, "1 d row column -> (row column) d")])


def resize_weights(tensors: Weights, old: VitConfig, new: VitConfig) -> Weights:
    """Weights for images of another size: learned positions are interpolated."""
    if not isinstance(new.position, Learned) or old.side == new.side:
        return tensors
    return {**tensors, TABLE: resize_learned(tensors[TABLE], old.side, new.side)}
