"""The page in a real browser: the screen shows the numbers of the model, by mouse and by keys."""

import csv
import json
import math
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
import uvicorn
from matplotlib import colormaps
from tests.web.small_pages import SENTENCE, make_runs

from manyheads.web.app import build_app, listen

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs chromium", allow_module_level=True)

expect = playwright_api.expect
PATIENCE = 60_000  # milliseconds; a busy machine draws slowly
expect.set_options(timeout=PATIENCE)
PAGES = ("/", "/train", "/flow", "/attention", "/translate", "/decode", "/tokens")
PAGES += ("/positions", "/lens", "/fill", "/image", "/music", "/watch", "/tour", "/quiz")
TRANSLATOR = f"/attention?run=translator&text={quote(SENTENCE)}"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
STOPS = ((255, 255, 255), (196, 203, 219), (132, 144, 178), (70, 82, 125), (16, 20, 48))
PIXELS = """canvas => {
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return [canvas.height, canvas.width, Array.from(image.data)];
}"""


def scale(stops: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """256 colours between stops; half up, as JavaScript rounds."""
    at = np.linspace(0, len(stops) - 1, 256)
    parts = [np.interp(at, range(len(stops)), part) for part in zip(*stops, strict=True)]
    return np.floor(np.stack(parts, -1) + 0.5)


INK = scale(STOPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as place:
        yield place


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The page over a folder, in a thread of this process; its address."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(build_app(folder), log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        actual = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield actual
        actual.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page on which nothing may go wrong: no error in its console, no request elsewhere."""
    context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE)
    made = context.new_page()
    wrong: list[str] = []
    made.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("request", lambda request: wrong.extend(_elsewhere(request.url)))
    yield made
    context.close()
    assert wrong == []


def _elsewhere(url: str) -> list[str]:
    local = urlsplit(url).hostname == "127.0.0.1" or url.startswith(("blob:", "data:"))
    return [] if local else [url]


def visit(page: Any, place: str) -> None:
    page.goto(place)
    page.locator("main h1").first.wait_for()  # a page inside the Tour has its own
    settled(page)


def settled(page: Any) -> None:
    """All that was asked for is drawn."""
    page.locator("main:not([aria-busy])").wait_for()


def save(page: Any, part: Any, kind: str) -> Any:
    """The download of a figure as PNG, SVG, CSV or HTML, by its Save menu."""
    part.locator(".saving summary").first.click()
    with page.expect_download() as download:
        part.get_by_role("button", name=kind, exact=True).click()
    return download.value


def pixels(page: Any, selector: str) -> np.ndarray:
    height, width, data = page.locator(selector).first.evaluate(PIXELS)
    return np.array(data, dtype=np.uint8).reshape(height, width, 4)


def requested(page: Any, address: str, **body: Any) -> dict[str, Any]:
    """The trace that the page shows, by the server's own word."""
    request = urllib.request.Request(
        f"{address}/api/trace", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        actual: dict[str, Any] = json.loads(answer.read())
    return actual


def reads(text: str, value: float) -> bool:
    """Whether a text ends in this number, as the page writes it: in three digits, or in percent."""
    sign, digits, unit = re.findall(r"(< |> |\u2212)?(\d+(?:\.\d+)?(?:e\u2212\d+)?)( %)?", text)[-1]
    if sign == "< ":
        return 0 < value < 1e-4
    if sign == "> ":
        return 0.9995 <= value < 1
    number = float(digits.replace("\u2212", "-")) * (0.01 if unit else 1)
    last = 10.0 ** (math.floor(math.log10(abs(value) or 1)) - 2)
    seen = -number if sign else number
    return abs(seen - value) <= 0.51 * max(min(last, 1), 1e-4 if unit else 0)


def weights(address: str, trace: str, name: str, layer: int, head: int) -> np.ndarray:
    place = f"{address}/api/trace/{trace}/tensor/{name}.weights?layer={layer}&head={head}"
    with urllib.request.urlopen(place) as answer:
        shape = [int(size) for size in answer.headers["X-Shape"].split(",")]
        return np.frombuffer(answer.read(), "<f4").reshape(shape)


def test_every_page_loads_whole(page: Any) -> None:
    """For each kind of model, and with nothing wider than the screen of a laptop or a phone."""
    others = ["/attention?run=deep/writer", "/attention?run=reader"]
    for place in [*(f"{item}?run=translator" for item in PAGES), *others]:
        visit(page, place)
        expect(page.locator("#problem")).to_be_hidden()
        for width, height in ((390, 844), (1280, 800)):
            page.set_viewport_size({"width": width, "height": height})
            wide = page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, place


def test_a_pixel_is_the_number_of_the_tensor(page: Any, address: str) -> None:
    """Every cell of the large map and of a small one: white to ink, or matplotlib's viridis."""
    viridis = (np.array([colormaps["viridis"](i)[:3] for i in range(256)]) * 255).round()
    trace = requested(page, address, run="translator", text=SENTENCE)["trace"]
    large = weights(address, trace, "encoder.self", 1, 0)
    for palette, table in (("", INK), ("&palette=viridis", viridis)):
        visit(page, f"{TRANSLATOR}&map=encoder.self&layer=1&head=0{palette}")
        expected = table[(large * 255).round().astype(int)]
        assert np.array_equal(pixels(page, ".plane > canvas")[..., :3], expected)
        small = "[aria-label^='layer 2, head 1'] canvas"
        assert np.array_equal(pixels(page, small)[..., :3], expected)


def test_another_sentence_has_other_maps(page: Any) -> None:
    visit(page, f"{TRANSLATOR}&map=encoder.self")
    before = pixels(page, ".plane > canvas")
    page.get_by_label("Text").fill("The old house.")
    expect(page).to_have_url(re.compile("old"))
    settled(page)
    expect(page.locator(".labels")).to_contain_text("house")
    after = pixels(page, ".plane > canvas")
    assert before.shape != after.shape or not np.array_equal(before, after)


def test_a_head_knocked_out_changes_the_output(page: Any) -> None:
    visit(page, f"{TRANSLATOR}&target=Der+Hund.&layer=0&head=0")
    output = page.locator(".outputs > div")
    full = output.inner_text()
    place = page.locator("#knock").bounding_box()
    page.get_by_role("button", name="Knock out this head").click()
    expect(output).to_have_count(2)
    settled(page)
    assert output.nth(0).inner_text().split("\n")[1:] == full.split("\n")[1:]
    assert output.nth(1).inner_text().split("\n")[-1] != full.split("\n")[-1]
    assert "off=decoder.cross.0.0" in page.url
    now = page.locator("#knock").bounding_box()
    assert (now["x"], now["y"]) == (place["x"], place["y"])  # nothing above it has moved
    expect(page.locator(".near .insight")).to_contain_text(re.compile("^Without head 1·1"))
    page.keyboard.press("x")  # and back again, by its key
    expect(output).to_have_count(1)
    assert output.inner_text() == full


def test_the_sweep_is_the_knock_out_of_every_head(page: Any, address: str) -> None:
    visit(page, f"{TRANSLATOR}&target=Der+Hund.&layer=1&head=1&sweep=1")
    body = {"run": "translator", "text": SENTENCE, "target": "Der Hund."}
    full, without = (
        requested(page, address, **body, off=off)["output"]["log_probability"]
        for off in ([], ["decoder.cross.1.1"])
    )
    readout = page.locator(".split .stacked > .heatmap .readout")
    expect(readout).to_contain_text("head 2")
    assert reads(readout.inner_text(), without - full)
    size = page.locator(".split .stacked > .heatmap canvas").first
    assert size.evaluate("c => [c.height, c.width]") == [6, 2]
    # The grid, which is on the first screen, has the same numbers below its heads.
    number = page.locator(".heads button .change")
    expect(number).to_have_count(4)
    assert reads(number.nth(3).inner_text(), round(without - full, 4))
    assert page.evaluate("scrollY") == 0


def test_the_sweep_opens_the_head_that_matters_most(page: Any) -> None:
    visit(page, f"{TRANSLATOR}&target=Der+Hund.&layer=1&head=1")
    page.get_by_role("button", name="Sweep all heads").click()
    story = page.locator(".split .stacked > .heatmap .insight")
    expect(story).to_contain_text("matters most")
    kind, layer, head = re.match(r"(\w+), head (\d+)·(\d+) matters", story.inner_text()).groups()  # type: ignore[union-attr]
    title = page.locator(".near .heatmap h2")
    expect(title).to_have_text(f"{kind}, layer {layer}, head {head}")
    # Another head stays chosen, and the cells of its map are square.
    page.locator(".heads button[tabindex='-1']").first.click()
    expect(title).not_to_have_text(f"{kind}, layer {layer}, head {head}")
    canvas = page.locator(".near .heatmap .plane > canvas")
    wide, tall = canvas.evaluate("c => [c.clientWidth / c.width, c.clientHeight / c.height]")
    assert wide == pytest.approx(tall, rel=0.05)


def test_the_next_head_is_that_of_the_grid(page: Any) -> None:
    """In the order in which the heads are sorted; after the last one the first."""
    visit(page, f"{TRANSLATOR}&map=encoder.self&by=entropy")
    order = page.locator(".heads button").evaluate_all(
        "all => all.map((one) => one.querySelector('span').textContent.split(' ')[0])"
    )
    assert order != sorted(order)
    chosen = page.locator(".heads button[aria-pressed=true] span").first
    start = order.index(chosen.inner_text().split()[0])
    for step in range(1, len(order) + 1):
        page.locator("main").press("]")
        expect(chosen).to_contain_text(order[(start + step) % len(order)])


def test_a_link_restores_what_was_seen(page: Any) -> None:
    visit(page, TRANSLATOR)
    page.get_by_role("button", name="Encoder").click()
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Sort by").select_option("entropy")
    page.get_by_text("Options", exact=True).click()
    page.get_by_role("button", name=re.compile("^layer 2, head 2")).click()
    page.get_by_role("button", name="Lines").click()
    page.locator(".queries > div").nth(2).click()
    expect(page.locator(".lines .readout")).to_contain_text("attends to")
    settled(page)
    seen = page.locator("main").inner_text()
    link = page.url
    visit(page, "/tokens")
    visit(page, link)
    expect(page.locator(".lines .readout")).to_contain_text("attends to")
    assert page.locator("main").inner_text() == seen
    page.go_back()
    expect(page.get_by_role("heading", name="Tokens")).to_be_visible()


def tab_to(page: Any, words: str) -> None:
    """By the Tab key to the next control with these words on it."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.textContent") == words:
            return
    raise AssertionError(f"'{words}' is not reached by Tab")


def test_keys_alone_walk_the_page(page: Any, address: str) -> None:
    visit(page, f"{TRANSLATOR}&map=encoder.self&cell=0,0")
    tab_to(page, "Lines")
    for key, view in (("Enter", "Lines"), ("Shift+Tab", "Matrix"), ("Enter", "Matrix")):
        page.keyboard.press(key)  # a redraw keeps the focus
        settled(page)
        assert page.evaluate("() => document.activeElement.textContent") == view
    tab_to(page, "")
    assert page.evaluate("() => document.activeElement.matches('.plane > canvas')")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    trace = requested(page, address, run="translator", text=SENTENCE)
    expected = weights(address, trace["trace"], "encoder.self", 0, 0)[1, 2]
    readout = page.locator(".heatmap .readout").inner_text()
    assert reads(readout, expected)
    assert "cell=1%2C2" in page.url
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name="Encoder, layer 1, head 2")).to_be_visible()
    page.get_by_role("button", name=re.compile("^layer 1, head 2")).focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("heading", name="Encoder, layer 2, head 2")).to_be_visible()
    settled(page)
    label = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert label.startswith("layer 2, head 2")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("knock")
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    staged = page.locator("figure.staged")
    expect(staged).to_have_count(1)
    expect(page.locator("header")).to_be_hidden()
    box = staged.bounding_box()
    assert (box["width"], box["height"]) == (1280, 800)
    expect(staged.locator(".scale .bar")).to_be_visible()
    label = page.locator(".staged .labels text").first
    assert label.evaluate("e => parseFloat(getComputedStyle(e).fontSize) * 2.5") >= 28
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    expect(staged.locator("figcaption")).to_have_text("Encoder, layer 2, head 1")
    page.keyboard.press("Escape")
    expect(page.locator("header")).to_be_visible()


def test_a_query_stays_when_another_head_is_shown(page: Any, address: str) -> None:
    """The audience follows one word: the map shows where it attends in each head."""
    visit(page, f"{TRANSLATOR}&map=decoder.cross&layer=0&head=0&cell=2,1")
    trace = requested(page, address, run="translator", text=SENTENCE)
    rows = next(one for one in trace["maps"] if one["name"] == "decoder.cross")["rows"]
    columns = next(one for one in trace["maps"] if one["name"] == "decoder.cross")["columns"]
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name="Cross, layer 1, head 2")).to_be_visible()
    settled(page)
    row = weights(address, trace["trace"], "decoder.cross", 0, 1)[2]
    readout = page.locator(".heatmap .readout").inner_text()
    assert readout.startswith(f"“{rows[2].strip()}” attends to “{columns[row.argmax()].strip()}”")
    assert reads(readout, row.max())
    page.get_by_role("button", name=re.compile("^layer 2, head 1")).click()
    expect(page.locator(".heatmap .readout")).to_contain_text(f"“{rows[2].strip()}” attends to")


def test_the_map_is_in_the_window(page: Any) -> None:
    for width, height in ((1280, 800), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        visit(page, f"/attention?run=translator&text={quote('The dog sees it.')}")
        box = page.locator(".near figure.heatmap").bounding_box()
        assert box["y"] + box["height"] <= height
        canvas = page.locator(".near .plane > canvas").bounding_box()
        assert canvas["width"] > 0.6 * box["width"]


def test_options_move_nothing(page: Any) -> None:
    visit(page, TRANSLATOR)
    options = page.get_by_text("Options", exact=True)
    before = options.bounding_box(), page.locator(".split").bounding_box()
    options.click()
    expect(page.get_by_label("Sort by")).to_be_visible()
    assert (options.bounding_box(), page.locator(".split").bounding_box()) == before


def test_what_is_saved_opens_offline(page: Any, browser: Any, address: str, tmp_path: Path) -> None:
    visit(page, f"{TRANSLATOR}&map=encoder.self")
    saved = {}
    for kind in ("PNG", "SVG", "CSV", "HTML"):
        download = save(page, page.locator(".heatmap"), kind)
        saved[kind] = tmp_path / download.suggested_filename
        download.save_as(saved[kind])
    assert saved["CSV"].name == "translator-encoder.self-1-1.csv"
    assert saved["PNG"].read_bytes().startswith(b"\x89PNG")
    trace = requested(page, address, run="translator", text=SENTENCE)
    expected = weights(address, trace["trace"], "encoder.self", 0, 0)
    with saved["CSV"].open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0][1:] == trace["maps"][0]["columns"]
    assert np.array_equal(np.array([row[1:] for row in rows[1:]], dtype="f4"), expected)
    single = browser.new_context(offline=True).new_page()
    for kind in ("SVG", "HTML"):
        single.goto(saved[kind].as_uri())
        assert single.locator("rect").count() > expected.size
        for known in ("layer 1", "run: translator", SENTENCE, "layer: 1", "head: 1"):
            expect(single.locator("body" if kind == "HTML" else "svg")).to_contain_text(known)
    single.context.close()
    for place, part in (("/train", ".chart"), (f"{TRANSLATOR}&view=lines", ".lines")):
        visit(page, place)
        download = save(page, page.locator(part).first, "PNG")
        assert Path(download.path()).read_bytes().startswith(b"\x89PNG")


def test_curves_grow_while_a_run_trains(page: Any, folder: Path) -> None:
    visit(page, "/train?run=translator")
    expect(page.locator("p[role=status]")).to_contain_text("step 30")
    with (folder / "translator" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "split": "train", "loss": 0.125}\n')
    expect(page.locator("p[role=status]")).to_contain_text("step 31")
    chart = page.locator(".axes").first
    chart.focus()
    page.keyboard.press("End")
    expect(page.locator(".chart .readout").first).to_have_text("step 31: train 0.125")


def test_merges_are_walked_one_by_one(page: Any) -> None:
    visit(page, "/tokens?run=translator&text=unbelievable&step=0")
    pieces = page.locator(".merges .top")  # the roots of the trees
    assert pieces.count() == len("unbelievable")
    page.get_by_label("Step").focus()
    page.keyboard.press("ArrowRight")
    expect(pieces).to_have_count(len("unbelievable") - 1)
    new = page.locator(".merges .strong")
    expect(new).to_have_count(1)
    # Above the two that it joins, which stay in sight.
    letters = page.locator(".merges .past")
    expect(letters).to_have_count(2)
    box, parts = new.bounding_box(), [one.bounding_box() for one in letters.all()]
    assert all(box["y"] + box["height"] <= part["y"] for part in parts)
    assert abs(box["x"] - min(part["x"] for part in parts)) < 1
    assert new.inner_text() == "".join(letters.all_inner_texts())
    assert "step=1" in page.url
    page.keyboard.press("End")
    tokens = page.locator(".tokens > .chips .piece").all_inner_texts()
    assert pieces.all_inner_texts() == tokens
    pairs = f"attention compares {len(tokens) ** 2} pairs instead of {12**2}"
    expect(page.locator(".tokens .insight")).to_contain_text(pairs)


def test_text_is_never_markup(page: Any) -> None:
    attack = "<img src=x onerror=alert(1)><b>dog</b>"
    for place in ("/attention", "/translate", "/decode", "/tokens"):
        visit(page, f"{place}?run=translator&text={quote(attack)}&target={quote(attack)}")
        expect(page.locator("#problem")).to_be_hidden()
        assert page.locator("main img, main b").count() == 0


def test_what_fails_is_said_in_words(browser: Any, address: str) -> None:
    """The console says it too, that an answer was none: so not on the page where nothing may."""
    page = browser.new_page(base_url=address)
    page.goto("/attention?run=gone")
    expect(page.get_by_role("alert")).to_contain_text("gone")
    page.goto(f"/attention?run=translator&text={quote('dog ' * 500)}")
    expect(page.get_by_role("alert")).to_contain_text("tokens")
    page.get_by_label("Text").fill("The dog.")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.close()
