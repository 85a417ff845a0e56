"""What a step of decoding computes from rows of logits (ops.py chooses the kernel)."""

from manyheads.ops import argmax as likeliest
from manyheads.ops import has_fused_topk as has_kernel
from manyheads.ops import logsumexp as log_mass
from manyheads.ops import topk as foremost

__all__ = ["foremost", "has_kernel", "likeliest", "log_mass"]
