"""The architectures of `transformers` as tables: settings, heads and names of tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import DataError, UserError
from manyheads.exchange.family import (
    ACTIVATIONS,
    HF_ACTIVATIONS,
    SAME_ACTIVATION,
    Family,
    Flat,
    Foreign,
    activation,
)
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.positions import SinusoidalPosition

Names = dict[str, str | tuple[str, ...]]


def qkv(pattern: str, names: str = "q k v") -> tuple[str, ...]:
    """The names of separate projections that are one matrix in our models."""
    return tuple(pattern.replace("*", name) for name in names.split())


# ---------------------------------------------------------------------------------------------
# BERT, RoBERTa, ELECTRA, DistilBERT: post-norm encoders with learned positions

POST_NORM_ENCODER: Flat = {
    "norm.placement": "post",
    "norm.form": "layer",
    "embed.norm.form": "layer",
    "embed.scale": "one",
    "position.kind": "learned",
    "score.kind": "scaled-dot",
    "feedforward.kind": "plain",
    "bias": True,
}
BERT_FIELDS: dict[str, Any] = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "hidden_act": ("feedforward.activation", "gelu"),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "type_vocab_size": ("embed.segments", 2),
    "layer_norm_eps": ("norm.eps embed.norm.eps", 1e-12),
    "max_position_embeddings": ("max_length", 512),
}
BERT_DEFAULTS = {"tie_word_embeddings": True, "classifier_dropout": None}
BERT_ONLY: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
}
BARE = {"head": "none"}
TAG = {"head.kind": "tag"}
POOLED = {"pooler.activation": "tanh"}
CLASSIFIER = {"head.output": "classifier"}
DENSE_CLASSIFIER = {"pooler.project": "classifier.dense", "head.output": "classifier.out_proj"}
OLD_NORMS = [(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
# Files of classes without a pooled vector often hold the pooler all the same.
POOLER = r"^pooler\.dense\.(weight|bias)$"
UNPOOLED = "add_pooling_layer"
BUFFERS = [r"embeddings\.(position_ids|token_type_ids)$"]
TABLE = "embeddings.word_embeddings.weight"

EMBEDDINGS: Names = {
    "tokens": "embeddings.word_embeddings",
    "embedding.segment": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "encoder.positions.0.table": "embeddings.position_embeddings",
}
BERT_STACK: Names = {
    **EMBEDDINGS,
    "encoder.blocks.{}.attention.project": qkv(
        "encoder.layer.{}.attention.self.*", "query key value"
    ),
    "encoder.blocks.{}.attention.output": "encoder.layer.{}.attention.output.dense",
    "encoder.blocks.{}.attention_residual.norm": "encoder.layer.{}.attention.output.LayerNorm",
    "encoder.blocks.{}.feedforward.inner": "encoder.layer.{}.intermediate.dense",
    "encoder.blocks.{}.feedforward.outer": "encoder.layer.{}.output.dense",
    "encoder.blocks.{}.feedforward_residual.norm": "encoder.layer.{}.output.LayerNorm",
}


def _read_head(output: str, foreign: Foreign) -> Flat:
    """Whether a masked head's matrix is the token table; the dropout of a classifier."""
    if foreign.head == "masked":
        tied = foreign.settings["tie_word_embeddings"] and foreign.equal(output, TABLE)
        return {"head.tie": "all" if tied else "none"}
    if foreign.head in ("classify", "tag"):
        return {"head.dropout": foreign.settings["classifier_dropout"]}
    return {}


def _write_head(flat: Flat) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "head.tie" in flat:
        settings["tie_word_embeddings"] = flat.pop("head.tie") == "all"
    if flat.get("head.kind") in ("classify", "tag"):
        settings["classifier_dropout"] = flat.get("head.dropout")
    return settings


