"""In a real browser: home page, standing of a training, comparisons, training from the page."""

import csv
import json
import re
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, SETTINGS

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
watching = pytest.importorskip("tests.web.test_watch_page", reason="needs chromium")

from manyheads.web import training  # noqa: E402
from manyheads.web.app import build_app  # noqa: E402
from manyheads.web.guard import AccessPolicy  # noqa: E402

shared = watching.shared
address, browser, page = shared.address, shared.browser, shared.page  # fixtures
folder = watching.folder
expect, visit, settled = shared.expect, shared.visit, shared.settled
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # first, second and third run


def records(folder: Path, run: str, split: str) -> list[dict[str, Any]]:
    lines = (folder / run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["split"] == split]


def card(page: Any, run: str) -> Any:
    heading = page.get_by_role("heading", name=run, exact=True)
    return page.locator("article.card", has=heading)


def test_the_home_page_says_where_to_start(page: Any) -> None:
    visit(page, "/")
    ways = page.get_by_role("region", name="Start here").get_by_role("link")
    expect(ways).to_have_count(3)
    for number, (name, path) in enumerate(
        (("Take the tour", "/tour"), ("Watch it learn", "/watch"), ("Follow the numbers", "/flow"))
    ):
        visit(page, "/")
        expect(ways.nth(number)).to_contain_text(name)
        ways.nth(number).click()
        expect(page).to_have_url(re.compile(f"{path}\\?run="))
        settled(page)
        expect(page.locator("#problem")).to_be_hidden()


