"""T5, BART, Marian and Pegasus: encoder–decoders."""

from typing import Any

import torch
from torch import Tensor

from manyheads.errors import DataError
from manyheads.exchange.foreign import ACTIVATIONS, OWN_ACTIVATIONS, Family, Flat, Foreign
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.positions import SinusoidalPosition

TIES = {
    (True, True): "all",
    (True, False): "inputs",
    (False, True): "target",
    (False, False): "none",
}


def _read_t5(foreign: Foreign) -> Flat:
    # "gated-gelu" has always meant the tanh form.
    words = foreign.settings["feed_forward_proj"].split("-")
    gated, word = words[0] == "gated", words[-1]
    word = "gelu_new" if gated and word == "gelu" else word
    if word not in ACTIVATIONS or len(words) > 2 or (len(words) == 2 and not gated):
        raise DataError(f"config.json has feed_forward_proj={'-'.join(words)}, which T5 has not")
    for name, value in (
        ("dense_act_fn", word),
        ("is_gated_act", gated),
    ):  # newer files say it again
        if foreign.settings.get(name, value) != value:
            raise DataError(
                f"config.json has {name}={foreign.settings[name]} beside {'-'.join(words)}"
            )
    # In older files the flag says both; newer ones keep the scale by itself.
    flag = foreign.settings["tie_word_embeddings"]
    scaled = foreign.settings.get("scale_decoder_outputs", flag)
    tied = foreign.equal("lm_head.weight", "shared.weight")
    return {
        "feedforward.kind": "gated" if gated else "plain",
        "feedforward.activation": ACTIVATIONS[word],
        "output.scale": "inverse-sqrt-dim" if scaled else "one",
        "tie": "all" if tied else "inputs",
        "decoder.layers": foreign.settings["num_decoder_layers"] or foreign.settings["num_layers"],
    }


def _write_t5(flat: Flat) -> dict[str, Any]:
    gated = flat.pop("feedforward.kind") == "gated"
    word = OWN_ACTIVATIONS[flat["feedforward.activation"]]
    if not gated or word != "gelu":  # which has no name here; left in `flat`, it is refused
        flat.pop("feedforward.activation")
    if gated:
        word = f"gated-{'gelu' if word == 'gelu_new' else word}"
    settings = {
        "feed_forward_proj": word,
        "num_decoder_layers": flat.pop("decoder.layers"),
        # Their one flag for a scale that hangs on nothing else any more.
        "tie_word_embeddings": flat.pop("output.scale") == "inverse-sqrt-dim",
    }
    if flat.get("tie") in ("all", "inputs"):
        flat.pop("tie")
    return settings


def _t5_side(side: str, feedforward: int) -> dict[str, str | tuple[str, ...]]:
    ours, theirs = f"{side}.blocks.{{}}", f"{side}.block.{{}}.layer"
    return {
        f"{side}.positions.0.table": theirs.format(0) + ".0.SelfAttention.relative_attention_bias",
        f"{ours}.attention.project": tuple(f"{theirs}.0.SelfAttention.{x}" for x in "qkv"),
        f"{ours}.attention.output": f"{theirs}.0.SelfAttention.o",
        f"{ours}.attention_residual.norm": f"{theirs}.0.layer_norm",
        f"{ours}.cross.query": f"{theirs}.1.EncDecAttention.q",
        f"{ours}.cross.project": tuple(f"{theirs}.1.EncDecAttention.{x}" for x in "kv"),
        f"{ours}.cross.output": f"{theirs}.1.EncDecAttention.o",
        f"{ours}.cross_residual.norm": f"{theirs}.1.layer_norm",
        f"{ours}.feedforward.inner": f"{theirs}.{feedforward}.DenseReluDense.wi",
        f"{ours}.feedforward.outer": f"{theirs}.{feedforward}.DenseReluDense.wo",
        f"{ours}.feedforward_residual.norm": f"{theirs}.{feedforward}.layer_norm",
        f"{side}.last_norm": f"{side}.final_layer_norm",
    }


