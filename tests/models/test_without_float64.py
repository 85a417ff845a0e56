"""A device without float64 and without CUDA, such as Apple's (mps), can run every model.

No such device is at hand: instead, no operation of a step on a CPU may give a float64 tensor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import trainer, write_recipe
from tiny import PARTS, Model, tiny, words
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyheads.baselines.convolution import ConvS2SConfig
from manyheads.baselines.rnn import GnmtConfig, RnnConfig
from manyheads.decode.translate import Translator
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.performer import Performer
from manyheads.train.loop import precision_of
from manyheads.train.optimizer import Train

MPS = torch.device("mps")


class RefuseFloat64(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.dtype == torch.float64 and x.ndim:
                raise TypeError(f"{function} gives float64")
        return result


def check(config: Any) -> None:
    model, tokens = config.build(), words(2, 8)
    with RefuseFloat64():
        inputs = [tokens] if isinstance(config, GptConfig | BertConfig) else [tokens, tokens]
        out = model(*inputs)
        out.sum().backward()


@pytest.mark.parametrize("kind", [GptConfig, BertConfig, Seq2SeqConfig])
def test_every_part(kind: Model) -> None:
    for position, core in PARTS:
        check(tiny(kind, position, core))


def test_approximations_and_baselines() -> None:
    for core in (Local(), Longformer(), Performer(), Linformer(rank=4), MemoryCompressed()):
        kind = GptConfig if isinstance(core, Local | MemoryCompressed) else BertConfig
        check(tiny(kind, attention=core))
    for baseline in (ConvS2SConfig, GnmtConfig, RnnConfig):
        check(baseline(vocab_size=17, dim=8, layers=3, max_length=40))


def test_training_and_beam_search(tmp_path: Path) -> None:
    started = trainer(write_recipe(tmp_path), tmp_path / "run")
    with RefuseFloat64():
        started.step(0)
        task: Any = started.task
        Translator(started.model, task.tokenizer, task.run.decode).translate(
            ["The dog sees the tree."]
        )


def test_choices_for_another_device() -> None:
    assert precision_of(Train(), MPS) == torch.float32
    assert precision_of(Train(precision="bfloat16"), MPS) == torch.bfloat16
