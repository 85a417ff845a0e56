"""A folder that holds a model, whichever program wrote it, ready to use.

A run of ours, a folder of `transformers`, and what `manyheads export` wrote for CTranslate2 and
onnxruntime translate, generate, embed, fill and classify by the same commands, as far as the
program that runs them can.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.decode.beam import Decode, Marks
from manyheads.decode.cuda_graphs import Recordings, steady
from manyheads.decode.ensemble import together
from manyheads.decode.generate import AnyGenerator, Generator, say_nothing
from manyheads.decode.translate import AnyTranslator, Translator
from manyheads.errors import DataError, UserError
from manyheads.exchange import DECODER, ENCODER
from manyheads.exchange.ctranslate2 import WEIGHTS as CTRANSLATE2
from manyheads.exchange.folder import decode_of, in_frame, not_done, special_of
from manyheads.exchange.huggingface import CONFIG, ImportedModel, import_model, is_huggingface
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.vit import ReadsImages, Vit, VitConfig
from manyheads.nn.block import Architecture
from manyheads.nn.int8 import in_int8
from manyheads.presets import ModelConfig
from manyheads.run import (
    SETTINGS,
    TASKS,
    TOKENIZER,
    Run,
    choose_device,
    model_digest,
    read_run,
    read_tokenizer,
)
from manyheads.tasks.encode import TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train import checkpoint

CPU = torch.device("cpu")


@dataclass(frozen=True)
class OpenRun:
    """A model in a folder, and what it can be asked to do; subclasses say what computes it."""

    folder: Path
    run: Run
    own_tokenizer: Tokenizer | None
    device: torch.device = CPU

    @property
    def tokenizer(self) -> Tokenizer:
        if self.own_tokenizer is None:
            raise UserError(f"{self.folder} has no {TOKENIZER}: put the model's own there")
        return self.own_tokenizer

    def decode(self, **changes: Any) -> Decode:
        return dataclasses.replace(self.run.decode, **changes)

    def translator(self, **changes: Any) -> AnyTranslator:
        """What translates, with some settings of `decode` changed."""
        if self.run.task not in ("translation", "summaries"):
            raise self.cannot("translates", "an encoder–decoder")
        return self._translator(self.decode(**changes))

    def generator(self, warn: Callable[[str], None] = say_nothing, **changes: Any) -> AnyGenerator:
        """What continues a text."""
        if self.run.task != "language":
            raise self.cannot("continues texts", "a decoder-only model")
        return self._generator(self.decode(**changes), warn)

    def encoder(self) -> TextEncoder:
        """What reads texts."""
        if self.run.task == "images":
            raise UserError(
                f"{self.folder} holds a model of images, which reads no text: classify it"
            )
        return self._encoder()

    def labeller(self) -> ReadsImages:
        """What gives pictures a class."""
        config = self.run.model
        if not isinstance(config, VitConfig):
            raise self.cannot("labels pictures", "a vit model")
        if config.head is None:
            raise UserError(
                f"{self.folder} has no head for labels: train one on it, model={self.folder}"
            )
        return self._labeller()

    def in_int8(self) -> "OpenRun":
        """The same with its linear layers in eight bits, for writing."""
        raise UserError(
            f"{self.folder} was exported: export it anew with --quantization int8, or use the run"
        )

    def in_half(self) -> "OpenRun":
        """The same with its weights in bfloat16."""
        raise UserError(
            f"{self.folder} was exported: export it anew with --quantization, or use the run"
        )

    def compiled(self) -> "OpenRun":
        """The same, writing by steps that are compiled."""
        raise UserError(f"{self.folder} was exported, and is not compiled here: use the run itself")

    def _translator(self, decode: Decode) -> AnyTranslator:
        raise NotImplementedError

    def _generator(self, decode: Decode, warn: Callable[[str], None]) -> AnyGenerator:
        raise NotImplementedError

    def _encoder(self) -> TextEncoder:
        raise UserError(
            f"{self.folder} was exported to write texts, and gives no vectors or labels: use the "
            "run that it came from"
        )

    def _labeller(self) -> ReadsImages:
        raise UserError(f"{self.folder} was exported, and labels nothing here: use the run itself")

    def cannot(self, does: str, needed: str) -> UserError:
        run = self.run
        trained = f"a {run.model.kind} model"
        if run.task == "pretraining" and run.objective is not None:
            trained += f" that was pretrained (objective={run.objective.kind})"
            needed += " trained for it"
        return UserError(f"{self.folder} holds {trained}: what {does} is {needed}")

    def _reader(self, model: Any) -> TextEncoder:
        """What reads texts with a model, or with what computes one."""
        config = self.run.model
        return TextEncoder(
            model,
            in_frame(self.tokenizer, self.run.decode, config),
            max_length=config.max_length,
            segments=(config.embed.segments or 1) if isinstance(config, Architecture) else 1,
            empty=self._empty(),
            head=config.head if isinstance(config, BertConfig | ElmoConfig) else None,
            device=self.device,
        )

    def _empty(self) -> int | None:
        try:
            return Marks(self.tokenizer, self.run.decode).start
        except UserError:  # files from elsewhere do not have them all
            return None


@dataclass(frozen=True)
class TorchRun(OpenRun):
    """A model of ours, with weights that were trained here or came from elsewhere."""

    model: nn.Module = dataclasses.field(default_factory=nn.Module)
    compiles: bool = False

    def in_int8(self) -> "TorchRun":
        return dataclasses.replace(self, model=in_int8(self.model))

    def in_half(self) -> "TorchRun":
        return dataclasses.replace(self, model=copy.deepcopy(self.model).to(torch.bfloat16))

    def compiled(self) -> "TorchRun":
        if self.device.type != "cuda":
            raise UserError("steps are compiled for a GPU (--device cuda): leave out --compile")
        if not steady(self.model):
            raise UserError(
                f"{self.folder} holds a {self.run.model.kind} model whose steps change from one to "
                "the next: leave out --compile"
            )
        return dataclasses.replace(self, compiles=True)

    def _translator(self, decode: Decode) -> AnyTranslator:
        model, recordings = cast(EncoderDecoder, self.model), Recordings(compiled=self.compiles)
        return Translator(model, self.tokenizer, decode, recordings)

    def _generator(self, decode: Decode, warn: Callable[[str], None]) -> AnyGenerator:
        model, recordings = cast(Gpt, self.model), Recordings(compiled=self.compiles)
        return Generator(model, self.tokenizer, decode, warn, recordings)

    def _encoder(self) -> TextEncoder:
        return self._reader(self.model)

    def _labeller(self) -> ReadsImages:
        return cast(Vit, self.model)


@dataclass(frozen=True)
class OnnxRun(OpenRun):
    """Graphs, run by onnxruntime."""

    def _translator(self, decode: Decode) -> AnyTranslator:
        from manyheads.exchange.onnx import OnnxSeq2Seq, OnnxTranslator

        return OnnxTranslator(OnnxSeq2Seq(self.folder), self.tokenizer, decode)

    def _generator(self, decode: Decode, warn: Callable[[str], None]) -> AnyGenerator:
        from manyheads.exchange.onnx import OnnxGenerator, OnnxGpt

        return OnnxGenerator(OnnxGpt(self.folder), self.tokenizer, decode, warn)

    def _encoder(self) -> TextEncoder:
        from manyheads.exchange.onnx import OnnxEncoder

        if not isinstance(self.run.model, BertConfig):
            return super()._encoder()
        return self._reader(OnnxEncoder(self.folder))

    def _labeller(self) -> ReadsImages:
        from manyheads.exchange.onnx import OnnxVit

        return OnnxVit(self.folder, cast(VitConfig, self.run.model))


@dataclass(frozen=True)
class Ctranslate2Run(OpenRun):
    """A model of CTranslate2, which computes on a device of its own choice where that is `auto`."""

    place: str = "cpu"

    def _translator(self, decode: Decode) -> AnyTranslator:
        from manyheads.exchange.ctranslate2 import Ctranslate2Model, Ctranslate2Translator

        model = Ctranslate2Model(self.folder, "Translator", self.place)
        return Ctranslate2Translator(model, self.tokenizer, decode)

    def _generator(self, decode: Decode, warn: Callable[[str], None]) -> AnyGenerator:
        from manyheads.exchange.ctranslate2 import Ctranslate2Generator, Ctranslate2Model

        model = Ctranslate2Model(self.folder, "Generator", self.place)
        return Ctranslate2Generator(model, self.tokenizer, decode, warn)


@dataclass(frozen=True)
class Several(OpenRun):
    """Models that write together, with the settings of the first."""

    members: tuple[OpenRun, ...] = ()

    def _translator(self, decode: Decode) -> AnyTranslator:
        return together([one._translator(_framed(decode, one)) for one in self.members])


def _framed(decode: Decode, opened: OpenRun) -> Decode:
    """The settings, but for the tokens that a model's own texts begin and end with."""
    own = opened.run.decode
    return dataclasses.replace(decode, start=own.start, end=own.end, source_start=own.source_start)


