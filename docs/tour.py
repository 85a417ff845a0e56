"""Write the texts of the Tour page from docs/follow-a-sentence.md.

    python docs/tour.py

A step begins with a comment, `<!-- tour: TITLE | PAGE KEY=VALUE ... -->`: the page of the web
application to show and its state. The paragraph after it is the text; a paragraph in $$ after that
is the formula, converted from TeX to MathML; `<!-- try: QUESTION -->` is a question to the reader,
`<!-- predict: QUESTION -->` a question that the sentence of the view answers. The result is
src/manyheads/web/page/tour.json; a test checks that it is up to date.
"""

import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

DOCS = Path(__file__).parent
SOURCE = DOCS / "follow-a-sentence.md"
TARGET = DOCS.parent / "src" / "manyheads" / "web" / "page" / "tour.json"
STEP = re.compile(
    r"<!-- tour: (?P<title>[^|]+?) \| (?P<view>.+?) -->\n(?P<text>[^\n]+)\n"
    r"(\n\$\$(?P<formula>.+?)\$\$\n)?"
    r"(\n<!-- (?P<kind>try|predict): (?P<question>[^\n]+) -->\n)?"
)


def steps(text: str) -> list[dict[str, Any]]:
    """The steps of the tour in the order of the page."""
    result = []
    for match in STEP.finditer(text):
        page, *settings = match["view"].split()
        formula = match["formula"]
        result.append(
            {
                "title": match["title"],
                "page": page,
                "state": dict(setting.split("=", 1) for setting in settings),
                "text": match["text"].replace("`", ""),
                "formula": convert(formula, display="block") if formula else "",
                "question": match["question"],
                "predict": match["kind"] == "predict",
            }
        )
    return result


def rendered() -> str:
    content = steps(SOURCE.read_text(encoding="utf-8"))
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered(), encoding="utf-8")
