"""Sequence-level distillation (Kim and Rush 2016): a student trains on its teacher's translations.

The teacher's translations are in RUN/distilled/KEY, where KEY is a checksum of the teacher, its
search and the source texts: students of one teacher share them. A shard is one file, written
atomically; its first line identifies it, so that a damaged or foreign one is translated again.

A lexical shortlist (Jean et al. 2015) restricts the output layer to the target tokens that the
source tokens of a batch usually translate to. For a decoder of one layer that layer is most of the
work. The table is that of IBM Model 1: t(y | x) ∝ Σ over pairs of P(y is aligned with x).
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from manyheads.config import dump
from manyheads.data.batching import Ragged
from manyheads.data.translation import Corpus, EncodedPairs, FilesData, PhrasebookData
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.translate import BREAKS, BaseTranslator
from manyheads.errors import UserError
from manyheads.exchange.ctranslate2 import token_names
from manyheads.fileio import check_sum, drop_partials, make_subfolder, with_sums, write_text
from manyheads.loading import LoadedRun
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.recipes import read_recipe
from manyheads.run import (
    SETTINGS,
    SHORTLIST,
    TOKENIZER,
    Run,
    check_folder,
    delete_run,
    locked,
    make_folder,
    write_settings,
)
from manyheads.tasks.translation import language_pair
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.checkpoint import checksum
from manyheads.train.metrics import Bar

# Changes to the teacher's settings. A teacher that repeats itself may exceed the longest text.
STUDENT = ("model.encoder.layers=6", "model.decoder.layers=1", "train.too_long=skip")
SHARD = 1000  # sentences
LINKS = 2**24  # pairs of tokens from which the shortlist is estimated, about 1 GB
ROUNDS = 5  # of expectation-maximization
LEAST = 1e-3  # probability of a candidate


@dataclass(frozen=True)
class Distillation:
    """What to distil: a teacher with the engine it translates with, and the student's settings."""

    teacher: LoadedRun
    overrides: Sequence[str] = ()
    beam: int | None = None  # None: the teacher's
    shortlist: int = 50  # candidates of a source token; 0: none

    def prepare(self, out: Path, report: Callable[[str], None], *, fresh: bool = False) -> Run:
        """The student's run with its data, tokenizer and shortlist in place, ready to be trained.

        A second call checks complete parts and makes the others.
        """
        teacher, run = self.teacher, self._student()
        if out.resolve() == teacher.folder.resolve():
            raise UserError(f"--out {out} is the teacher's folder: choose another")
        if teacher.tokenizer.target is not teacher.tokenizer:
            raise UserError(
                f"{teacher.folder} has a vocabulary for each side: distill a run without "
                "target_tokens"
            )
        check_folder(out)
        if fresh:
            delete_run(out)
        assert isinstance(run.data, FilesData | PhrasebookData)  # those of the task
        corpus = run.data.read("train")
        decode = {} if self.beam is None else {"beam": self.beam}
        translator = teacher.translator(**decode)
        weights = {name: x.cpu().contiguous() for name, x in teacher.model.state_dict().items()}
        key = _digest(
            checksum(weights), teacher.tokenizer.to_json(), json.dumps(dump(translator.decode))
        )
        home = teacher.folder / "distilled"
        make_subfolder(home)
        folder = home.resolve() / _digest(key, *corpus.sources)
        make_subfolder(folder)
        pairs = folder / "pairs"
        names = language_pair(run.data)
        names = names if all(names) and names[0] != names[1] else ("source", "target")
        data = FilesData(folder=str(pairs), source=names[0], target=names[1], empty_lines="skip")
        splits: dict[str, Corpus] = {
            name: run.data.read(name) for name in ("valid", "test") if name in run.data.splits()
        }
        model = dataclasses.replace(run.model, vocab_size=teacher.tokenizer.vocab_size)
        run = dataclasses.replace(run, data=data, model=model)
        if (out / SETTINGS).exists():
            write_settings(run, out)  # refuses another run now, not hours later
        with locked(folder):
            targets = translate_shards(translator, corpus.sources, folder, key)
            splits["train"] = Corpus(corpus.sources, targets)
            make_subfolder(pairs)
            for split, part in splits.items():
                for name, lines in zip(names, (part.sources, part.targets), strict=True):
                    write_text(pairs / f"{split}.{name}", "".join(f"{line}\n" for line in lines))
        if not (out / SETTINGS).exists():
            make_folder(out)
            teacher.tokenizer.save(out / TOKENIZER)
            write_settings(run, out)
        self._write_shortlist(run, out, report)
        return run

    def _student(self) -> Run:
        """The settings of the student: those of the teacher with other depths and overrides."""
        folder, run = self.teacher.folder, self.teacher.run
        if run.task != "translation" or not isinstance(run.model, Seq2SeqConfig):
            raise UserError(
                f"{folder} holds a {run.model.kind} model for task={run.task}: distill needs "
                "task=translation with model=seq2seq"
            )
        for setting in self.overrides:
            if setting.startswith(("init", "tokens")):
                raise UserError(f"a student has its teacher's tokens: leave out {setting}")
        run = read_recipe(str(folder / SETTINGS), [*STUDENT, *self.overrides])
        return dataclasses.replace(run, init="")

    def _write_shortlist(self, run: Run, out: Path, report: Callable[[str], None]) -> None:
        if self.shortlist == 0:
            (out / SHORTLIST).unlink(missing_ok=True)
            return
        tokenizer, length = self.teacher.tokenizer, run.model.max_length
        frame = SpecialTokens(tokenizer, run.decode).frame
        assert isinstance(run.data, FilesData)
        train, valid = (
            EncodedPairs(run.data.read(split), tokenizer, length, "skip", frame)
            for split in ("train", "valid")
        )
        shortlist = Shortlist.of(train.sources, train.targets, self.shortlist, frame.end)
        try:
            write_text(out / SHORTLIST, with_sums(shortlist.text(tokenizer), SHORTLIST, None))
        except UserError as error:
            (out / SHORTLIST).unlink(missing_ok=True)
            report(f"no shortlist: {error}")
            return
        covered, size = shortlist.coverage(valid.sources, valid.targets)
        report(
            f"shortlist: {covered:.2%} of the tokens of the validation references, "
            f"{size:,.0f} of {tokenizer.vocab_size:,} tokens a sentence"
        )


