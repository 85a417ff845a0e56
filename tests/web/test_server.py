"""The server: responses match the model, and forbidden requests are refused."""

import asyncio
import fnmatch
import json
import math
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, make_runs
from torch import Tensor

from manyheads.commands import serve as command
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture
from manyheads.models.seq2seq import Seq2Seq
from manyheads.run import read_run
from manyheads.train.optimizer import Train, learning_rate
from manyheads.web import app as server
from manyheads.web.guard import COOKIE, AccessPolicy, Limits
from manyheads.web.heads import HeadId, knocked_out, rollout, statistics
from manyheads.web.runs import formula, read_metrics, schedule
from manyheads.web.traces import Trace, Traces

ROOT = Path(__file__).parents[2]
LIMITS = Limits(body_bytes=20_000, tokens=40, trace_bytes=2**20)
HERE = "http://localhost"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(server.build_app(folder, limits=LIMITS), HERE)


def ask(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    actual: dict[str, Any] = answer.json()
    return actual


def problem(answer: Any, status: int) -> str:
    """The words of a refusal, which has the one form that all have."""
    assert answer.status_code == status, answer.text
    actual = answer.json()
    assert actual.keys() == {"error"}
    assert actual["error"].keys() == {"message", "type"}
    message: str = actual["error"]["message"]
    assert "\n" not in message
    return message


def tensor(client: TestClient, trace: str, name: str, **which: Any) -> Tensor:
    answer = client.get(f"/api/trace/{trace}/tensor/{name}", params=which)
    assert answer.status_code == 200, answer.text
    kind = {"f32": "<f4", "f16": "<f2", "u8": "u1"}[answer.headers["x-dtype"]]
    shape = [int(size) for size in answer.headers["x-shape"].split(",")]
    return torch.from_numpy(np.frombuffer(answer.content, kind).reshape(shape).copy())


def raw(app: Any, path: str, query: str = "") -> tuple[int, str]:
    """Status and location for a raw path that clients would normalise."""
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": query.encode(), "headers": [(b"host", b"localhost")]}
    scope |= {"root_path": "", "scheme": "http", "http_version": "1.1", "server": None}
    asyncio.run(app(scope, receive, send))
    headers = dict(sent[0]["headers"])
    return sent[0]["status"], headers.get(b"location", b"").decode()


def test_every_answer_has_the_strict_headers(client: TestClient) -> None:
    for path in ("/health", "/", "/attention", "/page/main.js", "/api/runs", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert not any(name.startswith("access-control") for name in headers)


def test_runs_are_listed_and_a_broken_one_says_why(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "reader", tmp_path / "whole")
    shutil.copytree(folder / "reader", tmp_path / "broken")
    (tmp_path / "broken" / "run.toml").write_text("task = [", encoding="utf-8")
    actual = TestClient(server.build_app(tmp_path), HERE).get("/api/runs").json()["runs"]
    assert [run["name"] for run in actual] == ["broken", "whole"]
    assert "run.toml" in actual[0]["error"]
    assert actual[1]["kind"] == "bert"
    assert actual[1]["step"] == 0
    # Brackets in brackets: too deep for those who read TOML and JSON.
    deep = "[" * 30_000
    (tmp_path / "broken" / "run.toml").write_text(f"task = {deep}", encoding="utf-8")
    (tmp_path / "whole" / "scores.json").write_text(deep, encoding="utf-8")
    local = TestClient(server.build_app(tmp_path), HERE)
    actual = local.get("/api/runs").json()["runs"]
    assert "nested" in actual[0]["error"] or "run.toml" in actual[0]["error"]
    assert actual[1]["scores"] == {}
    for path in ("/api/settings", "/api/metrics"):
        assert local.get(path, params={"run": "broken"}).status_code in (400, 422)


def test_what_is_listed_of_a_run_is_as_new_as_its_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "reader", tmp_path / "reader")
    local = TestClient(server.build_app(tmp_path), HERE)
    for step in (7, 8):
        with (tmp_path / "reader" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "split": "valid", "loss": 10 - step}) + "\n")
        [run] = local.get("/api/runs").json()["runs"]
        assert (run["step"], run["best_loss"]) == (step, 10 - step)


def test_a_run_alone_and_runs_below_are_found(client: TestClient, folder: Path) -> None:
    names = [run["name"] for run in client.get("/api/runs").json()["runs"]]
    assert names == ["deep/writer", "reader", "translator"]
    single = TestClient(server.build_app(folder / "reader"), HERE)
    assert [run["name"] for run in single.get("/api/runs").json()["runs"]] == ["reader"]


