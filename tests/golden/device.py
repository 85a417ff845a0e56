"""The golden record of a CUDA device: bfloat16 training and float32 generation.

    python -m tests.golden.device --out DIR [--device cuda]

writes DIR/device.json; copy it to tests/golden/record/device.json. The record is made from 0.1
and never edited by hand. Training is by default in bfloat16 with CUDA graphs. Texts are
generated in float32 from the run folders that 0.1 wrote on a CPU, so that they depend on the
decoder only. A run that fails is recorded as an error, and the others continue.
"""

import argparse
import json
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tests.golden.harness import RECORD, Workspace, read_metrics, run_command
from tests.golden.record import LANGUAGE_COMMANDS, LANGUAGE_FOLDER, RUN_FOLDER, dumps
from tests.golden.runs import BEAM, DEVICE_RUNS, GREEDY, by_name

PRECISIONS = ("bfloat16", "float32")
LOSS_TOLERANCES = {"bfloat16": 2e-2, "float32": 2e-3}  # relative
TEXTS = {
    "translate": (RUN_FOLDER, (GREEDY, BEAM)),
    "generate": (LANGUAGE_FOLDER, LANGUAGE_COMMANDS[:1]),
}


def train(name: str, precision: str, root: Path, device: str) -> dict[str, Any]:
    """The losses of one run."""
    space = Workspace(root / precision, device)
    return read_metrics(space.train(by_name()[name], f"train.precision={precision}"))


def texts(kind: str, root: Path, device: str) -> dict[str, Any]:
    """What a run folder of 0.1 generates in float32, without the scores of n-best lists."""
    source, commands = TEXTS[kind]
    folder = root / f"texts-{kind}"
    shutil.copytree(source, folder)
    place = ("--threads", "1", "--device", device)
    result = {one.key: run_command(folder, one, place, root) for one in commands}
    return {key: [line.rpartition(" ||| ")[0] or line for line in found]
            for key, found in result.items()}  # fmt: skip


def fingerprint(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"torch": torch.__version__, "device": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"fingerprint": fingerprint(options.device), "runs": {}, "texts": {}}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        jobs = [
            ("runs", f"{name} {precision}", train, (name, precision))
            for precision in PRECISIONS
            for name in DEVICE_RUNS
        ]
        jobs += [("texts", kind, texts, (kind,)) for kind in TEXTS]  # type: ignore[list-item]
        for part, key, work, arguments in jobs:
            start = time.monotonic()
            try:
                record[part][key] = work(*arguments, root, options.device)  # type: ignore[call-arg]
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed = True
                record.setdefault("errors", {})[key] = str(error)[-500:]
                traceback.print_exc()
            print(f"{key}: {time.monotonic() - start:.1f} s", flush=True)
            text = dumps(record)  # after each job: a limit of time leaves what is there
            assert json.loads(text) == record
            (options.out / "device.json").write_text(text, encoding="utf-8")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
