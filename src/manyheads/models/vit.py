"""The Vision Transformer: an image is a sequence of patches (ViT)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import Mistake, check_at_least
from manyheads.models.heads import Answer, Classify, Crowned, Pooler
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.masks import full, look
from manyheads.nn.positions import Learned, PositionConfig
from manyheads.nn.shapes import Hidden

Images = Float[Tensor, "b channels height width"]


@dataclass(frozen=True, kw_only=True)
class VitConfig(Architecture):
    """An encoder of square patches; a class token stands before them."""

    position: PositionConfig = field(default_factory=Learned)
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    head: Classify | None = field(default_factory=Classify)
    pooler: Pooler | None = None
    kind: ClassVar[str] = "vit"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "patch_size", "channels"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        if self.image_size < self.patch_size:
            raise Mistake(
                f"model.image_size={self.image_size} holds no patch of {self.patch_size}: "
                "choose a smaller model.patch_size"
            )

    @property
    def positions(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def build(self) -> "Vit":
        return Vit(self)


class Patches(nn.Module):
    """Cuts an image into patches, each projected to a vector, the class token before them."""

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.first = nn.Parameter(torch.zeros(dim))

    def forward(self, images: Images) -> Hidden:
        patches = rearrange(self.project(images), "b d height width -> b (height width) d")
        first = repeat(self.first, "d -> b 1 d", b=images.shape[0])
        return torch.cat([first, patches], dim=1)


class Vit(Crowned):
    """Gives the logits of its classes, or hidden states without a head."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config.channels, config.dim, config.patch_size)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(replace(config, max_length=config.positions), causal=False)
        self.crown(config, config.head, config.pooler)
        initialise(self, config.initial, config.layers)

    def hidden(self, images: Images) -> Hidden:
        size = self.config.image_size
        if images.shape[1:] != (self.config.channels, size, size):
            raise Mistake(
                f"images of {list(images.shape[1:])} (channels, height, width), but the model "
                f"takes {[self.config.channels, size, size]}: resize them"
            )
        x = self.patches(images)
        sight = look(full, x.shape[1], device=x.device)
        return self.encoder(self.dropout(self.encoder.position.embed(x, sight.queries)), sight)

    def answer(self, hidden: Hidden) -> Answer:
        """What the model gives for hidden states."""
        return hidden if self.config.head is None else self.head(self.pool(hidden))

    def forward(self, images: Images) -> Answer:
        return self.answer(self.hidden(images))
