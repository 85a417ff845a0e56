"""Prepared data: the tokens and batches of the text itself, in the same bytes however made."""

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.helpers import refusal, write
from tests.test_cli import result

from manyheads import prepare
from manyheads.data import language, prepared, shards
from manyheads.data.language import BlockShuffle
from manyheads.data.prepared import GroupedBatches, PreparedStream, Shards, read_index
from manyheads.data.translation import FilesData
from manyheads.errors import DataError, UserError
from manyheads.fileio import write_json
from manyheads.prepare import prepare_data
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer

CPU = torch.device("cpu")
WORDS = ("red", "blue", "green", "small", "big", "dog", "cats", "Straße", "tree", "don't")
SMALL = ("model.dim=16", "model.heads=2", "model.layers=1", "model.max_length=12")
TRAINED = (*SMALL, "train.batch_tokens=60", "train.steps=3", "train.probes=0", "model.dropout=0")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards of a small corpus, and blocks of a few lines."""
    monkeypatch.setattr(prepared, "SHARD", 600)
    monkeypatch.setattr(language, "BLOCK", 100)


def lines(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


def text_corpus(folder: Path, form: str) -> list[str]:
    """A corpus, and the settings that read it."""
    plain = "".join(f"{line}\n" + "\n" * (len(line) % 3 == 0) for line in lines(150))
    if form == "table":
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines(150))
        write(folder / "corpus.jsonl", rows)
        return [f"data.folder={folder}", "data.file=corpus.jsonl"]
    write(folder / "a.txt.gz", plain)
    write(folder / "b.txt", plain[::-1])
    if form == "valid":
        write(folder / "c.valid.txt", "Straße big\n" * 50)
    ways = "text" if form == "text" else "sentences"
    return [f"data.folder={folder}", f"data.lines={ways}"]


def task_of(recipe: str, settings: list[str], out: Path) -> Any:
    return make_trainer(read_recipe(recipe, settings), out, CPU).task


def quietly(line: str) -> None:
    pass


@pytest.mark.parametrize("form", ["text", "sentences", "table", "valid"])
def test_a_prepared_text_has_the_batches_of_the_text(tmp_path: Path, form: str) -> None:
    settings = text_corpus(tmp_path / "corpus", form)
    data = tmp_path / "data"
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    packed = (*TRAINED, "objective.packing=documents")
    plain = task_of("language", [*settings, *packed], tmp_path / "plain")
    mapped = task_of("language", [f"data.folder={data}", *packed], tmp_path / "mapped")
    assert isinstance(mapped.text, PreparedStream)
    assert len(list((data / "train").iterdir())) > 3
    for ours, theirs in ((mapped.text, plain.text), (mapped.valid, plain.valid)):
        assert np.array_equal(ours.flat[:], theirs.flat)
        positions = np.arange(len(theirs.flat))
        assert np.array_equal(ours.document_of(positions), theirs.document_of(positions))
    for unit in ("characters", "bytes", "words"):
        assert getattr(mapped.valid_texts, unit) == getattr(plain.valid_texts, unit)
    for step in (0, 5):
        for one, other in zip(mapped.batches(step), plain.batches(step), strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.documents, other.documents)


def pairs_corpus(folder: Path, form: str) -> list[str]:
    sources, targets = lines(200), lines(200, seed=2)
    if form == "table":
        table = zip(sources, targets, strict=True)
        rows = "".join(json.dumps({"en": s, "de": t}) + "\n" for s, t in table)
        write(folder / "train.jsonl", rows)
        return [f"data.folder={folder}", "data.source_column=en", "data.target_column=de"]
    for name, side in (("en", sources), ("de", targets)):
        write(folder / f"train.{name}.gz", "".join(f"{line}\n" for line in side))
    return [f"data.folder={folder}", "data.source=en", "data.target=de"]


@pytest.mark.parametrize("too_long", ["skip", "truncate"])
@pytest.mark.parametrize("form", ["table", "files"])
def test_prepared_pairs_have_the_batches_of_the_pairs(
    tmp_path: Path, form: str, too_long: str
) -> None:
    settings = pairs_corpus(tmp_path / "corpus", form)
    data = tmp_path / "data"
    prepare_data(read_recipe("translation", settings), data, 1, quietly)
    short = [*TRAINED, "model.max_length=13", f"train.too_long={too_long}"]
    plain = task_of("translation", [*settings, *short], tmp_path / "plain")
    mapped = task_of("translation", [f"data.folder={data}", *short], tmp_path / "mapped")
    assert len(list((data / "train").iterdir())) > 3
    assert mapped.per_epoch == plain.per_epoch
    action = "left out" if too_long == "skip" else "truncated"
    assert any(f"of over 13 tokens are {action}" in note for note in mapped.notes)
    assert mapped.valid_corpus.sources == plain.valid_corpus.sources
    for step in range(2 * plain.per_epoch):
        for one, other in zip(mapped.batches(step), plain.batches(step), strict=True):
            for name in ("source", "target", "labels", "source_real"):
                assert torch.equal(getattr(one, name), getattr(other, name)), (step, name)
    refused = [f"data.folder={data}", *short, "train.too_long=refuse"]
    with pytest.raises(DataError, match=r"more than model\.max_length=13"):
        task_of("translation", refused, tmp_path / "refused")


def test_training_from_prepared_data_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = text_corpus(tmp_path / "corpus", "text")
    data = tmp_path / "data"
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    states = []
    for name, source in (("plain", settings), ("mapped", [f"data.folder={data}"])):
        trainer = make_trainer(
            read_recipe("language", [*source, *TRAINED, "train.probes=2"]), tmp_path / name, CPU
        )
        trainer.run()
        states.append(trainer.model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_killed_three_times_and_with_any_number_of_workers_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_recipe("language", text_corpus(tmp_path / "corpus", "sentences"))
    prepare_data(run, tmp_path / "whole", 1, quietly)
    expected = contents(tmp_path / "whole")
    out = tmp_path / "killed"
    fork, write_shard, written = get_context("fork"), shards.Job.write, 0

    def slow(job: shards.Job, tokenizer: Any) -> shards.Facts:
        time.sleep(0.1)
        return write_shard(job, tokenizer)

    monkeypatch.setattr(shards.Job, "write", slow)
    for _ in range(3):
        process = fork.Process(target=prepare_data, args=(run, out, 1, quietly))
        process.start()
        deadline = time.monotonic() + 60
        while len(list(out.glob("train/*"))) <= written and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.join()
        written = len(list(out.glob("train/*")))
    assert 3 <= written < sum(name.startswith("train") for name in expected)
    monkeypatch.setattr(shards.Job, "write", write_shard)
    prepare_data(run, out, 2, quietly)
    assert contents(out) == expected


def test_finished_shards_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = text_corpus(tmp_path / "corpus", "text")
    write_index = prepare.write_json

    def killed(path: Path, table: dict[str, Any]) -> None:
        if path.name == prepared.INDEX:
            raise KeyboardInterrupt
        write_index(path, table)

    monkeypatch.setattr(prepare, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(read_recipe("language", settings), tmp_path / "data", 1, quietly)
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("data/train/*")}
    monkeypatch.setattr(prepared, "SHARD", 600)
    monkeypatch.setattr(language, "BLOCK", 100)
    prepare_data(read_recipe("language", settings), tmp_path / "data", 1, quietly)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_corpus_or_setting_is_refused(tmp_path: Path) -> None:
    settings = text_corpus(tmp_path / "corpus", "text")
    data = tmp_path / "data"
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    other = read_recipe("language", [*settings, "data.valid_fraction=0.3"])
    assert "valid_fraction" in refusal(UserError, prepare_data, other, data, 1, quietly)
    again = ["data.valid_fraction=0.3", f"data.folder={data}"]
    assert "valid_fraction" in refusal(UserError, read_recipe, "language", again)
    assert "task=language" in refusal(UserError, read_recipe, "t5-mini", [f"data.folder={data}"])
    bert = read_recipe("bert-mini", settings)
    assert "cannot be prepared" in refusal(UserError, prepare_data, bert, data, 1, quietly)
    full = tmp_path / "corpus"
    run = read_recipe("language", settings)
    assert "something else" in refusal(UserError, prepare_data, run, full, 1, quietly)


def test_a_changed_text_is_refused(tmp_path: Path) -> None:
    """Also if its size and time are the same; a copy with another time is the same text."""
    settings, data = text_corpus(tmp_path / "corpus", "text"), tmp_path / "data"
    run = read_recipe("language", settings)
    prepare_data(run, data, 1, quietly)
    path = tmp_path / "corpus/b.txt"
    text, times = path.read_bytes(), path.stat()
    os.utime(path, (1, 1))
    prepare_data(run, data, 1, quietly)
    path.write_bytes(text.swapcase())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "b.txt" in refusal(UserError, prepare_data, run, data, 1, quietly)
    path.write_bytes(text)
    write(tmp_path / "corpus/c.txt", "red\n")
    assert "c.txt" in refusal(UserError, prepare_data, run, data, 1, quietly)


def test_a_run_is_evaluated_on_prepared_data_with_their_columns(tmp_path: Path) -> None:
    settings, data = pairs_corpus(tmp_path / "corpus", "files"), tmp_path / "data"
    prepare_data(read_recipe("translation", settings), data, 1, quietly)
    trained = [*settings, *TRAINED, "train.too_long=skip"]
    make_trainer(read_recipe("translation", trained), tmp_path / "run", CPU).run()
    evaluated = ("evaluate", tmp_path / "run", "--split", "valid", "--json", "decode.beam=1")
    texts, tokens = (
        json.loads(result(*evaluated, f"data.folder={folder}"))
        for folder in (tmp_path / "corpus", data)
    )
    assert tokens["loss"] == texts["loss"]


HARMS = ["truncate", "replace", "deep", "flip", "missing", "rows", "words", "starts", "tokenizer"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_shard_is_one_line(tmp_path: Path, harm: str) -> None:
    settings = text_corpus(tmp_path / "corpus", "text")
    data = tmp_path / "data"
    run = read_recipe("language", settings)
    prepare_data(run, data, 1, quietly)
    shard = data / "train" / "00001.safetensors"
    content = bytearray(shard.read_bytes())
    if harm == "flip":  # found by `prepare`, which reads everything
        content[-3] ^= 4
        shard.write_bytes(content)
        assert "00001" in refusal(DataError, prepare_data, run, data, 1, quietly)
        return
    if harm == "tokenizer":
        shard = data / "tokenizer.json"
        shard.write_text(shard.read_text("utf-8").replace("red", "der"), "utf-8")
    elif harm == "missing":
        shard.unlink()
    elif harm in ("rows", "words", "starts"):  # keys of the facts; the name of an array
        shard.write_bytes(content.replace(harm.encode(), b"x" * len(harm)))
    elif harm == "deep":
        shard.write_bytes((99_999).to_bytes(8, "little") + b"[" * 99_999)
    else:
        shard.write_bytes(content[:-8] if harm == "truncate" else b"pickle" * 9)
    read = read_recipe("language", [f"data.folder={data}"]).data
    assert read is not None
    assert shard.name in refusal(DataError, read.read, "train")


@pytest.mark.parametrize("name", [prepared.INDEX, prepare.PROGRESS])
def test_a_damaged_index_or_progress_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings, data = text_corpus(tmp_path / "corpus", "text"), tmp_path / "data"
    run = read_recipe("language", settings)
    if name == prepare.PROGRESS:  # killed before the first shard
        monkeypatch.setattr(prepare, "write_shards", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_data(run, data, 1, quietly)
    else:
        prepare_data(run, data, 1, quietly)
    content = (data / name).read_text("utf-8")
    for damaged in (content[:-9], content.replace("language", "langouge", 1)):
        (data / name).write_text(damaged, "utf-8")
        assert f"{name} is damaged" in refusal(DataError, prepare_data, run, data, 1, quietly)


def test_what_reads_the_text_of_prepared_data_is_refused(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("language", "translation")}
    for name, corpus in (("language", text_corpus), ("translation", pairs_corpus)):
        run = read_recipe(name, corpus(tmp_path / f"{name}-corpus", "text"))
        prepare_data(run, folders[name], 1, quietly)
    language, translation = (
        read_recipe(name, [f"data.folder={folder}"]).data for name, folder in folders.items()
    )
    texts, pairs = (data.read("train") for data in (language, translation) if data is not None)
    for read in (texts.strings, lambda: pairs.sources, lambda: pairs.targets):
        assert "tokens only" in refusal(UserError, read)
    copies = [f"data.folder={folders['translation']}", *TRAINED, "train.too_long=skip"]
    copies += ["train.bpe_dropout_copies=2", "train.bpe_dropout=0.1"]
    assert "tokens only" in refusal(UserError, task_of, "translation", copies, tmp_path / "run")
    other = FilesData(folder=str(folders["language"]), source="en", target="de")
    assert "prepared for task=language" in refusal(UserError, other.read, "valid")


def rewrite(shard: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Other numbers in an array, which training does not compare with the checksum."""
    content = shard.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    about = json.loads(content[8:start])[name]
    begin, end = (start + offset for offset in about["data_offsets"])
    numbers = np.frombuffer(content[begin:end], shards.DTYPES[about["dtype"]])
    shard.write_bytes(content[:begin] + change(numbers).tobytes() + content[end:])


