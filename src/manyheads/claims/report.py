"""What claims came to, for people: one page that opens anywhere, and a page for the docs."""

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import fmean, stdev

from manyheads.claims.runner import Result
from manyheads.files import write_text

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid #8886; padding: 1rem 0; }
img { max-width: 100%; background: white; }
table { border-collapse: collapse; } td, th { padding: .1rem .8rem .1rem 0; text-align: left; }
code { overflow-wrap: anywhere; }
.holds { color: #1a7f37; } .fails { color: #cf222e; } .depends { color: #9a6700; }
"""
WORDS = {"holds": "holds", "fails": "fails", "depends": "it depends"}


def counted(results: Sequence[Result]) -> str:
    """12 hold, 2 depend, 1 fails."""
    counts = Counter(result.verdict for result in results)
    words = (("holds", "hold"), ("depends", "depend"), ("fails", "fail"))
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in words if counts[verdict])


def _number(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{fmean(values):.4g}{spread}"


def as_html(results: Sequence[Result], folder: Path) -> str:
    """All of them on one page, pictures inside it."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>Claims of the lectures</title>",
        f"<style>{STYLE}</style><h1>Claims of the lectures, put to the test</h1>",
        f"<p>{escape(counted(results))}.</p>",
    ]
    for result in results:
        rows = "".join(
            f"<tr><th>{escape(name)}<td>{_number(values)}"
            for name, values in result.numbers.items()
        )
        parts.append(
            f"<section id={escape(result.name)}><h2>{escape(result.sentence)}</h2>"
            f"<p><strong class={result.verdict}>{WORDS[result.verdict]}</strong>: "
            f"{escape(result.why)}.</p><p>Decks {escape(result.deck)}. Criterion: "
            f"{escape(result.criterion)}.</p><table>{rows}</table>{_image(result, folder)}"
            f"<p><code>{escape(result.command)}</code><br>seeds "
            f"{', '.join(map(str, result.seeds))}; {result.seconds:.0f} s; "
            f"{escape(result.machine)}</p></section>"
        )
    return "\n".join(parts) + "\n"


def _image(result: Result, folder: Path) -> str:
    if result.picture is None:
        return ""
    inside = base64.b64encode((folder / result.picture).read_bytes()).decode("ascii")
    return f"<p><img alt='{escape(result.name)}' src='data:image/png;base64,{inside}'></p>"


def as_markdown(results: Sequence[Result], command: str) -> str:
    """The same as a page of the docs, from the results alone."""
    lines = [
        "# The lectures' claims, put to the test",
        "",
        f"Written by `{command}`: {counted(results)}. Each claim is a file in "
        "`src/manyheads/claims/decks`, with its experiment and its criterion; a number is the mean "
        "over the seeds ± their standard deviation.",
        "",
        "| claim | decks | verdict | measured |",
        "|---|---|---|---|",
    ]
    for result in results:
        told = f"{result.why} (`{result.command}`, {result.seconds:.0f} s)"
        verdict = WORDS[result.verdict]
        lines.append(f"| {result.sentence} | {result.deck} | **{verdict}** | {told} |")
    machines = sorted({result.machine for result in results})
    return "\n".join([*lines, "", f"Machine: {'; '.join(machines)}.", ""])


def write_report(results: Sequence[Result], folder: Path, command: str) -> None:
    """index.html, claims.json and claims.md in the folder where the pictures are."""
    write_text(folder / "index.html", as_html(results, folder))
    write_text(folder / "claims.md", as_markdown(results, command))
    rows = [asdict(result) for result in results]
    write_text(folder / "claims.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
