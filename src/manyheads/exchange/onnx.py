"""Models as ONNX graphs: float32, any batch and length.

    encoder  encoder.onnx   tokens, real (and segments), or images → hidden (and logits)
    decoder  decoder.onnx   tokens, at, past_key_0, past_value_0, … → logits, present_key_0, …
    encoder–decoder
             encoder.onnx   source, real → cross_key_0, cross_value_0, …
             decoder.onnx   as above, in addition real and cross_key_0, cross_value_0, …

`real` is the padding mask, False at padding. `tokens` are those after the cached ones, of which
there may be none; `at` holds the positions among them that need logits. An encoder–decoder takes
tokens [sentence, hypothesis, position]: the hypotheses of a sentence share its cross-attention keys
and values. Positions, masks and the cache are inside the graphs. docs/models.md runs them with
onnxruntime. Weights too large for a protocol buffer are in a file `*.onnx.data`.
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

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.export import Dim

from manyheads.errors import UserError, import_optional
from manyheads.exchange import DECODER, ENCODER, refuse_approximations
from manyheads.fileio import replace_files
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.models.vit import Vit
from manyheads.nn.attention import (
    AttentionInputs,
    Cache,
    CrossAttention,
    Dense,
    KeysAndValues,
    SelfAttention,
)
from manyheads.nn.masks import AttentionMask, Rule, full, make_mask
from manyheads.nn.positions import Position

OPSET = 18  # the exporter needs no conversion to it; all current runtimes support it
MAX_INLINE_BYTES = 2**30  # of weights inside a graph; a protocol buffer ends at twice that

BATCH, BEAMS, NEW, PAST, SOURCE, AT = map(Dim, ("batch", "beams", "new", "past", "source", "at"))
Named = dict[str, Tensor]
Inputs = dict[str, tuple[Tensor, dict[int, Dim]]]  # an example of each input, its dynamic axes


def write_onnx(model: nn.Module, folder: Path) -> None:
    """Write the graphs of a model into a folder, all of them or none."""
    import_optional("onnx", "exchange")
    import_optional("onnxscript", "exchange")
    refuse_approximations(model)
    exported = copy.deepcopy(model).cpu().float().eval()
    for module in exported.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.core = ExportAttention()
    graphs = _graphs(exported)
    with replace_files(folder) as temporary:
        for name, graph in graphs.items():
            _write(graph, temporary / name)


class Graph(nn.Module):
    """One file: a function of a model and named tensors, its inputs, the names of its outputs."""

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any, Named], Any],
        inputs: Inputs,
        outputs: list[str],
    ) -> None:
        super().__init__()
        self.model, self.function, self.inputs, self.outputs = model, function, inputs, outputs

    def forward(self, inputs: Named) -> Any:
        return self.function(self.model, inputs)


def _write(graph: Graph, path: Path) -> None:
    with _quietly(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph,
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
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise UserError(f"PyTorch's ONNX exporter cannot export this model: {reason}") from None
        assert program is not None
        # The exporter stores stack traces with the paths of this machine.
        program.model.graph.metadata_props.clear()
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        size = sum(4 * weight.numel() for weight in graph.model.parameters())
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


class ExportCache(Cache):
    """A cache whose past is an input of the graph and whose present is an output.

    The tokens of n hypotheses are concatenated; each hypothesis has its own row of past keys and
    values. Modules come in the order of their layers.
    """

    def __init__(self, past: list[Tensor], cross: list[Tensor], beams: int) -> None:
        super().__init__()
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


def _encode(model: Bert | Vit, inputs: Named) -> list[Tensor]:
    """The hidden states of an encoder, and the output of its head if it has one."""
    hidden = model.hidden(*inputs.values())
    output = model.head_output(hidden, *([inputs["real"]] if isinstance(model, Bert) else []))
    return [hidden] if output is hidden else [hidden, output]


def _graphs(model: nn.Module) -> dict[str, Graph]:
    """The graphs of a model by file name, with examples of their inputs.

    The sizes of the examples differ, and none is 1, so that the exporter confuses no two axes.
    """
    inputs: Inputs
    if isinstance(model, Seq2Seq):
        real: Inputs = {"real": (torch.ones(2, 5, dtype=torch.bool), {0: BATCH, 1: SOURCE})}
        source: Inputs = {"source": (torch.zeros(2, 5, dtype=torch.long), {0: BATCH, 1: SOURCE})}
        tokens, stack = torch.zeros(2, 3, 4, dtype=torch.long), model.decoder
        cross = _kv_inputs("cross", stack, CrossAttention, {0: BATCH, 2: SOURCE}, 2, 5)
        past = _kv_inputs("past", stack, SelfAttention, {0: BATCH, 1: BEAMS, 3: PAST}, 2, 3, 7)
        inputs = {
            "tokens": (tokens, {0: BATCH, 1: BEAMS, 2: NEW}),
            "at": (torch.arange(3), {0: AT}),
            **real,
            **cross,
            **past,
        }
        return {
            ENCODER: Graph(model, _encode_source, source | real, [*cross]),
            DECODER: Graph(model, _decode_target, inputs, _present(past)),
        }
    if isinstance(model, Gpt):
        past = _kv_inputs("past", model.decoder, SelfAttention, {0: BATCH, 2: PAST}, 2, 3)
        inputs = {
            "tokens": (torch.zeros(2, 4, dtype=torch.long), {0: BATCH, 1: NEW}),
            "at": (torch.arange(3), {0: AT}),
            **past,
        }
        return {DECODER: Graph(model, _decode_text, inputs, _present(past))}
    if isinstance(model, Bert):
        tokens, axes = torch.zeros(2, 3, dtype=torch.long), {0: BATCH, 1: NEW}
        inputs = {"tokens": (tokens, axes), "real": (tokens == 0, axes)}
        if model.embedding.segment is not None:
            inputs["segments"] = (tokens.clone(), axes)  # the same tensor would be one input
    elif isinstance(model, Vit):
        size = model.config.image_size
        inputs = {"images": (torch.zeros(2, model.config.channels, size, size), {0: BATCH})}
    else:
        raise UserError(
            f"no ONNX graph for a {type(model).__name__}: export a seq2seq, gpt, bert or vit"
        )
    is_bare = model.config.head is None and getattr(model.config, "next_sentence", None) is None
    outputs = ["hidden"] if is_bare else ["hidden", "logits"]
    return {ENCODER: Graph(model, _encode, inputs, outputs)}


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
