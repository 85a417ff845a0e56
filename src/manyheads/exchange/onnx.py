"""Models as ONNX graphs (float32, any batch and length), and onnxruntime to run them.

    encoder  encoder.onnx   tokens, real (and segments), or images → hidden
             head.onnx      hidden → logits, if the model has a head
    decoder  decoder.onnx   tokens, at, past_key_0, past_value_0, … → logits, present_key_0, …
    encoder–decoder
             encoder.onnx   source, real → cross_key_0, cross_value_0, …
             decoder.onnx   as above, in addition real and cross_key_0, cross_value_0, …

`tokens` are those after the cached ones, of which there may be none; `at` holds the positions among
them that need logits. An encoder–decoder takes tokens [sentence, hypothesis, position]: the
hypotheses of a sentence share its cross-attention keys and values. Positions, masks and the cache
are inside the graphs. Weights too large for a protocol buffer are in a file `*.onnx.data`.
"""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.dlpack import from_dlpack

from manyheads.decode.beam import Decode, DecoderSession
from manyheads.decode.decoder import BaseDecoder
from manyheads.decode.generate import BaseGenerator, ignore
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError, UserError, import_optional
from manyheads.exchange import DECODER, ENCODER, HEAD
from manyheads.exchange.family import refuse_approximations
from manyheads.fileio import replace_files
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.heads import HeadOutput
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.models.vit import Images, Vit, VitConfig
from manyheads.nn.attention import (
    AttentionInputs,
    CrossAttention,
    Dense,
    KeysAndValues,
    SelfAttention,
)
from manyheads.nn.masks import AttentionMask, Rule, full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.shapes import Hidden, Tokens
from manyheads.tokenizer.tokenizer import Tokenizer

OPSET = 18  # the exporter needs no conversion to it; all current runtimes support it
MAX_INLINE_BYTES = 2**30  # of weights inside a graph; a protocol buffer ends at twice that

BATCH, BEAMS, NEW, PAST, SOURCE, AT = map(Dim, ("batch", "beams", "new", "past", "source", "at"))
Named = dict[str, Tensor]
Inputs = dict[str, tuple[Tensor, dict[int, Dim]]]  # an example of each input, its dynamic axes
Array = Tensor | np.ndarray


# ---------------------------------------------------------------------------------------------
# Export


def write_onnx(model: nn.Module, folder: Path) -> None:
    """Write the graphs of a model into a folder, all of them or none."""
    import_optional("onnx", "exchange")
    import_optional("onnxscript", "exchange")
    exported = copy.deepcopy(model).cpu().float().eval()
    graphs = _graphs(exported)
    refuse_approximations(model)
    for module in exported.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.core = ExportAttention()
    with replace_files(folder) as temporary:
        for name, graph in graphs.items():
            _write(graph, temporary / name)
        for name in (ENCODER, HEAD, DECODER):  # of an earlier model
            (folder / name).unlink(missing_ok=True)
            (folder / f"{name}.data").unlink(missing_ok=True)


@dataclass(frozen=True)
class Graph:
    """One file: a function of a model and named tensors, its inputs and the names of its outputs.

    `position` limits the length of the tokens.
    """

    model: nn.Module
    function: Callable[[Any, Named], Any]
    inputs: Inputs
    outputs: list[str]
    max_length: int
    position: Position


