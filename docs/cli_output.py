"""Write docs/command-line.md: real output of the command line, at 80 columns.

    python docs/cli_output.py            # rewrite the page
    python docs/cli_output.py --check    # exit with 1 if the page is out of date

The commands run in a pseudo-terminal. Parts that depend on the machine (versions, device, speed)
are replaced.
"""

import argparse
import os
import pty
import re
import select
import shlex
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parent / "command-line.md"
SOURCE = Path(__file__).parents[1] / "src"
# A tiny translator for the commands that need a run.
TINY = (
    "train phrasebook data.train_pairs=5000 data.valid_pairs=9 model.dim=64 model.layers=1 "
    "train.steps=250 train.warmup_steps=50 decode.bleu_sentences=0 --out runs/demo --device cpu"
)

SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "Find a command",
        "Each command has its own `--help` with examples.",
        ["--help", "train --help", "--version"],
    ),
    (
        "Find a recipe",
        "A recipe is a file of settings that trains one model. Copy one with `--print-config`.",
        ["recipes"],
    ),
    (
        "Find a setting",
        "Settings are written as `KEY=VALUE`. The second argument is the beginning of a name, or "
        "a word to search for. In a pipe, each setting is one line.",
        [
            "settings phrasebook model",
            "settings phrasebook 'learning rate'",
            "settings phrasebook 'gradient accumulation'",
            "settings phrasebook 'mixed precision'",
        ],
    ),
    (
        "Know the cost before training",
        "A dry run prepares the data, times a few steps and writes nothing.",
        ["train phrasebook --dry-run --device cpu"],
    ),
    (
        "Errors",
        "An error is one line with a remedy. The exit code is 2 for a user's error, 3 for data "
        "that cannot be used.",
        [
            "train phrasebok",
            "train phrasebook train.learning_rat=1e-3",
            "train phrasebook model.dropout=1.5",
            "translate runs/demo in.txt",
        ],
    ),
    (
        "Input from a terminal",
        "Commands that read lines take a file, a pipe or the terminal.",
        ["translate runs/demo --device cpu"],
    ),
]

# Machine-dependent parts of the output.
REPLACED = (
    (r"(?m)^(manyheads|Python|torch)( +)\d\S*", r"\1\2X.Y.Z"),
    (r"(?m)^(device +)\w+ \(.*\)", r"\1cpu (x86_64)"),
    (r"(?m)^(extras +).*", r"\1figures, web"),
    (r"(?m)^not installed.*\n", ""),
    (r"cpu, [\d,]+ tokens/s", "cpu, N tokens/s"),
    (r"about [\d.]+ (s|min|h) without", "about N min without"),
    (r"about [\d.]+ [KMG]iB", "about N MiB"),
)


def run(command: str, folder: Path, keys: str = "") -> str:
    """The screen of `manyheads COMMAND` in a terminal of 80 columns; `keys` are typed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "COLUMNS": "80",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        words = [sys.executable, "-m", "manyheads", *shlex.split(command)]
        os.execve(sys.executable, words, environment)
    shown = b""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the process has ended
            break
        shown += part
        if not part:
            break
        if keys and b"Ctrl-D" in shown:
            os.write(terminal, keys.encode())
            keys = ""
    os.waitpid(process, 0)
    os.close(terminal)
    text = shown.decode().replace("\r\n", "\n").replace("^D\b\b", "")
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def page() -> str:
    parts = [
        "# Command line",
        "The output of the commands at 80 columns, written by `docs/cli_output.py`; versions, "
        "times and memory depend on the machine.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        run(TINY, Path(folder))
        for title, text, commands in SECTIONS:
            parts += [f"## {title}", text]
            for command in commands:
                keys = "The dog sleeps.\n\x04" if title == "Input from a terminal" else ""
                shown = run(command, Path(folder), keys)
                parts.append(f"```console\n$ manyheads {command}\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/command-line.md.")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if stale")
    check = parser.parse_args().check
    text = page()
    if check:
        sys.exit(PAGE.read_text("utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
