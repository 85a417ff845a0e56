"""In a real browser: the static copy opens from a file, without a server and without a network."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.web.test_tour_page import STEPS

from manyheads.commands.serve import view
from manyheads.errors import UserError
from manyheads.lab.quiz import QUIZZES, as_dict, find
from manyheads.web.export import export

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_watch_page", reason="needs chromium")

browser, folder = shared.browser, shared.folder  # fixtures
expect, settled = shared.expect, shared.shared.settled


@pytest.fixture(scope="module")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    to = tmp_path_factory.mktemp("site")
    with ThreadPoolExecutor() as threads:  # this thread has the event loop of the browser
        threads.submit(view, folder, export=to).result()
    assert [path.name for path in to.iterdir()] == ["index.html"]
    return (to / "index.html").as_uri()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page without a network, on which nothing may go wrong."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(8000)
    made, wrong = context.new_page(), []
    made.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    known = ("file:", "data:", "blob:")
    made.on("request", lambda sent: None if sent.url.startswith(known) else wrong.append(sent.url))
    yield made
    context.close()
    assert wrong == []


def test_the_tour_works_from_a_file(page: Any, site: str) -> None:
    page.goto(site)
    page.get_by_role("link", name="Take the tour").click()
    for number, step in enumerate(STEPS):
        expect(page.locator(".telling h1")).to_have_text(step["title"])
        settled(page)
        expect(page.locator("#problem")).to_be_hidden()
        assert len(page.locator(".live").inner_text()) > 100
        if number + 1 < len(STEPS):
            page.locator("main").press("ArrowRight")
    page.go_back()
    expect(page.locator(".telling h1")).to_have_text(STEPS[-2]["title"])


def test_watch_works_from_a_file(page: Any, site: str, folder: Path) -> None:
    page.goto(f"{site}#/watch?run=translator&step=30")
    canvas, recorded = page.locator("canvas.watch"), shared.probes(folder)
    expect(canvas).to_have_attribute("aria-valuenow", "30")
    page.locator("main").press("Home")
    expect(canvas).to_have_attribute("aria-valuenow", "0")
    assert recorded[0]["sentences"][0]["text"] in canvas.get_attribute("aria-valuetext")
    page.wait_for_timeout(1700)  # a request for new probes
    expect(page.locator("#problem")).to_be_hidden()


def test_home_and_train_work_from_a_file(page: Any, site: str, folder: Path) -> None:
    page.goto(site)
    settled(page)
    card = page.locator("article.card", has=page.get_by_role("heading", name="translator"))
    expect(card.locator("canvas.thumb")).to_be_visible()
    # A copy may be published: it names no folder of the computer that made it.
    expect(card.locator("code").first).to_have_text("manyheads train run.toml --out NEW")
    expect(page.get_by_role("button", name="Train the demo")).to_have_count(0)
    card.get_by_role("link", name="Train").click()
    expect(page.locator(".standing dd").first).to_have_text("30 of 30")
    text = shared.probes(folder)[-1]["sentences"][0]["text"] or "(nothing)"
    expect(page.locator(".samples tbody tr").first).to_contain_text(text)
    expect(page.locator("#problem")).to_be_hidden()


def test_the_other_pages_hold_several_sentences(page: Any, site: str) -> None:
    for name in ("flow", "attention", "tokens", "translate", "decode"):
        page.goto(f"{site}#/{name}?run=translator")
        choice = page.get_by_label("Recorded sentence")
        for number in (1, 0):
            settled(page)
            choice.select_option(index=number)
            settled(page)
            expect(page.locator("#problem")).to_be_hidden()
    page.locator("textarea").first.fill("A sentence of another day.")
    expect(page.locator("#problem")).to_contain_text("no server")


def test_the_quiz_works_from_a_file(page: Any, site: str) -> None:
    page.goto(f"{site}#/quiz")
    for quiz in QUIZZES:
        question = f"#/quiz?question={quiz.name}"  # “mask” is not “masked”
        page.locator(f".quiz-list :is(a[href='{question}'], a[href^='{question}&'])").click()
        letter = f"-{next(iter(quiz.choices))}" if quiz.choices else ""
        page.locator(f"#quiz-{quiz.name}{letter}").click()
    page.locator(".quiz-list a[href*='question=thinking']").click()
    expected = as_dict(find("thinking"))["findings"][0]["text"]
    expect(page.locator(".quiz").filter(has_text="Thinking").first).to_contain_text(expected)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.get_by_role("status")).to_contain_text("right")


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        export(tmp_path / "missing", tmp_path / "site")
