"""Endpoints of the Quiz page: the questions of the lectures, and answers computed on request."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.web.responses import Fields


async def quizzes(request: Request) -> Response:
    """GET: all questions with their choices, without answers."""
    return await run_in_threadpool(_quizzes)


def _quizzes() -> Response:
    from manyheads.lab.quiz import QUIZZES

    keys = ("name", "lecture", "slide", "question", "choices")
    return JSONResponse(
        {"quizzes": [{key: getattr(quiz, key) for key in keys} for quiz in QUIZZES]}
    )


async def answer(request: Request) -> Response:
    """POST {name}: the answer of a quiz, computed now, with the number that decides it."""
    fields = await Fields.of_body(request)
    return await run_in_threadpool(_answer, fields.text("name"))


def _answer(name: str) -> Response:
    from manyheads.lab.quiz import as_dict, find

    return JSONResponse(as_dict(find(name)))


ROUTES = [Route("/api/quizzes", quizzes), Route("/api/quiz", answer, methods=["POST"])]
