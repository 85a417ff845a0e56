"""The architectures of Hugging Face as tables: settings, heads and names of tensors.

BERT, GPT-2, Llama, T5, BART and ViT are written out; the other families are deltas from one of
them (`Family.derive`). To add a family, derive it from the nearest one and add it to `FAMILIES`.
"""

from collections.abc import Mapping
from typing import Any

from manyheads.errors import UserError
from manyheads.exchange.family import (
    ACTIVATIONS,
    REMOVED,
    SAME_ACTIVATION,
    Family,
    Field,
    Flat,
    Foreign,
    Names,
)
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig

TIED = {True: "all", False: "none"}
SCALED = {True: "sqrt-dim", False: "one"}
SIZES = {
    "hidden_size": Field("dim"),
    "num_hidden_layers": Field("layers"),
    "num_attention_heads": Field("heads"),
    "intermediate_size": Field("ffn_dim"),
}
# Our settings that families share: the parts of BERT's blocks, and a plain LM head.
PLAIN = {
    "norm.form": "layer",
    "position.kind": "learned",
    "position.offset": 0,
    "score.kind": "scaled-dot",
    "feedforward.kind": "plain",
    "bias": True,
}
PLAIN_HEAD = {"output.scale": "one", "output.bias": "none"}

# ---------------------------------------------------------------------------------------------
# BERT and its relatives: post-norm encoders with learned positions

BARE = {"head": "none"}
TAG = {"head.kind": "tag"}
CLASSIFY = {"head.kind": "classify"}
MASKED = {"head.kind": "masked", "head.activation": SAME_ACTIVATION}
POOLED = {"pooler.activation": "tanh"}
NEXT_SENTENCE = {**POOLED, "next_sentence.classes": 2}
CLASSIFIER: Names = {"head.output": "classifier"}
DENSE_CLASSIFIER: Names = {
    "pooler.project": "classifier.dense",
    "head.output": "classifier.out_proj",
}


def _masked(project: str, norm: str, output: str) -> Names:
    return {"head.project": project, "head.norm": norm, "head.output": output}


# Files of classes without a pooled vector often hold the pooler all the same.
POOLER = r"^pooler\.dense\.(weight|bias)$"
BUFFERS = r"embeddings\.(position_ids|token_type_ids)$"
TABLE = "embeddings.word_embeddings.weight"

