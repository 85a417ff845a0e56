"""Endpoints that train the demo from the page, in a process of its own, one at a time."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.web.library import Library, holds_model
from manyheads.web.responses import Fields, Problem
from manyheads.web.runs import summary

NAME = "demo"
COMMAND = ("demo",)  # of manyheads
STOP_SECONDS = 30  # to save a checkpoint
MESSAGE_BYTES = 300  # at the end of the process's messages


class DemoTraining:
    """`manyheads demo` below a folder of runs."""

    def __init__(self, folder: Path, *, is_local: bool) -> None:
        self.folder, self.is_local = folder, is_local
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: Any = None
        self._lock = Lock()

    @property
    def out(self) -> Path:
        return self.folder / NAME

    def refusal(self) -> str:
        """Why the demo cannot be trained; empty if it can."""
        if not self.is_local:
            return "the server listens beyond this computer: train in a terminal, `manyheads demo`"
        if self._is_running():
            return "the demo is being trained: stop it first"
        if holds_model(self.folder):
            return "the server shows one run: start `manyheads view` with a folder of runs"
        if self.out.exists():
            return f"{NAME} exists already: resume it with `manyheads demo`, or delete its folder"
        return ""

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self._lock:
            reason = self.refusal()
            if reason:
                raise Problem(409 if self.is_local else 403, reason, "training")
            self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (open while it trains)
            command = [sys.executable, "-m", "manyheads", *COMMAND, "--out", str(self.out)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._messages, stderr=self._messages
            )

    def stop(self) -> None:
        """Interrupt the training, which saves a checkpoint; wait for its end."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                return
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def status(self, library: Library) -> dict[str, Any]:
        """State, step and steps; `reason` if a training cannot be started, `error` if it failed."""
        code = None if self._process is None else self._process.poll()
        state = "running" if self._is_running() else "idle" if code is None else "ended"
        run = library.folders().get(NAME)
        about = {} if run is None else summary(NAME, run)
        answer = {"run": NAME, "state": state, "listed": run is not None, "reason": self.refusal()}
        answer |= {"step": about.get("step") or 0, "steps": about.get("steps"), "error": ""}
        if code is not None and code > 0 and code != 128 + signal.SIGINT:
            answer["error"] = self._last_message()
        return answer

    def _last_message(self) -> str:
        self._messages.seek(max(0, self._messages.seek(0, 2) - MESSAGE_BYTES))
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the training failed: see the terminal of the server"


async def training(request: Request) -> Response:
    """GET: whether the demo is being trained, and how far it is."""
    state = request.app.state
    return JSONResponse(await run_in_threadpool(state.training.status, state.library))


async def start(request: Request) -> Response:
    """POST {}: train the demo."""
    await Fields.of_body(request)
    state = request.app.state
    await run_in_threadpool(state.training.start)
    return JSONResponse(await run_in_threadpool(state.training.status, state.library))


async def stop(request: Request) -> Response:
    """POST {}: stop the training."""
    await Fields.of_body(request)
    state = request.app.state
    await run_in_threadpool(state.training.stop)
    return JSONResponse(await run_in_threadpool(state.training.status, state.library))


ROUTES = [
    Route("/api/training", training),
    Route("/api/training/start", start, methods=["POST"]),
    Route("/api/training/stop", stop, methods=["POST"]),
]
