"""In a real browser: which pages a run leads to, axes that count, and what drawing costs."""

import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from tests.web.small_models import SENTENCE, make_models

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from manyheads.models.gpt import GptConfig  # noqa: E402
from manyheads.run import Run, save_run  # noqa: E402
from manyheads.tokenizer.train import Words  # noqa: E402

address, browser, page = shared.address, shared.browser, shared.page  # fixtures
expect, visit, settled, pixels = shared.expect, shared.visit, shared.settled, shared.pixels
LAYERS, HEADS, TOKENS = 6, 8, 256
MEGABYTES = 64
WORDS = [f"w{number}" for number in range(50)]
WAYS = {
    "translator": "Tour Watch Flow Attention Lens Positions Tokens Translate Decode Train",
    "writer": "Watch Flow Attention Lens Positions Tokens Decode Train",
    "reader": "Flow Attention Positions Tokens Fill Train",
    "labels": "Flow Attention Positions Tokens Train",
    "pictures": "Watch Positions Image Train",
    "piano": "Watch Flow Attention Lens Positions Tokens Decode Music Train",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and `wide`: as many heads as a translator of the first paper has."""
    made = make_models(tmp_path_factory.mktemp("models"))
    torch.manual_seed(1)
    tokenizer = Words().train([" ".join(WORDS)])
    sizes: dict[str, Any] = {"dim": 64, "layers": LAYERS, "heads": HEADS, "max_length": TOKENS}
    config = GptConfig(**sizes, vocab_size=tokenizer.vocab_size)
    run = Run(task="language", data=None, tokens=Words(), model=config)  # type: ignore[arg-type]
    save_run(run, tokenizer, config.build(), made / "wide")
    return made


def chosen_run(page: Any) -> Any:
    named = page.locator("span", has_text=re.compile("^Run$"))
    return page.locator("label.field", has=named).locator("select")


def test_a_card_leads_where_its_run_can_be_shown(page: Any) -> None:
    visit(page, "/")
    for run, ways in WAYS.items():
        links = page.get_by_role("navigation", name=run, exact=True).get_by_role("link")
        assert links.all_inner_texts() == ways.split(), run
    page.get_by_role("navigation", name="piano", exact=True).get_by_text("Positions").click()
    settled(page)
    expect(chosen_run(page)).to_have_value("piano")


@pytest.mark.slow
def test_no_way_of_a_card_leads_to_another_run(page: Any) -> None:
    visit(page, "/")
    for run in ("pictures", "piano"):
        links = page.get_by_role("navigation", name=run, exact=True).get_by_role("link")
        places = [link.get_attribute("href") for link in links.all()]
        for place in places:
            visit(page, place)
            expect(page.locator("#problem")).to_be_hidden()
            expect(chosen_run(page)).to_have_value(run)
        visit(page, "/")


def test_what_is_counted_has_whole_numbers_at_its_axis(page: Any) -> None:
    for place, across in (("/lens?run=writer", "layer"), ("/music?run=piano&events=4", "event")):
        visit(page, place)
        charts = page.locator(".chart", has=page.locator("svg text", has_text=re.compile(across)))
        assert charts.count() >= 1
        for axes in charts.all():
            below = axes.locator("svg text[text-anchor=middle]").all_text_contents()
            numbers = [float(text) for text in below if text != across and text != "events back"]
            assert numbers
            assert all(number == int(number) for number in numbers), (place, below)


def test_colours_up_to_the_greatest_of_a_map(page: Any) -> None:
    """The same numbers, seen better: the greatest has the last colour of the scale."""
    place = f"/attention?run=writer&text={quote(SENTENCE)}&layer=1&head=1&cell=3,1"
    visit(page, place)
    readout = page.locator(".heatmap .readout").inner_text()
    page.get_by_label("Colours").select_option("own")
    settled(page)
    assert "colours=own" in page.url
    assert page.locator(".heatmap .readout").inner_text() == readout
    last = np.array([16, 20, 48])  # ink
    for selector in (".plane > canvas", "[aria-label^='layer 2, head 2'] canvas"):
        drawn = pixels(page, selector)[..., :3]
        assert (drawn == last).all(-1).any(), selector


@pytest.mark.slow
def test_many_heads_are_few_elements_and_few_bytes(page: Any) -> None:
    """6 layers × 8 heads at 256 tokens; how long it takes is measured by benchmarks/page.py."""
    text = " ".join(random.Random(1).choices(WORDS, k=TOKENS))
    visit(page, f"/attention?run=wide&text={quote(text)}")
    assert pixels(page, ".plane > canvas").shape[:2] == (TOKENS, TOKENS)
    assert page.locator(".heads canvas").count() == LAYERS * HEADS
    assert page.evaluate("() => document.querySelectorAll('*').length") < 1000
    held = page.context.new_cdp_session(page).send("Runtime.getHeapUsage")
    used = held["usedSize"] + held.get("backingStorageSize", 0)
    assert used < MEGABYTES * 2**20
