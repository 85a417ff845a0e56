"""The pages for one kind of model in a real browser: the screen shows the numbers of the model."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from tests.web.small_models import SENTENCE, make_models

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from starlette.testclient import TestClient  # noqa: E402
from tests.web.test_server import HERE, ask, tensor  # noqa: E402

from manyheads.nn.positions import NoPosition  # noqa: E402
from manyheads.run import read_run, save_run  # noqa: E402
from manyheads.web.app import build_app  # noqa: E402

address, browser, page = shared.address, shared.browser, shared.page  # fixtures
expect, visit, settled, pixels = shared.expect, shared.visit, shared.settled, shared.pixels
# The colour in the middle of each patch of a picture of so many patches a side.
MIDDLES = """(canvas, side) => Array.from({ length: side * side }, (_, at) => {
  const place = [at % side, Math.floor(at / side)].map((n) => (n + 0.5) * canvas.width / side);
  return Array.from(canvas.getContext("2d").getImageData(...place, 1, 1).data).slice(0, 3);
})"""
VIRIDIS = (np.array([colormaps["viridis"](i)[:3] for i in range(256)]) * 255).round()
RED_BLUE = ((5, 48, 97), (51, 122, 183), (146, 197, 222), (255, 255, 255))
RED_BLUE += ((244, 165, 130), (203, 77, 67), (103, 0, 31))
HEAT = (255, 140, 26)
SIGNED, INK = shared.scale(RED_BLUE), shared.INK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and `unplaced`: a model of images that adds no positions."""
    made = make_models(tmp_path_factory.mktemp("models"))
    run = read_run(made / "pictures")
    unplaced = replace(run, model=replace(run.model, position=NoPosition()))  # type: ignore[call-arg]
    save_run(unplaced, None, unplaced.model.build(), made / "unplaced")
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    """The same server once more, for what it is to be compared with."""
    return TestClient(build_app(folder), HERE)


def saved(page: Any, part: Any, kind: str) -> bytes:
    return Path(shared.save(page, part, kind).path()).read_bytes()


def colours(values: torch.Tensor, low: float, high: float, table: np.ndarray = INK) -> np.ndarray:
    """Signed colours around zero if values have both signs, else from white to ink."""
    if low < 0 < high:
        high = max(-low, high)
        low, table = -high, SIGNED
    share = (values.double().numpy() - low) / (high - low)
    actual: np.ndarray = table[np.floor(share * 255 + 0.5).clip(0, 255).astype(int)]
    return actual


HUNDREDTH = 0.51e-4  # bars show no more than hundredths of a percent, rounded


def shares(bars: Any) -> list[float]:
    """The probabilities of a table of bars, which are in percent."""
    texts = bars.locator("td:last-child").all_inner_texts()
    return [float(text.strip("<> %")) / 100 for text in texts]


def test_a_page_for_another_kind_shows_one_that_fits(page: Any) -> None:
    """Whole, on the screens of a laptop and of a phone."""
    others = {
        "image": "translator",
        "music": "translator",
        "attention": "pictures",
        "watch": "reader",
    }
    for place, run in {**others, "tokens": "pictures"}.items():
        visit(page, f"/{place}?run={run}")
        expect(page.locator("#problem")).to_be_hidden()
        expect(page.get_by_text(f"“{run}” does not support")).to_be_visible()
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, place


def test_positions_are_drawn_as_they_are(page: Any, client: TestClient) -> None:
    visit(page, "/positions?length=24&dim=16&cell=3,2")
    actual = client.get("/api/positions", params={"length": 24, "dim": 16}).json()
    added = tensor(client, actual["trace"], "added")
    drawn = pixels(page, ".plane > canvas")[..., :3]
    assert np.array_equal(drawn, colours(added, float(added.min()), float(added.max())))
    readout = page.locator(".heatmap .readout").first
    assert shared.reads(readout.inner_text(), float(added[3, 2]))
    page.locator(".plane > canvas").first.focus()
    before = readout.inner_text()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("cell=3%2C3"))
    expect(readout).not_to_have_text(before)
    assert shared.reads(readout.inner_text(), float(added[3, 3]))
    page.get_by_label("Scheme").select_option("relative")
    settled(page)
    expect(page.get_by_text("Q Eᵀ: each query")).to_have_count(1)
    expect(page.locator(".heatmap")).to_have_count(5)  # the scores, and four steps of the skew
    page.get_by_label("Scheme").select_option("run")
    settled(page)
    expect(page.locator("p[role=status]")).to_contain_text("positions shown")
    visit(page, "/positions?scheme=run&run=unplaced")  # a scheme without tables has no figure
    expect(page.locator("p.formula")).to_contain_text("no position encoding")
    expect(page.locator("#problem")).to_be_hidden()
    visit(page, "/positions?scheme=run&run=labels&stack=encoder")
    expect(page.get_by_role("combobox", name="Run", exact=True)).to_have_value("labels")


