"""Model cards: the README.md of an exported folder, with a YAML head that the Hub reads."""

import json
import re
from pathlib import Path
from typing import Any

from manyheads.config import dump, to_toml
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.presets import ModelConfig

LIBRARIES = {"huggingface": "transformers"}  # others have the name of the format
HEADS = {"masked": "fill-mask", "classify": "text-classification", "tag": "token-classification"}
LANGUAGE = re.compile(r"[a-z]{2}")


def model_card(name: str, run: Any, scores: dict[str, Any], to: str, parameters: int) -> str:
    """The card of an exported run; `scores` are those of its test set, if there are any.

    A license is nowhere in a run, so the card has none.
    """
    library = LIBRARIES.get(to, to)
    metrics = [name for name in scores.get("signature", {}) if isinstance(scores.get(name), float)]
    head = {
        "language": _languages(run.data),
        "library_name": library,
        "pipeline_tag": _pipeline(run.model),
        "tags": ["manyheads", run.model.kind],
        "metrics": metrics,
    }
    # JSON is YAML.
    lines = [f"{key}: {json.dumps(value)}" for key, value in head.items() if value]
    parts = [
        "\n".join(["---", *lines, "---"]),
        f"# {name}\n\nA {run.model.kind} model of {parameters:,} parameters, exported by Manyheads "
        f"for {library}. `run.toml` has all settings.",
        "## Scores\n\n" + _score_table(scores, metrics),
        "## Data\n\n" + _data(run.data),
    ]
    if run.data is not None:
        parts.append("## Training\n\n    manyheads train run.toml --out runs/again")
    return "\n\n".join(parts) + "\n"


def _languages(data: Any) -> list[str]:
    """Language codes in the settings of a parallel corpus: `pair`, else endings or columns."""
    pair = getattr(data, "pair", "").split("-")
    sides = [
        getattr(data, side, "").rpartition(".")[2] or getattr(data, f"{side}_column", "")
        for side in ("source", "target")
    ]
    return [word for word in (pair if len(pair) == 2 else sides) if LANGUAGE.fullmatch(word)]


def _pipeline(model: ModelConfig) -> str:
    head = getattr(model, "head", None)
    tasks: dict[type, str] = {
        Seq2SeqConfig: "translation",
        GptConfig: "text-generation",
        VitConfig: "image-feature-extraction" if head is None else "image-classification",
        BertConfig: HEADS.get(getattr(head, "kind", ""), "feature-extraction"),
    }
    return tasks.get(type(model), "")


def _score_table(scores: dict[str, Any], metrics: list[str]) -> str:
    if not metrics:
        return "Not evaluated on a test set (`manyheads evaluate` saves scores with a run)."
    signatures = {name: text.replace("|", r"\|") for name, text in scores["signature"].items()}
    rows = [f"| {name} | {scores[name]:.4g} | {signatures[name]} |" for name in metrics]
    return "\n".join(["| metric | value | signature |", "|---|---|---|", *rows])


def _data(data: Any) -> str:
    if data is None:
        return "Imported from elsewhere: see the card of the original model."
    settings = {
        name: Path(value).name if isinstance(value, str) and "/" in value else value
        for name, value in dump(data).items()
        if value not in ("", None)
    }
    return f"```toml\n{to_toml(settings).strip()}\n```"
