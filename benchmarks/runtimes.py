"""A trained translator in PyTorch and in CTranslate2: same texts? how fast?

The same sentences go through each runner in turns, in one process; a figure is the median over
rounds of our time by theirs. Each text that differs from ours is shown with the score that our
model gives to both.

    python benchmarks/runtimes.py runs/demo --sentences 1000 --rounds 5 [--json]
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from manyheads.decode.beam import length_penalty
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.exchange.ctranslate2 import (
    Ctranslate2Model,
    Ctranslate2Translator,
    write_ctranslate2,
)
from manyheads.loading import load_torch_run

Texts = list[list[int]]
Runner = Callable[[list[str]], Texts]
OURS = "ours"
NEAR = 1e-3  # scores this near are a tie that rounding decides


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    options.add_argument("--sentences", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--beam", type=int, default=4)
    options.add_argument("--json", action="store_true")
    inputs = options.parse_args()
    torch.set_num_threads(inputs.threads)

    opened = load_torch_run(inputs.run)
    sentences = opened.run.data.read("test").sources[: inputs.sentences]
    local = dataclasses.replace(opened.run.decode, beam=inputs.beam)
    settings = {
        "no penalty": dataclasses.replace(local, length_penalty=0.0),
        "|y|^1": dataclasses.replace(local, length_penalty=1.0, penalty="length"),
        "the run's own": local,
    }
    result: dict[str, object] = {
        "sentences": len(sentences),
        "beam": inputs.beam,
        "threads": inputs.threads,
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for kind in ("float32", "int8"):
            write_ctranslate2(opened.model, opened.tokenizer, Path(folder) / kind, kind)
            models[f"ctranslate2 {kind}"] = Ctranslate2Model(Path(folder) / kind, "Translator")
        for name, decode in settings.items():
            ours = Translator(opened.model, opened.tokenizer, decode)
            runners = {OURS: best(ours)} | {
                kind: best(Ctranslate2Translator(model, opened.tokenizer, decode))
                for kind, model in models.items()
            }
            result[name] = compare(ours, runners, sentences, inputs.rounds)
    print(json.dumps(result, indent=2, ensure_ascii=False) if inputs.json else report(result))


def best(translator: BaseTranslator) -> Runner:
    """Tokens of the best translation of each sentence."""
    return lambda sentences: [item[0].tokens for item in translator.search(sentences, n_best=1)]


def compare(
    ours: Translator, runners: dict[str, Runner], sentences: list[str], rounds: int
) -> dict[str, dict[str, object]]:
    """Equal texts, and rounds in turns."""
    texts = {name: run(sentences) for name, run in runners.items()}  # warms all up, too
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            began = time.perf_counter()
            run(sentences)
            times[name].append(time.perf_counter() - began)
    figures: dict[str, dict[str, object]] = {}
    for name in runners:
        pairs = zip(times[OURS], times[name], strict=True)
        unequal = differences(ours, sentences, texts[OURS], texts[name])
        figures[name] = {
            "sentences_per_second": len(sentences) / statistics.median(times[name]),
            "times_as_fast_as_ours": statistics.median(a / b for a, b in pairs),
            "equal": 1 - len(unequal) / len(sentences),
            "differences": unequal,
        }
    return figures


def differences(
    ours: Translator, sentences: list[str], mine: Texts, other: Texts
) -> list[dict[str, object]]:
    """Where the texts differ: both, with their scores by our model, and what that says."""
    unequal: list[dict[str, object]] = []
    for sentence, item, two in zip(sentences, mine, other, strict=True):
        if item == two:
            continue
        scores = [score(ours, sentence, tokens) for tokens in (item, two)]
        gap = scores[1] - scores[0]
        verdict = "near tie" if abs(gap) < NEAR else f"{'theirs' if gap > 0 else 'ours'} is better"
        unequal.append(
            {
                "source": sentence,
                "ours": ours.tokenizer.decode(item),
                "theirs": ours.tokenizer.decode(two),
                "scores": scores,
                "verdict": verdict,
            }
        )
    return unequal


@torch.no_grad()
def score(translator: Translator, sentence: str, tokens: list[int]) -> float:
    """log P / lp of a translation, in double precision."""
    model, marks, decode = translator.model.double(), translator.special_tokens, translator.decode
    expected = torch.tensor([[*tokens, marks.end]])
    source = torch.tensor([marks.source(translator.tokenizer.encode(sentence))])
    target = torch.cat([torch.tensor([[marks.start]]), expected[:, :-1]], dim=1)
    log = model(source, target).log_softmax(-1).gather(2, expected[..., None]).sum()
    model.float()
    return float(log / length_penalty(expected.shape[1], decode.length_penalty, decode.penalty))


def report(result: dict[str, object]) -> str:
    lines = [
        f"{result['sentences']} sentences, beam {result['beam']}, {result['threads']} threads, "
        f"load before {result['load']:.1f}"
    ]
    for setting, figures in result.items():
        if not isinstance(figures, dict):
            continue
        for name, row in figures.items():
            lines.append(
                f"{setting}: {name}: {row['sentences_per_second']:,.0f} sentences/s, "
                f"{row['times_as_fast_as_ours']:.2f} × ours, {row['equal']:.1%} equal"
            )
            for each in row["differences"]:
                mine, theirs = each["scores"]
                lines.append(f"    {each['verdict']} ({mine:.4f} ours, {theirs:.4f} theirs)")
                lines += [f"        {each[key]}" for key in ("source", "ours", "theirs")]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
