"""Exported models open in TransformerLens, with the same logits and attention weights."""

from pathlib import Path

import pytest
import torch
from tests.exchange.folders import saved
from tests.test_cli import result

from manyheads.loading import load_run
from manyheads.models.capture import capture

bridge = pytest.importorskip("transformer_lens.model_bridge")
transformers = pytest.importorskip("transformers")
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_an_export_opens(family: str, tmp_path: Path) -> None:
    saved(tmp_path / "theirs", family)
    result("import", tmp_path / "theirs", "--out", tmp_path / "run")
    result("export", tmp_path / "run", "--to", "huggingface", "--out", tmp_path / "out")
    ours = load_run(tmp_path / "run").model
    opened = getattr(transformers, AUTO.get(family, "AutoModelForCausalLM"))
    lens = bridge.TransformerBridge.boot_transformers(
        str(tmp_path / "out"),
        hf_model=opened.from_pretrained(tmp_path / "out", attn_implementation="eager"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        device="cpu",
    )
    tokens = torch.tensor([[5, 9, 6, 7, 8]])
    with torch.no_grad():
        if family == "t5":
            logits = lens(tokens, decoder_input=tokens)
            torch.testing.assert_close(logits, ours(tokens, tokens), rtol=1e-5, atol=1e-5)
            return
        logits, cache = lens.run_with_cache(tokens)
        with capture(ours) as maps:
            expected = ours(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for (_, _, layer), weights in maps.by_layer.items():
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        torch.testing.assert_close(pattern, weights[0], rtol=1e-5, atol=1e-5)
