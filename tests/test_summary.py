"""Summaries against PyTorch's own counters: parameters, FLOPs, cache and saved activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.kv_cache import KVCache
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Detect, Tag
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.models.vit import VitConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.experts import Experts
from manyheads.nn.layers import EmbeddingConfig, Gated, HeadConfig, Norm, Plain
from manyheads.nn.linformer import Linformer
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Alibi, Buckets, Learned, Relative, Rotary, Shaw
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank
from manyheads.presets import ModelConfig
from manyheads.summary import (
    summarize,
)

BATCH, LENGTH = 3, 10
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "dim": 16,
    "layers": 2,
    "heads": 4,
    "ffn_dim": 24,
    "max_length": 12,
    "attention": Dense(),
    "dropout": 0.0,
}
CONFIGS: dict[str, ModelConfig] = {
    "gpt": GptConfig(**SIZES, position=Learned()),
    "gpt-untied-grouped-gated": GptConfig(
        **SIZES, tie="none", kv_heads=2, feedforward=Gated(), position=Rotary(), bias=False
    ),
    "gpt-wide-heads": GptConfig(**SIZES, head_dim=6, position=Alibi(), norm=Norm(form="rms")),
    "gpt-shaw": GptConfig(**SIZES, position=Shaw(max_distance=5)),
    "gpt-relative": GptConfig(**SIZES, position=Relative()),
    "bert-relative": BertConfig(**SIZES, position=Relative(max_distance=4)),
    "gpt-experts": GptConfig(**SIZES, feedforward=Experts(experts=3, top=2)),
    "gpt-bilinear": GptConfig(**SIZES, score=Bilinear(key_size=3)),
    "gpt-reduced-rank": GptConfig(**SIZES, score=ReducedRank(rank=2)),
    "gpt-additive": GptConfig(**SIZES, score=Additive(width=7)),
    "bert": BertConfig(
        **SIZES, position=Learned(), norm=Norm(placement="post"), embed=EmbeddingConfig(norm=Norm())
    ),
    "bert-segments": BertConfig(**SIZES, embed=EmbeddingConfig(segments=2)),
    "bert-bare": BertConfig(**SIZES, head=None, feedforward=Plain(activation="gelu")),
    "bert-narrow-table": BertConfig(
        **SIZES, embed=EmbeddingConfig(dim=5, norm=Norm()), head=Detect()
    ),
    "bert-tags": BertConfig(**SIZES, head=Tag(labels=("a", "b", "c"))),
    "bert-linformer": BertConfig(**SIZES | {"attention": Linformer(rank=4)}),
    "bert-linformer-grouped": BertConfig(**SIZES | {"attention": Linformer(rank=4)}, kv_heads=2),
    "bert-performer": BertConfig(**SIZES | {"attention": Performer(features=7)}, kv_heads=2),
    "gpt-performer": GptConfig(**SIZES | {"attention": Performer(features=7)}, kv_heads=2),
    "seq2seq": Seq2SeqConfig(**SIZES),
    "seq2seq-inputs": Seq2SeqConfig(
        **SIZES, tie="inputs", output=HeadConfig(bias="trained"), qkv_bias=False
    ),
    "seq2seq-two-vocabularies": Seq2SeqConfig(**SIZES, tie="target", target_vocab_size=31),
    "seq2seq-two-tables": Seq2SeqConfig(**SIZES, tie="target", position=Buckets(), score=Dot()),
    "seq2seq-sides": Seq2SeqConfig(
        **SIZES,
        tie="none",
        encoder=StackOverrides(layers=3, ffn_dim=20),
        decoder=StackOverrides(layers=1, heads=2),
        score=ReducedRank(rank=3),
    ),
}

# Pixels past the last whole patch are not looked at.
VIT = VitConfig(**{**SIZES, "vocab_size": None}, image_size=14, patch_size=4, channels=2, head=None)


def inputs(config: ModelConfig, batch: int = BATCH, length: int = LENGTH) -> list[Tensor]:
    if isinstance(config, VitConfig):
        return [torch.randn(batch, config.channels, config.image_size, config.image_size)]
    tokens = torch.randint(
        getattr(config, "target_vocab_size", None) or config.vocabulary, (batch, length)
    )
    return [tokens, tokens] if isinstance(config, Seq2SeqConfig) else [tokens]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_all_counted_once(name: str) -> None:
    config = CONFIGS[name]
    counted, model = summarize(config), config.build()
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert sum(counted.parts.values()) == counted.parameters
    parts = counted.parts
    table = config.vocabulary * config.embed.width(config.dim)
    assert parts["embedding"] >= table
    assert (parts["cross-attention"] > 0) == isinstance(config, Seq2SeqConfig)
    inner = sum(p.numel() for key, p in model.named_parameters() if ".feedforward." in key)
    assert parts["feed-forward"] == inner
    norms = sum(p.numel() for key, p in model.named_parameters() if "norm." in key)
    assert parts["norms"] == norms
    blocks = sum(p.numel() for key, p in model.named_parameters() if ".blocks." in key)
    assert counted.block_parameters == blocks
    assert counted.feedforward_share["parameters"] == inner / blocks


def test_a_tied_head_has_no_parameters_but_costs_flops() -> None:
    tied, untied = (summarize(CONFIGS[name]) for name in ("gpt", "gpt-untied-grouped-gated"))
    table = SIZES["vocab_size"] * SIZES["dim"]
    assert tied.parts["head"] == 0
    assert untied.parts["head"] == table
    assert tied.flops["token"]["head"] == untied.flops["token"]["head"] == 2 * table


@pytest.mark.parametrize("config", [*CONFIGS.values(), VIT], ids=[*CONFIGS, "vit"])
def test_flops_equal_what_pytorch_counts(config: ModelConfig) -> None:
    model = config.build().eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(*inputs(config))
    counted = summarize(config, length=LENGTH)
    assert BATCH * counted.sequence_flops == counter.get_total_flops()
    assert set(counted.tokens.values()) == ({9, 1} if config is VIT else {LENGTH})


def test_training_costs_three_forward_passes() -> None:
    config = CONFIGS["gpt"]
    model = config.build()
    counter = FlopCounterMode(display=False)
    with counter:
        model(*inputs(config)).sum().backward()
    counted = summarize(config, length=LENGTH)
    assert BATCH * LENGTH * counted.training_flops["token"] == counter.get_total_flops()


def test_textbook_formula_of_a_block() -> None:
    """24 d² FLOPs for projections, 4 n d for the scores and the mix, with f = 4d."""
    dim, length = 16, 7
    config = GptConfig(vocab_size=9, dim=dim, layers=1, heads=2, max_length=length)
    flops = summarize(config).flops["token"]
    assert flops["attention"] + flops["feed-forward"] == 24 * dim**2
    assert flops["attention scores"] + flops["attention mixing"] == 4 * length * dim
    assert flops["head"] == 2 * 9 * dim
    assert summarize(config).parts["feed-forward"] == 8 * dim**2 + 5 * dim


@pytest.mark.parametrize("name", ["gpt", "gpt-untied-grouped-gated", "gpt-bilinear"])
def test_cache_is_what_a_cache_holds(name: str) -> None:
    config, cache = CONFIGS[name], KVCache()
    config.build().eval()(inputs(config)[0], cache=cache)
    counted = summarize(config, length=LENGTH, batch=BATCH).inference["float32"]
    assert counted.cache == cache.bytes()
    assert counted.cache == BATCH * LENGTH * counted.cache_per_token["token"]


RNN: dict[str, Any] = {"vocab_size": 40, "dim": 16, "layers": 3, "dropout": 0.0}
RECURRENT: dict[str, RnnConfig] = {
    "dot": RnnConfig(**RNN, score=Dot()),
    "bilinear-untied": RnnConfig(**RNN, score=Bilinear(), tie="none"),
    "reduced-rank": RnnConfig(**RNN, score=ReducedRank(rank=3)),
    "additive": RnnConfig(**RNN, score=Additive(width=7)),
}


@pytest.mark.parametrize("config", RECURRENT.values(), ids=RECURRENT)
def test_a_recurrent_model_is_counted(config: RnnConfig) -> None:
    """Parameters, FLOPs and what is held to write; one thread of it is 8 (in + hidden) hidden."""
    model, tokens = config.build().double(), torch.randint(40, (BATCH, LENGTH))
    counted, dim = summarize(config, length=LENGTH, batch=BATCH), config.dim
    parts = counted.parts
    assert sum(parts.values()) == counted.parameters == sum(p.numel() for p in model.parameters())
    assert parts["recurrent"] == sum(
        p.numel() for part in (model.encoder, model.decoder, model.first) for p in part.parameters()
    )
    assert parts["cross-attention"] == sum(p.numel() for p in model.attention.parameters())
    counter, cache = FlopCounterMode(display=False), KVCache()
    with counter, torch.no_grad():
        memory = model.encode(tokens)
        model.logits(model.decode(tokens, memory, cache=cache))
    once = BATCH * 2 * model.first.weight.numel()  # once per source
    assert BATCH * counted.sequence_flops + once == counter.get_total_flops()
    assert counted.flops["source"]["recurrent"] == 3 * 2 * 8 * (dim + dim // 2) * dim // 2
    assert counted.flops["target"]["recurrent"] == 3 * 8 * (dim + dim) * dim
    held = counted.inference["float32"]
    assert 2 * held.cache == cache.bytes() + memory.states.nbytes
    assert 2 * BATCH * held.state == cache.bytes()


def kept_bytes(model: nn.Module, arguments: list[Tensor], padded: bool) -> int:
    """What autograd keeps of a forward pass with its loss, each storage once, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    real = torch.arange(arguments[0].shape[1]) < arguments[0].shape[1] - 1
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = model(*arguments, *(real.expand(arguments[0].shape) for _ in arguments if padded))
        loss = output.sum()
        if hasattr(model, "head") and output.ndim == 3:
            loss = F.cross_entropy(output.flatten(0, 1), arguments[-1].flatten())
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in saved.values())