class GraphModule(nn.Module):
    """The function of a graph as the exporter takes it."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.model, self.function = graph.model, graph.function

    def forward(self, inputs: Named) -> Any:
        return self.function(self.model, inputs)


def _write(graph: Graph, path: Path) -> None:
    with _quietly(), torch.no_grad():
        try:
            program = torch.onnx.export(
                GraphModule(graph),
                # The exporter would take a dictionary at the end for keyword arguments.
                ({name: example for name, (example, _) in graph.inputs.items()}, {}),
                dynamo=True,
                input_names=list(graph.inputs),
                output_names=graph.outputs,
                dynamic_shapes=({name: axes for name, (_, axes) in graph.inputs.items()},),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
            reason = next((line for line in lines if line), type(error).__name__)
            raise UserError(f"PyTorch's ONNX exporter cannot export this model: {reason}") from None
        assert program is not None
        exported = program.model.graph
        # A module that converts a size to a Python number fixes the axis, without a warning.
        for (name, (_, axes)), value in zip(graph.inputs.items(), exported.inputs, strict=True):
            for axis in axes:
                if value.shape is None or isinstance(value.shape[axis], int):
                    raise UserError(
                        f"PyTorch's ONNX exporter fixed axis {axis} of {name} to the size of the "
                        "example: change the module that uses the size as a Python number"
                    )
        # The exporter stores stack traces with the paths of this machine.
        exported.metadata_props.clear()
        for node in exported.all_nodes():
            node.metadata_props.clear()
        properties = program.model.metadata_props
        properties["max_length"] = str(graph.max_length)
        properties["positions"] = str(graph.position.max_length or 0)  # 0: unlimited
        weights = [value.const_value for value in exported.initializers.values()]
        size = sum(weight.nbytes for weight in weights if weight is not None)
        program.save(path, external_data=size > MAX_INLINE_BYTES)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's remarks on optional packages, axis names and failed strategies."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class ExportAttention(Dense):
    """Plain matrix products, which every runtime has, for masks of any shape.

    Relative positions have shortcuts for square masks that compute sizes in Python, which the
    exporter would turn into constants.
    """

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        inputs.mask.square = False
        return super().__call__(replace(inputs, dropout=0.0))


class ExportCache:
    """A cache whose past is an input of the graph and whose present is an output.

    The tokens of n hypotheses are concatenated; each hypothesis has its own row of past keys and
    values. Modules come in the order of their layers.
    """

    def __init__(self, past: list[Tensor], cross: list[Tensor], beams: int) -> None:
        self.length, self.beams = past[0].shape[2], beams
        self.past, self.cross = (zip(x[::2], x[1::2], strict=True) for x in (past, cross))
        self.present: list[Tensor] = []

    def end(self, length: int) -> int:
        return self.length + length

    def mask(
        self, rule: Rule, length: int, padding_mask: Tensor | None, device: torch.device
    ) -> AttentionMask:
        self.row_mask = make_mask(rule, length // self.beams, start=self.length, device=device)
        queries = self.row_mask.query_positions.repeat(1, self.beams)
        return AttentionMask(rule, queries, self.row_mask.key_positions)

    def advance(self, positions: int | None = None) -> None:
        """A graph is one pass."""

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        n = self.beams
        q, k, v = (rearrange(x, "b h (n t) c -> (b n) h t c", n=n) for x in (q, k, v))
        past_k, past_v = next(self.past)
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.present += [k, v]
        out = module.attend(q, k, v, self.row_mask, position)
        return rearrange(out, "(b n) h t c -> b h (n t) c", n=n)

    def cross_kv(self, module: nn.Module, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        return next(self.cross)


def _select(prefix: str, inputs: Named) -> list[Tensor]:
    return [tensor for name, tensor in inputs.items() if name.startswith(prefix)]


def _encode_source(model: Seq2Seq, inputs: Named) -> list[Tensor]:
    """The keys and values of every cross-attention layer, computed once per sentence."""
    states = model.encode(inputs["source"], inputs["real"]).states
    layers = [x for x in model.decoder.modules() if isinstance(x, CrossAttention)]
    return [x for layer in layers for x in layer.project_kv(states)]


def _decode_target(model: Seq2Seq, inputs: Named) -> list[Tensor]:
    """A step of the decoder over n hypotheses of each of b sentences."""
    tokens, real, cross = inputs["tokens"], inputs["real"], _select("cross", inputs)
    past = [rearrange(x, "b n g s c -> (b n) g s c") for x in _select("past", inputs)]
    cache = ExportCache(past, cross, tokens.shape[1])
    # The encoder's states are not needed: the cache has their keys and values.
    memory = EncoderOutput(cross[0], make_mask(full, real.shape[1], padding_mask=real))
    hidden = model.decode(rearrange(tokens, "b n t -> b (n t)"), memory, cache=cache)
    hidden = rearrange(hidden, "b (n t) d -> b n t d", n=tokens.shape[1])
    logits = model.logits(hidden.index_select(2, inputs["at"]))
    return [logits, *(x.unflatten(0, tokens.shape[:2]) for x in cache.present)]


def _decode_text(model: Gpt, inputs: Named) -> list[Tensor]:
    """A step of a decoder-only model."""
    cache = ExportCache(_select("past", inputs), [], beams=1)
    hidden = model.hidden(inputs["tokens"], cache=cache)
    return [model.logits(hidden.index_select(1, inputs["at"])), *cache.present]


def _encode(model: Any, inputs: Named) -> Tensor:
    return model.hidden(*inputs.values())


def _head(model: Any, inputs: Named) -> Tensor:
    return model.head_output(inputs["hidden"])


def _graphs(model: nn.Module) -> dict[str, Graph]:
    """The graphs of a model by file name, with examples of their inputs.

    The sizes of the examples differ, and none is 1, so that the exporter confuses no two axes.
    """
    if isinstance(model, Seq2Seq):
        longest, stack = model.config.max_length, model.decoder
        real: Inputs = {"real": (torch.ones(2, 5, dtype=torch.bool), {0: BATCH, 1: SOURCE})}
        source: Inputs = {"source": (torch.zeros(2, 5, dtype=torch.long), {0: BATCH, 1: SOURCE})}
        tokens = torch.zeros(2, 3, 4, dtype=torch.long)
        cross = _kv_inputs("cross", stack, CrossAttention, {0: BATCH, 2: SOURCE}, 2, 5)
        past = _kv_inputs("past", stack, SelfAttention, {0: BATCH, 1: BEAMS, 3: PAST}, 2, 3, 7)
        inputs: Inputs = {
            "tokens": (tokens, {0: BATCH, 1: BEAMS, 2: NEW}),
            "at": (torch.arange(3), {0: AT}),
            **real,
            **cross,
            **past,
        }
        position, outputs = model.encoder.position, _present(past)
        return {
            ENCODER: Graph(model, _encode_source, source | real, [*cross], longest, position),
            DECODER: Graph(model, _decode_target, inputs, outputs, longest, stack.position),
        }
    if isinstance(model, Gpt):
        longest, stack = model.config.max_length, model.decoder
        past = _kv_inputs("past", stack, SelfAttention, {0: BATCH, 2: PAST}, 2, 3)
        inputs = {
            "tokens": (torch.zeros(2, 4, dtype=torch.long), {0: BATCH, 1: NEW}),
            "at": (torch.arange(3), {0: AT}),
            **past,
        }
        outputs = _present(past)
        return {DECODER: Graph(model, _decode_text, inputs, outputs, longest, stack.position)}
    if isinstance(model, Bert):
        tokens, axes = torch.zeros(2, 3, dtype=torch.long), {0: BATCH, 1: NEW}
        inputs = {"tokens": (tokens, axes), "real": (tokens == 0, axes)}
        if model.embedding.segment is not None:
            inputs["segments"] = (tokens.clone(), axes)  # the same tensor would be one input
        longest = model.config.max_length
        has_head = model.config.head is not None or model.config.next_sentence is not None
    elif isinstance(model, Vit):
        size, longest = model.config.image_size, model.config.positions
        inputs = {"images": (torch.zeros(2, model.config.channels, size, size), {0: BATCH})}
        has_head = model.config.head is not None
    else:
        raise UserError(
            f"no ONNX graph for a {type(model).__name__}: export a seq2seq, gpt, bert or vit"
        )
    graphs = {ENCODER: Graph(model, _encode, inputs, ["hidden"], longest, model.encoder.position)}
    if has_head:
        hidden: Inputs = {"hidden": (torch.zeros(2, 3, model.config.dim), {0: BATCH, 1: NEW})}
        graphs[HEAD] = Graph(model, _head, hidden, ["logits"], longest, Position())
    return graphs


def _kv_inputs(
    prefix: str, stack: nn.Module, kind: type[nn.Module], axes: dict[int, Dim], *sizes: int
) -> Inputs:
    """Example keys and values of every layer: [*rows, kv heads, positions, channels]."""
    *rows, positions = sizes
    inputs: Inputs = {}
    modules: list[Any] = [module for module in stack.modules() if isinstance(module, kind)]
    for layer, config in enumerate(module.config for module in modules):
        for name, channels in zip(("key", "value"), config.sizes[1:], strict=True):
            shape = (*rows, config.kv_heads, positions, channels // config.kv_heads)
            inputs[f"{prefix}_{name}_{layer}"] = (torch.zeros(shape), axes)
    return inputs


def _present(past: Inputs) -> list[str]:
    """The outputs of a decoder."""
    return ["logits", *(name.replace("past", "present") for name in past)]


# ---------------------------------------------------------------------------------------------
# onnxruntime


class OnnxGraph:
    """One file: named tensors in, tensors out, without copies."""

    def __init__(self, path: Path) -> None:
        onnxruntime = import_optional("onnxruntime", "exchange")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised, so not printed
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
            raise DataError(
                f"{path} is not an exported graph ({reason}): export it again"
            ) from None
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = {value.name: value.shape for value in self.session.get_outputs()}
        self.to_value = onnxruntime.OrtValue.ortvalue_from_numpy

    def __call__(self, inputs: Named) -> list[Tensor]:
        values = {name: self.to_value(x.contiguous().numpy()) for name, x in inputs.items()}
        outputs = self.session.run_with_ort_values(list(self.outputs), values)
        return [from_dlpack(value) for value in outputs]


class OnnxDecoder(OnnxGraph):
    """A decoder; tokens are [sentence, hypothesis, position], past keys [n, k, heads, s, c]."""

    @property
    def vocabulary(self) -> int:
        return int(self.outputs["logits"][-1])

    def empty_past(self, sentences: int) -> list[Tensor]:
        """The past of one hypothesis a sentence before its first token."""
        shapes = [shape for name, shape in self.inputs.items() if name.startswith("past")]
        return [torch.zeros(sentences, 1, shape[-3], 0, shape[-1]) for shape in shapes]

    def step(
        self, tokens: Int[Tensor, "n k t"], at: Int[Tensor, " a"], past: list[Tensor], others: Named
    ) -> tuple[Float[Tensor, "n k a v"], list[Tensor]]:
        """Logits at the positions `at` among the new tokens, and the past that includes them."""
        self.position.check_length(past[0].shape[-2] + tokens.shape[-1])
        names = [name for name in self.inputs if name.startswith("past")]
        hypotheses = tokens.shape[:2]
        flat = len(self.inputs["tokens"]) == 2  # a decoder-only model has no axis of hypotheses
        if flat:
            tokens, past = tokens.flatten(0, 1), [x.flatten(0, 1) for x in past]
        outputs = self(
            {"tokens": tokens, "at": at, **others, **dict(zip(names, past, strict=True))}
        )
        logits, *past = [x.unflatten(0, hypotheses) for x in outputs] if flat else outputs
        return logits, past


class OnnxSession:
    """An exported decoder in the middle of decoding; `others` are the inputs of each sentence."""

    def __init__(self, graph: OnnxDecoder, past: list[Tensor], others: Named) -> None:
        self.graph, self.past, self.others = graph, past, others

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        beams = self.past[0].shape[1]  # 1 until the hypotheses of a sentence differ
        newest = tokens[:, :beams, None]
        logits, self.past = self.graph.step(newest, torch.tensor([0]), self.past, self.others)
        return logits[:, :, 0].repeat_interleave(tokens.shape[1] // beams, 1)

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        rows = torch.arange(len(parents))[:, None]
        beams = self.past[0].shape[1]
        self.past = [x[rows, parents if beams > 1 else parents * 0] for x in self.past]

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        self.past = [x[sentences] for x in self.past]
        self.others = {name: x[sentences] for name, x in self.others.items()}


class OnnxGpt:
    """An exported decoder-only model."""

    def __init__(self, folder: Path) -> None:
        self.decoder = OnnxDecoder(folder / DECODER)

    def begin(self, prompts: Int[Tensor, "n length"]) -> OnnxSession:
        """A session after the prompts, whose last tokens the first step reads."""
        past = self.decoder.empty_past(len(prompts))
        if prompts.shape[1] > 1:
            no_logits = torch.arange(0)
            _, past = self.decoder.step(prompts[:, None, :-1], no_logits, past, {})
        return OnnxSession(self.decoder, past, {})


class OnnxSeq2Seq:
    """An exported encoder–decoder."""

    def __init__(self, folder: Path) -> None:
        self.encoder = OnnxGraph(folder / ENCODER)
        self.decoder = OnnxDecoder(folder / DECODER)

    def begin(self, source: Tokens, real: Bool[Tensor, "b t"]) -> OnnxSession:
        """A session that has read the sources."""
        self.encoder.position.check_length(source.shape[1])
        cross = self.encoder({"source": source, "real": real})
        others = {"real": real, **dict(zip(self.encoder.outputs, cross, strict=True))}
        return OnnxSession(self.decoder, self.decoder.empty_past(len(source)), others)


class OnnxEncoder:
    """An exported encoder: called like ours, with tensors or arrays of tokens or of images."""

    def __init__(self, folder: Path) -> None:
        self.graph = OnnxGraph(folder / ENCODER)
        self.head = OnnxGraph(folder / HEAD) if (folder / HEAD).exists() else None

    def hidden(
        self, tokens: Array, real: Array | None = None, segments: Array | None = None
    ) -> Hidden:
        first = torch.as_tensor(tokens)
        if "images" in self.graph.inputs:
            return self.graph({"images": first})[0]
        self.graph.position.check_length(first.shape[1])
        inputs = {
            "tokens": first,
            "real": (torch.ones_like(first) if real is None else torch.as_tensor(real)).bool(),
            "segments": torch.zeros_like(first) if segments is None else torch.as_tensor(segments),
        }
        return self.graph({name: inputs[name] for name in self.graph.inputs})[0]

    def head_output(self, hidden: Hidden) -> HeadOutput:
        """The model's output for hidden states, e.g. for those of the masked positions only."""
        return hidden if self.head is None else self.head({"hidden": hidden})[0]

    def __call__(
        self, tokens: Array, real: Array | None = None, segments: Array | None = None
    ) -> HeadOutput:
        return self.head_output(self.hidden(tokens, real, segments))


