"""The pages of the lectures name claims, quizzes, tables and figures that exist."""

import re
from pathlib import Path

import pytest
from tests.docs.test_docs import ROOT, commands

from manyheads.commands.figure import KINDS
from manyheads.config import override_all
from manyheads.lab.claims.runner import claims
from manyheads.lab.figures.table import FIGURES, OF_A_RUN, find
from manyheads.lab.quiz import QUIZZES
from manyheads.lab.tables.table import names

PAGES = [ROOT / "docs" / "lectures.md", ROOT / "docs" / "figures.md"]
PAGES += sorted(ROOT.glob("docs/lectures/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_on_a_page_exist(page: Path) -> None:
    quizzes = {quiz.name for quiz in QUIZZES} | {"lab"}
    for command, *words in commands(page):
        plain = [word for word in words if word.islower() and word.replace("-", "").isalpha()]
        if command == "claims":
            runs = [words[i + 1] for i, word in enumerate(words) if word == "--run"]
            assert set(runs) <= set(claims()), words
        elif command == "quiz":
            assert set(plain[:1]) <= quizzes, words
        elif command == "tables":
            assert set(plain[:1]) <= set(names()), words
        elif command == "figure" and words and words[0].islower():
            name = find(words)
            assert name or words[1] in KINDS, words
            if name:
                settings = [word for word in words if "=" in word]
                override_all(FIGURES[name](), settings)
                assert (name in OF_A_RUN) == (words[0] != name), words


def test_every_quiz_and_figure_is_on_a_page() -> None:
    text = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"manyheads quiz {quiz.name}" in text for quiz in QUIZZES)
    assert all(name in text for name in (*FIGURES, *names()))


def lecture_rows() -> dict[str, str]:
    text = (ROOT / "docs" / "lectures.md").read_text("utf-8")
    return {row[1]: row[2] for row in re.finditer(r"^### (L\d+) (.*?)(?=^##)", text, re.M | re.S)}


@pytest.mark.parametrize("row", lecture_rows())
def test_a_row_of_the_lectures_is_complete(row: str) -> None:
    """Formula, slides of a lecture's page, something to run, claims, exercise, folded code."""
    text = lecture_rows()[row]
    for part in ("\n\n$$\n", "- **Run**:", "- **Claims**:", "- **Exercise**:", "<details>"):
        assert part in text, part
    slides = re.findall(r"^\| \[[^]]+\]\((lectures/[\w-]+\.md)\) \| (.+) \|$", text, flags=re.M)
    assert slides
    for page, slide in slides:
        assert f"| {slide}" in (ROOT / "docs" / page).read_text("utf-8"), slide


def test_verdicts_on_the_lectures_page_are_those_of_the_claims() -> None:
    claimed = (ROOT / "docs" / "claims.md").read_text("utf-8")
    verdicts = dict(re.findall(r"^\| \[([\w-]+)\].* \| ([\w ]+) \|$", claimed, flags=re.M))
    assert set(verdicts) == set(claims())
    text = "\n".join(lecture_rows().values())
    shown = re.findall(r"\]\(claims\.md#([\w-]+)\) (holds|it depends|contradicted)", text)
    assert len(shown) == text.count("](claims.md#")
    assert {name for name, _ in shown} == set(verdicts)
    assert all(verdicts[name] == verdict for name, verdict in shown)
