"""Runs claims, saves their results, and resumes after an interruption."""

import ast
import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from manyheads import __version__
from manyheads.config import nearest
from manyheads.errors import DataError, UserError
from manyheads.fileio import check_sum, write_text
from manyheads.lab.claims import lectures
from manyheads.lab.claims.claim import WORDS, Claim, Measured, Setting
from manyheads.lab.figures.plots import curves
from manyheads.train.metrics import Bar

PACKAGE = "manyheads.lab.claims."
PICTURES = "claims"  # the folder of plots, next to the pages


def claims() -> dict[str, Claim]:
    """All claims by name, which is the name of the file with hyphens."""
    names = sorted(module.name for module in iter_modules(lectures.__path__))
    return {
        name.replace("_", "-"): import_module(f"{lectures.__name__}.{name}").CLAIM for name in names
    }


def find(name: str) -> Claim:
    known = claims()
    if name not in known:
        raise UserError(f"unknown claim '{name}': {nearest(name, list(known))}")
    return known[name]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The verdict and numbers of a claim, the command that repeats it, and a check sum of the code.

    `deck` has the lectures, by keys of `LECTURES`. `picture` is a path in the report's folder.
    """

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
    release: str
    threads: int
    code: str
    picture: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; JSON has no infinite numbers, so these become "inf" and "nan"."""
        numbers = {
            name: [value if isfinite(value) else str(value) for value in values]
            for name, values in self.numbers.items()
        }
        return asdict(self) | {"numbers": numbers}

    @classmethod
    def of_json(cls, table: Mapping[str, Any]) -> "Result":
        numbers = {name: list(map(float, values)) for name, values in table["numbers"].items()}
        return cls(**{**table, "numbers": numbers})


def command_of(what: str, setting: Setting) -> str:
    """The command that repeats a run; `what` is the option that selects the claims."""
    words = ["manyheads claims", what, f"--seeds {','.join(map(str, setting.seeds))}"]
    words += ["--large"] if setting.large else []
    words.append(f"--device {setting.device.type}")
    words += [] if setting.threads is None else [f"--threads {setting.threads}"]
    return " ".join(words)


def code_of(claim: Claim) -> str:
    """A check sum of the claim's file and of the modules of this package that it imports.

    Models are not included: after a change to a model, run its claims again with `--again`.
    """
    return _code(claim.measure.__module__, claim.judge.__module__)


@cache  # the code as loaded, even if the files change while it runs
def _code(*names: str) -> str:
    sources: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = inspect.getsource(sys.modules[module])
            waiting += _imported_modules(sources[module])
    return check_sum("".join(sources[module] for module in sorted(sources)).encode())


def _imported_modules(source: str) -> list[str]:
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    named = [node.module or "" for node in imports]
    named += [f"{node.module}.{name.name}" for node in imports for name in node.names]
    return [name for name in named if name.startswith(PACKAGE) and name in sys.modules]


def run(name: str, setting: Setting, folder: Path | None = None) -> Result:
    """Measure and judge a claim; with a folder, save the result and the plot there."""
    claim = find(name)
    code, allocated = code_of(claim), _allocated(setting.device)
    begun = time.monotonic()
    measured = claim.measure(setting)
    judged = claim.judge(measured)
    seconds = time.monotonic() - begun
    used = _allocated(setting.device) > allocated
    machine = torch.cuda.get_device_name(setting.device) if used else "CPU"
    threads = torch.get_num_threads()
    result = Result(
        name=name,
        sentence=claim.sentence,
        deck=claim.deck,
        criterion=claim.criterion,
        verdict=judged.verdict,
        why=judged.why,
        numbers=measured.numbers,
        seeds=list(setting.seeds),
        seconds=seconds,
        command=command_of(f"--run {name}", setting),
        machine=f"{machine}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}",
        release=__version__,
        threads=threads,
        code=code,
        picture=f"{PICTURES}/{name}.png" if folder is not None and measured.lines else None,
    )
    if folder is not None:
        _keep(result, measured, folder)
    return result


class Interrupted(UserError):
    """Ctrl-C ended a series of experiments."""

    exit_code = 130


def run_all(
    names: Sequence[str], setting: Setting, report: Path | None, *, again: bool
) -> list[Result]:
    """Results one after another, from the folder if it has them; each is saved there."""
    results = []
    with Bar("claims", len(names)) as bar:
        for done, name in enumerate(names):
            bar.update(done, name)
            saved = None if again or report is None else kept(name, setting, report)
            try:
                results.append(saved or run(name, setting, report))
            except KeyboardInterrupt:
                where = (
                    "nothing is saved without --report" if report is None else f"saved: {report}"
                )
                raise Interrupted(f"stopped in {name}; {where}; the same command resumes") from None
            bar.say(f"{name}: {WORDS[results[-1].verdict]}; {results[-1].why}")
        bar.update(len(names), "done")
    return results


def as_rows(known: Mapping[str, Claim]) -> list[dict[str, str]]:
    """The claims as plain values."""
    keys = ("sentence", "deck", "criterion")
    return [{"name": name} | {k: getattr(claim, k) for k in keys} for name, claim in known.items()]


def _allocated(device: torch.device) -> int:
    """Bytes ever allocated on a GPU; a claim that leaves this unchanged has not used the GPU."""
    if device.type != "cuda":
        return 0
    count: int = torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0)
    return count


def _keep(result: Result, measured: Measured, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if result.picture is not None:
        draw(result.name, measured, folder / result.picture)
    text = json.dumps(result.as_json(), indent=1, allow_nan=False)
    write_text(folder / f"{result.name}.json", text + "\n")


def draw(name: str, measured: Measured, path: Path) -> None:
    title = name.replace("-", " ").capitalize()
    up, across = measured.up, measured.across
    curves(measured.lines, title, up, path, across, logarithmic=measured.logarithmic)


def kept(name: str, setting: Setting, folder: Path) -> Result | None:
    """The saved result of this claim, if setting, code and release of the run are the same."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    try:
        table = dict(json.loads(path.read_text(encoding="utf-8")))
        if table.keys() != {field.name for field in fields(Result)}:
            return None  # another version saved other fields
        result = Result.of_json(table)
    except (ValueError, TypeError, AttributeError):
        raise DataError(
            f"{path} is not the result of a claim: delete it to run the claim again"
        ) from None
    current = (
        result.command == command_of(f"--run {name}", setting)
        and result.threads == torch.get_num_threads()
        and result.code == code_of(find(name))
        and result.release == __version__
        and (result.picture is None or (folder / result.picture).is_file())
    )
    return result if current else None
