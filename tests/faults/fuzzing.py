"""Inputs that nobody meant, to everything that reads something: each is answered or refused.

A case is a function of the seed, its target and its number alone, so that any can be done again.
"""

import base64
import contextlib
import gzip
import io
import json
import random
import signal
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image
from starlette.testclient import TestClient
from tests.data.small_music import random_performance
from tests.web.small_models import SENTENCE, make_models

from manyheads.config import dump, to_toml
from manyheads.data.corpus import read_lines, read_pairs
from manyheads.data.events import ChoraleGrid, PerformanceEvents
from manyheads.data.images import ImageData, load_image
from manyheads.data.labelled import LabelledData
from manyheads.data.midi import write_midi
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe, recipes
from manyheads.run import read_run
from manyheads.serve.app import build_app as build_server
from manyheads.serve.app import work_of
from manyheads.serve.batching import Bounds
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe, Characters, WordPiece, Words
from manyheads.train.metrics import step_of
from manyheads.view.figures import metric_curves
from manyheads.web.app import build_app
from manyheads.web.guard import Limits
from manyheads.web.runs import all_records, summary

HERE = "http://localhost"
PATIENCE = 20.0  # seconds after which a case hangs
ALPHABETS = (
    *("ab ", "äöüß", "日本語", "😀👩‍👧", "\u0301\u200d", "\x00\x1f\x7f\r\n\t", "<s></s>[MASK]"),
    *("0123", "a\ud800\udc00"),
)
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308),
    *(float("inf"), float("nan"), "", " ", "0", "1", "-1", "1e9", "nan", "true", "\x00", "\ud800"),
    *([], {}, [[]], [None], [1, 2, 3], ["a"], ["a"] * 300, {"a": {"b": []}}, [[1], "a"]),
    "x" * 5000,
]


# Of settings, as TOML writes them.
VALUES = (
    *("-1", "0", "1", "3", "1.5", "-0.0", "1e300", "nan", "inf", "true", '""', '"none"', "[]"),
    *("1000000000", "99999999999999999999", '"x"', "[1, 2]", '["a", "a"]', "{}", '{kind = "x"}'),
)


class Hang(BaseException):
    """A case that has not ended; no handler of errors takes it for one of its own."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, with all that doing it again needs."""

    target: str
    number: int
    given: str
    error: str


@dataclass
class Report:
    """How many cases of a target were answered and refused, and which did neither."""

    target: str
    answered: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    slowest: float = 0.0


# A target draws an input and gives what is done with it: True is an answer, False a refusal.
Case = tuple[Any, Callable[[], bool]]
Target = Callable[[random.Random], Case]


def fuzz(name: str, target: Target, numbers: range, seed: int) -> Report:
    report = Report(name)
    for number in numbers:
        given, use = target(random.Random(f"{seed} {name} {number}"))
        begin = time.perf_counter()
        try:
            with limited(PATIENCE), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answered = use()
            report.answered += answered
            report.refused += not answered
        except UserError as mistake:
            report.refused += 1
            if len(str(mistake).splitlines()) != 1:
                report.failures.append(Failure(name, number, short(given), f"lines: {mistake}"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also what a library in another language panics with
            error = traceback.format_exc(limit=-4)
            report.failures.append(Failure(name, number, short(given), error))
        report.slowest = max(report.slowest, time.perf_counter() - begin)
    return report


def short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 600 else f"{text[:600]}… ({len(text)} characters)"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: what is raised inside a callback of the collector is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- inputs ---


def any_text(draw: random.Random) -> str:
    """Words and rubbish; of every plane, half characters too; now and then long."""
    parts = []
    for _ in range(draw.randrange(8)):
        kind = draw.randrange(6)
        if kind == 0:
            parts.append(SENTENCE)
        elif kind == 1:
            parts.append(chr(draw.choice((draw.randrange(0x300), draw.randrange(0x110000)))))
        elif kind == 2:
            parts.append(draw.choice(("a", " ", "ß", "\u0301", "!", "9")) * draw.randrange(200))
        else:
            alphabet = draw.choice(ALPHABETS)
            parts.append("".join(draw.choices(alphabet, k=draw.randrange(20))))
    return draw.choice(("", " ")).join(parts)


def mutated(content: bytes, draw: random.Random, words: tuple[bytes, ...] = ()) -> bytes:
    """A few bits, bytes and stretches of a file changed, put in, doubled or left out."""
    found = bytearray(content)
    for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
        at, to = sorted((draw.randrange(len(found) + 1), draw.randrange(len(found) + 1)))
        kind = draw.randrange(8)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1 and found:
            found[at % len(found)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.randrange(5))
        elif kind == 3:
            del found[at : at + draw.randrange(9)]
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at:at] = found[at : min(to, at + 64)]
        elif words:
            found[at : at + draw.randrange(4)] = draw.choice(words)
    return bytes(found)


def other_value(content: bytes, draw: random.Random) -> bytes:
    """Settings in which some have a value that nobody would give them."""
    lines = content.decode().splitlines()
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(lines))
        name, equals, _ = lines[at].partition(" = ")
        if equals:
            lines[at] = f"{name} = {draw.choice(VALUES)}"
    return "\n".join(lines).encode()


