"""Which tokens may be generated at which position."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.ops import has_fused_topk

if TYPE_CHECKING:
    from manyheads.decode.beam import Decode

NEVER = float("-inf")
Logits = Float[Tensor, "rows v"]
Totals = Float[Tensor, "rows 1"]
Lengths = Int[Tensor, " #rows"]
Last = Bool[Tensor, " rows"]


class LogitsConstraints:
    """−∞ for the tokens that may not come: suppressed ones, an early end, all but a forced one.

    Positions are counted from 1, and are numbers on the device.
    """

    def __init__(
        self, decode: "Decode", end: int, suppressed: Sequence[int], device: torch.device
    ) -> None:
        self.end, self.first = end, decode.forced_bos
        self.min_length, self.at_limit = decode.min_length, decode.at_limit
        tokens = [token for token in suppressed if token != end]
        self.suppressed = torch.tensor(tokens, dtype=torch.long, device=device)
        # All that it depends on.
        self.settings: tuple[Any, ...] = (
            self.end,
            self.first,
            self.min_length,
            self.at_limit,
            *tokens,
        )

    @property
    def forces_end(self) -> bool:
        """True if a row is forced to its end at its last position."""
        return self.at_limit != "truncate"

    def prepare(self, logits: Logits) -> Logits:
        """Logits in float32, unless kernels read them as they are."""
        writes_total = self.first is not None or self.at_limit == "force-eos-free"
        return logits.float() if writes_total or not has_fused_topk(logits) else logits

    def forced_lengths(self, limits: Sequence[int]) -> set[int]:
        """The positions at which some row is forced to one token."""
        first = set() if self.first is None else {1}
        return first if self.at_limit == "truncate" else first | set(limits)

    def apply(
        self,
        logits: Logits,
        length: Lengths,
        last: Last | None = None,
        total: Totals | None = None,
        *,
        forces: bool = True,
    ) -> None:
        """Change, in place, the logits of position `length`; `last` are the rows it is the last of.

        A forced token is free: its logit becomes `total`, log Σ exp of its row. Without it the
        row is only good for choosing. `forces=False` skips forced tokens where there are none.
        """
        forces = forces and (self.first is not None or (last is not None and self.forces_end))
        if forces:
            free = logits.new_zeros(len(logits)) if total is None else total[:, 0]
            price = logits[:, self.end].clone() if self.at_limit == "force-eos" else free
        if len(self.suppressed):
            logits.index_fill_(1, self.suppressed, NEVER)
        if self.min_length:
            logits[:, self.end].masked_fill_(length <= self.min_length, NEVER)
        if not forces:
            return
        if self.first is not None:
            self._force(logits, (length == 1).expand(len(logits)), self.first, free)
        if last is not None and self.forces_end:
            self._force(logits, last, self.end, price)

    @staticmethod
    def _force(logits: Logits, rows: Last, token: int, price: Float[Tensor, " rows"]) -> None:
        logits.masked_fill_(rows[:, None], NEVER)
        logits[:, token] = torch.where(rows, price.to(logits.dtype), logits[:, token])
