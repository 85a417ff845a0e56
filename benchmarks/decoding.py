"""Decoding with CUDA graphs, eager, and by `transformers`, in one process.

Language models of 124M and 1.3B parameters, greedy, one text and 32; the base Transformer in
Marian's form, beam 5, 64 sentences. Weights are random, converted by the exchange; ends are
suppressed, so that all sides generate as many tokens. Sides take turns, and figures are medians
over rounds. A call of a side that exceeds --limit seconds is an error of that side. Each row is
printed when it is measured, and the last line has all of them. Figures of each side:

    tokens_per_second   for beam search, tokens of the best hypothesis only
    first_seconds       of its first call: kernels compiled, steps recorded
    compiled            graphs that were compiled in it
    equal, same_until   share of texts that are the same as ours, and of a text until it differs

and of the row

    equal_float32       share of texts that CUDA graphs and eager steps generate alike, float32
    weights             bytes of weights that our steps read a second, and as a share of a copy's
    mbu                 memory-bandwidth utilisation: bytes of weights and cache that our steps read
                        a second, as a share of the device's peak (of a copy if it is not known)

    python benchmarks/decoding.py --rows runs/bench-decoding.jsonl    all, on a GPU
    python benchmarks/decoding.py --only "124M batch 1" --without "transformers compiled"
    python benchmarks/decoding.py --tiny                              small models, anywhere
"""

import argparse
import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
import torch
from tokenizers import models
from torch import Tensor, nn

from manyheads.decode.beam import Decode
from manyheads.decode.decoder import GraphCache
from manyheads.decode.generate import GREEDY, Generator
from manyheads.decode.translate import Translator
from manyheads.exchange.huggingface import to_huggingface
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import EmbeddingConfig, Norm
from manyheads.nn.positions import Sinusoidal
from manyheads.presets import preset
from manyheads.tokenizer.tokenizer import Tokenizer
from speed import (
    Row,
    Rows,
    compared,
    compilations,
    device_of,
    in_turns,
    limited,
    options,
    reported,
)

OURS, OURS_EAGER = "ours", "ours eager"
EAGER, STATIC = "transformers", "transformers compiled"
PAD, START, END = 0, 1, 2  # as models without a tokenizer leave for `transformers`
PEAKS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes per second, by device name
Texts = list[list[int]]
Run = Callable[[], Texts]


@dataclass(frozen=True)
class Work:
    """A model, how many texts, and how much is read and written of each."""

    name: str
    config: GptConfig | Seq2SeqConfig
    batch: int
    beam: int
    read: int
    write: int

    @property
    def decode(self) -> Decode:
        """No end before the limit, none at the limit; scores as `transformers` has them."""
        return Decode(
            beam=self.beam,
            min_length=self.write,
            at_limit="truncate",
            penalty="length",
            length_penalty=1.0,
            stopping="heuristic",
            start=START,
            end=END,
            suppress_tokens=(),
            batch_tokens=10**9,
        )


def marian(vocabulary: int, layers: int, dim: int) -> Seq2SeqConfig:
    """Post-norm, sinusoids in halves, scaled tied embeddings."""
    return Seq2SeqConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=layers,
        heads=max(1, dim // 64),
        ffn_dim=4 * dim,
        max_length=512,
        position=Sinusoidal(layout="halves"),
        norm=Norm(placement="post"),
        embed=EmbeddingConfig(scale="sqrt-dim"),
    )


