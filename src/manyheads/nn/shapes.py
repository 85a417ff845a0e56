"""Shapes of tensors, in the letters of every signature, einops pattern and einsum of the package.

b batch · t query positions · s key positions · h heads · g key/value heads · c channels per head
d model width · f feed-forward width · v vocabulary

Keys have e channels: c, unless a score takes keys of another size (`model.score.key_size`).
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Int[Tensor, "b t"]
Positions = Int[Tensor, "#b t"]  # of queries
KeyPositions = Int[Tensor, "#b s"]
PaddingMask = Bool[Tensor, "b s"]  # True for real tokens
Hidden = Float[Tensor, "b t d"]
Logits = Float[Tensor, "b t v"]

Queries = Float[Tensor, "b h t c"]
Keys = Float[Tensor, "b g s e"]
Values = Float[Tensor, "b g s c"]
SharedKeys = Float[Tensor, "b h s e"]  # repeated for the query heads that share them
Weights = Float[Tensor, "b h t s"]  # also the scores before the softmax
ScoreBias = Float[Tensor, "#b h t s"]
HeadOutput = Float[Tensor, "b h t c"]  # weights · values
