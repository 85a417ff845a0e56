"""Decoding by recorded steps (compiled or not), as it is, and by `transformers`, in one process.

Language models of 124M and 1.3B parameters, greedy, one text and 32; the base Transformer in
Marian's form, beam 5, 64 sentences. Weights are random, carried over by the exchange; ends are
banned, so that everyone writes as many tokens. Runners take turns, and a figure is the median of
the rounds. One JSON object a line:

    tokens_per_s     of each runner; of a search those of the best hypothesis alone
    first_s          seconds of its first call: kernels compiled, steps recorded
    ratios           of ours, recorded, to each of the others: medians of paired rounds
    equal            share of texts that are the same as ours, recorded
    equal_float32    the same of ours, recorded and not, in float32
    weights_per_s    bytes of weights that our steps read a second, and as a share of a copy's

    python benchmarks/decoding.py                                 all, on a GPU
    python benchmarks/decoding.py --only 124M --without recorded-compiled transformers-compiled
    python benchmarks/decoding.py --tiny                          small models, anywhere
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
import torch
from tokenizers import models
from torch import Tensor, nn

from manyheads.decode.beam import BeamSearch, Decode
from manyheads.decode.generate import GREEDY, Generator
from manyheads.decode.recorded import Recordings
from manyheads.decode.translate import Seq2SeqStepper
from manyheads.decode.writer import Writer
from manyheads.exchange.huggingface import to_huggingface
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.embedding import Embed
from manyheads.nn.positions import Sinusoidal
from manyheads.nn.residual import Norm
from manyheads.presets import preset
from manyheads.tokens import Tokenizer

RECORDED, COMPILED_TOO, AS_IT_IS = "recorded", "recorded-compiled", "as-it-is"
EAGER, COMPILED = "transformers", "transformers-compiled"
PAD, START, END = 0, 1, 2  # as models without a tokenizer leave for `transformers`
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
            shortest=self.write,
            at_limit="cut",
            penalty="length",
            length_penalty=1.0,
            stopping="none-better-now",
            start=START,
            end=END,
            banned=(),
            batch_tokens=10**9,
        )


def marian(vocabulary: int, layers: int, dim: int) -> Seq2SeqConfig:
    """Post-norm, sinusoids in halves, scaled tied embeddings."""
    return Seq2SeqConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=layers,
        heads=max(1, dim // 64),
        hidden=4 * dim,
        max_length=512,
        position=Sinusoidal(layout="halves"),
        norm=Norm(placement="post"),
        embed=Embed(scale="sqrt-dim"),
    )


def works(tiny: bool) -> Iterator[Work]:
    small, large = preset("gpt3-small"), preset("gpt3-xl")
    base, sizes = marian(32_000, 6, 512), (64, 128)
    assert isinstance(small, GptConfig)
    assert isinstance(large, GptConfig)
    small, large = (replace(one, vocab_size=50_257, max_length=1024) for one in (small, large))
    if tiny:
        small = replace(small, vocab_size=300, dim=32, layers=2, heads=2, max_length=128)
        large, base, sizes = replace(small, layers=3), marian(300, 2, 64), (5, 20)
    read, write = sizes
    for name, config in (("gpt 124M", small), ("gpt 1.3B", large)):
        for batch in (1, 32):
            yield Work(f"{name} batch {batch}", config, batch, 1, read, write)
    yield Work("transformer-base beam 5 batch 64", base, 64, 5, read // 2, write // 2)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--only", default="", help="works whose name has this in it")
    options.add_argument("--without", nargs="*", default=[], help="runners to leave out")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--tiny", action="store_true")
    given = options.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copied = copy_speed(device)
    for work in works(given.tiny):
        if given.only in work.name:
            found = measured(work, device, dtype, given.rounds, set(given.without), copied)
            print(json.dumps({"work": work.name, "device": kind(device)} | found), flush=True)


@torch.no_grad()
def measured(
    work: Work,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    without: set[str],
    copied: float,
) -> dict[str, Any]:
    torch.manual_seed(1)
    model = work.config.build().eval()
    texts = torch.randint(3, work.config.vocabulary, (work.batch, work.read), device=device)
    runners = ours(work, model.to(device, dtype), texts)
    runners |= theirs(work, model, texts, device, dtype, without)
    runners = {name: run for name, run in runners.items() if name not in without}
    first, written = {}, {}
    for name, run in runners.items():
        try:
            seconds, written[name] = timed(run, device)
        except Exception as error:  # what a peer cannot do is a result too
            first[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        first[name] = round(seconds, 2)
        timed(run, device)
    times: dict[str, list[float]] = {name: [] for name in written}
    for _ in range(rounds):
        for name, each in times.items():
            each.append(timed(runners[name], device)[0])
    tokens = work.batch * work.write
    found: dict[str, Any] = {
        "batch": work.batch,
        "beam": work.beam,
        "read": work.read,
        "write": work.write,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_s": first,
        "tokens_per_s": {n: round(tokens / statistics.median(t), 1) for n, t in times.items()},
    }
    if RECORDED in times:
        found |= against_recorded(work, model, times, written, copied)
        found["equal_float32"] = equal_in_float32(work, model, texts)
    return found


def against_recorded(
    work: Work,
    model: nn.Module,
    times: dict[str, list[float]],
    written: dict[str, Texts],
    copied: float,
) -> dict[str, Any]:
    """Ratios, equal texts, and how fast the weights are read."""
    mine = times[RECORDED]
    ratios = {
        name: round(statistics.median(b / a for a, b in zip(mine, each, strict=True)), 2)
        for name, each in times.items()
        if name != RECORDED
    }
    speed = bytes_of_a_step(model) * work.write / statistics.median(mine)
    return {
        "ratios": ratios,
        "equal": {
            n: share(written[RECORDED], texts) for n, texts in written.items() if n != RECORDED
        },
        "weights_per_s": {"bytes": int(speed), "of_a_copy": round(speed / copied, 3)},
    }


def ours(work: Work, model: nn.Module, texts: Tensor) -> dict[str, Run]:
    """By recorded steps, the same of a compiled model, and by steps as they are."""
    return {
        RECORDED: writing(work, model, texts, Recordings(True)),
        COMPILED_TOO: writing(work, model, texts, Recordings(True, compiled=True)),
        AS_IT_IS: writing(work, model, texts, Recordings(False)),
    }


def writing(work: Work, model: Any, texts: Tensor, recordings: Recordings) -> Run:
    if isinstance(work.config, GptConfig):
        generator = Generator(model, none_needed(), work.decode, recordings=recordings)
        prompts = texts.tolist()
        return lambda: generator.sample(prompts, work.write, GREEDY)
    search = BeamSearch(work.decode, start=START, end=END, n_best=1)
    writer = Writer(recordings, model)
    real = torch.ones_like(texts, dtype=torch.bool)
    limits = torch.full((work.batch,), work.write, device=texts.device)

    def run() -> Texts:
        if recordings.wanted:
            found = writer.search((texts, real), search, limits)
        else:
            found = search(Seq2SeqStepper(model, texts, real), limits)
        return [line[0].tokens for line in found]

    return run


def theirs(
    work: Work,
    model: nn.Module,
    texts: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    without: set[str],
) -> dict[str, Run]:
    """`transformers` with the same weights: as it is, and with its static cache, compiled."""
    if {EAGER, COMPILED} <= without:
        return {}
    peer = to_huggingface(model).to(device, dtype).eval()
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

    return {EAGER: runner(), COMPILED: runner(cache_implementation="static")}


def equal_in_float32(work: Work, model: nn.Module, texts: Tensor) -> float:
    """Whether recorded steps write what steps as they are write, where rounding is small."""
    precise = copy.deepcopy(model).float()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    runners = ours(work, precise, texts)
    one, other = runners[RECORDED](), runners[AS_IT_IS]()
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return share(one, other)


def share(ours: Texts, others: Texts) -> float:
    """Of texts that are the same."""
    return sum(a == b for a, b in zip(ours, others, strict=True)) / len(ours)


def bytes_of_a_step(model: Any) -> int:
    """The weights that a decoder's step reads, each once: not those of an encoder, nor the rows
    of a table that are looked up and not multiplied with."""
    read = {id(p): p for p in model.decoder.parameters()}
    positions = {id(p) for p in model.decoder.position.parameters()}
    matrix = model.head.matrix(getattr(model, "target_table", None) or model.tokens)
    read[id(matrix)] = matrix
    return sum(p.numel() * p.element_size() for key, p in read.items() if key not in positions)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    size = 2**30 if device.type == "cuda" else 2**26
    a = torch.ones(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    b.copy_(a)
    times = []
    for _ in range(9):
        times.append(timed(lambda: b.copy_(a), device)[0])
    return 2 * size / statistics.median(times)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of some work and what came of it, the device waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, found


def kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def none_needed() -> Tokenizer:
    """Texts are numbers here; the settings name the special tokens."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


if __name__ == "__main__":
    main()
