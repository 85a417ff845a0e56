"""The page installed from a wheel: no Node needed, no file missing."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.small_models import make_models

from manyheads.web.app import PAGE

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools", reason="what builds the wheel is not installed")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, unpacked as an installer does."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "copy"  # building leaves files beside the sources
    left = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", copy / "src", ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    how = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(place)]
    command = [sys.executable, "-m", "pip", "wheel", str(copy), *how]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PATH": ""})
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "installed")
    return place / "installed"


@pytest.fixture(scope="module")
def address(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`manyheads view` of that package, with no other program to be found."""
    runs = make_models(tmp_path_factory.mktemp("models"))
    command = [sys.executable, "-m", "manyheads", "view", str(runs), "--port", "0"]
    single = {**os.environ, "PYTHONPATH": str(package), "PATH": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=single, cwd=runs
    ) as actual:
        assert actual.stdout is not None
        yield actual.stdout.readline().strip().rstrip("/")
        actual.terminate()


def fetched(place: str) -> bytes:
    with urllib.request.urlopen(place, timeout=20) as answer:
        content: bytes = answer.read()
    return content


def test_the_wheel_serves_the_page_whole(address: str, package: Path) -> None:
    for path in PAGE.rglob("*"):
        if path.is_file():
            name = path.relative_to(PAGE).as_posix()
            assert fetched(f"{address}/page/{name}") == path.read_bytes(), name
            assert (package / "manyheads" / "web" / "page" / name).is_file()
    assert fetched(f"{address}/attention") == (PAGE / "index.html").read_bytes()


def test_the_wheel_answers_the_page(address: str) -> None:
    runs = json.loads(fetched(f"{address}/api/runs"))["runs"]
    assert {run["name"] for run in runs} >= {"translator", "writer", "reader"}
    assert not [run for run in runs if "error" in run]
    body = json.dumps({"run": "translator", "text": "The dog."}).encode()
    requested = urllib.request.Request(
        f"{address}/api/flow", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(requested, timeout=20) as answer:
        actual = json.loads(answer.read())
    assert [column["name"] for column in actual["columns"]] == ["encoder", "decoder"]
