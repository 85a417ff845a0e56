"""Settings that a recipe leaves to the amount of training data (`by_data` in its file).

Little data is read many times, and a model would learn it by heart: it gets more dropout and
weight decay. The numbers come from validation losses on tinyshakespeare and on Penn Treebank by
characters (docs/how-to/choose.md). A setting that the user gives is never changed.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config import override_all
from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.run import Run

CHARACTERS_PER_TOKEN = {
    "characters": 1.0,
    "bigrams": 2.0,
    "bpe": 3.5,
    "wordpiece": 3.5,
    "words": 5.5,
}
SIZES = ("model.dim", "model.layers", "model.heads", "model.ffn_dim")  # chosen together
Settings = dict[str, Any]


def language(run: "Run", characters: int) -> Settings:
    """Causal language models of text."""
    millions = characters / CHARACTERS_PER_TOKEN[_tokenizer_kind(run)] / 1e6
    dropout = round(min(0.4, max(0.0, 0.35 - 0.31 * math.log10(millions))), 2)
    dim, layers = next(
        size for limit, *size in ((0.2, 192, 4), (30, 384, 6), (300, 512, 8), (math.inf, 768, 12))
        if millions <= limit
    )  # fmt: skip
    return {
        **_vocabulary(run, characters),
        "model.dim": dim,
        "model.layers": layers,
        "model.heads": dim // 64,
        "model.dropout": dropout,
        "model.attention_dropout": dropout,
        "train.weight_decay": round(min(1.6, max(0.1, 1.6 * millions**-0.7)), 2),
        "train.steps": 2000 if millions <= 0.2 else max(5000, min(100_000, round(millions * 250))),
    }


def translation(run: "Run", pairs: int) -> Settings:
    """Encoder–decoders of parallel text: few pairs are read at most about eighty times."""
    few = min(4000, max(1000, pairs // 2))
    rows = (
        # pairs at most, SIZES, dropout, learning rate, steps, warm-up, validation, patience,
        # tokens a step, vocabulary
        (8_000, 128, 4, 4, 256, 0.3, 2e-3, few, few // 4, few // 20, 8, 2000, 2000),
        (60_000, 128, 4, 4, 256, 0.2, 2e-3, 7000, 1000, 500, "none", 2000, 8000),
        (600_000, 256, 4, 4, 1024, 0.2, 2e-3, 10_000, 1000, 500, "none", 8192, 10_000),
        (math.inf, 512, 6, 8, 2048, 0.1, 1e-3, 40_000, 1000, 500, "none", 16_384, 32_000),
    )
    _, *row = next(row for row in rows if pairs <= row[0])
    of_train = ("steps", "warmup_steps", "validate_every", "patience", "batch_tokens")
    names = ("model.dropout", "train.learning_rate", *(f"train.{name}" for name in of_train))
    return dict(zip((*SIZES, *names, "tokens.vocab_size"), row, strict=True))


def masked(run: "Run", characters: int) -> Settings:
    """Encoders that are pretrained on text: about forty passes, within limits."""
    large = characters > 100_000_000
    tokens = characters / CHARACTERS_PER_TOKEN["wordpiece"]
    return {
        **_vocabulary(run, characters),
        "model.dim": 512 if large else 256,
        "model.layers": 8 if large else 4,
        "model.heads": 8 if large else 4,
        "train.steps": max(2000, min(100_000, round(40 * tokens / run.train.batch_tokens))),
    }


def images(run: "Run", count: int) -> Settings:
    """Vision Transformers: few images are seen more often."""
    return {
        "model.dropout": 0.1 if count < 10_000 else 0.0,
        "train.epochs": max(4, min(60, round(240_000 / count))),
    }


# By task: the unit, its number in a training split, the rule.
RULES: dict[str, tuple[str, Callable[..., int], Callable[..., Settings]]] = {
    "language": ("characters", lambda run, part: _characters(run, part), language),
    "translation": ("pairs", lambda run, part: len(part.sources), translation),
    "pretraining": ("characters", lambda run, part: _characters(run, part), masked),
    "images": ("images", lambda run, part: len(part.labels), images),
}


def fit_to_data(run: "Run", part: Any, amount: int | None = None) -> tuple["Run", list[str]]:
    """The run with the settings of `by_data` chosen for its training split, and a remark on it.

    `amount` is that of the data, if `part` has only a sample.
    """
    if not run.by_data or run.data is None:
        return run, []
    if run.task not in RULES:
        raise UserError(f"by_data has no rule for task={run.task}: leave it out of the recipe")
    unit, count, rule = RULES[run.task]
    amount = amount or getattr(part, "amount", None) or count(run, part)
    chosen = {name: value for name, value in rule(run, amount).items() if name in run.by_data}
    settings = [f"{name}={value}" for name, value in chosen.items()]
    run = dataclasses.replace(run, by_data=())
    return override_all(run, settings), [f"chosen for {amount:,} {unit}: {' '.join(settings)}"]


def _characters(run: "Run", part: Any) -> int:
    return max(1, sum(map(len, run.spec.strings(part))))


def _tokenizer_kind(run: "Run") -> str:
    """Of the tokenizer that is trained, or that of init=FOLDER; kinds from elsewhere are as BPE."""
    path = Path(run.init) / "tokenizer.json"
    if run.tokens is not None:
        return run.tokens.kind
    kind = Tokenizer.load(path).kind if path.is_file() else "bpe"
    return kind if kind in CHARACTERS_PER_TOKEN else "bpe"


def _vocabulary(run: "Run", characters: int) -> Settings:
    """1,000 to 32,000 subwords, one for 500 characters; other tokenizers have as many as occur."""
    if run.tokens is None or run.tokens.kind not in ("bpe", "wordpiece"):
        return {}
    doublings = math.floor(math.log2(min(32, max(1, characters / 500_000))))
    return {"tokens.vocab_size": 1000 * 2**doublings}
