"""Damaged files of every format, and strange requests to every route, made by hypothesis.

A reader returns, or raises a `UserError` of one line. A route answers, or refuses with 4xx or 503
in JSON. Neither takes longer than `TIMEOUT`. The normal suite tries a few fixed cases;
the slow suite tries many, different at each call. hypothesis prints the smallest case that fails.
"""

import base64
import gc
import gzip
import io
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mido
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.routing import Mount
from tests.data.small_music import midi_bytes, random_performance
from tests.faults.fuzzing import SERVE, VIEW, Hang, Inputs, limited

from manyheads.config import dump, to_toml
from manyheads.data.events import ChoraleGrid, PerformanceEvents, write_midi
from manyheads.data.images import ImageData, load_image
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.translation import FilesData
from manyheads.errors import DataError, UserError
from manyheads.lab.figures.plots import metric_curves
from manyheads.loading import load, load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import read_run
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words
from manyheads.web.runs import all_records

TIMEOUT = 20.0  # seconds
CASES, SLOW_CASES = 12, 250  # cases of a format in the normal and in the slow suite
REQUESTS, SLOW_REQUESTS = 60, 1500  # for each server
RELAXED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

ODD_NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**70), 0.5, 1e308, float("nan")])
ODD_TEXTS = st.sampled_from(["", "x", "\x00", "../..", "a\n", "é", "1e999", "none", "x" * 2000])
SCALARS = st.none() | st.booleans() | ODD_NUMBERS | ODD_TEXTS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(ODD_TEXTS, x, max_size=2)
)


@dataclass(frozen=True)
class Format:
    """A file format: file name, intact contents, the kind of damage, and the reader."""

    file: str
    contents: list[bytes]
    read: Callable[[Path], Any]  # takes the folder
    kind: str = "bytes"  # or json, toml, safetensors, png
    tokens: tuple[bytes, ...] = ()  # inserted as damage, next to random bytes


# --- damage ---


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes, tokens: tuple[bytes, ...]) -> bytes:
    """A few bytes changed, inserted, repeated or left out."""
    data = bytearray(content)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "insert", "delete", "cut", "repeat", "token"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=6))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "cut":
            del data[at:]
        elif kind == "repeat":
            data[at:at] = data[at : at + 64]
        elif tokens:
            data[at:at] = draw(st.sampled_from(tokens))
    return bytes(data)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a JSON value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, list) else pairs:
        yield from leaves(part, (*path, key))


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """One or two parts replaced or left out."""
    document = {"root": json.loads(content)}
    for _ in range(draw(st.integers(1, 2))):
        *path, key = draw(st.sampled_from([path for path in leaves(document) if path]))
        part: Any = document
        for step in path:
            part = part[step]
        if draw(st.integers(0, 4)) == 0 and path:
            del part[key]
        else:
            part[key] = draw(VALUES)
        if "root" not in document or not isinstance(document["root"], dict | list):
            break
    return json.dumps(document.get("root")).encode("utf-8", "surrogatepass")


@st.composite
def damaged_toml(draw: st.DrawFn, content: bytes) -> bytes:
    """One or two settings with a value of another kind."""
    lines = content.decode().splitlines()
    assigned = [number for number, line in enumerate(lines) if " = " in line]
    odd = ["-1", "0", "1e300", "nan", "true", '""', '"x"', "[]", "{}", "[1, 'a']", "9" * 30, "="]
    for number in draw(st.lists(st.sampled_from(assigned), min_size=1, max_size=2)):
        name = lines[number].partition(" = ")[0]
        lines[number] = f"{name} = {draw(st.sampled_from([*odd, '{kind = 1}', '1979-05-27']))}"
    return "\n".join(lines).encode()


