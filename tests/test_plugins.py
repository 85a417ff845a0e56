"""A plug-in's parts are settings in every command, and nothing in a run folder is executed."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.checks import unchecked
from tests.test_cli import TINY, call, mistake, result

from manyheads import config, plugins
from manyheads.evaluate import scores
from manyheads.recipes import read_recipe
from manyheads.run import read_run
from manyheads.serve import app as serving
from manyheads.tasks.table import TASKS
from manyheads.web import app as web

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_parts.py"
GAUSSIAN = ("model.position=gaussian", "model.position.width=4")
PLUGIN = ("--plugin", EXAMPLE)

EVERY_PART = '''
"""A part of every kind."""

from dataclasses import dataclass, replace
from typing import ClassVar

from manyheads.data.translation import PhrasebookData
from manyheads.nn.attention import Dense
from manyheads.nn.layers import Plain
from manyheads.nn.scores import ScaledDot
from manyheads.plugins import Metric, Plugin
from manyheads.tasks import translation

@dataclass(frozen=True, kw_only=True)
class MyScore(ScaledDot):
    kind: ClassVar[str] = "my-score"

@dataclass(frozen=True)
class MyAttention(Dense):
    kind: ClassVar[str] = "my-attention"

@dataclass(frozen=True, kw_only=True)
class MyFeedForward(Plain):
    kind: ClassVar[str] = "my-feedforward"

@dataclass(frozen=True, kw_only=True)
class Upper(PhrasebookData):
    """The phrasebook in capitals."""

    kind: ClassVar[str] = "upper"

    def read(self, split):
        corpus = super().read(split)
        return replace(corpus, sources=[text.upper() for text in corpus.sources])

PLUGIN = Plugin(
    scores=[MyScore],
    attentions=[MyAttention],
    feedforwards=[MyFeedForward],
    data=[Upper],
    tasks=[replace(translation.SPEC, task="capitals", is_default=False)],
)
'''


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Each test starts without plug-ins. The types of the package do not name their classes."""
    tables: list[Any] = [config.EXTENSIONS, scores.METRICS, plugins.LOADED, TASKS]
    before = [table.copy() for table in tables]
    plugins._warn.cache_clear()
    with unchecked():
        yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        (table.update if isinstance(table, dict) else table.extend)(content)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins") / "run"
    with unchecked():
        result("train", "phrasebook", *TINY, *GAUSSIAN, *PLUGIN, "--out", folder)
    # Registered by a fixture of the module: each test passes the plug-in again.
    config.EXTENSIONS.clear(), scores.METRICS.clear(), plugins.LOADED.clear()
    return folder


def test_settings_list_the_parts() -> None:
    listed = result("settings", "phrasebook", "model.position", *PLUGIN)
    assert "| gaussian" in listed
    assert "model.position.width=8.0" in listed
    error = mistake("settings", "phrasebook", "model.position=gausian", *PLUGIN)
    assert "gaussian" in error


def test_run_folder_names_the_plugin(run: Path) -> None:
    table = tomllib.loads((run / "run.toml").read_text("utf-8"))
    assert table["model"]["position"] == {"kind": "gaussian", "width": 4.0}
    assert table["plugins"]["my_parts"]["source"] == str(EXAMPLE)
    assert "parameters" in result("info", run, *PLUGIN)


def test_evaluate_has_the_metric(run: Path) -> None:
    values = json.loads(result("evaluate", run, "--json", *PLUGIN))
    assert values["length_ratio"] > 0
    assert values["signature"]["length_ratio"] == "characters per character"
    only = json.loads(result("evaluate", run, "--metric", "length_ratio", "--json", *PLUGIN))
    assert only["length_ratio"] == values["length_ratio"]
    assert "bleu" not in only


