"""The Music page's numbers are those of the model, its notes those of the piece."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.data.small_music import scale_up
from tests.web.small_models import make_models
from tests.web.test_server import HERE, ask, problem, tensor

from manyheads.data.events import (
    VOICES,
    ChoraleGrid,
    PerformanceEvents,
    parse_performance,
    parse_voices,
    write_midi,
)
from manyheads.decode.beam import SpecialTokens
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture
from manyheads.web import music
from manyheads.web.app import build_app
from manyheads.web.guard import Limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(build_app(folder), HERE)


def test_maps_and_likelihoods_are_those_of_the_model(client: TestClient, folder: Path) -> None:
    opened = load_torch_run(folder / "chorales")
    model: Any = opened.model
    words = opened.run.data.read("valid").pieces_of_words[1]  # type: ignore[union-attr]
    actual = ask(client, "/api/music", run="chorales", piece=1)
    assert [event["word"] for event in actual["events"]] == words
    end = SpecialTokens(opened.tokenizer, opened.run.decode).end
    ids = torch.tensor([[end, *(opened.tokenizer.token_id(word) for word in words)]])
    with torch.no_grad(), capture(model) as maps:
        chances = model(ids)[0].log_softmax(-1)
    weights = tensor(client, actual["trace"], "decoder.self.weights")
    assert torch.allclose(weights, torch.cat(maps["self"]), atol=1e-6)
    expected = [float(chances[at, token]) for at, token in enumerate(ids[0, 1:])]
    assert actual["output"]["log_probabilities"] == pytest.approx(expected, abs=1e-5)
    far = tensor(client, actual["trace"], "decoder.self.distance")
    diagonal = [float(weights[1, 0, at, at - 5]) for at in range(5, ids.shape[1])]
    assert float(far[1, 0, 5]) == pytest.approx(sum(diagonal) / len(diagonal), abs=1e-6)


def test_a_chorale_has_its_voices_in_time(client: TestClient, folder: Path) -> None:
    actual = ask(client, "/api/music", run="chorales")
    table = json.loads((folder / "data" / "chorales" / "chorales.json").read_text())
    piece = table["valid"][0]
    step = ChoraleGrid.step
    for at, event in enumerate(actual["events"]):
        pitch = piece[at // 4][at % 4]
        assert event["time"] == at // 4 * step
        assert event["pitch"] == (None if pitch < 0 else pitch)
    for note in actual["notes"]:
        frames = range(note["start"] // step, note["end"] // step)
        assert {piece[frame][note["part"]] for frame in frames} == {note["pitch"]}
    content = base64.b64decode(actual["midi"])
    voices = parse_voices(content, "download")
    read = {(n.start * step, n.end * step, n.pitch) for voice in voices for n in voice}
    assert read == {(n["start"], n["end"], n["pitch"]) for n in actual["notes"]}


def test_an_upload_is_read_as_a_file_is(client: TestClient, tmp_path: Path) -> None:
    write_midi([scale_up(2)], tmp_path / "own.mid")
    content = (tmp_path / "own.mid").read_bytes()
    upload = base64.b64encode(content).decode()
    actual = ask(client, "/api/music", run="piano", upload=upload)
    encoding = PerformanceEvents()
    assert [event["word"] for event in actual["events"]] == encoding.words(content, "own")
    step = encoding.step
    notes = {(note.start * step, note.end * step, note.pitch) for note in scale_up(2)}
    assert {(n["start"], n["end"], n["pitch"]) for n in actual["notes"]} == notes
    struck = {(e["time"], e["pitch"]) for e in actual["events"] if e["word"].startswith("on")}
    assert struck == {(start, pitch) for start, _, pitch in notes}
    again = parse_performance(base64.b64decode(actual["midi"]), "download")
    assert again == scale_up(2)


def test_a_stretch_is_whole_sixteenths_and_fits(client: TestClient) -> None:
    actual = ask(client, "/api/music", run="chorales", begin=9, events=11)
    assert (actual["begin"], len(actual["events"]), actual["words"]) == (8, 8, 48)
    assert music.window(list("abcdef"), 99, 4, 1) == (["f"], 5)
    assert music.window(list("abcdefgh"), 3, 2, 4) == (list("abcd"), 0)
    actual = ask(client, "/api/music", run="chorales", events=1000)
    assert len(actual["events"]) == 48


def test_runs_of_music_are_named_and_begin_with_music(client: TestClient) -> None:
    """The text that other pages begin with is one that the model knows every word of."""
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert [name for name, run in runs.items() if "music" in run["can"]] == ["chorales", "piano"]
    for name in ("chorales", "piano"):
        actual = ask(client, "/api/tokens", run=name, text=runs[name]["example"])
        assert actual["pieces"] == runs[name]["example"].split()


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"run": "chorales", "piece": 99}, 400, "piece"),
        ({"run": "chorales", "piece": -1}, 400, "piece"),
        ({"run": "writer"}, 400, "music"),
        ({"run": "piano", "upload": "?"}, 400, "base64"),
        ({"run": "piano", "upload": base64.b64encode(b"MThd").decode()}, 422, "MIDI"),
        ({"run": "piano", "upload": ""}, 422, "MIDI"),
        ({"run": "piano", "events": 5000}, 400, "events"),
    ],
)
def test_what_is_no_music_is_refused(
    client: TestClient, body: dict[str, object], status: int, word: str
) -> None:
    assert word in problem(client.post("/api/music", json=body), status)


def test_a_file_of_one_track_is_no_chorale(client: TestClient, tmp_path: Path) -> None:
    write_midi([scale_up(1)], tmp_path / "own.mid")
    upload = base64.b64encode((tmp_path / "own.mid").read_bytes()).decode()
    answer = client.post("/api/music", json={"run": "chorales", "upload": upload})
    assert "four" in problem(answer, 422)


def test_the_model_composes_where_its_data_is_missing(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    shutil.rmtree(models / "data")
    client = TestClient(build_app(models), HERE)
    for name, unit in (("chorales", len(VOICES)), ("piano", 1)):
        pieces = [ask(client, "/api/music", run=name, piece=piece) for piece in (0, 1)]
        for piece in pieces:
            assert (piece["source"], piece["count"]) == ("model", music.COMPOSED)
            assert piece["notes"]
            assert len(piece["events"]) % unit == 0
            assert len(piece["events"]) == len(piece["output"]["log_probabilities"]) > 50
        assert pieces[0]["events"] != pieces[1]["events"]
        again = TestClient(build_app(models), HERE)
        assert ask(again, "/api/music", run=name, piece=1) == pieces[1]


def test_maps_that_do_not_fit_are_refused(folder: Path) -> None:
    small = TestClient(build_app(folder, limits=Limits(trace_bytes=2000)), HERE)
    assert "maps" in problem(small.post("/api/music", json={"run": "chorales"}), 413)
    small = TestClient(build_app(folder, limits=Limits(tokens=20)), HERE)
    assert "tokens" in problem(small.post("/api/music", json={"run": "chorales"}), 413)