def test_the_maps_are_those_of_the_model(client: TestClient, folder: Path) -> None:
    """Bit for bit what `capture` gives for the same pass, and every row sums to 1."""
    opened = load_torch_run(folder / "translator")
    tokenizer = opened.tokenizer
    source = torch.tensor([[*tokenizer.encode(SENTENCE), tokenizer.end]])
    target = torch.tensor([[tokenizer.start, *tokenizer.encode("Der Hund.")]])
    with torch.no_grad(), capture(opened.model) as maps:
        opened.model(source, target)
    actual = ask(client, "/api/trace", run="translator", text=SENTENCE, target="Der Hund.")
    assert [one["name"] for one in actual["maps"]] == [
        *("encoder.self", "decoder.self", "decoder.cross"),
    ]
    for one in actual["maps"]:
        stack, kind = one["name"].split(".")
        weights = tensor(client, actual["trace"], f"{one['name']}.weights")
        assert torch.equal(weights, torch.stack(maps.all(kind, stack))[:, 0])
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
        assert (len(one["rows"]), len(one["columns"])) == weights.shape[2:]
        head = tensor(client, actual["trace"], f"{one['name']}.weights", layer=1, head=1)
        assert torch.equal(head, weights[1, 1])
        byte = tensor(client, actual["trace"], f"{one['name']}.weights", dtype="u8")
        assert torch.equal(byte, (weights * 255).round().to(torch.uint8))


@pytest.mark.parametrize("run", ["deep/writer", "reader"])
def test_decoders_and_encoders_are_shown_too(client: TestClient, run: str) -> None:
    actual = ask(client, "/api/trace", run=run, text=SENTENCE)
    [one] = actual["maps"]
    weights = tensor(client, actual["trace"], f"{one['name']}.weights")
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
    future = weights.triu(1).abs().sum()
    assert (future == 0) == (run == "deep/writer")
    rolled = tensor(client, actual["trace"], f"{one['name']}.rollout")
    assert torch.allclose(rolled.sum(-1), torch.ones(()), atol=1e-5)


def test_queries_and_keys_give_the_weights(client: TestClient) -> None:
    actual = ask(client, "/api/trace", run="translator", text=SENTENCE)
    q, k, weights = (
        tensor(client, actual["trace"], f"encoder.self.{what}") for what in ("q", "k", "weights")
    )
    scores = einsum(q, k, "l h t c, l h s c -> l h t s") / math.sqrt(q.shape[-1])
    assert torch.allclose(scores.softmax(-1), weights, atol=1e-6)


def test_a_head_that_is_knocked_out_is_one_whose_output_matrix_is_zero(folder: Path) -> None:
    """The same logits as those of a model whose rows of W^O for that head are 0."""
    opened = load_torch_run(folder / "translator")
    model = opened.model
    assert isinstance(model, Seq2Seq)
    tokens = torch.randint(300, (2, 7))
    place = HeadId.parse("decoder.cross.1.0")
    with torch.no_grad():
        baseline = model(tokens, tokens)
        with knocked_out(model, [place]):
            without = model(tokens, tokens)
        assert torch.equal(model(tokens, tokens), baseline)  # nothing of it is left
        matrix: Any = model.decoder.blocks[1].cross.output  # type: ignore[union-attr]
        matrix.weight[:, : matrix.weight.shape[1] // 2] = 0.0
        assert torch.allclose(model(tokens, tokens), without, atol=1e-6)
    assert not torch.allclose(baseline, without, atol=1e-3)


def test_knocking_out_changes_the_answer_and_nothing_else(client: TestClient) -> None:
    requested = {"run": "translator", "text": SENTENCE, "target": "Der Hund."}
    before = ask(client, "/api/trace", **requested)
    without = ask(client, "/api/trace", **requested, off=["encoder.self.0.0", "encoder.self.0.1"])
    assert before["output"]["log_probability"] != without["output"]["log_probability"]
    assert ask(client, "/api/trace", **requested) == before
    wrong = ("encoder.self.0.9", "encoder.cross.0.0", "x", "encoder.self.-1.0")
    for off in (*wrong, f"encoder.self.0.{'9' * 5000}"):
        assert "head" in problem(client.post("/api/trace", json={**requested, "off": [off]}), 400)


def test_statistics_of_maps_that_are_known() -> None:
    before = torch.zeros(1, 1, 4, 4)
    before[0, 0, [0, 1, 2, 3], [0, 0, 1, 2]] = 1.0  # each looks at the one before it
    even = torch.full((1, 1, 4, 4), 0.25)
    first, second = (statistics(one, "self") for one in (before, even))
    assert first == {"entropy": [[0]], "first": [[0.5]], "distance": [[0.75]], "previous": [[1]]}
    assert second["entropy"] == [[2]]  # of four equals: two bits
    assert second["distance"] == [[pytest.approx(1.25)]]
    assert statistics(even, "cross").keys() == {"entropy", "first", "coverage"}
    assert statistics(before, "cross")["coverage"] == [[0.75]]  # nothing looks at the last
    assert torch.equal(rollout(even)[0], 0.5 * (even[0, 0] + torch.eye(4)))


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/main.js"])
def test_a_foreign_name_or_page_is_refused(client: TestClient, path: str) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "[", "10.0.0.1"):
        assert "Host" in problem(client.get(path, headers={"Host": host}), 403)
    for origin in ("http://evil.example", "null", "http://localhost:1", "x"):
        assert "Origin" in problem(client.get(path, headers={"Origin": origin}), 403)
    assert client.get(path, headers={"Origin": HERE}).status_code == 200


