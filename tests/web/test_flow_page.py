"""The Flow page in a real browser: boxes by hand and by keys, and their numbers on screen."""

import csv
import itertools
import json
import re
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from tests.web import test_page
from tests.web.small_pages import SENTENCE
from tests.web.test_page import INK, expect, pixels, reads, save, settled, visit

from manyheads.loading import load_torch_run

folder, address = test_page.folder, test_page.address  # fixtures
browser, page = test_page.browser, test_page.page
FLOW = f"/flow?run=translator&text={quote(SENTENCE)}&target=Der+Hund."


def numbers(address: str, name: str, **which: int) -> np.ndarray:
    """A tensor of the pass that the page shows, by the server's own word."""
    body = {"run": "translator", "text": SENTENCE, "target": "Der Hund."}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/flow", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        trace = json.loads(answer.read())["trace"]
    query = "&".join(f"{key}={value}" for key, value in which.items())
    with urllib.request.urlopen(f"{address}/api/trace/{trace}/tensor/{name}?{query}") as answer:
        shape = [int(size) for size in answer.headers["X-Shape"].split(",")]
        return np.frombuffer(answer.read(), "<f4").reshape(shape)


def test_a_box_shows_the_numbers_of_the_tensor(page: Any, address: str) -> None:
    """Every pixel of the large map and of the small one; least and greatest; formula and code."""
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1&head=1&cell=1,2")
    weights = numbers(address, "decoder.cross.weights", layer=1, head=1)
    table = INK
    expected = table[(weights * 255).round().astype(int)]
    assert np.array_equal(pixels(page, ".plane > canvas")[..., :3], expected)
    assert np.array_equal(
        pixels(page, "[id='box-decoder.cross.weights'] canvas")[..., :3], expected
    )
    readout = page.locator(".heatmap .readout").inner_text()
    assert reads(readout, weights[1, 2])
    facts = page.locator(".openbox .shape").first.inner_text()
    least, greatest = re.search(r"from (\S+) to (\S+?)$", facts).groups()  # type: ignore[union-attr]
    assert reads(least, weights.min())
    assert reads(greatest, weights.max())
    expect(page.locator(".openbox .formula mfrac")).to_have_text("exp(eij)Σkexp(eik)")
    expect(page.locator(".code pre")).to_contain_text("def dense_weights(")
    expect(page.locator(".code pre")).to_be_hidden()  # until its disclosure is opened
    page.locator(".code summary").click()
    expect(page.locator(".code pre")).to_be_visible()


def test_keys_step_through_boxes_layers_and_heads(page: Any) -> None:
    visit(page, f"{FLOW}&box=decoder.self.v")
    title = page.locator(".boxhead h2")
    expect(title).to_have_text("V Decoder, layer 1 of 2: self-attention, head 1")
    page.locator("[id='box-decoder.self.v']").focus()
    for key, words in (
        ("ArrowRight", "Scores Decoder, layer 1 of 2: self-attention, head 1"),
        ("ArrowDown", "Scores Decoder, layer 2 of 2: self-attention, head 1"),
        ("]", "Scores Decoder, layer 2 of 2: self-attention, head 2"),
        ("m", "Scores + mask Decoder, layer 2 of 2: self-attention, head 2"),
    ):
        page.keyboard.press(key)
        expect(title).to_have_text(words)
    settled(page)
    expect(page.locator(".openbox .shape").first).to_contain_text("from −∞ to")
    for _ in range(4):  # faster than it is drawn: none is lost
        page.keyboard.press("ArrowLeft")
    expect(title).to_contain_text("K Decoder")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(title).to_contain_text("Scores + mask Decoder")
    settled(page)
    expect(page.locator(":focus")).to_have_id("box-decoder.self.masked")


