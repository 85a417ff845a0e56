"""The quizzes and the lab of the lectures: quiz."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands import options
from manyheads.commands.options import argument
from manyheads.commands.shared import print_json, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.lab.quiz import Quiz

LAB = "lab"


def quiz(
    name: Annotated[
        str | None, argument("NAME", "A quiz, or lab for the worksheet [default: all quizzes]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Ask the quizzes of the lectures; compute the answers.

    Examples
      $ manyheads quiz
      $ manyheads quiz masked
      $ manyheads quiz lab

    On a terminal it asks first; elsewhere it prints questions and answers. Answers are
    computed, not stored. An unknown name lists the quizzes.
    """
    from manyheads.lab.quiz import QUIZZES, as_dict, find

    if name == LAB:
        _lab(as_json)
        return
    chosen = list(QUIZZES) if name is None else [find(name)]
    if as_json:
        print_json({"quizzes": [as_dict(each) for each in chosen]})
        return
    asks = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    for each in chosen:
        _ask(each, asks)


def _ask(quiz: "Quiz", asks: bool) -> None:
    from manyheads.lab.quiz import answer_text, question_text

    write(f"{question_text(quiz)}\n")
    if asks:
        letters = ", ".join(quiz.choices)
        typer.prompt(
            f"  your answer ({letters})" if letters else "  Enter", default="", show_default=False
        )
    write(f"{answer_text(quiz)}\n\n")


def _lab(as_json: bool) -> None:
    """Run every step of the worksheet; a step whose library is missing is not checked."""
    from manyheads.lab.worksheet import STEPS

    rows: list[dict[str, Any]] = []
    for number, step in enumerate(STEPS, start=1):
        holds: bool | None
        try:
            holds, numbers = step.check()
        except UserError as error:  # an optional library is missing
            holds, numbers = None, str(error)
        rows.append({"name": step.name, "task": step.task, "solve": step.solve})
        rows[-1] |= {"holds": holds, "numbers": numbers}
        if not as_json:
            mark = {True: "checked", False: "FAILED", None: "not checked"}[holds]
            lines = "".join(f"     {line}\n" for line in step.solve)
            write(f"{number}. {step.task}\n{lines}   {mark}: {numbers}\n\n")
    if as_json:
        print_json({"lab": rows})
    if any(row["holds"] is False for row in rows):
        raise typer.Exit(1)
