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

    from manyheads.nn.positions import RotaryPosition

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
    student.cross_attention = lambda q, k, v, real: F.scaled_dot_product_attention(
        q, k, v, attn_mask=real[:, None, None]
    )
    student.token_embedding = lambda tokens, table: (
        F.embedding(tokens, table) * table.shape[1] ** 0.5
    )
    student.residual = lambda x, f: x + f(student.layer_norm(x, 1e-5))
    # Wrong: halves instead of neighbouring channels, and a warm-up that never ends.
    student.rotary_positions = lambda x: RotaryPosition(1e4, "halves").rotate(
        x, torch.arange(5)[None]
    )
    student.learning_rate = lambda steps, d, warmup: d**-0.5 * steps * warmup**-1.5
    rows = board.results(student)
    right = {
        *("scaled_dot_product_attention", "layer_norm", "label_smoothing", "cross_attention"),
        *("token_embedding", "residual"),
    }
    wrong = {"causal_mask", "rotary_positions", "learning_rate"}
    assert {name for name, text in rows.items() if text == "right"} == right
    assert {name for name, text in rows.items() if text.startswith("wrong")} == wrong
