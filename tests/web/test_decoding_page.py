"""Translate and Decode in a real browser: by hand and by keys, with the model's own numbers."""

import csv
import json
import re
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.web.small_pages import SENTENCE
from tests.web.test_page import (  # noqa: F401 (the fixtures)
    address,
    browser,
    expect,
    folder,
    page,
    pixels,
    reads,
    save,
    settled,
    visit,
)

from manyheads.phrasebook import sentences

HERE = f"run=translator&text={quote(SENTENCE)}&beam=3"


def reported(address: str, path: str, **body: Any) -> dict[str, Any]:  # noqa: F811
    """The server's own word."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request) as answer:
        actual: dict[str, Any] = json.loads(answer.read())
    return actual


def saved(page: Any, part: str, kind: str, place: Path) -> Path:  # noqa: F811
    download = save(page, page.locator(part), kind)
    path = place / download.suggested_filename
    download.save_as(path)
    return path


def test_a_translation_follows_what_is_typed(page: Any) -> None:  # noqa: F811
    visit(page, f"/translate?{HERE}&layer=0&head=1")
    hypotheses = page.locator(".hypotheses button")
    expect(hypotheses).to_have_count(3)
    before = pixels(page, ".plane > canvas")
    page.get_by_label("Text", exact=True).press_sequentially(" The old house.", delay=5)
    expect(page).to_have_url(re.compile("old\\+house"))
    settled(page)
    expect(page.locator(".labels").first).to_contain_text("house")
    assert pixels(page, ".plane > canvas").shape != before.shape
    # What differs from the first hypothesis is marked, and a screen reader hears it.
    second = "".join(hypotheses.nth(1).inner_text().split("changed:")).split()
    hypotheses.nth(1).click()
    expect(page.locator("output.sentence")).to_have_text(" ".join(second))
    settled(page)
    assert "which=1" in page.url


def test_another_word_is_chosen_and_the_rest_is_written_anew(
    page: Any,  # noqa: F811
    address: str,  # noqa: F811
) -> None:
    visit(page, f"/translate?{HERE}")
    first = page.locator(".written button").first
    first.focus()
    page.keyboard.press("Enter")
    others = page.locator("[aria-label=Alternatives] tr")
    expect(others).to_have_count(10)
    ten = reported(address, "/api/next", run="translator", text=SENTENCE, prefix=[], count=20)
    allowed = [item for item in ten["top"] if item["after"] > 0]
    for text, item in zip(others.all_inner_texts(), allowed, strict=False):
        assert reads(text, item["before"])
    settled(page)
    others.nth(4).get_by_role("button").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".written .given")).to_have_count(1)
    expect(page.locator(".written .given")).to_be_focused()
    settled(page)
    assert f"prefix={allowed[4]['token']}" in page.url
    requested = {"run": "translator", "text": SENTENCE, "beam": 3}
    actual = reported(address, "/api/translate", **requested, prefix=[allowed[4]["token"]])
    expected = actual["hypotheses"][0]["text"].strip()
    expect(page.locator("output.sentence")).to_have_text(expected)
    gold = page.get_by_text("No gold alignment")  # arrives after the translation
    gold.wait_for()
    seen, link = page.locator("main").inner_text(), page.url
    visit(page, link)
    gold.wait_for()
    assert page.locator("main").inner_text() == seen
    page.get_by_role("button", name="Remove the forced").click()
    expect(page.locator(".written .given")).to_have_count(0)


def test_gold_stands_beside_the_map_of_an_own_sentence(
    page: Any,  # noqa: F811
    address: str,  # noqa: F811
) -> None:
    [pair, *_] = sentences("en-de", "test", 3)
    visit(page, f"/translate?run=translator&text={quote(pair.source)}&layer=1&head=0")
    # Another translation than the phrasebook's: its words are a choice, and have rings.
    page.get_by_role("button", name="Phrasebook words").click()
    gold = reported(address, "/api/gold", run="translator", text=pair.source)["pair"]
    error = f"{100 * gold['errors']['weights'][1][0]:.3g} %"
    expect(page.locator(".alignment .note").first).to_contain_text(error)
    expect(page.get_by_role("heading", name=f"Reference: “{pair.target}”")).to_be_visible()
    expect(page.locator(".insight").first).to_contain_text("Not the reference. In the reference:")
    expect(page.locator(".ring-key").first).to_be_visible()
    rings = page.locator(".heatmap [data-ring]")
    expect(rings).to_have_count(len(pair.alignment))
    cells = rings.evaluate_all("all => all.map(ring => ring.dataset.ring.split(',').map(Number))")
    assert {(source, target) for target, source in cells} == pair.alignment
    # The translation that is shown is compared, not always the first.
    requested = {"run": "translator", "text": pair.source, "beam": 2}
    second = reported(address, "/api/translate", **requested)["hypotheses"][1]["text"]
    other = {"phrasebook": True, "looked": 1, "examples": [], "pair": {**gold, "target": second}}
    page.route("**/api/gold", lambda route: route.fulfill(json=other))
    place = f"/translate?run=translator&text={quote(pair.source)}&beam=2"
    for which, words in (
        (1, "The phrasebook has the same"),
        (0, f"Phrasebook translation: {second}"),
    ):
        visit(page, f"{place}&which={which}")
        expect(page.locator(".alignment .goldnote")).to_contain_text(words.strip())


def test_an_empty_text_asks_for_one(page: Any) -> None:  # noqa: F811
    visit(page, "/translate?run=translator&text=")
    expect(page.locator(".insight").first).to_have_text("Type a sentence to translate it.")
    expect(page.locator(".heatmap").first).to_be_hidden()
    page.get_by_label("Text", exact=True).press_sequentially("The dog.")
    expect(page.locator(".heatmap").first).to_be_visible()


def test_nothing_moves_when_the_gold_alignment_arrives(page: Any) -> None:  # noqa: F811
    [pair, *_] = sentences("en-de", "test", 3)
    waiting: list[Any] = []
    page.add_init_script("""window.moves = [];
    new PerformanceObserver((list) => window.moves.push(...list.getEntries()))
      .observe({ type: "layout-shift", buffered: true });""")
    page.route("**/api/gold", lambda route: waiting.append(route))
    for size in ((1280, 800), (390, 844)):
        page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        visit(page, f"/translate?run=translator&text={quote(pair.source)}")
        expect(page.locator(".heatmap .plane > canvas").first).to_be_visible()
        page.wait_for_timeout(300)
        page.evaluate("() => (window.moves.length = 0)")
        waiting.pop().continue_()
        expect(page.get_by_text("Alignment error rate")).to_be_visible()
        page.wait_for_timeout(300)
        assert page.evaluate("() => window.moves.length") == 0


def test_the_tree_shows_how_each_hypothesis_ends(page: Any, address: str) -> None:  # noqa: F811
    visit(page, f"/decode?{HERE}")
    actual = reported(address, "/api/decode", run="translator", text=SENTENCE, beam=3)
    ends = [node for node in actual["nodes"] if node["place"]]
    assert len(ends) == len(actual["beam"])
    for end in ends:
        box = page.locator(f"[data-node='{actual['nodes'].index(end)}']")
        expect(box).to_contain_text(f"{end['place']}. ")
        score = actual["beam"][end["place"] - 1]["score"]
        expect(box).to_contain_text(f"{score:.2f}".replace("-", "−"))
    frame, box = page.locator(".beam .scroll").bounding_box(), None
    for box in (one.bounding_box() for one in page.locator("[data-state=ended] rect").all()):
        assert frame["x"] <= box["x"]
        assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    assert box is not None
    best = next(at for at, node in enumerate(actual["nodes"]) if node["place"] == 1)
    page.locator(f"[data-node='{best}']").click()
    readout = page.locator(".beam .readout")
    expect(readout).to_contain_text("ended, result 1")
    expect(readout).to_contain_text(actual["beam"][0]["text"])


def test_save_stands_next_to_the_legend_of_the_tree(page: Any) -> None:  # noqa: F811
    visit(page, "/decode?run=translator")
    legend, save = (
        page.locator(f".beam .below {part}").bounding_box() for part in (".note", ".saving")
    )
    assert legend["y"] < save["y"] + save["height"] < legend["y"] + legend["height"] + 20
    assert legend["height"] < 40  # one line


def test_the_chosen_token_is_read_next_to_the_tree(
    page: Any,  # noqa: F811
) -> None:
    """Its line and the button are in the window, and the path to it is coloured."""
    page.set_viewport_size({"width": 1280, "height": 800})
    visit(page, f"/decode?{HERE}")
    node = page.locator("[data-node][data-state=kept]").nth(4)
    node.click()
    expect(page.locator(".beam .readout")).to_contain_text("kept")
    for part in (".beam .readout", ".beam .chosen button"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= 800
    chosen = page.locator('.tree path[stroke="#d55e00"]')
    step = int(re.search("Step (\\d+)", page.locator(".beam .readout").inner_text())[1])  # type: ignore[index]
    expect(chosen).to_have_count(step)


def test_sampling_has_bars_of_its_own_where_it_differs(
    page: Any,  # noqa: F811
    address: str,  # noqa: F811
) -> None:
    answer = reported(address, "/api/next", run="translator", text=SENTENCE, prefix=[])
    same = {**answer, "top": [{**one, "after": one["before"]} for one in answer["top"]]}
    page.route("**/api/next", lambda route: route.fulfill(json=same))
    visit(page, f"/decode?{HERE}")
    expect(page.locator(".chances .key").first).to_be_hidden()
    expect(page.locator(".chances tr").first.locator(".level")).to_have_count(1)
    page.unroute("**/api/next")
    page.get_by_label("Temperature").fill("2")
    page.keyboard.press("Enter")
    expect(page.locator(".chances tr").first.locator(".level")).to_have_count(2)
    expect(page.locator(".chances .key").nth(1)).to_have_text("sampling")


def test_the_tree_on_screen_is_the_search(
    page: Any,  # noqa: F811
    address: str,  # noqa: F811
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    for run in ("translator", "deep/writer"):
        visit(page, f"/decode?run={run}&text={quote(SENTENCE)}&beam=3&limit=8")
        requested = {"run": run, "text": SENTENCE, "beam": 3, "limit": 8}
        actual = reported(address, "/api/decode", **requested)
        states = page.locator("[data-node]").evaluate_all("all => all.map(n => n.dataset.state)")
        assert sorted(states[1:]) == sorted(node["state"] for node in actual["nodes"])
        scores = page.locator(".ways .note").all_inner_texts()
        assert reads(scores[1], actual["beam"][0]["score"])
    with saved(page, ".beam", "CSV", tmp_path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["score"]) for row in rows] == [node["score"] for node in actual["nodes"]]
    single = browser.new_context(offline=True).new_page()
    single.goto(saved(page, ".beam", "HTML", tmp_path).as_uri())
    assert single.locator("[data-node]").count() == len(actual["nodes"]) + 1
    single.context.close()
    assert saved(page, ".chances", "PNG", tmp_path).read_bytes().startswith(b"\x89PNG")


def test_keys_walk_the_tree_step_by_step(page: Any, address: str) -> None:  # noqa: F811
    visit(page, f"/decode?{HERE}")
    actual = reported(address, "/api/decode", run="translator", text=SENTENCE, beam=3)
    tree = page.locator(".tree")
    tree.focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    node = actual["nodes"][1]
    expect(page.locator(".beam .readout")).to_contain_text("Step 1")
    assert reads(
        page.locator(".beam .readout").inner_text().split(", score")[0], node["log_probability"]
    )
    expect(page).to_have_url(re.compile("node=1(&|$)"))
    settled(page)
    after = reported(
        address, "/api/next", run="translator", text=SENTENCE, prefix=[node["token"]], top_k=2
    )
    page.get_by_label("Top-k").fill("2")
    page.keyboard.press("Enter")
    numbers = page.locator(".chances tr").first.locator(".of")
    expect(page.locator(".chances tr").nth(2).locator(".of").nth(1)).to_have_text("removed")
    assert reads(numbers.nth(1).inner_text(), after["top"][0]["after"])
    expect(page.locator(".chances")).to_contain_text("2 of 600 tokens")
    page.get_by_label(re.compile("^Step")).focus()
    page.keyboard.press("Home")
    first = [item for item in actual["nodes"] if item["step"] == 1]
    expect(page.locator("[data-node]")).to_have_count(len(first) + 1)
    assert "step=1" in page.url
    page.get_by_role("button", name="Continue from this token").click()
    expect(page.get_by_role("button", name="Remove the forced tokens")).to_be_visible()
    settled(page)
    assert f"prefix={node['token']}" in page.url


def test_the_stage_follows_the_step(page: Any) -> None:  # noqa: F811
    """The candidates of the step, the title and the sentence are in the window, without a mouse."""
    visit(page, f"/decode?{HERE}&stage=1")
    for step in (1, 2, 3, 3):
        page.locator("main").press("ArrowRight")
        expect(page.locator(".beam .field span")).to_have_text(f"Step {step} of 3")
    page.locator("main").press("ArrowLeft")
    expect(page.locator(".beam .field span")).to_have_text("Step 2 of 3")
    page.locator("main").press("ArrowRight")
    settled(page)
    # All candidates of the step, the title, and below the tree the sentence of the step.
    seen = """() => {
      const of = (part) => document.querySelector(part).getBoundingClientRect();
      const parts = ["[data-here] rect", ".beam h2", ".insight", ".tree svg"].map(of);
      const isInside = ({ left, right, top, bottom }) =>
        left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight;
      return parts.every(isInside) && parts[3].bottom <= parts[2].top;
    }"""
    page.wait_for_function(seen)
    least = """() => {
      const tree = document.querySelector(".beam .tree svg");
      const zoom = tree.getBoundingClientRect().width / tree.width.baseVal.value;
      const sizes = [...tree.querySelectorAll("text")].map((one) => one.getAttribute("font-size"));
      return zoom * Math.min(...sizes);
    }"""
    assert page.evaluate(least) >= 28


def test_dropped_tokens_can_be_read_on_stage(page: Any) -> None:  # noqa: F811
    def lengthen(route: Any) -> None:
        response = route.fetch()
        search = response.json()
        for node in search["nodes"]:
            node["piece"] = " Dampfschiffahrt" if node["state"] == "pruned" else node["piece"]
        route.fulfill(response=response, json=search)

    page.route("**/api/decode", lengthen)
    visit(page, f"/decode?{HERE}&stage=1&step=1")
    dropped = page.locator("[data-state=pruned] text[data-token]")
    expect(dropped.first).to_have_text("·Dampfschiffahrt")
    assert {one.text_content() for one in dropped.all()} == {"·Dampfschiffahrt"}


def test_the_first_text_is_one_that_greedy_search_misses(
    page: Any,  # noqa: F811
    address: str,  # noqa: F811
) -> None:
    with urllib.request.urlopen(f"{address}/api/missed?run=translator") as answer:
        text = json.loads(answer.read())["text"]
    visit(page, "/decode?run=translator")
    expect(page.get_by_label("Text", exact=True)).to_have_value(text)


def test_the_sentence_of_the_page_follows_the_step(page: Any, address: str) -> None:  # noqa: F811
    """The last candidate that continues, and the first that is dropped; each with its rank."""
    visit(page, f"/decode?{HERE}&step=1")
    actual = reported(address, "/api/decode", run="translator", text=SENTENCE, beam=3)
    column = [node for node in actual["nodes"] if node["step"] == 1]
    insight = page.locator(".insight").first
    expect(insight).to_contain_text(f"of {actual['vocabulary']} continuations the beam keeps 3")
    expect(page.locator("[data-cut]")).to_have_count(1)
    cut = page.locator("[data-cut='1']").bounding_box()["y"]
    for number, node in enumerate(column):
        box = page.locator(f"[data-node='{number}']")
        assert (box.bounding_box()["y"] > cut - 3) == (node["state"] == "pruned")
    page.locator("[data-node='4']").hover()
    expect(page.locator(".beam .readout")).to_contain_text(
        "candidate 5 of 6, dropped, because only 3"
    )
    page.get_by_label(re.compile("^Step")).focus()
    page.keyboard.press("ArrowRight")
    expect(insight).to_contain_text("Step 2 of 3")
    expect(insight).to_contain_text(f"of {3 * actual['vocabulary']:,} continuations")
    page.keyboard.press("End")
    expect(insight).to_contain_text("Greedy search")
    # Hypotheses that are open when the search stops are not drawn like those that continue.
    last = page.locator("[data-state=kept]").last
    assert last.locator("rect").get_attribute("fill") == "none"


def test_what_is_typed_is_never_markup(page: Any) -> None:  # noqa: F811
    attack = quote("<img src=x onerror=alert(1)><b>dog</b>")
    for place in (
        f"/translate?run=translator&text={attack}&at=0",
        f"/decode?run=deep/writer&text={attack}",
    ):
        visit(page, place)
        expect(page.locator("#problem")).to_be_hidden()
        assert page.locator("main img, main b").count() == 0
