"""The runs in a folder, listed at each request, and a cache of their models.

`run@step` names a run with the weights of a step, if train.probe_weights kept them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from manyheads.exchange.huggingface import CONFIG
from manyheads.loading import LoadedRun, load_run
from manyheads.run import SETTINGS
from manyheads.tasks.probes import FOLDER as PROBES
from manyheads.tasks.probes import WEIGHTS
from manyheads.train.checkpoint import read_tensors
from manyheads.web.guard import check_client
from manyheads.web.responses import Problem

OPEN_MODELS = 2
DEPTH = 2  # how deep in the folder a run may be
MOST_RUNS = 500
POLL_SECONDS = 0.05  # how often a waiting request checks that its client is still connected


def holds_model(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() or (folder / CONFIG).is_file()


class Library:
    """Runs by name. Names are looked up in the listing and never used as paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[tuple[str, str], LoadedRun] = OrderedDict()
        self._lock = Lock()

    def folders(self) -> dict[str, Path]:
        """The folder itself if it is a run, else the runs inside it."""
        if holds_model(self.folder):
            return {self.folder.resolve().name: self.folder}
        by_name = {}
        for path in _below(self.folder, DEPTH):
            by_name[path.relative_to(self.folder).as_posix()] = path
            if len(by_name) == MOST_RUNS:
                break
        return by_name

    def find(self, name: str) -> Path:
        """The folder of a run; that of `run` for the name `run@step`."""
        folders = self.folders()
        folder = folders.get(name) or folders.get(_split(name)[0])
        if folder is None:
            raise Problem(404, f"run '{name[:80]}' not found", "no-run")
        return folder

    def _snapshot(self, name: str) -> Path | None:
        """The weights that the name `run@step` stands for; None for the last weights of a run."""
        if name in self.folders():
            return None
        run, step = _split(name)
        path = self.find(run) / PROBES / WEIGHTS / f"{step}.safetensors"
        if not step.isdecimal() or not path.is_file():
            raise Problem(
                404,
                f"no weights of step {step[:20]}: train with train.probe_weights=true",
                "no-weights",
            )
        return path

    def version(self, name: str) -> str:
        """Changes whenever the weights of a run change."""
        times = [path.stat().st_mtime_ns for path in self.find(name).glob("*.safetensors")]
        return f"{max(times, default=0):x}"

    @contextmanager
    def model(self, name: str) -> Iterator[LoadedRun]:
        """The model of a run, for one thread at a time, because hooks change the model.

        A request whose client has disconnected stops waiting.
        """
        folder, key = self.find(name), (name, self.version(name))
        with self._turn():
            if key not in self._open:
                self._open[key] = _torch_run(folder, self._snapshot(name))
            self._open.move_to_end(key)
            while len(self._open) > OPEN_MODELS:
                self._open.popitem(last=False)
            yield self._open[key]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=POLL_SECONDS):
            check_client()
        try:
            check_client()
            yield
        finally:
            self._lock.release()


def _split(name: str) -> tuple[str, str]:
    run, _, step = name.rpartition("@")
    return run, step


def _torch_run(folder: Path, snapshot: Path | None = None) -> LoadedRun:
    opened = load_run(folder)
    if snapshot is not None:
        tensors, _ = read_tensors(snapshot)
        opened.model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    opened.model.eval()
    return opened


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # deleted, or no permission
        return
    for path in inside:
        if holds_model(path):
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _below(path, depth - 1)
