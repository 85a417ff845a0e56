# %% [markdown]
# # Scaling laws
#
# Train small language models of several sizes on several amounts of text, fit a law to their
# losses, and predict a larger run before training it. Time: about a minute.
#
# The command `manyheads scaling-laws` does this at full length; see
# [Scaling laws](../../scaling.md).

# %%
import dataclasses
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import manyheads
from manyheads.lab.scaling.law import fit
from manyheads.phrasebook import sentences

text = "\n".join(pair.source for pair in sentences("en-de", "train", 20000))
Path("text.txt").write_text(text, encoding="utf-8")
settings = {
    "data.file": "text.txt",
    "tokens": "characters",
    "data.valid_fraction": 0.02,
    "model.heads": 2,
    "model.max_length": 64,
    "model.dropout": 0.0,
    "train.batch_tokens": 1024,
    "train.learning_rate": 5e-3,
    "train.checkpoint": "last",
}


def count(model):
    """The weights of a model without its embedding."""
    return sum(w.numel() for name, w in model.named_parameters() if "tokens" not in name)


def train(dim, layers, steps):
    """(weights without the embedding, tokens, validation loss) of a run."""
    folder = f"runs/scaling-{dim}x{layers}-{steps}"
    schedule = {"train.steps": steps, "train.warmup_steps": steps // 10}
    schedule |= {"train.validate_every": steps, "train.save_every": steps}
    changes = settings | schedule | {"model.dim": dim, "model.layers": layers}
    run = manyheads.train("shakespeare-char", changes, folder, device="cpu")
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text("utf-8").splitlines())
    loss = [row["loss"] for row in records if row["split"] == "valid"][-1]
    return count(run.model), steps * 1024, loss


# %% [markdown]
# ## Train the grid
#
# Each run has its own learning-rate schedule that ends with the run. A loss from the middle of a
# longer schedule would be too high.

# %%
shapes, lengths = [(16, 1), (24, 2), (40, 2)], [100, 200, 400]
grid = [train(dim, layers, steps) for dim, layers in shapes for steps in lengths]
for weights, tokens, loss in grid:
    print(f"{weights:>7,} weights  {tokens:>8,} tokens  loss {loss:.3f}")

points = np.array(grid).reshape(len(shapes), len(lengths), 3)
for row in points:
    plt.loglog(row[:, 1], row[:, 2], "o-", label=f"{row[0, 0]:,.0f} weights")
plt.xlabel("tokens")
plt.ylabel("validation loss (nats per character)")
plt.title("More text, lower loss")
plt.legend()
plt.show()

# %% [markdown]
# ## Fit a law
#
# $$L(N, D) = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}$$
#
# *N* counts weights and *D* tokens. *E* is what no model can learn: the entropy of the text. The
# band comes from a bootstrap of the residuals.

# %%
array = np.array(grid)
law = fit(array[:, :2], array[:, 2], draws=100)
print(f"E = {law.law.floor:.2f}")
for name, exponent in zip(("α of weights", "β of tokens"), law.law.exponents, strict=True):
    print(f"{name}: {exponent:.2f}")
fitted = [law.law.loss(weights, tokens) for weights, tokens, _ in grid]
plt.plot([min(fitted), max(fitted)], [min(fitted), max(fitted)], color="gray")
plt.scatter(fitted, array[:, 2])
plt.xlabel("loss of the law")
plt.ylabel("measured loss")
plt.title("Nine runs and a law with five numbers")
plt.show()

# %% [markdown]
# ## Predict, then train
#
# The larger run has more weights and twice the tokens of every run of the fit. The prediction is
# made first.

# %%
dim, layers, steps = 64, 2, 800
config = manyheads.load("runs/scaling-40x2-400").run.model
weights = count(dataclasses.replace(config, dim=dim, layers=layers).build())
predicted = law.run(weights, steps * 1024)
print(f"predicted {predicted.value:.3f}, 90 % band {predicted.low:.3f} to {predicted.high:.3f}")
measured = train(dim, layers, steps)[2]
print(f"measured  {measured:.3f}")

tokens = np.geomspace(8e4, 1.2e6, 40)
bands = [law.curve(weights, amount) for amount in tokens]
plt.fill_between(tokens, [b.low for b in bands], [b.high for b in bands], alpha=0.2, color="C3")
plt.plot(tokens, [b.value for b in bands], color="C3", label=f"law for {weights:,} weights")
interval = [[predicted.value - predicted.low], [predicted.high - predicted.value]]
plt.errorbar([steps * 1024], [predicted.value], interval, fmt="s", color="C3", label="predicted")
plt.plot([steps * 1024], [measured], "k*", ms=12, label="measured")
for row in points:
    plt.plot(row[:, 1], row[:, 2], "o", color="gray")
plt.xscale("log")
plt.xlabel("tokens")
plt.ylabel("validation loss")
plt.legend()
plt.show()

# %% [markdown]
# Nine short runs give a wide band, and very short runs may follow another law than long ones. A
# prediction is the only test of the law. [Scaling laws](../../scaling.md) shows longer sweeps,
# and one that failed.
