"""In a real browser: the Watch page shows the numbers of the probes, live, and saves itself."""

import base64
import contextlib
import io
import json
import re
import shutil
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from tests.tasks.small_texts import trainer, write_texts
from tests.web.small_pages import SETTINGS, made_once

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from manyheads.commands.demo import watch  # noqa: E402
from manyheads.recipes import read_recipe  # noqa: E402
from manyheads.run import make_trainer  # noqa: E402

address, browser, page = shared.address, shared.browser, shared.page  # fixtures
expect, visit = shared.expect, shared.visit
PLACE = "/watch?run=translator"
LAST = "&step=30"  # does not play when it opens
KINDS = ("translator", "writer", "pictures")
# Draws one moment on a context that records ribbons (widths), cells (opacity) and texts.
DRAWN = """async ({ run, at, layer }) => {
  const { drawWatch, layout } = await import("/page/watchview.js");
  const { unpacked, withBytes } = await import("/page/probes.js");
  const answer = await (await fetch(`/api/probes?run=${run}&since=0`)).json();
  const probes = await Promise.all(answer.records.map(unpacked));
  const sentences = await Promise.all(answer.sentences.map(withBytes));
  const drawn = { ribbons: [], cells: [], texts: [] };
  const context = document.createElement("canvas").getContext("2d");
  const recorder = new Proxy(document.createElement("canvas").getContext("2d"), {
    get: (target, name) => {
      const { fillStyle, globalAlpha } = target;
      if (name === "bezierCurveTo")
        return () => drawn.ribbons.push([target.lineWidth, globalAlpha]);
      if (name === "fillRect") return () => drawn.cells.push([fillStyle, globalAlpha]);
      if (name === "fillText") return (text) => drawn.texts.push(text);
      const value = target[name];
      return typeof value === "function" ? value.bind(target) : value;
    },
    set: (target, name, value) => ((target[name] = value), true),
  });
  const story = { run, probes, sentences };
  const moment = { at, sentence: 0, layer, hidden: new Set(), token: -1, focus: -1 };
  const box = layout(context, story, 0, { width: 1200, height: 600 });
  const names = ["panel", "text", "quiet", "edge", "strong", "alarm"];
  drawWatch(recorder, story, moment, Object.fromEntries(names.map((name) => [name, "#fff"])), box);
  return drawn;
}"""
LEAST, LEAST_ARC, LEAST_CELL = 0.02, 0.06, 0.01  # of watchview.js and watchlanguage.js
COLOURS = ("#0072b2", "#d55e00")  # the first two heads


@made_once
def make_probed_runs(made: Path) -> Path:
    settings = [*SETTINGS, "data.valid_pairs=30", "train.probes=8", "train.probe_weights=true"]
    with contextlib.redirect_stderr(io.StringIO()):
        recipe = read_recipe("phrasebook", settings)
        make_trainer(recipe, made / "translator", torch.device("cpu")).run()
        texts = write_texts(made / "data", documents=60)
        for name, case in (("writer", "causal stream"), ("pictures", "pictures")):
            steps = ("train.steps=30", "train.probes=8", "train.probe_weights=true")
            trainer(case, texts, made / name, *steps).run()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_probed_runs(tmp_path_factory.mktemp("runs"))


