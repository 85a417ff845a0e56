"""Prepare data: tokenise a corpus of any size into shards, in worker processes.

Every shard is a pure function of the texts in it, and is complete or absent. So a preparation that
is killed and started again leaves the same bytes, with any number of workers.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyheads.config import change, dump
from manyheads.data.language import Counts, TextData
from manyheads.data.prepared import INDEX, SAMPLE, PairSource, Shards, TextSource, read_index
from manyheads.data.shards import FORMAT, verify, write_shards
from manyheads.data.translation import FilesData
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.fileio import (
    PARTIAL,
    check_sum_of,
    drop_partials,
    make_subfolder,
    read_json,
    write_json,
)
from manyheads.run import TOKENIZER, Run, differences, make_folder, make_tokenizer
from manyheads.sizing import fit_to_data
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.metrics import Bar

PROGRESS = "progress.json"  # while shards are written
SOURCES = {TextData: TextSource, FilesData: PairSource}


def prepare_data(run: Run, out: Path, workers: int, report: Callable[[str], None]) -> None:
    """Tokenise the data of a run into a folder; the same call again continues, or verifies."""
    if run.task not in ("language", "translation") or type(run.data) not in SOURCES:
        raise UserError(
            f"task={run.task} with {type(run.data).__name__} cannot be prepared, only language "
            "models of text and translation of files: choose their recipes"
        )
    source: Any = SOURCES[type(run.data)](run.data)
    request = _request(run, source)
    if index := read_index(str(out)):
        request["checksum"] = _check_sums(source)
        _refuse_other(index.request, {name: request[name] for name in index.request}, out)
        for path in (path for split in index.splits for path in Shards(index, split).paths):
            verify(path)
        (out / PROGRESS).unlink(missing_ok=True)  # left by a kill
        report(f"{out} is complete; every shard and every file of the data match their checksums")
        return
    make_folder(out)
    run, tokenizer = _begin(run, source, request, out, report)
    del request["files"]  # with their times; a copy of the data has others
    request["checksum"] = _check_sums(source)  # before the shards: a later change is noticed
    frame, ends = SpecialTokens(tokenizer, run.decode).frame, run.task == "language"
    total, done = source.counts.characters, 0
    splits: dict[str, list[dict[str, Any]]] = {name: [] for name in source.splits()}
    with Bar("prepare", total) as bar:
        for split, shards in splits.items():
            make_subfolder(out / split)
            jobs = source.jobs(split, out, frame, ends=ends)
            for facts in write_shards(jobs, out / TOKENIZER, workers):
                shards.append(dataclasses.asdict(facts))
                done += facts.characters
                bar.update(min(done, total), split)
    names = source.write_texts(out)
    table = {
        "prepared": FORMAT,
        "task": run.task,
        "data": names or dump(run.data) | {"folder": "", "file": "", "valid": "", "test": ""},
        "tokens": run.tokens and dump(run.tokens),
        "target_tokens": run.target_tokens and dump(run.target_tokens),
        "ends": ends,
        "tokenizer": check_sum_of(out / TOKENIZER),
        "splits": splits,
        "request": request,
    }
    write_json(out / INDEX, table)
    (out / PROGRESS).unlink()
    index = read_index(str(out))
    assert index is not None
    for split in splits:
        for note in Shards(index, split).notes:
            report(note)


def _request(run: Run, source: Any) -> dict[str, Any]:
    """The settings, and the state of the files: a resumed preparation must have the same."""
    settings = {"task": run.task, "init": run.init, "data": dump(run.data)}
    for name in ("tokens", "target_tokens"):
        tokens = getattr(run, name)
        settings[name] = {} if tokens is None else dump(tokens)
    about = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in source.files()}
    return {**settings, "by_data": list(run.by_data), "files": about}


def _check_sums(source: Any) -> dict[str, str]:
    return {str(path): check_sum_of(path) for path in source.files()}


def _begin(
    run: Run, source: Any, request: dict[str, Any], out: Path, report: Callable[[str], None]
) -> tuple[Run, Tokenizer]:
    """Count the data and train the tokenizer, or continue where a killed preparation was."""
    path = out / PROGRESS
    if path.exists():
        saved = read_json(path, f"delete {out} and prepare the data again")
        _refuse_other(saved["request"], request, out)
        drop_partials(out)
        source.counts = Counts(**saved["counts"])
        report(f"continuing in {out}")
        return change(run, saved["tokens"]), Tokenizer.load(out / TOKENIZER)
    others = {entry.name for entry in out.iterdir() if not entry.name.endswith(PARTIAL)}
    if others - {TOKENIZER}:
        raise UserError(f"{out} holds something else: choose another folder with --out")
    drop_partials(out)
    counts = source.count()
    sample, amount = source.sample(-(-counts.characters // SAMPLE))
    run, chosen = fit_to_data(run, sample, amount)
    for note in chosen:
        report(note)
    tokenizer = make_tokenizer(run, out, sample)
    tokens = {} if run.tokens is None else {"tokens": dump(run.tokens)}
    progress = {"request": request, "counts": dataclasses.asdict(counts), "tokens": tokens}
    write_json(path, progress)
    return run, tokenizer


def _refuse_other(there: dict[str, Any], here: dict[str, Any], out: Path) -> None:
    if changes := differences(here, there):
        raise UserError(
            f"{out} holds another preparation ({changes[0]}): choose another --out, or delete it"
        )
