"""Accessibility of every page in both themes: axe-core, contrast, keys, zoom, motion."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.web.small_models import make_models
from tests.web.small_pages import make_runs
from tests.web.test_page import (  # noqa: F401
    address,
    browser,
    expect,
    page,
    settled,
    visit,
)

AXE = Path(__file__).parent / "js" / "node_modules" / "axe-core" / "axe.min.js"
# Every page with a run that fits it, and the views that differ most.
PLACES = {
    "runs": "/",
    "tour": "/tour?run=translator&stop=7",
    "watch": "/watch?run=translator",
    "train": "/train?run=translator",
    "flow": "/flow?run=translator&box=decoder.cross.weights",
    "flow-model": "/flow?run=translator&zoom=model&box=decoder.distribution",
    "attention": "/attention?run=translator&off=decoder.cross.0.0&sweep=1",
    "attention-lines": "/attention?run=translator&view=lines&query=1",
    "attention-qk": "/attention?run=translator&view=qk",
    "attention-text": "/attention?run=deep/writer",
    "lens": "/lens?run=translator",
    "positions": "/positions",
    "tokens": "/tokens?run=translator",
    "translate": "/translate?run=translator&at=1",
    "quiz": "/quiz?answers=thinking.a+why-scaled",
    "decode": "/decode?run=translator&node=0",
    "fill": "/fill?run=kinds/reader",
    "image": "/image?run=kinds/pictures",
    "music": "/music?run=kinds/chorales",
}
AUDIT = """async (rules) => {
  const how = { resultTypes: ["violations"], ...(rules ? { runOnly: rules } : {}) };
  const { violations } = await axe.run(document, how);
  return violations
    .filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => [id, ...nodes.slice(0, 3).map((node) => node.html.slice(0, 200))]);
}"""
# Controls of which neither border nor fill has a contrast of 3 with the background around them.
FAINT = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = (c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const solid = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const plain = "input:not([type=range], [type=checkbox], [type=file])";
  const inside = `main :is(button, select, textarea, ${plain})`;
  const controls = document.querySelectorAll(`${inside}, #tools button, .saving summary`);
  const bare = ".saving button, .hypotheses button, .diagram button, .closed button"; // text only
  return [...controls]
    .filter((one) => one.checkVisibility() && !one.disabled && !one.matches(bare))
    .filter((one) => {
      const around = solid(one.parentElement);
      const border = numbers(getComputedStyle(one).borderTopColor);
      return Math.max(contrast(border, around), contrast(solid(one), around)) < 3;
    })
    .map((one) => one.outerHTML.slice(0, 120));
}"""
LINES = r"""async () => {
  const { LINES } = await import("/page/colour.js");
  return LINES;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_runs(tmp_path_factory.mktemp("runs"))
    make_models(made / "kinds")
    return made


def use_theme(page: Any, theme: str) -> None:  # noqa: F811
    page.evaluate(
        """async (theme) => {
          document.documentElement.dataset.theme = theme;
          // Colours have a transition, which begins when the style is computed.
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          await Promise.all(document.getAnimations().map((one) => one.finished));
        }""",
        theme,
    )


def test_lines_stand_out(page: Any) -> None:  # noqa: F811
    visit(page, "/")
    for colour in page.evaluate(LINES):
        for panel in ("#ffffff", "#1e2226"):
            assert contrast(colour, panel) >= 3, (colour, panel)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours by WCAG."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


REACHABLE = """() => {
  const controls = "a[href], button, input, select, textarea, summary, [tabindex]";
  return [...document.querySelectorAll(controls)]
    .filter((one) => one.tabIndex >= 0 && !one.disabled && one.checkVisibility()).length;
}"""


@pytest.mark.parametrize("name", PLACES)
def test_a_page_is_accessible(page: Any, name: str) -> None:  # noqa: F811
    """In both themes, at 200 % (a window of 1280 pixels is then 640 wide), and without a mouse.

    axe-core finds nothing serious, and controls stand out.
    """
    visit(page, PLACES[name])
    for theme, rules in (("light", None), ("dark", ["color-contrast"])):
        use_theme(page, theme)
        assert page.evaluate(FAINT) == [], theme
        if AXE.exists():
            page.evaluate(AXE.read_text())
            serious = page.evaluate(AUDIT, rules)
            assert not serious, json.dumps([theme, *serious], indent=1, ensure_ascii=False)
    if "-" not in name:
        walk_by_tab(page)
    page.set_viewport_size({"width": 640, "height": 512})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 640
    assert page.evaluate(REACHABLE) > 5
    if not AXE.exists():
        pytest.skip("all but axe-core, which is not installed: run `make page-tools`")


def walk_by_tab(page: Any) -> None:  # noqa: F811
    """Tab stops at each control once, the focus is visible and never trapped."""
    expected = page.evaluate(REACHABLE)
    seen = page.evaluate("() => ((globalThis.stops = new Set()), 0)")
    for _ in range(expected + 5):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            """() => {
              const on = document.activeElement;
              if (on === document.body) return -1;
              globalThis.stops.add(on);
              const { outlineStyle, outlineWidth } = getComputedStyle(on);
              if (outlineStyle === "none" || parseFloat(outlineWidth) < 2) return on.outerHTML;
              return globalThis.stops.size;
            }"""
        )
        assert not isinstance(seen, str), f"the focus is invisible: {seen[:200]}"
        if seen == -1:
            break
    assert page.evaluate("() => globalThis.stops.size") >= expected


def test_letters_can_be_turned_off(page: Any) -> None:  # noqa: F811
    visit(page, PLACES["attention-text"])
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("single letters").uncheck()
    page.keyboard.press("Escape")
    page.locator("main").focus()
    for key in ("s", "x", "]", "?"):
        page.keyboard.press(key)
    settled(page)
    assert "stage" not in page.url
    assert "off" not in page.url
    assert "head=" not in page.url
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.reload()  # the choice stays
    settled(page)
    page.keyboard.press("s")
    assert "stage" not in page.url
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("single letters").check()
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    expect(page.locator("figure.staged")).to_have_count(1)


def test_differences_are_not_shown_by_colour_only(page: Any) -> None:  # noqa: F811
    off = "+".join(f"decoder.cross.{layer}.{head}" for layer in range(2) for head in range(2))
    visit(page, f"/attention?run=translator&off={off}")
    changed = page.locator("mark.changed").first
    expect(changed).to_contain_text("changed: ")
    assert changed.evaluate("e => parseFloat(getComputedStyle(e).borderBottomWidth)") >= 2
    for figure in page.locator("figure:visible").all():
        assert figure.get_by_role("heading").count() >= 1
    assert page.locator("[role=application]").count() == 0


def test_reduced_motion_has_no_transitions(browser: Any, address: str) -> None:  # noqa: F811
    context = browser.new_context(base_url=address, reduced_motion="reduce")
    single = context.new_page()
    visit(single, PLACES["flow"])
    moving = """() => [...document.querySelectorAll("*")].filter((one) => {
      const { transitionDuration, animationName } = getComputedStyle(one);
      return parseFloat(transitionDuration) > 0 || animationName !== "none";
    }).length"""
    assert single.evaluate(moving) == 0
    context.close()