BERT = Family(
    kind="bert",
    prefix="bert.",
    model=BertConfig,
    fields=BERT_FIELDS,
    defaults=BERT_DEFAULTS,
    only=BERT_ONLY,
    fixed={**POST_NORM_ENCODER, "position.offset": 0},
    architectures={
        "BertModel": {**BARE, **POOLED},
        "BertForMaskedLM": {"head.kind": "masked", "head.activation": SAME_ACTIVATION},
        "BertForPreTraining": {
            "head.kind": "masked",
            "head.activation": SAME_ACTIVATION,
            **POOLED,
            "next_sentence.classes": 2,
        },
        "BertForNextSentencePrediction": {**BARE, **POOLED, "next_sentence.classes": 2},
        "BertForSequenceClassification": {"head.kind": "classify", **POOLED},
        "BertForTokenClassification": TAG,
    },
    # The files of the paper's models hold both heads, but name the masked one.
    superset_of={"BertForMaskedLM": "BertForPreTraining"},
    unpooled={"BertModel": UNPOOLED},
    read=partial(_read_head, "cls.predictions.decoder.weight"),
    write=_write_head,
    tensors={
        **BERT_STACK,
        "pooler.project": "pooler.dense",
        "next_sentence": "cls.seq_relationship",
    },
    heads={
        "masked": {
            "head.project": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
            "head.output.bias": "cls.predictions.decoder.bias",
            "head.output.weight": "cls.predictions.decoder.weight",
        },
        "classify": CLASSIFIER,
        "tag": CLASSIFIER,
    },
    same={
        "cls.predictions.decoder.weight": TABLE,
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    },
    # The second name of the bias is stored separately if the head is not tied, and never read.
    unused=[*BUFFERS, POOLER, r"^cls\.predictions\.bias$"],
    renamed=OLD_NORMS,
)


def _read_roberta(foreign: Foreign) -> Flat:
    offset = foreign.settings["pad_token_id"] + 1
    length = foreign.settings["max_position_embeddings"] - offset
    head = _read_head("lm_head.decoder.weight", foreign)
    return {"position.offset": offset, "max_length": length, **head}


def _write_roberta(flat: Flat) -> dict[str, Any]:
    offset = flat.get("position.offset", 0)
    if offset == 0:  # left in `flat`, so that it is refused: positions count from the padding id
        return _write_head(flat)
    flat["max_length"] += flat.pop("position.offset")
    return {**_write_head(flat), "pad_token_id": offset - 1}


ROBERTA = Family(
    kind="roberta",
    prefix="roberta.",
    model=BertConfig,
    fields=BERT_FIELDS,
    defaults={**BERT_DEFAULTS, "pad_token_id": 1},
    only=BERT_ONLY,
    fixed=POST_NORM_ENCODER,
    architectures={
        "RobertaModel": {**BARE, **POOLED},
        "RobertaForMaskedLM": {"head.kind": "masked", "head.activation": "gelu"},
        "RobertaForSequenceClassification": {"head.kind": "classify", **POOLED},
        "RobertaForTokenClassification": TAG,
    },
    unpooled={"RobertaModel": UNPOOLED},
    read=_read_roberta,
    write=_write_roberta,
    tensors={**BERT_STACK, "pooler.project": "pooler.dense"},
    heads={
        "masked": {
            "head.project": "lm_head.dense",
            "head.norm": "lm_head.layer_norm",
            "head.output.bias": "lm_head.decoder.bias",
            "head.output.weight": "lm_head.decoder.weight",
        },
        "classify": DENSE_CLASSIFIER,
        "tag": CLASSIFIER,
    },
    same={"lm_head.decoder.weight": TABLE, "lm_head.bias": "lm_head.decoder.bias"},
    unused=[*BUFFERS, POOLER, r"^lm_head\.bias$"],
    renamed=OLD_NORMS,
)