@pytest.mark.parametrize("array", ["source.tokens", "target.starts"])
@pytest.mark.parametrize("number", ["largest", "zero", "reversed"])
def test_numbers_out_of_range_are_one_line(tmp_path: Path, array: str, number: str) -> None:
    data = tmp_path / "data"
    settings = pairs_corpus(tmp_path / "corpus", "files")
    prepare_data(read_recipe("translation", settings), data, 1, quietly)
    changes: dict[str, Callable[[Any], Any]] = {
        "largest": lambda x: np.full_like(x, np.iinfo(x.dtype).max),
        "zero": np.zeros_like,
        "reversed": lambda x: x[::-1],
    }
    shard = data / "train" / "00002.safetensors"
    rewrite(shard, array, changes[number])
    again = [f"data.folder={data}", *TRAINED, "train.too_long=truncate"]

    def epoch() -> None:
        task = task_of("translation", again, tmp_path / "run")
        for step in range(task.per_epoch):
            task.batches(step)

    if array == "source.tokens" and number != "largest":  # another text, which can be trained on
        epoch()
    else:
        assert "00002.safetensors is damaged" in refusal(DataError, epoch)


def test_another_preparation_in_the_same_folder_is_read_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for form in ("text", "sentences"):
        run = read_recipe("language", text_corpus(tmp_path / form, form))
        prepare_data(run, data, 1, quietly)
        task = task_of("language", [f"data.folder={data}", *TRAINED], tmp_path / f"run-{form}")
        assert len(task.text.flat[:]) == len(task.text.flat)
        prepare_data(run, data, 1, quietly)  # verifies
        shutil.rmtree(data)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"prepared": shards.FORMAT}, "not an index"),
        ({"prepared": shards.FORMAT, "splits": 3}, "not an index"),
        ({"prepared": shards.FORMAT, "splits": {"train": [{}]}}, "not an index"),
        ({"prepared": shards.FORMAT, "data": 3}, "not an index"),
        ({"splits": {"prepared": []}}, "not an index"),
        ({"prepared": "of an older release"}, "another release"),
    ],
)
def test_an_index_of_something_else_is_one_line(
    tmp_path: Path, table: dict[str, Any], problem: str
) -> None:
    write_json(tmp_path / prepared.INDEX, table)
    settings = [f"data.folder={tmp_path}"]
    assert problem in refusal(DataError, read_recipe, "language", settings)


