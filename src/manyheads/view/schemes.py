"""What each position scheme tells a query at i of a key at j, as one matrix a scheme.

Positions that are added to embeddings meet in the dot product, PE_i · PE_j / d. Rotary ones turn
a query and a key that are equal, ⟨R_i 1, R_j 1⟩ / c. Relative ones add to the score: what they add
for a query of ones, in the first head. Schemes that learn show what the run has learned if it is
its own scheme, else what they begin with.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from manyheads.models.base import Model
from manyheads.nn.block import Architecture
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Position,
    PositionSizes,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.relative import PositionConfig, Relative

Matrix = Float[Tensor, "t s"]
SCHEMES: tuple[PositionConfig, ...] = (
    *(NoPosition(), Sinusoidal(), Learned(), Rotary()),
    *(Shaw(), Buckets(), Alibi(), Relative()),
)


@torch.no_grad()
def schemes(model: Model, config: Architecture, length: int) -> dict[str, Matrix]:
    """A matrix for every scheme in the sizes of this model; its own as it is in the model."""
    stacks = list(model.stacks().values())
    head_dim = config.head_dim or config.dim // config.heads
    sizes = PositionSizes(
        dim=config.dim, heads=config.heads, head_dim=head_dim, max_length=length, causal=False
    )
    found = {}
    for scheme in SCHEMES:
        name, own = scheme.kind, scheme.kind == config.position.kind and bool(stacks)
        if scheme.kind == "rotary" and head_dim % 2:
            continue  # it turns pairs of channels
        position = stacks[-1].position if own else scheme.build(sizes)
        device = next((p.device for p in position.parameters()), torch.device("cpu"))
        if own:
            name += " (of the run)"
        elif any(True for _ in position.parameters()):
            name += " (untrained)"
        found[name] = matrix_of(position.to(device), sizes, length).cpu()
    return found


def matrix_of(position: Position, sizes: PositionSizes, length: int) -> Matrix:
    """By the hooks alone: whichever of them a scheme overrides is what is seen."""
    device = next((p.device for p in position.parameters()), torch.device("cpu"))
    if type(position) is Position:
        return torch.zeros(length, length)
    reach = length if position.max_length is None else min(length, position.max_length)
    places = torch.arange(reach, device=device)[None]
    added = position.embed(torch.zeros(1, reach, sizes.dim, device=device), places)[0]
    if bool(added.any()):
        return einsum(added, added, "t d, s d -> t s") / sizes.dim
    ones = torch.ones(1, sizes.heads, reach, sizes.head_dim, device=device)
    bias = position.score(ones, places, places)
    if bias is not None:
        return bias[0, 0]
    turned = position.rotate(ones, places)[0, 0]
    return einsum(turned, turned, "t c, s c -> t s") / sizes.head_dim