ELECTRA = Family(
    kind="electra",
    prefix="electra.",
    model=BertConfig,
    fields={**BERT_FIELDS, "embedding_size": ("embed.dim", 128)},
    defaults=BERT_DEFAULTS,
    only=BERT_ONLY,
    fixed={**POST_NORM_ENCODER, "position.offset": 0},
    architectures={
        "ElectraModel": BARE,
        "ElectraForMaskedLM": {"head.kind": "masked", "head.activation": "gelu"},
        "ElectraForPreTraining": {"head.kind": "detect", "head.activation": SAME_ACTIVATION},
        "ElectraForSequenceClassification": {"head.kind": "classify", "pooler.activation": "gelu"},
        "ElectraForTokenClassification": TAG,
    },
    read=partial(_read_head, "generator_lm_head.weight"),
    write=_write_head,
    tensors={**BERT_STACK, "embedding.project": "embeddings_project"},
    heads={
        "masked": {
            "head.project": "generator_predictions.dense",
            "head.norm": "generator_predictions.LayerNorm",
            "head.output.bias": "generator_lm_head.bias",
            "head.output.weight": "generator_lm_head.weight",
        },
        "detect": {
            "head.project": "discriminator_predictions.dense",
            "head.output": "discriminator_predictions.dense_prediction",
        },
        "classify": DENSE_CLASSIFIER,
        "tag": CLASSIFIER,
    },
    same={"generator_lm_head.weight": TABLE},
    unused=BUFFERS,
    renamed=OLD_NORMS,
)


def _read_distilbert(foreign: Foreign) -> Flat:
    if foreign.head == "classify":
        return {"head.dropout": foreign.settings["seq_classif_dropout"]}
    return _read_head("vocab_projector.weight", foreign) if foreign.head == "masked" else {}


def _write_distilbert(flat: Flat) -> dict[str, Any]:
    settings = _write_head(flat)
    dropout = settings.pop("classifier_dropout", None)
    if flat.get("head.kind") == "classify" and dropout is not None:
        settings["seq_classif_dropout"] = dropout
    return settings


DISTILBERT = Family(
    kind="distilbert",
    prefix="distilbert.",
    model=BertConfig,
    fields={
        "vocab_size": "vocab_size",
        "dim": "dim",
        "n_layers": "layers",
        "n_heads": "heads",
        "hidden_dim": "ffn_dim",
        "activation": ("feedforward.activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "max_position_embeddings": ("max_length", 512),
    },
    defaults={"seq_classif_dropout": 0.2, "tie_word_embeddings": True},
    only={"sinusoidal_pos_embds": (False,), "pruned_heads": ({},)},
    fixed={
        **POST_NORM_ENCODER,
        "position.offset": 0,
        "norm.eps": 1e-12,
        "embed.norm.eps": 1e-12,
    },
    architectures={
        "DistilBertModel": BARE,
        "DistilBertForMaskedLM": {"head.kind": "masked", "head.activation": SAME_ACTIVATION},
        "DistilBertForSequenceClassification": {
            "head.kind": "classify",
            "pooler.activation": "relu",
        },
        "DistilBertForTokenClassification": TAG,
    },
    read=_read_distilbert,
    write=_write_distilbert,
    tensors={
        **EMBEDDINGS,
        "encoder.blocks.{}.attention.project": qkv("transformer.layer.{}.attention.*_lin"),
        "encoder.blocks.{}.attention.output": "transformer.layer.{}.attention.out_lin",
        "encoder.blocks.{}.attention_residual.norm": "transformer.layer.{}.sa_layer_norm",
        "encoder.blocks.{}.feedforward.inner": "transformer.layer.{}.ffn.lin1",
        "encoder.blocks.{}.feedforward.outer": "transformer.layer.{}.ffn.lin2",
        "encoder.blocks.{}.feedforward_residual.norm": "transformer.layer.{}.output_layer_norm",
        "pooler.project": "pre_classifier",
    },
    heads={
        "masked": {
            "head.project": "vocab_transform",
            "head.norm": "vocab_layer_norm",
            "head.output": "vocab_projector",
        },
        "classify": CLASSIFIER,
        "tag": CLASSIFIER,
    },
    same={"vocab_projector.weight": TABLE},
    unused=BUFFERS,
)

# ---------------------------------------------------------------------------------------------
# GPT-2 and Llama: pre-norm decoders, with learned and with rotary positions

PRE_NORM_DECODER: Flat = {
    "norm.placement": "pre",
    "embed.scale": "one",
    "output.scale": "one",
    "output.bias": "none",
}


def _read_tie(foreign: Foreign, table: str) -> Flat:
    tied = foreign.settings["tie_word_embeddings"] and foreign.equal("lm_head.weight", table)
    return {"tie": "all" if tied else "none"}


def _read_gpt2(foreign: Foreign) -> Flat:
    scaled = foreign.settings["scale_attn_weights"]
    return {"score.kind": "scaled-dot" if scaled else "dot", **_read_tie(foreign, "wte.weight")}


def _write_gpt2(flat: Flat) -> dict[str, Any]:
    settings = {"tie_word_embeddings": flat.pop("tie") == "all"}
    if flat.get("score.kind") in ("dot", "scaled-dot"):
        settings["scale_attn_weights"] = flat.pop("score.kind") == "scaled-dot"
    return {**settings, "embd_pdrop": flat["dropout"]}


GPT2 = Family(
    kind="gpt2",
    prefix="transformer.",
    model=GptConfig,
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_length",
        "n_embd": "dim",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": ("ffn_dim", None),
        "activation_function": ("feedforward.activation", "gelu_new"),
        "resid_pdrop": ("dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "layer_norm_epsilon": ("norm.eps", 1e-5),
    },
    defaults={"scale_attn_weights": True, "tie_word_embeddings": True},
    only={
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({},),
    },
    fixed={
        **PRE_NORM_DECODER,
        "norm.form": "layer",
        "position.kind": "learned",
        "position.offset": 0,
        "feedforward.kind": "plain",
        "bias": True,
    },
    architectures={"GPT2LMHeadModel": {}},
    read=_read_gpt2,
    write=_write_gpt2,
    tensors={
        "tokens": "wte",
        "decoder.positions.0.table": "wpe",
        "decoder.blocks.{}.attention.project": "h.{}.attn.c_attn",
        "decoder.blocks.{}.attention.output": "h.{}.attn.c_proj",
        "decoder.blocks.{}.attention_residual.norm": "h.{}.ln_1",
        "decoder.blocks.{}.feedforward.inner": "h.{}.mlp.c_fc",
        "decoder.blocks.{}.feedforward.outer": "h.{}.mlp.c_proj",
        "decoder.blocks.{}.feedforward_residual.norm": "h.{}.ln_2",
        "decoder.last_norm": "ln_f",
        "head": "lm_head",
    },
    same={"lm_head.weight": "wte.weight"},
    unused=[r"\.attn\.(bias|masked_bias)$"],
    transposed=True,
)


def _read_llama(foreign: Foreign) -> Flat:
    # Newer files keep everything about rotary positions in one table, older ones in two places.
    settings = foreign.settings
    rotary = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rotary, dict):
        raise DataError(f"config.json has rope_parameters={rotary!r}, which should be a table")
    form = rotary.get("rope_type", rotary.get("type", "default"))
    if form != "default":
        raise UserError(f"a llama model with rope_type={form} is not supported: only default")
    base = rotary.get("rope_theta", settings["rope_theta"])
    return {"position.base": base, **_read_tie(foreign, "embed_tokens.weight")}


