"""A static copy of the page: one HTML file that opens without a server and without a network.

The file holds the page's modules, and the responses of the server to all requests that the pages
send for a few sentences. Browsers load no module from file://, so the modules are data URLs of an
import map. A view that was not recorded says so.
"""

import asyncio
import base64
import json
import posixpath
import re
import zlib
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from manyheads.errors import UserError
from manyheads.fileio import write_text
from manyheads.tasks.probes import FOLDER, SENTENCES
from manyheads.web.app import PAGE, build_app, check_folder
from manyheads.web.guard import Guard
from manyheads.web.library import Library
from manyheads.web.runs import summary

TEXTS = 4  # sentences of a run: its example, and those that Watch shows
PAGES = (
    "runs",
    "tour",
    "watch",
    "flow",
    "attention",
    "tokens",
    "translate",
    "decode",
    "train",
    "quiz",
)
FILE = "index.html"
SAMPLING = {"temperature": 1, "top_k": 0, "top_p": 1, "seed": 0}  # the defaults of Decode
ALTERNATIVES = 20  # `REQUESTED` of translate.js
MAP_SIDE = 256  # `SIDE` of attention.js
SMALL_MAP_SIDE = 32  # `headsOf` of flow.js
# No connection is possible, not even by mistake.
POLICY = "connect-src 'none'; object-src 'none'; base-uri 'none'; form-action 'none'"


def export(folder: Path, to: Path) -> Path:
    """Write the static page of a translation run, or of all such runs in a folder."""
    check_folder(folder)
    runs = [summary(name, path) for name, path in Library(folder).folders().items()]
    runs = [{**run, "kept": []} for run in runs if run.get("kind") == "seq2seq"]
    if not runs:
        raise UserError(f"{folder} holds no Transformer that translates: --export needs one")
    recording = asyncio.run(_record(folder, runs))
    to.mkdir(parents=True, exist_ok=True)
    write_text(to / FILE, page_with(recording))
    return to / FILE