def other_leaf(content: bytes, draw: random.Random) -> bytes:
    """JSON with something else at a place in it."""
    whole = json.loads(content)
    part: Any = whole
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        key = draw.choice(keys)
        inside = part[key]
        if not isinstance(inside, dict | list) or not inside or draw.random() < 0.2:
            part[key] = draw.choice((None, True, -1, 0, 2**40, 0.5, "", "a", [], {}, ["a", 1]))
            return json.dumps(whole).encode()
        part = inside


def other_header(content: bytes, draw: random.Random) -> bytes:
    """A PNG that says another size, depth or kind of colour, with the check sum of that."""
    header = bytearray(content[12:29])
    sizes = (0, 1, 7, 9, 5000, 2**16, 2**31 - 1, 2**32 - 1)
    for at in draw.choice(((4,), (8,), (4, 8))):
        header[at : at + 4] = draw.choice(sizes).to_bytes(4, "big")
    header[12 + draw.randrange(5)] = draw.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    check = zlib.crc32(header).to_bytes(4, "big")
    return content[:12] + bytes(header) + check + content[33:]


# --- targets ---


class Inputs:
    """All targets by name, over files and models in a folder that is theirs."""

    def __init__(self, room: Path) -> None:
        self.room = room
        texts = [SENTENCE, "A dog and a cat.", "Der kleine Hund läuft.", "日本語 😀"] * 5
        kinds = Bpe(vocab_size=330), WordPiece(vocab_size=700), Characters(vocab_size=400), Words()
        self.tokenizers = {kind.kind: kind.train(texts) for kind in kinds}
        self.models = make_models(room / "models")
        self.recipes = [self._recipe(name) for name in recipes()]
        notes = [random_performance(seed, 12) for seed in range(4)]
        write_midi(notes[:1], room / "one.mid")
        write_midi(notes, room / "four.mid")
        self.music = [(room / name).read_bytes() for name in ("one.mid", "four.mid")]
        self.pictures = self._pictures()
        self.clients = self._clients()
        self.traces = {kind: self._trace(kind) for kind in ("trace", "flow")}
        self.targets: dict[str, Target] = {
            "tokens": self.text_to_tokens,
            "tokenizer.json": self.tokenizer_files,
            "tables": self.tables,
            "midi": self.midi,
            "pictures": self.picture_files,
            "settings": self.settings,
            "metrics": self.metrics,
            "view": self.view,
            "serve": self.serve,
        }

    def _recipe(self, name: str) -> bytes:
        return to_toml(dump(read_recipe(name))).encode()

    def _pictures(self) -> list[tuple[str, bytes]]:
        draw = np.random.default_rng(1)
        found = []
        for mode, shape in (("L", (8, 8)), ("RGB", (9, 7, 3)), ("RGBA", (8, 8, 4)), ("P", (8, 8))):
            picture = Image.fromarray(
                draw.integers(0, 255, shape, np.uint8), None if mode == "P" else mode
            )
            picture = picture.convert(mode)
            for form in ("PNG", "JPEG") if mode in ("L", "RGB") else ("PNG",):
                stream = io.BytesIO()
                picture.save(stream, form)
                found.append((f"one.{form.lower()}", stream.getvalue()))
        pixels, labels = (
            draw.integers(0, 255, (6, 4, 4), np.uint8),
            np.arange(6, dtype=np.uint8) % 2,
        )
        stream = io.BytesIO()
        np.savez(stream, x_train=pixels, y_train=labels)
        found.append(("all.npz", stream.getvalue()))
        head = bytes([0, 0, 8, 3]) + np.array([6, 4, 4], ">u4").tobytes() + pixels.tobytes()
        found.append(("train-images-idx3-ubyte", head))
        return found

    def _clients(self) -> dict[str, TestClient]:
        bounds = Bounds(rows=8, tokens=300)
        limits = Limits(trace_bytes=8 * 2**20)  # soon full: what grows then is no cache
        view = build_app(self.models, limits=limits)
        found = {"view": TestClient(view, HERE, raise_server_exceptions=False)}
        for name, given in (("translator", ("en", "de")), ("writer", (None, None))):
            work = work_of(load_torch_run(self.models / name), bounds, *given, None)
            app = build_server(name, work, bounds)
            found[name] = TestClient(app, HERE, raise_server_exceptions=False)
        return found

    def _trace(self, kind: str) -> str:
        """What tensors can be asked of."""
        answer = self.clients["view"].post(f"/api/{kind}", json={**TEXT, "target": "Der Hund"})
        return str(answer.json()["trace"])

    def text_to_tokens(self, draw: random.Random) -> Case:
        kind, text = draw.choice(list(self.tokenizers)), any_text(draw)
        tokenizer, longest = self.tokenizers[kind], draw.randrange(2, 9)
        some = draw.choices(range(tokenizer.vocab_size + 5), k=draw.randrange(20))

        def use() -> bool:
            assert isinstance(tokenizer.decode(some), str)
            assert len(tokenizer.subwords(some)) == len(some)
            ids = tokenizer.encode(text)
            written = tokenizer.decode(ids)
            assert kind == "words" or written == text, f"{written!r} is not what went in"
            assert tokenizer.encode_batch([text, ""]) == [ids, []]
            assert len(tokenizer.offsets(text)) == len(ids)
            assert all(len(one) <= longest for one, _ in tokenizer.framed([text], longest))
            if 0 < len(text) < 60 and kind in ("bpe", "wordpiece"):
                assert len(tokenizer.trace(text)[-1].subwords) == len(ids)
            return True

        return (kind, text), use

    def tokenizer_files(self, draw: random.Random) -> Case:
        kind, text = draw.choice(list(self.tokenizers)), any_text(draw)
        words = (b"null", b"-1", b"[]", b"{}", b'""', b"99999999999", b"true", b'"BPE"')
        whole = self.tokenizers[kind].to_json().encode()
        content = draw.choice((other_leaf(whole, draw), mutated(whole, draw, words)))

        def use() -> bool:
            path = self._file("tokenizer.json", content)
            tokenizer = Tokenizer.load(path)
            tokenizer.decode(tokenizer.encode(text))
            return True

        return (kind, content), use

    def tables(self, draw: random.Random) -> Case:
        rows = ["text\tlabel", *(f"{any_text(draw)}\t{draw.choice('01')}" for _ in range(4))]
        plain = "\n".join(rows).encode("utf-8", "surrogatepass")
        content = mutated(plain, draw, (b"\t", b"\n", b"\r\n", b"\xef\xbb\xbf", b"nan", b"1e999"))
        packed = draw.random() < 0.2
        if packed:
            content = mutated(gzip.compress(content, mtime=0), draw)
        name = "table.tsv.gz" if packed else "table.tsv"
        data = LabelledData(
            train=str(self.room / "case" / name),
            answer=draw.choice(("label", "number")),
            label=draw.choice(("label", "2")),
            text=draw.choice(("text", "1")),
            broken_rows=draw.choice(("refuse", "skip")),
        )

        def use() -> bool:
            path = self._file(name, content)
            if draw.random() < 0.5:
                read_lines(path)
                return bool(read_pairs(path, path, skip_empty=True)[0])
            train, valid = data.read("train"), data.read("valid")
            data.label_names(train)
            return len(train.texts) > 0 and len(valid.texts) > 0

        return (data, content), use

    def midi(self, draw: random.Random) -> Case:
        words = (
            b"\xff\x51\x03\xff\xff\xff",
            b"\xff\xff\xff\x7f",
            b"MTrk",
            b"\x90\x40\x7f",
            b"\xf0",
        )
        content = mutated(draw.choice(self.music), draw, words)
        encoding = draw.choice((PerformanceEvents(), ChoraleGrid()))

        def use() -> bool:
            written = encoding.words(content, "case.mid")
            assert set(written) <= set(encoding.vocabulary())
            encoding.parts(written)
            return True

        return (encoding, content), use

    def picture_files(self, draw: random.Random) -> Case:
        name, whole = draw.choice(self.pictures)
        words = (b"IHDR", b"IDAT", b"\xff\xff\xff\xff", b"\x7f\xff", b"(9999999999,)")
        content = mutated(whole, draw, words)
        if name == "one.png" and draw.random() < 0.3:
            content = other_header(whole, draw)

        def use() -> bool:
            path = self._file(name, content)
            if path.suffix in (".png", ".jpeg"):
                return load_image(path).ndim == 4
            if path.suffix != ".npz":
                labels = bytes([0, 0, 8, 1, 0, 0, 0, 6, 0, 1, 0, 1, 0, 1])
                (path.parent / "train-labels-idx1-ubyte").write_bytes(labels)
            try:
                return len(ImageData(folder=str(path.parent)).read("train").labels) > 0
            finally:
                path.unlink()
                (path.parent / "train-labels-idx1-ubyte").unlink(missing_ok=True)

        return (name, content), use

    def settings(self, draw: random.Random) -> Case:
        words = (*b"-1 1e999 nan [] {} true 0 inf '' 12".split(), b'"none"')
        whole = draw.choice(self.recipes)
        content = draw.choice((other_value(whole, draw), mutated(whole, draw, words)))
        names = ["model.dim", "model.position", "train.steps", "tokens", "data", "decode.beam"]
        values = ("0", "-1", "nan", "inf", "", "none", "1e99", "rotary", "bpe", "a,b", "=", "1.5ü")
        overrides = [
            f"{draw.choice(names)}{draw.choice(('', '', '.kind', '.x'))}={draw.choice(values)}"
            for _ in range(draw.choice((0, 0, 1, 2)))
        ]
        as_run = draw.random() < 0.5

        def use() -> bool:
            path = self._file("run.toml", content)
            if as_run:
                read_run(path.parent)
                return "error" not in summary("case", path.parent)
            read_recipe(str(path), overrides)
            return True

        return (as_run, overrides, content), use

    def metrics(self, draw: random.Random) -> Case:
        steps = [{"step": step, "split": "train", "loss": 1 / step} for step in range(1, 5)]
        lines = [json.dumps(step) for step in steps]
        words = (
            b"1e999",
            b"NaN",
            b"null",
            b"[" * 3000,
            b"9" * 400,
            b"9" * 5000,
            b"\n",
            b"\xff",
            b"{}",
        )
        content = mutated("\n".join([*lines, ""]).encode(), draw, words)

        def use() -> bool:
            path = self._file("metrics.jsonl", content)
            for line in content.splitlines():
                step_of(line)
            json.dumps(list(all_records(path)), allow_nan=False)
            metric_curves(path.parent)
            return True

        return content, use

    def view(self, draw: random.Random) -> Case:
        method, path, values = self._question(draw, VIEW)
        if "run" in values and draw.random() < 0.8:
            values["run"] = draw.choice(sorted(path.name for path in self.models.iterdir()))
        for kind in ("trace", "flow"):
            path = path.replace(f"/api/{kind}/x/", f"/api/{kind}/{self.traces[kind]}/")
        if path in ("/api/music", "/api/image") and draw.random() < 0.6:
            files = self.music if path == "/api/music" else [one for _, one in self.pictures[:6]]
            values["upload"] = base64.b64encode(mutated(draw.choice(files), draw)).decode()
        return self._asked("view", method, path, values, draw)

    def serve(self, draw: random.Random) -> Case:
        name = draw.choice(("translator", "writer"))
        method, path, values = self._question(draw, SERVE)
        return self._asked(name, method, path, values, draw)

    def _question(
        self, draw: random.Random, known: dict[str, tuple[str, dict[str, Any]]]
    ) -> tuple[str, str, dict[str, Any]]:
        """A documented request with some of its values strange, left out, or of other names."""
        path = draw.choice(list(known))
        method, values = known[path][0], dict(known[path][1])
        for name in list(values):
            kind = draw.randrange(10)
            if kind == 0:
                del values[name]
            elif kind == 1:
                values[name] = draw.choice(STRANGE)
            elif kind < 4 and isinstance(values[name], str) and name != "run":
                values[name] = any_text(draw)[:300]
        if draw.random() < 0.1:
            values[any_text(draw)[:9]] = draw.choice(STRANGE)
        if draw.random() < 0.1:
            path += draw.choice(("/", "/..", "%00", "/x/y", "?a=1", "%2e%2e%2f", "é"))
        return draw.choice((method,) * 9 + ("PUT",)), path, values

    def _asked(
        self, app: str, method: str, path: str, values: dict[str, Any], draw: random.Random
    ) -> Case:
        client = self.clients[app]
        body = json.dumps(values).encode()
        if method != "GET" and draw.random() < 0.25:
            body = mutated(
                body, draw, (b"1e999", b"null", b"[" * 2000, b'"', b"\\ud800", b"9" * 5000)
            )
        query = {
            name: str(value)[:200].encode("utf-8", "replace") for name, value in values.items()
        }
        kinds = ("application/json",) * 8 + ("text/plain", FORM, "")
        headers = {"Content-Type": draw.choice(kinds)}
        names = [name.encode("utf-8", "replace").decode() for name in query]
        asked: dict[str, Any] = {"headers": headers, "content": body}
        if method == "GET":
            asked = {"params": dict(zip(names, query.values(), strict=True))}

        def use() -> bool:
            answer = client.request(method, path, **asked)
            status = answer.status_code
            assert status < 500 or status == 503, f"{status}: {answer.text[:300]}"
            if status < 400:
                return True
            assert "json" in answer.headers["content-type"], f"{status}: {answer.text[:300]}"
            assert isinstance(answer.json(), dict)
            return False

        return (app, method, path, asked), use

    def _file(self, name: str, content: bytes) -> Path:
        folder = self.room / "case"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return folder / name