def _write_llama(flat: Flat) -> dict[str, Any]:
    base = flat.pop("position.base", 10_000.0)
    rope = {"rope_type": "default", "rope_theta": base}
    return {"tie_word_embeddings": flat.pop("tie") == "all", "rope_parameters": rope}


LLAMA = Family(
    kind="llama",
    prefix="model.",
    model=GptConfig,
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": ("kv_heads", None),
        "head_dim": ("head_dim", None),
        "intermediate_size": "ffn_dim",
        "hidden_act": ("feedforward.activation", "silu"),
        "max_position_embeddings": ("max_length", 2048),
        "rms_norm_eps": ("norm.eps", 1e-6),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("bias", False),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    defaults={"tie_word_embeddings": False, "rope_theta": 10_000.0},
    fixed={
        **PRE_NORM_DECODER,
        "norm.form": "rms",
        "position.kind": "rotary",
        "position.layout": "halves",
        "score.kind": "scaled-dot",
        "feedforward.kind": "gated",
        "dropout": 0.0,
    },
    architectures={"LlamaForCausalLM": {}},
    read=_read_llama,
    write=_write_llama,
    tensors={
        "tokens": "embed_tokens",
        "decoder.blocks.{}.attention.project": qkv("layers.{}.self_attn.*_proj"),
        "decoder.blocks.{}.attention.output": "layers.{}.self_attn.o_proj",
        "decoder.blocks.{}.attention_residual.norm": "layers.{}.input_layernorm",
        "decoder.blocks.{}.feedforward.gate": "layers.{}.mlp.gate_proj",
        "decoder.blocks.{}.feedforward.inner": "layers.{}.mlp.up_proj",
        "decoder.blocks.{}.feedforward.outer": "layers.{}.mlp.down_proj",
        "decoder.blocks.{}.feedforward_residual.norm": "layers.{}.post_attention_layernorm",
        "decoder.last_norm": "norm",
        "head": "lm_head",
    },
    same={"lm_head.weight": "embed_tokens.weight"},
    unused=[r"rotary_emb\.inv_freq$"],
)

