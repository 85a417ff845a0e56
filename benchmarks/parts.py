"""Our kernels for parts of a block beside what PyTorch makes of the same, compiled or not.

    python benchmarks/parts.py            all on a GPU
    python benchmarks/parts.py norm feed  some of them

`norm`: dropout 0.1, sum and layer norm of a training step, both passes (kernels/layer_norm.py).
`feed`: the feed-forward part of one (kernels/mlp.py).
`decode_attention`: one query a head over the keys of a cache (kernels/decode_attention.py).
`single`: a matrix times one row (kernels/gemv.py).
`loss`: logits become the gradient of their loss (kernels/cross_entropy.py).
`join`: gradients of queries, keys and values side by side, and their sum (kernels/qkv.py).

Bfloat16, as CUDA graphs, in turns, medians. One JSON object a line, with `ideal`: milliseconds for
what has to be read and written, at the speed of a large copy.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import compared

NORMS = ((32_768, 768), (28_000, 512))  # rows, width
FEEDS = ((28_000, 512, "relu"), (32_768, 768, "gelu"), (32_768, 1024, "gelu-tanh"))
GLANCES = ((1, 12, 1, 256, 64), (1, 12, 1, 1024, 64), (1, 16, 1, 256, 128), (64, 8, 5, 320, 64))
SINGLES = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50_257, 768), (8192, 2048))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
}
LOSSES = ((8192, 50_257, 50_304), (8192, 37_000, 37_056))  # rows, classes, columns
JOINS = ((32, 12, 1024, 64), (32, 16, 1024, 64))  # batch, heads, length, channels
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


def norms(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.layer_norm import add_norm

    for rows, width in NORMS:
        inputs = [drawn(rows, width), drawn(rows, width)]
        inputs += [torch.ones(width, device="cuda"), torch.zeros(width, device="cuda")]
        inputs = [x.requires_grad_() for x in inputs]

        def ours(x: Tensor, f: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            seed = torch.randint(2**62, (1,), device="cuda")
            output: Tensor = add_norm(x, f, weight, bias, seed, 0.1, 1e-5)[0]
            return output

        def plain(x: Tensor, f: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            summed = (x + F.dropout(f, 0.1)).float()
            return F.layer_norm(summed, weight.shape, weight, bias).bfloat16()

        torch._dynamo.reset()
        runs = {"ours": ours, "compiled": torch.compile(plain), "plain": plain}
        about = {"part": "norm", "rows": rows, "width": width, "bytes": 16 * rows * width}
        yield about | compared(runs, inputs, True, rounds)


def feeds(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.mlp import fused_mlp

    for rows, width, kind in FEEDS:
        hidden = 4 * width
        inputs = [drawn(rows, width), drawn(hidden, width) / 20, drawn(hidden)]
        inputs += [drawn(width, hidden) / 20, drawn(width)]
        inputs = [x.requires_grad_() for x in inputs]

        def ours(*tensors: Tensor, kind: str = kind) -> Tensor:
            output: Tensor = fused_mlp(*tensors, kind)[0]
            return output

        def plain(
            x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kind: str = kind
        ) -> Tensor:
            return F.linear(ACTIVATIONS[kind](F.linear(x, w1, b1)), w2, b2)

        torch._dynamo.reset()
        runs = {"ours": ours, "compiled": torch.compile(plain), "plain": plain}
        about = {"part": "feed", "rows": rows, "width": width, "activation": kind}
        about["teraflop"] = 12 * rows * width * hidden / 1e12
        yield about | compared(runs, inputs, True, rounds)


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
        runs = {"ours": lambda *x: gemv(*x, -1, None), "plain": F.linear}
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


def _first(call: Callable[..., Any], *tensors: Tensor) -> Tensor:
    output: Tensor = call(*tensors)[0]
    return output


def joins(rounds: int) -> Iterator[Row]:
    from manyheads.kernels.qkv import pack_qkv_grad

    for batch, heads, length, head in JOINS:
        tensors = [drawn(batch, heads, length, head) for _ in range(3)]

        def apart(*parts: Tensor) -> tuple[Tensor, Tensor]:
            full = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
            return full, full.float().sum((0, 1))

        torch._dynamo.reset()
        runs = {
            name: partial(_first, item)
            for name, item in (("ours", pack_qkv_grad), ("compiled", torch.compile(apart)))
        }
        about = {"part": "join", "batch": batch, "heads": heads, "length": length}
        about |= {"head_dim": head, "bytes": 12 * batch * heads * length * head}
        yield about | compared(runs, tensors, False, rounds)


PARTS = {
    "norm": norms,
    "feed": feeds,
    "decode_attention": glances,
    "single": singles,
    "loss": losses,
    "join": joins,
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
