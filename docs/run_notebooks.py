"""Execute the notebooks, and write them as pages of the site.

    python docs/run_notebooks.py                     # all of docs/notebooks/*.py (make notebooks)
    python docs/run_notebooks.py attention-by-hand   # one

A cell that fails, or a notebook with fewer than three pictures, fails the command. Executed
notebooks are kept as docs/notebooks/generated/NAME.ipynb, and the site shows their outputs. The
notebooks share a temporary folder, so that one can load a run that another has trained.
"""

import base64
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat

SOURCES = Path(__file__).parent / "notebooks"
GENERATED = SOURCES / "generated"
# Each after the ones that it links back to.
ORDER = (
    *("attention-by-hand", "positions", "train-a-translator", "look-inside"),
    *("fine-tune-an-encoder", "long-sequences", "scaling-laws"),
)
MIN_PICTURES = 3
CELL_SECONDS = 900


def read(name: str) -> Any:
    """A notebook without outputs, from its source in the percent format."""
    return jupytext.read(SOURCES / f"{name}.py", fmt="py:percent")


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def execute(name: str, folder: str) -> None:
    from nbclient import NotebookClient

    notebook = read(name)
    where = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=where).execute()
    if (count := pictures(notebook)) < MIN_PICTURES:
        sys.exit(f"{name} draws {count} pictures: at least {MIN_PICTURES} are wanted")
    GENERATED.mkdir(exist_ok=True)
    nbformat.write(notebook, GENERATED / f"{name}.ipynb")


def executed(name: str) -> Any:
    """The notebook with its outputs if it was executed since its source changed, else without."""
    source, file = read(name), GENERATED / f"{name}.ipynb"
    if file.is_file():
        result = nbformat.read(file, as_version=4)
        if [cell.source for cell in result.cells] == [cell.source for cell in source.cells]:
            return result
    return source


def pages() -> dict[str, bytes]:
    """The files of the site by name: a page for each notebook, and its pictures."""
    files = {}
    for name in ORDER:
        notebook, parts = executed(name), []
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                parts.append(cell.source)
                continue
            parts.append(f"```python\n{cell.source}\n```")
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if output.output_type == "stream" and output.name == "stdout":
                    parts.append(f"```text\n{output.text.rstrip()}\n```")
                elif "image/png" in data:
                    picture = f"{name}-{len(files)}.png"
                    files[picture] = base64.b64decode(data["image/png"])
                    parts.append(f"![Picture drawn by the cell above]({picture})")
        note = f"This page is the notebook `docs/notebooks/{name}.py`. Open it with Jupyter and "
        note += "jupytext, or run it with `python`."
        if not pictures(notebook):
            note += " `make notebooks docs` builds this page with pictures."
        parts.insert(1, note)
        files[f"{name}.md"] = ("\n\n".join(parts) + "\n").encode()
    return files


def main() -> None:
    names = sys.argv[1:] or ORDER
    if unknown := set(names) - set(ORDER):
        sys.exit(f"there is no notebook {', '.join(sorted(unknown))}: choose {', '.join(ORDER)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            began, used = time.perf_counter(), os.times().children_user
            execute(name, folder)
            seconds = time.perf_counter() - began
            cpu = os.times().children_user - used
            print(f"{name:<22} {seconds:4.0f} s, {cpu:4.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