@st.composite
def damaged_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Another header, with the length of the old or of the new one."""
    size = int.from_bytes(content[:8], "little")
    header = draw(damaged_json(content[8 : 8 + size]))
    length = draw(st.sampled_from([len(header), size, 0, 2**63, len(content)]))
    return length.to_bytes(8, "little") + header + content[8 + size :]


@st.composite
def damaged_png(draw: st.DrawFn, content: bytes) -> bytes:
    """Another size, depth or colour type in the header, with a valid checksum."""
    header = bytearray(content[12:29])
    for at in draw(st.lists(st.sampled_from([4, 8]), max_size=2)):
        size = draw(st.sampled_from([0, 1, 7, 9, 5000, 2**16, 2**31 - 1, 2**32 - 1]))
        header[at : at + 4] = size.to_bytes(4, "big")
    header[draw(st.integers(12, 16))] = draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 255]))
    return content[:12] + bytes(header) + zlib.crc32(header).to_bytes(4, "big") + content[33:]


@st.composite
def damaged(draw: st.DrawFn, file_format: Format) -> bytes:
    content = draw(st.sampled_from(file_format.contents))
    structured = {
        "json": damaged_json,
        "toml": damaged_toml,
        "safetensors": damaged_safetensors,
        "png": damaged_png,
    }
    if file_format.kind in structured and draw(st.integers(0, 3)):
        return draw(structured[file_format.kind](content))
    return draw(damaged_bytes(content, file_format.tokens))


def check(file_format: Format, content: bytes, folder: Path) -> None:
    (folder / file_format.file).write_bytes(content)
    message = ""
    try:
        with limited(TIMEOUT), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file_format.read(folder)
    except UserError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1, message


# --- formats ---


def music() -> bytes:
    stream = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    path = stream / "manyheads-fuzz.mid"
    write_midi([random_performance(1, 12)], path)
    content = path.read_bytes()
    path.unlink()
    return content


def images() -> tuple[bytes, bytes]:
    """As npz and as idx."""
    pixels = np.random.default_rng(1).integers(0, 255, (6, 4, 4), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, x_train=pixels, y_train=np.arange(6, dtype=np.uint8) % 2)
    head = bytes([0, 0, 8, 3]) + np.array([6, 4, 4], ">u4").tobytes()
    return stream.getvalue(), head + pixels.tobytes()


def pictures(form: str, *modes: str) -> list[bytes]:
    pixels = np.random.default_rng(1).integers(0, 255, (8, 8, 3), np.uint8)
    contents = []
    for mode in modes:
        stream = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(stream, form)
        contents.append(stream.getvalue())
    return contents


def read_midi(folder: Path) -> None:
    content = (folder / "a.mid").read_bytes()
    message = ""
    try:
        ChoraleGrid().words(content, "a.mid")
    except UserError as error:  # also of the intact file, which is no chorale
        message = str(error)
    assert len(message.splitlines()) <= 1
    events = PerformanceEvents()
    events.parts(events.words(content, "a.mid"))


def read_idx(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 6] + [0, 1] * 3))
    ImageData(folder=str(folder)).read("train")


def read_table(name: str) -> Callable[[Path], Any]:
    return lambda folder: LabelledData(train=str(folder / name)).read("train")


def read_parallel(folder: Path) -> None:
    (folder / "b").write_text("ein Hund\nzwei Katzen\n" * 3)
    FilesData(source=str(folder / "a"), target=str(folder / "b"), valid_fraction=0.2).read("train")


def read_metrics(folder: Path) -> None:
    json.dumps(list(all_records(folder / "metrics.jsonl")), allow_nan=False)
    metric_curves(folder)


def encode(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("The small dog 日本"))


ROWS = [("A good film.", "good"), ("Bad, really.", "bad"), ("Fine 日本", "good")] * 3
SEPARATORS = (b"\t", b",", b'"', b"\n", b"\r\n", b"\xef\xbb\xbf", b"nan", b"\x00")
STEPS = [{"step": step, "split": "train", "loss": 1 / step} for step in range(1, 5)]
NPZ, IDX = images()
PNG, JPEG = pictures("PNG", "L", "RGB", "RGBA", "P"), pictures("JPEG", "L", "RGB")
MIDI = music()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Path:
    """The folder of a small GPT-2."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("huggingface")
    tokenizer = inputs.tokenizers["bpe"]
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, bos_token_id=1, eos_token_id=2, **sizes
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def formats(inputs: Inputs, writer: Path) -> dict[str, Format]:
    tsv = "\n".join(["text\tlabel", *map("\t".join, ROWS)]).encode()
    csv = "\n".join(["text,label", *(f'"{text}",{label}' for text, label in ROWS)]).encode()
    jsonl = "\n".join(json.dumps({"text": text, "label": label}) for text, label in ROWS).encode()
    plain = b"The dog sees.\n\nA cat sleeps. It dreams.\n" * 5
    tokenizers = [tokenizer.to_json().encode() for tokenizer in inputs.tokenizers.values()]
    recipes = [to_toml(dump(read_recipe(name))).encode() for name in ("phrasebook", "bert-mini")]
    steps = "\n".join(map(json.dumps, STEPS)).encode()
    weights, words = (writer / "model.safetensors").read_bytes(), (b"null", b"1e999", b"[", b"{}")
    return {
        "tsv": Format("t.tsv", [tsv], read_table("t.tsv"), tokens=SEPARATORS),
        "csv": Format("t.csv", [csv], read_table("t.csv"), tokens=SEPARATORS),
        "jsonl": Format("t.jsonl", [jsonl], read_table("t.jsonl"), tokens=words),
        "gzip": Format("t.tsv.gz", [gzip.compress(tsv, mtime=0)], read_table("t.tsv.gz")),
        "parallel text": Format("a", [b"a dog\ntwo cats\n" * 3], read_parallel, tokens=SEPARATORS),
        "plain text": Format(
            "t.txt", [plain], lambda folder: TextData(folder=str(folder)).read("train")
        ),
        "npz": Format("a.npz", [NPZ], lambda folder: ImageData(folder=str(folder)).read("train")),
        "idx": Format("train-images-idx3-ubyte", [IDX], read_idx, tokens=(b"\x7f\xff\xff\xff",)),
        "midi": Format(
            "a.mid",
            [MIDI],
            read_midi,
            tokens=(b"\xff\x51\x03\xff\xff\xff", b"\xff\xff\xff\x7f", b"MTrk", b"\xf0"),
        ),
        "png": Format("a.png", PNG, lambda folder: load_image(folder / "a.png"), "png"),
        "jpeg": Format("a.jpg", JPEG, lambda folder: load_image(folder / "a.jpg")),
        "tokenizer.json": Format("tokenizer.json", tokenizers, encode, "json", words),
        "run.toml": Format("run.toml", [(writer / "run.toml").read_bytes()], read_run, "toml"),
        "recipe": Format("r.toml", recipes, lambda f: read_recipe(str(f / "r.toml")), "toml"),
        "metrics.jsonl": Format("metrics.jsonl", [steps], read_metrics, tokens=words),
        "safetensors": Format("model.safetensors", [weights], load_torch_run, "safetensors"),
    }


