"""In a real browser: choices survive a change of page, Back undoes them; the first states."""

import re
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from manyheads.recipes import read_recipe  # noqa: E402
from manyheads.tasks.translation import VERB_FINAL  # noqa: E402
from manyheads.web.runs import AMBIGUOUS  # noqa: E402
from manyheads.web.translating import HELD_OUT, load_sentences  # noqa: E402

address, browser, folder, page = shared.address, shared.browser, shared.folder, shared.page
expect, settled, visit = shared.expect, shared.settled, shared.visit


def open_page(page: Any, name: str) -> None:
    page.locator("#pages").get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    settled(page)


def test_layer_head_map_and_target_survive_a_change_of_page(page: Any) -> None:
    visit(page, "/attention?run=translator&map=decoder.self&target=Der+Hund.")
    page.get_by_role("button", name=re.compile("^layer 2, head 2")).click()
    settled(page)
    open_page(page, "Flow")
    expect(page.locator(".boxhead h2")).to_contain_text("layer 2 of 2")
    expect(page.locator(".boxhead h2")).to_contain_text("head 2")
    expect(page.get_by_label("Target")).to_have_value("Der Hund.")
    open_page(page, "Tokens")  # has neither layers nor heads
    open_page(page, "Attention")
    expect(page.get_by_role("heading", name="Decoder, layer 2, head 2")).to_be_visible()
    expect(page.get_by_label("Target")).to_have_value("Der Hund.")
    page.locator("#pages").get_by_role("link", name="Tour").click()
    settled(page)
    assert "layer=" not in page.url  # a step of the tour shows its own layer


def test_another_run_drops_heads_and_target(page: Any) -> None:
    visit(page, "/attention?run=translator&layer=1&head=1&target=Der+Hund.")
    page.get_by_role("combobox", name="Run", exact=True).select_option("deep/writer")
    settled(page)
    assert "target" not in page.url
    assert "head" not in page.url


def test_back_undoes_a_choice(page: Any) -> None:
    visit(page, "/attention?run=translator&map=encoder.self")
    title = page.locator(".near figcaption")
    expect(title).to_have_text("Encoder, layer 1, head 1")
    page.get_by_role("button", name=re.compile("^layer 2, head 1")).click()
    expect(title).to_have_text("Encoder, layer 2, head 1")
    page.get_by_role("button", name="Knock out this head").click()
    expect(title).to_contain_text("knocked out")
    page.go_back()
    expect(title).to_have_text("Encoder, layer 2, head 1")
    page.go_back()
    expect(title).to_have_text("Encoder, layer 1, head 1")
    page.go_forward()
    expect(title).to_have_text("Encoder, layer 2, head 1")
    visit(page, "/flow?run=translator&box=encoder.self.weights")
    page.locator("[id='box-encoder.self.q']").click()
    expect(page.locator(".boxhead h2")).to_contain_text("Q")
    settled(page)
    page.go_back()
    expect(page.locator(".boxhead h2")).to_contain_text("Softmax")


def test_first_texts(page: Any) -> None:
    first = {"attention": VERB_FINAL, "translate": VERB_FINAL, "flow": VERB_FINAL}
    for name, text in {**first, "lens": AMBIGUOUS}.items():
        visit(page, f"/{name}?run=translator")
        expect(page.get_by_label("Text", exact=True)).to_have_value(text)


@pytest.mark.slow
def test_first_texts_have_a_gold_alignment() -> None:
    data = read_recipe("phrasebook", ()).data
    known = [load_sentences(data, splits) for splits in (HELD_OUT, ("train",))]  # type: ignore[arg-type]
    for text in (VERB_FINAL, AMBIGUOUS):
        assert any(text in sentences for sentences in known), text


def test_tokens_start_half_merged_and_play(page: Any) -> None:
    place = f"/tokens?run=translator&text={quote('unbelievable')}"
    pieces = page.locator(".merges .top")
    visit(page, f"{place}&step=0")
    expect(pieces).to_have_count(len("unbelievable"))
    flat = page.locator(".merges").bounding_box()["height"]
    slider = page.get_by_label("Step")
    half = len("unbelievable") - int(slider.get_attribute("max")) // 2
    page.clock.install()
    page.emulate_media(reduced_motion="reduce")
    visit(page, place)
    page.clock.run_for(5000)
    expect(pieces).to_have_count(half)
    # The tree takes no height before it has grown.
    assert page.locator(".merges").bounding_box()["height"] > flat + 20
    page.clock.pause_at(page.evaluate("() => Date.now()") / 1000 + 60)  # no time but run_for
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(400)
    expect(pieces).to_have_count(half - 1)
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(5000)
    expect(pieces).to_have_count(half - 1)
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(20_000)
    final = page.locator("figure.tokens > .chips li")
    expect(pieces).to_have_count(final.count())
    page.clock.resume()
    page.emulate_media(reduced_motion="no-preference")
    visit(page, place)
    expect(pieces).to_have_count(final.count())  # it plays without a click
