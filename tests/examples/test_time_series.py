"""A waveform as text: levels come back, and a language model of them trains and continues it."""

import runpy
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def test_a_waveform_is_a_text(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "time_series.py"))
    samples = example["synthetic"](3000)
    back = example["as_samples"](example["as_text"](samples))
    # A level is as wide as 2/255 of the logarithmic scale, so at most 4.4 % of |x| + 1/255.
    assert (np.abs(back - samples) <= 0.5 * 0.0445 * (np.abs(samples) + 1 / 255)).all()
    small = {"model.dim": 16, "model.heads": 2, "train.steps": 4, "train.validate_every": 4}
    small |= {"train.batch_tokens": 256, "train.warmup_steps": 1, "model.max_length": 32}
    result = example["main"](samples, tmp_path, **small)
    assert 100 <= len(result) <= 300  # at the beginning some tokens are bytes
    assert (np.abs(result) <= 1).all()
    text = (tmp_path / "series.txt").read_text("utf-8")
    assert len(text) == len(samples)
    assert np.allclose(result[:100], back[-100:])