def test_a_preparation_killed_while_it_wrote_its_tokenizer_continues(tmp_path: Path) -> None:
    settings, data = text_corpus(tmp_path / "corpus", "text"), tmp_path / "data"
    partial = write(data / ".tokenizer.json.abc.partial", "{")
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    assert (data / prepared.INDEX).is_file()
    assert not partial.exists()


class Killed(shards.Column):
    """Texts that end the process that encodes them."""

    def encode(self, tokenizer: Any) -> Any:
        os._exit(1)


def test_a_killed_worker_is_one_line(tmp_path: Path) -> None:
    settings, data = text_corpus(tmp_path / "corpus", "text"), tmp_path / "data"
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    job = shards.Job(tmp_path / "0.safetensors", {"text": Killed(["red"], [False], (), 0)})
    written = shards.write_shards([job], data / "tokenizer.json", 2)
    assert "--workers" in refusal(UserError, list, written)


def test_prepared_pairs_that_are_all_too_long_are_one_line(tmp_path: Path) -> None:
    pairs = "".join(json.dumps({"source": line, "target": line}) + "\n" for line in lines(40))
    short = json.dumps({"source": "red", "target": "red"}) + "\n"
    write(tmp_path / "corpus" / "train.jsonl", pairs.replace('"}', ' one two three four"}'))
    write(tmp_path / "corpus" / "valid.jsonl", short)
    columns = ["data.source_column=source", "data.target_column=target"]
    settings = [f"data.folder={tmp_path / 'corpus'}", *columns]
    prepare_data(read_recipe("translation", settings), tmp_path / "data", 1, quietly)
    again = [f"data.folder={tmp_path / 'data'}", "train.too_long=skip", *SMALL]
    again.append("model.max_length=4")
    assert "all pairs exceed" in refusal(DataError, task_of, "translation", again, tmp_path / "r")