class OnnxVit(OnnxEncoder):
    """An exported image encoder with the settings of its run."""

    def __init__(self, folder: Path, config: VitConfig) -> None:
        super().__init__(folder)
        self.config = config
        shape = [config.channels, config.image_size, config.image_size]
        if self.graph.inputs.get("images", [])[1:] != shape:
            raise DataError(
                f"{folder / ENCODER} does not take images of {shape} (channels, height, width), "
                "the size in run.toml: export it again"
            )

    def __call__(self, images: Images) -> HeadOutput:  # type: ignore[override]
        return super().__call__(images)


class OnnxRunner(BaseDecoder):
    """The base of translator and generator: onnxruntime on the CPU."""

    model: OnnxGpt | OnnxSeq2Seq

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def vocabulary(self) -> int:
        return self.model.decoder.vocabulary

    def begin(self, *texts: Tensor) -> DecoderSession:
        return self.model.begin(*texts)


@dataclass(frozen=True)
class OnnxGenerator(OnnxRunner, BaseGenerator):
    model: OnnxGpt
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = ignore

    @property
    def context(self) -> int | None:
        return self.model.decoder.max_length

    @property
    def positions(self) -> int | None:
        return self.model.decoder.position.max_length


@dataclass(frozen=True)
class OnnxTranslator(OnnxRunner, BaseTranslator):
    model: OnnxSeq2Seq
    tokenizer: Tokenizer
    decode: Decode

    @property
    def max_length(self) -> int:
        return self.model.decoder.max_length
