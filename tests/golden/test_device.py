"""On a CUDA device: losses near those of release 0.1, and the same texts in float32.

Losses may differ by 2 % in bfloat16 and by 0.2 % in float32; see device.py for the record.
"""

from pathlib import Path

import pytest
from tests.golden.device import LOSS_TOLERANCES, PRECISIONS, TEXTS, texts, train
from tests.golden.harness import RECORD, assert_losses, read_record
from tests.golden.runs import DEVICE_RUNS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (RECORD / "device.json").exists(), reason="no record of a device"),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", DEVICE_RUNS)
def test_losses(name: str, precision: str, tmp_path: Path) -> None:
    recorded = read_record("device")["runs"][f"{name} {precision}"]
    ours = train(name, precision, tmp_path, "cuda")
    assert_losses(ours, recorded, LOSS_TOLERANCES[precision])


@pytest.mark.parametrize("kind", TEXTS)
def test_texts(kind: str, tmp_path: Path) -> None:
    assert texts(kind, tmp_path, "cuda") == read_record("device")["texts"][kind]