def test_positions_stand_in_two_columns_with_every_fifth_number(page: Any) -> None:
    for width in (1280, 1920):
        page.set_viewport_size({"width": width, "height": 1080})
        visit(page, "/positions")
        figures = [one.bounding_box() for one in page.locator(".pairs > figure").all()]
        assert len(figures) == 4
        assert [len({box[side] for box in figures}) for side in ("x", "y")] == [2, 2]
        labels = page.locator(".heatmap").first.locator(".labels text[data-at^=row]")
        assert labels.all_text_contents() == [str(row) for row in range(0, 64, 5)]
    page.locator("main").press("s")
    expect(page.locator("figure.staged h2")).to_contain_text("added to the embedding")


def test_a_click_on_a_channel_plots_it(page: Any) -> None:
    visit(page, "/positions?length=24&dim=16")
    table = page.locator(".heatmap").first
    titles = table.locator(".labels text").all_text_contents()
    assert {"position", "channel"} <= set(titles)
    table.locator(".plane > canvas").click(position={"x": 60, "y": 40})
    channel = re.findall(r"channel (\d+)", table.locator(".readout").inner_text())[0]
    legend = page.locator(".chart").first.locator("svg text")
    expect(legend.filter(has_text=re.compile(f"^channel {channel}$"))).to_have_count(1)
    before = page.locator(".chart .readout").first.inner_text()
    page.locator(".plane > canvas").first.press("ArrowRight")
    expect(page.locator(".chart .readout").first).not_to_have_text(before)
    visit(page, "/positions?scheme=run&run=pictures")  # of patches, the grid comes first
    expect(page.locator("figure h2").first).to_contain_text("with every patch")


def test_positions_are_saved(page: Any) -> None:
    visit(page, "/positions?scheme=alibi&length=12")
    part = page.locator(".heatmap").first
    assert saved(page, part, "PNG").startswith(b"\x89PNG")
    rows = saved(page, part, "CSV").decode().splitlines()
    assert len(rows) == 13
    assert b"<svg" in saved(page, part, "HTML")


def test_the_lens_shows_the_tokens_of_the_model(page: Any, client: TestClient) -> None:
    visit(page, f"/lens?run=writer&text={quote(SENTENCE)}")
    actual = ask(client, "/api/lens", run="writer", text=SENTENCE)
    cells = page.locator(".lens td")
    assert cells.count() == 3 * len(actual["inputs"])
    last = cells.nth(cells.count() - 1)
    chance = actual["probabilities"][-1][-1][0]
    piece = actual["pieces"][str(actual["top"][-1][-1][0])]
    assert last.inner_text().strip("·").strip() == piece.strip()
    colour = [int(item) for item in INK[int(chance * 255 + 0.5)]]
    style = last.evaluate("cell => getComputedStyle(cell).backgroundColor")
    assert [int(item) for item in re.findall(r"\d+", style)] == colour
    # A wrong token that only repeats the one read is grey.
    for layer, row in enumerate(actual["top"]):
        for at, (top, given, expected) in enumerate(
            zip(row, actual["inputs"], actual["expected"], strict=True)
        ):
            token = actual["pieces"][str(top[0])]
            shade = cells.nth(layer * len(row) + at).evaluate(
                "cell => getComputedStyle(cell).backgroundColor"
            )
            red, _, blue = (int(item) for item in re.findall(r"\d+", shade))
            if expected is not None and token != expected:
                assert (abs(red - blue) < 10) == (token == given), (layer, at)
    readout = page.locator(".lens .readout")
    unsure = int(np.argmax(actual["entropy"][-1]))  # the first state
    first = actual["probabilities"][-1][unsure][0]
    assert shared.reads(readout.inner_text(), first)
    page.locator(".lens table").focus()
    page.keyboard.press("End")
    assert shared.reads(readout.inner_text(), chance)
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert f"cell=1%2C{len(actual['inputs']) - 3}" in page.url
    above = actual["probabilities"][1][-3]
    assert shared.reads(readout.inner_text(), above[0])
    assert shares(page.locator(".bars")) == pytest.approx(above, rel=1e-2, abs=HUNDREDTH)
    assert b"<svg" in saved(page, page.locator(".lens"), "SVG")


