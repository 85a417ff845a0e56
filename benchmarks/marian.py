"""Our translator and `transformers`' Marian as the same model: same sizes, same weights."""

import torch
from torch import Tensor, nn

from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.embedding import Embed
from manyheads.nn.positions import Sinusoidal
from manyheads.nn.residual import Norm
from manyheads.tokens import Tokenizer


def config(vocab_size: int, layers: int = 3, dim: int = 256) -> Seq2SeqConfig:
    """What Marian is in our terms: post-norm, sinusoids in halves, scaled tied embeddings."""
    return Seq2SeqConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=dim // 64,
        hidden=4 * dim,
        max_length=256,
        position=Sinusoidal(layout="halves"),
        norm=Norm(placement="post"),
        embed=Embed(scale="sqrt-dim"),
        dropout=0.1,
    )


def marian(ours: Seq2Seq, tokenizer: Tokenizer) -> nn.Module:
    """`transformers`' Marian with our weights."""
    from transformers import MarianConfig, MarianMTModel

    c = ours.config
    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=c.vocabulary,
            d_model=c.dim,
            encoder_layers=c.layers,
            decoder_layers=c.layers,
            encoder_attention_heads=c.heads,
            decoder_attention_heads=c.heads,
            encoder_ffn_dim=c.hidden,
            decoder_ffn_dim=c.hidden,
            activation_function="relu",
            dropout=c.dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            max_position_embeddings=c.max_length,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad,
            eos_token_id=tokenizer.end,
            forced_eos_token_id=None,
            decoder_start_token_id=tokenizer.start,
        )
    )
    with torch.no_grad():
        theirs.model.shared.weight.copy_(ours.tokens.weight)
        _copy_stack(ours.encoder, theirs.model.encoder.layers)
        _copy_stack(ours.decoder, theirs.model.decoder.layers)
    return theirs


def _copy_stack(ours: Stack, layers: nn.ModuleList) -> None:
    for block, layer in zip(ours.blocks, layers, strict=True):
        _copy_attention(block.attention, layer.self_attn)
        _copy(block.attention_residual.norm, layer.self_attn_layer_norm)
        if hasattr(block, "cross"):
            _copy_attention(block.cross, layer.encoder_attn)
            _copy(block.cross_residual.norm, layer.encoder_attn_layer_norm)
        _copy(block.feedforward.inner, layer.fc1)
        _copy(block.feedforward.outer, layer.fc2)
        _copy(block.feedforward_residual.norm, layer.final_layer_norm)


def _copy_attention(ours: SelfAttention | CrossAttention, theirs: nn.Module) -> None:
    weights: list[Tensor] = list(ours.project.weight.chunk(3 if _is_self(ours) else 2))
    biases: list[Tensor] = list(ours.project.bias.chunk(3 if _is_self(ours) else 2))
    if not _is_self(ours):
        weights.insert(0, ours.query.weight)
        biases.insert(0, ours.query.bias)
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        getattr(theirs, name).weight.copy_(weight)
        getattr(theirs, name).bias.copy_(bias)
    _copy(ours.output, theirs.out_proj)


def _is_self(attention: nn.Module) -> bool:
    return isinstance(attention, SelfAttention)


def _copy(ours: nn.Module, theirs: nn.Module) -> None:
    theirs.load_state_dict(ours.state_dict())
