"""The site: Sphinx, MyST and Furo, without any network. Built by `make docs`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import generate  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from manyheads import __version__  # noqa: E402

project = "Manyheads"
release = version = __version__
copyright = "the authors of Manyheads"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
suppress_warnings = ["misc.highlighting_failure"]  # blocks of output are not programs
highlight_language = "none"

default_role = "code"  # single backticks in docstrings
maximum_signature_line_length = 80
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "Manyheads"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # a browser does not let a page from a file fetch others
html_search_scorer = str(HERE / "search_scorer.js")
html_theme_options = {"navigation_with_keys": True}


def setup(app: Sphinx) -> None:
    generate.write_pages(HERE / "reference" / "generated")
    generate.write_notebooks(generate.run_notebooks.GENERATED)
    generate.add_mathml(app)
    app.connect("source-read", generate.link_outside)