def works(tiny: bool) -> Iterator[Work]:
    """In the order of what each tells; the static cache is for one text at a time."""
    small, large = preset("gpt3-small"), preset("gpt3-xl")
    base, sizes = marian(32_000, 6, 512), (64, 128)
    assert isinstance(small, GptConfig)
    assert isinstance(large, GptConfig)
    small, large = (replace(item, vocab_size=50_257, max_length=1024) for item in (small, large))
    if tiny:
        small = replace(small, vocab_size=300, dim=32, layers=2, heads=2, max_length=128)
        large, base, sizes = replace(small, layers=3), marian(300, 2, 64), (5, 20)
    read, write = sizes
    for name, config in (("gpt 124M", small), ("gpt 1.3B", large)):
        yield Work(f"{name} batch 1", config, 1, 1, read, write)
    yield Work("transformer-base beam 5 batch 64", base, 64, 5, read // 2, write // 2)
    for name, config in (("gpt 124M", small), ("gpt 1.3B", large)):
        yield Work(f"{name} batch 32", config, 32, 1, read, write)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without", nargs="*", default=[], help="sides to leave out")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds of one call of a side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options(parser)
    inputs = parser.parse_args()
    device = device_of(parser, inputs)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    where = {"device": kind(device), "dtype": str(dtype).removeprefix("torch.")}
    rows, copied = Rows("decoding", inputs, where), copy_speed(device)
    for work in works(inputs.tiny):
        without = set(inputs.without) | (set() if work.batch == 1 else {STATIC})
        how = (work, device, dtype, inputs.rounds, without, copied, inputs.limit)
        rows.add(work.name, lambda how=how: measured(*how))
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rows.close()


@torch.no_grad()
def measured(
    work: Work,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    without: set[str],
    copied: float,
    limit: float,
) -> Row:
    torch.manual_seed(1)
    with device:
        model = work.config.build().to(dtype).eval()
    texts = torch.randint(3, work.config.vocab_size, (work.batch, work.read), device=device)
    errors: dict[str, str] = {}
    runners = ours(work, model, texts)
    try:
        runners |= theirs(work, model, texts, device, without)
    except Exception as error:  # our figures are figures without theirs
        errors[EAGER] = reported(error)
    first: dict[str, float] = {}
    compiled: dict[str, int] = {}
    written: dict[str, Texts] = {}
    for name, run in list(runners.items()):
        try:
            if name not in without:
                before = compilations()
                first[name], written[name] = timed(run, device, limit)
                compiled[name] = compilations() - before
                print(f"{work.name}: {name}: first {first[name]:.1f} s", file=sys.stderr)
                if name != OURS_EAGER:  # the second time anything late is compiled
                    timed(run, device, limit)
        except Exception as error:  # what one side cannot do is a result too
            errors[name] = reported(error)
            written.pop(name, None)
    tokens = work.batch * work.write
    sides = {
        name: lambda _, run=runners[name]: tokens / timed(run, device, limit)[0]
        for name in written
        if name != OURS_EAGER
    }
    row = compared(in_turns(sides, rounds, errors), [OURS])
    for name, texts_of in written.items():
        side = row["sides"].setdefault(name, {})
        side |= {"first_seconds": round(first[name], 2), "compiled": compiled[name]}
        if name != OURS and OURS in written:
            side |= likeness(written[OURS], texts_of)
    row |= {"batch": work.batch, "beam": work.beam, "read": work.read, "write": work.write}
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "errors": errors}
    row |= {"copy_bytes_per_second": int(copied), "weights": weights(work, model, row, copied)}
    if OURS in row["sides"]:
        peak = next((x for name, x in PEAKS.items() if name in kind(device)), copied)
        read = bytes_of_a_step(model) + cache_bytes(work, model)
        steps = row["sides"][OURS]["tokens_per_second"] / work.batch
        row["mbu"] = round(read * steps / peak, 3)
    try:
        with limited(limit):
            row["equal_float32"] = {OURS: equal_in_float32(work, model, texts)}
    except Exception as error:
        errors["float32"] = reported(error)
    return row


def weights(work: Work, model: nn.Module, row: Row, copied: float) -> Row:
    """How fast our steps read them."""
    speeds = {}
    for name in (OURS,):
        rate = row["sides"].get(name, {}).get("tokens_per_second")
        if rate is not None:
            speed = bytes_of_a_step(model) * rate / work.batch
            share = {"bytes_per_second": int(speed), "of_a_copy": round(speed / copied, 3)}
            speeds[name] = share
    return speeds


def ours(work: Work, model: nn.Module, texts: Tensor) -> dict[str, Run]:
    """Our decoding with CUDA graphs, and eager."""
    return {
        OURS: writing(work, model, texts, GraphCache(True)),
        OURS_EAGER: writing(work, model, texts, GraphCache(False)),
    }


