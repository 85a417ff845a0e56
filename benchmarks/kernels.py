"""Our choice of a fused kernel against each of PyTorch's, and our kernel against FlexAttention.

    python benchmarks/kernels.py fused  [--lengths 1024,4096,16384] [--rounds 7]
    python benchmarks/kernels.py biased [--lengths 1024,4096,16384] [--rounds 7]
    python benchmarks/kernels.py short  --lengths 16,24,32,48,64 [--rounds 7]

`fused`: model.attention=fused against every backend of scaled_dot_product_attention that runs here.
`biased`: T5's buckets, whose table is trained, by our kernel, by FlexAttention and by the fused
core with a matrix of n × n.
`short`: our kernel for short texts against PyTorch's, causal or with a quarter of the keys padding,
as CUDA graphs, since launching them would take longer.

Bfloat16, 16,384 tokens a batch and a width of 2,048 in all cases, rounds interleaved and in turns,
medians of many calls each, fewer where they are long. One JSON object a line.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from manyheads.nn.attention import AttentionInputs, Fused
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import Buckets, Position, PositionSizes, bias_by_distance
from manyheads.nn.scores import ScaledDot

TOKENS, WIDTH = 16384, 2048
REPLAYS = 20  # replays of a CUDA graph that are timed together
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def times(
    runs: dict[str, Run], inputs: list[Tensor], expected: list[Tensor], rounds: int
) -> dict[str, float]:
    """Seconds of one call of each with the gradients wanted, the median of interleaved rounds."""
    seconds: dict[str, list[float]] = {}
    direction = torch.randn_like(inputs[0])
    calls = 50 * 1024 // inputs[0].shape[2] + 2
    for number in range(rounds + 1):
        order = list(runs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            run = runs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                torch.cuda.synchronize()
                begin.record()
                for _ in range(calls):
                    if expected:
                        out = run(*inputs)
                        torch.autograd.grad(out, expected, direction)
                    else:
                        with torch.no_grad():
                            run(*inputs)
                end.record()
                torch.cuda.synchronize()
            except RuntimeError as error:
                if number == 0:
                    print(json.dumps({"left_out": name, "why": str(error).split("\n")[0][:120]}))
                continue
            if number:  # the first round compiles
                seconds.setdefault(name, []).append(begin.elapsed_time(end) / 1000 / calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


def tensors(length: int, head_dim: int) -> list[Tensor]:
    torch.manual_seed(1)
    shape = (TOKENS // length, WIDTH // head_dim, length, head_dim)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def fused(length: int, head_dim: int, past: bool, rounds: int) -> list[dict[str, object]]:
    inputs = tensors(length, head_dim)
    mask = make_mask(causal if past else full, length, device="cuda")
    score, position = ScaledDot().build(WIDTH // head_dim, head_dim), Position()
    runs: dict[str, Run] = {
        "ours": lambda q, k, v: Fused()(AttentionInputs(q, k, v, mask, score, position))
    }
    for name, backend in BACKENDS.items():

        def theirs(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=past)

        runs[name] = theirs
    flops = 4 * TOKENS * length * WIDTH / (2 if past else 1)
    rows: list[dict[str, object]] = []
    for train in (False, True):
        seconds = times(runs, inputs, inputs if train else [], rounds)
        work = flops * (3.5 if train else 1)
        best = min(value for name, value in seconds.items() if name != "ours")
        rows.append(
            {
                "length": length,
                "head_dim": head_dim,
                "causal": past,
                "pass": "forward and backward" if train else "forward",
                "teraflops": {name: round(work / item / 1e12) for name, item in seconds.items()},
                "of_the_best": round(best / seconds["ours"], 3),
            }
        )
    return rows


def biased(length: int, head_dim: int, past: bool, rounds: int) -> list[dict[str, object]]:
    from manyheads.kernels.biased_attention import biased_attention

    torch._dynamo.reset()  # each shape its own kernel, none for all shapes
    heads = WIDTH // head_dim
    sizes = PositionSizes(dim=WIDTH, heads=heads, head_dim=head_dim, max_length=length, causal=past)
    position = Buckets().build(sizes).cuda().bfloat16()
    inputs = tensors(length, head_dim)
    flex = torch.compile(flex_attention)
    make_blocks = torch.compile(create_block_mask)

    def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = bias_by_distance(position, q)

        def add(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias[head, key - query + length - 1]

        blocks = None
        if past:
            blocks = make_blocks(lambda row, head, i, j: j <= i, None, None, length, length)
        out: Tensor = flex(q, k, v, score_mod=add, block_mask=blocks, scale=head_dim**-0.5)
        return out

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = bias_by_distance(position, q)
        assert bias is not None
        return biased_attention(q, k, v, bias, None, past, head_dim**-0.5)

    def matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(length, device="cuda")[None]
        bias = position.score(q, places, places)
        assert bias is not None
        if past:
            bias = bias.masked_fill(places > places.mT, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    runs: dict[str, Run] = {
        "ours": local,
        "flex": flexible,
        "matrix": matrix,
    }
    results = {name: run(*inputs) for name, run in runs.items() if name != "matrix"}
    apart = float((results["ours"] - results["flex"]).detach().abs().max())
    del results
    if length > 4096:
        del runs["matrix"]
    rows: list[dict[str, object]] = []
    for kind in ("forward", "forward and backward", "with the table's gradient"):
        for parameter in position.parameters():
            parameter.requires_grad_(kind.startswith("with"))
        expected = [] if kind == "forward" else inputs
        if kind.startswith("with"):
            expected = [*inputs, *position.parameters()]
        seconds = times(runs, inputs, expected, rounds)
        rows.append(
            {
                "length": length,
                "head_dim": head_dim,
                "causal": past,
                "pass": kind,
                "milliseconds": {name: round(1000 * item, 3) for name, item in seconds.items()},
                "times_as_fast_as_flex": round(seconds["flex"] / seconds["ours"], 2),
                "apart": apart,
            }
        )
    return rows


def graphed(run: Callable[..., Tensor], inputs: list[Tensor], train: bool) -> Callable[[], None]:
    """One call and its gradients as a CUDA graph."""
    with torch.no_grad():
        direction = torch.randn_like(run(*inputs))

    def work() -> None:
        if train:
            torch.autograd.grad(run(*inputs), inputs, direction)
        else:
            with torch.no_grad():
                run(*inputs)

    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):  # kernels are compiled and chosen
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def compared(
    runs: Mapping[str, Callable[..., Tensor]], inputs: list[Tensor], train: bool, rounds: int
) -> dict[str, object]:
    """Ours beside the others, as graphs, in turns; medians."""
    calls: dict[str, Callable[[], None]] = {}
    for name, run in runs.items():
        try:
            calls[name] = graphed(run, inputs, train)
        except RuntimeError as error:  # flash takes no mask
            print(json.dumps({"left_out": name, "why": str(error).split("\n")[0][:120]}))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                call()
            end.record()
            torch.cuda.synchronize()
            spent[name].append(begin.elapsed_time(end) / REPLAYS)
    milliseconds = {name: round(statistics.median(each), 4) for name, each in spent.items()}
    row: dict[str, object] = {"pass": "forward and backward" if train else "forward"}
    row["milliseconds"] = milliseconds
    others = [value for name, value in milliseconds.items() if name != "ours"]
    if others and "ours" in milliseconds:
        row["times_as_fast_as_the_best"] = round(min(others) / milliseconds["ours"], 2)
    return row


def short(length: int, head_dim: int, past: bool, rounds: int) -> list[dict[str, object]]:
    from manyheads.kernels.short_attention import short_attention

    torch.manual_seed(1)
    heads = WIDTH // head_dim
    shape = (TOKENS // length, length, 3 * WIDTH)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()]
    known = torch.arange(length, device="cuda") < length - length // 4
    real = None if past else known.expand(len(inputs[0]), -1).contiguous()
    added = make_mask(full, length, padding_mask=real, device="cuda").as_bias(torch.bfloat16)
    runs: dict[str, Run] = {
        "ours": lambda x: short_attention(x, None, heads, real, past, head_dim**-0.5, None, 0.0)
    }
    for name, backend in BACKENDS.items():

        def theirs(x: Tensor, backend: SDPBackend = backend) -> Tensor:
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in x.chunk(3, -1))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=past)
            return out.transpose(1, 2).flatten(2)

        runs[name] = theirs
    about = {"length": length, "head_dim": head_dim, "causal": past}
    return [about | compared(runs, inputs, train, rounds) for train in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["fused", "biased", "short"])
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels are for a GPU, and there is none")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    measure = {"fused": fused, "biased": biased, "short": short}[options.what]
    for length in map(int, options.lengths.split(",")):
        for head_dim in map(int, options.head_dims.split(",")):
            for past in (True, False):
                for row in measure(length, head_dim, past, options.rounds):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