def _digest(*texts: str) -> str:
    """A hash of texts and their boundaries."""
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()[:16]


# --- Shards ---------------------------------------------------------------------------------------


def translate_shards(
    translator: BaseTranslator, sources: Sequence[str], folder: Path, key: str
) -> list[str]:
    """The translations of texts, of which complete shards in `folder` are read.

    `key` identifies the translator. A shard's batches depend on no other shard, so that a resumed
    translation equals one that was never stopped.
    """
    drop_partials(folder)
    shards = [sources[first : first + SHARD] for first in range(0, len(sources), SHARD)]
    files = [(folder / f"{i:05}.txt", _digest(key, *part)) for i, part in enumerate(shards)]
    results = [_read_shard(*file) for file in files]
    done = sum(len(lines) for lines in results if lines is not None)
    first, began = done, time.monotonic()
    with Bar("translate", len(sources), done) as bar:
        for index, part in enumerate(shards):
            if results[index] is not None:
                continue

            def advance(lines: int, before: int = done) -> None:
                # Parts of long texts count as lines.
                count = min(before + lines, len(sources))
                rate = (count - first) / max(1e-9, time.monotonic() - began)
                bar.update(count, f"{rate:,.0f} sentences/s")

            lines = [x.translate(BREAKS) for x in translator.translate_long(part, advance)]
            path, name = files[index]
            body = "".join(f"{line}\n" for line in lines)
            write_text(path, f"{_header(name, body.encode())}\n{body}")
            results[index] = lines
            done += len(part)
    return [line for lines in results for line in lines or []]


def _header(key: str, body: bytes) -> str:
    return f"{key} {check_sum(body)}"