# ---------------------------------------------------------------------------------------------
# T5, BART, Marian, Pegasus: encoder–decoders


def _read_t5(foreign: Foreign) -> Flat:
    settings = foreign.settings
    words = settings["feed_forward_proj"].split("-")
    gated, word = words[0] == "gated", words[-1]
    word = "gelu_new" if gated and word == "gelu" else word  # "gated-gelu" means the tanh form
    if word not in ACTIVATIONS or len(words) > 2 or (len(words) == 2 and not gated):
        raise DataError(f"config.json has feed_forward_proj={'-'.join(words)}, which T5 has not")
    for name, value in (("dense_act_fn", word), ("is_gated_act", gated)):  # newer files repeat it
        if settings.get(name, value) != value:
            raise DataError(f"config.json has {name}={settings[name]} beside {'-'.join(words)}")
    # In older files the flag means both; newer ones store the scale separately.
    scaled = settings.get("scale_decoder_outputs", settings["tie_word_embeddings"])
    tied = foreign.equal("lm_head.weight", "shared.weight")
    return {
        "feedforward.kind": "gated" if gated else "plain",
        "feedforward.activation": ACTIVATIONS[word],
        "output.scale": "inverse-sqrt-dim" if scaled else "one",
        "tie": "all" if tied else "inputs",
        "decoder.layers": settings["num_decoder_layers"] or settings["num_layers"],
    }


def _write_t5(flat: Flat) -> dict[str, Any]:
    gated = flat.pop("feedforward.kind") == "gated"
    word = HF_ACTIVATIONS[flat["feedforward.activation"]]
    if not gated or word != "gelu":  # which has no name here; left in `flat`, it is refused
        flat.pop("feedforward.activation")
    if gated:
        word = f"gated-{'gelu' if word == 'gelu_new' else word}"
    if flat.get("tie") in ("all", "inputs"):
        flat.pop("tie")
    return {
        "feed_forward_proj": word,
        "num_decoder_layers": flat.pop("decoder.layers"),
        # In transformers this flag now only means the scale.
        "tie_word_embeddings": flat.pop("output.scale") == "inverse-sqrt-dim",
    }


def _t5_side(side: str, feedforward: int) -> Names:
    ours, theirs = f"{side}.blocks.{{}}", f"{side}.block.{{}}.layer"
    return {
        f"{side}.positions.0.table": theirs.format(0) + ".0.SelfAttention.relative_attention_bias",
        f"{ours}.attention.project": qkv(f"{theirs}.0.SelfAttention.*"),
        f"{ours}.attention.output": f"{theirs}.0.SelfAttention.o",
        f"{ours}.attention_residual.norm": f"{theirs}.0.layer_norm",
        f"{ours}.cross.query": f"{theirs}.1.EncDecAttention.q",
        f"{ours}.cross.project": qkv(f"{theirs}.1.EncDecAttention.*", "k v"),
        f"{ours}.cross.output": f"{theirs}.1.EncDecAttention.o",
        f"{ours}.cross_residual.norm": f"{theirs}.1.layer_norm",
        f"{ours}.feedforward.inner": f"{theirs}.{feedforward}.DenseReluDense.wi",
        f"{ours}.feedforward.outer": f"{theirs}.{feedforward}.DenseReluDense.wo",
        f"{ours}.feedforward_residual.norm": f"{theirs}.{feedforward}.layer_norm",
        f"{side}.last_norm": f"{side}.final_layer_norm",
    }