def test_off_loopback_a_token_is_needed(folder: Path) -> None:
    door = AccessPolicy.at("0.0.0.0")
    assert door.token
    other = TestClient(server.build_app(folder, door), "http://10.1.2.3:8421")
    assert other.get("/health").status_code == 200
    for path in ("/", "/api/runs", "/page/main.js", "/?token=wrong", "/?token="):
        assert "token" in problem(other.get(path), 401)
    bearer = {"Authorization": f"Bearer {door.token}"}
    assert other.get("/api/runs", headers=bearer).status_code == 200
    assert "Host" in problem(other.get("/", headers={**bearer, "Host": "evil.example"}), 403)
    # A path that a browser would take for another host.
    moved = raw(server.build_app(folder, door), "//evil.example/", f"token={door.token}&run=a+b")
    assert moved == (303, "/evil.example/?run=a+b")
    answer = other.get("/train", params={"token": door.token}, follow_redirects=False)
    assert answer.headers["location"] == "/train"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert COOKIE in other.cookies
    assert other.get("/api/runs").status_code == 200
    assert AccessPolicy.at("127.0.0.1").token is None
    assert AccessPolicy.at("::1").token is None
    assert AccessPolicy.at("192.168.0.7").token is not None


def test_too_much_is_refused_and_the_server_lives(client: TestClient) -> None:
    def parts() -> Any:
        yield from [b"x" * 9000] * 3

    large = json.dumps({"text": "x" * 30_000})
    kind = {"Content-Type": "application/json"}
    assert "bytes" in problem(client.post("/api/trace", content=large, headers=kind), 413)
    assert "bytes" in problem(client.post("/api/trace", content=parts(), headers=kind), 413)
    for path in ("/api/trace", "/api/tokens"):
        long = {"run": "translator", "text": "dog " * 4000}
        assert "tokens" in problem(client.post(path, json=long), 413)
    assert "40" in problem(
        client.post("/api/trace", json={"run": "reader", "text": "dog " * 45}), 413
    )
    many = {"run": "reader", "text": "x", "off": ["a"] * 5000}
    problem(client.post("/api/trace", json=many), 413)
    assert client.get("/health").json() == {"status": "ok"}


def test_maps_larger_than_what_is_kept_are_refused(folder: Path) -> None:
    limits = Limits(trace_bytes=1000)
    small = TestClient(server.build_app(folder, limits=limits), HERE)
    requested = {"run": "translator", "text": SENTENCE}
    assert "MiB" in problem(small.post("/api/trace", json=requested), 413)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 5000, b'{"run": 3}', b'{"run": null}']
)
def test_malformed_bodies_are_refused(client: TestClient, body: bytes) -> None:
    kind = {"Content-Type": "application/json"}
    problem(client.post("/api/trace", content=body, headers=kind), 400)
    problem(client.post("/api/trace", content=body, headers={"Content-Type": "text/plain"}), 415)


def test_a_map_made_smaller_keeps_the_greatest(client: TestClient) -> None:
    trace = ask(client, "/api/trace", run="reader", text=SENTENCE)["trace"]
    name = "encoder.self.weights"
    full, small = tensor(client, trace, name), tensor(client, trace, name, side=4)
    assert small.shape == (*full.shape[:2], 4, 4)
    assert torch.equal(small.amax((2, 3)), full.amax((2, 3)))
    assert torch.equal(tensor(client, trace, name, side=1000), full)


