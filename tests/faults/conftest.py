"""A run that was never broken, one that is trained on, and one that is hurt."""

import shutil
from pathlib import Path

import pytest
from tests.faults.small_run import RECIPE, SHORT, train, used
from tests.train.small_runs import write_recipe


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("corpus"), 80, RECIPE)


@pytest.fixture(scope="session")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts (and everything imported, for those that are forked)."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(recipe, out)[0] == 0
    return out


@pytest.fixture
def standing(recipe: Path, tmp_path: Path) -> Path:
    """A run trained to step 10, to be hurt; the recipe trains it on to 60."""
    out = tmp_path / "run"
    assert train(recipe, out, "train.steps=10", "train.average_checkpoints=1")[0] == 0
    return out


@pytest.fixture(scope="session")
def good(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("good") / "run"
    assert train(recipe, out, *SHORT)[0] == 0
    return out


@pytest.fixture
def hurt(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "hurt")


@pytest.fixture(scope="session")
def averaged(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every file that one can have: snapshots, metrics and scores too."""
    out = tmp_path_factory.mktemp("averaged") / "run"
    settings = ("train.steps=6", "train.average_checkpoints=2", "train.save_every=2")
    settings = (*settings, "train.validate_every=6")
    assert train(recipe, out, *settings)[0] == 0
    assert used(out)[0] == 0
    return out
