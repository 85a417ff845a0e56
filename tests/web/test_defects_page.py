"""In a real browser: states that release 0.1 showed wrongly."""

import io
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from tests.web.small_pages import SENTENCE
from tests.web.test_decoding_page import reported
from tests.web.test_page import (  # noqa: F401 (the fixtures)
    TRANSLATOR,
    address,
    browser,
    expect,
    folder,
    page,
    pixels,
    save,
    settled,
    visit,
)

CUT = """svg => [...svg.querySelectorAll("text")].filter((text) => {
  const [box, all] = [text.getBoundingClientRect(), svg.getBoundingClientRect()];
  return box.left < all.left - 0.5 || box.right > all.right + 0.5 || box.bottom > all.bottom + 0.5;
}).map((text) => text.textContent)"""


@pytest.fixture
def failing_page(browser: Any, address: str) -> Any:  # noqa: F811
    """A page on which requests may fail: the browser reports them in the console."""
    made = browser.new_page(base_url=address)
    made.set_default_timeout(8000)
    yield made
    made.close()


def test_keys_work_without_focus_in_the_grid(page: Any) -> None:  # noqa: F811
    visit(page, f"{TRANSLATOR}&map=encoder.self")
    assert page.evaluate("() => document.activeElement === document.body")
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name="Encoder, layer 1, head 2")).to_be_visible()
    page.keyboard.press("x")
    expect(page.locator(".outputs > div")).to_have_count(2)
    assert "off=encoder.self.0.1" in page.url


def test_knock_out_scores_the_same_target(page: Any, address: str) -> None:  # noqa: F811
    off = ["decoder.cross.0.0", "decoder.cross.0.1", "decoder.self.0.0", "encoder.self.0.0"]
    full = reported(address, "/api/trace", run="translator", text=SENTENCE)["output"]
    answer = reported(address, "/api/trace", run="translator", text=SENTENCE, off=off)
    without = answer["output"]
    assert without["pieces"] == full["pieces"]
    assert without["log_probabilities"] != full["log_probabilities"]
    visit(page, f"{TRANSLATOR}&off={quote(' '.join(off))}")
    tokens = page.locator(".outputs > div").nth(1).locator(".chips li")
    expect(tokens).to_have_count(len(full["pieces"]))
    numbers = tokens.first.locator(".id").inner_text().split()
    assert numbers[1] == numbers[4] == "%"
    for shown, value in zip(numbers[::3], (full, without), strict=False):
        assert float(shown) == pytest.approx(
            100 * math.exp(value["log_probabilities"][0]), rel=0.01
        )


def test_live_readout_follows_the_newest_step(page: Any, folder: Path) -> None:  # noqa: F811
    metrics = folder / "translator" / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text('{"step": 1, "split": "train", "loss": 5.0}\n')
    try:
        visit(page, "/train?run=translator")
        expect(page.locator(".chart .readout").first).to_have_text("step 1: train 5")
        with metrics.open("a") as file:
            file.write('{"step": 2, "split": "train", "loss": 4.0}\n')
        expect(page.locator(".chart .readout").first).to_have_text("step 2: train 4")
    finally:
        metrics.write_text(before)


def test_translation_does_not_wait_for_the_gold_alignment(page: Any) -> None:  # noqa: F811
    waiting: list[Any] = []
    page.route("**/api/gold", lambda route: waiting.append(route))  # answered below
    page.goto(f"/translate?run=translator&text={quote(SENTENCE)}")
    page.locator("output.sentence").wait_for()
    page.locator("main:not([aria-busy])").wait_for()
    assert "No gold" not in page.locator("main").inner_text()
    gold = {"phrasebook": True, "looked": 1, "examples": [], "pair": None}
    waiting[0].fulfill(json=gold)
    expect(page.get_by_text("No gold alignment")).to_be_visible()


def test_imported_model_has_no_schedule(page: Any, folder: Path) -> None:  # noqa: F811
    metrics = folder / "reader" / "metrics.jsonl"
    metrics.write_text('{"step": 1, "split": "train", "learning_rate": 0.1}\n')
    try:
        visit(page, "/train?run=reader")
        expect(page.locator(".charts").first).to_contain_text("Learning rate")
        assert "formula" not in page.locator(".charts").first.inner_html()
    finally:
        metrics.unlink()


def test_decode_continues_with_the_next_distribution(page: Any) -> None:  # noqa: F811
    visit(page, f"/decode?run=translator&text={quote(SENTENCE)}&beam=2&node=0")
    after = page.locator(".chances figcaption").inner_text()
    assert after.startswith("The next token after")
    page.get_by_role("button", name="Continue from this token").click()
    expect(page.get_by_role("button", name="Remove the forced tokens")).to_be_visible()
    settled(page)
    assert page.locator(".chances figcaption").inner_text() == after