def test_wrong_values_are_refused(client: TestClient) -> None:
    requested = {"run": "translator", "text": SENTENCE}
    for wrong in ({"text": 3}, {"target": ["a"]}, {"off": "x"}, {"off": [1]}):
        problem(client.post("/api/trace", json={**requested, **wrong}), 400)
    half = json.dumps({**requested, "text": "\ud800"})  # half of a surrogate pair
    kind = {"Content-Type": "application/json"}
    assert "Unicode" in problem(client.post("/api/trace", content=half, headers=kind), 400)
    endless = '{"run": "translator", "text": "a", "beam": 1e999}'  # infinity, to Python
    assert "beam" in problem(client.post("/api/decode", content=endless, headers=kind), 400)
    trace = ask(client, "/api/trace", **requested)["trace"]
    place = f"/api/trace/{trace}/tensor/encoder.self.weights"
    for which in ("dtype=f64", "layer=2", "layer=-1", "layer=x", "side=0", "layer=0&head=99"):
        problem(client.get(f"{place}?{which}"), 400)
    problem(client.get(f"/api/trace/{trace}/tensor/none"), 404)
    problem(client.get("/api/trace/none/tensor/none"), 404)
    problem(client.get("/api/trace"), 405)


def test_no_path_leads_out(client: TestClient, folder: Path) -> None:
    secret = folder.parent / "secret"
    shutil.copytree(folder / "reader", secret, dirs_exist_ok=True)
    for name in ("../secret", str(secret), "reader/../../secret", "..", "", ".", "reader/"):
        problem(client.post("/api/tokens", json={"run": name, "text": "a"}), 404)
        problem(client.get("/api/settings", params={"run": name}), 404)
        problem(client.get("/api/metrics", params={"run": name}), 404)
    app = server.build_app(folder)
    for path in ("/page/../app.py", "/page//../app.py", "/page//etc/passwd", "/page/\0", "/.."):
        assert raw(app, path)[0] == 404, path
    for path in ("/page/%2e%2e/app.py", "/index.html", "/none", "/attention/x", "/pages"):
        problem(client.get(path), 404)
    assert raw(app, "/page/main.js")[0] == 200


def test_a_run_that_vanishes_is_told_and_the_server_lives(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(folder / "reader", tmp_path / name)
    local = TestClient(server.build_app(tmp_path), HERE)
    requested = {"run": "one", "text": SENTENCE}
    ask(local, "/api/trace", **requested)
    shutil.rmtree(tmp_path / "one")
    assert "one" in problem(local.post("/api/trace", json=requested), 404)
    problem(local.get("/api/metrics?run=one"), 404)
    assert [run["name"] for run in local.get("/api/runs").json()["runs"]] == ["two"]
    (tmp_path / "two" / "model.safetensors").write_bytes(b"not weights")
    assert "damaged" in problem(local.post("/api/trace", json={**requested, "run": "two"}), 422)
    shutil.rmtree(tmp_path)
    assert local.get("/api/runs").json()["runs"] == []


def test_requests_beyond_the_bound_wait_outside(folder: Path) -> None:
    full = TestClient(server.build_app(folder, limits=Limits(requests=0)), HERE)
    answer = full.get("/api/runs")
    problem(answer, 503)
    assert answer.headers["retry-after"] == "1"


def test_what_nobody_expected_is_an_error_without_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.runs, "summary", lambda *inputs: 1 / 0)
    app = server.build_app(folder)
    careless = TestClient(app, HERE, raise_server_exceptions=False)
    assert "Zero" not in problem(careless.get("/api/runs"), 500)
    assert careless.get("/health").status_code == 200


def test_the_longest_unused_trace_makes_room() -> None:
    traces = Traces(most_bytes=100)
    for name in "abc":
        traces.keep(name, Trace({}, {"x": torch.zeros(10)}))
        traces.find("a")
    assert [traces.find(name) is not None for name in "abc"] == [True, False, True]
    assert traces.bytes <= 100


def test_traces_without_numbers_are_few_too() -> None:
    traces = Traces(most_bytes=10_000, most=3)
    for number in range(9):
        traces.keep(str(number), Trace({"at": number}))
        traces.keep(str(number), Trace({"at": number}))
    assert [number for number in range(9) if traces.find(str(number))] == [6, 7, 8]
    assert traces.bytes == 3 * len('{"at": 0}')
    traces.keep("long", Trace({"text": "x" * 9_980}))  # a manifest has its size too
    assert traces.find("8") is None
    assert traces.bytes <= 10_000


