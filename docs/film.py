"""Film the Watch page while it plays a training: docs/screens/watch.gif and watch.webm.

    python docs/film.py RUN docs/screens

RUN is a run with probes, as `manyheads demo` trains. Needs playwright, pillow and a `chromium` of
the system.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from screenshots import FLAGS, serving

WIDTH, COLOURS, SECONDS = 860, 128, 6
EARLY = 0.6  # the exponent of the time axis: the first half of the probes has few changes
MOST_BYTES = 3_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sentence", help="number of the probed sentence; by default the page's")
    parser.add_argument("--frames", type=int, default=50)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with serving(options.run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800})
        chosen = "" if options.sentence is None else f"&sentence={options.sentence}"
        page.goto(f"{address}/watch?theme=light{chosen}")
        page.locator("canvas.watch").wait_for()
        pictures = frames(page, options.frames)
        page.locator(".watch-figure .saving summary").click()
        with page.expect_download(timeout=120_000) as download:
            page.get_by_role("button", name="Film").click()
        download.value.save_as(options.out / "watch.webm")
        browser.close()
    path = options.out / "watch.gif"
    save(pictures, path)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes: reduce --frames")


def frames(page: object, count: int) -> list[Image.Image]:
    """Pictures of the canvas along its time axis, drawn by dragging; fewer where little happens."""
    canvas = page.locator("canvas.watch")  # type: ignore[attr-defined]
    canvas.scroll_into_view_if_needed()
    box, mouse = canvas.bounding_box(), page.mouse  # type: ignore[attr-defined]
    # The axis of watchview.js: 24 pixels inside the canvas, above the line of text.
    y, left, right = box["y"] + box["height"] - 60, box["x"] + 24, box["x"] + box["width"] - 24
    mouse.move(left, y)
    mouse.down()
    pictures = []
    for at in range(count):
        mouse.move(left + (right - left) * (at / (count - 1)) ** EARLY, y)
        pictures.append(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB"))
    mouse.up()
    return pictures


def save(pictures: list[Image.Image], path: Path) -> None:
    """An animated GIF with one palette; the last picture stays for two seconds."""
    middle = pictures[len(pictures) // 2]  # has the colour of wrong tokens
    both = Image.new("RGB", (middle.width, 2 * middle.height))
    both.paste(middle, (0, 0))
    both.paste(pictures[-1], (0, middle.height))
    palette = both.quantize(COLOURS, kmeans=2)
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    each = 1000 * SECONDS // len(pictures)
    durations = [each] * (len(pictures) - 1) + [2000]
    small[0].save(
        path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True
    )


if __name__ == "__main__":
    main()
