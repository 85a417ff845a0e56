"""The Positions page's numbers are those of the schemes themselves, of runs and of drawn ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import einsum
from starlette.testclient import TestClient
from tests.web.small_models import make_models
from tests.web.test_server import HERE, problem, tensor

from manyheads.loading import load_torch_run
from manyheads.nn.positions import (
    BucketPosition,
    Buckets,
    Learned,
    PositionSizes,
    Relative,
    RelativePosition,
    Rotary,
    Sinusoidal,
    alibi_slopes,
)
from manyheads.nn.scores import ScaledDot
from manyheads.web import formulas, positions
from manyheads.web.app import build_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(build_app(folder), HERE)


def requested(client: TestClient, **query: Any) -> dict[str, Any]:
    answer = client.get("/api/positions", params=query)
    assert answer.status_code == 200, answer.text
    actual: dict[str, Any] = answer.json()
    return actual


def test_sinusoids_are_the_formula_of_the_paper(client: TestClient) -> None:
    actual = requested(client, scheme="sinusoidal", length=20, dim=12, base=100)
    added = tensor(client, actual["trace"], "added")
    for pos, channel in ((0, 1), (7, 4), (19, 11)):
        angle = pos / 100 ** (channel // 2 * 2 / 12)
        expected = math.cos(angle) if channel % 2 else math.sin(angle)
        assert float(added[pos, channel]) == pytest.approx(expected, abs=1e-5)
    cosines = tensor(client, actual["trace"], "cosines")
    unit = added / added.norm(dim=-1, keepdim=True)
    assert torch.allclose(cosines, unit @ unit.T, atol=1e-5)
    curve = dict(actual["curves"][0]["points"])
    assert curve[3] == pytest.approx(float(cosines[5, 8]), abs=1e-4)  # depends only on the distance


def test_turned_vectors_meet_by_their_distance_alone(client: TestClient) -> None:
    actual = requested(client, scheme="rotary", length=16, dim=8, heads=2)
    cosines = tensor(client, actual["trace"], "cosines")
    for far in range(16):
        along = cosines.diagonal(far)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-4)
    expected = sum(math.cos(5 * 10_000 ** (-2 * i / 4)) for i in range(2)) / 2
    assert dict(actual["curves"][0]["points"])[5] == pytest.approx(expected, abs=1e-4)


def test_penalties_and_buckets_are_those_of_the_schemes(client: TestClient) -> None:
    actual = requested(client, scheme="alibi", length=9, heads=4)
    scores = tensor(client, actual["trace"], "scores")
    assert scores[:, 8, 2].tolist() == pytest.approx([-6 * slope for slope in alibi_slopes(4)])
    assert dict(actual["curves"][1]["points"])[-6] == pytest.approx(float(scores[1, 8, 2]))
    actual = requested(client, scheme="t5", length=200, causal="1")
    curve = dict(actual["curves"][0]["points"])
    bucketed = BucketPosition(32, 128, 1, both_ways=False)
    far = torch.arange(-199, 1)
    numbers = bucketed.bucket(far).tolist()
    by_bucket: dict[int, set[float]] = {}
    for distance, number in zip(far.tolist(), numbers, strict=True):
        by_bucket.setdefault(number, set()).add(curve[distance])
    assert all(len(values) == 1 for values in by_bucket.values())
    assert max(curve) == 0  # future keys are masked


@pytest.mark.parametrize("causal", ["", "1"])
def test_the_last_step_of_the_skew_is_the_gathered_one(client: TestClient, causal: str) -> None:
    actual = requested(
        client, scheme="relative", length=12, trained=12, dim=8, heads=2, causal=causal
    )
    steps = [tensor(client, actual["trace"], f"skew.{step}") for step in "1234"]
    length = positions.SKEWED
    met, padded, read, skewed = steps
    assert torch.equal(padded[..., 1:], met)
    assert torch.equal(padded[..., 0], torch.zeros_like(padded[..., 0]))
    assert torch.equal(read.flatten(-2), padded.flatten(-2)[:, length:])
    assert torch.equal(read[..., :length], skewed)
    for query in range(length):
        for key in range(query + 1 if causal else length):
            assert torch.equal(skewed[:, query, key], met[:, query, key - query + length - 1])


@pytest.mark.parametrize("scheme", ["t5", "relative"])
def test_a_causal_scheme_hides_later_keys(client: TestClient, scheme: str) -> None:
    actual = requested(client, scheme=scheme, length=6, dim=8, heads=2, causal=1)
    scores = tensor(client, actual["trace"], "scores")
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert bool((scores[:, later] == -math.inf).all())
    assert bool(scores[:, ~later].isfinite().all())
    assert all(math.isfinite(y) for curve in actual["curves"] for _, y in curve["points"])


def test_what_is_added_to_scores_is_a_query_with_its_vectors() -> None:
    """By Shaw's and the Music Transformer's own formulas, gathered pair by pair."""
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=6, causal=False)
    built = positions.random_scheme(Relative(), sizes)
    scores = positions.tables(built, 10)["scores"]
    assert isinstance(built.position, RelativePosition)
    table = built.position.distances.table
    query = positions.query(sizes)[0]
    for t, s in ((0, 0), (3, 1), (2, 9), (9, 0)):
        vector = table[:, min(max(s - t, -5), 5) + 5]  # a distance beyond the last is the last
        expected = einsum(query, vector, "h c, h c -> h") / 2
        assert torch.allclose(scores[:, t, s], expected, atol=1e-6)


def test_a_grid_has_rows_and_columns(client: TestClient) -> None:
    actual = requested(client, scheme="sinusoidal-2d", length=30, dim=16)
    assert actual["length"] == 25
    assert actual["grid"] == {"columns": 5, "before": 0}
    added = tensor(client, actual["trace"], "added")
    assert torch.equal(added[7, :8], added[5, :8])  # the same row
    assert torch.equal(added[7, 8:], added[2, 8:])  # the same column


def test_a_run_has_its_own_rows(client: TestClient, folder: Path) -> None:
    actual = requested(client, scheme="run", run="writer", length=500)
    table = load_torch_run(folder / "writer").model.decoder.position.table.weight  # type: ignore[union-attr]
    assert actual["scheme"] == "learned"
    assert actual["length"] == len(table)  # no row beyond the last
    assert torch.equal(tensor(client, actual["trace"], "added"), table.detach())
    layers = [requested(client, scheme="run", run="post", length=8, layer=n) for n in (0, 1)]
    assert [item["scheme"] for item in layers] == ["relative"] * 2
    item, other = (tensor(client, layer["trace"], "scores") for layer in layers)
    assert not torch.allclose(item, other)
    both = requested(client, scheme="run", run="translator", stack="decoder")
    assert both["stacks"] == ["encoder", "decoder"]
    assert both["causal"]
    full = requested(client, scheme="run", run="pictures", length=3)  # an image is shown whole
    assert (full["length"], full["grid"]) == (17, {"columns": 4, "before": 1})


def test_the_same_question_has_the_same_numbers(client: TestClient) -> None:
    item, other = (
        tensor(client, requested(client, scheme="shaw", length=8)["trace"], "scores") for _ in "ab"
    )
    assert torch.equal(item, other)


def test_every_scheme_is_told_in_words(client: TestClient) -> None:
    assert set(positions.KINDS.values()) == set(positions.BEYOND)
    for kind in positions.BEYOND.keys() - {"none"}:
        actual = requested(client, scheme=kind, length=16)
        assert actual["scheme"] == kind
        numbers = tensor(client, actual["trace"], actual["tensors"][0]).numpy()
        assert np.isfinite(numbers).all()


def test_the_formula_is_that_of_the_part(client: TestClient) -> None:
    """By its own layout, base and score, not by those that a scheme usually has."""
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=16, causal=True)
    reported = {
        "interleaved": formulas.position(Sinusoidal(base=77.0).build(sizes)),
        "halves": formulas.position(Sinusoidal(layout="halves").build(sizes)),
        "pairs": formulas.position(Rotary(layout="interleaved").build(sizes)),
        "turned": formulas.position(Rotary(layout="halves").build(sizes)),
        "offset": formulas.position(Learned(offset=2).build(sizes)),
    }
    for kind, words in (
        ("interleaved", "PE(pos, 2i) = sin(pos / 77^(2i/d)),  PE(pos, 2i+1) = cos"),
        ("halves", "PE(pos, i) = sin(pos / 10000^(2i/d)),  PE(pos, d/2+i) = cos"),
        ("pairs", "2i and 2i+1 turned"),
        ("turned", "i and c/2+i turned"),
        ("offset", "P[pos + 2]"),
    ):
        assert words in reported[kind]
    bucketed = Buckets().build(sizes)
    assert formulas.position(bucketed) == "e_ij = q_i · k_j + b_h(bucket(j − i))"
    scaled = formulas.pair_score(ScaledDot().build(2, 4), 4)
    assert formulas.position(bucketed, scaled) == "e_ij = q_i · k_j / √c + b_h(bucket(j − i))"
    of_model = requested(client, scheme="run", run="post")["formula"]
    assert of_model == "e_ij = q_i · k_j / √c + S_rel[i, j] / √c,  S_rel[i, j] = q_i · e_{j−i}"


def test_what_is_not_read_makes_no_other_trace(client: TestClient) -> None:
    names = {requested(client, scheme="alibi", length=8, extra=n)["trace"] for n in range(3)}
    assert len(names) == 1
    names = {requested(client, scheme="run", run="writer", length=8, base=n)["trace"] for n in "12"}
    assert len(names) == 1
    assert requested(client, scheme="alibi", length=9)["trace"] not in names


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"scheme": "spiral"}, "sinusoidal"),
        ({"length": 513}, "length"),
        ({"length": 0}, "length"),
        ({"dim": 7, "scheme": "alibi"}, "heads"),
        ({"dim": 7, "heads": 1, "scheme": "rotary"}, "even"),
        ({"dim": 7, "scheme": "sinusoidal-2d"}, "even"),
        ({"base": "nan"}, "base"),
        ({"base": "0"}, "base"),
        ({"scheme": "run", "run": "writer", "stack": "tower"}, "decoder"),
        ({"scheme": "run"}, "run"),
    ],
)
def test_what_cannot_be_built_is_refused(
    client: TestClient, query: dict[str, Any], word: str
) -> None:
    assert word in problem(client.get("/api/positions", params=query), 400)
