"""The runs of a folder, found anew at each request, and the models of the last few of them."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from manyheads.errors import UserError
from manyheads.exchange.huggingface import CONFIG
from manyheads.loading import TorchRun, load_run
from manyheads.run import SETTINGS
from manyheads.web.guard import check_asker
from manyheads.web.responses import Problem

OPEN_MODELS = 2
DEPTH = 2  # how far below the folder a run may lie
MOST_RUNS = 500
LOOKS_EVERY = 0.05  # seconds, while it waits, whether there is somebody to wait for


def holds_model(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() or (folder / CONFIG).is_file()


class Library:
    """Runs by name. A name is looked up among those that were found, and is never made a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[tuple[str, str], TorchRun] = OrderedDict()
        self._lock = Lock()

    def folders(self) -> dict[str, Path]:
        """The folder itself where it is a run, else the runs below it."""
        if holds_model(self.folder):
            return {self.folder.resolve().name: self.folder}
        found = {}
        for path in _below(self.folder, DEPTH):
            found[path.relative_to(self.folder).as_posix()] = path
            if len(found) == MOST_RUNS:
                break
        return found

    def find(self, name: str) -> Path:
        folder = self.folders().get(name)
        if folder is None:
            raise Problem(404, f"there is no run '{name[:80]}' here (any more)", "no-run")
        return folder

    def version(self, name: str) -> str:
        """Changes whenever a run writes weights that are to be used."""
        times = [path.stat().st_mtime_ns for path in self.find(name).glob("*.safetensors")]
        return f"{max(times, default=0):x}"

    @contextmanager
    def model(self, name: str) -> Iterator[TorchRun]:
        """The model of a run, for one thread at a time: who looks inside it changes its parts.

        Whoever waits for a client that has gone waits no longer.
        """
        folder, key = self.find(name), (name, self.version(name))
        with self._turn():
            if key not in self._open:
                self._open[key] = _torch_run(folder)
            self._open.move_to_end(key)
            while len(self._open) > OPEN_MODELS:
                self._open.popitem(last=False)
            yield self._open[key]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=LOOKS_EVERY):
            check_asker()
        try:
            check_asker()
            yield
        finally:
            self._lock.release()


def _torch_run(folder: Path) -> TorchRun:
    opened = load_run(folder)
    if not isinstance(opened, TorchRun):
        raise UserError(
            f"{folder.name} was exported, and cannot be looked into: view the run itself"
        )
    opened.model.eval()
    return opened


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # gone, or not ours to read
        return
    for path in inside:
        if holds_model(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _below(path, depth - 1)