def test_a_link_leads_to_the_same_box(page: Any, address: str) -> None:
    """Opened by Enter; in its map the keys that step through boxes walk over cells."""
    visit(page, f"{FLOW}&layer=1")
    page.get_by_role("button", name="Open Layer 2, feed-forward of the encoder").focus()
    page.keyboard.press("Enter")
    title = page.locator(".boxhead h2")
    expect(title).to_contain_text("Hidden Encoder, layer 2 of 2")
    settled(page)
    page.locator(".plane > canvas").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    rows, units = numbers(address, "encoder.feedforward.hidden", layer=1).shape
    expect(page).to_have_url(re.compile(f"cell={rows - 2}%2C{units - 1}$"))
    expect(title).to_contain_text("Hidden")
    readout = page.locator(".heatmap .readout").inner_text()
    terms = page.locator(".origin h3 small")  # requested after the page is drawn
    expect(terms).to_contain_text(readout.split(",")[0])
    seen, link = page.locator("main").inner_text(), page.url
    visit(page, "/tokens")
    visit(page, link)
    expect(terms).to_contain_text(readout.split(",")[0])
    assert page.locator("main").inner_text() == seen


def test_the_likeliest_tokens_of_the_chosen_position(page: Any, folder: Path, address: str) -> None:
    visit(page, f"{FLOW}&box=decoder.distribution&cell=1,0")
    chances = numbers(address, "decoder.distribution")
    rows = page.locator(".likeliest tr")
    assert rows.count() == chances.shape[1] == 10
    assert reads(rows.nth(0).locator("td").nth(1).inner_text(), chances[1, 0])
    page.locator(".plane > canvas").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".likeliest figcaption")).to_contain_text("position 3")
    with Path(save(page, page.locator(".likeliest"), "CSV").path()).open(
        newline="", encoding="utf-8"
    ) as file:
        saved = list(csv.reader(file))
    assert saved[0] == ["label", "probability", "logit"]
    assert np.array_equal(np.array([row[1] for row in saved[1:]], dtype="f4"), chances[2])
    known = load_torch_run(folder / "translator").tokenizer
    assert saved[1][0] in {*known.subwords(range(known.vocab_size)), "∅"}


def test_the_diagram_ends_in_the_next_tokens_of_the_chosen_row(page: Any, address: str) -> None:
    """Those after the query of the open attention, with their probabilities, also in words."""
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1&head=1&cell=1,2")
    chances = numbers(address, "decoder.distribution")
    rows = page.locator(".diagram .next .row")

    def agrees(row: int) -> None:
        for at, chance in enumerate(chances[row, :3]):
            words = "<1 %" if chance < 0.005 else f"{np.floor(100 * chance + 0.5):.0f} %"
            expect(rows.nth(at)).to_contain_text(words)

    agrees(1)
    expect(page.locator(".diagram .next strong")).to_have_text("after Der")
    page.locator(".plane > canvas").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".diagram .next strong")).not_to_have_text("after Der")
    agrees(2)
    page.keyboard.press("s")
    said = page.locator(".flowboxes.staged .insight")
    expect(said).to_contain_text("keys and values from the encoder’s output")
    assert reads(said.inner_text().rstrip("."), chances[2, 0])
    stub = page.locator('.edge.encoder[data-to="decoder.cross.1"]')
    expect(stub).to_have_count(2)  # K and V
    expect(page.locator(".diagram svg")).to_contain_text("Encoder output")


def test_boxes_are_saved_as_files_that_open_offline(
    page: Any,
    browser: Any,
    tmp_path: Path,
) -> None:
    page.set_viewport_size({"width": 1280, "height": 1400})  # high enough for all boxes
    visit(page, FLOW)
    assert page.locator(".tile canvas").count() > 20
    single = browser.new_context(offline=True).new_page()
    for kind in ("SVG", "HTML"):
        download = save(page, page.locator(".flowboxes"), kind)
        path = tmp_path / download.suggested_filename
        download.save_as(path)
        single.goto(path.as_uri())
        assert single.locator("image").count() == page.locator(".tile canvas").count()
    single.context.close()


