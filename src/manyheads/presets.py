"""Published models by name: each a small change to a documented base, with its source.

Sizes that follow from others in the papers (feed-forward width, head size) are not set, so that
`build` can shrink any model.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.config import change, nearest
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig, NextSentence
from manyheads.models.decoder_only_seq2seq import BaselineConfig, DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Detect, Pooler
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.layers import EmbeddingConfig, Gated, HeadConfig, Norm, Plain
from manyheads.nn.positions import Buckets, Learned, Relative, Rotary, Sinusoidal
from manyheads.nn.scores import Dot

TransformerConfig = Seq2SeqConfig | GptConfig | BertConfig | VitConfig | DecoderOnlySeq2SeqConfig
ModelConfig = TransformerConfig | BaselineConfig | ElmoConfig


# Attention Is All You Need (Vaswani et al. 2017), table 3, row "base". The vocabulary is the joint
# one of English–German (section 5.1), shared by source, target and output (section 3.4).
TRANSFORMER_BASE = Seq2SeqConfig(
    vocab_size=37_000,
    dim=512,
    layers=6,
    heads=8,
    position=Sinusoidal(),
    norm=Norm(placement="post"),
    feedforward=Plain(activation="relu"),
    embed=EmbeddingConfig(scale="sqrt-dim"),
    tie="all",
    dropout=0.1,
    init="xavier",
)

# BERT (Devlin et al. 2019), section 3, with both heads of its pretraining (appendix A.2).
_BERT_NORM = Norm(placement="post", eps=1e-12)
BERT_BASE = BertConfig(
    vocab_size=30_522,
    dim=768,
    layers=12,
    heads=12,
    max_length=512,
    position=Learned(),
    norm=_BERT_NORM,
    feedforward=Plain(activation="gelu"),
    embed=EmbeddingConfig(norm=_BERT_NORM, segments=2),
    pooler=Pooler(),
    next_sentence=NextSentence(),
    dropout=0.1,
    attention_dropout=0.1,
    init="normal",
)

# RoBERTa (Liu et al. 2019), section 2: BERT's sizes, GPT-2's byte-level vocabulary, no sentence
# pairs. Norms with fairseq's ε.
ROBERTA_BASE = replace(
    BERT_BASE,
    vocab_size=50_265,
    norm=Norm(placement="post"),
    embed=EmbeddingConfig(norm=Norm(placement="post")),
    pooler=None,
    next_sentence=None,
)

# Improving Language Understanding by Generative Pre-Training (Radford et al. 2018), section 4.1:
# post-norm, as in the Transformer's decoder. The vocabulary is that of the released weights.
GPT1 = GptConfig(
    vocab_size=40_478,
    dim=768,
    layers=12,
    heads=12,
    max_length=512,
    position=Learned(),
    norm=Norm(placement="post"),
    feedforward=Plain(activation="gelu-tanh"),
    tie="all",
    dropout=0.1,
    attention_dropout=0.1,
    init="normal",
)

# Language Models are Few-Shot Learners (Brown et al. 2020), table 2.1, the smallest row: GPT-2's
# architecture (section 2.1). All layers are dense; the paper alternates dense and banded sparse
# layers. No dropout: the paper names only weight decay (appendix B).
GPT3_SMALL = GptConfig(
    vocab_size=50_257,
    dim=768,
    layers=12,
    heads=12,
    max_length=2048,
    position=Learned(),
    norm=Norm(placement="pre"),
    feedforward=Plain(activation="gelu-tanh"),
    tie="all",
    dropout=0.0,
    init="normal-scaled",
)

# PaLM (Chowdhery et al. 2022), section 2 and table 1, the smallest row, as a shape: SwiGLU, one
# key/value head, rotary positions, shared embeddings, no biases. The paper computes attention and
# feed-forward part in parallel, with one norm for both; here they follow each other.
PALM_8B = GptConfig(
    vocab_size=256_000,
    dim=4096,
    layers=32,
    heads=16,
    head_dim=256,
    kv_heads=1,
    max_length=2048,
    position=Rotary(),
    norm=Norm(placement="pre"),
    feedforward=Gated(activation="silu"),
    tie="all",
    bias=False,
    dropout=0.0,
    init="normal",
)

# Exploring the Limits of Transfer Learning (Raffel et al. 2020), sections 2.1 and 3.1.1. The
# vocabulary has 32,000 tokens and 128 for spans.
T5_BASE = Seq2SeqConfig(
    vocab_size=32_128,
    dim=768,
    layers=12,
    heads=12,
    max_length=512,
    position=Buckets(),
    norm=Norm(placement="pre", form="rms", eps=1e-6),
    score=Dot(),
    feedforward=Plain(activation="relu", dropout=0.1),
    tie="all",
    output=HeadConfig(scale="inverse-sqrt-dim"),
    bias=False,
    dropout=0.1,
    attention_dropout=0.1,
    init="xavier",
)

# BART (Lewis et al. 2020), section 2.1: the Transformer with GELU, 6 layers a side.
BART_BASE = Seq2SeqConfig(
    vocab_size=50_265,
    dim=768,
    layers=6,
    heads=12,
    max_length=1024,
    position=Learned(),
    norm=Norm(placement="post"),
    feedforward=Plain(activation="gelu"),
    embed=EmbeddingConfig(norm=Norm(placement="post")),
    tie="all",
    dropout=0.1,
    init="normal",
)

# An Image is Worth 16x16 Words (Dosovitskiy et al. 2021), table 1, in patches of 16. The head has
# ImageNet's 1,000 classes, by number; dropout is table 3's for ImageNet.
VIT_BASE = VitConfig(
    dim=768,
    layers=12,
    heads=12,
    image_size=224,
    patch_size=16,
    position=Learned(),
    norm=Norm(placement="pre", eps=1e-6),
    feedforward=Plain(activation="gelu"),
    head=Classify(labels=tuple(map(str, range(1000)))),
    dropout=0.1,
    init="xavier",
)

# Training data-efficient image transformers (Touvron et al. 2021), table 1, DeiT-S. No dropout
# (table 9), no distillation token.
VIT_SMALL = replace(VIT_BASE, dim=384, heads=6, dropout=0.0, init="normal")

# Music Transformer (Huang et al. 2018), relative attention over piano events. Sizes from memory,
# not checked against the paper's table: 6 layers, width 384, 8 heads of 64 channels, feed-forward
# 1024, 1024 distances per head. The vocabulary has 388 events (128 notes on, 128 off, 100 time
# shifts, 32 velocities), padding and end. Norm placement, tied embeddings and dropout as in
# tensor2tensor, with which the paper's models were made.
MUSIC_TRANSFORMER = GptConfig(
    vocab_size=390,
    dim=384,
    layers=6,
    heads=8,
    head_dim=64,
    ffn_dim=1024,
    max_length=2048,
    position=Relative(max_distance=1023),
    norm=Norm(placement="pre"),
    feedforward=Plain(activation="relu"),
    embed=EmbeddingConfig(scale="sqrt-dim"),
    tie="all",
    dropout=0.1,
    init="xavier",
)

# The larger rows of a table are changes to its base. GPT-3 XL is printed with 24 heads, which would
# give far more parameters than the table says; here it has 16, which fill its width. 13b is as
# printed: its heads do not quite fill its width.
PRESETS: dict[str, ModelConfig] = {
    "transformer-base": TRANSFORMER_BASE,
    "transformer-big": replace(TRANSFORMER_BASE, dim=1024, heads=16, dropout=0.3),
    "bert-base": BERT_BASE,
    "bert-large": replace(BERT_BASE, dim=1024, layers=24, heads=16),
    "roberta-base": ROBERTA_BASE,
    # ELECTRA (Clark et al. 2020), table 6: the discriminator, of BERT's size.
    "electra-base": replace(BERT_BASE, head=Detect(), pooler=None, next_sentence=None),
    "gpt1": GPT1,
    # Radford et al. 2019, table 2; the smallest row is printed with 117M, the weights have 124M.
    "gpt2": replace(GPT3_SMALL, max_length=1024, dropout=0.1, attention_dropout=0.1),
    "gpt3-small": GPT3_SMALL,
    "gpt3-medium": replace(GPT3_SMALL, layers=24, dim=1024, heads=16),
    "gpt3-large": replace(GPT3_SMALL, layers=24, dim=1536, heads=16),
    "gpt3-xl": replace(GPT3_SMALL, layers=24, dim=2048, heads=16),
    "gpt3-2.7b": replace(GPT3_SMALL, layers=32, dim=2560, heads=32),
    "gpt3-6.7b": replace(GPT3_SMALL, layers=32, dim=4096, heads=32),
    "gpt3-13b": replace(GPT3_SMALL, layers=40, dim=5140, heads=40, head_dim=128),
    "gpt3-175b": replace(GPT3_SMALL, layers=96, dim=12288, heads=96),
    "palm-8b": PALM_8B,
    "t5-base": T5_BASE,
    "bart-base": BART_BASE,
    "music-transformer": MUSIC_TRANSFORMER,
    "vit-tiny": replace(VIT_SMALL, dim=192, heads=3),
    "vit-small": VIT_SMALL,
    "vit-base": VIT_BASE,
    "vit-large": replace(VIT_BASE, dim=1024, layers=24, heads=16),
}


def presets() -> list[str]:
    """The names of all presets, by family, small before large."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The settings of a published model, by its exact name."""
    if name not in PRESETS:
        raise UserError(f"there is no preset '{name}' (and no such run): {nearest(name, PRESETS)}")
    return PRESETS[name]


def build(name: str, **overrides: Any) -> nn.Module:
    """A published model with new weights, with any settings overridden.

    `build("gpt3-small", layers=2, position="rotary", norm={"form": "rms"})`: values are as in a
    recipe, or settings objects; a table changes only the fields that it names.
    """
    return change(preset(name), overrides).build()


class _Callable(ModuleType):
    """Importing this module puts it in place of the function `manyheads.presets`."""

    __call__ = staticmethod(presets)


sys.modules[__name__].__class__ = _Callable
