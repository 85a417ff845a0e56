"""In a real browser: the Watch page shows the numbers of the probes, live, and saves itself."""

import base64
import contextlib
import io
import json
import shutil
import time
import urllib.request
import zlib
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from tests.web.small_pages import SETTINGS

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
shared = pytest.importorskip("tests.web.test_page", reason="needs chromium")

from manyheads.commands.demo import watch  # noqa: E402
from manyheads.recipes import read_recipe  # noqa: E402
from manyheads.run import make_trainer  # noqa: E402

address, browser, page = shared.address, shared.browser, shared.page  # fixtures
expect, visit = shared.expect, shared.visit
PLACE = "/watch?run=translator"
# Draws one moment on a context that only records the widths and ends of the ribbons.
RIBBONS = """async ({ run, at, layer }) => {
  const view = await import("/page/watchview.js");
  const { records, sentences } = await (await fetch(`/api/probes?run=${run}&since=0`)).json();
  for (const probe of records) for (const one of probe.sentences) {
    const packed = Uint8Array.from(atob(one.attention), (sign) => sign.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    one.weights = new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const drawn = [];
  const recorder = new Proxy(document.createElement("canvas").getContext("2d"), {
    get: (target, name) => {
      if (name === "bezierCurveTo") return () => drawn.push(target.lineWidth);
      const value = target[name];
      return typeof value === "function" ? value.bind(target) : value;
    },
    set: (target, name, value) => ((target[name] = value), true),
  });
  const moment = { at, sentence: 0, layer, hidden: new Set(), token: -1, focus: -1 };
  view.drawWatch(recorder, { run, probes: records, sentences }, moment, {}, view.layout(1200));
  return drawn;
}"""
LEAST = 0.02  # of watchview.js


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    settings = [*SETTINGS, "data.valid_pairs=30", "train.probes=8", "train.probe_weights=true"]
    with contextlib.redirect_stderr(io.StringIO()):
        recipe = read_recipe("phrasebook", settings)
        make_trainer(recipe, made / "translator", torch.device("cpu")).run()
    return made


def probes(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "translator" / "probes" / "probes.jsonl").read_text("utf-8")
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
        drawn = np.array(page.evaluate(RIBBONS, {"run": "translator", "at": at, "layer": 1}))
        assert len(drawn) == len(expected)
        assert np.allclose(drawn / drawn.max(), expected / expected.max(), atol=1e-6)


def test_scrubbing_changes_step_and_translation(page: Any, folder: Path) -> None:
    visit(page, PLACE)
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


def test_a_frame_takes_less_than_a_thirtieth_of_a_second(page: Any) -> None:
    visit(page, PLACE)
    milliseconds = page.evaluate(
        """async () => {
          const begun = performance.now();
          for (let n = 0; n < 40; n++) {
            document.body.dispatchEvent(
              new KeyboardEvent("keydown", { key: n % 2 ? "Home" : "End", bubbles: true }));
            document.querySelector("canvas.watch").getContext("2d").getImageData(0, 0, 1, 1);
          }
          return (performance.now() - begun) / 40;
        }"""
    )
    assert milliseconds < 33


def with_40_probes(folder: Path) -> str:
    """A run with as many probes as a long one: those of `translator`, repeated at later steps."""
    copied = folder / "long"
    if not copied.exists():
        shutil.copytree(folder / "translator", copied)
        lines = [
            {**probe, "step": probe["step"] + 1 + 31 * at}
            for at in range(40 // len(probes(folder)) + 1)
            for probe in probes(folder)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines[:40])
        (copied / "probes" / "probes.jsonl").write_text(text, "utf-8")
    return "/watch?run=long"


def test_space_plays_40_probes_at_30_frames_a_second(page: Any, folder: Path) -> None:
    visit(page, with_40_probes(folder))
    page.locator("main").press("Home")
    page.locator("main").press("Space")
    frames, seconds, steps = page.evaluate(
        """() => new Promise((done) => {
          const canvas = document.querySelector("canvas.watch");
          const [seen, begun] = [new Set(), performance.now()];
          let frames = 0;
          const tick = (now) => {
            frames++;
            const step = canvas.getAttribute("aria-valuenow");
            seen.add(step);
            if (step !== canvas.getAttribute("aria-valuemax")) requestAnimationFrame(tick);
            else done([frames, (now - begun) / 1000, seen.size]);
          };
          requestAnimationFrame(tick);
        })"""
    )
    assert 5 < seconds < 7
    assert frames / seconds >= 30
    assert steps >= 40


def test_the_film_is_a_video_of_six_seconds(page: Any, tmp_path: Path) -> None:
    visit(page, PLACE)
    begun = time.monotonic()
    with page.expect_download(timeout=15_000) as download:
        page.get_by_role("button", name="Film").click()
    assert 6 < time.monotonic() - begun < 10
    path = tmp_path / "watch.webm"
    download.value.save_as(path)
    data = path.read_bytes()
    assert data.startswith(bytes.fromhex("1a45dfa3"))  # EBML, the container of WebM
    assert b"webm" in data[:64]
    assert len(data) > 50_000


def test_a_new_probe_appears_by_itself(page: Any, folder: Path) -> None:
    copied = folder / "live"
    shutil.copytree(folder / "translator", copied)
    file = copied / "probes" / "probes.jsonl"
    lines = file.read_text("utf-8").splitlines()
    file.write_text("".join(f"{line}\n" for line in lines[:-1]), "utf-8")
    visit(page, "/watch?run=live")
    canvas = page.locator("canvas.watch")
    expect(canvas).to_have_attribute("aria-valuemax", str(json.loads(lines[-2])["step"]))
    with file.open("a", encoding="utf-8") as opened:
        opened.write(lines[-1] + "\n")
    expect(canvas).to_have_attribute("aria-valuenow", "30", timeout=3000)


def test_removing_a_head_in_the_past(page: Any, folder: Path) -> None:
    visit(page, f"{PLACE}&remove=1&layer=0")
    with page.expect_response("**/api/probes/removed") as answered:
        page.get_by_role("button", name="1·1").click()
    answer = answered.value.json()
    before = probes(folder)[-1]["sentences"][0]["reference_log_probs"]
    assert len(answer["reference_log_probs"]) == len(before)
    assert not np.allclose(answer["reference_log_probs"], before, atol=1e-4)


def test_the_saved_file_works_without_a_server(page: Any, browser: Any, tmp_path: Path) -> None:
    visit(page, PLACE)
    with page.expect_download() as download:
        page.get_by_role("button", name="HTML").click()
    path = tmp_path / "watch.html"
    download.value.save_as(path)
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
    assert colours > 50  # ribbons of several colours, blended


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