def test_the_lens_follows_what_is_typed(page: Any) -> None:
    visit(page, "/lens?run=translator&target=Der+Hund.&by=entropy")
    expect(page.locator(".lens figcaption")).to_contain_text("bits")
    before = page.locator(".lens td").count()
    page.get_by_label("Target").fill("Der kleine Hund und der Hund.")
    expect(page).to_have_url(re.compile("kleine"))
    settled(page)
    assert page.locator(".lens td").count() > before
    page.get_by_text("Norms in the residual stream").click()
    expect(page.get_by_text("cross-attention").first).to_be_visible()


def test_a_click_masks_a_word(page: Any, client: TestClient) -> None:
    visit(page, f"/fill?run=reader&text={quote(SENTENCE)}&mask=1")
    text = SENTENCE.replace("small", "[MASK]")
    actual = ask(client, "/api/fill", run="reader", text=text)
    first, before = page.locator(".bars").all()
    shown = shares(first)
    chances = [item["probability"] for item in actual["masks"][0]["top"]]
    # A hidden word beyond the ten best has a row of its own.
    hidden = ask(client, "/api/fill", run="reader", text=text, hidden=["small"])["masks"][0]
    if hidden["hidden"]["rank"] > len(chances):
        chances.append(hidden["hidden"]["probability"])
    assert shown == pytest.approx(chances, rel=1e-2, abs=HUNDREDTH)
    expect(page.locator("p[role=status]")).to_have_text(actual["text"])
    # Next to it, the prediction from the words before the mask only.
    left = "The [MASK] [MASK] [MASK] [MASK] [MASK]."
    alone = ask(client, "/api/fill", run="reader", text=left)["masks"][0]["top"]
    expected = [item["probability"] for item in alone]
    assert shares(before)[: len(expected)] == pytest.approx(expected, rel=1e-2, abs=HUNDREDTH)
    # One scale for both figures, up to the greatest probability; its number is shown.
    most = max(chances[0], expected[0])
    for figure, chance in zip(page.locator("figure").all(), (chances[0], expected[0]), strict=True):
        assert figure.locator(".level").first.evaluate(
            """one => {
              const cell = one.parentElement;
              const padding = parseFloat(getComputedStyle(cell).paddingRight);
              return one.clientWidth / (cell.clientWidth - padding);
            }"""
        ) == pytest.approx(chance / most, abs=0.02)
        scale = figure.get_by_text("Bars from 0 to")
        assert shared.reads(scale.inner_text().removeprefix("Bars from 0 to"), most)
    # Each word has the attention of the mask: mean over all heads.
    trace = ask(client, "/api/trace", run="reader", text=text)
    weights = tensor(client, trace["trace"], "encoder.self.weights").mean((0, 1))
    pieces = [piece.strip() for piece in trace["maps"][0]["columns"]]
    [mask] = [at for at, piece in enumerate(pieces) if "mask" in piece.lower()]
    for word in {"dog", "tree"} & {*pieces}:
        share = page.get_by_role("button", name=re.compile(f"^{word}")).locator(".id")
        assert shared.reads(share.inner_text(), float(weights[mask, pieces.index(word)]))
    assert {"dog", "tree"} & {*pieces}
    page.get_by_role("button", name=re.compile("^tree")).click()
    settled(page)
    expect(page.locator("figure")).to_have_count(2)
    assert "mask=1+5" in page.url
    page.keyboard.press("ArrowLeft")  # from the clicked word, by keys only
    page.keyboard.press("Enter")
    settled(page)
    expect(page.locator("figure")).to_have_count(3)
    for word in ("small", "the, word 5", "tree"):
        page.get_by_role("button", name=re.compile(f"^{word}")).click()
        settled(page)
    expect(page.locator("p[role=status]")).to_have_text("Click a word to mask it.")
    best = actual["masks"][0]["top"][0]["piece"].strip()
    visit(page, f"/fill?run=reader&text={quote(text)}")
    page.locator(".words button[aria-pressed=true]").click()  # a mask that hides no word
    settled(page)
    assert page.get_by_label("Text").input_value() == text.replace("[MASK]", best)
    assert "mask=none" in page.url