def _read_shard(path: Path, key: str) -> list[str] | None:
    """The translations in a shard; None if it is missing, damaged or of other texts."""
    try:
        header, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if header != _header(key, body).encode():
        return None
    return body.decode().split("\n")[:-1]


# --- Shortlist ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shortlist:
    """Candidates of every source token, and tokens that are always candidates."""

    always: list[int]
    candidates: dict[int, list[int]]

    @staticmethod
    def of(sources: Ragged, targets: Ragged, size: int, end: int) -> "Shortlist":
        """The `size` likeliest translations of each source token, and the token itself.

        The `size` most frequent target tokens are always candidates. The end of a source stands for
        the empty word, which target tokens without a counterpart are aligned with.
        """
        counts = np.bincount(targets.flat)
        frequent = np.argsort(-counts, kind="stable")[:size]
        source, target, probability = model1(sources, targets)
        order = np.lexsort((-probability, source))
        source, target, probability = source[order], target[order], probability[order]
        rank = np.arange(len(source)) - np.searchsorted(source, source)
        is_kept = (rank < size) & (probability >= LEAST) & (source != end)
        candidates = {int(token): [int(token)] for token in np.unique(sources.flat) if token != end}
        for x, y in zip(source[is_kept].tolist(), target[is_kept].tolist(), strict=True):
            if x != y:
                candidates[x].append(y)
        return Shortlist([token for token in frequent.tolist() if counts[token]], candidates)

    def text(self, tokenizer: Tokenizer) -> str:
        """The vocabulary map of CTranslate2: source token, tab, target tokens."""
        names = token_names(tokenizer, tokenizer.vocab_size)
        rows = {"": self.always} | {names[x]: ys for x, ys in self.candidates.items()}
        lines = {key: [names[y] for y in ys] for key, ys in rows.items()}
        for name in (name for key, ys in lines.items() for name in (key, *ys)):
            if any(character.isspace() for character in name):
                raise UserError(f"the token {name!r} has white space: use tokens=bpe")
        return "".join(f"{key}\t{' '.join(ys)}\n" for key, ys in lines.items())

    def coverage(self, sources: Ragged, targets: Ragged) -> tuple[float, float]:
        """The share of target tokens that are candidates, and the mean number of candidates.

        Each sentence is counted separately; a batch has the candidates of all its sentences.
        """
        covered = tokens = size = 0
        for source, target in zip(sources.rows(), targets.rows(), strict=True):
            candidates = set(self.always).union(*(self.candidates.get(x, ()) for x in source))
            text = target[:-1]  # an end is always a candidate
            covered += sum(token in candidates for token in text)
            tokens, size = tokens + len(text), size + len(candidates)
        return covered / max(1, tokens), size / max(1, len(sources.lengths))


def model1(
    sources: Ragged, targets: Ragged
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """IBM Model 1 (Brown et al. 1993): source tokens x, target tokens y, t(y | x).

    E: P(y is aligned with x) = t(y | x) / Σ_x' t(y | x').  M: t(y | x) ∝ Σ P.
    """
    links = sources.lengths * targets.lengths
    step = max(1, -(-int(links.sum()) // LINKS))  # every n-th pair of a large corpus
    rows = np.arange(0, len(links), step)
    row = np.repeat(rows, links[rows])
    within = np.arange(len(row)) - np.repeat(links[rows].cumsum() - links[rows], links[rows])
    y_index = targets.starts[row] + within // sources.lengths[row]
    x_index = sources.starts[row] + within % sources.lengths[row]
    size = int(max(sources.flat.max(), targets.flat.max())) + 1
    keys = sources.flat[x_index].astype(np.int64) * size + targets.flat[y_index]
    pairs, link = np.unique(keys, return_inverse=True)
    x, y = pairs // size, pairs % size
    table: Float[np.ndarray, " n"] = np.ones(len(pairs))
    for _ in range(ROUNDS):
        weights = table[link]
        weights /= np.bincount(y_index, weights)[y_index]
        expected = np.bincount(link, weights)
        table = expected / np.bincount(x, expected)[x]
    return x, y, table