NAMES = (
    *("tsv", "csv", "jsonl", "gzip", "parallel text", "plain text", "npz", "idx", "midi"),
    *("png", "jpeg"),
    *("tokenizer.json", "run.toml", "recipe", "metrics.jsonl", "safetensors"),
)


def try_format(
    file_format: Format, folder: Path, examples: int, intact: Path | None = None
) -> None:
    if intact is not None:
        shutil.copytree(intact, folder, dirs_exist_ok=True)
    (folder / file_format.file).write_bytes(file_format.contents[0])
    file_format.read(folder)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples == CASES,
        suppress_health_check=RELAXED,
    )
    @given(damaged(file_format))
    def every_case(content: bytes) -> None:
        check(file_format, content, folder)

    every_case()


@pytest.mark.parametrize("examples", [CASES, pytest.param(SLOW_CASES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused(
    name: str, examples: int, inputs: Inputs, tmp_path: Path
) -> None:
    writer = inputs.models / "writer"
    known = formats(inputs, writer)
    assert known.keys() == set(NAMES)
    needs_run = name in ("run.toml", "safetensors")
    try_format(known[name], tmp_path, examples, writer if needs_run else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_folders_of_hugging_face(name: str, huggingface: Path, tmp_path: Path) -> None:
    kind = "safetensors" if name.endswith("safetensors") else "json"
    file_format = Format(name, [(huggingface / name).read_bytes()], load, kind)
    try_format(file_format, tmp_path, SLOW_CASES, huggingface)


# --- routes ---


def test_every_route_is_tried(inputs: Inputs) -> None:
    for client, table in (("view", VIEW), ("writer", SERVE)):
        app: Any = inputs.clients[client].app
        for route in app.app.routes:
            paths = [path for path in table if route.path_regex.match(path)]
            assert paths or isinstance(route, Mount), route.path


@st.composite
def requests(draw: st.DrawFn, table: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """A documented request with some values replaced, left out or added."""
    path = draw(st.sampled_from(sorted(table)))
    method, documented = table[path]
    values = {name: value for name, value in documented.items() if draw(st.integers(0, 9))}
    for name in draw(st.lists(st.sampled_from([*values, "x"]), max_size=2)):
        values[name] = draw(VALUES)
    if "run" in values and draw(st.booleans()):
        values["run"] = draw(st.sampled_from(sorted(p.name for p in inputs.models.iterdir())))
    if path in ("/api/music", "/api/image") and draw(st.booleans()):
        content = MIDI if path == "/api/music" else draw(st.sampled_from(PNG + JPEG))
        values["upload"] = base64.b64encode(draw(damaged_bytes(content, ()))).decode()
    for kind, name in inputs.traces.items():
        path = path.replace(f"/api/{kind}/x/", f"/api/{kind}/{name}/")
    if draw(st.integers(0, 9)) == 0:
        path += draw(st.sampled_from(["/", "/..", "%00", "/x/y", "?a=1", "%2e%2e%2f", "é"]))
    method = draw(st.sampled_from([method] * 8 + ["PUT", "DELETE"]))
    kinds = ["application/json"] * 6 + [
        "application/x-www-form-urlencoded",
        "text/plain",
        "",
    ]
    request: dict[str, Any] = {"method": method, "url": path}
    if method == "GET":
        pairs = ((name, str(value)[:200]) for name, value in values.items())
        request["params"] = {name: value.encode("utf-8", "replace") for name, value in pairs}
        return request
    body = json.dumps(values).encode()
    if draw(st.integers(0, 4)) == 0:
        body = draw(damaged_bytes(body, (b"[" * 2000, b"9" * 5000, b"\\ud800", b"1e999")))
    return request | {"content": body, "headers": {"Content-Type": draw(st.sampled_from(kinds))}}


def ask(server: str, inputs: Inputs, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples == REQUESTS,
        suppress_health_check=RELAXED,
    )
    @given(requests(VIEW if server == "view" else SERVE, inputs))
    def every_case(request: dict[str, Any]) -> None:
        with limited(TIMEOUT):
            answer = inputs.clients[server].request(**request)
        status = answer.status_code
        assert status < 500 or status == 503, answer.text[:300]
        if status >= 400:
            assert isinstance(answer.json(), dict)

    every_case()


@pytest.mark.parametrize(
    "examples", [REQUESTS, pytest.param(SLOW_REQUESTS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("server", ["view", "translator", "writer"])
def test_strange_requests_are_answered_or_refused(
    server: str, examples: int, inputs: Inputs
) -> None:
    ask(server, inputs, examples)


@pytest.mark.slow
def test_memory_is_flat_over_requests(inputs: Inputs) -> None:
    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    sizes = []
    for _ in range(12):
        for server in ("view", "translator", "writer"):
            ask(server, inputs, REQUESTS)  # the same each time: torch caches each new shape
        gc.collect()
        sizes.append(memory())
    assert sizes[-1] - sizes[2] < 16 * 2**20


# --- found before ---


def test_a_case_without_end_is_a_failure() -> None:
    def endless() -> None:
        while True:
            gc.collect(0)

    with pytest.raises(Hang), limited(0.1):
        endless()


def test_defects_that_fuzzing_found(tmp_path: Path) -> None:
    """A pause of years, too many layers, sizes past 64 bits, a vocabulary that lacks a token."""
    note = mido.Message("note_on", note=60, velocity=64)
    years = midi_bytes([note, note.copy(time=2**27)], path=tmp_path / "long.mid", beat=1)
    with pytest.raises(DataError, match="24"):
        PerformanceEvents().words(years, "long.mid")
    with pytest.raises(UserError, match=r"model\.layers"):
        read_recipe("language", ["model.layers=99999999999"])
    with pytest.raises(UserError, match="sizes"):
        read_recipe("language", ["model.dim=100000000000000000000", "model.heads=4"])
    content = Words().train(["a b"]).to_json().replace('"<unk>": 3', '"<ink>": 3')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="encode"):
        Tokenizer.load(tmp_path / "tokenizer.json").encode("c")
    assert str(UserError("one\rline\n\x1b[2J\ud800")) == "one line  [2J "