def writing(work: Work, model: Any, texts: Tensor, graphs: GraphCache) -> Run:
    if isinstance(work.config, GptConfig):
        generator = Generator(model, none_needed(), work.decode, graphs=graphs)
        prompts = texts.tolist()
        return lambda: generator.sample(prompts, work.write, GREEDY)
    translator = Translator(model, none_needed(), work.decode, graphs)
    inputs = (texts, torch.ones_like(texts, dtype=torch.bool))
    limits = torch.full((work.batch,), work.write, device=texts.device)

    def run() -> Texts:
        with torch.no_grad():
            hypotheses = translator._search(inputs, START, limits, 1)
        return [line[0].tokens for line in hypotheses]

    return run


def theirs(
    work: Work,
    model: nn.Module,
    texts: Tensor,
    device: torch.device,
    without: set[str],
) -> dict[str, Run]:
    """`transformers` with the same weights: eager, and with its static cache, compiled."""
    if {EAGER, STATIC} <= without:
        return {}
    with device:
        peer = to_huggingface(model).eval()
    how: dict[str, Any] = {
        "attention_mask": torch.ones_like(texts),
        "do_sample": False,
        "num_beams": work.beam,
        "min_new_tokens": work.write,
        "max_new_tokens": work.write,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "length_penalty": 1.0,
        "early_stopping": False,
        "use_cache": True,
    }
    if work.beam == 1:
        del how["length_penalty"], how["early_stopping"]
    if isinstance(work.config, Seq2SeqConfig):
        how["decoder_start_token_id"] = START
        peer.generation_config.forced_eos_token_id = None
    read = work.read if isinstance(work.config, GptConfig) else 1

    def runner(**more: Any) -> Run:
        return lambda: peer.generate(texts, **how, **more)[:, read:].tolist()

    return {EAGER: runner(), STATIC: runner(cache_implementation="static")}


def equal_in_float32(work: Work, model: nn.Module, texts: Tensor) -> float:
    """The share of texts that CUDA graphs and eager steps generate alike, in float32."""
    precise = copy.deepcopy(model).float()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    runners = ours(work, precise, texts)
    item, other = runners[OURS](), runners[OURS_EAGER]()
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return float(likeness(item, other)["equal"])


def likeness(ours: Texts, others: Texts) -> dict[str, float]:
    """The share of texts that are the same, and how much of a text is, until it differs."""
    same = []
    for a, b in zip(ours, others, strict=True):
        until = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        same.append(until / len(a))
    equal = sum(a == b for a, b in zip(ours, others, strict=True)) / len(ours)
    return {"equal": round(equal, 4), "same_until": round(statistics.fmean(same), 4)}


def bytes_of_a_step(model: Any) -> int:
    """The weights that a decoder's step reads, each once: not those of an encoder, nor the rows
    of a table that are looked up and not multiplied with."""
    read = {id(p): p for p in model.decoder.parameters()}
    positions = {id(p) for p in model.decoder.position.parameters()}
    matrix = model.head.matrix(getattr(model, "target_table", None) or model.tokens)
    read[id(matrix)] = matrix
    return sum(p.numel() * p.element_size() for key, p in read.items() if key not in positions)


def cache_bytes(work: Work, model: Any) -> int:
    """Keys and values that a step reads at half of the generated length, all texts together."""
    element = next(model.parameters()).element_size()
    hypotheses = work.beam * work.write // 2
    per_text = work.read + hypotheses  # source or prompt first
    heads = model.decoder.blocks[0].attention.config
    width = 2 * heads.kv_heads * heads.head_dim
    return work.batch * per_text * width * len(model.decoder.blocks) * int(element)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    size = 2**31 if device.type == "cuda" else 2**24
    a = torch.ones(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)

    def several() -> None:  # several copies, so that synchronization does not count
        for _ in range(5):
            b.copy_(a)

    several()
    times = [timed(several, device)[0] / 5 for _ in range(9)]
    return 2 * size / statistics.median(times)


def timed(
    work: Callable[[], Any], device: torch.device, limit: float = math.inf
) -> tuple[float, Any]:
    """Seconds of some work, until the device is done, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    with limited(limit):
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - began, result


def kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def none_needed() -> Tokenizer:
    """Texts are numbers here; the settings name the special tokens."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


if __name__ == "__main__":
    main()