T5 = Family(
    kind="t5",
    prefix="transformer.",
    model=Seq2SeqConfig,
    fields={
        "vocab_size": "vocab_size",
        "d_model": "dim",
        "d_kv": "head_dim",
        "d_ff": "encoder.hidden decoder.hidden",
        "num_layers": "encoder.layers",
        "num_heads": "encoder.heads decoder.heads",
        "n_positions": "max_length",
        "relative_attention_num_buckets": "position.buckets",
        "relative_attention_max_distance": "position.max_distance",
        "layer_norm_epsilon": "norm.eps",
        "dropout_rate": "dropout attention_dropout feedforward.dropout",
    },
    defaults={
        "d_kv": 64,
        "num_decoder_layers": None,
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    only={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    fixed={
        "norm.placement": "pre",
        "norm.form": "rms",
        "position.kind": "t5",
        "score.kind": "dot",
        "embed.scale": "one",
        "bias": False,
        "output.bias": "none",
    },
    heads={"T5ForConditionalGeneration": {}},
    read=_read_t5,
    write=_write_t5,
    tensors={
        "tokens": "shared",
        "head": "lm_head",
        **_t5_side("encoder", 1),
        **_t5_side("decoder", 2),
    },
    gated={
        f"{side}.blocks.{{}}.feedforward.{ours}": (
            f"{side}.block.{{}}.layer.{place}.DenseReluDense.{theirs}"
        )
        for side, place in (("encoder", 1), ("decoder", 2))
        for ours, theirs in (("gate", "wi_0"), ("inner", "wi_1"))
    },
    same={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    unused=[r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"],
)


def _ties(foreign: Foreign) -> Flat:
    """Which of source table, target table and head are one, and the bias of the head."""
    wants = foreign.settings["tie_word_embeddings"]
    inputs = foreign.equal("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    table = "shared.weight" if "shared.weight" in foreign.tensors else "decoder.embed_tokens.weight"
    head = wants and foreign.equal("lm_head.weight", table)
    bias = foreign.tensors.get("final_logits_bias")
    fixed = bias is not None and bool((bias != 0).any())
    return {"tie": TIES[inputs, head], "output.bias": "fixed" if fixed else "none"}


def _write_ties(flat: Flat) -> dict[str, Any]:
    flat.pop("output.bias")
    return {"tie_word_embeddings": flat.pop("tie") in ("all", "target")}


def _read_bart(foreign: Foreign) -> Flat:
    scaled = foreign.settings["scale_embedding"]
    return {"embed.scale": "sqrt-dim" if scaled else "one", **_ties(foreign)}


def _write_bart(flat: Flat) -> dict[str, Any]:
    settings = {"scale_embedding": flat.pop("embed.scale") == "sqrt-dim"}
    if flat["tie"] == "target":
        return settings  # left in `flat`, so that it is refused
    return settings | _write_ties(flat)


def _side(side: str) -> dict[str, str | tuple[str, ...]]:
    ours, theirs = f"{side}.blocks.{{}}", f"{side}.layers.{{}}"
    return {
        f"{ours}.attention.project": tuple(f"{theirs}.self_attn.{x}_proj" for x in "qkv"),
        f"{ours}.attention.output": f"{theirs}.self_attn.out_proj",
        f"{ours}.attention_residual.norm": f"{theirs}.self_attn_layer_norm",
        f"{ours}.cross.query": f"{theirs}.encoder_attn.q_proj",
        f"{ours}.cross.project": tuple(f"{theirs}.encoder_attn.{x}_proj" for x in "kv"),
        f"{ours}.cross.output": f"{theirs}.encoder_attn.out_proj",
        f"{ours}.cross_residual.norm": f"{theirs}.encoder_attn_layer_norm",
        f"{ours}.feedforward.inner": f"{theirs}.fc1",
        f"{ours}.feedforward.outer": f"{theirs}.fc2",
        f"{ours}.feedforward_residual.norm": f"{theirs}.final_layer_norm",
        f"{side}.positions.0.table": f"{side}.embed_positions",
        f"{side}_embedding.norm": f"{side}.layernorm_embedding",
        f"{side}.last_norm": f"{side}.layer_norm",
    }


TENSORS: dict[str, str | tuple[str, ...]] = {
    "tokens": "shared",
    "head": "lm_head",
    "head.bias": "final_logits_bias",
    **_side("encoder"),
    **_side("decoder"),
}
APART = {"tokens": "encoder.embed_tokens", "target_tokens": "decoder.embed_tokens"}
SAME = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "dim",
    "encoder_layers": "encoder.layers",
    "decoder_layers": "decoder.layers",
    "encoder_attention_heads": "encoder.heads",
    "decoder_attention_heads": "decoder.heads",
    "encoder_ffn_dim": "encoder.hidden",
    "decoder_ffn_dim": "decoder.hidden",
    "activation_function": "feedforward.activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "feedforward.dropout",
    "max_position_embeddings": "max_length",
}
DEFAULTS: dict[str, Any] = {
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "encoder_layerdrop": (0.0,),
    "decoder_layerdrop": (0.0,),
}
FIXED: Flat = {
    "norm.form": "layer",
    "norm.eps": 1e-5,
    "score.kind": "scaled-dot",
    "feedforward.kind": "plain",
    "bias": True,
    "output.scale": "one",
}
POST_NORM: Flat = {**FIXED, "norm.placement": "post"}

BART = Family(
    kind="bart",
    prefix="model.",
    model=Seq2SeqConfig,
    fields=FIELDS,
    defaults=DEFAULTS,
    only=ONLY,
    fixed={
        **POST_NORM,
        "position.kind": "learned",
        "position.offset": 2,
        "embed.norm.form": "layer",
        "embed.norm.eps": 1e-5,
    },
    # Files of the bare model are as often opened with the head that is tied to its table.
    heads={"BartForConditionalGeneration": {}, "BartModel": {}},
    read=_read_bart,
    write=_write_bart,
    tensors=TENSORS,
    apart=APART,
    same=SAME,
    # A bias of nothing but zeros is none.
    unused=[r"^(encoder|decoder)\.version$", r"^final_logits_bias$"],
)


COARSEST = torch.finfo(torch.bfloat16).eps / 2  # between two bfloat16 numbers just below one


def _check_waves(foreign: Foreign) -> None:
    """Stored sinusoids must be the sinusoids, as near as the coarsest format that holds them."""
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        table: Tensor | None = foreign.tensors.get(name)
        if table is None:
            continue
        positions = torch.arange(len(table), device=table.device)[None]
        nothing = torch.zeros_like(table, dtype=torch.float64)[None]
        waves = SinusoidalPosition(10_000.0, "halves").embed(nothing, positions)[0]
        if not torch.allclose(waves, table.double(), rtol=0.0, atol=COARSEST):
            raise DataError(
                f"{name} holds other positions than the sinusoids its config.json means"
            )


def _read_marian(foreign: Foreign) -> Flat:
    _check_waves(foreign)
    flat = _read_bart(foreign)
    if not foreign.settings["share_encoder_decoder_embeddings"]:
        tied = foreign.settings["tie_word_embeddings"] and foreign.equal(
            "lm_head.weight", "decoder.embed_tokens.weight"
        )
        flat["tie"] = "target" if tied else "none"
        flat["target_vocab_size"] = foreign.settings["decoder_vocab_size"]
    return flat


def _write_marian(flat: Flat) -> dict[str, Any]:
    apart = flat["tie"] in ("target", "none")
    settings: dict[str, Any] = {"share_encoder_decoder_embeddings": not apart}
    if apart:
        settings["decoder_vocab_size"] = flat.pop("target_vocab_size", flat["vocab_size"])
    scaled = flat.pop("embed.scale") == "sqrt-dim"
    return {**settings, "scale_embedding": scaled, **_write_ties(flat)}


WAVES: Flat = {
    "position.kind": "sinusoidal",
    "position.layout": "halves",
    "position.base": 10_000.0,
}
MARIAN = Family(
    kind="marian",
    prefix="model.",
    model=Seq2SeqConfig,
    fields=FIELDS,
    defaults={**DEFAULTS, "share_encoder_decoder_embeddings": True, "decoder_vocab_size": None},
    only=ONLY,
    fixed={**POST_NORM, **WAVES},
    heads={"MarianMTModel": {}},
    read=_read_marian,
    write=_write_marian,
    tensors=TENSORS,
    apart=APART,
    same=SAME,
    unused=[r"^final_logits_bias$", r"\.embed_positions\.weight$"],
)


def _read_pegasus(foreign: Foreign) -> Flat:
    _check_waves(foreign)
    return _read_bart(foreign)


PEGASUS = Family(
    kind="pegasus",
    prefix="model.",
    model=Seq2SeqConfig,
    fields=FIELDS,
    defaults=DEFAULTS,
    only=ONLY,
    fixed={**FIXED, **WAVES, "norm.placement": "pre"},
    heads={"PegasusForConditionalGeneration": {}},
    read=_read_pegasus,
    write=_write_bart,
    tensors=TENSORS,
    apart=APART,
    same=SAME,
    unused=[r"^final_logits_bias$", r"\.embed_positions\.weight$"],
)
