"""LoRA adapters: PEFT opens ours, and we open those of PEFT."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.exchange.folders import saved
from tests.exchange.zoo import both, draw
from tests.tasks.small_texts import write_texts
from tests.test_cli import mistake, result
from torch import nn

from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.exchange.folder import write_peft
from manyheads.exchange.huggingface import from_huggingface
from manyheads.loading import load_run
from manyheads.nn.lora import Finetune, Lora, restrict

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"],
    "gpt2": ["c_attn", "c_fc", "mlp.c_proj"],
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen2": ["k_proj", "up_proj"],
    "t5": ["q", "v", "o", "wi"],
    "marian": ["q_proj", "v_proj", "fc1", "out_proj"],
}
SEEDS = {"bert": 4, "t5": 2}  # a classifier; a feed-forward part without a gate
TASKS = {"bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM", "marian": "SEQ_2_SEQ_LM"}


def assert_equal_logits(family: str, theirs: Any, ours: nn.Module, seed: int = 0) -> None:
    with torch.no_grad():
        expected, actual, real = both(family, theirs, ours, seed)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def shake(model: nn.Module, words: tuple[str, ...]) -> None:
    """Trained updates: those of a new adapter are zero."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.normal_(0, 0.2)


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_of_peft_is_imported(family: str, tmp_path: Path) -> None:
    base = draw(family, SEEDS.get(family, 1))
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=TARGETS[family],
        fan_in_fan_out=family == "gpt2",
        modules_to_save=["classifier", "pooler"] if family == "bert" else None,
        task_type=TASKS.get(family, "CAUSAL_LM"),
    )
    theirs = peft.get_peft_model(base, config).eval()
    shake(theirs, ("lora_", "modules_to_save"))
    theirs.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    settings = json.loads(path.read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base")
    path.write_text(json.dumps(settings))
    assert_equal_logits(family, theirs, from_huggingface(tmp_path / "adapter"))
    plain = from_huggingface(tmp_path / "base")
    with pytest.raises(AssertionError):
        assert_equal_logits(family, theirs, plain)
    for name, value in (("use_dora", True), ("base_model_name_or_path", "no/such/model")):
        path.write_text(json.dumps({**settings, name: value}))
        with pytest.raises(UserError, match=name):
            from_huggingface(tmp_path / "adapter")

    path.write_text(json.dumps({**settings, "r": 0}))
    with pytest.raises(DataError, match="adapter"):
        from_huggingface(tmp_path / "adapter")


@pytest.mark.parametrize("family", TARGETS)
def test_peft_opens_our_adapter(family: str, tmp_path: Path) -> None:
    theirs = draw(family, SEEDS.get(family, 1))
    base = from_huggingface(theirs)
    adapted = copy.deepcopy(base)
    lora = Lora(rank=2, alpha=5.0)
    merged = restrict(adapted, Finetune(lora=lora))
    shake(adapted, (".weight.0.a", ".weight.0.b", "head.output", "pooler"))
    ours = copy.deepcopy(base)
    ours.load_state_dict(merged.state_dict())
    write_peft(ours, base, None, Decode(), lora, tmp_path / "base", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["r"] == 2
    opened = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert_equal_logits(family, opened, ours)
    used = [name for name, _ in opened.named_parameters() if "lora_A" in name]
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(used) == sum("lora_A" in name for name in stored) > 0


def test_a_run_with_lora_leaves_as_an_adapter(tmp_path: Path) -> None:
    """Trained, exported, opened by PEFT and by us; other runs have no adapter."""
    start, base = saved(tmp_path / "base", "bert", "BertModel")
    data = write_texts(tmp_path / "texts") / "tables"
    result(
        *("train", "classify", f"data.folder={data}", f"init={start}", "finetune.lora.rank=2"),
        *("train.epochs=none", "train.steps=6", "train.learning_rate=0.1"),
        *("train.validate_every=6", "--out", tmp_path / "run"),
    )
    result("export", tmp_path / "run", "--to", "peft", "--out", tmp_path / "adapter")
    run, adapter = load_run(tmp_path / "run"), load_run(tmp_path / "adapter")
    texts = ["the dog sees the dog", "a cat"]
    for [ours], [theirs] in zip(run.classify(texts), adapter.classify(texts), strict=True):
        expected = [pytest.approx(x, abs=1e-5) for x in ours.scores.values()]
        assert [*theirs.scores.values()] == expected
    kind = transformers.BertForSequenceClassification
    classifier = kind.from_pretrained(start, num_labels=2)
    opened = peft.PeftModel.from_pretrained(classifier, tmp_path / "adapter").eval()
    assert_equal_logits("bert", opened, run.model)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) < base.num_parameters() / 2
    result("import", start, "--out", tmp_path / "imported")
    mistake("export", tmp_path / "imported", "--to", "peft", "--out", tmp_path / "none")


def test_the_base_of_an_adapter_is_a_folder_that_peft_opens(tmp_path: Path) -> None:
    """A run folder has to be exported first: the error has the command, which then suffices."""
    hf, _ = saved(tmp_path / "base", "bert", "BertModel")
    data = write_texts(tmp_path / "texts") / "tables"
    start, run, out = (tmp_path / name for name in ("start", "run", "adapter"))
    result("import", hf, "--out", start)
    result(
        *("train", "classify", f"data.folder={data}", f"init={start}", "finetune.lora.rank=2"),
        *("train.epochs=none", "train.steps=1", "train.validate_every=1", "--out", run),
    )
    export = ("export", run, "--to", "peft", "--out", out)
    message = mistake(*export)
    assert not out.exists()
    result(*message.partition("manyheads ")[2].split())
    result(*export)
    base = Path(json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"])
    kind = transformers.BertForSequenceClassification
    classifier = kind.from_pretrained(base, num_labels=2)
    opened = peft.PeftModel.from_pretrained(classifier, out).eval()
    assert_equal_logits("bert", opened, load_run(run).model)
