"""Hugging Face folders: read exactly, or refused in one line, whatever they contain."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exchange.zoo import CLASSES, UNPOOLED, both, draw, without_pooler
from torch import Tensor, nn

from manyheads.errors import DataError, UserError
from manyheads.exchange.huggingface import FAMILIES, KINDS, from_huggingface, import_model

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
every = pytest.mark.parametrize("family", CLASSES)
DROPPED = object()


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def change(folder: Path, **settings: Any) -> Path:
    """Change settings in config.json, or remove them."""
    file = folder / "config.json"
    table = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in table.items() if v is not DROPPED}))
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, Tensor]) -> Path:
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_class(name: str) -> tuple[Any, str]:
    """A model of this class, with several labels, and its family."""
    family = next(family for family in CLASSES if name in CLASSES[family])
    first, step = CLASSES[family].index(name), len(CLASSES[family])
    drawn = (draw(family, seed) for seed in range(first, 20 * step, step))
    return next(model for model in drawn if model.config.num_labels > 2), family


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same settings and the same bits."""
    assert one.config == other.config
    tensors = other.state_dict()
    assert one.state_dict().keys() == tensors.keys()
    for name, tensor in one.state_dict().items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name


def refusal(folder: Path, kind: type[UserError]) -> str:
    """The error, in one line, with which a folder is refused."""
    with pytest.raises(UserError) as caught:
        from_huggingface(folder)
    line = str(caught.value)
    assert type(caught.value) is kind, line
    assert len(line.splitlines()) == 1
    assert str(folder) in line
    return line


@every
def test_a_folder_equals_its_model(family: str, tmp_path: Path) -> None:
    for seed in range(len(CLASSES[family]) + 2):
        theirs = draw(family, seed)
        imported = import_model(saved(theirs, tmp_path / str(seed)))
        assert_same(imported.model, from_huggingface(theirs))
        assert imported.special == import_model(theirs).special


WITHOUT = """
import sys
sys.modules["transformers"] = None
from manyheads.exchange.huggingface import from_huggingface
for folder in sys.argv[1:]:
    model = from_huggingface(folder)
    print(type(model).__name__, sum(p.double().abs().sum().item() for p in model.parameters()))
try:
    import transformers
except ImportError:
    print("none")
"""