def test_a_card_has_curve_picture_languages_and_command(page: Any, folder: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit(page, "/")
    one = card(page, "translator")
    losses = [record["loss"] for record in records(folder, "translator", "train")]
    label = one.locator(".spark > div").get_attribute("aria-label")
    ends = [float(number) for number in re.findall(r"[\d.]+", label)]
    assert ends == pytest.approx([losses[0], losses[-1]], rel=1e-3)
    path = one.locator(".spark path").get_attribute("d")
    assert path.count("L") == len(losses) - 1
    expect(one.locator(".kind")).to_contain_text("English → German")
    one.get_by_text("Settings").click()
    command = one.locator("code").inner_text()
    assert command == "manyheads train translator/run.toml --out NEW"
    one.get_by_role("button", name="Copy").click()
    expect(one.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == command
    for run in watching.KINDS:
        thumb = card(page, run).locator("canvas.thumb")
        expect(thumb).to_be_visible()
        colours = thumb.evaluate(
            """c => {
              const image = c.getContext("2d").getImageData(0, 0, c.width, c.height);
              return new Set(new Uint32Array(image.data.buffer)).size;
            }"""
        )
        assert colours > 20, run


FRAME = "canvas => canvas.toDataURL()"


def test_the_hero_plays_the_training_once_and_rests(page: Any) -> None:
    visit(page, "/")
    canvas = page.locator(".hero-picture canvas")
    frames = {canvas.evaluate(FRAME)}
    for _ in range(4):
        page.wait_for_timeout(300)
        frames.add(canvas.evaluate(FRAME))
    assert len(frames) > 2
    page.wait_for_timeout(6000)
    last = canvas.evaluate(FRAME)
    page.get_by_role("link", name="Train", exact=True).first.click()
    settled(page)
    page.go_back()
    settled(page)
    assert canvas.evaluate(FRAME) == last  # not again
    box, frame = canvas.bounding_box(), page.locator(".hero-frame").bounding_box()
    assert frame["y"] <= box["y"]
    assert box["y"] + box["height"] <= frame["y"] + frame["height"]


def test_reduced_motion_shows_the_last_frame_at_once(page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    visit(page, "/")
    canvas = page.locator(".hero-picture canvas")
    first = canvas.evaluate(FRAME)
    page.wait_for_timeout(500)
    assert canvas.evaluate(FRAME) == first


def test_cards_are_even_and_have_one_primary_link(page: Any) -> None:
    visit(page, "/")
    for run in watching.KINDS:
        primary = card(page, run).locator("nav a.button")
        expect(primary).to_have_count(1)
        expect(primary).to_have_text("Watch")
    for part in (".spark svg", "dl", "nav a.button"):
        boxes = [card(page, run).locator(part).bounding_box() for run in watching.KINDS]
        assert len({round(box["y"]) for box in boxes}) == 1, part
    heights = [
        card(page, run).locator(".spark span").bounding_box()["height"] for run in ("writer",)
    ]
    assert max(heights) < 20  # one line


def test_train_says_where_the_training_stands(page: Any, folder: Path) -> None:
    visit(page, "/train?run=translator")
    [valid] = records(folder, "translator", "valid")
    facts = page.locator(".standing dd")
    expect(facts.nth(0)).to_have_text("30 of 30")
    expect(facts.nth(1)).to_have_text("finished")
    assert watching.shared.reads(facts.nth(2).inner_text().split()[0], valid["loss"])
    assert watching.shared.reads(facts.nth(3).inner_text(), valid["perplexity"])


def test_time_left_follows_from_the_steps_seen(page: Any, folder: Path) -> None:
    copied = folder / "young"
    shutil.copytree(folder / "translator", copied)
    lines = (copied / "metrics.jsonl").read_text("utf-8").splitlines()
    (copied / "metrics.jsonl").write_text(lines[0] + "\n", "utf-8")
    visit(page, "/train?run=young")
    facts, first = page.locator(".standing dd"), json.loads(lines[0])["step"]
    expect(facts.nth(0)).to_have_text(f"{first} of 30")
    expect(facts.nth(1)).to_have_text(re.compile("about \\d+ (s|min)"))
    page.wait_for_timeout(2500)
    with (copied / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 15, "split": "train", "loss": 1.0}) + "\n")
    expect(facts.nth(0)).to_have_text("15 of 30")
    # 15 steps are left, and 10 took between 2 and 8 seconds.
    seconds = re.fullmatch("about (\\d+) s", facts.nth(1).inner_text())
    assert seconds is not None
    assert 1 <= int(seconds[1]) <= 14
    shutil.rmtree(copied)


def test_charts_of_a_training_name_their_axes(page: Any, folder: Path) -> None:
    """A loss that falls by decades is logarithmic; BLEU is written alike everywhere."""
    copied = folder / "steep"
    shutil.copytree(folder / "translator", copied)
    lines = [
        {"step": step, "split": split, "loss": loss, **more}
        for step, split, loss, more in (
            (10, "train", 5.0, {"grad_norm": 2.0}),
            (20, "train", 0.05, {"grad_norm": 1.0}),
            (20, "valid", 0.06, {"bleu": 97.04}),
        )
    ]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (copied / "scores.json").write_text('{"bleu": 96.0}')
    visit(page, "/train?run=steep")
    loss, bleu = page.locator(".chart").nth(0), page.locator(".chart").nth(1)
    expect(loss.locator("svg")).to_contain_text("loss (log)")
    expect(page.get_by_label("log y")).to_be_checked()
    expect(bleu.locator("svg")).to_contain_text("BLEU, 0 to 100")
    expect(bleu.locator(".readout")).to_have_text("step 20: validation 97.0")
    expect(page.locator(".standing dl > div").last).to_have_text("validation BLEU97.0")
    rest = page.get_by_role("heading", name="Grad norm")
    expect(rest).to_be_hidden()
    page.get_by_text("Speed, gradient norm and other metrics").click()
    expect(rest).to_be_visible()
    page.get_by_label("log y").uncheck()
    expect(loss.locator("svg")).not_to_contain_text("(log)")
    visit(page, "/")
    expect(card(page, "steep")).to_contain_text("test BLEU")
    expect(card(page, "steep")).to_contain_text("96.0")
    shutil.rmtree(copied)


def test_samples_are_the_outputs_of_the_probes(page: Any, folder: Path) -> None:
    for run in ("translator", "writer", "pictures"):
        visit(page, f"/train?run={run}")
        steps = [record["step"] for record in records(folder, run, "valid")]
        recorded = watching.probes(folder, run)
        chosen = {max(p["step"] for p in recorded if p["step"] <= step) for step in steps}
        rows = page.locator(".samples tbody tr")
        expect(rows).to_have_count(len(chosen) + 1)
        for row, step in zip(rows.all(), sorted(chosen, reverse=True), strict=False):
            probe = next(p for p in recorded if p["step"] == step)["sentences"][0]
            cells = row.locator("th, td").all_inner_texts()
            assert int(cells[0]) == step
            if "text" in probe:
                # Words that are not in the reference are marked; those that are missing follow.
                words = cells[1].replace("changed:", "").split("missing:")[0].split()
                assert words == (probe["text"] or "(nothing)").split()
            else:
                name, share = probe["probabilities"][0]
                assert cells[1] == f"{name}, {int(100 * share + 0.5)} %"
            log_p = sum(probe["reference_log_probs"])  # on screen with three digits
            assert float(cells[2].replace("\u2212", "-")) == float(f"{log_p:.3g}")


def test_a_step_of_a_curve_marks_the_nearest_output(page: Any) -> None:
    visit(page, "/train?run=translator")
    chart, rows = page.locator(".chart .axes").first, page.locator(".samples tr[data-step]")
    chart.focus()
    for key in ("Home", "End"):
        page.keyboard.press(key)
        step = int(re.findall(r"step (\d+)", page.locator(".chart .readout").first.inner_text())[0])
        steps = [int(row.get_attribute("data-step")) for row in rows.all()]
        near = page.locator(".samples tr.near").first.get_attribute("data-step")
        assert abs(int(near) - step) == min(abs(one - step) for one in steps)


def test_adding_a_run_keeps_what_is_on_screen(page: Any) -> None:
    """Until its numbers arrive."""
    visit(page, "/train?run=translator")
    waiting: list[Any] = []
    page.route("**/api/metrics?run=writer*", lambda route: waiting.append(route))
    page.get_by_role("group", name="Compare with").get_by_label("writer").check()
    for _ in range(50):
        page.wait_for_timeout(100)
        if waiting:
            break
    expect(page.locator(".chart svg").first).to_be_visible()
    expect(page.locator(".samples tr").nth(1)).to_be_visible()
    waiting.pop().continue_()
    expect(page.locator(".chart").first).to_contain_text("writer train")


def test_any_number_of_runs_in_one_chart(page: Any) -> None:
    visit(page, "/train?run=translator&smooth=0.6")
    for name in ("writer", "pictures"):
        page.get_by_role("group", name="Compare with").get_by_label(name).check()
        settled(page)
    assert "beside=writer%7Cpictures" in page.url
    lines = page.locator(".chart").first.locator("svg path[fill=none]")
    strokes = lines.evaluate_all(
        "all => all.map(e => [e.getAttribute('stroke'), e.getAttribute('stroke-opacity')])"
    )
    for colour in COLOURS:
        smoothed, raw = ([colour, opacity] for opacity in (None, "0.35"))
        assert strokes.index(raw) < strokes.index(smoothed)  # under it


def test_nothing_moves_while_a_page_is_loaded(page: Any) -> None:
    page.add_init_script("""window.moved = 0;
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries()) window.moved += entry.value;
    }).observe({ type: "layout-shift", buffered: true });""")
    for place in ("/", "/translate", "/decode", "/train"):
        visit(page, f"{place}?run=translator")
        page.wait_for_timeout(500)
        # Web Vitals call up to 0.1 good; the menu alone moves by 0.001.
        assert page.evaluate("() => window.moved") < 0.02, place


def test_a_run_has_one_colour_and_dashes_for_validation(page: Any) -> None:
    """Alone, and beside another; a read-out names both splits."""
    for beside, runs in (("", 1), ("&beside=writer", 2)):
        visit(page, f"/train?run=translator{beside}")
        chart = page.locator(".chart").first
        entries = chart.locator("svg text").filter(has_text=re.compile("(train|validation)$"))
        names = entries.all_inner_texts()
        assert len(names) == 2 * runs
        keys = chart.locator("svg path[d*=h12]").evaluate_all(
            "all => all.map(e => [e.getAttribute('stroke'), e.hasAttribute('stroke-dasharray')])"
        )
        dashes = {colour: [dashed for own, dashed in keys if own == colour] for colour, _ in keys}
        assert len(dashes) == runs
        assert all(sorted(both) == [False, True] for both in dashes.values())
    expect(page.locator(".insight").first).to_contain_text("validation loss")


def save_csv(page: Any, figure: Any, tmp_path: Path) -> np.ndarray:
    path = tmp_path / "saved.csv"
    shared.save(page, figure, "CSV").save_as(path)
    with path.open(newline="", encoding="utf-8") as file:
        return np.array([row[1:] for row in list(csv.reader(file))[1:]], dtype="f4")


def lens(address: str, **body: str) -> np.ndarray:
    """The probability of the next token after each layer."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/api/lens", data, headers)
    with urllib.request.urlopen(request) as answer:
        return np.array(json.loads(answer.read())["wanted"])


def test_outputs_of_two_steps_side_by_side(page: Any, folder: Path) -> None:
    visit(page, f"/attention?run=translator&text={SENTENCE}&beside=translator@0")
    client = TestClient(build_app(folder), "http://localhost")
    panels = page.get_by_role("region", name="Comparison").locator(".outputs > div")
    for panel, run in zip(panels.all(), ("translator", "translator@0"), strict=True):
        answer = client.post("/api/translate", json={"run": run, "text": SENTENCE}).json()
        text = answer["hypotheses"][0]["text"]
        words = panel.locator(".sentence").inner_text().replace("changed:", "")
        assert words.split() == text.split()


def test_the_difference_map_is_the_difference(
    page: Any, address: str, folder: Path, tmp_path: Path
) -> None:
    target, steps = "Der Hund.", [probe["step"] for probe in watching.probes(folder)]
    place = f"/attention?run=translator&text={SENTENCE}&target={target}&map=decoder.cross&layer=1"
    visit(page, f"{place}&beside=translator@{steps[2]}")
    figure = page.get_by_role("region", name="Comparison").locator("figure").nth(1)
    drawn = save_csv(page, figure, tmp_path)
    now, past = (
        shared.weights(
            address,
            shared.requested(page, address, run=run, text=SENTENCE, target=target)["trace"],
            *("decoder.cross", 1, 0),
        )
        for run in ("translator", f"translator@{steps[2]}")
    )
    assert np.abs(now - past).max() > 1e-3
    assert np.allclose(drawn, now - past, atol=1e-6)
    page.get_by_text("Options", exact=True).click()
    page.get_by_label("Compare with").select_option("")
    expect(page.get_by_role("region", name="Comparison")).to_be_hidden()


def test_two_steps_on_lens(page: Any, address: str, folder: Path, tmp_path: Path) -> None:
    target, past = "Der Hund.", f"translator@{watching.probes(folder)[2]['step']}"
    visit(page, f"/lens?run=translator&text={SENTENCE}&target={target}")
    page.get_by_label("Compare with").select_option(past)
    figures = page.get_by_role("region", name="Comparison").locator("figure")
    expect(figures.nth(1)).to_be_visible()
    mine, its = (
        lens(address, run=run, text=SENTENCE, target=target) for run in ("translator", past)
    )
    assert np.abs(mine - its).max() > 1e-3
    assert np.allclose(save_csv(page, figures.nth(0), tmp_path), its, atol=1e-5)
    assert np.allclose(save_csv(page, figures.nth(1), tmp_path), mine - its, atol=1e-5)
    page.go_back()
    expect(page.get_by_role("region", name="Comparison")).to_be_hidden()


@pytest.mark.parametrize("head", [0, None])
def test_two_steps_on_translate(
    page: Any, address: str, folder: Path, tmp_path: Path, head: int | None
) -> None:
    """The attention to the source of one head, or the mean of a layer, for the same translation."""
    past = f"translator@{watching.probes(folder)[2]['step']}"
    chosen = "" if head is None else f"&head={head}"
    visit(page, f"/translate?run=translator&text={SENTENCE}&layer=1{chosen}")
    target = page.locator("output.sentence").inner_text()
    page.get_by_label("Compare with").select_option(past)
    figure = page.get_by_role("region", name="Comparison").locator("figure").nth(1)
    expect(figure).to_be_visible()
    heads = range(2) if head is None else [head]

    def mean(run: str) -> np.ndarray:
        trace = shared.requested(page, address, run=run, text=SENTENCE, target=target)["trace"]
        maps = [shared.weights(address, trace, "decoder.cross", 1, one) for one in heads]
        return np.mean(maps, axis=0)

    difference = mean("translator") - mean(past)
    assert np.abs(difference).max() > 1e-3
    assert np.allclose(save_csv(page, figure, tmp_path), difference, atol=1e-6)


def test_two_steps_on_watch(page: Any, folder: Path, tmp_path: Path) -> None:
    recorded = watching.probes(folder)
    visit(page, f"/watch?run=translator&layer=1&step={recorded[1]['step']}")
    page.get_by_role("button", name="Compare with this step").click()
    settled(page)
    page.locator("main").press("End")
    figure = page.get_by_role("region", name="Comparison").locator("figure")
    expect(figure).to_contain_text("step 30")
    first, last = (watching.attention(recorded[at]["sentences"][0])[1].mean(0) for at in (1, -1))
    assert np.allclose(save_csv(page, figure, tmp_path), last - first, atol=1e-6)


def test_an_unknown_step_is_refused(folder: Path) -> None:
    client = TestClient(build_app(folder), "http://localhost")
    for run, status in (("translator@29", 404), ("translator@x", 404), ("nothing@1", 404)):
        body = {"run": run, "text": SENTENCE}
        assert client.post("/api/trace", json=body).status_code == status


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The button trains a small model for longer than the test takes."""
    settings = [one for one in SETTINGS if not one.startswith("train.steps")]
    steps = ("train.steps=100000", "train.probes=20", "--threads", "1")
    monkeypatch.setattr(training, "COMMAND", ("train", "phrasebook", *settings, *steps))
    return folder / "demo"


def test_the_demo_is_trained_from_the_page(page: Any, small_demo: Path) -> None:
    page.set_default_timeout(60_000)
    visit(page, "/")
    page.get_by_role("button", name="Train the demo").click()
    expect(page).to_have_url(re.compile("/watch\\?run=demo"), timeout=60_000)
    expect(page.locator("canvas.watch")).to_be_visible(timeout=60_000)  # it learns
    visit(page, "/")
    panel = page.locator(".training")
    expect(panel).to_contain_text("Training the demo: step", timeout=20_000)
    panel.get_by_role("button", name="Stop").click()
    expect(panel).to_contain_text("has ended", timeout=60_000)
    expect(panel.get_by_role("button")).to_have_count(0)
    assert (small_demo / "run.toml").is_file()
    lines = (small_demo / "metrics.jsonl").read_text("utf-8").splitlines()
    time.sleep(1)
    assert (small_demo / "metrics.jsonl").read_text("utf-8").splitlines() == lines  # stopped
    shutil.rmtree(small_demo)


def test_training_is_refused_in_one_line(folder: Path) -> None:
    def start(where: Path, policy: AccessPolicy | None = None) -> tuple[int, str]:
        bearer = {"Authorization": f"Bearer {policy.token}"} if policy else {}
        client = TestClient(build_app(where, policy), "http://localhost", headers=bearer)
        answer = client.post("/api/training/start", json={})
        message: str = answer.json()["error"]["message"]
        assert "\n" not in message
        assert client.get("/api/training").json()["reason"] == message
        return answer.status_code, message

    status, message = start(folder, AccessPolicy.at("0.0.0.0"))
    assert (status, "beyond this computer" in message) == (403, True)
    status, message = start(folder / "translator")
    assert (status, "folder of runs" in message) == (409, True)
    (folder / "demo").mkdir()
    status, message = start(folder)
    assert (status, "exists already" in message) == (409, True)
    (folder / "demo").rmdir()


def test_a_foreign_page_cannot_train(folder: Path) -> None:
    client = TestClient(build_app(folder), "http://localhost")
    foreign = {"Origin": "http://evil.example"}
    assert client.post("/api/training/start", json={}, headers=foreign).status_code == 403
    assert client.post("/api/training/start", content="{}").status_code == 415
    assert client.get("/api/training/start").status_code == 405
    assert not (folder / "demo").exists()
