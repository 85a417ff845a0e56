# %% [markdown]
# # Long sequences
#
# Attention compares every position with every other, so its cost grows with the square of the
# length. This notebook measures that, and shows patterns that avoid it. Time: under a minute.

# %%
import time

import matplotlib.pyplot as plt
import torch

import manyheads
from manyheads.nn.attention import AttentionSizes
from manyheads.nn.local import Local, Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.tiled import Tiled

torch.manual_seed(1)
heads, channels = 2, 32

# %% [markdown]
# ## Patterns
#
# *Local* attention works in blocks. *Longformer* has a sliding window and a few global tokens that
# see everything. A pattern is a rule about positions, so a mask of any size follows from it.

# %%
zeros = torch.zeros(1, 1, 64, 8)
patterns = {
    "full": "full",
    "causal": "causal",
    "local, blocks of 16": Local(16).pattern,
    "window of 8, 2 global": Longformer(8, 2).pattern,
}
figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
for axis, (name, rule) in zip(axes, patterns.items(), strict=True):
    seen = manyheads.attention_weights(zeros, zeros, rule=rule)[0, 0] > 0
    axis.imshow(seen, cmap="Greys")
    axis.set_title(f"{name}: {seen.float().mean():.0%}")
plt.show()

# %% [markdown]
# ## Time
#
# `dense` holds the matrix of weights. `tiled` computes exactly the same in tiles and never holds
# it: this is the idea of FlashAttention, here in plain PyTorch. `fused` is PyTorch's own kernel.
# `local` and `longformer` compute less. `performer` approximates the softmax in linear time.

# %%
torch.set_num_threads(1)
lengths = [128, 256, 512, 1024, 2048]
sizes = AttentionSizes(
    heads=heads, kv_heads=heads, head_dim=channels, key_dim=channels, max_length=max(lengths)
)
performer = Performer(features=64).build(sizes)
implementations = {
    "dense": "dense",
    "tiled": Tiled(128),
    "fused": "fused",
    "local": Local(64),
    "longformer": Longformer(32, 1),
    "performer": performer,
}


def seconds(implementation, length):
    """The shortest of five calls."""
    q, k, v = torch.randn(3, 1, heads, length, channels)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        with torch.no_grad():
            manyheads.attend(q, k, v, implementation=implementation)
        times.append(time.perf_counter() - began)
    return min(times)


for name, implementation in implementations.items():
    measured = [seconds(implementation, length) for length in lengths]
    print(f"{name:<11} {measured[-1] / measured[-2]:.1f} × the time for twice the length")
    plt.plot(lengths, [1000 * value for value in measured], "o-", label=name)
plt.xscale("log", base=2)
plt.yscale("log")
plt.xlabel("length")
plt.ylabel("milliseconds")
plt.title("Attention of two heads on one CPU thread")
plt.legend()
plt.show()

# %% [markdown]
# ## Memory
#
# The matrix of weights has length² entries in each head. A decoder that keeps keys and values (the
# KV cache) needs memory that grows with the length only; fewer key/value heads shrink it.

# %%
scale = 2.0 ** torch.arange(10, 18)
weights = 8 * scale**2 * 2
for name, kv_heads in (("KV cache, 8 heads", 8), ("KV cache, 2 heads (GQA)", 2)):
    plt.plot(scale, 2 * kv_heads * scale * 64 * 2 / 2**20, "o-", label=name)
plt.plot(scale, weights / 2**20, "o-", label="weights of 8 heads")
plt.xscale("log", base=2)
plt.yscale("log")
plt.xlabel("length")
plt.ylabel("MiB for one layer, 64 channels per head, 16 bit")
plt.title("Computed, not measured")
plt.legend()
plt.show()

# %% [markdown]
# ## The price of an approximation
#
# Exact implementations agree with `dense` up to rounding. The Performer replaces the softmax by
# random features: more features, less error. A window changes the function: it is exact within
# the window, and it sees nothing outside.

# %%
q, k, v = torch.randn(3, 1, heads, 256, channels)
q, k = q / 2, k / 2  # the variance of random features grows fast with the norms of q and k
exact = manyheads.attend(q, k, v)
for name in ("tiled", "fused"):
    error = (manyheads.attend(q, k, v, implementation=implementations[name]) - exact).abs().max()
    print(f"{name}: largest difference {error:.1e}")
    assert error < 1e-4

counts = [16, 64, 256, 1024]
errors = []
for count in counts:
    approximation = Performer(features=count).build(sizes)
    with torch.no_grad():
        result = manyheads.attend(q, k, v, implementation=approximation)
    errors.append(((result - exact).norm() / exact.norm()).item())
plt.plot(counts, errors, "o-", label="performer")
windows = [8, 16, 32, 64, 128]
limited = [manyheads.attend(q, k, v, implementation=Longformer(window)) for window in windows]
plt.plot(
    windows, [((y - exact).norm() / exact.norm()).item() for y in limited], "s-", label="window"
)
plt.xscale("log", base=2)
plt.xlabel("random features, or positions to either side")
plt.ylabel("relative error")
plt.title("Random queries and keys, 256 positions")
plt.legend()
plt.show()
