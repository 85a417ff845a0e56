"""How long the Attention page takes to draw every head of a text, and what memory it holds then.

    python benchmarks/page.py --tokens 256 1024

A language model of 6 layers and 8 heads with first weights, on a server of its own, in a real
browser (playwright, and a `chromium` of the system). Each text is new to the server: the time is
from opening the address until everything is drawn, capture and transfer included. Best of several.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import torch
from playwright.sync_api import CDPSession, Page, sync_playwright

from manyheads.models.gpt import GptConfig
from manyheads.run import Run, save_run
from manyheads.tokenizer.train import Words

LAYERS, HEADS, DIM, LONGEST = 6, 8, 256, 1024
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WORDS = [f"w{number}" for number in range(500)]


def make_run(folder: Path) -> None:
    """Untrained weights: the time to draw a map does not depend on its values."""
    torch.manual_seed(1)
    tokenizer = Words().train([" ".join(WORDS)])
    sizes = {"dim": DIM, "layers": LAYERS, "heads": HEADS, "max_length": LONGEST}
    config = GptConfig(**sizes, vocab_size=tokenizer.vocab_size)
    run = Run(task="language", data=None, tokens=Words(), model=config)  # type: ignore[arg-type]
    save_run(run, tokenizer, config.build(), folder / "writer")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `manyheads view` on a folder, as a user does, and give its address."""
    command = [sys.executable, "-m", "manyheads", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip().rstrip("/")
        finally:
            server.terminate()


def opened(page: Page, session: CDPSession, place: str) -> tuple[float, float, float, int]:
    """Seconds until all maps are drawn, and until all is; megabytes and nodes that are held then.

    Megabytes of the heap are those of scripts with the bytes of their arrays.
    """
    page.goto("about:blank")
    begin = time.perf_counter()
    page.goto(place, wait_until="commit")
    page.locator(".plane > canvas").wait_for()
    page.locator(".heads canvas").first.wait_for()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    maps = time.perf_counter() - begin
    page.locator("main:not([aria-busy])").wait_for()
    full = time.perf_counter() - begin
    held = session.send("Runtime.getHeapUsage")
    size = sum(held.get(name, 0) for name in ("usedSize", "backingStorageSize"))
    return maps, full, size / 1e6, page.evaluate("() => document.querySelectorAll('*').length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, LONGEST])
    parser.add_argument("--times", type=int, default=5)
    inputs = parser.parse_args()
    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.exit("chromium not found: install it")
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder))
        with serving(Path(folder)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            session = page.context.new_cdp_session(page)
            opened(page, session, f"{address}/attention?text=w1+w2")  # files, model, first kernels
            for tokens in inputs.tokens:
                visits = []
                for seed in range(inputs.times):
                    text = " ".join(random.Random(seed).choices(WORDS, k=tokens))
                    visits.append(opened(page, session, f"{address}/attention?text={quote(text)}"))
                maps, full = (min(item[at] for item in visits) for at in (0, 1))
                print(
                    f"{LAYERS} × {HEADS} heads, {tokens} tokens: "
                    f"maps {maps:.2f} s, all {full:.2f} s "
                    f"(maps of {', '.join(f'{item[0]:.2f}' for item in visits)}), "
                    f"heap at most {max(item[2] for item in visits):.0f} MB, {visits[0][3]} nodes"
                )
            browser.close()


if __name__ == "__main__":
    main()
