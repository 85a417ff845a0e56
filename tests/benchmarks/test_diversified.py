"""Data diversification: new training pairs by models trained on the corpus."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.data.files import read_lines
from manyheads.phrasebook import sentences
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
diversified: Any = importlib.import_module("diversified")

SETTINGS = """train.steps=2 train.validate_every=2 train.save_every=2 train.batch_tokens=600
    tokens.vocab_size=300 model.dim=8 model.ffn_dim=8 model.layers=1 model.heads=2 decode.beam=2
    decode.max_length_extra=1 decode.max_length_ratio=0.5"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    pairs = sentences("en-de", "train", 30)
    for stem, part in {"train": [pairs[0], *pairs[:20]], "valid": pairs[20:]}.items():
        for language, side in (("en", "source"), ("de", "target")):
            text = "".join(getattr(pair, side) + "\n" for pair in part)
            (folder / f"{stem}.{language}").write_text(text, "utf-8")
    return folder


def trained(corpus: Path, out: Path, source: str, target: str) -> Path:
    settings = [f"data.folder={corpus}", f"data.source={source}", f"data.target={target}"]
    run = read_recipe("translation", [*settings, *SETTINGS.split()])
    make_trainer(run, out, torch.device("cpu")).run()
    return out


def test_each_run_tells_one_side_again(corpus: Path, tmp_path: Path) -> None:
    forward = trained(corpus, tmp_path / "forward", "en", "de")
    backward = trained(corpus, tmp_path / "backward", "de", "en")
    out, runs = tmp_path / "more", [str(forward), str(backward), str(forward)]
    assert diversified.main([str(corpus), str(out), "--device", "cpu", "--runs", *runs]) == 0
    sides = [[read_lines(at / f"train.{end}") for end in ("en", "de")] for at in (corpus, out)]
    before, after = (list(zip(*side, strict=True)) for side in sides)
    assert after[: len(before)] == before  # also the pair that is there twice
    added = after[len(before) :]
    assert added
    assert len(set(added)) == len(added)  # what the same run writes again is not new
    assert not set(added) & set(before)
    sources, targets = (set(side) for side in sides[0])
    old = [(source in sources, target in targets) for source, target in added]
    assert set(old) == {(True, False), (False, True)}
    assert old == sorted(old, reverse=True)  # the runs in the order in which they were given
    for end in ("en", "de"):
        assert (out / f"valid.{end}").read_bytes() == (corpus / f"valid.{end}").read_bytes()