def test_models_of_one_stack_have_one_column(page: Any) -> None:
    for run, last in (("deep/writer", "decoder"), ("reader", "encoder")):
        visit(page, f"/flow?run={run}")
        expect(page.locator("#problem")).to_be_hidden()
        expect(page.locator(".edge.encoder")).to_have_count(0)
        expect(page.locator(".tile").last).to_have_id(f"box-{last}.distribution")


def test_the_diagram_fits_the_window(page: Any) -> None:
    """Parts that are not chosen are closed until it does; a click on one opens it."""
    for height, expected in ((800, 1), (1400, 4)):
        page.set_viewport_size({"width": 1280, "height": height})
        visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1")
        box = page.locator(".flowboxes").bounding_box()
        assert box["y"] + box["height"] <= height
        assert page.locator(".diagram .group").count() >= expected
        chosen = page.locator("[id='box-decoder.cross.weights']").bounding_box()
        assert box["y"] <= chosen["y"] <= chosen["y"] + chosen["height"] <= box["y"] + box["height"]
        scroll = page.locator(".openbox .heatmap .scroll")
        assert scroll.evaluate("one => one.scrollHeight - one.clientHeight") <= 1  # no row is cut
    page.set_viewport_size({"width": 1280, "height": 800})
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1")
    page.get_by_role("button", name="Open Layer 2, self-attention of the decoder").click()
    expect(page.locator("[id='box-decoder.self.weights']")).to_be_visible()


def test_it_begins_where_words_move(page: Any, address: str) -> None:
    """At cross-attention, in the head that covers the source best, at a cell that is not empty."""
    visit(page, FLOW)
    expect(page.locator(".boxhead h2")).to_contain_text("cross-attention")
    readout = page.locator(".heatmap .readout").inner_text()
    weights = numbers(address, "decoder.cross.weights", layer=0, head=0)
    assert float(readout.split()[-2]) / 100 > 1 / weights.shape[-1]


def test_edges_follow_the_computation(page: Any, address: str) -> None:
    """Q and K to the scores, V to the mix, the encoder to every cross-attention; one layer open."""
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1")
    edges = page.locator(".edge").evaluate_all(
        "all => all.map(e => [e.dataset.from, e.dataset.to])"
    )
    cross = "decoder.cross"
    for start, end in (("q", "scores"), ("k", "scores"), ("scores", "weights"), ("v", "mix")):
        assert [f"{cross}.{start}", f"{cross}.{end}"] in edges
    targets = {end for start, end in edges if start == "encoder.states"}
    assert targets == {"decoder.cross.0", "decoder.cross.1"}
    assert page.locator("[id='box-decoder.cross.mask']").count() == 0  # would be a no-op
    drawn = page.locator(".bus").evaluate_all(
        "all => all.map(e => [Number(e.dataset.norm), Number(e.getAttribute('width'))])"
    )
    shares = [width / norm for norm, width in drawn]
    assert np.allclose(shares, shares[0], rtol=1e-3)
    totals = numbers(address, "encoder.self.sum")
    assert any(np.isclose(norm, np.linalg.norm(totals, axis=-1)[1].mean()) for norm, _ in drawn)


