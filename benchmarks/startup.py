"""Seconds from the start of a process to its first generated text, with empty caches and again.

    python benchmarks/startup.py                       # 124M and 1.3B, on a GPU
    python benchmarks/startup.py --tiny --device cpu   # a small model, anywhere

The first process of a row finds no cache: it compiles kernels and runs their self-tests. The second
one finds what the first has stored. Weights are random. Each row is printed when it is measured; a
process that exceeds --limit seconds is an error. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from manyheads.models.gpt import GptConfig
from manyheads.presets import preset
from manyheads.run import Run, save_run
from manyheads.tokenizer.tokenizer import Tokenizer

CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
SIZES = {"124M": "gpt3-small", "1.3B": "gpt3-xl"}


def byte_tokenizer(size: int) -> Tokenizer:
    """A token for each byte, the special tokens, and words that no text has, up to `size`."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"w{number}" for number in range(len(names), size)]
    vocabulary = {name: number for number, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(names[:4])
    return Tokenizer(library)


def save_random(name: str, folder: Path, tiny: bool = False) -> None:
    """A language model of this size with random weights as a run folder."""
    config = preset(SIZES[name])
    assert isinstance(config, GptConfig)
    config = replace(config, vocab_size=50_257, max_length=1024)
    if tiny:
        config = replace(config, vocab_size=300, dim=32, layers=2, heads=2, max_length=128)
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = config.build()
    run = Run(task="language", data=None, tokens=None, model=config)
    save_run(run, byte_tokenizer(config.vocab_size), model.cpu(), folder)


def first_text(folder: Path, caches: Path, device: str, limit: float) -> dict[str, Any]:
    """Seconds until a process has printed more than its prompt, and until it ends."""
    prompt, printed = "The cat", 0
    command = [sys.executable, "-m", "manyheads", "generate", str(folder), "--prompt", prompt]
    command += ["--max-new-tokens", "64", "--min-new-tokens", "64", "--device", device]
    command += ["--dtype", "bfloat16"] if device == "cuda" else []
    environment = os.environ | {name: str(caches / name) for name in CACHES}
    began, first = time.monotonic(), float("nan")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdout.fileno(), False)
        while process.poll() is None and time.monotonic() - began < limit:
            printed += len(process.stdout.read(100) or b"")
            if first != first and printed > len(prompt) + 1:  # with a line end
                first = time.monotonic() - began
            time.sleep(0.005)
        total = time.monotonic() - began
        process.kill()
        messages = process.stderr.read().decode(errors="replace").strip().splitlines()
    result = {"first_text_seconds": round(first, 2), "seconds": round(total, 2)}
    if process.returncode != 0:
        result["error"] = messages[-1] if messages else f"took longer than {limit:g} s"
    return result | {"messages": messages[-3:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a process")
    parser.add_argument("--tiny", action="store_true", help="small models: the program itself")
    inputs = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in inputs.sizes:
            folder = Path(temporary) / name
            save_random(name, folder, inputs.tiny)
            for process in ("first", "second", "third"):
                where = folder, Path(temporary) / f"caches-{name}", inputs.device, inputs.limit
                rows[f"{name}, {process} process"] = row = first_text(*where)
                print(json.dumps({"row": f"{name}, {process} process", **row}), flush=True)
    print(json.dumps({"bench": "startup", "device": inputs.device, "rows": rows}))


if __name__ == "__main__":
    main()