def test_view_and_serve(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result("view", run, "--export", tmp_path / "site", *PLUGIN)
    assert (tmp_path / "site" / "index.html").is_file()
    page = TestClient(web.build_app(run), "http://localhost")
    assert "gaussian" in page.get("/api/settings", params={"run": "run"}).text
    positions = page.get("/api/positions", params={"scheme": "run", "run": "run", "length": 8})
    assert positions.json()["tensors"] == ["scores"]
    works = []
    monkeypatch.setattr(serving, "serve", lambda loaded, work, *rest: works.append(work))
    result("serve", run, *PLUGIN)
    with TestClient(serving.build_app("run", works[0]), "http://localhost") as client:
        request = {"q": "The dog sees.", "source": "en", "target": "de"}
        answer = client.post("/translate", json=request)
        assert answer.status_code == 200, answer.text


def test_translate_does_not_use_an_engine_without_the_part(run: Path) -> None:
    words = ("translate", run, "--device", "cpu", *PLUGIN)
    expected = result(*words, "--engine", "torch", stdin=b"The dog sees.\n")
    assert result(*words, stdin=b"The dog sees.\n") == expected
    error = mistake("export", run, "--to", "ctranslate2", "--out", run / "ct2", *PLUGIN)
    assert "GaussianPosition" in error


def test_a_run_without_its_plugin_is_one_line_that_names_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file at the recorded path, or in the run folder, is not executed."""
    text = (run / "run.toml").read_text("utf-8").replace(str(EXAMPLE), "my_parts.py")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    lines = [line for line in text.splitlines() if not line.startswith("# check sum")]
    (copy / "run.toml").write_text("\n".join(lines), "utf-8")
    executed = f"open({str(tmp_path / 'executed')!r}, 'w').close()\n"
    for folder in (tmp_path, copy):
        (folder / "my_parts.py").write_text(executed + EXAMPLE.read_text("utf-8"), "utf-8")
    monkeypatch.chdir(tmp_path)
    for words in (
        ("info", copy),
        ("evaluate", copy),
        ("translate", copy),
        ("serve", copy),
        ("train", copy / "run.toml", "--out", copy),
        ("export", copy, "--to", "onnx", "--out", tmp_path / "out"),
    ):
        assert "needs the plug-in my_parts: add --plugin my_parts.py" in mistake(*words)
    listed = TestClient(web.build_app(copy), "http://localhost").get("/api/runs").text
    assert "needs the plug-in my_parts" in listed
    assert not (tmp_path / "executed").exists()
    code, _, err = call("info", copy, "--plugin", tmp_path / "my_parts.py")
    assert code == 0, err
    assert (tmp_path / "executed").exists()
    assert "is not the one" in err  # another checksum


def test_every_kind_of_part(tmp_path: Path) -> None:
    file, folder = tmp_path / "every_part.py", tmp_path / "run"
    file.write_text(EVERY_PART, "utf-8")
    settings = (
        *("task=capitals", "data=upper", "model.score=my-score", "model.attention=my-attention"),
        "model.feedforward=my-feedforward",
    )
    result("train", "phrasebook", *TINY, *settings, "--plugin", file, "--out", folder)
    run = read_run(folder)
    assert run.data is not None
    assert run.data.read("test").sources[0].isupper()
    kinds = (run.data.kind, run.model.score.kind, run.model.attention.kind)  # type: ignore[union-attr]
    assert kinds == ("upper", "my-score", "my-attention")
    assert "bleu" in json.loads(result("evaluate", folder, "--json", "--plugin", file))
    assert read_recipe(str(folder / "run.toml"), ["data=phrasebook"]).data.kind == "phrasebook"  # type: ignore[union-attr]


def test_an_installed_package_needs_no_option(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gaussian_parts.py").write_bytes(EXAMPLE.read_bytes())
    about = tmp_path / "gaussian_parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gaussian-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[manyheads.plugins]\nmy_parts = gaussian_parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.use_installed.cache_clear()
    try:
        assert "parameters" in result("info", run)
        assert plugins.record(read_run(run))["plugins"]["my_parts"]["source"] == (
            "package gaussian-parts 1.0"
        )
    finally:
        plugins.use_installed.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "no PLUGIN"),
        (EXAMPLE.read_text("utf-8").replace('"gaussian"', '"rotary"'), "'rotary' already"),
    ],
)
def test_a_plugin_that_does_not_load_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text, "utf-8")
    assert words in mistake("info", "transformer-base", "--plugin", file)
    assert "no plug-in" in mistake("info", "transformer-base", "--plugin", tmp_path / "missing.py")
