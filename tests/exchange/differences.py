"""How far our logits are from those of `transformers`, the table of docs/models.md.

python -m tests.exchange.differences
"""

import torch
from tests.exchange.zoo import CLASSES, SEEDS, both, draw, exact

from manyheads.exchange.huggingface import from_huggingface


def greatest(family: str, dtype: torch.dtype) -> tuple[float, float]:
    """The greatest difference of a logit over all models of a family, and the greatest logit."""
    apart, size = 0.0, 0.0
    for seed in SEEDS:
        theirs = draw(family, seed, dtype)
        with exact(theirs), torch.no_grad():
            expected, said, real = both(family, theirs, from_huggingface(theirs), seed)
        apart = max(apart, float((said[real] - expected[real]).abs().max()))
        size = max(size, float(expected[real].abs().max()))
    return apart, size


def main() -> None:
    torch.set_num_threads(1)
    print(f"{len(SEEDS)} random models of each family; greatest difference of a logit")
    for family in CLASSES:
        single, size = greatest(family, torch.float32)
        double, _ = greatest(family, torch.float64)
        print(f"{family:>12}  float32 {single:.1e}  float64 {double:.1e}  logits up to {size:.1f}")


if __name__ == "__main__":
    main()
