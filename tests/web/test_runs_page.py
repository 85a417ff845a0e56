"""In a real browser: which pages a run leads to, axes that count, and what drawing costs."""

import os
import random
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from tests.web.small_models import SENTENCE, make_models
from tests.web.small_pages import make_runs

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from manyheads.models.gpt import GptConfig  # noqa: E402
from manyheads.run import Run, save_run  # noqa: E402
from manyheads.tokenizer.train import Words  # noqa: E402

address, browser, page = shared.address, shared.browser, shared.page  # fixtures
expect, visit, settled, pixels = shared.expect, shared.visit, shared.settled, shared.pixels
LAYERS, HEADS = 6, 8
SECONDS = {256: 1.5, 1024: 3.0}  # by the tokens of a text, on quiet cores
MEGABYTES = 32
WORDS = [f"w{number}" for number in range(50)]
# The first is the primary link: these runs have no probes, so none of them leads to Watch first.
WAYS = {
    "translator": "Tour Watch Flow Attention Lens Positions Tokens Translate Decode Train",
    "writer": "Decode Watch Flow Attention Lens Positions Tokens Train",
    "reader": "Fill Flow Attention Positions Tokens Train",
    "labels": "Flow Attention Positions Tokens Train",
    "pictures": "Image Watch Positions Train",
    "piano": "Music Watch Flow Attention Lens Positions Tokens Decode Train",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and `wide`: as many heads as a translator of the first paper has."""
    made = make_models(tmp_path_factory.mktemp("models"))
    torch.manual_seed(1)
    tokenizer = Words().train([" ".join(WORDS)])
    sizes: dict[str, Any] = {
        "dim": 64,
        "layers": LAYERS,
        "heads": HEADS,
        "max_length": max(SECONDS),
    }
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
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Colours").select_option("own")
    settled(page)
    assert "colours=own" in page.url
    assert page.locator(".heatmap .readout").inner_text() == readout
    last = np.array([16, 20, 48])  # ink
    for selector in (".plane > canvas", "[aria-label^='layer 2, head 2'] canvas"):
        drawn = pixels(page, selector)[..., :3]
        assert (drawn == last).all(-1).any(), selector


def hold_to_budget(seconds: float, budget: float) -> None:
    """A budget is for quiet cores: a busy machine may keep it, but cannot break it."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if seconds >= budget and load > 2 * cores:
        pytest.skip(f"{seconds:.1f} s say nothing at a load of {load:.1f} on {cores} cores")
    assert seconds < budget


def drawn_within(page: Any, places: list[str]) -> float:
    """Seconds until a page is drawn, the best of some that the server has not computed before."""
    taken = []
    for place in places:
        begun = time.perf_counter()
        visit(page, place)
        taken.append(time.perf_counter() - begun)
    return min(taken)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", SECONDS)
def test_many_heads_are_drawn_within_the_budget(page: Any, tokens: int) -> None:
    """6 layers × 8 heads; benchmarks/page.py has the same measurement in detail."""
    texts = [" ".join(random.Random(seed).choices(WORDS, k=tokens)) for seed in range(4)]
    seconds = drawn_within(page, [f"/attention?run=wide&text={quote(text)}" for text in texts])
    assert pixels(page, ".plane > canvas").shape[:2] == (tokens, tokens)
    assert page.locator(".heads canvas").count() == LAYERS * HEADS
    assert page.evaluate("() => document.querySelectorAll('*').length") < 1000
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")  # the pages before this one
    held = session.send("Runtime.getHeapUsage")
    megabytes = (held["usedSize"] + held.get("backingStorageSize", 0)) / 2**20
    print(f"{tokens} tokens: {seconds:.2f} s, {megabytes:.0f} MB, load {os.getloadavg()[0]:.1f}")
    assert megabytes < MEGABYTES
    hold_to_budget(seconds, SECONDS[tokens])


@pytest.mark.slow
def test_the_first_translation_is_drawn_within_the_budget(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    """From a server that has just started, with the model not yet loaded."""
    make_runs(tmp_path)
    with shared.serving(tmp_path) as place:
        single = browser.new_page(base_url=place)
        begun = time.perf_counter()
        single.goto("/translate?run=translator")
        single.locator("output.sentence").wait_for()
        settled(single)
        seconds = time.perf_counter() - begun
        single.close()
    print(f"first Translate: {seconds:.2f} s, load {os.getloadavg()[0]:.1f}")
    hold_to_budget(seconds, 1.5)
