"""The site that `make docs` has built: links, anchors, and search without a server."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.docs.test_docs import ROOT

SITE = ROOT / "docs" / "_build"
pytestmark = pytest.mark.skipif(
    not (SITE / "searchindex.js").is_file(), reason="the site is not built: make docs"
)


class Page(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors.add(values.get("id") or "")
        self.links += [values[name] or "" for name in ("href", "src") if name in values]


def test_links_and_anchors_of_the_site_exist() -> None:
    pages = {path.resolve(): Page(path) for path in SITE.rglob("*.html")}
    assert len(pages) > 50
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (target in pages and anchor not in pages[target].anchors):
                dead.append(f"{path.relative_to(SITE)}: {link}")
    assert not dead


def test_nothing_on_the_site_is_fetched_from_elsewhere() -> None:
    """A script, style or picture from another host would fail without a network."""
    for path in SITE.rglob("*.html"):
        page = path.read_text("utf-8")
        assert 'src="http' not in page, path
        assert 'stylesheet" href="http' not in page, path


def test_search_works_from_files() -> None:
    shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")
    with shared.playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shared.CHROMIUM, args=shared.FLAGS)
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(f"{(SITE / 'search.html').as_uri()}?q=beam+search")
        page.wait_for_selector("#search-results li a", timeout=20_000)
        page.wait_for_function(
            "document.querySelector('.search-summary')?.innerText.includes('finished')"
        )
        titles = page.locator("#search-results li a").all_inner_texts()
        browser.close()
    assert "Glossary" in titles
    assert titles[-2:] == ["Log", "Measurements of release 0.1"]  # the research notes come last
    assert not errors
