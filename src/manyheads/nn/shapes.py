"""One legend for every tensor signature, einops pattern and einsum of the project.

b batch · t query positions · s key positions · h heads · g key/value heads · c channels of a
query or value head · e channels of a key head (c, unless a score joins different sizes) ·
d model width · f feed-forward width · v vocabulary
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Int[Tensor, "b t"]
Real = Bool[Tensor, "b s"]
Hidden = Float[Tensor, "b t d"]
Logits = Float[Tensor, "b t v"]
Queries = Float[Tensor, "b h t c"]
Keys = Float[Tensor, "b g s e"]
Values = Float[Tensor, "b g s c"]
Weights = Float[Tensor, "b h t s"]
Positions = Int[Tensor, "#b t"]
KeyPositions = Int[Tensor, "#b s"]