def probes(folder: Path, run: str = "translator") -> list[dict[str, Any]]:
    text = (folder / run / "probes" / "probes.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def attention(sentence: dict[str, Any]) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(sentence["attention"]))
    return np.frombuffer(data, np.uint8).reshape(sentence["shape"]) / 255


def test_ribbons_are_as_wide_as_the_weights(page: Any, folder: Path) -> None:
    visit(page, PLACE)
    recorded = probes(folder)
    for at in (0, len(recorded) - 1):
        weights = attention(recorded[at]["sentences"][0])[1]
        expected = weights[weights >= LEAST]
        drawing = page.evaluate(DRAWN, {"run": "translator", "at": at, "layer": 1})
        drawn, opacity = np.array(drawing["ribbons"]).T
        assert len(drawn) == len(expected)
        assert np.allclose(drawn / drawn.max(), expected / expected.max(), atol=1e-6)
        order = np.argsort(expected)
        assert (np.diff(opacity[order]) >= -1e-6).all()  # weak links are fainter
        assert opacity[order][0] < 0.5 * (0.12 + 0.66)


def test_arcs_and_maps_of_a_language_model_are_the_weights(page: Any, folder: Path) -> None:
    visit(page, "/watch?run=writer")
    recorded = probes(folder, "writer")
    for at in (0, len(recorded) - 1):
        drawing = page.evaluate(DRAWN, {"run": "writer", "at": at, "layer": 0})
        weights = attention(recorded[at]["sentences"][0])[0]
        earlier = weights[:, np.tri(weights.shape[-1], k=-1, dtype=bool)]
        expected = earlier[earlier >= LEAST_ARC]
        drawn, _ = np.array(drawing["ribbons"]).T
        assert len(drawn) == len(expected)
        assert np.allclose(drawn / drawn.max(), expected / expected.max(), atol=1e-6)
        for colour, head in zip(COLOURS, weights, strict=True):
            opacity = [alpha for style, alpha in drawing["cells"] if style == colour]
            dot, *cells = opacity  # the legend's
            assert dot == 1
            assert np.allclose(cells, head[head >= LEAST_CELL], atol=1e-6)


def test_pictures_have_the_probabilities_and_weights_of_the_probe(page: Any, folder: Path) -> None:
    visit(page, "/watch?run=pictures")
    recorded = probes(folder, "pictures")
    for at in (0, len(recorded) - 1):
        drawing = page.evaluate(DRAWN, {"run": "pictures", "at": at, "layer": 0})
        example = recorded[at]["sentences"][0]
        shares = [f"{int(100 * share + 0.5)} %" for _, share in sorted(example["probabilities"])]
        assert [text for text in drawing["texts"] if text.endswith(" %")] == shares
        for colour, head in zip(COLOURS, attention(example)[0], strict=True):
            opacity = [alpha for style, alpha in drawing["cells"] if style == colour]
            assert np.allclose(opacity, 0.85 * head.ravel(), atol=1e-6)
    visit(page, f"/watch?run=pictures{LAST}")
    name, share = recorded[-1]["sentences"][0]["probabilities"][0]
    status = page.locator(".watch-figure .readout")
    expect(status).to_have_text(f"step 30: {name}, {int(100 * share + 0.5)} %")


def test_a_click_chooses_another_picture(page: Any) -> None:
    visit(page, "/watch?run=pictures")
    canvas = page.locator("canvas.watch")
    x, y = page.evaluate(
        """async () => {
          const { layout } = await import("/page/watchview.js");
          const { refresh, sourceOf } = await import("/page/probes.js");
          const story = sourceOf("pictures");
          await refresh(story);
          const canvas = document.querySelector("canvas.watch");
          const [width, height] = [canvas.offsetWidth, canvas.offsetHeight];
          const box = layout(canvas.getContext("2d"), story, 0, { width, height });
          return [box.left + 2.5 * (box.small + 10), box.strip + box.small / 2];
        }"""
    )
    canvas.click(position={"x": x, "y": y})
    expect(page).to_have_url(re.compile("sentence=2"))


def test_scrubbing_changes_step_and_translation(page: Any, folder: Path) -> None:
    visit(page, f"{PLACE}{LAST}")
    canvas, recorded = page.locator("canvas.watch"), probes(folder)
    expect(canvas).to_have_attribute("aria-valuenow", "30")
    page.locator("main").press("Home")
    expect(canvas).to_have_attribute("aria-valuenow", "0")
    first = recorded[0]["sentences"][0]["text"]
    assert first in canvas.get_attribute("aria-valuetext")
    page.locator("main").press("ArrowRight")
    expect(canvas).to_have_attribute("aria-valuenow", str(recorded[1]["step"]))
    assert page.url.endswith(f"step={recorded[1]['step']}")
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 24, box["y"] + box["height"] - 60)
    expect(canvas).to_have_attribute("aria-valuenow", "30")


