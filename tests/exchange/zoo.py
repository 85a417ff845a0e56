"""Random models of `transformers`, large and small in everything, with weights that matter.

`transformers` computes some things in float32 even in a float64 model: the root mean square of
T5 and Llama, rotary angles, Marian's stored sinusoids. `exact` lifts these to the precision of
the model, so that the rest can be compared to the last digits.
"""

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
ROTARY = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "starcoder2": "Starcoder2",
}
transformers.logging.set_verbosity_error()

ACTS = ["gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "tanh"]
ENCODERS = {
    "bert": [
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForTokenClassification",
    ],
    "roberta": [
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
    ],
    "electra": [
        "ElectraModel",
        "ElectraForMaskedLM",
        "ElectraForPreTraining",
        "ElectraForSequenceClassification",
        "ElectraForTokenClassification",
    ],
    "distilbert": [
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "DistilBertForSequenceClassification",
        "DistilBertForTokenClassification",
    ],
}
CLASSES = {
    **ENCODERS,
    "gpt2": ["GPT2LMHeadModel"],
    **{family: [f"{name}ForCausalLM"] for family, name in ROTARY.items()},
    "t5": ["T5ForConditionalGeneration"],
    "bart": ["BartForConditionalGeneration"],
    "marian": ["MarianMTModel"],
    "pegasus": ["PegasusForConditionalGeneration"],
    "vit": ["ViTModel", "ViTForImageClassification"],
}
# Classes that may be built without their pooler.
UNPOOLED = {"BertModel": "bert", "RobertaModel": "roberta", "ViTModel": "vit"}
PAIRS = ("t5", "bart", "marian", "pegasus")
LONGEST = 24
SEEDS = range(24)  # the models that are compared of each family


def draw(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family whose sizes and choices depend on the seed."""
    rng = random.Random(f"{family} {seed}")
    name = CLASSES[family][seed % len(CLASSES[family])]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**_settings(family, rng))).to(dtype).eval()
    if (
        family == "t5" and rng.random() < 0.5
    ):  # as a file with a head of its extra_settings would be read
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    strengthen(model)
    if hasattr(model, "final_logits_bias") and rng.random() < 0.5:
        model.final_logits_bias.normal_()
    return model


def without_pooler(name: str) -> Any:
    """A bare model of this class as `add_pooling_layer=False` makes it."""
    family = UNPOOLED[name]
    config = draw(family, CLASSES[family].index(name)).config
    model = getattr(transformers, name)(config, add_pooling_layer=False).eval()
    strengthen(model)
    return model


def _settings(family: str, rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3, 4])
    dim = heads * rng.choice([4, 6, 8])
    layers, hidden = rng.choice([1, 2, 3]), rng.choice([7, 16, 33])
    vocab = rng.randint(20, 50)
    labels = rng.randint(1, 5)
    tops = {
        "id2label": {number: f"label {rng.random():.3f}" for number in range(labels)},
        "tie_word_embeddings": rng.random() < 0.6,
    }
    eps = rng.choice([1e-12, 1e-6, 1e-5, 1e-3])
    if family in ("bert", "roberta", "electra"):
        extra_settings = {"embedding_size": rng.choice([dim, 5, 12])} if family == "electra" else {}
        return {
            "vocab_size": vocab,
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": hidden,
            "hidden_act": rng.choice(ACTS),
            "max_position_embeddings": LONGEST + 8,
            "type_vocab_size": rng.choice([1, 2, 3]),
            "layer_norm_eps": eps,
            "pad_token_id": rng.choice([0, 1, 3]),
            "classifier_dropout": rng.choice([None, 0.3]),
            **tops,
            **extra_settings,
        }
    if family == "distilbert":
        return {
            "vocab_size": vocab,
            "dim": dim,
            "n_layers": layers,
            "n_heads": heads,
            "hidden_dim": hidden,
            "activation": rng.choice(ACTS),
            "max_position_embeddings": LONGEST + 8,
            **tops,
        }
    if family == "vit":
        size = rng.choice([2, 3, 4])
        pooled = {"pooler_act": "tanh", "pooler_output_size": rng.choice([None, 5])}
        return {
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": hidden,
            "hidden_act": rng.choice(ACTS),
            "layer_norm_eps": eps,
            "patch_size": size,
            "image_size": size * rng.choice([1, 2, 3]) + rng.choice([0, 1]),
            "num_channels": rng.choice([1, 3]),
            "qkv_bias": rng.random() < 0.5,
            "id2label": tops["id2label"],
            **pooled,
        }
    if family == "gpt2":
        return {
            "vocab_size": vocab,
            "n_embd": dim,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": rng.choice([None, hidden]),
            "n_positions": LONGEST,
            "activation_function": rng.choice(ACTS),
            "layer_norm_epsilon": eps,
            "scale_attn_weights": rng.random() < 0.7,
            "tie_word_embeddings": tops["tie_word_embeddings"],
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    if family in ROTARY:
        groups = rng.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
        head_dim = rng.choice([2, 4, 6])
        settings: dict[str, Any] = {
            "vocab_size": vocab,
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "intermediate_size": hidden,
            "hidden_act": rng.choice(ACTS),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rng.choice([10_000.0, 500.0]),
            },
            "norm_epsilon" if family == "starcoder2" else "rms_norm_eps": eps,
            "tie_word_embeddings": tops["tie_word_embeddings"],
        }
        biases = [rng.random() < 0.5, rng.random() < 0.5]
        if family in ("llama", "mistral", "qwen3"):
            settings["head_dim"] = head_dim
        if family in ("llama", "qwen3"):
            settings["attention_bias"] = biases[0]
        if family == "llama":
            settings["mlp_bias"] = biases[1]
        if family == "starcoder2":
            settings |= {"use_bias": biases[0], "sliding_window": rng.choice([None, 2, 9])}
        if family == "mistral":  # without a window it is a Llama
            settings["sliding_window"] = rng.choice([2, 3, 9])
        return settings
    if family == "t5":
        return {
            "vocab_size": vocab,
            "d_model": dim,
            "d_kv": rng.choice([2, 4, 6]),
            "d_ff": hidden,
            "num_layers": layers,
            "num_decoder_layers": rng.choice([None, 1, 2]),
            "num_heads": heads,
            "relative_attention_num_buckets": rng.choice([4, 8, 32]),
            "relative_attention_max_distance": rng.choice([20, 128]),
            "layer_norm_epsilon": eps,
            "feed_forward_proj": rng.choice(["relu", "gated-gelu", "gated-silu", "gelu", "silu"]),
            "tie_word_embeddings": rng.random() < 0.5,
        }
    other_heads = rng.choice([n for n in (1, 2, 3, 4) if dim % n == 0])
    extra_settings = {}
    if family == "marian":
        extra_settings["share_encoder_decoder_embeddings"] = rng.random() < 0.5
        extra_settings["decoder_vocab_size"] = vocab + rng.choice([0, 3])
        if extra_settings["share_encoder_decoder_embeddings"]:
            extra_settings["decoder_vocab_size"] = vocab
    return {
        "vocab_size": vocab,
        "d_model": dim,
        "encoder_layers": layers,
        "decoder_layers": rng.choice([1, 2, 3]),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": other_heads,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": rng.choice([5, 16]),
        "activation_function": rng.choice(ACTS),
        "max_position_embeddings": LONGEST,
        "scale_embedding": rng.random() < 0.5,
        "tie_word_embeddings": tops["tie_word_embeddings"],
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        **extra_settings,
    }


def tokens_of(rng: random.Random, vocabulary: int, rows: int, length: int) -> Tensor:
    """Any tokens but the first four, which padding may be among."""
    drawn = [[rng.randrange(4, vocabulary) for _ in range(length)] for _ in range(rows)]
    return torch.tensor(drawn)


def padding(rng: random.Random, rows: int, length: int, *, left: bool) -> Tensor:
    """Which positions are real: at least one in each row, padding on one side."""
    real = torch.ones(rows, length, dtype=torch.bool)
    for row in range(rows):
        empty = rng.randrange(length)
        real[row, : empty if left else 0] = False
        real[row, length - (0 if left else empty) :] = False
    return real


def both(family: str, theirs: Any, ours: nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of both for the same input, and which of it are real positions."""
    rng = random.Random(f"input {family} {seed}")
    rows, dtype = rng.choice([1, 2, 3]), next(ours.parameters()).dtype
    if family == "vit":
        config = theirs.config
        images = torch.randn(rows, config.num_channels, config.image_size, config.image_size)
        out = theirs(images.to(dtype))
        return out[0], ours(images.to(dtype)), torch.ones(rows, dtype=torch.bool)
    length = rng.randint(1, LONGEST)
    words = tokens_of(rng, theirs.config.vocab_size, rows, length)
    # Encoders are read from their first position, and RoBERTa counts from the first real one.
    real = padding(rng, rows, length, left=family not in ENCODERS and rng.random() < 0.3)
    words = words.masked_fill(~real, theirs.config.pad_token_id or 0)
    if family in PAIRS:
        vocabulary = getattr(theirs.config, "decoder_vocab_size", None) or theirs.config.vocab_size
        target = tokens_of(rng, vocabulary, rows, rng.randint(1, LONGEST))
        target_real = padding(rng, *target.shape, left=False)
        out = theirs(
            input_ids=words,
            attention_mask=real.long(),
            decoder_input_ids=target,
            decoder_attention_mask=target_real.long(),
        )
        return out.logits, ours(words, target, real, target_real), target_real
    if family in ENCODERS:
        segments = torch.zeros_like(words)
        extra = {}
        if family != "distilbert" and theirs.config.type_vocab_size > 1:
            segments = torch.randint(theirs.config.type_vocab_size, words.shape)
        if family != "distilbert":
            extra = {"token_type_ids": segments}
        out = theirs(input_ids=words, attention_mask=real.long(), **extra)
        said = ours(words, real, segments)
        each = said.shape[:2] == words.shape and said.ndim + (out[0].ndim == 2) > 2
        return out[0], said, real if each else torch.ones(rows, dtype=torch.bool)
    return theirs(input_ids=words, attention_mask=real.long()).logits, ours(words, real), real


@torch.no_grad()
def strengthen(model: nn.Module) -> None:
    """Weights that let every part show: fresh ones of `transformers` are almost nothing."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.3)
        else:
            parameter.normal_(0.0, 1.0 / math.sqrt(parameter[0].numel()))


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """In float64, nothing of `transformers` in float32."""
    for module in model.modules():
        if hasattr(module, "create_weight"):
            module.weight.data = _waves(*module.weight.shape).to(module.weight.dtype)
    with ExitStack() as patches:
        norms = [modeling_t5.T5LayerNorm]
        for family, name in ROTARY.items():
            code = import_module(f"transformers.models.{family}.modeling_{family}")
            norms += [getattr(code, f"{name}RMSNorm", modeling_t5.T5LayerNorm)]
            rotary = getattr(code, f"{name}RotaryEmbedding")
            patches.enter_context(patch.object(rotary, "forward", _angles))
        for norm in norms:
            patches.enter_context(patch.object(norm, "forward", _root_mean_square))
        yield


def _root_mean_square(module: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden_states * torch.rsqrt(variance + module.variance_epsilon)


def _angles(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    config = module.config
    base = config.rope_parameters["rope_theta"]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = torch.arange(0, dim, 2, dtype=x.dtype)
    angles = position_ids[..., None].to(x.dtype) * base ** (-pairs / dim)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def _waves(positions: int, dim: int) -> Tensor:
    pairs = torch.arange(0, dim, 2, dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * 10_000.0 ** (-pairs / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :dim]