def test_patches_are_coloured_by_their_weight(page: Any, client: TestClient) -> None:
    place = "/image?run=pictures&picture=1&layer=0&head=1&opacity=100"
    visit(page, f"{place}&palette=viridis")
    actual = ask(client, "/api/image", run="pictures", picture=1)
    weights = tensor(client, actual["trace"], "encoder.self.weights")[0, 1]
    row = weights[0, 1:]
    drawn = page.locator(".overlay canvas").evaluate(MIDDLES, 4)
    assert np.array_equal(np.array(drawn), colours(row, 0.0, float(row.max()), VIRIDIS))
    # Without a palette: a patch is as opaque as its weight is large.
    visit(page, place)
    pixels = tensor(client, actual["trace"], "image.pixels")[1::2, 1::2, 0].flatten().numpy()
    share = (row / row.max()).numpy()[:, None]
    grey = 0.55 * pixels[:, None]  # dark, so that colours over it are seen; black stays black
    expected = share * np.array(HEAT) + (1 - share) * 255 * grey
    drawn = np.array(page.locator(".overlay canvas").evaluate(MIDDLES, 4))
    assert np.abs(drawn.reshape(expected.shape) - expected).max() <= 3  # rounded twice
    readout = page.locator(".readout").first
    assert shared.reads(
        readout.inner_text(), float(row.max())
    )  # the patch with the greatest weight
    expect(readout).to_contain_text("%")  # as on the scale
    expect(page.locator(".overlay ~ .below .scale")).to_contain_text("0")
    assert shared.reads(page.locator(".scale span").first.inner_text(), float(row.max()))
    hidden = ask(client, "/api/image", run="pictures", picture=1, hidden=int(row.argmax()))
    best = max(actual["output"]["classes"], key=lambda one: one["probability"])["label"]
    [share] = [c["probability"] for c in hidden["output"]["classes"] if c["label"] == best]
    story = page.locator(".insight").first.inner_text().split("With that patch hidden")[1]
    assert shared.reads(story.split(f"“{best}”)")[1], share)
    page.locator(".overlay canvas").focus()
    for key in ("Home", "ArrowDown"):
        page.keyboard.press(key)
    page.keyboard.press("ArrowRight")
    assert shared.reads(readout.inner_text(), float(row[5]))
    page.keyboard.press("Enter")  # now this patch looks
    settled(page)
    assert "query=5" in page.url
    assert shared.reads(readout.inner_text(), float(weights[6, 6]))
    for view in ("Rollout", "Positions"):
        page.get_by_role("button", name=view).click()
        settled(page)
    expect(page.get_by_text("Position similarity with row 2, column 2")).to_be_visible()
    # Positions do not depend on the picture: a map for each of the patches, and no class.
    expect(page.locator(".small-overlays button")).to_have_count(actual["side"] ** 2)
    expect(page.get_by_role("heading", name="Classes")).to_be_hidden()
    assert saved(page, page.locator("figure").first, "PNG").startswith(b"\x89PNG")


