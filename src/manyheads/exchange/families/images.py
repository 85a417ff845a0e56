"""ViT: a pre-norm encoder of patches."""

from typing import Any

from manyheads.exchange.foreign import Family, Flat, Foreign, activation
from manyheads.models.vit import VitConfig


def _read_vit(foreign: Foreign) -> Flat:
    if foreign.architecture != "ViTModel":
        return {}
    return {
        "pooler.activation": activation(foreign.settings["pooler_act"]),
        "pooler.dim": foreign.settings["pooler_output_size"],
    }


def _write_vit(flat: Flat) -> dict[str, Any]:
    for name in ("max_length", "pixel_mean", "pixel_deviation"):
        flat.pop(name)
    return {"pooler_output_size": flat.pop("pooler.dim")} if "pooler.dim" in flat else {}


VIT = Family(
    kind="vit",
    prefix="vit.",
    model=VitConfig,
    fields={
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "hidden_act": "feedforward.activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm.eps",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "channels",
        "qkv_bias": "qkv_bias",
    },
    defaults={
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
        "pooler_act": "tanh",
        "pooler_output_size": None,
    },
    squares=("image_size", "patch_size"),
    fixed={
        "first": "token",
        "norm.placement": "pre",
        "norm.form": "layer",
        "embed.scale": "one",
        "position.kind": "learned",
        "position.offset": 0,
        "score.kind": "scaled-dot",
        "feedforward.kind": "plain",
        "bias": True,
    },
    heads={
        "ViTForImageClassification": {"head.kind": "classify"},
        "ViTModel": {"head": "none", "pooler.activation": "tanh"},
    },
    unpooled={"ViTModel": "add_pooling_layer"},
    read=_read_vit,
    write=_write_vit,
    tensors={
        "patches.first": "embeddings.cls_token",
        "patches.project": "embeddings.patch_embeddings.projection",
        "encoder.positions.0.table.weight": "embeddings.position_embeddings",
        "encoder.blocks.{}.attention.project": (
            "layers.{}.attention.q_proj",
            "layers.{}.attention.k_proj",
            "layers.{}.attention.v_proj",
        ),
        "encoder.blocks.{}.attention.output": "layers.{}.attention.o_proj",
        "encoder.blocks.{}.attention_residual.norm": "layers.{}.layernorm_before",
        "encoder.blocks.{}.feedforward.inner": "layers.{}.mlp.fc1",
        "encoder.blocks.{}.feedforward.outer": "layers.{}.mlp.fc2",
        "encoder.blocks.{}.feedforward_residual.norm": "layers.{}.layernorm_after",
        "encoder.last_norm": "layernorm",
        "pooler.project": "pooler.dense",
        "head.output": "classifier",
    },
    unused=[r"^pooler\.dense\.(weight|bias)$"],  # of classifiers
    # As files have always had it, and as objects have it now.
    renamed=[
        (r"^encoder\.layer\.", "layers."),
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"intermediate\.dense", "mlp.fc1"),
        (r"(layers\.\d+)\.output\.dense", r"\1.mlp.fc2"),
    ],
)
