"""ViT: a pre-norm encoder of patches, and how pictures are brought to what it sees."""

from collections.abc import Mapping
from typing import Any

from manyheads.errors import DataError
from manyheads.exchange.foreign import Family, Flat, Foreign, activation
from manyheads.models.vit import VitConfig

PREPROCESSOR = "preprocessor_config.json"
BILINEAR = 2  # as Pillow counts its filters
USUAL = 0.5  # of both where they are left out


def read_spread(table: Mapping[str, Any], channels: int) -> Flat:
    """Mean and deviation of pixels from 0 to 1, as a preprocessor_config.json has them.

    There x = (f·p − mean) / deviation, with p from 0 to 255; f is 1 / 255 unless told, and 1
    without do_rescale, and a mean of 0 and a deviation of 1 are none (do_normalize).
    """
    factor = table.get("rescale_factor", 1 / 255) if table.get("do_rescale", True) else 1
    if not _is_positive(factor):
        raise DataError(f"{PREPROCESSOR} has rescale_factor={factor!r}, which should be above 0")
    if not table.get("do_normalize", True):
        table = {"image_mean": 0, "image_std": 1}
    spread: Flat = {}
    for theirs, ours in (("image_mean", "pixel_mean"), ("image_std", "pixel_deviation")):
        given = USUAL if table.get(theirs) is None else table[theirs]
        numbers = given if isinstance(given, list) else [given] * channels
        fits = [_is_positive(x) or (x == 0 and ours == "pixel_mean") for x in numbers]
        if len(numbers) != channels or not all(fits):
            raise DataError(
                f"{PREPROCESSOR} has {theirs}={given!r}, which should be a number for each of "
                f"{channels} channels: copy it again, or take it away"
            )
        spread[ours] = [number / (255 * factor) for number in numbers]
    return spread


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < float("inf")


def write_spread(config: VitConfig) -> dict[str, Any]:
    """What a preprocessor_config.json says of a model that knows the spread of its pixels."""
    side = config.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.pixel_mean),
        "image_std": list(config.pixel_deviation),
    }


def _read_vit(foreign: Foreign) -> Flat:
    told = foreign.settings.get(PREPROCESSOR)
    spread = read_spread(told, foreign.settings["num_channels"]) if told is not None else {}
    if foreign.architecture != "ViTModel":
        return spread
    return spread | {
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