BERT = Family(
    kind="bert",
    prefix="bert.",
    model=BertConfig,
    fields={
        "vocab_size": Field("vocab_size"),
        **SIZES,
        "hidden_act": Field("feedforward.activation", "gelu", ACTIVATIONS),
        "hidden_dropout_prob": Field("dropout", 0.1),
        "attention_probs_dropout_prob": Field("attention_dropout", 0.1),
        "type_vocab_size": Field("embed.segments", 2),
        "layer_norm_eps": Field("norm.eps embed.norm.eps", 1e-12),
        "max_position_embeddings": Field("max_length", 512),
        "tie_word_embeddings": Field("head.tie", True, TIED, heads=("masked",)),
        "classifier_dropout": Field("head.dropout", None, heads=("classify", "tag")),
    },
    only={
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "is_encoder_decoder": (False,),
        "position_embedding_type": ("absolute",),
        "pruned_heads": ({},),
    },
    fixed=PLAIN | {"norm.placement": "post", "embed.norm.form": "layer", "embed.scale": "one"},
    architectures={
        "BertModel": {**BARE, **POOLED},
        "BertForMaskedLM": MASKED,
        "BertForPreTraining": {**MASKED, **NEXT_SENTENCE},
        "BertForNextSentencePrediction": {**BARE, **NEXT_SENTENCE},
        "BertForSequenceClassification": {**CLASSIFY, **POOLED},
        "BertForTokenClassification": TAG,
    },
    # The files of the paper's models hold both heads, but name the masked one.
    superset_of={"BertForMaskedLM": "BertForPreTraining"},
    unpooled="BertModel",
    layer="encoder.layer.{n}",
    tensors={
        "tokens": "embeddings.word_embeddings",
        "embedding.segment": "embeddings.token_type_embeddings",
        "embedding.norm": "embeddings.LayerNorm",
        "{stack}.positions.0.table": "embeddings.position_embeddings",
        "attention.project": "attention.self.query|key|value",
        "attention.output": "attention.output.dense",
        "attention_residual.norm": "attention.output.LayerNorm",
        "feedforward.inner": "intermediate.dense",
        "feedforward.outer": "output.dense",
        "feedforward_residual.norm": "output.LayerNorm",
        "pooler.project": "pooler.dense",
        "next_sentence": "cls.seq_relationship",
    },
    variants={
        "masked": _masked(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        ),
        "classify": CLASSIFIER,
        "tag": CLASSIFIER,
    },
    tied=("cls.predictions.decoder.weight", TABLE),
    same={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    # The second name of the bias is stored separately if the head is not tied, and never read.
    unused=[BUFFERS, POOLER, r"^cls\.predictions\.bias$"],
    renamed=[(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")],
)


def _read_roberta(foreign: Foreign) -> Flat:
    """Positions count from the padding token's id + 1."""
    offset = foreign.settings["pad_token_id"] + 1
    length = foreign.settings["max_position_embeddings"] - offset
    return {"position.offset": offset, "max_length": length}


def _write_roberta(flat: Flat) -> dict[str, Any]:
    offset = flat.get("position.offset", 0)
    padding = max(0, offset - 1)  # read back, no padding token gives an offset of 0
    return {"pad_token_id": padding, "max_position_embeddings": flat["max_length"] + offset}


ROBERTA = BERT.derive(
    kind="roberta",
    prefix="roberta.",
    defaults={"pad_token_id": 1},
    fixed={"position.offset": REMOVED},
    architectures={
        "RobertaModel": {**BARE, **POOLED},
        "RobertaForMaskedLM": {**MASKED, "head.activation": "gelu"},
        "RobertaForSequenceClassification": {**CLASSIFY, **POOLED},
        "RobertaForTokenClassification": TAG,
    },
    unpooled="RobertaModel",
    read=_read_roberta,
    write=_write_roberta,
    variants={
        "masked": _masked("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
        "classify": DENSE_CLASSIFIER,
    },
    tied=("lm_head.decoder.weight", TABLE),
    same={"lm_head.bias": "lm_head.decoder.bias"},
    unused=[BUFFERS, POOLER, r"^lm_head\.bias$"],
)

ELECTRA = BERT.derive(
    kind="electra",
    prefix="electra.",
    fields={"embedding_size": Field("embed.dim", 128)},
    architectures={
        "ElectraModel": BARE,
        "ElectraForMaskedLM": {**MASKED, "head.activation": "gelu"},
        "ElectraForPreTraining": {"head.kind": "detect", "head.activation": SAME_ACTIVATION},
        "ElectraForSequenceClassification": {**CLASSIFY, "pooler.activation": "gelu"},
        "ElectraForTokenClassification": TAG,
    },
    unpooled="",
    tensors={"embedding.project": "embeddings_project"},
    variants={
        "masked": _masked(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
        ),
        "detect": {
            "head.project": "discriminator_predictions.dense",
            "head.output": "discriminator_predictions.dense_prediction",
        },
        "classify": DENSE_CLASSIFIER,
    },
    tied=("generator_lm_head.weight", TABLE),
    unused=[BUFFERS],
)

DISTILBERT = BERT.derive(
    replaced=("fields", "only", "same"),
    kind="distilbert",
    prefix="distilbert.",
    fields={
        "vocab_size": Field("vocab_size"),
        "dim": Field("dim"),
        "n_layers": Field("layers"),
        "n_heads": Field("heads"),
        "hidden_dim": Field("ffn_dim"),
        "activation": Field("feedforward.activation", "gelu", ACTIVATIONS),
        "dropout": Field("dropout", 0.1),
        "attention_dropout": Field("attention_dropout", 0.1),
        "max_position_embeddings": Field("max_length", 512),
        "tie_word_embeddings": BERT.fields["tie_word_embeddings"],
        "seq_classif_dropout": Field("head.dropout", 0.2, heads=("classify",)),
    },
    only={"sinusoidal_pos_embds": (False,), "pruned_heads": ({},)},
    fixed={"norm.eps": 1e-12, "embed.norm.eps": 1e-12},
    architectures={
        "DistilBertModel": BARE,
        "DistilBertForMaskedLM": MASKED,
        "DistilBertForSequenceClassification": {**CLASSIFY, "pooler.activation": "relu"},
        "DistilBertForTokenClassification": TAG,
    },
    unpooled="",
    layer="transformer.layer.{n}",
    tensors={
        "attention.project": "attention.q_lin|k_lin|v_lin",
        "attention.output": "attention.out_lin",
        "attention_residual.norm": "sa_layer_norm",
        "feedforward.inner": "ffn.lin1",
        "feedforward.outer": "ffn.lin2",
        "feedforward_residual.norm": "output_layer_norm",
        "pooler.project": "pre_classifier",
    },
    variants={
        "masked": _masked("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    },
    tied=("vocab_projector.weight", TABLE),
    same={},
    unused=[BUFFERS],
)

# ---------------------------------------------------------------------------------------------
# Pre-norm decoders: GPT-2 with learned positions; Llama and its relatives with rotary ones

GPT2 = Family(
    kind="gpt2",
    prefix="transformer.",
    model=GptConfig,
    fields={
        "vocab_size": Field("vocab_size"),
        "n_positions": Field("max_length"),
        "n_embd": Field("dim"),
        "n_layer": Field("layers"),
        "n_head": Field("heads"),
        "n_inner": Field("ffn_dim", None),
        "activation_function": Field("feedforward.activation", "gelu_new", ACTIVATIONS),
        "embd_pdrop": Field("dropout", 0.1),
        "resid_pdrop": Field("dropout", 0.1),  # read after the other, so that it wins
        "attn_pdrop": Field("attention_dropout", 0.1),
        "layer_norm_epsilon": Field("norm.eps", 1e-5),
        "scale_attn_weights": Field("score.kind", True, {True: "scaled-dot", False: "dot"}),
        "tie_word_embeddings": Field("tie", True, TIED),
    },
    only={
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({},),
    },
    fixed={
        **{name: value for name, value in PLAIN.items() if name != "score.kind"},
        **PLAIN_HEAD,
        "norm.placement": "pre",
        "embed.scale": "one",
    },
    architectures={"GPT2LMHeadModel": {}},
    layer="h.{n}",
    tensors={
        "tokens": "wte",
        "{stack}.positions.0.table": "wpe",
        "attention.project": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "attention_residual.norm": "ln_1",
        "feedforward.inner": "mlp.c_fc",
        "feedforward.outer": "mlp.c_proj",
        "feedforward_residual.norm": "ln_2",
        "{stack}.last_norm": "ln_f",
        "head": "lm_head",
    },
    tied=("lm_head.weight", "wte.weight"),
    unused=[r"\.attn\.(bias|masked_bias)$"],
    transposed=True,
)


def _read_rope(foreign: Foreign) -> Flat:
    """Newer files keep the settings of rotary positions in one table, older ones in two places."""
    settings = foreign.settings
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    form = rope.get("rope_type", rope.get("type", "default"))
    if form != "default":
        raise UserError(f"a model with rope_type={form} is not supported: only default")
    return {"position.base": rope.get("rope_theta", settings["rope_theta"])}


def _write_rope(flat: Flat) -> dict[str, Any]:
    base = flat.get("position.base", 10_000.0)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


LLAMA = Family(
    kind="llama",
    prefix="model.",
    model=GptConfig,
    fields={
        "vocab_size": Field("vocab_size"),
        **SIZES,
        "num_key_value_heads": Field("kv_heads", None),
        "head_dim": Field("head_dim", None),
        "hidden_act": Field("feedforward.activation", "silu", ACTIVATIONS),
        "max_position_embeddings": Field("max_length", 2048),
        "rms_norm_eps": Field("norm.eps", 1e-6),
        "attention_bias": Field("attention_bias", False),
        "mlp_bias": Field("bias", False),
        "attention_dropout": Field("attention_dropout", 0.0),
        "tie_word_embeddings": Field("tie", False, TIED),
    },
    defaults={"rope_theta": 10_000.0},
    fixed={
        "norm.placement": "pre",
        "norm.form": "rms",
        "embed.scale": "one",
        "position.kind": "rotary",
        "position.layout": "halves",
        "score.kind": "scaled-dot",
        "feedforward.kind": "gated",
        "dropout": 0.0,
        **PLAIN_HEAD,
    },
    architectures={"LlamaForCausalLM": {}},
    read=_read_rope,
    write=_write_rope,
    layer="layers.{n}",
    tensors={
        "tokens": "embed_tokens",
        "attention.project": "self_attn.q_proj|k_proj|v_proj",
        "attention.output": "self_attn.o_proj",
        "attention_residual.norm": "input_layernorm",
        "feedforward.gate": "mlp.gate_proj",
        "feedforward.inner": "mlp.up_proj",
        "feedforward.outer": "mlp.down_proj",
        "feedforward_residual.norm": "post_attention_layernorm",
        "{stack}.last_norm": "norm",
        "head": "lm_head",
    },
    tied=("lm_head.weight", "embed_tokens.weight"),
    unused=[r"rotary_emb\.inv_freq$"],
)


def _read_window(foreign: Foreign) -> Flat:
    """Rotary positions, and a sliding window: theirs counts the query itself."""
    window = foreign.settings["sliding_window"]
    local = (
        {} if window is None else {"attention.kind": "longformer", "attention.window": window - 1}
    )
    return _read_rope(foreign) | local


def _write_window(flat: Flat) -> dict[str, Any]:
    window = flat.get("attention.window")
    return _write_rope(flat) | {"sliding_window": None if window is None else window + 1}


MISTRAL = LLAMA.derive(
    kind="mistral",
    fields={
        "num_key_value_heads": Field("kv_heads", 8),
        "max_position_embeddings": Field("max_length", 131_072),
        "attention_bias": REMOVED,
        "mlp_bias": REMOVED,
    },
    defaults={"sliding_window": 4096},
    fixed={"bias": False},
    architectures={"MistralForCausalLM": {}},
    read=_read_window,
    write=_write_window,
)

QWEN2 = LLAMA.derive(
    kind="qwen2",
    fields={
        "num_key_value_heads": Field("kv_heads", 32),
        "head_dim": REMOVED,
        "max_position_embeddings": Field("max_length", 32_768),
        "attention_bias": REMOVED,
        "mlp_bias": REMOVED,
    },
    only={"use_sliding_window": (False,)},
    fixed={"bias": False, "qkv_bias": True},
    architectures={"Qwen2ForCausalLM": {}},
)

QWEN3 = LLAMA.derive(
    kind="qwen3",
    fields={
        "num_key_value_heads": Field("kv_heads", 32),
        "head_dim": Field("head_dim", 128),
        "max_position_embeddings": Field("max_length", 32_768),
        "mlp_bias": REMOVED,
    },
    only={"use_sliding_window": (False,)},
    fixed={"bias": False, "qk_norm": True},
    architectures={"Qwen3ForCausalLM": {}},
    tensors={
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
    },
)

STARCODER2 = MISTRAL.derive(
    kind="starcoder2",
    fields={
        "num_key_value_heads": Field("kv_heads", 2),
        "head_dim": REMOVED,
        "hidden_act": Field("feedforward.activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "max_position_embeddings": Field("max_length", 4096),
        "rms_norm_eps": REMOVED,
        "norm_epsilon": Field("norm.eps", 1e-5),
        "use_bias": Field("bias", True),
        "embedding_dropout": Field("dropout", 0.0),
        "residual_dropout": Field("dropout", 0.0),
        "tie_word_embeddings": Field("tie", True, TIED),
    },
    defaults={"sliding_window": None},
    fixed={"norm.form": "layer", "feedforward.kind": "plain", "bias": REMOVED, "dropout": REMOVED},
    architectures={"Starcoder2ForCausalLM": {}},
    tensors={
        "feedforward.gate": REMOVED,
        "feedforward.inner": "mlp.c_fc",
        "feedforward.outer": "mlp.c_proj",
    },
)

# ---------------------------------------------------------------------------------------------
# T5: a pre-norm encoder–decoder with a bias by distance

SHARED_TABLE = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
}


# Words of feed_forward_proj: (gated, activation). Their "gated-gelu" is the tanh form.
T5_FORMS = {theirs: (False, ours) for theirs, ours in ACTIVATIONS.items()} | {
    f"gated-{theirs}": (True, ours) for theirs, ours in ACTIVATIONS.items() if theirs != "gelu"
}
T5_FORMS["gated-gelu"] = (True, "gelu-tanh")


def _read_t5(foreign: Foreign) -> Flat:
    settings = foreign.settings
    gated, activation = T5_FORMS[settings["feed_forward_proj"]]
    # In older files the flag means both; newer ones store the scale separately.
    scaled = settings.get("scale_decoder_outputs", settings["tie_word_embeddings"])
    return {
        "feedforward.kind": "gated" if gated else "plain",
        "feedforward.activation": activation,
        "output.scale": "inverse-sqrt-dim" if scaled else "one",
        "tie": "all" if foreign.tied_head else "inputs",
        "decoder.layers": settings["num_decoder_layers"] or settings["num_layers"],
    }


def _write_t5(flat: Flat) -> dict[str, Any]:
    gated = flat["feedforward.kind"] == "gated"
    form, nearest = (gated, flat["feedforward.activation"]), "gated-gelu" if gated else "relu"
    return {
        "feed_forward_proj": next((x for x, known in T5_FORMS.items() if known == form), nearest),
        "num_decoder_layers": flat["decoder.layers"],
        # In transformers this flag now only means the scale.
        "tie_word_embeddings": flat["output.scale"] == "inverse-sqrt-dim",
    }


T5_BIAS = "SelfAttention.relative_attention_bias"  # the first layer has it for all
T5 = Family(
    kind="t5",
    prefix="transformer.",
    model=Seq2SeqConfig,
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("dim"),
        "d_kv": Field("head_dim", 64),
        "d_ff": Field("encoder.ffn_dim decoder.ffn_dim"),
        "num_layers": Field("encoder.layers"),
        "num_heads": Field("encoder.heads decoder.heads"),
        "n_positions": Field("max_length", 512),
        "relative_attention_num_buckets": Field("position.buckets", 32),
        "relative_attention_max_distance": Field("position.max_distance", 128),
        "layer_norm_epsilon": Field("norm.eps", 1e-6),
        "dropout_rate": Field("dropout attention_dropout feedforward.dropout", 0.1),
    },
    defaults={
        "num_decoder_layers": None,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    only={
        "feed_forward_proj": tuple(T5_FORMS),
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
    },
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
    layer="{stack}.block.{n}.layer",
    tensors={
        "tokens": "shared",
        "head": "lm_head",
        "{stack}.positions.0.table": f"{{stack}}.block.0.layer.0.{T5_BIAS}",
        "{stack}.last_norm": "{stack}.final_layer_norm",
        "attention.project": "0.SelfAttention.q|k|v",
        "attention.output": "0.SelfAttention.o",
        "attention_residual.norm": "0.layer_norm",
        "cross.query": "1.EncDecAttention.q",
        "cross.project": "1.EncDecAttention.k|v",
        "cross.output": "1.EncDecAttention.o",
        "cross_residual.norm": "1.layer_norm",
        "feedforward.inner": "{last}.DenseReluDense.wi",
        "feedforward.outer": "{last}.DenseReluDense.wo",
        "feedforward_residual.norm": "{last}.layer_norm",
    },
    variants={
        "gated": {
            "feedforward.gate": "{last}.DenseReluDense.wi_0",
            "feedforward.inner": "{last}.DenseReluDense.wi_1",
        },
    },
    tied=("lm_head.weight", "shared.weight"),
    same=SHARED_TABLE,
    unused=[r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"],
)

# ---------------------------------------------------------------------------------------------
# BART, and with sinusoids Marian and Pegasus: encoder–decoders

# Our `tie` by (source and target share a table, the head is tied to the target's table).
TIES = {
    (True, True): "all",
    (True, False): "inputs",
    (False, True): "target",
    (False, False): "none",
}


def _read_bart(foreign: Foreign) -> Flat:
    """Which of source table, target table and head are tied, and whether the head has a bias."""
    settings = foreign.settings
    shared = foreign.tied_inputs and settings.get("share_encoder_decoder_embeddings", True)
    return {
        "tie": TIES[shared, foreign.tied_head and settings["tie_word_embeddings"]],
        "output.bias": "fixed" if foreign.has_bias else "none",
        "target_vocab_size": None if shared else settings.get("decoder_vocab_size"),
    }


def _write_bart(flat: Flat) -> dict[str, Any]:
    return {"tie_word_embeddings": flat["tie"] == "all"}


BART = Family(
    kind="bart",
    prefix="model.",
    model=Seq2SeqConfig,
    fields={
        "vocab_size": Field("vocab_size"),
        "d_model": Field("dim"),
        "encoder_layers": Field("encoder.layers"),
        "decoder_layers": Field("decoder.layers"),
        "encoder_attention_heads": Field("encoder.heads"),
        "decoder_attention_heads": Field("decoder.heads"),
        "encoder_ffn_dim": Field("encoder.ffn_dim"),
        "decoder_ffn_dim": Field("decoder.ffn_dim"),
        "activation_function": Field("feedforward.activation", "gelu", ACTIVATIONS),
        "dropout": Field("dropout", 0.1),
        "attention_dropout": Field("attention_dropout", 0.0),
        "activation_dropout": Field("feedforward.dropout", 0.0),
        "max_position_embeddings": Field("max_length", 1024),
        "scale_embedding": Field("embed.scale", False, SCALED),
    },
    defaults={"tie_word_embeddings": True},
    only={
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
    },
    fixed=PLAIN
    | {
        "norm.placement": "post",
        "norm.eps": 1e-5,
        "embed.norm.form": "layer",
        "embed.norm.eps": 1e-5,
        "position.offset": 2,
        "output.scale": "one",
    },
    # Files of the bare model are often opened with the head that is tied to its table.
    architectures={"BartForConditionalGeneration": {}, "BartModel": {}},
    read=_read_bart,
    write=_write_bart,
    layer="{stack}.layers.{n}",
    tensors={
        "tokens": "shared",
        "head": "lm_head",
        "head.bias": "final_logits_bias",
        "{stack}.positions.0.table": "{stack}.embed_positions",
        "{stack}_embedding.norm": "{stack}.layernorm_embedding",
        "{stack}.last_norm": "{stack}.layer_norm",
        "attention.project": "self_attn.q_proj|k_proj|v_proj",
        "attention.output": "self_attn.out_proj",
        "attention_residual.norm": "self_attn_layer_norm",
        "cross.query": "encoder_attn.q_proj",
        "cross.project": "encoder_attn.k_proj|v_proj",
        "cross.output": "encoder_attn.out_proj",
        "cross_residual.norm": "encoder_attn_layer_norm",
        "feedforward.inner": "fc1",
        "feedforward.outer": "fc2",
        "feedforward_residual.norm": "final_layer_norm",
    },
    variants={
        "separate": {"tokens": "encoder.embed_tokens", "target_tokens": "decoder.embed_tokens"}
    },
    tied=("lm_head.weight", "shared.weight"),
    same=SHARED_TABLE,
    unused=[r"^(encoder|decoder)\.version$", r"^final_logits_bias$"],  # a bias of zeros is none
)

PEGASUS = BART.derive(
    kind="pegasus",
    fixed={
        "norm.placement": "pre",
        "embed.norm.form": REMOVED,
        "embed.norm.eps": REMOVED,
        "position.kind": "sinusoidal",
        "position.offset": REMOVED,
        "position.layout": "halves",
        "position.base": 10_000.0,
    },
    architectures={"PegasusForConditionalGeneration": {}},
    unused=[r"^final_logits_bias$", r"\.embed_positions\.weight$"],  # sinusoids are not read
)


def _write_marian(flat: Flat) -> dict[str, Any]:
    shared, tied = next(flags for flags, tie in TIES.items() if tie == flat["tie"])
    return {
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": tied,
        "decoder_vocab_size": flat["target_vocab_size"],
    }


MARIAN = PEGASUS.derive(
    kind="marian",
    defaults={"share_encoder_decoder_embeddings": True, "decoder_vocab_size": None},
    fixed={"norm.placement": "post"},
    architectures={"MarianMTModel": {}},
    write=_write_marian,
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
    if not table.get("do_normalize", True):
        table = {"image_mean": 0, "image_std": 1}
    flat: Flat = {}
    for theirs, ours in (("image_mean", "pixel_mean"), ("image_std", "pixel_std")):
        value = 0.5 if table.get(theirs) is None else table[theirs]
        numbers = value if isinstance(value, list) else [value] * channels
        flat[ours] = [number / (255 * factor) for number in numbers]
    return flat


def write_preprocessor(config: VitConfig) -> dict[str, Any]:
    """The preprocessor_config.json of a model that has the statistics of its pixels."""
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
    table = foreign.settings.get(PREPROCESSOR)
    return {} if table is None else read_pixel_statistics(table, foreign.settings["num_channels"])


VIT = Family(
    kind="vit",
    prefix="vit.",
    model=VitConfig,
    fields={
        **SIZES,
        "hidden_act": Field("feedforward.activation", "gelu", ACTIVATIONS),
        "hidden_dropout_prob": Field("dropout", 0.0),
        "attention_probs_dropout_prob": Field("attention_dropout", 0.0),
        "layer_norm_eps": Field("norm.eps", 1e-12),
        "image_size": Field("image_size", 224),
        "patch_size": Field("patch_size", 16),
        "num_channels": Field("channels", 3),
        "qkv_bias": Field("qkv_bias", True),
        "pooler_act": Field("pooler.activation", "tanh", ACTIVATIONS),
        "pooler_output_size": Field("pooler.dim", None),
    },
    fixed=PLAIN | {"first": "token", "norm.placement": "pre", "embed.scale": "one"},
    architectures={
        "ViTForImageClassification": {"head.kind": "classify"},
        "ViTModel": {**BARE, **POOLED},
    },
    unpooled="ViTModel",
    read=_read_vit,
    layer="layers.{n}",
    tensors={
        "patches.first": "embeddings.cls_token",
        "patches.project": "embeddings.patch_embeddings.projection",
        "{stack}.positions.0.table.weight": "embeddings.position_embeddings",
        "attention.project": "attention.q_proj|k_proj|v_proj",
        "attention.output": "attention.o_proj",
        "attention_residual.norm": "layernorm_before",
        "feedforward.inner": "mlp.fc1",
        "feedforward.outer": "mlp.fc2",
        "feedforward_residual.norm": "layernorm_after",
        "{stack}.last_norm": "layernorm",
        "pooler.project": "pooler.dense",
        "head.output": "classifier",
    },
    unused=[POOLER],  # of classifiers
    # Names in files → names in objects.
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
FAMILIES = [
    *(BERT, ROBERTA, DISTILBERT, ELECTRA),
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, STARCODER2),
    *(T5, BART, MARIAN, PEGASUS),
    VIT,
]
KINDS = {family.kind: family for family in FAMILIES}
