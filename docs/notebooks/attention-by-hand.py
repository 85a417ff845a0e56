# %% [markdown]
# # Attention by hand
#
# Compute attention step by step with tensors, then compare each step with `manyheads.attend`.
# Time: seconds.

# %%
import matplotlib.pyplot as plt
import torch

import manyheads

torch.manual_seed(1)
words = ["The", "dog", "chased", "the", "red", "ball"]
t, c = len(words), 8  # positions, channels per head
q, k, v = torch.randn(3, t, c)

# %% [markdown]
# ## Scores and weights
#
# A query is compared with every key by a dot product. The softmax turns a row of scores into
# weights that are positive and sum to 1:
#
# $$A = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{c}}\right)$$

# %%
scores = q @ k.T / c**0.5
weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
assert torch.allclose(weights.sum(-1), torch.ones(t))


def heat_map(axes, matrix, title):
    picture = axes.imshow(matrix, cmap="viridis")
    axes.set_xticks(range(t), words, rotation=60)
    axes.set_yticks(range(t), words)
    axes.set_title(title)
    plt.colorbar(picture, ax=axes, shrink=0.7)


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
heat_map(left, scores, "scores")
heat_map(right, weights, "weights: each row sums to 1")
plt.show()

# %% [markdown]
# ## The output is a weighted mean
#
# Position *i* receives the mean of all values, weighted by row *i*. The library gives the same
# result. It expects a batch and heads: `[b, h, t, c]`.

# %%
output = weights @ v
theirs = manyheads.attend(q[None, None], k[None, None], v[None, None])
print("largest difference:", f"{(output - theirs[0, 0]).abs().max():.1e}")
assert torch.allclose(output, theirs[0, 0], atol=1e-5)

# %% [markdown]
# ## Why divide by √c?
#
# The dot product of two random vectors with *c* channels has a variance of *c*. Without the
# division, wide heads get large scores, and the softmax gives almost all weight to one key.

# %%
widths = [4, 16, 64, 256, 1024]
largest = {"divided by √c": [], "not divided": []}
for width in widths:
    a, b = torch.randn(2, 1, 1, 200, width)
    for name, scale in (("divided by √c", None), ("not divided", 1.0)):
        row_maxima = manyheads.attention_weights(a, b, scale=scale).amax(-1)
        largest[name].append(row_maxima.mean().item())

for name, values in largest.items():
    plt.plot(widths, values, "o-", label=name)
plt.xscale("log", base=2)
plt.xlabel("channels per head, c")
plt.ylabel("largest weight of a row, mean")
plt.title("Attention of 200 random keys")
plt.legend()
plt.show()

# %% [markdown]
# ## The causal mask
#
# A decoder must not see the future. The mask sets scores of later keys to −∞ before the softmax,
# so their weights are 0, and the other weights of the row grow.

# %%
allowed = torch.ones(t, t, dtype=torch.bool).tril()
causal = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
assert torch.allclose(
    causal, manyheads.attention_weights(q[None, None], k[None, None], rule="causal")[0, 0]
)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
heat_map(left, allowed.float(), "mask: query (row) may see key")
heat_map(right, causal, "causal weights")
plt.show()

# %% [markdown]
# ## Several heads
#
# Each head attends in its own channels. Four heads of 8 channels cost the same as one head of 32
# channels, and they can look at four different positions.

# %%
heads = 4
x = torch.randn(1, t, heads * c)
project = torch.randn(3, heads * c, heads * c) / (heads * c) ** 0.5
split = [(x @ matrix).unflatten(-1, (heads, c)).transpose(1, 2) for matrix in project]
by_head = manyheads.attention_weights(split[0], split[1])[0]

figure, axes = plt.subplots(1, heads, figsize=(11, 3), layout="constrained")
for head in range(heads):
    axes[head].imshow(by_head[head], cmap="viridis", vmin=0, vmax=1)
    axes[head].set_xticks(range(t), words, rotation=60)
    axes[head].set_yticks([])
    axes[head].set_title(f"head {head + 1}")
plt.show()

# %% [markdown]
# ## Attention ignores order
#
# Shuffle the words: the output is shuffled in the same way, and nothing else changes. A
# Transformer therefore needs [positions](positions.md).

# %%
order = torch.randperm(t)
shuffled = manyheads.attend(*(tensor[None, None, order] for tensor in (q, k, v)))[0, 0]
assert torch.allclose(shuffled, output[order], atol=1e-5)
print("The output of shuffled words is the shuffled output.")
