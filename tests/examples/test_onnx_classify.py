"""The example program gives the probabilities of the run that was exported."""

import runpy
from pathlib import Path

import pytest
from tests.test_cli import result

import manyheads

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[2]
TEXTS = ["The dog sees the tree.", "Who sleeps?"]


@pytest.mark.compile  # shape checks refuse the symbolic sizes of the exporter
@pytest.mark.parametrize("model", [(), ("model.embed.segments=none", "model.pooler=none")])
def test_probabilities_of_the_export_are_the_run_s(model: tuple[str, ...], tmp_path: Path) -> None:
    rows = "".join(f"{text}\t{label}\n" for text, label in zip(TEXTS * 20, "ab" * 20, strict=True))
    table, run, out = tmp_path / "table.tsv", tmp_path / "run", tmp_path / "onnx"
    table.write_text(f"text\tlabel\n{rows}", encoding="utf-8")
    sizes = ("model.dim=16", "model.layers=1", "model.heads=2", "tokens.vocab_size=600")
    result("train", "classify", f"data.train={table}", *sizes, *model, "--out", run)
    result("export", run, "--to", "onnx", "--out", out)
    classify = runpy.run_path(str(ROOT / "examples" / "onnx_classify.py"))["classify"]
    long = "the dog " * 400  # more tokens than the model has positions
    expected = manyheads.load(run).classify([*TEXTS, long])
    for [prediction], probabilities in zip(
        expected, classify(str(out), [*TEXTS, long]), strict=True
    ):
        assert probabilities == pytest.approx(prediction.scores, abs=1e-5)
