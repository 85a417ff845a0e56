"""Speed and BLEU of translators on a CPU, in turns in one process: a teacher and its students.

    python benchmarks/students.py runs/teacher:5 runs/student:5 runs/student:1 --threads 1

RUN:BEAM is a side. All run in CTranslate2 as int8, with the shortlist of a student, and translate
the validation sentences of the first run. One JSON object a line; `times_as_fast` is the median
over rounds of the rate divided by that of the first side.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from manyheads.decode.translate import BaseTranslator, translate_lines
from manyheads.engines import Engine
from manyheads.evaluate.scores import translation_scores
from manyheads.loading import load_torch_run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sides", nargs="+", metavar="RUN:BEAM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    inputs = parser.parse_args(arguments)
    torch.set_num_threads(inputs.threads)
    translators: dict[str, BaseTranslator] = {}
    for side in inputs.sides:
        folder, _, beam = side.rpartition(":")
        loaded = load_torch_run(Path(folder)).with_engine(Engine("ctranslate2", "int8"))
        translators[side] = loaded.translator(beam=int(beam))
    first = load_torch_run(Path(inputs.sides[0].rpartition(":")[0]))
    valid = first.run.data.read("valid")  # type: ignore[union-attr]
    rates: dict[str, list[float]] = {side: [] for side in translators}
    bleu = {}
    for turn in range(inputs.rounds + 1):  # the first round warms up
        for side, translator in translators.items():
            began = time.perf_counter()
            texts = list(translate_lines(translator, valid.sources))
            if turn:
                rates[side].append(len(texts) / (time.perf_counter() - began))
            else:
                bleu[side] = translation_scores(texts, valid.targets)["bleu"]
    for side, each in rates.items():
        pairs = zip(each, rates[inputs.sides[0]], strict=True)
        row = {
            "side": side,
            "bleu": round(bleu[side], 2),
            "sentences_per_second": round(statistics.median(each), 1),
            "times_as_fast": round(statistics.median(a / b for a, b in pairs), 2),
            "threads": inputs.threads,
            "load": os.getloadavg()[0],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
