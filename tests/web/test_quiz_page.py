"""The Quiz page: every question of the lectures, with answers computed when they are requested."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.lab import quiz
from manyheads.web.app import build_app

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

address, browser, folder, page = shared.address, shared.browser, shared.folder, shared.page
expect, settled, visit = shared.expect, shared.settled, shared.visit


def test_questions_come_without_answers(tmp_path: Any) -> None:
    client = TestClient(build_app(tmp_path), base_url="http://127.0.0.1")
    asked = client.get("/api/quizzes").json()["quizzes"]
    assert [one["name"] for one in asked] == [one.name for one in quiz.QUIZZES]
    assert not any({"answer", "findings", "printed", "therefore"} & set(one) for one in asked)
    assert client.post("/api/quiz", json={"name": "none"}).status_code == 400


def test_an_answer_is_computed_and_judged(page: Any) -> None:
    visit(page, "/quiz")
    cards = page.locator(".quiz")
    total = len(quiz.QUIZZES)
    assert cards.count() == 1
    assert page.locator(".finding").count() == 0
    card = cards.filter(has_text="Thinking")
    card.get_by_role("button", name="(a)").click()
    expected = quiz.as_dict(quiz.find("thinking"))
    findings = card.locator(".finding")
    expect(findings).to_have_count(len(expected["findings"]))
    for number, finding in enumerate(expected["findings"]):
        expect(findings.nth(number)).to_contain_text(finding["text"])
    expect(card.locator("li.right")).to_contain_text(f"({expected['answer']})")
    expect(card.locator(".insight")).to_contain_text("softmax")
    expect(card.get_by_role("link", name="See it in Attention")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text(f"1 of {total} done, 0 of 1 right.")
    card.get_by_role("button", name=f"({expected['answer']})").click()
    expect(page.get_by_role("status")).to_contain_text("1 of 1 right.")
    # The two weights as bars, the longer one of full length.
    weights = card.locator("li.right .level").evaluate_all("all => all.map(e => e.style.width)")
    shares = [float(width.strip("%")) / 100 for width in weights]
    assert shares == pytest.approx([1, 0.12 / 0.88], abs=0.01)
    page.go_back()
    expect(page.get_by_role("status")).to_contain_text("0 of 1 right.")
    # An open question shows its numbers.
    page.get_by_role("link", name="Self-attention, step 2").click()
    scaled = cards.filter(has_text=re.compile("Why scaled"))
    expect(scaled).to_contain_text("Think first")
    scaled.get_by_role("button", name="Compute the answer").click()
    expect(scaled.locator(".finding").first).to_contain_text("standard deviation")
    expect(scaled).not_to_contain_text("Think first")
    assert "answers=thinking.a+why-scaled" in page.url
    # The reader scores an answer that was not a choice.
    expect(page.get_by_role("status")).to_have_text(f"2 of {total} done, 0 of 1 right.")
    scaled.get_by_role("button", name="yes", exact=True).click()
    expect(page.get_by_role("status")).to_have_text(f"2 of {total} done, 1 of 2 right.")
    assert "why-scaled.yes" in page.url
    # A mask shows its weights: none above the diagonal.
    page.get_by_role("link", name="Masking out the future").click()
    mask = cards.filter(has_text="What is this mask function")
    mask.get_by_role("button", name="Compute the answer").click()
    expect(mask.locator(".weights tr")).to_have_count(4)
    rows = [row.locator("td").all_inner_texts() for row in mask.locator(".weights tr").all()]
    assert [row.count("0") for row in rows] == [3, 2, 1, 0]


def test_questions_come_one_at_a_time_by_keys_and_address(page: Any) -> None:
    visit(page, "/quiz")
    card = page.locator(".quiz")
    names = [one.name for one in quiz.QUIZZES]
    expect(card).to_have_attribute("id", f"card-{names[0]}")
    expect(page.get_by_role("button", name="Back")).to_be_disabled()
    page.keyboard.press("b")
    expect(page.get_by_role("status")).to_contain_text(
        "1 of 1 right" if quiz.as_dict(quiz.find(names[0]))["answer"] == "b" else "0 of 1 right"
    )
    expect(card).to_have_attribute("id", f"card-{names[0]}")
    page.keyboard.press("ArrowRight")
    expect(card).to_have_attribute("id", f"card-{names[1]}")
    expect(page.locator(".quiz-list [aria-current]")).to_have_count(1)
    page.get_by_role("button", name="Next").click()
    expect(card).to_have_attribute("id", f"card-{names[2]}")
    page.keyboard.press("ArrowLeft")
    expect(card).to_have_attribute("id", f"card-{names[1]}")
    page.go_back()
    expect(card).to_have_attribute("id", f"card-{names[2]}")
    visit(page, f"/quiz?question={names[-1]}")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    assert card.count() == 1
