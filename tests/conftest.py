"""One torch thread a test process: two busy processes then never fight for a core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest
import torch
from tests.checks import checked

torch.set_num_threads(1)
if not torch.cuda.is_available():  # our kernels then run in Triton's interpreter (tests/kernels)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
jaxtyping.jaxtyped = checked  # before the package is imported


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
