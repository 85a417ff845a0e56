"""Pictures of every page at the sizes of a laptop, a large screen and a phone.

    python docs/screenshots.py RUNS OUT

RUNS is a run or a folder of runs, OUT the folder that the pictures go into. Needs playwright and
a `chromium` of the system.
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

from manyheads.web.app import build_app, listen
from manyheads.web.library import Library

SIZES = {"wide": (1280, 800), "large": (1920, 1080), "phone": (390, 844)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# Name of the picture, page and state; RUN stands for `demo`, else the first run of the folder.
VIEWS = {
    "runs": "/",
    "tour": "/tour?run=RUN&stop=14",
    "watch": "/watch?run=RUN",
    "train": "/train?run=RUN",
    "flow": "/flow?run=RUN&layer=1&head=1&box=decoder.cross.weights&cell=2,1",
    "flow-mask": "/flow?run=RUN&layer=1&head=0&box=decoder.self.masked&cell=2,1",
    "flow-output": "/flow?run=RUN&layer=1&box=decoder.distribution&cell=3,0&theme=dark",
    "attention": "/attention?run=RUN",
    "attention-lines": "/attention?run=RUN&view=lines&layer=1&head=1&query=2",
    "attention-qk": "/attention?run=RUN&view=qk&layer=1&head=1&cell=2,2",
    "attention-knocked-out": "/attention?run=RUN&off=decoder.cross.1.1+decoder.cross.1.3&layer=1",
    "attention-dark": "/attention?run=RUN&map=encoder.self&view=rollout&by=entropy&theme=dark",
    "attention-stage": "/attention?run=RUN&stage=1",
    "translate": "/translate?run=RUN&layer=1",
    "translate-alternatives": "/translate?run=RUN&at=4&layer=all",
    "decode": "/decode?run=RUN&temperature=1.5&top_k=5",
    "tokens": "/tokens?run=RUN&text=Vierunddreißig+small+dogs+see+the+unbelievable+tree.&step=20",
    "quiz": "/quiz?answers=thinking.a+why-scaled",
    "positions": "/positions",
    "positions-skew": "/positions?scheme=relative&causal=1&length=24&trained=16",
    "lens": "/lens?run=RUN",
    # These show the first run of their kind that the folder has.
    "fill": "/fill?text=The+boy+fed+this+strong+wolf+because+it+snowed+in+the+morning.&mask=1+6",
    "image": "/image?picture=3",
    "music": "/music",
}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The page over a folder, in a thread of this process; its address."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(build_app(folder), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def make_small(path: Path) -> None:
    """A palette where it is exact: with fewer colours, those of maps and ribbons would be lost."""
    picture = Image.open(path).convert("RGB")
    if picture.getcolors(256):
        picture = picture.quantize(256, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="names of pictures that begin so")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["wide", "phone"])
    options = parser.parse_args()
    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.exit("chromium not found: install it")
    runs = [*Library(options.runs).folders()]
    run = "demo" if "demo" in runs else runs[0]
    options.out.mkdir(parents=True, exist_ok=True)
    with serving(options.runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        for size in options.sizes:
            width, height = SIZES[size]
            # Watch and Tokens would be pictures of the middle of their animation.
            viewport = {"width": width, "height": height}
            page = browser.new_page(viewport=viewport, reduced_motion="reduce")
            for name, place in VIEWS.items():
                if not name.startswith(options.only):
                    continue
                page.goto(address + place.replace("RUN", run))
                page.locator("main h1").first.wait_for()
                page.locator("main:not([aria-busy])").wait_for()
                page.wait_for_load_state("networkidle")  # Translate looks up the gold alignment
                path = options.out / f"{name}-{size}.png"
                # A phone scrolls: its pictures show the whole page.
                page.screenshot(path=path, full_page=size == "phone")
                make_small(path)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
