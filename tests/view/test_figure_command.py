"""Figures of a run show what the model computes; a user's error is one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import POSITIONS
from tests.view.test_figures import png
from tests.web.small_pages import make_runs

from manyheads.commands.figure import KINDS, figure
from manyheads.data.translation import EncodedPairs
from manyheads.errors import UserError
from manyheads.evaluate.alignment import word_maps
from manyheads.lab.figures import plots
from manyheads.lab.figures.plots import metric_curves
from manyheads.lab.figures.runs import position_matrix
from manyheads.lab.landscape import direction, held_out_loss, landscape, without_residuals
from manyheads.loading import load_torch_run
from manyheads.nn.layers import Norm, Residual
from manyheads.nn.positions import PositionSizes
from manyheads.phrasebook import sentences
from manyheads.tasks.translation import corpus_nll

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """The arguments of each drawing function; nothing is drawn."""
    calls: dict[str, tuple[Any, ...]] = {}
    for name in ("heat_map", "head_grid", "matrices", "curves", "surfaces"):

        def keep(*arguments: Any, name: str = name, **more: Any) -> None:
            calls[name] = (*arguments, more)

        monkeypatch.setattr(plots, name, keep)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_file(folder: Path, tmp_path: Path, kind: str) -> None:
    figure(folder / "translator", kind, out=tmp_path / "a.png", size=3, length=16)
    width, height, colours = png(tmp_path / "a.png")
    assert 300 < width < 3000
    assert 200 < height < 2000
    assert colours > 30


@pytest.mark.parametrize("run", ["translator", "deep/writer", "reader"])
def test_maps_are_those_of_the_model(
    folder: Path, run: str, drawn: dict[str, tuple[Any, ...]]
) -> None:
    figure(folder / run, "heads")
    weights = drawn["head_grid"][0]
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    figure(folder / run, "head", layer=1, head=2)
    one, rows, columns = drawn["heat_map"][:3]
    assert torch.equal(one, weights[0, 1])
    assert (len(rows), len(columns)) == one.shape
    figure(folder / run, "head")
    assert torch.equal(drawn["heat_map"][0], weights[-1].mean(0))


def test_gold_is_framed_where_it_is_known(folder: Path, drawn: dict[str, tuple[Any, ...]]) -> None:
    opened = load_torch_run(folder / "translator")
    pair = sentences("en-de", "test", 3)[1]
    figure(folder / "translator", "alignment", text=pair.source, layer=1, head=1)
    weights, rows, columns, title, _, more = drawn["heat_map"]
    model: Any = opened.model
    [(_, words)] = list(word_maps(model, opened.tokenizer, [pair]))
    assert torch.equal(weights, words[0, 0])
    assert rows == [pair.target[a:b] for a, b in pair.target_words]
    assert {(rows[j], columns[i]) for j, i in more["marks"]} == {
        (pair.target[slice(*pair.target_words[j])], pair.source[slice(*pair.source_words[i])])
        for i, j in pair.alignment
    }
    assert "gold" in title
    figure(folder / "translator", "alignment", text="A text of my own.")
    assert "gold" not in drawn["heat_map"][3]
    assert not drawn["heat_map"][-1]["marks"]


def test_curves_are_those_of_metrics_jsonl(
    folder: Path, tmp_path: Path, drawn: dict[str, tuple[Any, ...]]
) -> None:
    run = folder / "translator"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [(r["step"], r["learning_rate"]) for r in records if r["split"] == "train"]
    other = tmp_path / "other"
    shutil.copytree(run, other)
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "split": "train", "learning_rate": NaN}\nbroken {\n[]\n')
    figure(run, "curves", [other], metric="learning_rate", split="train")
    lines = drawn["curves"][0]
    assert lines == {str(run): expected, str(other): expected}
    assert ("valid", "loss") in metric_curves(run)


def test_relative_schemes_are_constant_on_each_diagonal() -> None:
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=7, causal=False)
    with torch.no_grad():
        for name in ("sinusoidal", "rotary", "shaw", "t5", "alibi"):
            matrix = position_matrix(POSITIONS[name].build(sizes), sizes, 7)
            for offset in range(-6, 7):
                assert float(matrix.diagonal(offset).std(correction=0)) < 1e-5, name
            assert matrix.std() > 1e-3


def test_directions_are_normalised_filter_by_filter(folder: Path) -> None:
    model = load_torch_run(folder / "translator").model
    actual = direction(model, torch.Generator().manual_seed(3))
    other = direction(model, torch.Generator().manual_seed(4))
    assert actual.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            assert not actual[name].any()
        else:
            assert torch.allclose(actual[name].norm(dim=1), weight.norm(dim=1), rtol=1e-4)
            assert not torch.allclose(actual[name], other[name])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_without_residual_only_the_branch_is_left(placement: Any) -> None:
    residual = Residual(4, Norm(placement=placement), 0.0)
    holder = torch.nn.ModuleList([residual])
    x = torch.randn(2, 3, 4)
    expected = residual(x, torch.sin)
    with without_residuals(holder):
        cut = residual(x, torch.sin)
    norm = residual.norm
    assert torch.equal(cut, norm(x).sin() if placement == "pre" else norm(x.sin()))
    assert torch.equal(residual(x, torch.sin), expected)
    with pytest.raises(UserError, match="residual"), without_residuals(torch.nn.Linear(1, 1)):
        pass


def test_the_middle_of_the_landscape_is_the_trained_model(folder: Path) -> None:
    opened = load_torch_run(folder / "translator")
    before = {name: weight.clone() for name, weight in opened.model.state_dict().items()}
    with torch.no_grad():
        loss = held_out_loss(opened)()
    default, cut = landscape(opened, size=3, reach=0.5, seed=1).values()
    assert float(default[1, 1]) == pytest.approx(loss, rel=1e-6)
    assert not torch.allclose(default, cut)
    assert len(set(default.flatten().tolist())) == 9
    for name, weight in opened.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    # The batch is the validation split, which is small.
    model: Any = opened.model
    data: Any = opened.run.data
    pairs = EncodedPairs(data.read("valid"), opened.tokenizer, 128, "skip")
    nll, tokens = corpus_nll(model, pairs, 4096)
    assert loss == pytest.approx(nll / tokens, rel=1e-5)