async def _record(folder: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    recorder = Recorder(folder)
    modules = sorted(path.name for path in PAGE.glob("watch*.js"))  # a saved film has them
    for file in ("tour.json", "numbers.js", *modules):
        await recorder.get(f"/page/{file}")
    shown = [_without_path(run) for run in runs]
    await recorder.get("/api/runs", change=lambda answer: {**answer, "runs": shown})
    for quiz in (await recorder.get("/api/quizzes"))["quizzes"]:
        await recorder.post("/api/quiz", name=quiz["name"])
    texts = {run["name"]: _texts(recorder.library, run) for run in runs}
    for name in texts:
        await recorder.run(name)
        for text in texts[name]:
            await recorder.text(name, text, texts[name])
    bodies = [*recorder.bodies]
    return {"pages": PAGES, "texts": texts, "answers": recorder.answers, "bodies": bodies}


def _without_path(answer: dict[str, Any]) -> dict[str, Any]:
    """Names no folder of this computer: the copy may be published, and shows the settings."""
    return {**answer, "command": "manyheads train run.toml --out NEW"}


def _texts(library: Library, run: dict[str, Any]) -> list[str]:
    path = library.find(run["name"]) / FOLDER / SENTENCES
    probed = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return list(dict.fromkeys([run["example"], *(one["source"] for one in probed)]))[:TEXTS]


class Recorder:
    """Sends requests to the application and keeps its responses.

    `answers` maps a request to its X- headers and its body: a text, or numbers of `bodies`, parts
    in base64. Matrices that several responses share are stored once.
    """

    def __init__(self, folder: Path) -> None:
        app = build_app(folder)
        assert isinstance(app, Guard)
        self.app, self.state = app, app.app.state  # type: ignore[attr-defined]
        self.library: Library = self.state.library
        self.answers: dict[str, tuple[dict[str, str], str | list[int]]] = {}
        self.bodies: dict[str, int] = {}

    async def get(self, path: str, change: Any = None, **query: Any) -> Any:
        in_order = urlencode(sorted(query.items()))
        return await self._keep("GET", path, in_order, b"", f"GET {path}?{in_order}", change)

    async def post(self, path: str, change: Any = None, **values: Any) -> Any:
        body = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return await self._keep("POST", path, "", body.encode(), f"POST {path} {body}", change)

    async def _keep(
        self, method: str, path: str, query: str, body: bytes, key: str, change: Any
    ) -> Any:
        status, headers, content = await self._call(method, path, query, body)
        if status != 200:
            raise UserError(f"{path} cannot be recorded: {content.decode()[:200]}")
        is_json = headers["content-type"].startswith("application/json")
        answer = json.loads(content) if is_json else None
        if change:
            answer = change(answer)
            content = json.dumps(answer).encode()
        shown = {name: headers[name] for name in headers if name.startswith("x-")}
        is_text = headers["content-type"] != "application/octet-stream"
        self.answers[key] = shown, content.decode() if is_text else self._parts(shown, content)
        return answer

    def _parts(self, headers: dict[str, str], content: bytes) -> list[int]:
        shapes = [list(map(int, shape.split(","))) for shape in headers["x-shape"].split(";")]
        sizes = [4 * prod(shape) for shape in shapes] if len(shapes) > 1 else [len(content)]
        ends = [*accumulate(sizes)]
        parts = [content[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        texts = [base64.b64encode(part).decode() for part in parts]
        return [self.bodies.setdefault(text, len(self.bodies)) for text in texts]

    async def _call(
        self, method: str, path: str, query: str, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """One request to the application, without a socket."""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        sent: list[Any] = []
        waiting: list[Any] = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return waiting.pop() if waiting else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:])

    async def run(self, run: str) -> None:
        """What Watch, Train and Runs show; then the requests that look for new lines."""
        await self.get("/api/settings", change=_without_path, run=run)
        await self.get("/api/probes", _without_weights, run=run, last=1)
        for path in ("/api/probes", "/api/metrics"):
            since, version, more = 0, "", True
            while more:
                answer = await self.get(
                    path, _without_weights, run=run, since=since, version=version
                )
                more = answer["next"] != since or version != answer["version"]
                since, version = answer["next"], answer["version"]

    async def text(self, run: str, text: str, texts: list[str]) -> None:
        """All that Tokens, Flow, Attention, Translate and Decode request for a sentence."""
        about = {"run": run, "text": text}
        await self.post("/api/tokens", **about)
        flow = await self.post("/api/flow", **about)
        layers, heads = (
            max(part[size] for part in flow["columns"]) for size in ("layers", "heads")
        )
        for layer in range(layers):
            for head in range(heads):
                await self.get(f"/api/flow/{flow['trace']}/boxes", layer=layer, head=head)
        for box in (box for column in flow["columns"] for box in column["boxes"]):
            if box["name"].endswith(".weights"):
                path = f"/api/trace/{flow['trace']}/tensor/{box['name']}"
                await self.get(path, dtype="u8", side=SMALL_MAP_SIDE)
        trace = await self.post("/api/trace", **about, off=[])
        await self.tensors(trace["trace"], trace["maps"])
        translated = await self.post("/api/translate", **about, prefix=[], which=0)
        for which in range(1, len(translated["hypotheses"])):
            other = await self.post("/api/translate", **about, prefix=[], which=which)
            await self.tensors(other["trace"])
        await self.tensors(translated["trace"])
        for at in range(len(translated["tokens"])):
            before = translated["tokens"][:at]
            await self.post("/api/next", **about, prefix=before, count=ALTERNATIVES)
        gold = await self.post("/api/gold", lambda answer: {**answer, "examples": texts}, **about)
        if gold["pair"]:
            await self.tensors(gold["pair"]["trace"])
        search = await self.post("/api/decode", **about, **SAMPLING, prefix=[])
        prefixes: list[list[int]] = []
        for node in search["nodes"]:
            parent = [] if node["parent"] < 0 else prefixes[node["parent"]]
            prefixes.append([*parent, node["token"]])
        ended = [node["state"] == "ended" for node in search["nodes"]]
        kept = [prefix for prefix, end in zip(prefixes, ended, strict=True) if not end]
        for prefix in [[], *kept]:
            await self.post("/api/next", **about, **SAMPLING, prefix=prefix)

    async def tensors(self, trace: str, maps: Sequence[dict[str, Any]] = ()) -> None:
        """The tensors of a trace: all of it, each layer and each head; maps also as bytes."""
        tensors: dict[str, Tensor] = self.state.traces.get(trace).tensors
        for name, tensor in tensors.items():
            path = f"/api/trace/{trace}/tensor/{name}"
            layers, heads = tensor.shape[:2] if tensor.ndim > 3 else (0, 0)
            await self.get(path)
            for layer in range(layers or (len(tensor) if tensor.ndim > 2 else 0)):
                await self.get(path, layer=layer)
                for head in range(heads):
                    await self.get(path, layer=layer, head=head)
        for item in maps:
            path = f"/api/trace/{trace}/tensor/{item['name']}"
            for normalize in (0, 1):
                await self.get(f"{path}.weights", dtype="u8", side=MAP_SIDE, normalize=normalize)
            for layer in range(item["layers"] if item["rollout"] else 0):
                await self.get(f"{path}.rollout", layer=layer)


def _without_weights(answer: dict[str, Any]) -> dict[str, Any]:
    """Removing a head needs the model: the static page does not offer it."""
    return {**answer, "weights": []} if "weights" in answer else answer


def page_with(recording: dict[str, Any]) -> str:
    """The HTML document with style, modules and recording inside."""
    packed = base64.b64encode(zlib.compress(json.dumps(recording).encode(), 9)).decode()
    imports = {}
    for path in sorted(PAGE.rglob("*.js")):
        name = path.relative_to(PAGE).as_posix()
        if not name.startswith("pages/") or path.stem in recording["pages"]:
            imports[f"manyheads/{name}"] = _data_url(_absolute(path.read_text("utf-8"), name))
    icon = base64.b64encode((PAGE / "icon.svg").read_bytes()).decode()
    parts = {
        '<link rel="icon" href="/page/icon.svg" type="image/svg+xml" />': (
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}" />\n'
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}" />'
        ),
        '<link rel="stylesheet" href="/page/style.css" />': (
            f"<style>\n{(PAGE / 'style.css').read_text('utf-8')}</style>"
        ),
        '<script type="module" src="/page/main.js"></script>': (
            f'<script>globalThis.recording = "{packed}";</script>\n'
            f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
            '<script type="module">import "manyheads/main.js";</script>'
        ),
    }
    html = (PAGE / "index.html").read_text("utf-8")
    for tag, replacement in parts.items():
        assert html.count(tag) == 1, tag
        html = html.replace(tag, replacement)
    return html


def _absolute(module: str, name: str) -> str:
    """A module whose imports are names of the import map: a data URL has no folder."""

    def named(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[3]))
        return f"{match[1]}{match[2]}manyheads/{path}"

    return re.sub(r"""(\bfrom |\bimport |\bimport\()(["`])(\.{1,2}/[^"`]*)""", named, module)


def _data_url(module: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(module.encode()).decode()}"
