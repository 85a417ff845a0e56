"""Commands that carry weights in and out: import, export."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import command_name, say
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.decode.beam import Decode

Folder = Annotated[Path, typer.Option("--out", help="The folder to write; new or empty")]
FORMATS = ("huggingface", "ctranslate2", "onnx")


def import_folder(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with config.json, model.safetensors")
    ],
    out: Folder,
) -> None:
    """Make a run of a HuggingFace folder: weights, tokenizer.json, how it writes.

    manyheads import DIR --out runs/theirs

    Nothing is fetched, unpickled or run. The commands also take DIR itself.
    """
    from manyheads.exchange.huggingface import import_model
    from manyheads.loading import check_vocabulary, import_notes, run_of
    from manyheads.run import save_run

    _refuse_full(out)
    imported = import_model(folder)
    run = run_of(imported)
    check_vocabulary(folder, imported.tokenizer, run.model)
    with _written_whole(out) as beside:
        save_run(run, imported.tokenizer, imported.model, beside)
    for note in import_notes(imported):
        say(note)
    count = sum(p.numel() for p in imported.model.parameters())
    say(f"imported: {out} ({run.model.kind}, {count:,} parameters)")
    say(f"next: {command_name()} info {out}")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    out: Folder,
    to: Annotated[str, typer.Option(help="huggingface, ctranslate2 or onnx")],
    quantization: Annotated[
        str | None,
        typer.Option(help="Of ctranslate2: int8, float16, ...; float32 unless given"),
    ] = None,
) -> None:
    """Write a run for another program, and for the commands here.

    manyheads export RUN --to huggingface --out DIR

    huggingface: what AutoModel and AutoTokenizer open.
    ctranslate2: encoder–decoders and decoders for CTranslate2, also int8.
    onnx: graphs for onnxruntime.
    """
    from manyheads.config import nearest
    from manyheads.exchange.ctranslate2 import write_ctranslate2
    from manyheads.exchange.folder import write_huggingface
    from manyheads.exchange.onnx import write_onnx
    from manyheads.fileio import write_text
    from manyheads.loading import TorchRun, load_run
    from manyheads.models.gpt import Gpt
    from manyheads.models.seq2seq import Seq2Seq
    from manyheads.run import SETTINGS, TOKENIZER, settings_text

    if to not in FORMATS:
        raise UserError(f"--to {to}: {nearest(to, FORMATS)}")
    if quantization is not None and to != "ctranslate2":
        raise UserError("--quantization is for ctranslate2: leave it out")
    _refuse_full(out)
    opened = load_run(run)
    if not isinstance(opened, TorchRun):
        raise UserError(f"{run} was exported already: export the run that it came from")
    model, written, note = opened.model, opened.run, ""
    with _written_whole(out) as beside:
        if to == "huggingface":
            changed = write_huggingface(model, opened.own_tokenizer, written.decode, beside)
            note = f", where transformers has {', '.join(changed)}" if changed else ""
        elif to == "onnx":
            write_onnx(model, beside)
        elif isinstance(model, Seq2Seq | Gpt):
            how = {"stopping": "early", "at_limit": "truncate"}
            decode, note = _there(written.decode, "CTranslate2", **how)
            written = dataclasses.replace(written, decode=decode)
            precision = quantization or "float32"
            write_ctranslate2(model, opened.tokenizer, beside, precision, decode)
        else:
            raise opened.unsupported("CTranslate2 runs here", "a seq2seq or a gpt model")
        if to != "huggingface" and opened.own_tokenizer is not None:
            opened.own_tokenizer.save(beside / TOKENIZER)
        # The tokenizer of a HuggingFace folder is written by their library.
        sealed = None if to == "huggingface" else beside
        write_text(beside / SETTINGS, settings_text(written, sealed))
    say(f"exported: {out}{note}")


def _there(decode: "Decode", program: str, **has: Any) -> tuple["Decode", str]:
    """The settings of writing with those that a program has in their place, and what changes."""
    changed = [
        f"decode.{name}={value} in place of {getattr(decode, name)}"
        for name, value in has.items()
        if getattr(decode, name) != value
    ]
    note = f", where {program} has {', '.join(changed)}" if changed else ""
    return dataclasses.replace(decode, **has), note


def _refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there and not empty: choose another folder with --out")


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into, whose files come into `out` once all are there."""
    from manyheads.fileio import PARTIAL
    from manyheads.run import SETTINGS, make_folder

    new = [folder for folder in out.parents if not folder.exists()]
    make_folder(out.parent)
    try:
        with tempfile.TemporaryDirectory(PARTIAL, f".{out.name}.", out.parent) as beside:
            inside = Path(beside) / (out.name or "run")
            inside.mkdir()  # with the rights of a new folder, which files take theirs from
            yield inside
            if not out.exists():
                os.replace(inside, out)  # all at once
                return
            for path in sorted(inside.iterdir(), key=lambda path: path.name == SETTINGS):
                os.replace(path, out / path.name)
    except BaseException:
        for folder in new:
            with suppress(OSError):  # something has come into it meanwhile
                folder.rmdir()
        raise