def test_a_picture_of_ones_own_is_classified(page: Any, client: TestClient, tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "own.png"
    Image.fromarray(np.tile(np.arange(0, 240, 30, dtype=np.uint8), (8, 1))).save(file)
    visit(page, "/image?run=pictures")
    page.get_by_label("Your own").set_input_files(file)
    expect(page.get_by_text("own.png")).to_be_visible()
    settled(page)
    upload = base64.b64encode(file.read_bytes()).decode()
    actual = ask(client, "/api/image", run="pictures", upload=upload)
    expected = sorted((item["probability"] for item in actual["output"]["classes"]), reverse=True)
    assert shares(page.locator(".bars")) == pytest.approx(expected, rel=1e-2, abs=HUNDREDTH)
    number = page.get_by_label("Image of the validation split")
    expect(number).to_have_value("")  # an upload is none of them, so each can be chosen
    number.fill("1")
    number.press("Enter")
    expect(page.get_by_text("Image 1 of")).to_be_visible()


def test_arcs_lead_to_what_an_event_looks_at(page: Any, client: TestClient) -> None:
    visit(page, "/music?run=chorales&layer=1&head=0&event=20")
    actual = ask(client, "/api/music", run="chorales", events=256)
    row = tensor(client, actual["trace"], "decoder.self.weights")[1, 0, 21]
    readout = page.locator(".roll .readout")
    best = int(row.argmax())
    reported = readout.inner_text().split("attends to ")[1].split(";")[0]
    assert shared.reads(reported, float(row[best]))
    # Voice and beat: event 21 is the first voice of the sixth sixteenth.
    chosen = readout.inner_text().split("attends to")[0]
    assert re.match(r"Event 21 \(soprano .*, beat 2\)", chosen)
    # A weight has the same width for every event.
    arcs = page.locator(".roll .arc").all()
    widths = [float(arc.get_attribute("stroke-width") or 0) for arc in arcs]
    others = sorted(np.delete(row[:22].numpy(), 21).tolist(), reverse=True)[: len(widths)]
    assert sorted(widths, reverse=True) == pytest.approx(
        [0.8 + 2.8 * weight**0.5 for weight in others], abs=0.01
    )
    expect(page.locator(".roll .voices")).to_contain_text(f"{len(widths)} arcs: ")
    # A note is as strong as the attention to all of its events.
    totals = [
        sum(
            float(row[at + 1])
            for at, event in enumerate(actual["events"][:21])
            if at % 4 == note["part"]
            and event["pitch"] == note["pitch"]
            and note["start"] <= event["time"] < note["end"]
        )
        for note in actual["notes"]
    ]
    shades = [
        float(note.get_attribute("fill-opacity") or 0)
        for note in page.locator(".roll svg > rect").all()
    ]
    expected = [0.3 + 0.65 * (total / max(totals)) ** 0.5 for total in totals]
    assert shades == pytest.approx(expected, abs=2e-3)
    assert reported.startswith(str(best) if best else "the beginning")
    assert page.locator(".roll .arc").count() in (11, 12)
    page.locator(".roll [role=img]").focus()
    page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("Event 20 ")
    assert "event=19" in page.url
    chart = page.locator(".chart .readout").first
    far = tensor(client, actual["trace"], "decoder.self.distance")[1, 0]
    page.locator(".axes").first.focus()
    page.keyboard.press("Home")
    assert shared.reads(chart.inner_text(), float(far[0]))
    visit(
        page, "/music?run=chorales&begin=8&events=8&event=3"
    )  # events count from the piece's first
    expect(readout).to_contain_text("Event 12 ")
    expect(page.locator(".roll figcaption")).to_contain_text("attention of event 12,")
    rows = saved(page, page.locator(".roll"), "CSV").decode().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(number) for number in range(8, 17)]
    expect(page.locator(".chart .readout").nth(1)).to_contain_text("event 16:")


def test_music_is_played_and_taken_home(page: Any, client: TestClient, folder: Path) -> None:
    page.add_init_script("""{
      const close = AudioContext.prototype.close;
      window.silenced = 0;
      AudioContext.prototype.close = function () {
        window.silenced++;
        return close.call(this);
      };
    }""")
    visit(page, "/music?run=piano")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download MIDI").click()
    assert Path(download.value.path()).read_bytes().startswith(b"MThd")
    assert download.value.suggested_filename == "music.mid"
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    file = next((folder / "data" / "piano").glob("*.mid"))
    page.get_by_label("Your own").set_input_files(file)
    expect(page.locator("p[role=status]")).to_contain_text(file.name)
    assert saved(page, page.locator(".roll"), "SVG").startswith(b"<svg")
    page.get_by_role("button", name="Play").click()
    page.evaluate("() => document.querySelector('.roll [role=img]').focus()")
    page.route("**/api/runs?*", lambda route: None)  # it is not answered before the page is left
    page.keyboard.press("ArrowLeft")
    page.evaluate("() => document.querySelector('#pages a[href^=\"/tokens\"]').click()")
    assert page.evaluate("() => window.silenced") == 2  # by its button, and by leaving
    page.unroute_all(behavior="ignoreErrors")


def test_text_is_never_markup(page: Any) -> None:
    attack = quote("<img src=x onerror=alert(1)><b>dog</b>")
    for place in (f"/lens?run=writer&text={attack}", f"/fill?run=reader&text={attack}&mask=1"):
        visit(page, place)
        expect(page.locator("#problem")).to_be_hidden()
        assert page.locator("main img, main b").count() == 0


