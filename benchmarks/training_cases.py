"""The cases of the training benchmark: models, our batches, and the same for `transformers`.

Tokens are drawn at random. GPT and BERT have batches of one shape; sentences of a translation
have drawn lengths, in buckets or as they come.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.data.batching import Batches, Ragged
from manyheads.data.translation import Batch
from manyheads.models.gpt import GptConfig
from manyheads.presets import preset
from manyheads.tasks.language import LanguageBatch, language_loss
from manyheads.tasks.pretraining import MaskedBatch, masked_losses
from manyheads.tasks.translation import MULTIPLE, translation_loss
from manyheads.train.step import Loss

SEED = 1
STEPS = 10  # a round, where all batches have one shape
DRAWN = 4  # batches, where all have one shape
SENTENCES = 60_000
BUCKETED = 25  # steps of a round, where batches have many shapes
OURS, THEIRS, UNSORTED = "ours", "transformers", "transformers unsorted"
# Layers, width, vocabulary; smaller than what is published, with heads of 64.
SMALL = {
    "1M": (4, 128, 2048),
    "4M": (4, 256, 2048),
    "12M": (6, 384, 2048),
    "34M": (8, 512, 16_384),
}
PUBLISHED = {
    "124M": "gpt3-small",
    "350M": "gpt3-medium",
    "760M": "gpt3-large",
    "1.3B": "gpt3-xl",
}
Losses = Callable[[Any, Any], dict[str, Loss]]
Feed = tuple[dict[str, Tensor], int]  # what their model is called with, and its real tokens


@dataclass(frozen=True)
class Stream(LanguageBatch):
    """One that can be moved."""

    def to(self, device: torch.device) -> "Stream":
        moved = (x.to(device, non_blocking=True) for x in (self.tokens, self.labels))
        return Stream(*moved, self.count)


@dataclass(frozen=True)
class Case:
    """One comparison: our settings and batches, their model and what it is fed, by kind of order.

    `epoch` is how many batches of ours, and of each of theirs, show all shapes; `round` how many
    are timed at once. `batch` tells its size, `length` that of texts which all have the same.
    """

    config: Any
    drawn: list[Any]
    loss: Callable[[Any, Any], dict[str, Loss]]
    of: Callable[[Any], tuple[int, dict[str, int]]]
    theirs: Callable[[], nn.Module] | None
    feeds: Callable[[], dict[str, list[Feed]]]
    epoch: dict[str, int]
    round: dict[str, int]
    batch: str
    length: int = 0
    dynamic: bool = False  # whether theirs is compiled for all lengths at once


def gpt(config: GptConfig, rows: int, length: int, peer: bool, *, aligned: bool = False) -> Case:
    """`aligned` pads the vocabulary of `transformers` to a multiple of 64, which is faster."""
    random = np.random.default_rng(SEED)
    drawn = []
    for _ in range(DRAWN):
        tokens = torch.from_numpy(random.integers(0, config.vocab_size, (rows, length + 1)))
        drawn.append(Stream(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * length))

    def their_model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": config.dim, "n_layer": config.layers, "n_head": config.heads}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        vocabulary = config.vocab_size + (-config.vocab_size % 64 if aligned else 0)
        named = GPT2Config(
            vocab_size=vocabulary, n_positions=length, use_cache=False, **sizes, **dropout
        )
        model = GPT2LMHeadModel(named)
        model.loss_type = "ForCausalLM"  # or it warns in the middle of what is compiled
        return model

    return Case(
        config,
        drawn,
        lambda model, batch: {"tokens": language_loss(model, batch)},
        lambda batch: (batch.tokens.numel(), {"tokens": batch.count}),
        their_model if peer else None,
        lambda: {
            THEIRS: [({"input_ids": x.tokens, "labels": x.tokens}, x.tokens.numel()) for x in drawn]
        },
        dict.fromkeys((OURS, THEIRS), DRAWN),
        dict.fromkeys((OURS, THEIRS), STEPS),
        f"{rows} × {length}",
        length,
    )


def sized(name: str, tiny: bool, length: int) -> GptConfig:
    """A decoder of about so many parameters."""
    if name in SMALL:
        layers, dim, vocabulary = SMALL[name]
        sizes = {"layers": layers, "dim": dim, "heads": dim // 64, "vocab_size": vocabulary}
        config = replace(preset("gpt3-small"), **sizes)
    else:
        config = preset(PUBLISHED[name])
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, head_dim=None, vocab_size=500)
    assert isinstance(config, GptConfig)
    return replace(config, max_length=length, dropout=0.0)


def bert(rows: int, length: int, tiny: bool) -> Case:
    config = replace(preset("bert-base"), dropout=0.1, attention_dropout=0.0)
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, vocab_size=500)
    random = np.random.default_rng(SEED)
    drawn = []
    for _ in range(DRAWN):
        tokens = torch.from_numpy(random.integers(5, config.vocab_size, (rows, length)))
        places = np.sort(random.permutation(rows * length)[: int(0.15 * rows * length)])
        expected = torch.from_numpy(random.integers(5, config.vocab_size, len(places)))
        segments = (torch.arange(length) >= length // 2).long().expand(rows, -1).contiguous()
        other = torch.from_numpy(random.integers(0, 2, rows))
        at = torch.from_numpy(places)
        batch = MaskedBatch(tokens, None, segments, at, expected, other, rows * length, len(at))
        drawn.append(batch.padded(64))

    def their_model() -> nn.Module:
        from transformers import BertConfig, BertForPreTraining

        return BertForPreTraining(
            BertConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.dim,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=4 * config.dim,
                attention_probs_dropout_prob=0.0,
            )
        )

    def feed(batch: MaskedBatch) -> Feed:
        labels = torch.full((rows * length,), -100)
        labels[batch.positions[: batch.count]] = batch.labels[: batch.count]
        inputs = {"input_ids": batch.tokens, "token_type_ids": batch.segments}
        inputs |= {"labels": labels.view(rows, length), "next_sentence_label": batch.other}
        return inputs, rows * length  # type: ignore[return-value]

    return Case(
        config,
        drawn,
        masked_losses,
        lambda batch: (batch.size, {"masked": batch.count, "next_sentence": rows}),
        their_model,
        lambda: {THEIRS: [feed(batch) for batch in drawn]},
        dict.fromkeys((OURS, THEIRS), DRAWN),
        dict.fromkeys((OURS, THEIRS), STEPS),
        f"{rows} × {length}",
    )


def sentences(vocabulary: int, count: int) -> tuple[Ragged, Ragged]:
    """Sources and targets of drawn lengths: about 25 tokens, as newspapers have them, to 100."""
    random = np.random.default_rng(SEED)
    source = np.clip(random.lognormal(np.log(22), 0.5, count), 3, 100).astype(int)
    target = np.clip(source * random.normal(1.05, 0.15, count), 3, 100).astype(int)
    sides = [
        [random.integers(5, vocabulary, n).tolist() for n in side] for side in (source, target)
    ]
    return Ragged.of(sides[0]), Ragged.of(sides[1])


def translation(batch_tokens: int, warm: int, rounds: int, tiny: bool) -> Case:
    """Sentences for so many epochs and rounds. Ours sorts them into buckets; theirs takes the same
    batches, and, unsorted, as many sentences at once as fit when the longest is among them.
    """
    config = preset("transformer-base")
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, vocab_size=500)
    sources, targets = sentences(config.vocab_size, SENTENCES // 100 if tiny else SENTENCES)
    lengths = np.maximum(sources.lengths, targets.lengths)
    order = Batches(lengths, batch_tokens, SEED)
    steps = range(warm * order.per_epoch + rounds * BUCKETED)
    plain = [Batch.of(sources, targets, order.rows(step), 1, 0) for step in steps]
    drawn = [
        item.padded(order.most(step), MULTIPLE) for step, item in zip(steps, plain, strict=True)
    ]
    size = max(1, batch_tokens // int(lengths.max()))

    def their_model() -> nn.Module:
        from transformers import MarianConfig, MarianMTModel

        sides = {}
        for side in ("encoder", "decoder"):
            sides |= {f"{side}_layers": config.layers, f"{side}_attention_heads": config.heads}
            sides[f"{side}_ffn_dim"] = 4 * config.dim
        settings = MarianConfig(
            vocab_size=config.vocab_size, d_model=config.dim, pad_token_id=0, eos_token_id=2,
            decoder_start_token_id=1, scale_embedding=True, use_cache=False, dropout=0.1, **sides,
        )  # fmt: skip
        return MarianMTModel(settings)

    def feed(item: Batch) -> Feed:
        inputs = {"input_ids": item.source, "attention_mask": item.source_real.long()}
        inputs |= {"decoder_input_ids": item.target}
        inputs |= {"labels": item.labels.masked_fill(~item.loss_mask, -100)}
        return inputs, item.source_tokens + item.target_tokens

    def feeds() -> dict[str, list[Feed]]:
        random, mixed = np.random.default_rng(SEED), []
        for _ in steps:
            rows = random.choice(len(lengths), min(size, len(lengths)), replace=False)
            mixed.append(Batch.of(sources, targets, rows, 1, 0))
        return {
            THEIRS: [feed(item) for item in plain],
            UNSORTED: [feed(item) for item in mixed],
        }

    sides = (OURS, THEIRS, UNSORTED)
    return Case(
        config,
        drawn,
        lambda model, batch: {"tokens": translation_loss(model, batch, 0.1)},
        lambda batch: (
            batch.source_tokens + batch.target_tokens,
            {"tokens": batch.target_tokens},
        ),
        their_model,
        feeds,
        dict.fromkeys(sides, order.per_epoch),
        dict.fromkeys(sides, BUCKETED),
        f"up to {batch_tokens:,} positions a side",
        dynamic=True,
    )
