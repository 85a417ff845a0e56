# %% [markdown]
# # Train a translator and watch it
#
# Train an encoder–decoder from English to German on the built-in phrasebook, and look at what it
# does while it learns. Time: about a minute.

# %%
import base64
import json
import zlib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import manyheads

settings = {
    "data.train_pairs": 20000,
    "data.valid_pairs": 200,
    "data.test_pairs": 200,
    "model.dim": 96,
    "model.ffn_dim": 384,
    "tokens.vocab_size": 2000,
    "train.steps": 400,
    "train.batch_tokens": 2000,
    "train.warmup_steps": 100,
    "train.validate_every": 50,
    "decode.bleu_sentences": 100,
    "train.save_every": 400,
}
run = manyheads.train("phrasebook", settings, out="runs/translator", device="cpu")
print(run.translate(["The small dog sees the tree.", "My sister is buying seven red apples."]))

# %% [markdown]
# A folder that is already trained is only loaded: run the cell again, and it returns at once.
#
# ## Loss and BLEU
#
# `metrics.jsonl` in the run folder has one record for each report of the training.

# %%
lines = Path("runs/translator/metrics.jsonl").read_text("utf-8").splitlines()
records = [json.loads(line) for line in lines]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for split in ("train", "valid"):
    rows = [row for row in records if row["split"] == split]
    left.plot([row["step"] for row in rows], [row["loss"] for row in rows], ".-", label=split)
left.set(xlabel="step", ylabel="cross-entropy (nats per token)", title="loss")
left.legend()
rows = [row for row in records if "bleu" in row]
right.plot([row["step"] for row in rows], [row["bleu"] for row in rows], ".-", color="C2")
right.set(xlabel="step", ylabel="BLEU", title="BLEU of 100 validation sentences")
plt.show()

# %% [markdown]
# BLEU stays low for a while and then rises fast: a translation with one wrong word in three has
# few correct 4-grams.
#
# ## One sentence along the training
#
# The trainer records *probes*: at about 40 steps it translates a few fixed sentences and stores
# their cross-attention. The Watch page of `manyheads view runs/translator` shows the same data.

# %%
probes = Path("runs/translator/probes")
sentence = json.loads((probes / "sentences.json").read_text("utf-8"))[0]
history = [json.loads(line) for line in (probes / "probes.jsonl").read_text("utf-8").splitlines()]
print("source    ", sentence["source"])
for probe in history[:: len(history) // 8] + history[-1:]:
    print(f"step {probe['step']:>4} ", probe["sentences"][0]["text"])
print("reference ", sentence["target"])

# %% [markdown]
# ## Attention takes shape
#
# At step 0 every head looks everywhere. Later each target word looks at the words that it
# translates. The pictures show the head with the lowest alignment error at the end.


# %%
def attention(probe):
    """Cross-attention [layers, heads, target tokens, source tokens] of the sentence."""
    stored = probe["sentences"][0]
    raw = zlib.decompress(base64.b64decode(stored["attention"]))
    return np.frombuffer(raw, np.uint8).reshape(stored["shape"]) / 255


errors = np.array([probe["alignment_error"] for probe in history])  # [probes, layers, heads]
layer, head = np.unravel_index(errors[-1].argmin(), errors[-1].shape)
figure, axes = plt.subplots(1, 4, figsize=(13, 4), sharey=True, layout="constrained")
for axis, index in zip(axes, np.linspace(0, len(history) - 1, 4).astype(int), strict=True):
    axis.imshow(attention(history[index])[layer, head], cmap="viridis", vmin=0, vmax=1)
    axis.set_title(f"step {history[index]['step']}")
    axis.set_xticks(range(len(sentence["source_tokens"])), sentence["source_tokens"], rotation=90)
axes[0].set_yticks(range(len(sentence["target_tokens"])), sentence["target_tokens"])
plt.show()

# %% [markdown]
# ## When do heads align?
#
# The phrasebook knows which words translate each other. The alignment error rate of a head is 0 if
# its largest weight always falls on a correct word.

# %%
steps = [probe["step"] for probe in history]
for i in range(errors.shape[1]):
    for j in range(errors.shape[2]):
        plt.plot(steps, errors[:, i, j], label=f"layer {i + 1}, head {j + 1}")
plt.xscale("symlog")
plt.xlabel("step")
plt.ylabel("alignment error rate")
plt.title("Cross-attention of each head")
plt.legend(fontsize=7)
plt.show()