def test_unknown_run_offers_the_others(failing_page: Any) -> None:
    for path in ("/attention", "/train", "/watch"):
        failing_page.goto(f"{path}?run=gone")
        expect(failing_page.get_by_role("alert")).to_contain_text("gone")
        link = failing_page.locator("main").get_by_role("link", name="translator")
        expect(link).to_be_visible()
    link.click()
    expect(failing_page.get_by_role("alert")).to_be_hidden()


def test_unknown_path_shows_the_frame(failing_page: Any) -> None:
    for path in ("/none", "/attention/x"):
        answer = failing_page.goto(path)
        assert answer.status == 404
        expect(failing_page.get_by_role("heading", name="Page not found")).to_be_visible()
    failing_page.get_by_role("link", name="All runs").click()
    expect(failing_page.get_by_role("link", name="Attention").first).to_be_visible()


def test_bad_number_leaves_its_control(failing_page: Any) -> None:
    here = f"run=translator&text={quote(SENTENCE)}"
    for path, bad, control in (
        ("/decode", "temperature=99", "Temperature"),
        ("/decode", "temperature=abc", "Temperature"),
        ("/decode", "beam=99", "Beam"),
        ("/translate", "beam=99", "Beam"),
        ("/positions", "length=99999", "Positions"),
    ):
        failing_page.goto(f"{path}?{here}&{bad}")
        failing_page.locator("main:not([aria-busy]) h1").wait_for()
        named = failing_page.locator("label.field > span", has_text=control)
        expect(named.first).to_be_visible()
    failing_page.goto(f"/translate?{here}&prefix=99999999")
    expect(failing_page.get_by_role("alert")).to_be_visible()
    failing_page.get_by_role("button", name="Remove the forced tokens").click()
    expect(failing_page.get_by_role("alert")).to_be_hidden()


def test_stale_pictures_are_dimmed(failing_page: Any) -> None:
    failing_page.goto(TRANSLATOR)
    failing_page.locator(".heatmap").wait_for()
    failing_page.get_by_label("Text").fill("dog " * 500)
    expect(failing_page.get_by_role("alert")).to_contain_text("tokens")
    opacity = "figure => Number(getComputedStyle(figure).opacity)"
    assert failing_page.locator(".headgrid").evaluate(opacity) < 0.5
    failing_page.get_by_label("Text").fill("The dog.")
    expect(failing_page.get_by_role("alert")).to_be_hidden()
    assert failing_page.locator(".headgrid").evaluate(opacity) == 1


def test_flow_and_attention_label_rows_alike(page: Any, address: str) -> None:  # noqa: F811
    trace = reported(address, "/api/trace", run="translator", text=SENTENCE, target="Der Hund.")
    [cross] = [item for item in trace["maps"] if item["name"] == "decoder.cross"]
    here = f"run=translator&text={quote(SENTENCE)}&target=Der+Hund."
    labels = []
    for place in (f"/flow?{here}&box=decoder.cross.weights", f"/attention?{here}"):
        visit(page, place)
        page.locator(".heatmap").get_by_role("button", name="Table").click()
        labels.append(page.locator(".numbers th[scope=row]").all_inner_texts())
    assert labels[0] == labels[1]
    assert len(labels[0]) == len(cross["rows"])


def test_saved_map_has_no_seams(
    page: Any,  # noqa: F811
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    visit(page, f"{TRANSLATOR}&map=encoder.self")
    path = tmp_path / "map.svg"
    save(page, page.locator(".heatmap"), "SVG").save_as(path)
    single = browser.new_page(device_scale_factor=1.37)  # cells do not end at whole pixels
    single.goto(path.as_uri())
    place = single.evaluate(
        """() => {
          const cells = document.querySelector("g[shape-rendering=crispEdges]");
          for (const cell of cells.children) cell.setAttribute("fill", "#000");
          const { x, y, width, height } = cells.getBoundingClientRect();
          return { x: x + 2, y: y + 2, width: width - 4, height: height - 4 };
        }"""
    )
    drawn = np.array(Image.open(io.BytesIO(single.screenshot(clip=place))).convert("L"))
    single.close()
    assert drawn.size > 10_000
    assert drawn.max() < 40  # a seam would be white


def test_tick_labels_are_complete(page: Any, folder: Path) -> None:  # noqa: F811
    metrics = folder / "reader" / "metrics.jsonl"
    lines = [
        {"step": step, "split": "train", "loss": loss, "balance": -0.00012345 * step}
        for step, loss in ((200_000, 0.5), (500_000, 0.25), (800_000, 0.125))
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        for scale in ("", "&logx=1&logy=1"):
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 800})
                visit(page, f"/train?run=reader{scale}")
                page.locator(".more-charts > summary").click()  # it holds the chart of this metric
                for chart in page.locator(".chart svg").all():
                    assert chart.evaluate(CUT) == []
    finally:
        metrics.unlink()