def with_40_probes(folder: Path, run: str) -> str:
    """A run with as many probes as a long one: those of another, repeated at later steps."""
    copied = folder / f"long-{run}"
    if not copied.exists():
        shutil.copytree(folder / run, copied)
        lines = [
            {**probe, "step": probe["step"] + 1 + 31 * at}
            for at in range(40 // len(probes(folder, run)) + 1)
            for probe in probes(folder, run)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines[:40])
        (copied / "probes" / "probes.jsonl").write_text(text, "utf-8")
    return f"/watch?run={copied.name}"


def processor_clock(page: Any) -> Callable[[], float]:
    """Seconds that the page's thread has computed: other programs do not add to them."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))

    return seconds


@pytest.mark.parametrize("run", KINDS)
def test_scrubbing_40_probes_at_30_frames_a_second(page: Any, folder: Path, run: str) -> None:
    visit(page, with_40_probes(folder, run))
    clock = processor_clock(page)
    begun = clock()
    steps = page.evaluate(
        """() => Array.from({ length: 80 }, (_, number) => {
          const key = number === 0 ? "Home" : number < 40 ? "ArrowRight" : "ArrowLeft";
          document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          const canvas = document.querySelector("canvas.watch");
          canvas.getContext("2d").getImageData(0, 0, 1, 1);  // the picture is complete
          return canvas.getAttribute("aria-valuenow");
        })"""
    )
    assert len(set(steps[:40])) == 40
    assert (clock() - begun) / len(steps) < 1 / 30


PACE = """async ({ run, share }) => {
  const { pace } = await import("/page/watchstory.js");
  const answer = await (await fetch(`/api/probes?run=${run}&since=0`)).json();
  return pace({ run, probes: answer.records, sentences: answer.sentences }, 0)(share);
}"""


def test_it_begins_by_playing_once(page: Any) -> None:
    """From step 0 to the last one; not again when another layer is chosen."""
    visit(page, PLACE)
    canvas, button = page.locator("canvas.watch"), page.get_by_role("button", name="Stop")
    expect(button).to_be_visible()
    assert int(canvas.get_attribute("aria-valuenow")) < 30
    expect(canvas).to_have_attribute("aria-valuenow", "30", timeout=9000)
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.locator(".tabs button").first.click()  # another layer
    expect(canvas).to_have_attribute("aria-valuenow", "30")
    expect(button).to_have_count(0)


def test_reduced_motion_begins_at_the_last_step(page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    visit(page, PLACE)
    expect(page.locator("canvas.watch")).to_have_attribute("aria-valuenow", "30")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_space_plays_the_training_in_six_seconds(page: Any, folder: Path) -> None:
    """Seen for a quarter of it: the step is that of the clock, in frames of a thirtieth second."""
    visit(page, with_40_probes(folder, "translator"))
    clock = processor_clock(page)
    begun = clock()
    frames, seconds, position = page.evaluate(
        """() => new Promise((done) => {
          const press = (key) =>
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          const canvas = document.querySelector("canvas.watch");
          press("Home");
          press(" ");
          const [seen, begun] = [[], performance.now()];
          const tick = (now) => {
            seen.push(canvas.getAttribute("aria-valuenow"));
            if (now - begun < 1500) return requestAnimationFrame(tick);
            press(" ");
            done([seen.length, (now - begun) / 1000, new Set(seen).size]);
          };
          requestAnimationFrame(tick);
        })"""
    )
    steps = json.loads(
        page.evaluate(
            "fetch('/api/probes?run=long-translator&since=0').then((answer) => answer.text())"
        )
    )["records"]
    now = int(page.locator("canvas.watch").get_attribute("aria-valuenow"))
    place = np.interp(now, [one["step"] for one in steps], range(40))
    due = page.evaluate(PACE, {"run": "long-translator", "share": seconds / 6})
    assert abs(place - due) < 3
    assert position > 4  # frames between, not a jump
    assert (clock() - begun) / frames < 1 / 30


FILM = """async (data) => {
  const video = document.createElement("video");
  const until = (event, act) => new Promise((done, fail) => {
    video.addEventListener(event, done, { once: true });
    video.onerror = () => fail(new Error(video.error.message));
    act();
  });
  const picture = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    const context = canvas.getContext("2d");
    context.drawImage(video, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  };
  await until("loadeddata", () => (video.src = `data:video/webm;base64,${data}`));
  const first = picture();
  // On a busy machine a video is painted some time after it was sought.
  const painted = new Promise((done) => {
    const look = (_, frame) =>
      frame.mediaTime > video.duration - 0.1 ? done() : video.requestVideoFrameCallback(look);
    video.requestVideoFrameCallback(look);
  });
  await until("seeked", () => (video.currentTime = video.duration));
  await painted;
  const last = picture();
  const differ = last.filter((value, at) => Math.abs(value - first[at]) > 64).length;
  return [video.duration, video.videoWidth, differ / last.length];
}"""


def test_the_film_is_a_video_of_six_seconds(page: Any, browser: Any, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 480, "height": 640})  # less to encode
    visit(page, PLACE)
    width = page.locator("canvas.watch").evaluate("(canvas) => canvas.width")
    page.locator(".watch-figure .saving summary").click()
    with page.expect_download(timeout=60_000) as download:
        page.get_by_role("button", name="Film").click()
    path = tmp_path / "watch.webm"
    download.value.save_as(path)
    player = browser.new_page()
    seconds, wide, changed = player.evaluate(FILM, base64.b64encode(path.read_bytes()).decode())
    player.close()
    assert seconds == pytest.approx(6.8, abs=0.1)
    assert abs(wide - width) <= 1
    assert changed > 0.002  # from the first step to the last


@pytest.mark.parametrize("run", KINDS)
def test_a_new_probe_appears_by_itself(page: Any, folder: Path, run: str) -> None:
    copied = folder / f"live-{run}"
    shutil.copytree(folder / run, copied)
    file = copied / "probes" / "probes.jsonl"
    lines = file.read_text("utf-8").splitlines()
    file.write_text("".join(f"{line}\n" for line in lines[:-1]), "utf-8")
    visit(page, f"/watch?run={copied.name}")
    canvas = page.locator("canvas.watch")
    expect(canvas).to_have_attribute("aria-valuemax", str(json.loads(lines[-2])["step"]))
    with file.open("a", encoding="utf-8") as opened:
        opened.write(lines[-1] + "\n")
    expect(canvas).to_have_attribute("aria-valuenow", "30", timeout=3000)


def test_removing_a_head_in_the_past(page: Any, folder: Path) -> None:
    visit(page, f"{PLACE}&remove=1&layer=0{LAST}")
    with page.expect_response("**/api/probes/removed") as answered:
        page.get_by_role("button", name="1·1").click()
    answer = answered.value.json()
    before = probes(folder)[-1]["sentences"][0]["reference_log_probs"]
    assert len(answer["reference_log_probs"]) == len(before)
    assert not np.allclose(answer["reference_log_probs"], before, atol=1e-4)


def test_removing_a_head_of_a_language_model(page: Any, folder: Path) -> None:
    visit(page, "/watch?run=writer&remove=1&layer=0&step=30")
    with page.expect_response("**/api/probes/removed") as answered:
        page.get_by_role("button", name="1·1").click()
    answer, before = answered.value.json(), probes(folder, "writer")[-1]["sentences"][0]
    assert len(answer["reference_log_probs"]) == len(before["reference_log_probs"])
    assert not np.allclose(answer["reference_log_probs"], before["reference_log_probs"], atol=1e-4)


@pytest.mark.parametrize("run", KINDS)
def test_the_saved_file_works_without_a_server(
    page: Any, browser: Any, tmp_path: Path, run: str
) -> None:
    visit(page, f"/watch?run={run}")
    path = tmp_path / "watch.html"
    shared.save(page, page.locator("main"), "HTML").save_as(path)
    context = browser.new_context(offline=True, viewport={"width": 900, "height": 700})
    saved, wrong = context.new_page(), []
    saved.on("pageerror", lambda error: wrong.append(str(error)))
    saved.on(
        "request", lambda request: wrong.append(request.url) if "file:" not in request.url else None
    )
    saved.goto(path.as_uri())
    saved.locator("canvas").press("End")
    colours = saved.locator("canvas").evaluate(
        """c => {
          const image = c.getContext("2d").getImageData(0, 0, c.width, c.height);
          return new Set(new Uint32Array(image.data.buffer)).size;
        }"""
    )
    context.close()
    assert wrong == []
    assert colours > 50  # of several heads, blended


def test_a_run_without_probes_says_how_to_get_them(page: Any, folder: Path) -> None:
    shutil.copytree(folder / "translator", folder / "bare", ignore=shutil.ignore_patterns("probes"))
    visit(page, "/watch?run=bare")
    expect(page.get_by_role("status")).to_contain_text("train.probes")


def test_the_demo_opens_the_page_while_it_trains(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Queue[str] = Queue()
    monkeypatch.setattr("webbrowser.open", opened.put)
    watch(tmp_path / "run")  # which does not exist yet
    shutil.copytree(folder / "translator", tmp_path / "run")
    with urllib.request.urlopen(opened.get(timeout=20)) as answer:
        assert answer.url.endswith("/watch")
        assert b"Manyheads" in answer.read()


@pytest.mark.parametrize("run", KINDS)
def test_the_stage_shows_all_of_it_sharply(page: Any, run: str) -> None:
    visit(page, f"/watch?run={run}&stage=1")
    canvas = page.locator("canvas.watch")
    box = canvas.bounding_box()
    assert 770 < box["y"] + box["height"] <= 800
    fine = canvas.evaluate("c => c.width") / box["width"]
    assert fine == pytest.approx(1, abs=0.02)  # a pixel of the canvas is a pixel of the screen


@pytest.mark.parametrize("run", KINDS)
def test_the_figure_fills_the_window(page: Any, run: str) -> None:
    """Without scrolling; it follows another size of the window."""
    visit(page, f"/watch?run={run}{LAST}")
    for width, height in ((1280, 800), (1280, 860), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(
            """() => {
              const { bottom } = document.querySelector(".watch-figure").getBoundingClientRect();
              return bottom > innerHeight - 30 && bottom <= innerHeight;
            }"""
        )


def test_reading_begins_at_either_end(page: Any) -> None:
    """At rest all tokens are shown: ] begins at the first one, [ leaves out the last one."""
    visit(page, f"/watch?run=translator{LAST}")
    reading = page.get_by_label("Translation written so far")
    last = int(reading.get_attribute("max"))
    for keys, position in (("]", 0), ("]", 1), ("[", 0), ("]" * last, last), ("[", last - 1)):
        for key in keys:
            page.keyboard.press(key)
        assert int(reading.input_value()) == position
