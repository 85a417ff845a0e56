"""Classify texts with an ONNX export, without manyheads and without PyTorch.

    manyheads export runs/reviews --to onnx --out runs/reviews-onnx
    python examples/onnx_classify.py runs/reviews-onnx "What a film!"

It needs numpy, tokenizers and onnxruntime.
"""

# docs: start
import sys
import tomllib
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession
from tokenizers import Tokenizer


def classify(folder: str, texts: list[str]) -> list[dict[str, float]]:
    """The probability of each label, for each text."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    settings = tomllib.loads(Path(folder, "run.toml").read_text("utf-8"))["model"]
    tokenizer.enable_padding()
    tokenizer.enable_truncation(settings["max_length"])
    encodings = tokenizer.encode_batch(texts)
    inputs = {
        "tokens": np.array([encoding.ids for encoding in encodings]),
        "real": np.array([encoding.attention_mask for encoding in encodings], bool),
        "segments": np.array([encoding.type_ids for encoding in encodings]),
    }
    session = InferenceSession(f"{folder}/encoder.onnx")
    known = {item.name for item in session.get_inputs()}  # not every encoder has segments
    inputs = {name: array for name, array in inputs.items() if name in known}
    [logits] = session.run(["logits"], inputs)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    labels = settings["head"]["labels"]
    return [dict(zip(labels, row / row.sum(), strict=True)) for row in powers]


if __name__ == "__main__":
    for row in classify(sys.argv[1], sys.argv[2:]):
        print({label: round(float(value), 3) for label, value in row.items()})
# docs: end
