# %% [markdown]
# # Positions
#
# Compare sinusoidal, rotary and ALiBi positions, first as formulas, then in small language
# models. Time: half a minute.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import manyheads
from manyheads.nn.positions import Alibi, PositionSizes, Rotary, Sinusoidal
from manyheads.phrasebook import sentences

torch.manual_seed(1)
sizes = PositionSizes(dim=64, heads=4, head_dim=16, max_length=64, causal=True)
places = torch.arange(64)[None]

# %% [markdown]
# ## Sinusoidal positions
#
# Each pair of channels is a sine and a cosine with its own wave length:
#
# $$PE(i)_{2k} = \sin\frac{i}{10000^{2k/d}}, \quad PE(i)_{2k+1} = \cos\frac{i}{10000^{2k/d}}$$
#
# They are added to the embedding of the token. Here the embedding is 0, so only the waves remain.

# %%
waves = Sinusoidal().build(sizes).embed(torch.zeros(1, 64, 64), places)[0]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.imshow(waves.T, aspect="auto", cmap="RdBu")
left.set(xlabel="position", ylabel="channel", title="sinusoidal positions")
for i in (8, 24, 40):
    right.plot(waves @ waves[i], label=f"PE({i}) · PE(j)")
right.set(xlabel="position j", title="dot products peak at the same position")
right.legend()
plt.show()

# %% [markdown]
# The dot product depends on the distance only, not on where the two positions are:

# %%
products = waves @ waves.T
assert torch.allclose(products[10, 15], products[40, 45], atol=1e-3)

# %% [markdown]
# ## Rotary positions
#
# Rotary positions turn each pair of channels of queries and keys by an angle that grows with the
# position. The score of a query and a key then depends on their distance.

# %%
rotary = Rotary().build(sizes)
query = torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16)
turned = rotary.rotate(query, places)[0, 0]
scores = (turned @ turned.T) / 16
assert torch.allclose(scores[5, 9], scores[30, 34], atol=1e-4)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
left.plot(turned[:, 0], turned[:, 8], ".-", label="channels 0 and 8: fast")
left.plot(turned[:, 3], turned[:, 11], ".-", label="channels 3 and 11: slow")
left.set(title="one vector at 64 positions", aspect="equal")
left.legend(loc="lower right")
right.plot(scores[32], label="the same query and key")
right.set(xlabel="position of the key", title="score of a query at position 32")
plt.show()

# %% [markdown]
# ## ALiBi
#
# ALiBi adds nothing to embeddings. Each head subtracts a multiple of the distance from the scores.
# A steep head looks at close words, a flat head looks far.

# %%
zeros = torch.zeros(1, 4, 64, 16)  # equal queries and keys: only the position decides
weights = manyheads.attention_weights(zeros, zeros, rule="causal", position=Alibi())[0]
for head in range(4):
    plt.plot(weights[head, -1], label=f"head {head + 1}")
plt.xlabel("position of the key")
plt.ylabel("weight for the last query")
plt.title("ALiBi: weights of equal keys")
plt.legend()
plt.show()

# %% [markdown]
# ## Which one learns faster?
#
# Four small language models of English sentences differ only in `model.position`. A causal mask
# already gives some order, so `none` works too, but worse.

# %%
Path("english.txt").write_text(
    "\n".join(pair.source for pair in sentences("en-de", "train", 4000)), encoding="utf-8"
)
settings = {
    "data.file": "english.txt",
    "tokens.vocab_size": 1000,
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.max_length": 32,
    "model.init": "xavier",
    "model.embed.scale": "sqrt-dim",  # sinusoids are large next to small token vectors
    "train.steps": 160,
    "train.batch_tokens": 1024,
    "train.learning_rate": 3e-3,
    "train.warmup_steps": 20,
    "train.validate_every": 20,
    "train.save_every": 160,
}
for position in ("none", "sinusoidal", "rotary", "alibi"):
    folder = f"runs/position-{position}"
    manyheads.train("language", settings | {"model.position": position}, folder, device="cpu")
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text("utf-8").splitlines())
    curve = [(row["step"], row["loss"]) for row in records if row["split"] == "valid"]
    print(f"{position:<12} {curve[-1][1]:.3f}")
    plt.plot(*zip(*curve, strict=True), label=position)
plt.xlabel("step")
plt.ylabel("validation loss")
plt.title("One seed: differences below 0.05 may be chance")
plt.legend()
plt.show()