def test_a_cell_shows_the_sum_that_makes_it(page: Any, address: str) -> None:
    visit(page, f"{FLOW}&box=decoder.cross.scores&layer=1&head=1&cell=1,2")
    total = page.locator(".origin .total output")
    scores = numbers(address, "decoder.cross.scores", layer=1, head=1)
    assert reads(total.inner_text(), scores[1, 2])
    expect(page.locator(".origin > div small")).to_have_text("q ·k")
    place = page.locator(".origin h3 small")
    before = place.inner_text()
    page.locator(".plane > canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(place).not_to_have_text(before)
    assert reads(total.inner_text(), scores[1, 3])


def test_a_query_and_a_key_stay_from_box_to_box(page: Any) -> None:
    """From weights to the mix, whose rows are queries, and to the scores of the same pair."""
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1&head=1&cell=1,2")
    cell = page.locator(".origin small span").first
    pair = cell.inner_text()
    page.locator("[id='box-decoder.cross.mix']").click()
    expect(page.locator(".boxhead h2")).to_contain_text("Mix")
    settled(page)
    assert page.locator(".origin small span").first.inner_text().split(",")[0] == pair.split(",")[0]
    page.locator("[id='box-decoder.cross.scores']").click()
    expect(cell).to_have_text(pair)


def test_the_outline_and_the_sum_follow_the_pointer(page: Any) -> None:
    """The outline is on the cell of the read-out, whose own term is the first of the sum."""
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=1&head=1&cell=1,2")
    canvas = page.locator(".plane > canvas")
    box = canvas.bounding_box()
    columns = canvas.evaluate("one => one.width")
    rows = canvas.evaluate("one => one.height")
    place = {"x": box["width"] * 0.5 / columns, "y": box["height"] * 0.5 / rows}
    canvas.hover(position=place)
    cursor = page.locator(".heatmap .cursor").bounding_box()
    assert abs(cursor["x"] - box["x"]) < 4
    assert abs(cursor["y"] - box["y"]) < 4
    label = page.locator(".heatmap .readout").inner_text().split("attends to “")[1].split("”")[0]
    expect(page.locator(".origin small span").first).to_contain_text(f"column “{label}”")
    expect(page.locator(".origin .terms th").first).to_have_text(label)


def test_next_tokens_begin_where_the_model_is_least_certain(page: Any, address: str) -> None:
    visit(page, f"{FLOW}&box=decoder.distribution")
    chances = numbers(address, "decoder.distribution")
    least = int((chances[:, 0] - chances[:, 1]).argmin())
    expect(page.locator(".likeliest figcaption")).to_contain_text(f"position {least + 1},")
    expect(page.locator(".openbox .insight").first).to_contain_text("Least certain")


def test_zoom_from_model_to_head_by_keys(page: Any) -> None:
    visit(page, f"{FLOW}&box=decoder.cross.weights&zoom=model")
    expect(page.locator(".closed")).to_have_count(10)
    page.keyboard.press("+")
    expect(page.locator("[id='box-encoder.self.q']")).to_be_visible()
    page.keyboard.press("+")
    expect(page.locator("[id='box-encoder.self.q']")).to_have_count(0)
    expect(page.locator("[id='box-decoder.cross.q']")).to_be_visible()
    expect(page.locator(".diagram text.row").first).to_have_text("<s>")
    page.keyboard.press("-")
    expect(page.locator("[id='box-encoder.self.q']")).to_be_visible()


def test_another_text_has_other_boxes_and_is_never_markup(page: Any) -> None:
    visit(page, f"{FLOW}&box=encoder.embedding")
    before = pixels(page, ".plane > canvas")
    page.get_by_label("Text").fill("<b>dog</b> <img src=x onerror=alert(1)>")
    expect(page).to_have_url(re.compile("onerror"))
    settled(page)
    expect(page.locator(".labels")).to_contain_text("<")
    assert pixels(page, ".plane > canvas").shape != before.shape
    assert page.locator("main img, main b").count() == 0


def test_a_symbol_of_the_formula_marks_its_boxes(page: Any) -> None:
    """Query, key and value have one colour each, in the formula, the diagram and the edges."""
    visit(page, f"{FLOW}&box=encoder.self.scores")
    for role, box in (("query", "q"), ("key", "k")):
        symbol = page.locator(f".openbox .formula mi[data-role={role}]")
        tile = page.locator(f"[id='box-encoder.self.{box}']")
        colour = symbol.evaluate("one => getComputedStyle(one).color")
        border = "one => getComputedStyle(one.querySelector('canvas')).borderTopColor"
        assert tile.evaluate(border) == colour
        marked = "one => getComputedStyle(one).outlineStyle"
        assert tile.evaluate(marked) == "none"
        symbol.hover()
        assert tile.evaluate(marked) == "solid"
        page.locator("h1").hover()
        assert tile.evaluate(marked) == "none"
    visit(
        page, "/tour?run=translator&stop=5"
    )  # scores: the formula on the left, the tiles on the right
    page.locator(".telling mi[data-role=key]").first.hover()
    outline = "one => getComputedStyle(one).outlineStyle"
    assert page.locator("[id='box-encoder.self.k']").evaluate(outline) == "solid"


def test_where_a_number_comes_from_is_in_the_window(page: Any) -> None:
    """Below its map without a scroll, at the size of a projector."""
    for box in ("decoder.cross.weights", "encoder.self.scores", "encoder.self.q"):
        visit(page, f"{FLOW}&box={box}")
        total = page.locator(".origin .total")
        expect(total).to_be_visible()
        place = total.bounding_box()
        assert place["y"] + place["height"] <= 800
        assert page.evaluate("() => scrollY") == 0


def test_masked_scores_are_minus_infinity(page: Any) -> None:
    """In the read-out, the sum and the key of the colour scale, as a sign and not as a word."""
    visit(page, f"{FLOW}&box=decoder.self.masked&cell=0,1")
    expect(page.locator(".heatmap .readout")).to_have_text(re.compile(": −∞$"))
    expect(page.locator(".origin .total output")).to_have_text("−∞")
    expect(page.locator(".openbox .nothing-key")).to_be_visible()
    page.locator("main").press("m")
    expect(page.locator(".openbox .nothing-key")).to_be_hidden()


def test_sentences_write_words_without_the_space_of_a_token(page: Any) -> None:
    visit(page, f"{FLOW}&box=decoder.cross.scores&cell=1,2")
    expect(page.locator(".openbox .labels")).to_contain_text("·")  # labels keep it
    for part in (".openbox .insight", ".heatmap .readout", ".origin"):
        for text in page.locator(part).all_inner_texts():
            assert "“·" not in text


def test_vectors_are_bars_of_their_length(page: Any, address: str) -> None:
    """All that is added to the residual stream on one scale; norms, of one length, are maps."""
    page.set_viewport_size({"width": 1280, "height": 1400})
    visit(page, f"{FLOW}&box=decoder.cross.weights")

    def bars(name: str) -> np.ndarray:
        return (pixels(page, f"[id='box-{name}'] canvas")[..., 0] < 255).sum(axis=1)

    def lengths(name: str) -> np.ndarray:
        return np.linalg.norm(numbers(address, name, layer=0), axis=-1)

    added = ["decoder.self.output", "decoder.cross.output", "decoder.feedforward.output"]
    scale = np.concatenate([bars(name) for name in added])
    size = np.concatenate([lengths(name) for name in added])
    assert np.abs(scale - size * (scale.sum() / size.sum())).max() <= 1  # one column of pixels
    norm = pixels(page, "[id='box-decoder.cross.norm'] canvas")
    assert len(np.unique(norm.reshape(-1, norm.shape[-1]), axis=0)) > 20


def test_the_scale_of_scores_is_shown_by_two_softmaxes(page: Any, address: str) -> None:
    """With √c and without, for the row of the cursor."""
    visit(page, f"{FLOW}&box=encoder.self.scores&cell=1,2")
    scores = numbers(address, "encoder.self.scores", layer=0, head=0)[1]
    channels = numbers(address, "encoder.self.q", layer=0, head=0).shape[1]
    softmaxes = [
        np.exp(s - s.max()) / np.exp(s - s.max()).sum() for s in (scores, scores * channels**0.5)
    ]
    most = int(softmaxes[0].argmax())
    texts = page.locator(".scaled tr").first.locator(".of").all_inner_texts()
    assert [reads(text, softmax[most]) for text, softmax in zip(texts, softmaxes, strict=True)] == [
        True,
        True,
    ]
    page.locator(".plane > canvas").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".scaled figcaption")).not_to_contain_text("“The”")


