"""Our kernels for parts of a block beside what PyTorch makes of the same, compiled or not.

    python benchmarks/parts.py            all on a GPU
    python benchmarks/parts.py single     some of them

`decode_attention`: one query a head over the keys of a cache (kernels/decode_attention.py).
`single`: a matrix times one row (kernels/gemv.py).
`loss`: logits become the gradient of their loss (kernels/softmax_grad.py).

Bfloat16, as CUDA graphs, in turns, medians. One JSON object a line, with `ideal`: milliseconds
to read the inputs and write the outputs, at the speed of a large copy.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import compared

GLANCES = ((1, 12, 1, 256, 64), (1, 12, 1, 1024, 64), (1, 16, 1, 256, 128), (64, 8, 5, 320, 64))
SINGLES = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50_257, 768), (8192, 2048))
LOSSES = ((8192, 50_257, 50_304), (8192, 37_000, 37_056))  # rows, classes, columns
Row = dict[str, Any]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def copy_speed() -> float:
    """Bytes a second, read and written."""
    a = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    b, seconds = torch.empty_like(a), []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return 2 * a.numel() / statistics.median(seconds)


def glances(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.decode_attention import decode_attention

    for rows, heads, queries, keys, width in GLANCES:
        inputs = [drawn(rows, heads, n, width) for n in (queries, keys, keys)]
        seen = torch.arange(keys, device="cuda").expand(rows, 1, queries, -1) < keys * 3 // 4
        seen = seen.contiguous()
        added = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill_(~seen, -torch.inf)
        runs = {
            "ours": lambda q, k, v, seen=seen, c=width: decode_attention(q, k, v, seen, c**-0.5),
            "plain": lambda q, k, v, added=added: F.scaled_dot_product_attention(q, k, v, added),
        }
        about = {"part": "decode_attention", "batch": rows, "heads": heads, "queries": queries}
        about |= {"keys": keys, "head_dim": width, "bytes": 4 * rows * heads * keys * width}
        yield about | compared(runs, inputs, False, rounds)


def singles(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.gemv import gemv

    for outputs, inputs in SINGLES:
        tensors = [drawn(1, 1, inputs), drawn(outputs, inputs), drawn(outputs)]
        runs = {"ours": lambda *x: gemv(*x), "plain": F.linear}
        about = {"part": "single", "outputs": outputs, "inputs": inputs}
        yield about | {"bytes": 2 * outputs * inputs} | compared(runs, tensors, False, rounds)


def losses(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.softmax_grad import cross_entropy_grad

    for rows, classes, columns in LOSSES:
        logits = drawn(rows, columns)
        expected = torch.randint(classes, (rows,), device="cuda")

        def ours(z: Tensor, expected: Tensor = expected, classes: int = classes) -> Tensor:
            return cross_entropy_grad(z, expected, classes, 0.0, True)[0]

        def plain(z: Tensor, expected: Tensor = expected, classes: int = classes) -> Tensor:
            precise = z[:, :classes].float()
            local = torch.arange(classes, device="cuda") == expected[:, None]
            z[:, :classes] = precise.softmax(-1) - local.float()
            return F.cross_entropy(precise, expected, reduction="sum")

        torch._dynamo.reset()
        runs = {"ours": ours, "compiled": torch.compile(plain)}
        about = {"part": "loss", "rows": rows, "classes": classes}
        yield about | {"bytes": 4 * rows * columns} | compared(runs, [logits], False, rounds)


PARTS = {
    "decode_attention": glances,
    "single": singles,
    "loss": losses,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"there is no {name}: choose among {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("these kernels are for a GPU, and there is none")
    torch.manual_seed(1)
    speed = copy_speed()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for name in arguments.parts:
        for row in PARTS[name](arguments.rounds):
            moved = row.pop("bytes", None)
            if moved is not None:
                row["ideal"] = round(1000 * moved / speed, 4)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
