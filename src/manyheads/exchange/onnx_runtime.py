"""Graphs of exchange/onnx.py run by onnxruntime, with the faces of our models and translators."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from manyheads.decode.beam import Decode, DecoderSession
from manyheads.decode.generate import BaseGenerator, ignore
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError, UserError
from manyheads.exchange.foreign import DECODER, ENCODER, HEAD
from manyheads.exchange.onnx import needed
from manyheads.models.vit import Images, VitConfig
from manyheads.nn.positions import Position
from manyheads.nn.shapes import Hidden, Logits, Tokens
from manyheads.tokenizer.tokenizer import Tokenizer

Given = Tensor | np.ndarray
Answer = Float[Tensor, "b *n"]


class OnnxGraph:
    """One file: named tensors in, tensors out, none of them copied on the way."""

    def __init__(self, path: Path) -> None:
        onnxruntime = needed("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # what goes wrong is raised, so not printed too
        if not path.is_file():
            raise UserError(f"there is no {path}: give a folder that was exported to onnx")
        try:
            self.session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
            properties = self.session.get_modelmeta().custom_metadata_map
            self.max_length = int(properties["max_length"])
            self.position = Position()
            self.position.max_length = int(properties["positions"]) or None
        except Exception as error:  # onnxruntime has a class for each kind of broken file
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} is no graph of ours ({reason}): export it again") from None
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy

    def __call__(self, given: dict[str, Tensor]) -> list[Tensor]:
        values = {name: self.value(x.contiguous().numpy()) for name, x in given.items()}
        found = self.session.run_with_ort_values(self.outputs, values)
        return [from_dlpack(value) for value in found]

    @property
    def vocabulary(self) -> int:
        """How many tokens the logits are over."""
        [shape] = [value.shape for value in self.session.get_outputs() if value.name == "logits"]
        return int(shape[-1])

    def nothing(self, kind: str, *rows: int) -> list[Tensor]:
        """The past of so many rows before there is any."""
        shapes = [shape for name, shape in self.inputs.items() if name.startswith(kind)]
        return [torch.zeros(*rows, shape[-3], 0, shape[-1]) for shape in shapes]

    def named(self, kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
        names = [name for name in self.inputs if name.startswith(kind)]
        return dict(zip(names, tensors, strict=True))


class OnnxEncoder:
    """An exported encoder: called like ours, with tensors or arrays of tokens or of images."""

    def __init__(self, folder: Path) -> None:
        self.graph = OnnxGraph(folder / ENCODER)
        self.head = OnnxGraph(folder / HEAD) if (folder / HEAD).exists() else None
        self.max_length = self.graph.max_length

    def hidden(
        self, tokens: Given, real: Given | None = None, segments: Given | None = None
    ) -> Hidden:
        first = torch.as_tensor(tokens)
        if "images" in self.graph.inputs:
            return self.graph({"images": first})[0]
        self.graph.position.refuse_past(first.shape[1])
        given = {
            "tokens": first,
            "real": torch.ones_like(first) if real is None else torch.as_tensor(real),
            "segments": torch.zeros_like(first) if segments is None else torch.as_tensor(segments),
        }
        given["real"] = given["real"].bool()
        return self.graph({name: given[name] for name in self.graph.inputs})[0]

    def answer(self, hidden: Hidden) -> Answer:
        """What the model gives for hidden states, e.g. for those of the masked positions alone."""
        return hidden if self.head is None else self.head({"hidden": hidden})[0]

    def __call__(
        self, tokens: Given, real: Given | None = None, segments: Given | None = None
    ) -> Answer:
        return self.answer(self.hidden(tokens, real, segments))


class OnnxVit:
    """An exported encoder of images with the settings of its model: called like ours."""

    def __init__(self, folder: Path, config: VitConfig) -> None:
        self.config = config
        self.encoder = OnnxEncoder(folder)
        wanted = [config.channels, config.image_size, config.image_size]
        if self.encoder.graph.inputs.get("images", [])[1:] != wanted:
            raise DataError(
                f"{folder / ENCODER} does not take the images of {wanted} (channels, height, "
                "width) that the settings beside it name: export it again"
            )

    def __call__(self, images: Images) -> Answer:
        return self.encoder(images)


class OnnxGpt:
    """An exported decoder: called like ours, or a step at a time."""

    def __init__(self, folder: Path) -> None:
        self.graph = OnnxGraph(folder / DECODER)
        self.max_length = self.graph.max_length

    def step(
        self, tokens: Tokens, at: Int[Tensor, " wanted"], past: list[Tensor]
    ) -> tuple[Float[Tensor, "b wanted v"], list[Tensor]]:
        """Logits at the wanted ones of the newest positions, and what is past after them."""
        self.graph.position.refuse_past(past[0].shape[2] + tokens.shape[1])
        given = {"tokens": tokens, "at": at, **self.graph.named("past", past)}
        logits, *present = self.graph(given)
        return logits, present

    def __call__(self, tokens: Tokens) -> Logits:
        past = self.graph.nothing("past", tokens.shape[0])
        return self.step(tokens, torch.arange(tokens.shape[1]), past)[0]


class OnnxSession:
    """An exported decoder; `past` holds tensors [n, k, heads, positions, channels]."""

    past: list[Tensor]

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        beams = self.past[0].shape[1]  # 1 as long as the hypotheses of a sentence are one
        logits = self.read(tokens[:, :beams])
        return logits.repeat_interleave(tokens.shape[1] // beams, 1)

    def read(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        """Logits after these tokens; `past` grows by them."""
        raise NotImplementedError

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        rows = torch.arange(len(parents))[:, None]
        beams = self.past[0].shape[1]
        self.past = [x[rows, parents if beams > 1 else parents * 0] for x in self.past]

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.past = [x.index_select(0, sentences) for x in self.past]


class OnnxGptSession(OnnxSession):
    """A decoder-only model; the last token of a prompt is read by the first step."""

    def __init__(self, model: OnnxGpt, prompts: Int[Tensor, "n length"]) -> None:
        self.model = model
        past = model.graph.nothing("past", prompts.shape[0])
        if prompts.shape[1] > 1:
            nowhere = torch.arange(0)
            _, past = model.step(prompts[:, :-1], nowhere, past)
        self.past = [x[:, None] for x in past]

    def read(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        past = [x.flatten(0, 1) for x in self.past]
        logits, past = self.model.step(tokens.reshape(-1, 1), torch.tensor([0]), past)
        self.past = [x.unflatten(0, tokens.shape) for x in past]
        return logits.view(*tokens.shape, -1)


@dataclass(frozen=True)
class OnnxGenerator(BaseGenerator):
    """An exported decoder with its tokenizer and the settings it writes with."""

    model: OnnxGpt
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = ignore

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def context(self) -> int | None:
        return self.model.max_length

    @property
    def positions(self) -> int | None:
        return self.model.graph.position.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.graph.vocabulary

    def begin(self, *texts: Tensor) -> DecoderSession:
        return OnnxGptSession(self.model, *texts)


class OnnxSeq2Seq:
    """An exported encoder–decoder: called like ours, or a step at a time."""

    def __init__(self, folder: Path) -> None:
        self.encoder = OnnxGraph(folder / ENCODER)
        self.decoder = OnnxGraph(folder / DECODER)
        self.max_length = self.decoder.max_length

    def encode(self, source: Tokens, real: Bool[Tensor, "b t"]) -> list[Tensor]:
        """What the cross-attentions look at."""
        self.encoder.position.refuse_past(source.shape[1])
        return self.encoder({"source": source, "real": real})

    def step(
        self,
        tokens: Int[Tensor, "b n t"],
        at: Int[Tensor, " wanted"],
        real: Bool[Tensor, "b s"],
        cross: list[Tensor],
        past: list[Tensor],
    ) -> tuple[Float[Tensor, "b n wanted v"], list[Tensor]]:
        """Logits at the wanted ones of the newest positions, and what is past after them."""
        self.decoder.position.refuse_past(past[0].shape[3] + tokens.shape[2])
        given = {"tokens": tokens, "at": at, "real": real}
        given |= self.decoder.named("cross", cross) | self.decoder.named("past", past)
        logits, *present = self.decoder(given)
        return logits, present

    def __call__(
        self, source: Tokens, target: Int[Tensor, "b u"], source_real: Tensor | None = None
    ) -> Float[Tensor, "b u v"]:
        """Teacher forcing: logits at t predict the token after target[t]."""
        real = torch.ones_like(source, dtype=torch.bool) if source_real is None else source_real
        past = self.decoder.nothing("past", target.shape[0], 1)
        everywhere = torch.arange(target.shape[1])
        cross = self.encode(source, real)
        return self.step(target[:, None], everywhere, real, cross, past)[0][:, 0]


class OnnxSeq2SeqSession(OnnxSession):
    """An encoder–decoder; the keys and values of a source are held once a sentence."""

    def __init__(self, model: OnnxSeq2Seq, source: Tokens, real: Bool[Tensor, "b t"]) -> None:
        self.model, self.real = model, real
        self.cross = model.encode(source, real)
        self.past = model.decoder.nothing("past", source.shape[0], 1)

    def read(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        logits, self.past = self.model.step(
            tokens[..., None], torch.tensor([0]), self.real, self.cross, self.past
        )
        return logits[:, :, 0]

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        super().keep_sentences(sentences)
        self.real = self.real[sentences]
        self.cross = [x.index_select(0, sentences) for x in self.cross]


@dataclass(frozen=True)
class OnnxTranslator(BaseTranslator):
    """An exported encoder–decoder with its tokenizer and the settings it writes with."""

    model: OnnxSeq2Seq
    tokenizer: Tokenizer
    decode: Decode

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def vocabulary(self) -> int:
        return self.model.decoder.vocabulary

    def begin(self, *texts: Tensor) -> DecoderSession:
        return OnnxSeq2SeqSession(self.model, *texts)
