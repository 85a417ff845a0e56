"""The same weights in PyTorch's own Transformer give the same outputs and gradients."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from manyheads.models.seq2seq import EncoderOutput, Seq2SeqConfig
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.layers import Norm, Plain
from manyheads.nn.masks import AttentionMask, causal, full, make_mask
from manyheads.nn.positions import NoPosition

DIM, HEADS, HIDDEN = 12, 3, 20
Activation = Literal["relu", "gelu"]


def copy_attention(ours: Any, theirs: nn.MultiheadAttention) -> None:
    """PyTorch stacks the rows of queries, keys and values, as `project` does."""
    parts = [ours.project] if isinstance(ours, SelfAttention) else [ours.query, ours.project]
    assert isinstance(ours, (SelfAttention, CrossAttention))
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def copy_block(ours: Any, theirs: Any) -> None:
    copy_attention(ours.attention, theirs.self_attn)
    residuals = [ours.attention_residual, ours.feedforward_residual]
    if hasattr(theirs, "multihead_attn"):
        copy_attention(ours.cross, theirs.multihead_attn)
        residuals.insert(1, ours.cross_residual)
    for number, residual in enumerate(residuals, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feedforward.inner.state_dict())
    theirs.linear2.load_state_dict(ours.feedforward.outer.state_dict())


def shaken(module: Any, dtype: torch.dtype) -> Any:
    """Biases and gains as a trained model has them, so that swapping two of them shows."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.5)
    return module.to(dtype)


def sizes(first: bool, activation: Activation, layers: int) -> dict[str, Any]:
    return {
        "dim": DIM,
        "heads": HEADS,
        "ffn_dim": HIDDEN,
        "layers": layers,
        "dropout": 0.0,
        "norm": Norm(placement="pre" if first else "post"),
        "feedforward": Plain(activation=activation),
        "position": NoPosition(),
    }


def torch_layer(kind: Any, first: bool, activation: Activation, dtype: torch.dtype) -> Any:
    return kind(
        DIM,
        HEADS,
        HIDDEN,
        dropout=0.0,
        activation=activation,
        norm_first=first,
        batch_first=True,
        dtype=dtype,
    )


def agree(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Equal outputs, and equal gradients of the inputs for the same readout."""
    atol = 1e-5 if actual.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    readout = torch.randn_like(actual)
    pairs = zip(
        torch.autograd.grad((actual * readout).sum(), inputs),
        torch.autograd.grad((expected * readout).sum(), inputs),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours != 0).any()
        scale = theirs.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol * scale)


every_setting = pytest.mark.parametrize(
    ("first", "activation", "dtype"),
    [(True, "relu", torch.float64), (False, "gelu", torch.float64), (True, "gelu", torch.float32)],
)


REAL = torch.tensor([[True] * 5, [True, True, True, False, False]])
TARGET_REAL = torch.tensor([[True] * 4, [True, True, True, False]])
TRIANGLE = torch.ones(4, 4, dtype=torch.bool).triu(1)  # PyTorch says True where not to make_mask


@every_setting
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
def test_encoder_layer(first: bool, activation: Activation, dtype: torch.dtype, mask: str) -> None:
    """One block equals TransformerEncoderLayer, with padding and with the causal mask."""
    stack = Stack(Architecture(**sizes(first, activation, 1)), causal=False)
    block = shaken(stack.blocks[0], dtype)
    theirs = torch_layer(nn.TransformerEncoderLayer, first, activation, dtype)
    copy_block(block, theirs)
    x = torch.randn(2, 5, DIM, dtype=dtype, requires_grad=True)
    real = REAL if mask in ("padding", "both") else None
    ahead = mask in ("causal", "both")
    actual = block(x, make_mask(causal if ahead else full, 5, padding_mask=real), stack.position)
    expected = theirs(
        x,
        src_mask=torch.ones(5, 5, dtype=torch.bool).triu(1) if ahead else None,
        src_key_padding_mask=None if real is None else ~real,
    )
    agree(actual, expected, [x])


@every_setting
def test_whole_transformer(first: bool, activation: Activation, dtype: torch.dtype) -> None:
    """Seq2Seq's two stacks equal torch.nn.Transformer, last norms included where there are any."""
    config = Seq2SeqConfig(**sizes(first, activation, 2), vocab_size=7)
    model = shaken(config.build(), dtype)
    encoder_layer = torch_layer(nn.TransformerEncoderLayer, first, activation, dtype)
    decoder_layer = torch_layer(nn.TransformerDecoderLayer, first, activation, dtype)
    encoder_norm, decoder_norm = (
        nn.LayerNorm(DIM, dtype=dtype) if first else None for _ in range(2)
    )
    theirs = nn.Transformer(
        DIM,
        HEADS,
        custom_encoder=nn.TransformerEncoder(encoder_layer, 2, encoder_norm, False),
        custom_decoder=nn.TransformerDecoder(decoder_layer, 2, decoder_norm),
        batch_first=True,
        dtype=dtype,
    )
    for ours, other in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        for block, layer in zip(ours.blocks, other.layers, strict=True):
            copy_block(block, layer)
        if first:
            other.norm.load_state_dict(ours.last_norm.state_dict())
    source = torch.randn(2, 5, DIM, dtype=dtype, requires_grad=True)
    target = torch.randn(2, 4, DIM, dtype=dtype, requires_grad=True)
    sight = make_mask(full, 5, padding_mask=REAL)
    memory = EncoderOutput(
        model.encoder(source, sight),
        AttentionMask(full, sight.query_positions, sight.key_positions, REAL),
    )
    actual = model.decoder(
        target, make_mask(causal, 4, padding_mask=TARGET_REAL), memory.states, memory.mask
    )
    expected = theirs(
        source,
        target,
        tgt_mask=TRIANGLE,
        src_key_padding_mask=~REAL,
        tgt_key_padding_mask=~TARGET_REAL,
        memory_key_padding_mask=~REAL,
    )
    agree(actual, expected, [source, target])


def test_multi_head_attention() -> None:
    """Self-attention equals nn.MultiheadAttention, weights included."""
    stack = Stack(Architecture(**sizes(True, "relu", 1)), causal=True)
    ours = shaken(stack.blocks[0].attention, torch.float64)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        copy_attention(ours, theirs)
    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    expected, _ = theirs(x, x, x, attn_mask=TRIANGLE)
    agree(ours(x, make_mask(causal, 4), stack.position), expected, [x])
