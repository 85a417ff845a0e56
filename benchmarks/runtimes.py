"""`manyheads translate` next to PyTorch, CTranslate2's own `translate_batch` and `transformers`.

    python benchmarks/runtimes.py runs/demo --sentences 1000 --rounds 5 --threads 1 2

The sides translate the same test sentences in turns in one process. Ours is the loop of the
command, from lines of bytes to lines of text, with the engine CTranslate2; `pytorch` is the same
with `--engine torch`. CTranslate2 itself gets tokens, with the same beam and penalty (the length)
and its own batches. `equal` is the share of equal translations.

Each row is printed when it is measured; a call that exceeds --limit seconds is an error. The last
line is one JSON object, with the seconds that the command takes for one sentence (its start).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyheads.decode.translate import BaseTranslator, translate_lines
from manyheads.engines import Engine
from manyheads.exchange.ctranslate2 import Ctranslate2Translator
from manyheads.exchange.huggingface import to_huggingface
from manyheads.loading import LoadedRun, load_torch_run
from speed import limited, reported

Side = Callable[[list[str]], list[str]]


def ours(translator: BaseTranslator) -> Side:
    def run(sentences: list[str]) -> list[str]:
        return list(translate_lines(translator, sentences))

    return run


def theirs(translator: Ctranslate2Translator, sentences: list[str]) -> Side:
    """CTranslate2 itself; sentences are tokens before the clock starts."""
    tokenizer, names, decode = translator.tokenizer, translator.model, translator.decode
    tokens = [[names.source[i] for i in ids] for ids in tokenizer.encode_batch(sentences)]
    options = {
        "beam_size": decode.beam,
        "length_penalty": decode.length_penalty,
        "max_decoding_length": translator.max_length,
        "max_batch_size": decode.forward_tokens // decode.beam,
        "batch_type": "tokens",
    }

    def run(sentences: list[str]) -> list[str]:
        results = names.runner.translate_batch(tokens, **options)
        ids = [[names.ids[name] for name in result.hypotheses[0]] for result in results]
        return tokenizer.decode_batch(ids)

    return run


def huggingface(loaded: LoadedRun, beam: int, batch: int = 32) -> Side:
    peer, translator = to_huggingface(loaded.model).eval(), loaded.translator()

    @torch.no_grad()
    def run(sentences: list[str]) -> list[str]:
        texts = []
        for first in range(0, len(sentences), batch):
            (source, padding), limits = translator.batch(sentences[first : first + batch])
            out = peer.generate(
                source,
                attention_mask=padding.long(),
                num_beams=beam,
                max_new_tokens=int(limits.max()),
                early_stopping=True,
            )
            texts += translator.tokenizer.decode_batch(out.tolist())
        return texts

    return run


def command_seconds(run: Path, threads: int, times: int = 3) -> float:
    """The median time of the command for one sentence, with a conversion that exists."""
    command = [sys.executable, "-m", "manyheads", "translate", str(run), "--threads", str(threads)]
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        subprocess.run(command, input=b"A.\n", capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds[1:]), 2)


def measured(
    sides: dict[str, Side], sentences: list[str], rounds: int, limit: float
) -> dict[str, Any]:
    """Sentences per second by side; a side's rival has its name without the first word."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    for turn in range(rounds + 1):  # the first round warms up
        for name in list(rates)[:: -1 if turn % 2 else 1]:
            try:
                began = time.perf_counter()
                with limited(limit):
                    texts[name] = sides[name](sentences)
                if turn:
                    rates[name].append(len(sentences) / (time.perf_counter() - began))
            except Exception as error:
                errors[name] = reported(error)
                del rates[name]
    rows: dict[str, Any] = {name: {"error": error} for name, error in errors.items()}
    for name, each in rates.items():
        dtype = name.rpartition(" ")[2]
        mine = f"manyheads {dtype}" if f"manyheads {dtype}" in rates else "manyheads float32"
        pairs = zip(rates[mine], each, strict=True)
        equal = [a == b for a, b in zip(texts[mine], texts[name], strict=True)]
        rows[name] = {
            "sentences_per_second": round(statistics.median(each), 1),
            "ours_is_times_as_fast": round(statistics.median(a / b for a, b in pairs), 3),
            "equal": round(sum(equal) / len(equal), 4),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a call of a side")
    inputs = parser.parse_args()
    result: dict[str, Any] = {"bench": "runtimes", "beam": inputs.beam, "load": os.getloadavg()[0]}
    for threads in inputs.threads:
        torch.set_num_threads(threads)
        loaded = load_torch_run(inputs.run)
        sentences: list[str] = loaded.run.data.read("test").sources[: inputs.sentences]  # type: ignore[union-attr]
        sides: dict[str, Side] = {}
        for dtype in ("float32", "int8"):
            engine = Engine("ctranslate2", dtype)
            # The length penalty that CTranslate2 has.
            search = {"beam": inputs.beam, "penalty": "length", "length_penalty": 1.0}
            translator: Any = loaded.with_engine(engine).translator(**search)
            sides[f"manyheads {dtype}"] = ours(translator)
            sides[f"ctranslate2 {dtype}"] = theirs(translator, sentences)
        sides["pytorch float32"] = ours(loaded.translator(**search))
        try:
            sides["transformers float32"] = huggingface(loaded, inputs.beam)
        except Exception as error:
            result["transformers"] = reported(error)
        rows = measured(sides, sentences, inputs.rounds, inputs.limit)
        for name, row in rows.items():
            print(json.dumps({"threads": threads, "side": name, **row}), flush=True)
        rows["start_seconds"] = command_seconds(inputs.run, threads)
        result[f"{threads} threads"] = rows
    print(json.dumps(result | {"sentences": len(sentences)}))


if __name__ == "__main__":
    main()