def test_a_process_maps_a_bounded_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, data = text_corpus(tmp_path / "corpus", "text"), tmp_path / "data"
    monkeypatch.setattr(prepared, "SHARD", 60)
    prepare_data(read_recipe("language", settings), data, 1, quietly)
    index = read_index(str(data))
    assert index is not None
    shards = Shards(index, "train")
    assert len(shards.paths) > prepared.MAPPED
    text = shards.tokens("text", 1 << 16)[:]
    assert len(text) == sum(facts.tokens["text"] for facts in shards.facts)
    assert shards.arrays.cache_info().currsize == prepared.MAPPED
    links = {os.readlink(link) for link in Path("/proc/self/map_files").glob("*")}
    assert 0 < sum(str(tmp_path) in link for link in links) <= prepared.MAPPED


def test_a_block_shuffle_is_a_permutation_with_a_bounded_index() -> None:
    for count in (17, 1000, 4097):
        order = BlockShuffle(count, [1, 2], largest=256)
        taken = []
        while len(taken) < count:
            taken += order[len(taken) : len(taken) + 7].tolist()
        assert sorted(taken) == list(range(count))
        assert taken != sorted(taken)
        largest = max(len(order._numbers(group)) for group in order.groups)
        assert largest <= 256 + order.size
        assert taken[:7] == BlockShuffle(count, [1, 2], largest=256)[0:7].tolist()
        assert taken[:7] != BlockShuffle(count, [1, 3], largest=256)[0:7].tolist()