def test_labels_of_rows_do_not_overlap_on_stage(page: Any) -> None:
    page.set_viewport_size({"width": 1920, "height": 1080})
    visit(page, f"{FLOW}&box=decoder.cross.weights&stage=1")
    settled(page)
    edges = "all => all.map(e => e.getBoundingClientRect()).map(b => [b.right, b.y, b.height])"
    places = page.locator(".diagram text.row").evaluate_all(edges)
    assert len(places) > 8
    for (right, y, height), (next_right, next_y, _) in itertools.pairwise(places):
        if abs(right - next_right) < 1 and next_y > y:
            assert next_y - y >= 0.8 * height


def test_every_row_of_a_map_has_its_label_on_stage(page: Any) -> None:
    text = "The small dog sees the tree and the old cat sees the small dog near the house."
    visit(page, f"/flow?run=translator&text={quote(text)}&box=encoder.self.weights&stage=2")
    staged = page.locator("figure.heatmap.staged")
    rows = staged.locator("svg.labels [data-at^='row']")
    count = staged.locator(".plane > canvas").evaluate("canvas => canvas.height")
    assert count > 18
    expect(rows).to_have_count(count)
    boxes = "all => all.map(e => e.getBoundingClientRect()).map(b => b.y + b.height / 2)"
    middles = rows.evaluate_all(boxes)
    sizes = rows.evaluate_all("all => all.map(e => Number(e.getAttribute('font-size')))")
    assert min(sizes) >= 6
    assert all(later > earlier for earlier, later in itertools.pairwise(middles))


