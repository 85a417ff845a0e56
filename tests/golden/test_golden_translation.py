"""The translators compute what release 0.1 computed, bit by bit.

The record is made from 0.1 and never edited by hand; see record.py.
"""

import pytest
from tests.golden.checks import check_bits, check_losses
from tests.golden.runs import RUNS

NAMES = [run.name for run in RUNS if run.name.startswith("translation")]


@pytest.mark.parametrize("name", NAMES)
def test_losses(name: str) -> None:
    check_losses(name)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_outputs(name: str) -> None:
    check_bits(name)
