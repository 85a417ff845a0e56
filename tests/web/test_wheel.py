"""The page installed from a wheel: no Node needed, no file missing."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.small_models import make_models

from manyheads.web.app import PAGE

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools", reason="what builds the wheel is not installed")


FILES = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt")
SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    place = tmp_path_factory.mktemp("sdist")
    copy = place / "copy"  # building leaves files next to the sources
    left = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=left)
    for name in ("pyproject.toml", "MANIFEST.in", "CONTRIBUTING.md", *FILES):
        shutil.copy(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", SDIST], check=True, capture_output=True, cwd=copy)
    [archive] = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(place / "sources", filter="data")
    [folder] = (place / "sources").iterdir()
    return folder


@pytest.fixture(scope="module")
def package(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel built from it, unpacked as an installer does."""
    place = tmp_path_factory.mktemp("wheel")
    how = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(place)]
    command = [sys.executable, "-m", "pip", "wheel", str(sdist), *how]
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


def files_of(package: Path) -> set[str]:
    files = (path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file())
    return {name for name in files if "__pycache__" not in name}


def test_the_archives_hold_the_package_and_nothing_else(sdist: Path, package: Path) -> None:
    """Recipes, tables and page files too: an editable install would not miss them."""
    expected = files_of(ROOT / "src" / "manyheads")
    assert {"recipes/phrasebook.toml", "phrasebook/grammar.py", "web/page/index.html"} <= expected
    assert files_of(package / "manyheads") == expected
    assert files_of(sdist / "src" / "manyheads") == expected
    assert not (sdist / "tests").exists()
    assert all((sdist / name).is_file() for name in FILES)
    assert {path.name.partition("-")[0] for path in package.iterdir()} == {"manyheads"}


@pytest.mark.slow  # most of a minute; the other tests install and start the same wheel
def test_the_wheel_trains(package: Path, tmp_path: Path) -> None:
    """From a folder without the sources."""
    tiny = "data.train_pairs=200 data.valid_pairs=5 tokens.vocab_size=400 model.dim=16 "
    tiny += "model.layers=1 model.heads=2 train.steps=20 decode.bleu_sentences=0"
    for command in ("--version", f"train phrasebook {tiny} --out run", "info run"):
        done = subprocess.run(
            [sys.executable, "-m", "manyheads", *command.split()],
            capture_output=True,
            encoding="utf-8",
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package)},
            check=False,
        )
        assert done.returncode == 0, done.stderr


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