def several(opened: list[OpenRun]) -> OpenRun:
    """One model, or several that write as one."""
    first = opened[0]
    if len(opened) == 1:
        return first
    for one in opened:
        one.translator()  # says what cannot
    return Several(first.folder, first.run, first.own_tokenizer, first.device, tuple(opened))


def open_any(
    folder: Path,
    device: torch.device | str = "cpu",
    warn: Callable[[str], None] = say_nothing,
) -> OpenRun:
    """Whatever model the folder holds; `warn` is told what it does otherwise than it did there.

    The device `auto` is a GPU where there is one that the program of the folder can use.
    """
    exported = (folder / SETTINGS).is_file()
    if is_huggingface(folder):
        return _open_huggingface(folder, device, warn)
    if (folder / CTRANSLATE2).is_file():
        return Ctranslate2Run(folder, read_run(folder), _tokenizer(folder), place=str(device))
    if (folder / DECODER).is_file() or (folder / ENCODER).is_file():
        if str(device) not in ("auto", "cpu"):
            raise UserError(
                f"{folder} holds graphs, which run on a CPU alone: --device cpu or auto"
            )
        return OnnxRun(folder, read_run(folder), _tokenizer(folder))
    if (folder / CONFIG).is_file() and not exported:
        import_model(folder)  # says what its settings lack
    return open_run(folder, device)


