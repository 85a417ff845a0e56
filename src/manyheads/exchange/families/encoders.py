"""BERT, RoBERTa, ELECTRA and DistilBERT: post-norm encoders with learned positions."""

from typing import Any

from manyheads.exchange.foreign import SAME_ACTIVATION, Family, Flat, Foreign
from manyheads.models.bert import BertConfig

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
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "hidden_act": "feedforward.activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "embed.segments",
    "layer_norm_eps": "norm.eps embed.norm.eps",
}
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "classifier_dropout": None,
}
ONLY: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
}
BARE = {"head": "none"}
TAG = {"head.kind": "tag"}
OLD_NORMS = [(r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")]
# Files of classes that read no pooled vector often hold the pooler all the same.
POOLER = r"^pooler\.dense\.(weight|bias)$"
UNPOOLED = "add_pooling_layer"
BUFFERS = [r"embeddings\.(position_ids|token_type_ids)$"]

EMBEDDINGS: dict[str, str | tuple[str, ...]] = {
    "tokens": "embeddings.word_embeddings",
    "embedding.segment": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "encoder.positions.0.table": "embeddings.position_embeddings",
}
STACK: dict[str, str | tuple[str, ...]] = {
    **EMBEDDINGS,
    "encoder.blocks.{}.attention.project": (
        "encoder.layer.{}.attention.self.query",
        "encoder.layer.{}.attention.self.key",
        "encoder.layer.{}.attention.self.value",
    ),
    "encoder.blocks.{}.attention.output": "encoder.layer.{}.attention.output.dense",
    "encoder.blocks.{}.attention_residual.norm": "encoder.layer.{}.attention.output.LayerNorm",
    "encoder.blocks.{}.feedforward.inner": "encoder.layer.{}.intermediate.dense",
    "encoder.blocks.{}.feedforward.outer": "encoder.layer.{}.output.dense",
    "encoder.blocks.{}.feedforward_residual.norm": "encoder.layer.{}.output.LayerNorm",
}
DENSE_CLASSIFIER = {
    "pooler.project": "classifier.dense",
    "head.output": "classifier.out_proj",
}


def _tie(foreign: Foreign, output: str) -> Flat:
    """Of a head that predicts tokens, whether its matrix is the table."""
    own = not foreign.settings["tie_word_embeddings"]
    tied = not own and foreign.equal(output, "embeddings.word_embeddings.weight")
    return {"head.tie": "all" if tied else "none"}


def _dropout(foreign: Foreign, name: str = "classifier_dropout") -> Flat:
    return {"head.dropout": foreign.settings[name]}


def _read_bert(foreign: Foreign) -> Flat:
    flat: Flat = {"max_length": foreign.settings["max_position_embeddings"]}
    if foreign.head == "masked":
        flat |= _tie(foreign, "cls.predictions.decoder.weight")
    if foreign.head in ("classify", "tag"):
        flat |= _dropout(foreign)
    return flat


def _write_tie(flat: Flat) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_position_embeddings": flat.pop("max_length")}
    if "head.tie" in flat:
        settings["tie_word_embeddings"] = flat.pop("head.tie") == "all"
    if flat.get("head.kind") in ("classify", "tag"):
        settings["classifier_dropout"] = flat.get("head.dropout")
    return settings


POOLED = {"pooler.activation": "tanh"}
BERT = Family(
    kind="bert",
    prefix="bert.",
    model=BertConfig,
    fields=SIZES,
    defaults={**DEFAULTS, "max_position_embeddings": 512},
    only=ONLY,
    fixed={**POST_NORM_ENCODER, "position.offset": 0},
    heads={
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
    # The files of the paper's own models hold both heads, and name the one.
    fuller={"BertForMaskedLM": "BertForPreTraining"},
    unpooled={"BertModel": UNPOOLED},
    read=_read_bert,
    write=_write_tie,
    tensors={
        **STACK,
        "pooler.project": "pooler.dense",
        "next_sentence": "cls.seq_relationship",
    },
    tops={
        "masked": {
            "head.project": "cls.predictions.transform.dense",
            "head.norm": "cls.predictions.transform.LayerNorm",
            "head.output.bias": "cls.predictions.decoder.bias",
            "head.output.weight": "cls.predictions.decoder.weight",
        },
        "classify": {"head.output": "classifier"},
        "tag": {"head.output": "classifier"},
    },
    same={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    },
    # The second name of the bias is stored by itself where the head is not tied; none reads it.
    unused=[*BUFFERS, POOLER, r"^cls\.predictions\.bias$"],
    renamed=OLD_NORMS,
)


def _read_roberta(foreign: Foreign) -> Flat:
    offset = foreign.settings["pad_token_id"] + 1
    flat: Flat = {
        "position.offset": offset,
        "max_length": foreign.settings["max_position_embeddings"] - offset,
    }
    if foreign.head == "masked":
        flat |= _tie(foreign, "lm_head.decoder.weight")
    if foreign.head in ("classify", "tag"):
        flat |= _dropout(foreign)
    return flat


def _write_roberta(flat: Flat) -> dict[str, Any]:
    offset = flat.get("position.offset", 0)
    if offset == 0:  # left in `flat`, so that it is refused: positions count from the padding on
        return _write_tie(flat)
    flat["max_length"] += flat.pop("position.offset")
    return {**_write_tie(flat), "pad_token_id": offset - 1}


ROBERTA = Family(
    kind="roberta",
    prefix="roberta.",
    model=BertConfig,
    fields=SIZES,
    defaults={**DEFAULTS, "max_position_embeddings": 512, "pad_token_id": 1},
    only=ONLY,
    fixed=POST_NORM_ENCODER,
    heads={
        "RobertaModel": {**BARE, **POOLED},
        "RobertaForMaskedLM": {"head.kind": "masked", "head.activation": "gelu"},
        "RobertaForSequenceClassification": {"head.kind": "classify", **POOLED},
        "RobertaForTokenClassification": TAG,
    },
    unpooled={"RobertaModel": UNPOOLED},
    read=_read_roberta,
    write=_write_roberta,
    tensors={**STACK, "pooler.project": "pooler.dense"},
    tops={
        "masked": {
            "head.project": "lm_head.dense",
            "head.norm": "lm_head.layer_norm",
            "head.output.bias": "lm_head.decoder.bias",
            "head.output.weight": "lm_head.decoder.weight",
        },
        "classify": DENSE_CLASSIFIER,
        "tag": {"head.output": "classifier"},
    },
    same={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.bias": "lm_head.decoder.bias",
    },
    unused=[*BUFFERS, POOLER, r"^lm_head\.bias$"],
    renamed=OLD_NORMS,
)


def _read_electra(foreign: Foreign) -> Flat:
    flat: Flat = {"max_length": foreign.settings["max_position_embeddings"]}
    if foreign.head == "masked":
        flat |= _tie(foreign, "generator_lm_head.weight")
    if foreign.head in ("classify", "tag"):
        flat |= _dropout(foreign)
    return flat


ELECTRA = Family(
    kind="electra",
    prefix="electra.",
    model=BertConfig,
    fields={**SIZES, "embedding_size": "embed.dim"},
    defaults={**DEFAULTS, "max_position_embeddings": 512, "embedding_size": 128},
    only=ONLY,
    fixed={**POST_NORM_ENCODER, "position.offset": 0},
    heads={
        "ElectraModel": BARE,
        "ElectraForMaskedLM": {"head.kind": "masked", "head.activation": "gelu"},
        "ElectraForPreTraining": {"head.kind": "detect", "head.activation": SAME_ACTIVATION},
        "ElectraForSequenceClassification": {
            "head.kind": "classify",
            "pooler.activation": "gelu",
        },
        "ElectraForTokenClassification": TAG,
    },
    read=_read_electra,
    write=_write_tie,
    tensors={**STACK, "embedding.project": "embeddings_project"},
    tops={
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
        "tag": {"head.output": "classifier"},
    },
    same={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    unused=BUFFERS,
    renamed=OLD_NORMS,
)


def _read_distilbert(foreign: Foreign) -> Flat:
    flat: Flat = {}
    if foreign.head == "masked":
        flat |= _tie(foreign, "vocab_projector.weight")
    if foreign.head == "classify":
        flat |= _dropout(foreign, "seq_classif_dropout")
    return flat


def _write_distilbert(flat: Flat) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "head.tie" in flat:
        settings["tie_word_embeddings"] = flat.pop("head.tie") == "all"
    if flat.get("head.kind") == "classify" and flat.get("head.dropout") is not None:
        settings["seq_classif_dropout"] = flat["head.dropout"]
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
        "hidden_dim": "hidden",
        "activation": "feedforward.activation",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "max_position_embeddings": "max_length",
    },
    defaults={
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "max_position_embeddings": 512,
        "seq_classif_dropout": 0.2,
        "tie_word_embeddings": True,
    },
    only={"sinusoidal_pos_embds": (False,), "pruned_heads": ({},)},
    fixed={
        **POST_NORM_ENCODER,
        "position.offset": 0,
        "norm.eps": 1e-12,
        "embed.norm.eps": 1e-12,
    },
    heads={
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
        "encoder.blocks.{}.attention.project": (
            "transformer.layer.{}.attention.q_lin",
            "transformer.layer.{}.attention.k_lin",
            "transformer.layer.{}.attention.v_lin",
        ),
        "encoder.blocks.{}.attention.output": "transformer.layer.{}.attention.out_lin",
        "encoder.blocks.{}.attention_residual.norm": "transformer.layer.{}.sa_layer_norm",
        "encoder.blocks.{}.feedforward.inner": "transformer.layer.{}.ffn.lin1",
        "encoder.blocks.{}.feedforward.outer": "transformer.layer.{}.ffn.lin2",
        "encoder.blocks.{}.feedforward_residual.norm": "transformer.layer.{}.output_layer_norm",
        "pooler.project": "pre_classifier",
    },
    tops={
        "masked": {
            "head.project": "vocab_transform",
            "head.norm": "vocab_layer_norm",
            "head.output": "vocab_projector",
        },
        "classify": {"head.output": "classifier"},
        "tag": {"head.output": "classifier"},
    },
    same={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    unused=BUFFERS,
)
