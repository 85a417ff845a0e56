"""Published models by name; `presets.toml` next to this file has their settings and sources."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.baselines.rnn import RnnLmConfig
from manyheads.config import change, nearest, parse, read_toml
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import BaselineConfig, DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig

TransformerConfig = Seq2SeqConfig | GptConfig | BertConfig | VitConfig | DecoderOnlySeq2SeqConfig
ModelConfig = TransformerConfig | BaselineConfig | ElmoConfig | RnnLmConfig


def _read(name: str) -> ModelConfig:
    table = dict(_TABLES[name])
    if "classes" in table:
        labels = [str(number) for number in range(table.pop("classes"))]
        table["head"] = {"kind": "classify", "labels": labels}
    base = table.pop("like", None)
    config: ModelConfig = parse(ModelConfig, table) if base is None else change(_read(base), table)
    return config


_TABLES = read_toml(Path(__file__).with_name("presets.toml"))
PRESETS: dict[str, ModelConfig] = {name: _read(name) for name in _TABLES}


def presets() -> list[str]:
    """The names of all presets, by family, small before large."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The settings of a published model, by its exact name."""
    if name not in PRESETS:
        raise UserError(f"there is no preset '{name}' (and no such run): {nearest(name, PRESETS)}")
    return PRESETS[name]


def build(name: str, **overrides: Any) -> nn.Module:
    """A published model with new weights, with any settings overridden.

    `build("gpt3-small", layers=2, position="rotary", norm={"form": "rms"})`: values are as in a
    recipe, or settings objects; a table changes only the fields that it names.
    """
    return change(preset(name), overrides).build()


class _Callable(ModuleType):
    """Importing this module puts it in place of the function `manyheads.presets`."""

    __call__ = staticmethod(presets)


sys.modules[__name__].__class__ = _Callable
