"""One torch thread a test process: two busy processes then never fight for a core."""

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest
import torch
from tests.checks import CORE, checked, trusting

torch.set_num_threads(1)
if not torch.cuda.is_available():  # our kernels then run in Triton's interpreter (tests/kernels)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
gc.disable()  # until all modules are imported: a third of the time of collection
jaxtyping.jaxtyped = checked  # before the package is imported
for absent in (torch.xpu, torch.mtia):  # torch.manual_seed formats a stack trace for each of them
    absent.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# Tests of the core, and of the checks themselves.
OF_THE_CORE = {"data", "decode", "evaluate", "kernels", "models", "nn", "tasks", "tokenizer"}
OF_THE_CORE |= {"train", "test_checks", "test_optimize", "test_phrasebook"}
# Folders of many quick files: at the end they keep each process busy while another has a long file.
QUICK = {"data", "evaluate", "lab", "models", "nn", "tokenizer"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name in QUICK)


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _core_is_checked_in_its_own_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    if OF_THE_CORE & {request.path.parent.name, request.path.stem}:
        yield
        return
    with trusting(CORE):
        yield
