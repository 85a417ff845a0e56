"""Check the language of docs, docstrings, comments, messages and page strings.

    python scripts/prose.py             check the tree; exit code 1 if a discouraged phrase is new
    python scripts/prose.py --update    accept all present phrases

`PHRASES` maps discouraged phrases to what to write instead. Present uses are listed in
`scripts/prose-accepted.txt`, one `file: line of text` per line; the list should only shrink.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ACCEPTED = Path(__file__).parent / "prose-accepted.txt"
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/lectures/*.md",
    "src/**/*.py",
    "src/**/*.js",
    "tests/**/*.py",
)
FILES += ("benchmarks/*.py", "scripts/*.py", "examples/*.py")
EXCLUDED = ("docs/research-notes/", "tests/golden/", "scripts/prose.py")

PHRASES = {
    r"\b(is|are|was|were|be|been|unless) told\b": "reported, configured, set",
    r"\bhangs? on\b": "depends on",
    r"\bbesides? (it|them|that|those|each|ours|theirs)\b": "next to, in addition to",
    r"\bby (itself|themselves)\b": "separately, automatically",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bhas no say\b": "has no effect",
    r"\b(a|the|one|each|every) room\b|\brooms\b": "module, buffer, capacity",
    r"\bwhoever\b": "anyone who",
    r"(^|[.:;#] )What (is|was|are|were|a|an|the|it|comes|stands|has|had)\b[^?]*$": "a noun phrase",
    r"(^|[.:;#] )Of (the|a|all|these|those|each|this|what)\b": "put the subject first",
    r"\bdecks?\b": "the lecture, by its name",
    r"\bas (it is|they are)\b": "eager, default, unchanged",
    r"\bunheard\b|\bnobody listens\b": "no hooks",
    r"\bwhat (stands|lies)\b": "is",
    r"\bgo(es)? on\b": "continue, resume",
    r"\bnothing is lost\b": "say what is kept",
    r"\bin one piece\b": "gathered",
    r"\bthat which\b": "the one that",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in PHRASES.items()]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts; for a Python file only its strings and comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
    # Python 3.12 and later split f-strings into other tokens; their texts are constants.
    if sys.version_info >= (3, 12):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                yield node.lineno, "".join(map(str, parts))


def find() -> Iterator[tuple[str, int, str, str]]:
    """File, line number, text and advice of every discouraged phrase."""
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern)})
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(EXCLUDED):
            continue
        for number, text in texts(path):
            for pattern, advice in PATTERNS:
                if pattern.search(text):
                    yield name, number, text.strip(), advice


def main() -> int:
    hits = list(find())
    if sys.argv[1:] == ["--update"]:
        lines = sorted({f"{name}: {text}" for name, _, text, _ in hits})
        ACCEPTED.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    accepted = (
        set(ACCEPTED.read_text(encoding="utf-8").splitlines()) if ACCEPTED.exists() else set()
    )
    new = [hit for hit in hits if f"{hit[0]}: {hit[2]}" not in accepted]
    for name, number, text, advice in new:
        print(f"{name}:{number}: {text[:90]}  → {advice}")
    print(f"{len(new)} new discouraged phrases, {len(hits) - len(new)} accepted")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
