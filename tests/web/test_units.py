"""Unit tests of the page in Node: ticks, smoothing, layout, colours, state in the URL."""

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
OLDEST = (20, 19)  # reads .js files with imports as modules


def test_functions_of_the_page() -> None:
    if NODE is None:
        pytest.skip("needs Node.js")
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(int(part) for part in version.strip("v\n").split(".")[:2]) < OLDEST:
        pytest.skip(f"needs Node.js 20.19 or newer, and this is {version.strip()}")
    place = Path(__file__).parent / "js" / "page.test.js"
    ended = subprocess.run([NODE, "--test", str(place)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:]
