"""The computed answers are those of the lectures, and the worksheet's steps can fail."""

import json

import pytest
import torch
from tests.test_cli import mistake, result

from manyheads.lab import quiz as quiz_module
from manyheads.lab import worksheet
from manyheads.lab.quiz import QUIZZES, answer, find
from manyheads.lab.worksheet import STEPS


@pytest.mark.parametrize("quiz", QUIZZES, ids=lambda quiz: quiz.name)
def test_the_computed_answer_is_the_printed_one(quiz: quiz_module.Quiz) -> None:
    findings = quiz.judge()
    assert [finding.letter for finding in findings if quiz.choices] == list(quiz.choices)
    computed = answer(findings)
    assert computed == (quiz.printed or computed)
    assert len(computed) == bool(quiz.choices)
    assert all(any(sign.isdigit() for sign in finding.text) for finding in findings[:1])


def test_answers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [[1.0, 0, -1, -1], [-100, 1, -1, 0], [0, 1, 1, -1], [-1, -1, 2, 1]]
    monkeypatch.setattr(quiz_module, "SCORES", scores)
    assert answer(find("masked").judge()) == "D"


def test_numbers_of_the_lectures() -> None:
    expected = {
        "thinking": "0.8808, 0.1192",
        "dot-products": "8, 12, 20",
        "understanding": "31.5M and 25.2M, so (A) is True there",
    }
    for name, text in expected.items():
        assert text in " ".join(finding.text for finding in find(name).judge())


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_of_the_lab_holds(step: worksheet.Step) -> None:
    if step.name == "hugging-face":
        pytest.importorskip("transformers")
    holds, numbers = step.check()
    assert holds, numbers


def test_a_step_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worksheet, "attention_weights", lambda *q, **more: torch.ones(1, 1, 5, 5))
    steps = {step.name: step for step in STEPS}
    assert not steps["masks"].check()[0]


def test_the_command_prints_question_and_answer() -> None:
    text = result("quiz", "masked")
    assert text.index("What should be") < text.index("Answer: B; the lecture says B")
    (row,) = json.loads(result("quiz", "masked", "--json"))["quizzes"]
    assert row["answer"] == row["printed"] == "B"
    assert "did you mean 'masked'" in mistake("quiz", "maskedd")