def test_both_stacks_are_drawn_from_left_to_right(page: Any) -> None:
    visit(page, f"{FLOW}&box=decoder.cross.weights&layer=0")
    for names in (("norm", "q", "k", "v"), ("output", "scores", "weights", "mix")):
        boxes = [page.locator(f"[id='box-decoder.cross.{name}']").bounding_box() for name in names]
        assert [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)
    frame = page.locator(".flowboxes").bounding_box()
    end = page.locator(".diagram .next").bounding_box()
    assert end["x"] + end["width"] <= frame["x"] + frame["width"]
    sizes = page.locator(".diagram :is(strong, .row, svg text, .quiet)").evaluate_all(
        "all => all.map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 12


def test_the_score_that_gives_the_answer_away_has_a_ring(page: Any) -> None:
    """Before the mask the row also sees the token that it must predict."""
    visit(page, f"{FLOW}&box=decoder.self.scores&cell=2,0")
    ring = page.locator(".openbox .rings [data-ring]")
    expect(ring).to_have_attribute("data-ring", "2,3")
    expect(page.locator(".openbox .ring-key")).to_have_text("the token to predict")
    expect(page.locator(".openbox .heatmap .insight")).to_contain_text("also sees")
    page.locator("main").press("m")
    expect(page.locator(".openbox .heatmap .insight")).to_contain_text("must not see")
    expect(ring).to_have_attribute("data-ring", "2,3")
    page.locator(".openbox .plane > canvas").press("ArrowDown")
    expect(ring).to_have_attribute("data-ring", "3,4")
    visit(page, f"{FLOW}&box=encoder.self.scores&cell=2,0")
    expect(ring).to_have_count(0)


def test_the_way_through_an_attention_lights_up_once(page: Any) -> None:
    """When it opens; not again for its other boxes, and not with reduced motion."""
    lit = "() => document.getAnimations().some((one) => one.effect.target.closest('.diagram'))"
    visit(page, f"{FLOW}&box=decoder.cross.weights")
    page.wait_for_function(lit)
    page.wait_for_function(f"() => !({lit})()")
    page.locator("[id='box-decoder.cross.scores']").click()
    expect(page.locator(".boxhead h2")).to_contain_text("Scores")
    page.wait_for_timeout(600)
    assert not page.evaluate(lit)
    page.emulate_media(reduced_motion="reduce")
    visit(page, f"{FLOW}&box=encoder.self.weights")
    page.wait_for_timeout(600)
    assert not page.evaluate(lit)
