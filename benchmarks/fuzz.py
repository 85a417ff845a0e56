"""Inputs that nobody meant, by the hundred thousand: prints what was neither answered nor refused.

    python benchmarks/fuzz.py --count 100000 --seed 1
    python benchmarks/fuzz.py --seed 1 --only midi --number 4711      # one case again

The cases and what must hold of them are those of tests/faults/fuzzing.py, of which `make test` does
a few. After them so many requests more are asked of both servers, and the memory of the process is
measured: it must not grow with their number.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests, which are no package of their own

from tests.faults.fuzzing import Inputs, Report, fuzz  # noqa: E402

# How many of a hundred cases are of each target.
SHARES = {
    "tokens": 30,
    "tokenizer.json": 5,
    "tables": 16,
    "midi": 14,
    "pictures": 10,
    "settings": 10,
    "metrics": 3,
    "view": 7,
    "serve": 5,
}
WARM_UP = 2_000
BLOCK = 1_000


def memory() -> float:
    """Megabytes that the process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def show(report: Report, seconds: float) -> None:
    failed = len(report.failures)
    print(
        f"{report.target:16}{report.answered:>9,} answered {report.refused:>9,} refused "
        f"{failed:>4} failed   {seconds:6.1f} s, slowest {report.slowest:.2f} s",
        flush=True,
    )
    for item in report.failures[:20]:
        print(
            f"  --only {item.target} --number {item.number}\n  given {item.given}\n  {item.error}"
        )


def run(inputs: Inputs, name: str, numbers: range, seed: int) -> int:
    begin = time.perf_counter()
    report = fuzz(name, inputs.targets[name], numbers, seed)
    show(report, time.perf_counter() - begin)
    return len(report.failures)


def requests(inputs: Inputs, count: int, seed: int) -> None:
    """Memory after a warm-up and after each thousand of requests to both servers."""
    megabytes = []
    for first in range(0, WARM_UP + count, BLOCK):
        for name in ("view", "serve"):
            # The same ones in each block: new shapes fill caches of torch, which are bounded.
            fuzz(name, inputs.targets[name], range(BLOCK // 2), seed + 1)
        if first + BLOCK >= WARM_UP:
            megabytes.append(memory())
            print(f"memory after {first + BLOCK:,} requests: {megabytes[-1]:.1f} MB", flush=True)
    print(
        f"grown by {megabytes[-1] - megabytes[0]:.1f} MB over {count:,} requests after {WARM_UP:,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=10_000, help="whose memory is measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SHARES)
    parser.add_argument("--number", type=int, help="of a case of the target")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        failed = 0
        for name, share in SHARES.items():
            if options.only in (None, name):
                numbers = range(options.count * share // 100)
                if options.number is not None:
                    numbers = range(options.number, options.number + 1)
                failed += run(inputs, name, numbers, options.seed)
        if options.only is None and options.requests:
            requests(inputs, options.requests, options.seed)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
