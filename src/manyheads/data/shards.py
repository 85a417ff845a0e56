"""Shards of prepared data: token ids in files that are mapped, and never read as a whole.

A shard is a safetensors file with arrays of numbers and, in its header, a checksum and facts. It
is a pure function of the texts in it and of the tokenizer, and is complete or absent. This module
does without torch, which a worker process would take seconds to import.
"""

import json
import multiprocessing
import os
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from manyheads.errors import DataError, UserError
from manyheads.fileio import replace_file
from manyheads.tokenizer.tokenizer import Tokenizer

HEADER, FORMAT = "manyheads", 2
CALL = 1 << 21  # characters in one call of the tokenizer, which keeps hundreds of bytes a token
DTYPES = {"U16": np.uint16, "U32": np.uint32}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Facts:
    """The sizes of a shard, in its header and in the index; `tokens` has those of each column."""

    rows: int
    documents: int
    characters: int
    bytes: int
    words: int
    longest: int
    tokens: dict[str, int]
    checksum: str = ""


@dataclass(frozen=True)
class Column:
    """Texts to encode, one row each: its ids come after `before` and, with `ends`, before `end`."""

    texts: list[str]
    ends: list[bool]
    before: tuple[int, ...]
    end: int

    def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, and where each row begins and the last one ends."""
        wide = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        tokens, starts = array("I"), array("I", [0])
        for ids, ends in zip(self._ids(tokenizer), self.ends, strict=True):
            tokens.extend([*self.before, *ids, *([self.end] if ends else [])])
            starts.append(len(tokens))
        return np.array(tokens, wide), np.array(starts, np.uint32)

    def _ids(self, tokenizer: Tokenizer) -> Iterator[list[int]]:
        """The ids of each text, with a limit on the characters in one call."""
        start = size = 0
        for row, text in enumerate(self.texts, start=1):
            size += len(text)
            if row == len(self.texts) or size >= CALL:
                yield from tokenizer.encode_batch(self.texts[start:row])
                start, size = row, 0


@dataclass(frozen=True)
class Job:
    """A shard to write: its columns, and the rows of the first with which documents begin."""

    path: Path
    columns: dict[str, Column]
    documents: list[int] = field(default_factory=list)

    def write(self, tokenizer: Tokenizer) -> Facts:
        if self.path.exists():  # complete, by a preparation that was killed
            return read_shard(self.path)[1]
        arrays: Arrays = {}
        for name, column in self.columns.items():
            side = tokenizer.target if name == "target" else tokenizer
            arrays[f"{name}.tokens"], arrays[f"{name}.starts"] = column.encode(side)
        first = next(iter(self.columns))
        texts = self.columns[first].texts
        facts = Facts(
            rows=len(texts),
            documents=len(self.documents),
            characters=sum(map(len, texts)),
            bytes=sum(len(text.encode()) for text in texts),
            words=sum(len(text.split()) for text in texts),
            longest=max(int(np.diff(arrays[f"{n}.starts"]).max()) for n in self.columns),
            tokens={name: len(arrays[f"{name}.tokens"]) for name in self.columns},
        )
        arrays["documents"] = arrays[f"{first}.starts"][self.documents]
        facts = replace(facts, checksum=checksum(arrays, facts))
        header = {HEADER: json.dumps(asdict(facts))}  # one key: several are in any order
        # `save_file` would leave a temporary file of its own if it was killed.
        content = save(arrays, header)
        replace_file(self.path, lambda partial: partial.write_bytes(content))
        return facts


def write_shards(jobs: Iterable[Job], tokenizer_path: Path, workers: int) -> Iterator[Facts]:
    """Write shards in worker processes; yields the facts of each in order once it is done."""
    if workers == 1:
        tokenizer = Tokenizer.load(tokenizer_path)
        yield from (job.write(tokenizer) for job in jobs)
        return
    context, pending = multiprocessing.get_context("spawn"), deque[Future[Facts]]()
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_path,)) as pool:
            for job in jobs:
                pending.append(pool.submit(_write, job))
                if len(pending) > workers + 1:  # one more, so that no worker waits
                    yield pending.popleft().result()
            for future in pending:
                yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps for lack of memory: run the same command with "
            "fewer --workers, and it continues"
        ) from None


_TOKENIZER: list[Tokenizer] = []  # that of a worker process


def _start_worker(tokenizer_path: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _TOKENIZER.append(Tokenizer.load(tokenizer_path))

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()  # killed: nobody would end this process
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _write(job: Job) -> Facts:
    return job.write(_TOKENIZER[0])


def checksum(arrays: Arrays, facts: Facts) -> str:
    """CRC-32 over facts and, of each array, name, type and bytes."""
    total = zlib.crc32(json.dumps([FORMAT, asdict(replace(facts, checksum=""))]).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(array.data, zlib.crc32(f"{name} {array.dtype}".encode(), total))
    return f"{total:08x}"


def read_shard(path: Path) -> tuple[Arrays, Facts]:
    """The arrays of a shard, mapped, and its facts; a damaged or foreign file is DataError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 20)))
        facts = Facts(**json.loads(header.pop("__metadata__")[HEADER]))
        arrays: Arrays = {}
        for name, about in header.items():
            begin, end = about["data_offsets"]
            dtype, [count] = np.dtype(DTYPES[about["dtype"]]), about["shape"]
            if end - begin != count * dtype.itemsize:
                raise ValueError(f"wrong size of {name}")
            arrays[name] = np.empty(0, dtype)  # which cannot be mapped
            if count:
                arrays[name] = np.memmap(path, dtype, "r", 8 + size + begin, (count,))
        lengths = {"documents": facts.documents}
        for name, count in facts.tokens.items():
            lengths |= {f"{name}.tokens": count, f"{name}.starts": facts.rows + 1}
        if lengths != {name: len(array) for name, array in arrays.items()}:
            raise ValueError("its arrays do not have the lengths of its header")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise damaged(path, f"not a complete shard: {error}") from None
    return arrays, facts


def verify(path: Path) -> None:
    """Read a shard completely, and refuse one that does not match its checksum."""
    arrays, facts = read_shard(path)
    if checksum(arrays, facts) != facts.checksum:
        raise damaged(path, "its bytes do not match its checksum")


def damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is damaged ({reason}): delete {path.parent.parent} and prepare the data again"
    )
