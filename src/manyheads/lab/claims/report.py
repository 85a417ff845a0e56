"""Results of claims as one self-contained HTML page and as a Markdown page for the docs."""

import base64
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from manyheads.fileio import write_text
from manyheads.lab.claims.claim import LECTURES, WORDS, Claim, Setting, mean, spread
from manyheads.lab.claims.runner import Result, claims, command_of, kept

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid #8886; padding: 1rem 0; }
img { max-width: 100%; background: white; }
table { border-collapse: collapse; } td, th { padding: .1rem .8rem .1rem 0; text-align: left; }
code { overflow-wrap: anywhere; }
.holds { color: #1a7f37; } .fails { color: #cf222e; } .depends { color: #9a6700; }
"""


def counted(results: Sequence[Result]) -> str:
    """The number of each verdict, as in "12 hold, 2 depend, 1 fails"."""
    counts = Counter(result.verdict for result in results)
    by_verdict = [(verdict, counts[verdict]) for verdict in WORDS if counts[verdict]]
    return ", ".join(
        f"{count} {verdict if count == 1 else verdict.removesuffix('s')}"
        for verdict, count in by_verdict
    )


def source(lectures: str) -> str:
    """The titles of the lectures that make a claim, from their numbers."""
    if lectures == "none":
        return "the paper, not a lecture"
    return "; ".join(LECTURES[number] for number in lectures.split(", "))


def how(results: Sequence[Result]) -> str:
    """How the numbers of a page were computed."""
    seeds = sorted({seed for result in results for seed in result.seeds})
    return (
        f"Each experiment is run with the seeds {', '.join(map(str, seeds))}; a number is the mean "
        "over the seeds ± the standard deviation. The criterion of each claim computes its verdict "
        "from the numbers."
    )


def as_html(results: Sequence[Result], folder: Path, command: str) -> str:
    """All results on one page with embedded plots."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>Claims of the lectures</title>",
        f"<style>{STYLE}</style><h1>Claims of the lectures, put to the test</h1>",
        f"<p>{escape(counted(results))}.</p>",
        f"<p>Written by <code>{escape(command)}</code>. {escape(how(results))}</p>",
    ]
    for result in results:
        rows = "".join(
            f"<tr><th>{escape(name)}<td>{mean(values):.4g}{spread(values)}"
            for name, values in result.numbers.items()
        )
        parts.append(
            f"<section id={escape(result.name)}><h2>{escape(result.sentence)}</h2>"
            f"<p><strong class={result.verdict}>{WORDS[result.verdict]}</strong>: "
            f"{escape(result.why)}.</p><p>Source: {escape(source(result.deck))}. Criterion: "
            f"{escape(result.criterion)}.</p><table>{rows}</table>{_image(result, folder)}"
            f"<p><code>{escape(result.command)}</code><br>seeds "
            f"{', '.join(map(str, result.seeds))}; {result.seconds:.1f} s; "
            f"{escape(result.machine)}; release {result.release}</p></section>"
        )
    return "\n".join(parts) + "\n"


def _image(result: Result, folder: Path) -> str:
    if result.picture is None:
        return ""
    inside = base64.b64encode((folder / result.picture).read_bytes()).decode("ascii")
    return f"<p><img alt='{escape(result.name)}' src='data:image/png;base64,{inside}'></p>"


def as_markdown(results: Sequence[Result], command: str) -> str:
    """A page for the docs: a table of all claims, and one section per claim.

    Its plots are in a folder next to it, so copy both together.
    """
    lines = [
        "# The lectures' claims, put to the test",
        "",
        f"Written by `{command}`: {counted(results)}.",
        "",
        "Needs: the extra `figures` for the plots. Each claim has its time; all of them took "
        f"{sum(result.seconds for result in results) / 60:.0f} minutes.",
        "",
        f"{_plain(how(results))} Each claim is a file in `src/manyheads/lab/claims/lectures`.",
        "",
        "| claim | sentence | verdict |",
        "|---|---|---|",
    ]
    for result in results:
        link = f"[{result.name}](#{result.name})"
        lines.append(f"| {link} | {_plain(result.sentence)} | {WORDS[result.verdict]} |")
    for result in results:
        lines += ["", f"## {result.name}", "", *_section(result)]
    return "\n".join([*lines, ""])


def _section(result: Result) -> list[str]:
    lines = [
        f"{_plain(result.sentence)} Source: {source(result.deck)}.",
        "",
        f"**{WORDS[result.verdict].capitalize()}**: {_plain(result.why)}.",
        "",
        f"- criterion: {_plain(result.criterion)}",
        f"- run: `{result.command}`, {result.seconds:.1f} s on {_plain(result.machine)}, "
        f"release {result.release}",
    ]
    shown = f"![What {result.name} measured]({result.picture})"
    return lines if result.picture is None else [*lines, "", shown]


def _plain(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return re.sub(r"([\\`*_\[\]<>|$~])", r"\\\1", text)


def listing(known: Mapping[str, Claim]) -> str:
    """A line for each claim."""
    return "".join(f"{n}: {c.sentence} ({source(c.lectures)})\n" for n, c in known.items())


def save_report(
    results: Sequence[Result], setting: Setting, folder: Path, *, everything: bool
) -> None:
    """A report of these results, and of earlier ones of the same settings in the folder."""
    names, known = [result.name for result in results], list(claims())
    others = (kept(name, setting, folder) for name in known if name not in names)
    every = sorted([*results, *filter(None, others)], key=lambda result: known.index(result.name))
    what = "--all" if everything else " ".join(f"--run {result.name}" for result in every)
    into = shlex.quote(folder.resolve().name)  # without the path on this machine
    write_report(every, folder, f"{command_of(what, setting)} --report {into}")


def write_report(results: Sequence[Result], folder: Path, command: str) -> None:
    """Write index.html, claims.json and claims.md into the folder that has the plots."""
    write_text(folder / "index.html", as_html(results, folder, command))
    write_text(folder / "claims.md", as_markdown(results, command))
    rows = [result.as_json() for result in results]
    text = json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "claims.json", text + "\n")