def test_metrics_are_read_from_where_the_last_answer_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path)["records"] == []
    path.write_text('{"step": 1, "split": "train", "loss": 2.5}\n{"step": 2, "lo')
    first = read_metrics(path)
    assert first["records"] == [{"step": 1, "split": "train", "loss": 2.5}]
    with path.open("a") as file:
        file.write('ss": NaN}\nbroken\n')
    second = read_metrics(path, first["next"], first["version"])
    assert second["records"] == [{"step": 2, "split": ""}]  # JSON has no NaN
    assert not second["reset"]
    new_file = tmp_path / "new"
    new_file.write_text('{"step": 1, "split": "train", "loss": 2.0}\n')
    new_file.replace(path)
    third = read_metrics(path, second["next"], second["version"])
    assert third["reset"]
    assert third["records"][0]["loss"] == 2.0


def test_the_formula_is_the_rate_that_was_measured(client: TestClient, folder: Path) -> None:
    actual = client.get("/api/metrics", params={"run": "translator"}).json()
    curve = dict(map(tuple, actual["schedule"]["points"]))
    measured = {r["step"]: r["learning_rate"] for r in actual["records"] if "learning_rate" in r}
    assert measured
    assert {step: curve[step] for step in measured} == measured
    run = read_run(folder / "translator")
    assert curve[7] == learning_rate(run.train, run.model.dim, 7)
    assert len(schedule(run)["points"]) == run.train.steps


@pytest.mark.parametrize("kind", ["transformer", "cosine", "linear", "constant"])
def test_the_formula_of_a_schedule_is_what_it_computes(kind: Any) -> None:
    """The formula holds at every step, including the first after the warm-up."""
    train = Train(schedule=kind, learning_rate=0.3, warmup_steps=4, steps=12, min_lr_ratio=0.1)
    written, _, done = formula(train).partition(", done = ")
    signs = {"½ (": "0.5 * (", "warmup^½": "warmup**0.5", "step^−½": "step**-0.5", "·": "*"}
    signs |= {"⁄": "/", "−": "-", "π": "pi", "warmup^-3/2": "warmup**-1.5"}
    for sign, code in signs.items():
        written, done = written.replace(sign, code), done.replace(sign, code)
    known = {"peak": 0.3, "warmup": 4, "steps": 12, "cos": math.cos, "pi": math.pi}
    known |= {"min": min, "max": max}
    for step in range(1, 13):
        share = eval(done or "0", {**known, "step": step})
        value = eval(written, {**known, "step": step, "done": share})
        assert value == pytest.approx(learning_rate(train, 16, step)), step


def test_tokens_end_as_the_tokenizer_splits(client: TestClient, folder: Path) -> None:
    actual = ask(client, "/api/tokens", run="translator", text="unbelievable trees")
    tokenizer = load_torch_run(folder / "translator").tokenizer
    assert actual["ids"] == tokenizer.encode("unbelievable trees")
    assert actual["steps"][-1]["pieces"] == actual["pieces"] == tokenizer.subwords(actual["ids"])
    assert [len(step["pieces"]) for step in actual["steps"]] == sorted(
        (len(step["pieces"]) for step in actual["steps"]), reverse=True
    )
    assert ask(client, "/api/tokens", run="translator", text="")["steps"] == []


def test_the_command_refuses_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="holds no run"):
        command.view(tmp_path, port=0)
    with pytest.raises(UserError, match="not found"):
        command.view(tmp_path / "none", port=0)
    with server.listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match="--port"):
            command.view(folder, port=taken.getsockname()[1])
    with pytest.raises(UserError, match="--port"):
        command.view(folder, port=70000)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape("pip install 'manyheads[web]'")):
        command.view(folder)


def page_files() -> list[Path]:
    return [path for path in server.PAGE.rglob("*") if path.is_file()]


def test_every_page_is_in_the_menu_and_has_its_module() -> None:
    table = (server.PAGE / "pages.js").read_text()
    menu = re.findall(r'^  \{ name: "(\w+)", group: "', table, flags=re.M)
    assert sorted(menu) == sorted(path.stem for path in (server.PAGE / "pages").glob("*.js"))


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    for path in page_files():
        text = path.read_text(encoding="utf-8")
        addresses = {a for a in re.findall(r"https?://[\w.]+", text) if "www.w3.org" not in a}
        assert not addresses, path


def test_the_wheel_takes_every_file_of_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["manyheads"]
    package = ROOT / "src" / "manyheads"
    for path in page_files():
        name = path.relative_to(package).as_posix()
        folders = name.count("/")
        fits = (p for p in patterns if p.count("/") == folders and fnmatch.fnmatch(name, p))
        assert any(fits), f"{name} is in no wheel: add it to package-data"