@pytest.mark.parametrize(
    ("family", "core", "feedforward", "placement"),
    [
        (GptConfig, Dense(), Plain(), "pre"),
        (GptConfig, Fused(), Gated(), "post"),
        (GptConfig, Fused(), Experts(experts=4, top=2), "pre"),
        (BertConfig, Dense(), Plain(activation="gelu"), "post"),
        (BertConfig, Fused(), Plain(), "pre"),
        (Seq2SeqConfig, Dense(), Gated(), "pre"),
        (Seq2SeqConfig, Fused(), Plain(activation="gelu"), "post"),
        (Seq2SeqConfig, Dense(), Experts(experts=4, top=2), "post"),
    ],
    ids=range(8),
)
def test_activations_are_near_what_autograd_keeps(
    core: Any, family: Any, feedforward: Any, placement: Any
) -> None:
    config = family(
        vocab_size=300,
        dim=64,
        heads=4,
        layers=3,
        attention=core,
        dropout=0.0,
        feedforward=feedforward,
        norm=Norm(placement=placement),
    )
    arguments = inputs(config, batch=2, length=96)
    # A mask makes the dense core hold its weights twice, and the CPU's kernel borrow floats.
    measured = kept_bytes(config.build(), arguments, padded=isinstance(core, Dense))
    counted = summarize(config, length=96, batch=2).training
    assert counted.activations == pytest.approx(measured, rel=0.1)
