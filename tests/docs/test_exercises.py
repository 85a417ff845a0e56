"""The scoreboard of the exercises: solutions are right, stubs are open, an error is seen."""

import importlib.util
from types import ModuleType

from tests.docs.test_docs import ROOT

FOLDER = ROOT / "docs" / "exercises"


def scoreboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scoreboard", FOLDER / "scoreboard.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_solutions_are_right_and_stubs_are_open() -> None:
    board = scoreboard()
    assert set(board.results(board.load(FOLDER / "solutions.py")).values()) == {"right"}
    assert set(board.results(board.load(FOLDER / "stubs.py")).values()) == {"to do"}


def test_torch_agrees_and_a_wrong_part_is_seen() -> None:
    import torch
    from torch.nn import functional as F

    board = scoreboard()
    student = board.load(FOLDER / "stubs.py")
    student.causal_mask = lambda t: torch.ones(t, t).tril(1).bool()
    student.scaled_dot_product_attention = lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )
    student.layer_norm = lambda x, eps: F.layer_norm(x, x.shape[-1:], eps=eps)
    student.label_smoothing = lambda logits, labels, smoothing: F.cross_entropy(
        logits, labels, reduction="sum", label_smoothing=smoothing
    )
    rows = board.results(student)
    right = ("scaled_dot_product_attention", "layer_norm", "label_smoothing")
    assert [rows[name] for name in right] == ["right"] * 3
    assert rows["causal_mask"].startswith("wrong")