def _open_huggingface(
    folder: Path, device: torch.device | str, warn: Callable[[str], None]
) -> TorchRun:
    imported = import_model(folder)
    config: Any = imported.model.config
    check_vocabulary(folder, imported.tokenizer, config)
    if (folder / SETTINGS).is_file():
        # Weights may leave in another order of channels: the folder's own settings describe them.
        run = dataclasses.replace(read_run(folder), model=config)
    else:
        run = run_of(imported)
        for note in not_done(imported):
            warn(note)
    place = choose_device(str(device))
    return TorchRun(folder, run, imported.tokenizer, place, imported.model.to(place))


def open_run(folder: Path, device: torch.device | str = "cpu") -> TorchRun:
    """Rebuild the model of a run folder with its trained weights."""
    run = read_run(folder)
    weights = folder / checkpoint.WEIGHTS
    if not weights.exists() and (folder / checkpoint.STATE).exists():
        raise UserError(f"{folder} has no {checkpoint.WEIGHTS} yet: let it train to a validation")
    tensors, about = checkpoint.read_tensors(weights)
    if about.get("model") != model_digest(run.model):
        raise DataError(
            f"{weights} belongs to another model than {folder / SETTINGS} describes, or was "
            "written by an older version: run its train command again"
        )
    own = run.tokens is not None
    tokenizer = read_tokenizer(folder) if own else _tokenizer(folder)
    check_vocabulary(folder, tokenizer, run.model, own=own)
    kinds = {tensor.dtype for tensor in tensors.values()}
    model = run.model.build().to(torch.float64 if torch.float64 in kinds else torch.float32)
    checkpoint.load_weights(model, tensors, weights)
    place = choose_device(str(device))
    return TorchRun(folder, run, tokenizer, place, model.to(place).eval())


def check_vocabulary(
    folder: Path, tokenizer: Tokenizer | None, model: ModelConfig, *, own: bool = False
) -> None:
    """Refuse a tokenizer of another model; one from elsewhere may leave some room unused."""
    size, room = tokenizer.vocab_size if tokenizer else 0, model.vocab_size or 0
    if size > room or (own and size < room):
        raise DataError(
            f"{folder / TOKENIZER} has {size} tokens, the model {room}: they do not belong together"
        )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return read_tokenizer(folder) if (folder / TOKENIZER).is_file() else None


def load(run: str | Path, device: str = "cpu") -> nn.Module:
    """The model of a run folder, with its `tokenizer` and its settings as `run`.

    `special` are the tokens that `to_huggingface` writes down as special ones.
    """
    opened = open_any(Path(run), device)
    if not isinstance(opened, TorchRun):
        raise UserError(
            f"{run} was exported, and is no PyTorch model any more: load the run itself"
        )
    opened.model.tokenizer = opened.own_tokenizer  # type: ignore[assignment]
    opened.model.run = opened.run  # type: ignore[assignment]
    special = special_of(opened.own_tokenizer, opened.run.decode, opened.model)
    opened.model.special = special  # type: ignore[assignment]
    return opened.model


def run_of(imported: ImportedModel) -> Run:
    """The settings of a run of a model that was trained elsewhere, writing as it wrote there."""
    config: Any = imported.model.config
    return Run(
        task=TASKS[config.kind], data=None, tokens=None, model=config, decode=decode_of(imported)
    )


def notes_of(imported: ImportedModel) -> list[str]:
    """What a person should know of a model that came in."""
    notes = not_done(imported)
    if imported.tokenizer is None and not isinstance(imported.model.config, VitConfig):
        notes.append(f"the folder has no {TOKENIZER}: put one beside the weights to use texts")
    return notes