def test_import_does_not_need_transformers(tmp_path: Path) -> None:
    expected, folders = [], []
    for family in ("bert", "gpt2", "t5"):
        theirs = draw(family, 0)
        folders.append(saved(theirs, tmp_path / family))
        ours = from_huggingface(theirs)
        size = sum(p.double().abs().sum().item() for p in ours.parameters())
        expected.append(f"{type(ours).__name__} {size}")
    command = [sys.executable, "-c", WITHOUT, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [*expected, "none"], done.stderr


def test_weights_in_several_files(tmp_path: Path) -> None:
    theirs = draw("bart", 0)
    folder = saved(theirs, tmp_path, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same(from_huggingface(folder), from_huggingface(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_without_loss(dtype: torch.dtype, tmp_path: Path) -> None:
    for family in ("bert", "t5", "vit", "marian", "pegasus"):
        theirs = draw(family, 1).to(dtype)
        assert {x.dtype for x in from_huggingface(theirs).state_dict().values()} == {dtype}
        ours = from_huggingface(saved(theirs, tmp_path / family))
        assert_same(ours, from_huggingface(theirs.float()))


@pytest.mark.parametrize("family", ["marian", "pegasus"])
def test_stored_sinusoids_are_ignored(family: str, tmp_path: Path) -> None:
    theirs = draw(family, 1)
    folder = saved(theirs, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert "model.encoder.embed_positions.weight" in tensors
    assert_same(from_huggingface(store(folder, tensors)), from_huggingface(theirs))


@every
def test_names_with_and_without_the_prefix_of_the_bare_model(family: str, tmp_path: Path) -> None:
    table = KINDS[family]
    heads = {name.split(".")[0] for names in table.variants.values() for name in names.values()}
    heads |= {"lm_head", "final_logits_bias"}
    for seed in range(len(CLASSES[family])):
        theirs = draw(family, seed)
        folder = saved(theirs, tmp_path / str(seed))
        bare = {name.removeprefix(table.prefix): x for name, x in weights(folder).items()}
        full = {n if n.split(".")[0] in heads else table.prefix + n: x for n, x in bare.items()}
        for tensors in (bare, full):
            assert_same(from_huggingface(store(folder, tensors)), from_huggingface(theirs))


def renamed(pattern: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {re.sub(pattern, new, name): x for name, x in tensors.items()}


def old_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the best-known folder has it: bare names, and the mask of each layer."""
    old = renamed(r"^transformer\.", "")(tensors)
    layers = [name for name in old if name.endswith("attn.c_attn.weight")]
    for name in layers:
        old[name.replace("c_attn.weight", "bias")] = torch.ones(1, 1, 8, 8).tril().byte()
        old[name.replace("c_attn.weight", "masked_bias")] = torch.tensor(-1e4)
    return old


def first_bert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the paper's own folders have it: old norms, one bias and no matrix of the tied head."""
    tied = "cls.predictions.decoder.weight" not in tensors
    assert tied
    old = renamed(r"LayerNorm\.bias$", "LayerNorm.beta")(tensors)
    old = renamed(r"LayerNorm\.weight$", "LayerNorm.gamma")(old)
    bias = old.pop("cls.predictions.decoder.bias", old.get("cls.predictions.bias"))
    assert bias is not None
    return {**old, "cls.predictions.bias": bias}


STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
OLDER: dict[str, tuple[str, int, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "gpt2": ("gpt2", 1, old_gpt2),
    "bert": ("bert", 14, first_bert),
    "position ids": (
        "bert",
        0,
        lambda tensors: {**tensors, "embeddings.position_ids": torch.arange(32)[None]},
    ),
    "stray table": ("t5", 0, lambda tensors: {**tensors, STRAY: torch.randn(32, 2)}),
    "frequencies": (
        "llama",
        0,
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    ),
}


@pytest.mark.parametrize("case", OLDER)
def test_older_spellings(case: str, tmp_path: Path) -> None:
    family, seed, older = OLDER[case]
    theirs = draw(family, seed)
    folder = saved(theirs, tmp_path)
    assert older(weights(folder)).keys() != weights(folder).keys()
    store(folder, older(weights(folder)))
    assert_same(from_huggingface(folder), from_huggingface(theirs))


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart", "marian", "pegasus", "llama"])
def test_tied_tensors_may_be_stored_under_each_of_their_names(family: str, tmp_path: Path) -> None:
    theirs = draw(family, 1)
    folder = store(saved(theirs, tmp_path), theirs.state_dict())
    assert_same(from_huggingface(folder), from_huggingface(theirs))


def test_llama_settings_of_the_older_form(tmp_path: Path) -> None:
    theirs = draw("llama", 2)
    folder = saved(theirs, tmp_path)
    base = theirs.config.rope_parameters["rope_theta"]
    change(folder, rope_parameters=DROPPED, rope_theta=base, rope_scaling=None)
    assert_same(from_huggingface(folder), from_huggingface(theirs))
    change(folder, rope_theta=DROPPED)
    assert from_huggingface(folder).config.position.base == 10_000.0


# Settings of older files, of which the newest `transformers` knows nothing.
FORGOTTEN = {
    "n_positions": "t5",
    "position_embedding_type": "",
    "pruned_heads": "",
    "rope_theta": "",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
def test_defaults_are_those_of_transformers(family: Any) -> None:
    theirs = getattr(transformers, next(iter(family.architectures))).config_class
    fields = theirs.__dataclass_fields__
    usual = {name: values[0] for name, values in family.only.items()} | family.known
    for name, value in usual.items():
        if name not in fields and FORGOTTEN.get(name) in ("", family.kind):
            continue
        default = fields[name].default if name in fields else getattr(theirs(), name)
        assert value == default, name
        assert type(value) is type(default), name


@every
def test_an_unnamed_class_is_found_by_its_tensors(family: str, tmp_path: Path) -> None:
    for seed in range(len(CLASSES[family])):
        theirs = draw(family, seed)
        folder = change(saved(theirs, tmp_path / str(seed)), architectures=DROPPED)
        imported = import_model(folder)
        assert_same(imported.model, from_huggingface(theirs))
        assert imported.settings["architectures"] == [type(theirs).__name__]


def test_a_file_may_hold_more_than_its_class(tmp_path: Path) -> None:
    """The files of the paper's own models do."""
    theirs = draw("bert", 2)
    assert type(theirs).__name__ == "BertForPreTraining"
    folder = change(saved(theirs, tmp_path / "bert"), architectures=["BertForMaskedLM"])
    assert_same(from_huggingface(folder), from_huggingface(theirs))
    bare = transformers.BartModel(draw("bart", 0).config)
    bare.config.tie_word_embeddings = True
    folder = saved(bare, tmp_path / "bart")
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    actual, expected, real = both("bart", opened, from_huggingface(folder), 0)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["BertForMaskedLM", "RobertaForSequenceClassification", "ViTForImageClassification"],
)
def test_an_unused_pooler_is_ignored(name: str, tmp_path: Path) -> None:
    """Well-known files hold one, from when all of a model was saved."""
    theirs, family = of_class(name)
    folder = saved(theirs, tmp_path)
    dim = theirs.config.hidden_size
    prefix = f"{KINDS[family].prefix}pooler.dense"
    pooler = {f"{prefix}.weight": torch.randn(dim, dim), f"{prefix}.bias": torch.randn(dim)}
    store(folder, {**weights(folder), **pooler})
    assert_same(from_huggingface(folder), from_huggingface(theirs))
    pooler[f"{prefix}.gate"] = torch.ones(1)
    assert "pooler.dense.gate" in refusal(store(folder, {**weights(folder), **pooler}), DataError)


@pytest.mark.parametrize("name", UNPOOLED)
def test_a_bare_model_may_be_without_a_pooler(name: str, tmp_path: Path) -> None:
    theirs = without_pooler(name)
    folder = saved(theirs, tmp_path)
    assert not any("pooler" in key for key in weights(folder))
    ours = from_huggingface(folder)
    assert ours.config.pooler is None
    assert_same(ours, from_huggingface(theirs))
    assert_same(ours, from_huggingface(change(folder, architectures=DROPPED)))
    expected, actual, real = both(UNPOOLED[name], theirs, ours, 0)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


# The family, the changed settings of config.json, the error, words of it.
HUGE = 10**9
SETTINGS: list[tuple[str, dict[str, Any], type[UserError], str]] = [
    ("bert", {"position_embedding_type": "relative_key"}, UserError, "position_embedding_type"),
    ("roberta", {"is_decoder": True}, UserError, "is_decoder"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, UserError, "scale_attn_by_inverse_layer"),
    ("bert", {"hidden_act": "quick_gelu"}, UserError, "quick_gelu"),
    ("bart", {"encoder_layerdrop": 0.1}, UserError, "encoder_layerdrop"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, UserError, "linear"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, UserError, "llama3"),
    ("qwen3", {"use_sliding_window": True}, UserError, "use_sliding_window"),
    ("t5", {"feed_forward_proj": "gated-quick_gelu"}, UserError, "gated-quick_gelu"),
    ("bert", {"pruned_heads": {"0": [1]}}, UserError, "pruned_heads"),
    ("bert", {"quantization_config": {"bits": 8}}, UserError, "quantization_config"),
    ("bert", {"auto_map": {"AutoModel": "model.Mine"}}, UserError, "auto_map"),
    ("bert", {"model_type": "bret"}, UserError, "did you mean 'bert'"),
    ("bert", {"architectures": ["BertForQuestionAnswering"]}, UserError, "BertForQuestionAnswer"),
    ("bert", {"hidden_size": DROPPED}, DataError, "hidden_size"),
    ("bert", {"hidden_size": -1}, DataError, "-1"),
    ("bert", {"num_hidden_layers": HUGE}, DataError, "layers"),
    ("t5", {"num_decoder_layers": HUGE}, DataError, "layers"),
    ("gpt2", {"vocab_size": HUGE}, DataError, "1000000000"),
    ("bert", {"num_attention_heads": 7}, DataError, "does not divide"),
    ("roberta", {"pad_token_id": 99}, DataError, "max_length"),
]


@pytest.mark.parametrize(
    ("family", "settings", "kind", "words"),
    SETTINGS,
    ids=[f"{family}-{next(iter(s))}-{n}" for n, (family, s, *_) in enumerate(SETTINGS)],
)
def test_refused_settings(
    family: str, settings: dict[str, Any], kind: type[UserError], words: str, tmp_path: Path
) -> None:
    line = refusal(change(saved(draw(family, 0), tmp_path), **settings), kind)
    assert words in line


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ViTForImageClassification"])
def test_multi_label_classification_is_refused(name: str, tmp_path: Path) -> None:
    theirs, _ = of_class(name)
    folder = saved(theirs, tmp_path)
    for problem in ("multi_label_classification", "regression", "else"):
        assert f"problem_type={problem}" in refusal(change(folder, problem_type=problem), UserError)
    for known in (None, "single_label_classification"):
        assert_same(from_huggingface(change(folder, problem_type=known)), from_huggingface(theirs))


def test_labels_and_num_labels(tmp_path: Path) -> None:
    """Where names and count differ the count is right, as `transformers` has it."""
    theirs = draw("bert", 4)
    labels = tuple(theirs.config.id2label.values())
    folder = saved(theirs, tmp_path)
    assert from_huggingface(folder).config.head.labels == labels
    assert from_huggingface(change(folder, num_labels=len(labels))).config.head.labels == labels
    for id2label in (DROPPED, {"0": "only"}):
        change(folder, id2label=id2label)
        numbered = tuple(f"LABEL_{number}" for number in range(len(labels)))
        assert from_huggingface(folder).config.head.labels == numbered


def put(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def rewrite(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        tensors = weights(folder)
        edit(tensors)
        store(folder, tensors)

    return write


def pickle_alone(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def spread(places: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return write


def outside(folder: Path) -> None:
    """All is well with the file but its place."""
    spread({"x": "../one.safetensors"})(folder)
    (folder / "one.safetensors").rename(folder.parent / "one.safetensors")


WORDS = "embeddings.word_embeddings.weight"
QUERY = "encoder.layer.0.attention.self.query.weight"
FILES: dict[str, tuple[Callable[[Path], object], type[UserError], str]] = {
    "pickle": (pickle_alone, UserError, "pytorch_model.bin"),
    "code": (put("modeling_mine.py", "print('run')"), UserError, "modeling_mine.py"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        DataError,
        "safetensors",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), DataError, "config.json"),
    "no JSON": (put("config.json", "{"), DataError, "JSON"),
    "a list": (put("config.json", "[]"), DataError, "table"),
    "generation": (put("generation_config.json", "[]"), DataError, "generation_config.json"),
    "tokenizer": (put("tokenizer.json", "{}"), DataError, "tokenizer.json"),
    "cut off": (cut_off, DataError, "model.safetensors"),
    "missing": (rewrite(lambda t: t.pop(QUERY)), DataError, QUERY),
    "extra": (rewrite(lambda t: t.update(more=torch.ones(2))), DataError, "more"),
    "shape": (rewrite(lambda t: t.update({WORDS: t[WORDS][1:]})), DataError, WORDS),
    "whole numbers": (rewrite(lambda t: t.update({QUERY: t[QUERY].byte()})), DataError, "uint8"),
    "twice": (rewrite(lambda t: t.update({"bert." + QUERY: t[QUERY] + 1})), DataError, QUERY),
    "outside": (outside, DataError, "../one.safetensors"),
    "shard gone": (spread({"x": "two.safetensors"}), DataError, "two.safetensors"),
}


@pytest.mark.parametrize("case", FILES)
def test_refused_files(case: str, tmp_path: Path) -> None:
    spoil, kind, words = FILES[case]
    folder = saved(draw("bert", 0), tmp_path / "model")
    from_huggingface(folder)
    spoil(folder)
    assert words in refusal(folder, kind)


ODD: list[Any] = [None, -1, 0, 1, "x", True, False, [], {}, [1, 2], 3.5, 1e9, 10**12, "5", ""]
KNOWN = [
    "architectures",
    "model_type",
    "id2label",
    "rope_parameters",
    "rope_scaling",
    "problem_type",
]


def odd_settings(rng: random.Random, family: str, folder: Path) -> str:
    """One setting that is missing or another."""
    table = json.loads((folder / "config.json").read_text())
    tables = KINDS[family]
    name = rng.choice([*tables.fields, *tables.known, *tables.only, *KNOWN])
    near = [table[name] + 1, table[name] * 2] if type(table.get(name)) is int else []
    value = rng.choice([*ODD, *near, *near, DROPPED, DROPPED])
    change(folder, **{name: value})
    return f"{name}={value}"


def odd_weights(rng: random.Random, family: str, folder: Path) -> str:
    """One tensor that is missing, another or too much."""
    tensors = weights(folder)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    second = rng.choice([*KINDS[family].aliases, "head.weight", f"{KINDS[family].prefix}{name}"])
    changed: list[dict[str, Tensor]] = [
        {},
        {name: tensor[1:]},
        {name: tensor[None]},
        {name: tensor.T if tensor.ndim == 2 else tensor},
        {name: tensor.double()},
        {name: tensor, second: tensor},
        {name: tensor, second: tensor + 1},
        {second: tensor},
        {name.removeprefix(KINDS[family].prefix): tensor},
    ]
    number = rng.randrange(len(changed))
    store(folder, tensors | changed[number])
    return f"{name} {second} {number}"


@pytest.mark.parametrize("spoil", [odd_settings, odd_weights])
def test_a_changed_folder_is_read_as_by_transformers_or_refused(
    spoil: Callable[[random.Random, str, Path], str], tmp_path: Path
) -> None:
    rng = random.Random(f"folders {spoil.__name__}")
    read, refused, lines = 0, 0, []
    for number in range(80):
        family = rng.choice(list(CLASSES))
        theirs = draw(family, number)
        folder = saved(theirs, tmp_path / str(number))
        what = spoil(rng, family, folder)
        try:
            ours = from_huggingface(folder)
        except UserError as error:
            lines += str(error).splitlines()
            refused += 1
            continue
        try:
            opened, report = type(theirs).from_pretrained(
                folder, output_loading_info=True, dtype=next(ours.parameters()).dtype
            )
        except Exception:  # they refuse more than we do, each in its own way
            continue
        read += 1
        missing = map(KINDS[family].canonical, report["missing_keys"])
        assert all(KINDS[family].ignores(name) for name in missing), (family, what)
        with torch.no_grad():
            expected, actual, real = both(family, opened.eval(), ours, number)
        torch.testing.assert_close(
            actual[real], expected[real], rtol=1e-4, atol=1e-4, msg=f"{family} {number} {what}"
        )
    assert read > 10
    assert len(lines) == refused > 10
