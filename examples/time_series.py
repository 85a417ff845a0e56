"""A language model of a waveform: audio and time series as text, one character for each sample.

    python examples/time_series.py                  # a synthetic series, minutes on a CPU
    python examples/time_series.py recording.wav    # 16 bits, one channel

μ-law gives 256 levels (WaveNet, van den Oord et al. 2016), and each level is a character. So every
command for texts works: `train`, `evaluate`, `generate`, `cost`.
"""

# docs: start
import sys
import wave
from pathlib import Path

import numpy as np

import manyheads

FIRST = 0x4E00  # the character of level 0; none of the 256 is white space
MU = 255
SETTINGS = {
    "tokens": "characters",
    "model.dim": 64,
    "model.layers": 2,
    "model.max_length": 128,
    "model.position": "rotary",
    "train.steps": 300,
    "train.batch_tokens": 2048,
    "train.validate_every": 100,
}


def as_text(samples: np.ndarray) -> str:
    """Samples between −1 and 1 as characters: sign(x) ln(1 + μ|x|) / ln(1 + μ), in 256 levels."""
    compressed = np.sign(samples) * np.log1p(MU * np.abs(samples)) / np.log1p(MU)
    return "".join(chr(FIRST + round(level)) for level in (compressed + 1) / 2 * MU)


def as_samples(text: str) -> np.ndarray:
    """The inverse, up to the width of a level; other characters are left out."""
    levels = [ord(character) - FIRST for character in text]
    compressed = np.array([level for level in levels if 0 <= level <= MU]) / MU * 2 - 1
    return np.sign(compressed) * np.expm1(np.abs(compressed) * np.log1p(MU)) / MU


def read(file: str) -> np.ndarray:
    with wave.open(file) as recording:
        if (recording.getsampwidth(), recording.getnchannels()) != (2, 1):
            sys.exit(f"{file}: only 16 bits, one channel")
        return np.frombuffer(recording.readframes(recording.getnframes()), "<i2") / 2**15


def synthetic(length: int = 60_000) -> np.ndarray:
    """Two tones, one of which swells, and noise."""
    time = np.arange(length)
    swelling = np.sin(time / 500) * np.sin(time / 3)
    return (
        0.5 * np.sin(time / 8) + 0.3 * swelling + np.random.default_rng(1).normal(0, 0.01, length)
    )


def main(samples: np.ndarray, out: Path, **changes: object) -> np.ndarray:
    """Train on a series; returns its last samples and 200 predicted ones."""
    text = as_text(np.clip(samples, -1, 1))
    out.mkdir(parents=True, exist_ok=True)
    (out / "series.txt").write_text(text, encoding="utf-8")
    settings = SETTINGS | {"data.file": str(out / "series.txt")} | changes
    run = manyheads.train("language", settings, out=out / "run")
    seen = text[-100:]
    return as_samples(seen + run.generate([seen], max_new_tokens=200, temperature=0.5)[0])


if __name__ == "__main__":
    result = main(read(sys.argv[1]) if sys.argv[1:] else synthetic(), Path("runs/time-series"))
    print("the last samples, and what follows:", np.round(result, 2).tolist())