def test_groups_of_pairs_are_each_seen_once_in_an_epoch() -> None:
    draw = np.random.default_rng(1)
    parts = np.split(np.arange(90), [40, 60])
    lengths = draw.integers(2, 9, 90)
    groups = [lambda rows=rows: (rows, lengths[rows]) for rows in parts]
    order = GroupedBatches(groups, 30, seed=3)
    epochs = [
        [order.rows(epoch * order.per_epoch + n).tolist() for n in range(order.per_epoch)]
        for epoch in range(3)
    ]
    for batches in epochs:
        assert sorted(row for rows in batches for row in rows) == list(range(90))
    assert epochs[0] != epochs[1]
    assert order.rows(order.per_epoch + 2).tolist() == epochs[1][2]


def test_the_order_of_groups_is_not_that_of_their_rows() -> None:
    """Five groups of five rows, each one batch: two independent permutations."""
    groups = [lambda rows=rows: (rows, np.full(5, 4)) for rows in np.split(np.arange(25), 5)]
    order = GroupedBatches(groups, 20, seed=3)
    assert order.per_epoch == 5
    rows = np.array([order.rows(step) for step in range(20)]).reshape(4, 5, 5)
    assert (rows[:, :, 0] // 5 != rows[:, 0] % 5).any()


def test_groups_of_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as hold all pairs, of whole shards."""
    data = tmp_path / "data"
    settings = pairs_corpus(tmp_path / "corpus", "files")
    prepare_data(read_recipe("translation", settings), data, 1, quietly)
    monkeypatch.setattr(prepared, "GROUP", 70)
    wide = [f"data.folder={data}", *TRAINED, "model.max_length=40"]
    task = task_of("translation", wide, tmp_path / "run")
    assert len(task.order.groups) == math.ceil(task.data.edges[-1] / 70) > 1
