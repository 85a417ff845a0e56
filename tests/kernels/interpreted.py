"""Our own kernels on a CPU: by Triton's interpreter, where Triton is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def interpret(program: str) -> None:
    """In a process of its own: whether kernels are interpreted is decided at Triton's import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)
