"""Plug-ins: parts of a user's own that settings, recipes and run folders know by name.

A plug-in is a Python file with `PLUGIN = Plugin(positions=[...], metrics=[...])`. The user passes
it with `--plugin FILE` or `use(FILE)`, or installs a package with an entry point of the group
`manyheads.plugins`. A run folder records the name and the checksum of each plug-in that it needs,
and no code: loading a run imports nothing that the user did not pass or install.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from manyheads.config import extend
from manyheads.errors import UserError
from manyheads.evaluate.scores import METRICS, Metric
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.experts import FeedForwardConfig
from manyheads.nn.positions import PositionConfig
from manyheads.nn.scores import ScoreConfig
from manyheads.tasks.spec import TaskSpec
from manyheads.tasks.table import TASKS, Data

__all__ = ["Metric", "Plugin", "use"]
GROUP = "manyheads.plugins"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The parts of a plug-in: settings classes, each with a `kind`, rows of tasks, metrics.

    A data class derives from the data that its task takes, e.g. `FilesData` for translation.
    """

    positions: Sequence[type] = ()
    scores: Sequence[type] = ()
    attentions: Sequence[type] = ()
    feedforwards: Sequence[type] = ()
    data: Sequence[type] = ()
    tasks: Sequence[TaskSpec] = ()
    metrics: Sequence[Metric] = ()

    def register(self) -> None:
        choices = {
            PositionConfig: self.positions,
            ScoreConfig: self.scores,
            AttentionFunctionConfig: self.attentions,
            FeedForwardConfig: self.feedforwards,
            Data: self.data,
        }
        for union, parts in choices.items():
            for part in parts:
                extend(union, part)
        for row in self.tasks:
            if any(row.task == other.task for other in TASKS.values()):
                raise UserError(f"there is a task={row.task} already: choose another name")
            TASKS[row.task] = row
        METRICS.extend(self.metrics)

    def is_needed(self, run: Any) -> bool:
        """True if settings have a part of this plug-in."""
        types = set(_types(run))
        parts = (self.positions, self.scores, self.attentions, self.feedforwards, self.data)
        has_task = run.task in [row.task for row in self.tasks]
        return has_task or any(part in types for group in parts for part in group)


@dataclass(frozen=True)
class Loaded:
    """A plug-in in use; `source` is its file, or the package that has its entry point."""

    name: str
    source: str
    checksum: str
    plugin: Plugin


LOADED: dict[str, Loaded] = {}  # by name


def _types(config: Any) -> Iterator[type]:
    """The settings classes inside a configuration."""
    yield type(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _types(value)


def use(file: str | Path) -> None:
    """Import the plug-in in a Python file; its parts join the choices of the settings."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"there is no plug-in {path}: pass a Python file")
    spec = importlib.util.spec_from_file_location(f"manyheads_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"the plug-in {path} is not a Python file (.py)")
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def load() -> ModuleType:
        sys.modules[module.__name__] = module  # dataclasses look their types up there
        loader.exec_module(module)
        return module

    _add(path.stem, str(path), path, load)


@functools.cache
def use_installed() -> None:
    """Import the plug-ins of installed packages, once."""
    for entry in entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        spec = importlib.util.find_spec(entry.module)
        file = Path(spec.origin) if spec is not None and spec.origin else None
        _add(entry.name, f"package {package}", file, entry.load)


def _add(name: str, source: str, file: Path | None, load: Callable[[], Any]) -> None:
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file is not None else ""
    if name in LOADED:
        if LOADED[name].checksum == checksum:
            return
        raise UserError(f"two plug-ins are called {name}, {LOADED[name].source} and {source}")
    try:
        result = load()
        plugin = getattr(result, "PLUGIN", result)
        if not isinstance(plugin, Plugin):
            raise UserError("it has no PLUGIN = Plugin(...)")
        plugin.register()
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"the plug-in {source} does not load ({reason}): fix it") from None
    LOADED[name] = Loaded(name, source, checksum, plugin)


def record(run: Any) -> dict[str, Any]:
    """The table of run.toml that names the plug-ins of a run; empty if it needs none."""
    needed = [loaded for loaded in LOADED.values() if loaded.plugin.is_needed(run)]
    table = {loaded.name: {"source": loaded.source, "sha256": loaded.checksum} for loaded in needed}
    return {"plugins": table} if table else {}


def require(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings in a file, without its table of plug-ins; refused if one is not in use."""
    use_installed()
    needed = table.get("plugins", {})
    for name, entry in needed.items() if isinstance(needed, dict) else ():
        about = entry if isinstance(entry, dict) else {}
        source = str(about.get("source", name))
        if name not in LOADED:
            is_package = source.startswith("package ")
            fix = f"install {source}" if is_package else f"add --plugin {source}"
            raise UserError(f"{path} needs the plug-in {name}: {fix}")
        if LOADED[name].checksum != about.get("sha256"):
            _warn(f"the plug-in {name} ({LOADED[name].source}) is not the one {path} was made with")
    return {key: value for key, value in table.items() if key != "plugins"}


@functools.cache
def _warn(line: str) -> None:
    print(line, file=sys.stderr)