FORM = "application/x-www-form-urlencoded"
SAMPLED = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}
TEXT = {"run": "translator", "text": SENTENCE}
VIEW: dict[str, tuple[str, dict[str, Any]]] = {
    "/health": ("GET", {}),
    "/api/runs": ("GET", {}),
    "/api/settings": ("GET", {"run": "writer"}),
    "/api/metrics": ("GET", {"run": "writer", "since": 0, "version": ""}),
    "/api/probes": ("GET", {"run": "writer", "since": 0, "version": ""}),
    "/api/probes/removed": (
        "POST",
        {"run": "writer", "step": 0, "sentence": 0, "off": ["encoder.self.0.1"]},
    ),
    "/api/flow": ("POST", {**TEXT, "target": "Der Hund"}),
    "/api/flow/x/boxes": ("GET", {"layer": 0, "head": 0}),
    "/api/trace": ("POST", {**TEXT, "target": "Der Hund", "off": []}),
    "/api/trace/x/tensor/encoder.self.weights": (
        "GET",
        {"layer": 0, "head": 0, "dtype": "u8", "side": 4, "own": 1},
    ),
    "/api/continue": ("POST", {"run": "writer", "text": SENTENCE, "off": []}),
    "/api/translate": ("POST", {**TEXT, "beam": 2, "prefix": "Der", "which": 0}),
    "/api/gold": ("POST", TEXT),
    "/api/decode": ("POST", {**TEXT, "beam": 2, "limit": 5, "prefix": "", **SAMPLED}),
    "/api/next": ("POST", {**TEXT, "prefix": "", "count": 5, **SAMPLED}),
    "/api/tokens": ("POST", {"run": "writer", "text": SENTENCE}),
    "/api/positions": (
        "GET",
        {"scheme": "rotary", "length": 8, "trained": 8, "dim": 16, "heads": 2, "base": 100,
         "run": "writer"},
    ),
    "/api/lens": ("POST", {**TEXT, "target": "Der Hund"}),
    "/api/fill": ("POST", {"run": "reader", "text": "The <mask> dog.", "hidden": []}),
    "/api/image": ("POST", {"run": "pictures", "picture": 0}),
    "/api/music": ("POST", {"run": "piano", "piece": 0, "begin": 0, "events": 8}),
    "/page/main.js": ("GET", {}),
    "/runs": ("GET", {}),
    "/": ("GET", {}),
}  # fmt: skip
SERVE: dict[str, tuple[str, dict[str, Any]]] = {
    "/health": ("GET", {}),
    "/languages": ("GET", {}),
    "/detect": ("POST", {"q": SENTENCE}),
    "/translate": ("POST", {"q": "The dog.", "source": "en", "target": "de", "alternatives": 1}),
    "/v2/translate": ("POST", {"text": ["The dog."], "target_lang": "DE", "source_lang": "EN"}),
    "/v1/models": ("GET", {}),
    "/v1/models/writer": ("GET", {}),
    "/v1/completions": (
        "POST",
        {"prompt": "The dog", "max_tokens": 4, "n": 1, "temperature": 0.8, "top_p": 0.9, "seed": 1,
         "stop": ["."], "logprobs": 2, "echo": False, "stream": False},
    ),
}  # fmt: skip