SHARED = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
T5 = Family(
    kind="t5",
    prefix="transformer.",
    model=Seq2SeqConfig,
    fields={
        "vocab_size": "vocab_size",
        "d_model": "dim",
        "d_kv": ("head_dim", 64),
        "d_ff": "encoder.ffn_dim decoder.ffn_dim",
        "num_layers": "encoder.layers",
        "num_heads": "encoder.heads decoder.heads",
        "n_positions": ("max_length", 512),
        "relative_attention_num_buckets": ("position.buckets", 32),
        "relative_attention_max_distance": ("position.max_distance", 128),
        "layer_norm_epsilon": ("norm.eps", 1e-6),
        "dropout_rate": ("dropout attention_dropout feedforward.dropout", 0.1),
    },
    defaults={
        "num_decoder_layers": None,
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
    architectures={"T5ForConditionalGeneration": {}},
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
    same=SHARED,
    unused=[r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"],
)

TIES = {
    (True, True): "all",
    (True, False): "inputs",
    (False, True): "target",
    (False, False): "none",
}


def _read_bart(foreign: Foreign) -> Flat:
    """The scale, which of source table, target table and head are tied, and the head's bias."""
    tensors, settings = foreign.tensors, foreign.settings
    inputs = foreign.equal("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    table = "shared.weight" if "shared.weight" in tensors else "decoder.embed_tokens.weight"
    head = settings["tie_word_embeddings"] and foreign.equal("lm_head.weight", table)
    bias = tensors.get("final_logits_bias")
    return {
        "embed.scale": "sqrt-dim" if settings["scale_embedding"] else "one",
        "tie": TIES[inputs, head],
        "output.bias": "none" if bias is None or not bias.any() else "fixed",
    }


def _write_bart(flat: Flat) -> dict[str, Any]:
    settings = {"scale_embedding": flat.pop("embed.scale") == "sqrt-dim"}
    if flat["tie"] == "target":
        return settings  # left in `flat`, so that it is refused
    flat.pop("output.bias")
    return {**settings, "tie_word_embeddings": flat.pop("tie") == "all"}


def _bart_side(side: str) -> Names:
    ours, theirs = f"{side}.blocks.{{}}", f"{side}.layers.{{}}"
    return {
        f"{ours}.attention.project": qkv(f"{theirs}.self_attn.*_proj"),
        f"{ours}.attention.output": f"{theirs}.self_attn.out_proj",
        f"{ours}.attention_residual.norm": f"{theirs}.self_attn_layer_norm",
        f"{ours}.cross.query": f"{theirs}.encoder_attn.q_proj",
        f"{ours}.cross.project": qkv(f"{theirs}.encoder_attn.*_proj", "k v"),
        f"{ours}.cross.output": f"{theirs}.encoder_attn.out_proj",
        f"{ours}.cross_residual.norm": f"{theirs}.encoder_attn_layer_norm",
        f"{ours}.feedforward.inner": f"{theirs}.fc1",
        f"{ours}.feedforward.outer": f"{theirs}.fc2",
        f"{ours}.feedforward_residual.norm": f"{theirs}.final_layer_norm",
        f"{side}.positions.0.table": f"{side}.embed_positions",
        f"{side}_embedding.norm": f"{side}.layernorm_embedding",
        f"{side}.last_norm": f"{side}.layer_norm",
    }


BART_FIELDS: dict[str, Any] = {
    "vocab_size": "vocab_size",
    "d_model": "dim",
    "encoder_layers": "encoder.layers",
    "decoder_layers": "decoder.layers",
    "encoder_attention_heads": "encoder.heads",
    "decoder_attention_heads": "decoder.heads",
    "encoder_ffn_dim": "encoder.ffn_dim",
    "decoder_ffn_dim": "decoder.ffn_dim",
    "activation_function": ("feedforward.activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("feedforward.dropout", 0.0),
    "max_position_embeddings": ("max_length", 1024),
}
BART_FIXED: Flat = {
    "norm.form": "layer",
    "norm.eps": 1e-5,
    "score.kind": "scaled-dot",
    "feedforward.kind": "plain",
    "bias": True,
    "output.scale": "one",
}
BART_LIKE: dict[str, Any] = {
    "prefix": "model.",
    "model": Seq2SeqConfig,
    "fields": BART_FIELDS,
    "only": {
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
    },
    "tensors": {
        "tokens": "shared",
        "head": "lm_head",
        "head.bias": "final_logits_bias",
        **_bart_side("encoder"),
        **_bart_side("decoder"),
    },
    "apart": {"tokens": "encoder.embed_tokens", "target_tokens": "decoder.embed_tokens"},
    "same": SHARED,
}
BART_DEFAULTS = {"scale_embedding": False, "tie_word_embeddings": True}

BART = Family(
    kind="bart",
    **BART_LIKE,
    defaults=BART_DEFAULTS,
    fixed={
        **BART_FIXED,
        "norm.placement": "post",
        "position.kind": "learned",
        "position.offset": 2,
        "embed.norm.form": "layer",
        "embed.norm.eps": 1e-5,
    },
    # Files of the bare model are often opened with the head that is tied to its table.
    architectures={"BartForConditionalGeneration": {}, "BartModel": {}},
    read=_read_bart,
    write=_write_bart,
    unused=[r"^(encoder|decoder)\.version$", r"^final_logits_bias$"],  # a bias of zeros is none
)

COARSEST = torch.finfo(torch.bfloat16).eps / 2  # between two bfloat16 numbers just below one
SINUSOIDS: Flat = {
    "position.kind": "sinusoidal",
    "position.layout": "halves",
    "position.base": 10_000.0,
}


def _read_sinusoidal(foreign: Foreign) -> Flat:
    """As BART; stored sinusoids must be the sinusoids, to the rounding of bfloat16."""
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        table: Tensor | None = foreign.tensors.get(name)
        if table is None:
            continue
        positions = torch.arange(len(table), device=table.device)[None]
        zeros = torch.zeros_like(table, dtype=torch.float64)[None]
        waves = SinusoidalPosition(10_000.0, "halves").embed(zeros, positions)[0]
        if not torch.allclose(waves, table.double(), rtol=0.0, atol=COARSEST):
            raise DataError(f"{name} holds other positions than the sinusoids of its config.json")
    return _read_bart(foreign)


def _read_marian(foreign: Foreign) -> Flat:
    flat, settings = _read_sinusoidal(foreign), foreign.settings
    if not settings["share_encoder_decoder_embeddings"]:
        tied = foreign.equal("lm_head.weight", "decoder.embed_tokens.weight")
        flat["tie"] = "target" if tied and settings["tie_word_embeddings"] else "none"
        flat["target_vocab_size"] = settings["decoder_vocab_size"]
    return flat


def _write_marian(flat: Flat) -> dict[str, Any]:
    tie = flat.pop("tie")
    flat.pop("output.bias")
    settings: dict[str, Any] = {
        "share_encoder_decoder_embeddings": tie in ("all", "inputs"),
        "scale_embedding": flat.pop("embed.scale") == "sqrt-dim",
        "tie_word_embeddings": tie in ("all", "target"),
    }
    if tie in ("target", "none"):
        settings["decoder_vocab_size"] = flat.pop("target_vocab_size", flat["vocab_size"])
    return settings


SINUSOIDAL_UNUSED = [r"^final_logits_bias$", r"\.embed_positions\.weight$"]
MARIAN = Family(
    kind="marian",
    **BART_LIKE,
    defaults={
        **BART_DEFAULTS,
        "share_encoder_decoder_embeddings": True,
        "decoder_vocab_size": None,
    },
    fixed={**BART_FIXED, **SINUSOIDS, "norm.placement": "post"},
    architectures={"MarianMTModel": {}},
    read=_read_marian,
    write=_write_marian,
    unused=SINUSOIDAL_UNUSED,
)

PEGASUS = Family(
    kind="pegasus",
    **BART_LIKE,
    defaults=BART_DEFAULTS,
    fixed={**BART_FIXED, **SINUSOIDS, "norm.placement": "pre"},
    architectures={"PegasusForConditionalGeneration": {}},
    read=_read_sinusoidal,
    write=_write_bart,
    unused=SINUSOIDAL_UNUSED,
)

# ---------------------------------------------------------------------------------------------
# ViT: a pre-norm encoder of image patches, and the normalisation of its pixels

PREPROCESSOR = "preprocessor_config.json"
BILINEAR = 2  # Pillow's number of this filter


def read_pixel_statistics(table: Mapping[str, Any], channels: int) -> Flat:
    """Mean and standard deviation of pixels in [0, 1], from a preprocessor_config.json.

    There x = (f·p − mean) / deviation, with p from 0 to 255; f is 1 / 255 by default and 1
    without do_rescale. Without do_normalize the mean is 0 and the deviation 1.
    """
    factor = table.get("rescale_factor", 1 / 255) if table.get("do_rescale", True) else 1
    if not _is_positive(factor):
        raise DataError(f"{PREPROCESSOR} has rescale_factor={factor!r}, which should be above 0")
    if not table.get("do_normalize", True):
        table = {"image_mean": 0, "image_std": 1}
    flat: Flat = {}
    for theirs, ours in (("image_mean", "pixel_mean"), ("image_std", "pixel_std")):
        value = 0.5 if table.get(theirs) is None else table[theirs]
        numbers = value if isinstance(value, list) else [value] * channels
        fits = [_is_positive(x) or (x == 0 and ours == "pixel_mean") for x in numbers]
        if len(numbers) != channels or not all(fits):
            raise DataError(
                f"{PREPROCESSOR} has {theirs}={value!r}: give a number for each of {channels} "
                "channels, or delete it"
            )
        flat[ours] = [number / (255 * factor) for number in numbers]
    return flat


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < float("inf")


def write_preprocessor(config: VitConfig) -> dict[str, Any]:
    """The preprocessor_config.json of a model that knows the statistics of its pixels."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.pixel_mean),
        "image_std": list(config.pixel_std),
    }


def _read_vit(foreign: Foreign) -> Flat:
    settings = foreign.settings
    table = settings.get(PREPROCESSOR)
    flat = {} if table is None else read_pixel_statistics(table, settings["num_channels"])
    if foreign.architecture == "ViTModel":
        flat["pooler.activation"] = activation(settings["pooler_act"])
        flat["pooler.dim"] = settings["pooler_output_size"]
    return flat


def _write_vit(flat: Flat) -> dict[str, Any]:
    for name in ("max_length", "pixel_mean", "pixel_std"):
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
        "intermediate_size": "ffn_dim",
        "hidden_act": ("feedforward.activation", "gelu"),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
        "layer_norm_eps": ("norm.eps", 1e-12),
        "image_size": ("image_size", 224),
        "patch_size": ("patch_size", 16),
        "num_channels": ("channels", 3),
        "qkv_bias": ("qkv_bias", True),
    },
    defaults={"pooler_act": "tanh", "pooler_output_size": None},
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
    architectures={
        "ViTForImageClassification": {"head.kind": "classify"},
        "ViTModel": {**BARE, **POOLED},
    },
    unpooled={"ViTModel": UNPOOLED},
    read=_read_vit,
    write=_write_vit,
    tensors={
        "patches.first": "embeddings.cls_token",
        "patches.project": "embeddings.patch_embeddings.projection",
        "encoder.positions.0.table.weight": "embeddings.position_embeddings",
        "encoder.blocks.{}.attention.project": qkv("layers.{}.attention.*_proj"),
        "encoder.blocks.{}.attention.output": "layers.{}.attention.o_proj",
        "encoder.blocks.{}.attention_residual.norm": "layers.{}.layernorm_before",
        "encoder.blocks.{}.feedforward.inner": "layers.{}.mlp.fc1",
        "encoder.blocks.{}.feedforward.outer": "layers.{}.mlp.fc2",
        "encoder.blocks.{}.feedforward_residual.norm": "layers.{}.layernorm_after",
        "encoder.last_norm": "layernorm",
        "pooler.project": "pooler.dense",
        "head.output": "classifier",
    },
    unused=[POOLER],  # of classifiers
    # Old names of files, as the new names of objects.
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

# In the order in which they are tried for a model of ours.
FAMILIES = [BERT, ROBERTA, DISTILBERT, ELECTRA, GPT2, LLAMA, T5, BART, MARIAN, PEGASUS, VIT]
KINDS = {family.kind: family for family in FAMILIES}
