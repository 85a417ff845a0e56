"""Runs claims, keeps what they found, and goes on where it was stopped."""

import json
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from manyheads.claims import decks
from manyheads.claims.claim import Claim, Measured, Setting
from manyheads.config import nearest
from manyheads.errors import BadData, Mistake
from manyheads.files import write_text
from manyheads.view.figures import curves


def claims() -> dict[str, Claim]:
    """All of them by name: the name of the file, with hyphens."""
    names = sorted(module.name for module in iter_modules(decks.__path__))
    return {
        name.replace("_", "-"): import_module(f"{decks.__name__}.{name}").CLAIM for name in names
    }


def find(name: str) -> Claim:
    known = claims()
    if name not in known:
        raise Mistake(f"there is no claim '{name}': {nearest(name, list(known))}")
    return known[name]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a claim came to, and how to run it again."""

    name: str
    sentence: str
    deck: str
    criterion: str
    verdict: str
    why: str
    numbers: dict[str, list[float]]
    seeds: list[int]
    seconds: float
    command: str
    machine: str
    picture: str | None = None


def command_of(name: str, setting: Setting) -> str:
    words = ["manyheads claims --run", name]
    if setting.seeds != Setting().seeds:
        words.append(f"--seeds {','.join(map(str, setting.seeds))}")
    words += ["--large"] if setting.large else []
    return " ".join([*words, f"--device {setting.device.type}"])


def run(name: str, setting: Setting, folder: Path | None = None) -> Result:
    """Measure and judge a claim; with a folder, keep the result and the picture there."""
    claim = find(name)
    begun = time.monotonic()
    measured = claim.measure(setting)
    judged = claim.judge(measured)
    picture = None
    if folder is not None and measured.lines:
        picture = f"{name}.png"
        draw(name, measured, folder / picture)
    device = setting.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result = Result(
        name=name,
        sentence=claim.sentence,
        deck=claim.deck,
        criterion=claim.criterion,
        verdict=judged.verdict,
        why=judged.why,
        numbers=measured.numbers,
        seeds=list(setting.seeds),
        seconds=time.monotonic() - begun,
        command=command_of(name, setting),
        machine=f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        picture=picture,
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.json", json.dumps(asdict(result), indent=1) + "\n")
    return result


def draw(name: str, measured: Measured, path: Path) -> None:
    title = name.replace("-", " ").capitalize()
    up, across = measured.up, measured.across
    curves(measured.lines, title, up, path, across, logarithmic=measured.logarithmic)


def kept(name: str, setting: Setting, folder: Path) -> Result | None:
    """What the folder holds of this claim, if it was run with this setting."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        result = Result(**found)
    except (ValueError, TypeError):
        raise BadData(f"{path} is no result of a claim: delete it, and it is run again") from None
    return result if result.command == command_of(name, setting) else None
