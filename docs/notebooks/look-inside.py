# %% [markdown]
# # Look inside a translator
#
# Read the attention maps of a trained model, compare them with the correct word alignment, follow
# the prediction through the layers, and switch heads off. Time: under a minute, and one more if
# the translator of [the notebook before](train-a-translator.md) is not trained yet.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import manyheads
from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.evaluate.alignment import alignment_error, word_maps
from manyheads.lab.figures.maps import attention_maps
from manyheads.phrasebook import sentences

settings = {  # the same as in train-a-translator: a trained folder is only loaded
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
model, tokenizer = run.model.eval(), run.tokenizer
pairs = sentences("en-de", "test", 100)

# %% [markdown]
# ## All heads of the encoder
#
# `attention_maps` translates a sentence and returns the maps by name. `manyheads.capture` does the
# same for your own forward pass.

# %%
text = "The student thinks that your father will hide the picture."
maps = attention_maps(run, text)
print({name: tuple(value.weights.shape) for name, value in maps.items()})
self_maps = maps["encoder.self"]
layers, heads = self_maps.weights.shape[:2]
figure, axes = plt.subplots(layers, heads, figsize=(3 * heads, 3.2 * layers), layout="constrained")
for layer in range(layers):
    for head in range(heads):
        axis = axes[layer, head]
        axis.imshow(self_maps.weights[layer, head], cmap="viridis")
        axis.set_title(f"layer {layer + 1}, head {head + 1}")
        axis.set_xticks(range(len(self_maps.columns)), self_maps.columns, rotation=90, fontsize=6)
        axis.set_yticks(range(len(self_maps.rows)), self_maps.rows, fontsize=6)
plt.show()

# %% [markdown]
# ## Does cross-attention align words?
#
# The phrasebook has the correct alignment of each pair. White frames mark it.

# %%
error = alignment_error(model, tokenizer, pairs)
layer, head = error.best_head
print(f"best head: layer {layer + 1}, head {head + 1}, alignment error {error.best:.1%}")
pair, weights = next(
    (pair, weights)
    for pair, weights in word_maps(model, tokenizer, pairs)
    if 8 <= len(pair.target_words) <= 12
)
figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
axis.imshow(weights[layer, head], cmap="viridis")
for source, target in pair.alignment:
    frame = plt.Rectangle((source - 0.5, target - 0.5), 1, 1, fill=False, color="white", lw=2)
    axis.add_patch(frame)
axis.set_xticks(
    range(len(pair.source_words)), [pair.source[a:b] for a, b in pair.source_words], rotation=60
)
axis.set_yticks(range(len(pair.target_words)), [pair.target[a:b] for a, b in pair.target_words])
plt.show()

# %% [markdown]
# ## The prediction, layer by layer
#
# The logit lens applies the output layer to the hidden state after each decoder layer. Early
# layers are unsure, the last layer decides.

# %%
encoded = EncodedPairs(Corpus([p.source for p in pairs], [p.target for p in pairs]), tokenizer, 128)
batch = encoded.batch(np.arange(len(encoded.rows)))
states = []
hooks = [
    block.register_forward_hook(lambda module, inputs, output: states.append(output))
    for block in model.decoder.blocks
]
with torch.no_grad():
    logits = model(batch.source, batch.target, batch.source_real)
for hook in hooks:
    hook.remove()

real = batch.labels != tokenizer.pad
names, ranks = [], []
with torch.no_grad():
    for number, state in enumerate(states, start=1):
        lens = model.logits(model.decoder.last_norm(state))[real]
        right = lens.gather(1, batch.labels[real][:, None])
        names.append(f"after layer {number}")
        ranks.append((lens > right).sum(1).numpy() + 1)
for name, rank in zip(names, ranks, strict=True):
    plt.plot(np.sort(rank), np.linspace(0, 1, len(rank)), label=name)
plt.xscale("log")
plt.xlabel("rank of the correct token")
plt.ylabel("share of positions")
plt.title("Logit lens")
plt.legend()
plt.show()

# %% [markdown]
# ## Switch off one head
#
# The output matrix of an attention module mixes its heads. With the columns of a head set to 0,
# the model works without that head. The rise of the loss shows how much the model needs it.


# %%
@torch.no_grad()
def loss():
    logits = model(batch.source, batch.target, batch.source_real)
    return torch.nn.functional.cross_entropy(logits[real], batch.labels[real]).item()


full = loss()
rises = {}
for name, module in model.named_modules():
    if not hasattr(module, "core"):  # attention modules have an implementation, the core
        continue
    channels = module.config.head_dim
    for head in range(module.config.heads):
        columns = slice(head * channels, (head + 1) * channels)
        before = module.output.weight.data[:, columns].clone()
        module.output.weight.data[:, columns] = 0
        rises[f"{name.removesuffix('.attention')} {head + 1}"] = loss() - full
        module.output.weight.data[:, columns] = before
assert abs(loss() - full) < 1e-6  # every head is back

figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
axis.barh(range(len(rises)), list(rises.values()))
axis.set_yticks(range(len(rises)), list(rises), fontsize=7)
axis.invert_yaxis()
axis.set_xlabel(f"rise of the loss, from {full:.2f}")
plt.show()
