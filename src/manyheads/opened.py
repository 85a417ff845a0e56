"""A folder that holds a model, whichever program wrote it, ready to use.

A run of ours, a folder of `transformers`, and what `manyheads export` wrote for CTranslate2 and
onnxruntime translate, generate, embed, fill and classify by the same commands, as far as the
program that runs them can.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.decode.beam import Decode, Marks
from manyheads.decode.generate import AnyGenerator, Generator, say_nothing
from manyheads.decode.translate import AnyTranslator, Translator
from manyheads.encode import TextEncoder
from manyheads.errors import BadData, Mistake
from manyheads.exchange.ctranslate2 import WEIGHTS as CTRANSLATE2
from manyheads.exchange.folder import in_frame, special_of
from manyheads.exchange.huggingface import CONFIG, Arrival, is_huggingface, receive
from manyheads.exchange.onnx import DECODER, ENCODER
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import VitConfig
from manyheads.presets import ModelConfig
from manyheads.run import SETTINGS, TASKS, TOKENIZER, Run, model_digest, read_run
from manyheads.tokens import Tokenizer
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
            raise Mistake(f"{self.folder} has no {TOKENIZER}: put the model's own there")
        return self.own_tokenizer

    def decode(self, **changes: Any) -> Decode:
        return dataclasses.replace(self.run.decode, **changes)

    def translator(self, **changes: Any) -> AnyTranslator:
        """What translates, with some settings of `decode` changed."""
        raise self.cannot("translates", "an encoder–decoder")

    def generator(self, warn: Callable[[str], None] = say_nothing, **changes: Any) -> AnyGenerator:
        """What continues a text."""
        raise self.cannot("continues texts", "a decoder-only model")

    def encoder(self) -> TextEncoder:
        """What reads texts."""
        if self.reads_images:
            raise Mistake(f"{self.folder} holds a model of images, which no command reads yet")
        raise Mistake(
            f"{self.folder} was exported to write texts, and gives no vectors or labels: use the "
            "run that it came from"
        )

    @property
    def reads_images(self) -> bool:
        return isinstance(self.run.model, VitConfig)

    def cannot(self, does: str, needed: str) -> Mistake:
        kind = self.run.model.kind
        return Mistake(f"{self.folder} holds a {kind} model: what {does} is {needed}")

    def _reader(self, model: Any) -> TextEncoder:
        """What reads texts with a model, or with what computes one."""
        config = self.run.model
        return TextEncoder(
            model,
            in_frame(self.tokenizer, self.run.decode, config),
            max_length=config.max_length,
            segments=config.embed.segments or 1,
            empty=self._empty(),
            head=config.head if isinstance(config, BertConfig) else None,
            device=self.device,
        )

    def _empty(self) -> int | None:
        try:
            return Marks(self.tokenizer, self.run.decode).start
        except Mistake:  # files from elsewhere do not have them all
            return None


@dataclass(frozen=True)
class TorchRun(OpenRun):
    """A model of ours, with weights that were trained here or came from elsewhere."""

    model: nn.Module = dataclasses.field(default_factory=nn.Module)

    def translator(self, **changes: Any) -> AnyTranslator:
        if not isinstance(self.model, Seq2Seq):
            return super().translator()
        return Translator(self.model, self.tokenizer, self.decode(**changes))

    def generator(self, warn: Callable[[str], None] = say_nothing, **changes: Any) -> AnyGenerator:
        if not isinstance(self.model, Gpt):
            return super().generator()
        return Generator(self.model, self.tokenizer, self.decode(**changes), warn)

    def encoder(self) -> TextEncoder:
        return super().encoder() if self.reads_images else self._reader(self.model)


@dataclass(frozen=True)
class OnnxRun(OpenRun):
    """Graphs, run by onnxruntime."""

    def translator(self, **changes: Any) -> AnyTranslator:
        from manyheads.exchange.onnx_runtime import OnnxSeq2Seq, OnnxTranslator

        if TASKS[self.run.model.kind] != "translation":
            return super().translator()
        return OnnxTranslator(OnnxSeq2Seq(self.folder), self.tokenizer, self.decode(**changes))

    def generator(self, warn: Callable[[str], None] = say_nothing, **changes: Any) -> AnyGenerator:
        from manyheads.exchange.onnx_runtime import OnnxGenerator, OnnxGpt

        if TASKS[self.run.model.kind] != "language":
            return super().generator()
        model = OnnxGpt(self.folder)
        return OnnxGenerator(model, self.tokenizer, self.decode(**changes), warn)

    def encoder(self) -> TextEncoder:
        from manyheads.exchange.onnx_runtime import OnnxEncoder

        if not isinstance(self.run.model, BertConfig):
            return super().encoder()
        return self._reader(OnnxEncoder(self.folder))


@dataclass(frozen=True)
class Ctranslate2Run(OpenRun):
    """A model of CTranslate2."""

    def translator(self, **changes: Any) -> AnyTranslator:
        from manyheads.exchange.ctranslate2_runtime import Ctranslate2Model, Ctranslate2Translator

        if TASKS[self.run.model.kind] != "translation":
            return super().translator()
        model = Ctranslate2Model(self.folder, "Translator")
        return Ctranslate2Translator(model, self.tokenizer, self.decode(**changes))

    def generator(self, warn: Callable[[str], None] = say_nothing, **changes: Any) -> AnyGenerator:
        from manyheads.exchange.ctranslate2_runtime import Ctranslate2Generator, Ctranslate2Model

        if TASKS[self.run.model.kind] != "language":
            return super().generator()
        model = Ctranslate2Model(self.folder, "Generator")
        return Ctranslate2Generator(model, self.tokenizer, self.decode(**changes))


def open_any(folder: Path, device: torch.device | str = "cpu") -> OpenRun:
    """Whatever model the folder holds."""
    device = torch.device(device)
    exported = (folder / SETTINGS).is_file()
    if is_huggingface(folder):
        arrival = receive(folder)
        check_vocabulary(folder, arrival.tokenizer, arrival.model.config)  # type: ignore[arg-type]
        run = read_run(folder) if exported else run_of(arrival)
        return TorchRun(folder, run, arrival.tokenizer, device, arrival.model.to(device))
    if (folder / CTRANSLATE2).is_file():
        return Ctranslate2Run(folder, read_run(folder), _tokenizer(folder))
    if (folder / DECODER).is_file() or (folder / ENCODER).is_file():
        return OnnxRun(folder, read_run(folder), _tokenizer(folder))
    if (folder / CONFIG).is_file() and not exported:
        receive(folder)  # says what its settings lack
    return open_run(folder, device)


def open_run(folder: Path, device: torch.device | str = "cpu") -> TorchRun:
    """Rebuild the model of a run folder with its trained weights."""
    run = read_run(folder)
    weights = folder / checkpoint.WEIGHTS
    if not weights.exists() and (folder / checkpoint.STATE).exists():
        raise Mistake(f"{folder} has no {checkpoint.WEIGHTS} yet: let it train to a validation")
    tensors, about = checkpoint.read_tensors(weights)
    if about.get("model") != model_digest(run.model):
        raise BadData(f"{weights} belongs to another model than {folder / SETTINGS} describes")
    own = run.tokens is not None
    tokenizer = Tokenizer.load(folder / TOKENIZER) if own else _tokenizer(folder)
    check_vocabulary(folder, tokenizer, run.model, own=own)
    model = run.model.build()
    checkpoint.load_weights(model, tensors, weights)
    device = torch.device(device)
    return TorchRun(folder, run, tokenizer, device, model.to(device).eval())


def check_vocabulary(
    folder: Path, tokenizer: Tokenizer | None, model: ModelConfig, *, own: bool = False
) -> None:
    """Refuse a tokenizer of another model; one from elsewhere may leave some room unused."""
    size, room = tokenizer.vocab_size if tokenizer else 0, model.vocab_size or 0
    if size > room or (own and size < room):
        raise BadData(
            f"{folder / TOKENIZER} has {size} tokens, the model {room}: they do not belong together"
        )


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / TOKENIZER
    return Tokenizer.load(path) if path.is_file() else None


def load(run: str | Path, device: str = "cpu") -> nn.Module:
    """The model of a run folder, with its `tokenizer` and its settings as `run`.

    `special` are the tokens that `to_huggingface` writes down as special ones.
    """
    opened = open_any(Path(run), device)
    if not isinstance(opened, TorchRun):
        raise Mistake(f"{run} was exported, and is no PyTorch model any more: load the run itself")
    opened.model.tokenizer = opened.own_tokenizer  # type: ignore[assignment]
    opened.model.run = opened.run  # type: ignore[assignment]
    special = special_of(opened.own_tokenizer, opened.run.decode, opened.model)
    opened.model.special = special  # type: ignore[assignment]
    return opened.model


STOPPING = {False: "none-better-now", True: "beam-ended", "never": "none-better-ever"}
# What `generate` can be told there and our writing has not, and the value that asks for nothing.
NOT_DONE: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "renormalize_logits": False,
    "constraints": None,
    "force_words_ids": None,
    "sequence_bias": None,
}


def run_of(arrival: Arrival) -> Run:
    """The settings of a run of a model that was trained elsewhere, writing as it wrote there."""
    config: Any = arrival.model.config
    return Run(
        task=TASKS[config.kind], data=None, tokens=None, model=config, decode=decode_of(arrival)
    )


def decode_of(arrival: Arrival) -> Decode:
    """How the model is told to write there, in our terms; docs/models.md says where they differ."""
    told = {**arrival.settings, **{k: v for k, v in arrival.generation.items() if v is not None}}
    special = arrival.special
    paired = isinstance(arrival.model, Seq2Seq)
    before = arrival.tokenizer.frame()[0] if arrival.tokenizer and paired else []
    single = [words[0] for words in told.get("bad_words_ids") or [] if len(words) == 1]
    return Decode(
        beam=int(told.get("num_beams") or 1),
        length_penalty=float(told.get("length_penalty", 1.0)),
        penalty="length",
        stopping=STOPPING.get(told.get("early_stopping", False), "none-better-now"),  # type: ignore[arg-type]
        at_limit="free-end" if paired and "forced_eos_token_id" in special else "cut",
        # Theirs counts the start of a translation, and the prompt of a text.
        shortest=int(told.get("min_new_tokens") or max(0, (told.get("min_length") or 0) - 1)),
        first=special.get("forced_bos_token_id") if paired else None,
        start=special.get("decoder_start_token_id" if paired else "bos_token_id"),
        end=special.get("eos_token_id"),
        banned=tuple(dict.fromkeys([*single, *(told.get("suppress_tokens") or [])])),
        source_start=before[0] if before else None,
    )


def notes_of(arrival: Arrival) -> list[str]:
    """What a person should know of a model that came in."""
    told = {**arrival.settings, **arrival.generation}
    notes = [
        f"{CONFIG} asks for {name}={told[name]} in writing, which is not done here"
        for name, nothing in NOT_DONE.items()
        if told.get(name) not in (None, nothing)
    ]
    ends = told.get("eos_token_id")
    if isinstance(ends, list) and len(ends) > 1:
        notes.append(f"there a text ends with any of the tokens {ends}, here with {ends[0]} alone")
    paired = isinstance(arrival.model, Seq2Seq)
    if paired and arrival.tokenizer and not arrival.tokenizer.frame()[1]:
        notes.append(f"{TOKENIZER} puts no end after a text: here every source gets one")
    if arrival.tokenizer is None and not isinstance(arrival.model.config, VitConfig):
        notes.append(f"the folder has no {TOKENIZER}: put one beside the weights to use texts")
    return notes
