"""GPT-2 and Llama: pre-norm decoders, the older with learned positions, the newer with rotary."""

from typing import Any

from manyheads.errors import DataError, UserError
from manyheads.exchange.foreign import Family, Flat, Foreign
from manyheads.models.gpt import GptConfig

PRE_NORM_DECODER: Flat = {
    "norm.placement": "pre",
    "embed.scale": "one",
    "output.scale": "one",
    "output.bias": "none",
}


def _tie(foreign: Foreign, table: str) -> Flat:
    own = not foreign.settings["tie_word_embeddings"]
    tied = not own and foreign.equal("lm_head.weight", table)
    return {"tie": "all" if tied else "none"}


def _read_gpt2(foreign: Foreign) -> Flat:
    scaled = foreign.settings["scale_attn_weights"]
    return {"score.kind": "scaled-dot" if scaled else "dot", **_tie(foreign, "wte.weight")}


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
        "n_inner": "hidden",
        "activation_function": "feedforward.activation",
        "resid_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm.eps",
    },
    defaults={
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
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
    heads={"GPT2LMHeadModel": {}},
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
    # Newer files keep all of rotary in one table, older ones in two places.
    settings = foreign.settings
    rotary = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rotary, dict):
        raise DataError(f"config.json has rope_parameters={rotary!r}, which should be a table")
    form = rotary.get("rope_type", rotary.get("type", "default"))
    if form != "default":
        raise UserError(f"a llama model with rope_type={form} is not supported: only default")
    base = rotary.get("rope_theta", settings["rope_theta"])
    return {"position.base": base, **_tie(foreign, "embed_tokens.weight")}


def _write_llama(flat: Flat) -> dict[str, Any]:
    base = flat.pop("position.base", 10_000.0)
    return {
        "tie_word_embeddings": flat.pop("tie") == "all",
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


LLAMA = Family(
    kind="llama",
    prefix="model.",
    model=GptConfig,
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "hidden",
        "hidden_act": "feedforward.activation",
        "max_position_embeddings": "max_length",
        "rms_norm_eps": "norm.eps",
        "attention_bias": "attention_bias",
        "mlp_bias": "bias",
        "attention_dropout": "attention_dropout",
    },
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
    },
    fixed={
        **PRE_NORM_DECODER,
        "norm.form": "rms",
        "position.kind": "rotary",
        "position.layout": "halves",
        "score.kind": "scaled-dot",
        "feedforward.kind": "gated",
        "dropout": 0.0,
    },
    heads={"LlamaForCausalLM": {}},
    read=_read_llama,
    write=_write_llama,
    tensors={
        "tokens": "embed_tokens",
        "decoder.blocks.{}.attention.project": (
            "layers.{}.self_attn.q_proj",
            "layers.{}.self_attn.k_proj",
            "layers.{}.self_attn.v_proj",
        ),
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
