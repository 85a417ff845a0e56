"""In a real browser: the Tour goes through its steps, each with a formula and a live view."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

address, browser, folder, page = shared.address, shared.browser, shared.folder, shared.page
expect, settled, visit = shared.expect, shared.settled, shared.visit
ROOT = Path(__file__).parents[2]
STEPS = json.loads((ROOT / "src/manyheads/web/page/tour.json").read_text("utf-8"))
PLACE = "/tour?run=translator"


def test_the_texts_are_those_of_the_documentation() -> None:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("tour", ROOT / "docs" / "tour.py")
    assert spec is not None
    assert spec.loader is not None
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    assert tour.TARGET.read_text("utf-8") == tour.rendered(), "run: python docs/tour.py"
    assert len(STEPS) == tour.SOURCE.read_text("utf-8").count("<!-- tour:") >= 14


def test_every_step_shows_its_text_formula_and_view(page: Any) -> None:
    visit(page, PLACE)
    for number, step in enumerate(STEPS):
        expect(page.locator(".telling h1")).to_have_text(step["title"])
        settled(page)
        assert page.locator(".live").inner_text().strip()
        formulas = page.locator(".telling math")
        expect(formulas).to_have_count(1 if step["formula"] else 0)
        if step["formula"]:
            assert formulas.bounding_box()["height"] > 10  # typeset, not a line of source
            assert "\\" not in formulas.text_content()
            cut = "(place) => place.scrollWidth - place.clientWidth"
            assert page.locator(".telling .math").evaluate(cut) <= 1, step["title"]
        expect(page.locator(".telling .note").first).to_have_text(
            f"Step {number + 1} of {len(STEPS)}"
        )
        assert number == 0 or page.url.endswith(f"stop={number + 1}")  # counted as on screen
        expect(page.locator(".telling .try")).to_contain_text(step["question"])
        if number + 1 < len(STEPS):
            page.locator("main").press("ArrowRight")
    expect(page.get_by_role("button", name="Next")).to_have_count(0)
    for name in ("Quiz", "Flow"):
        expect(page.locator(".telling .next", has_text=name)).to_be_visible()
    page.locator("main").press("ArrowLeft")
    expect(page.locator(".telling h1")).to_have_text(STEPS[-2]["title"])


def test_a_step_has_an_address_and_forgets_choices_of_another(page: Any) -> None:
    number = next(n for n, step in enumerate(STEPS) if step["title"] == "Softmax")
    visit(page, f"{PLACE}&stop={number + 1}&head=1")
    expect(page.locator(".openbox h2").first).to_contain_text("Softmax")
    expect(page.locator(".openbox h2").first).to_contain_text("head 2")
    page.get_by_role("button", name="Next").click()
    settled(page)
    assert f"stop={number + 2}" in page.url
    assert "head=" not in page.url
    page.go_back()
    expect(page.locator(".openbox h2").first).to_contain_text("head 2")


def test_keys_of_the_view_act_on_the_state_of_the_step(page: Any) -> None:
    number = next(n for n, step in enumerate(STEPS) if step["title"] == "The causal mask")
    visit(page, f"{PLACE}&stop={number + 1}")
    title = page.locator(".openbox h2").first
    expect(title).to_contain_text("Scores + mask")
    page.locator("main").press("m")
    expect(title).not_to_contain_text("mask")
    page.locator("main").press("m")
    expect(title).to_contain_text("Scores + mask")


def test_steps_of_attention_follow_one_head_and_one_cell(page: Any) -> None:
    """Before the scale a score is q · k; after it, as much smaller as √c says; then its weight."""
    number = next(n for n, step in enumerate(STEPS) if step["title"] == "Scores")
    seen = []
    for at in range(number, number + 3):
        visit(page, f"{PLACE}&stop={at + 1}")
        expect(page.locator(".openbox h2").first).to_contain_text("head 1")
        expect(page.locator(".origin .total")).to_be_visible()
        text = page.locator(".origin .total output").inner_text()
        total = float(text.removesuffix(" %").replace("−", "-")) * (0.01 if "%" in text else 1)
        seen.append((page.locator(".origin small span").first.inner_text(), total))
        readout = page.locator(".openbox .heatmap .readout").inner_text()
        assert shared.reads(readout, total)
    (cell, product), (_, score), (_, weight) = seen
    assert [where for where, _ in seen] == [cell] * 3
    channels = float(
        page.locator("[id='box-encoder.self.q']").get_attribute("aria-label").split()[-1]
    )
    # Both are written in three digits: the difference is at most what that rounds away.
    halves = [0.5 * 10 ** (math.floor(math.log10(abs(x))) - 2) for x in (product, score)]
    assert abs(product - score * channels**0.5) <= halves[0] + halves[1] * channels**0.5 + 1e-9
    assert 0 < weight < 1


def test_the_answer_to_a_prediction_is_hidden_until_it_is_asked_for(page: Any) -> None:
    """It is the sentence that the view computes."""
    questions = [number for number, step in enumerate(STEPS, start=1) if step["predict"]]
    assert len(questions) > 1
    for number in questions:
        visit(page, f"{PLACE}&stop={number}")
        sentence = page.locator(".live .openbox .insight:not(:empty)").first
        expect(sentence).to_be_hidden()
        page.get_by_role("button", name="Show the answer").click()
        expect(sentence).to_be_visible()
        expect(page.locator(".try .answer")).to_have_text(sentence.text_content())
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".tour.predicting")).to_have_count(0)


def test_the_first_step_shows_sentence_and_translation_on_stage(page: Any) -> None:
    visit(page, PLACE)
    translation = page.locator(".live output.sentence").inner_text()
    expect(page.locator(".live .alignment .insight")).to_be_hidden()
    page.locator("main").press("s")
    expect(page.locator("figure.staged .insight")).to_contain_text(f"“{translation}”")


def test_back_and_next_stay_in_place(page: Any) -> None:
    places = set()
    for at in range(len(STEPS) - 1):
        visit(page, f"{PLACE}&stop={at + 1}")
        place = page.get_by_role("button", name="Next").bounding_box()
        places.add((place["x"], place["y"]))
    assert len(places) == 1


def test_the_menu_stays_in_place_from_run_to_run(page: Any) -> None:
    """It has the pages that fit a run of the folder; those that need another run are pale."""
    places = []
    for place in ("/", "/attention?run=reader", "/attention?run=translator", "/quiz"):
        visit(page, place)
        links = page.locator("#pages a")
        expect(links.filter(has_text="Music")).to_have_count(0)  # no run of the folder is one
        places.append([(one.inner_text(), one.bounding_box()) for one in links.all()])
    assert all(one == places[0] for one in places)
    visit(page, "/attention?run=reader")
    other = page.locator("#pages a.other")
    expect(other.filter(has_text="Translate")).to_have_count(1)
    expect(other.filter(has_text="Attention")).to_have_count(0)
    page.locator("#pages").get_by_role("link", name="Translate").click()
    expect(page.get_by_text("Showing “translator”")).to_be_visible()


def test_on_stage_a_step_is_its_map_with_the_formula_below(page: Any) -> None:
    number = next(n for n, step in enumerate(STEPS) if step["title"] == "Softmax")
    visit(page, f"{PLACE}&stop={number + 1}")
    page.locator("main").press("s")
    staged = page.locator("figure.staged")
    expect(staged.locator(".plane > canvas")).to_be_visible()  # not the diagram
    expect(staged.locator(".insight")).not_to_be_empty()
    expect(staged.locator(".scale .bar")).to_be_visible()
    formula = page.locator(".telling .math")
    box, below = staged.bounding_box(), formula.bounding_box()
    title = page.locator(".stagetitle").bounding_box()
    assert title["y"] + title["height"] <= box["y"] + 1
    assert box["y"] + box["height"] <= below["y"] + 1
    assert below["y"] + below["height"] <= 800
    math = formula.locator("math").bounding_box()
    assert below["x"] <= math["x"]
    assert math["x"] + math["width"] <= below["x"] + below["width"]
    assert formula.evaluate("one => parseFloat(getComputedStyle(one).fontSize)") >= 20
    page.locator("main").press("ArrowRight")
    expect(page.locator(".stagetitle")).to_contain_text(STEPS[number + 1]["title"])
    expect(page.locator("figure.staged .plane > canvas")).to_be_visible()


def test_the_page_and_the_tour_write_formulas_alike(page: Any) -> None:
    """A for weights, PE(pos, 2i), H for the encoder output; no functions without parentheses."""
    letters = {}
    for title, box in (("Softmax", "encoder.self.weights"), ("Embedding and position", "")):
        number = next(n for n, step in enumerate(STEPS) if step["title"] == title)
        visit(page, f"{PLACE}&stop={number + 1}")
        letters[title] = page.locator(".telling math").text_content()
        if box:
            visit(page, f"/flow?run=translator&box={box}")
            flow = page.locator(".openbox .formula math").first.text_content()
            assert flow.startswith("A")
            assert letters[title].startswith("A")
    assert "exp(" in letters["Softmax"]
    assert "PE(pos,2i)=sin(" in letters["Embedding and position"]


def test_steps_have_sentences_in_which_something_happens(page: Any) -> None:
    """Tokens shows a word that is divided; Scale the softmax with and without √c."""
    tokens, scale = (
        next(n for n, step in enumerate(STEPS) if step["title"] == title)
        for title in ("Tokens", "Scale")
    )
    visit(page, f"{PLACE}&stop={tokens + 1}")
    expect(page.locator(".live .insight").first).to_contain_text("divided into")
    visit(page, f"{PLACE}&stop={scale + 1}")
    expect(page.locator(".scaled .second").first).to_be_visible()
    expect(page.locator(".openbox .heatmap .insight")).to_contain_text("Without √c")


def number_of(title: str) -> int:
    return next(n for n, step in enumerate(STEPS, start=1) if step["title"] == title)


def test_a_step_begins_with_its_first_figure_on_stage(page: Any) -> None:
    visit(page, f"{PLACE}&stop={number_of('Scores')}&stage=1")
    expect(page.locator("figure.heatmap.staged")).to_be_visible()
    page.keyboard.press("f")
    expect(page.locator("figure.flowboxes.staged")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("figure.heatmap.staged")).to_be_visible()
    assert "stage=1" in page.url


def test_the_diagram_of_the_next_token_fits_the_stage(page: Any) -> None:
    visit(page, f"{PLACE}&stop={number_of('The next token')}&stage=2")
    for part in (".insight", ".tokens", "[id='box-decoder.distribution'] canvas"):
        expect(page.locator(f"figure.flowboxes.staged {part}")).to_be_in_viewport(ratio=0.95)


def test_scaled_scores_keep_the_colours_of_those_before(page: Any) -> None:
    ends = []
    for title in ("Scores", "Scale"):
        visit(page, f"{PLACE}&stop={number_of(title)}")
        ends.append(page.locator(".openbox .scale span").all_inner_texts()[-1])
    assert ends[0] == ends[1]


def test_on_a_phone_back_and_next_stay_at_the_bottom(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, f"{PLACE}&stop=3")
    for _ in range(2):
        box = page.get_by_role("button", name="Next").bounding_box()
        assert 780 < box["y"] < box["y"] + box["height"] <= 844
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
    end = page.locator(".live").bounding_box()
    assert end["y"] + end["height"] <= box["y"]