def test_an_empty_text_is_a_text_and_back_brings_the_last_one(page: Any) -> None:
    visit(page, "/tokens?run=writer&text=dog")
    page.get_by_role("combobox", name="Run", exact=True).select_option("reader")
    settled(page)
    box = page.get_by_label("Text")
    box.fill("cat")
    expect(page).to_have_url(re.compile("text=cat"))
    settled(page)
    assert box.evaluate("box => document.activeElement === box")
    for step, text in ((page.go_back, "dog"), (page.go_forward, "cat")):
        step()  # this URL has no typed text, although the text box has the focus
        expect(box).to_have_value(text)
    box.fill("")
    expect(page).to_have_url(re.compile("text=(&|$)"))
    settled(page)
    expect(box).to_have_value("")
    expect(page.locator(".panel .chips li")).to_have_count(0)
    link = page.get_by_role("link", name="Flow").get_attribute("href")
    assert re.search("text=(&|$)", link)


def test_numbers_are_taken_or_refused_in_words(page: Any) -> None:
    visit(page, "/decode?run=writer&text=The&limit=9&top_p=0.33")
    limit = page.get_by_label("Tokens to generate")
    expect(limit).to_have_value("9")  # of an address, though none of those to choose from
    temperature = page.get_by_label("Temperature")
    temperature.fill("0.75")
    temperature.press("Enter")
    expect(page).to_have_url(re.compile("temperature=0.75"))
    settled(page)
    expect(temperature).to_have_value("0.75")
    assert temperature.evaluate("box => document.activeElement === box")
    temperature.fill("9")
    temperature.press("Enter")
    assert temperature.evaluate("box => box.validationMessage") != ""
    temperature.blur()
    expect(temperature).to_have_value("0.75")
    assert "temperature=0.75" in page.url


def test_keys_step_from_the_address_and_boxes_have_their_own_names(page: Any) -> None:
    visit(page, f"/attention?run=writer&text={quote(SENTENCE)}&layer=0&head=0")
    page.locator(".plane > canvas").focus()
    page.evaluate("""() => { // faster than the page is drawn
      for (const key of ["]", "]", "]", "["]) {
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      }
    }""")
    settled(page)
    expect(page.get_by_role("heading", name="Decoder, layer 2, head 1")).to_be_visible()
    picture = saved(page, page.locator(".headgrid"), "SVG").decode()
    width = float(re.search(r'width="([\d.]+)"', picture)[1])  # type: ignore[index]
    titles = re.findall(r'font-size="14">([^<]*)<', picture)
    assert " ".join(titles) == page.locator(".headgrid figcaption").inner_text()
    assert width >= 7 * max(map(len, titles))  # a long title is broken into lines, not cut
    visit(page, "/train?run=translator")
    page.get_by_label("log y").focus()
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile("logy=1"))
    settled(page)
    assert page.evaluate("() => document.activeElement.parentElement.textContent") == "log y"


def test_new_lines_are_added_once_however_slow_the_answer(page: Any, folder: Path) -> None:
    """The next question is asked when the last is answered."""
    lines = '{"step": 1, "split": "train", "loss": 2}\n'
    (folder / "writer" / "metrics.jsonl").write_text(lines)
    waiting: list[Any] = []
    page.clock.install()
    visit(page, "/train?run=writer")
    page.route("**/api/metrics?*", lambda route: waiting.append(route))
    late = 3  # rounds after the first question, which takes a while on a busy machine
    for _ in range(50):
        page.clock.run_for(2000)
        page.evaluate("() => 1")  # wait for pending request events
        late -= bool(waiting)
        if not late:
            break
    assert len(waiting) == 1
    page.unroute_all(behavior="ignoreErrors")


def test_what_fails_first_leaves_a_way_on(browser: Any, address: str) -> None:
    """A run to choose, no button that saves nothing, and a busy server is asked again."""
    page = browser.new_page(base_url=address)
    long = quote("dog " * 100)
    for place in ("attention", "flow", "translate", "decode"):
        page.goto(f"/{place}?run=translator&text={long}")
        expect(page.get_by_role("alert")).to_contain_text("tokens")
        expect(page.get_by_role("combobox", name="Run", exact=True)).to_have_value("translator")
        assert page.locator(".saving:visible").count() == 0, place
    page.goto("/positions?scheme=run&run=gone")
    expect(page.get_by_role("alert")).to_contain_text("gone")
    busy = [503, 503]

    def answer(route: Any) -> None:
        if not busy:
            return route.continue_()
        return route.fulfill(status=busy.pop(), headers={"Retry-After": "0"}, json={})

    page.route("**/api/trace", answer)
    page.goto("/attention?run=writer&text=dog")
    expect(page.locator(".headgrid")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    page.close()
