"""Models, servers and documented requests for the fuzz tests, and a time limit."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.testclient import TestClient
from tests.web.small_models import SENTENCE, make_models

from manyheads.loading import load_torch_run
from manyheads.serve.app import build_app as build_server
from manyheads.serve.app import work_of
from manyheads.serve.scheduler import Bounds
from manyheads.tokenizer.train import Bpe, Characters, WordPiece, Words
from manyheads.web.app import build_app
from manyheads.web.guard import Limits

HERE = "http://localhost"


class Hang(BaseException):
    """A case that takes too long; no handler of errors catches it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """So much processor time, or 30 times as long on the clock: other processes may be busy."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds:g} seconds")

    signals = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, stop) for number in signals.values()}
    # Repeated: an exception inside a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_PROF, seconds, min(seconds, 1.0))
    signal.setitimer(signal.ITIMER_REAL, 30 * seconds, min(seconds, 1.0))
    try:
        yield
    finally:
        for timer in signals:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


class Inputs:
    """A tokenizer of each kind, a folder of models, and a client of each server."""

    def __init__(self, folder: Path) -> None:
        texts = [SENTENCE, "A dog and a cat.", "Der kleine Hund läuft.", "日本語 😀"] * 5
        kinds = Bpe(vocab_size=330), WordPiece(vocab_size=700), Characters(vocab_size=400), Words()
        self.tokenizers = {kind.kind: kind.train(texts) for kind in kinds}
        self.models = make_models(folder / "models")
        (self.models / "demo").mkdir()  # no training begins where a demo is
        bounds = Bounds(rows=8, tokens=300)
        # A small limit of traces, soon reached: memory that still grows then is no cache.
        view = build_app(self.models, limits=Limits(trace_bytes=8 * 2**20))
        self.clients = {"view": TestClient(view, HERE, raise_server_exceptions=False)}
        for name, languages in (("translator", ("en", "de")), ("writer", (None, None))):
            work = work_of(load_torch_run(self.models / name), bounds, *languages, None)
            app = build_server(name, work, bounds)
            self.clients[name] = TestClient(app, HERE, raise_server_exceptions=False)
        self.traces = {kind: self._trace(kind) for kind in ("trace", "flow")}

    def _trace(self, kind: str) -> str:
        """The name under which the view server keeps the tensors of a pass."""
        answer = self.clients["view"].post(f"/api/{kind}", json={**TEXT, "target": "Der Hund"})
        return str(answer.json()["trace"])


SAMPLED = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}
TEXT = {"run": "translator", "text": SENTENCE}
VIEW: dict[str, tuple[str, dict[str, Any]]] = {
    "/health": ("GET", {}),
    "/api/runs": ("GET", {}),
    "/api/settings": ("GET", {"run": "writer"}),
    "/api/metrics": ("GET", {"run": "writer", "since": 0, "version": ""}),
    "/api/probes": ("GET", {"run": "writer", "since": 0, "version": "", "last": 1}),
    "/api/probes/removed": (
        "POST",
        {"run": "writer", "step": 0, "sentence": 0, "off": ["encoder.self.0.1"]},
    ),
    "/api/training": ("GET", {}),
    "/api/training/start": ("POST", {}),
    "/api/training/stop": ("POST", {}),
    "/api/quizzes": ("GET", {}),
    "/api/quiz": ("POST", {"name": "masked"}),
    "/api/flow": ("POST", {**TEXT, "target": "Der Hund"}),
    "/api/flow/x/boxes": ("GET", {"layer": 0, "head": 0}),
    "/api/flow/x/cell": (
        "GET",
        {"box": "encoder.self.scores", "layer": 0, "head": 0, "row": 0, "column": 0},
    ),
    "/api/sweep": ("POST", {**TEXT, "target": "Der Hund"}),
    "/api/trace": ("POST", {**TEXT, "target": "Der Hund", "off": []}),
    "/api/trace/x/tensor/encoder.self.weights": (
        "GET",
        {"layer": 0, "head": 0, "dtype": "u8", "side": 4, "own": 1},
    ),
    "/api/continue": ("POST", {"run": "writer", "text": SENTENCE, "off": []}),
    "/api/translate": ("POST", {**TEXT, "beam": 2, "prefix": "Der", "which": 0}),
    "/api/gold": ("POST", TEXT),
    "/api/decode": ("POST", {**TEXT, "beam": 2, "limit": 5, "prefix": "", **SAMPLED}),
    "/api/missed": ("GET", {"run": "writer"}),
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
    "/metrics": ("GET", {}),
    "/v1/embeddings": ("POST", {"input": [SENTENCE], "encoding_format": "base64"}),
    "/classify": ("POST", {"text": SENTENCE, "image": ""}),
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
