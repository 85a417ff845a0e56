"""Our models as ONNX graphs, float32, any batch and any length; exchange/onnx_runtime.py runs them.

- an encoder is `encoder.onnx`: tokens, real (and segments), or images → hidden; and where it has
  a head `head.onnx`: hidden → logits;
- a decoder is `decoder.onnx`: the newest tokens, `at` (the positions among them whose logits are
  wanted), and for each layer the keys and values of the past, of which there may be none →
  `logits`, and the keys and values with the newest ones;
- an encoder–decoder is `encoder.onnx`: source, real → the keys and values that each layer's
  cross-attention looks at; and a `decoder.onnx` that takes them too. Its tokens are [sentence,
  hypothesis, position]: hypotheses of a sentence look at the same keys, not at copies.

Positions, masks and cached steps are inside the graphs. A graph whose weights are larger than a
protocol buffer may be has them beside it, in a file with `.data` after its name.
"""

import copy
import importlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.export import Dim

from manyheads.errors import DataError, UserError
from manyheads.exchange.foreign import DECODER, ENCODER, HEAD, refuse_approximations
from manyheads.fileio import PARTIAL
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Memory, Seq2Seq
from manyheads.models.vit import Vit
from manyheads.nn.attention import CrossAttention, KeysAndValues, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.exact_attention import Exact, share_heads
from manyheads.nn.masks import AttentionMask, Rule, full, look
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score

OPSET = 18  # what the exporter writes without conversion; every runtime of today reads it
LARGEST = 2**30  # bytes of weights inside a graph; a protocol buffer ends at twice that
UNSEEN = torch.finfo(torch.float32).min

BATCH, BEAMS, NEW, PAST, SOURCE, WANTED = map(
    Dim, ("batch", "beams", "new", "past", "source", "wanted")
)
Axes = dict[int, Dim]
Named = dict[str, Tensor]
Attention = TypeVar("Attention", SelfAttention, CrossAttention)


def write_onnx(model: nn.Module, folder: Path) -> None:
    """Write the graphs of a model into a folder, all of them or none."""
    needed("onnx")
    needed("onnxscript")
    exported = copy.deepcopy(model).cpu().float().eval()
    graphs = _graphs(exported)
    refuse_approximations(model)
    for module in exported.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.core = GraphCore()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(PARTIAL, f".{folder.name}.", folder.parent) as beside:
            for name, graph in graphs.items():
                _write(graph, Path(beside) / name)
            folder.mkdir(exist_ok=True)
            for name in (ENCODER, HEAD, DECODER):  # those of another model
                (folder / name).unlink(missing_ok=True)
                (folder / f"{name}.data").unlink(missing_ok=True)
            for path in Path(beside).iterdir():
                os.replace(path, folder / path.name)
    except OSError as error:
        raise DataError(f"{folder} could not be written ({error}): make room, try again") from None


def needed(name: str) -> Any:
    """A package that only this exchange needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"the package {name} is not installed: pip install 'manyheads[exchange]'"
        ) from None


@dataclass(frozen=True)
class Graph:
    """What one file computes: a module, examples of its inputs with their free axes, and names."""

    module: nn.Module
    inputs: dict[str, tuple[Tensor, Axes]]
    outputs: list[str]
    max_length: int
    position: Position


def _graphs(model: nn.Module) -> dict[str, Graph]:
    """The files of a model."""
    if isinstance(model, Seq2Seq):
        return {ENCODER: _source_graph(model), DECODER: _target_graph(model)}
    if isinstance(model, Gpt):
        return {DECODER: _language_graph(model)}
    if isinstance(model, Bert):
        return _text_graphs(model)
    if isinstance(model, Vit):
        return _image_graphs(model)
    raise UserError(
        f"no ONNX graph is known for a {type(model).__name__}: export a seq2seq, gpt, bert or vit "
        "model"
    )


def _write(graph: Graph, path: Path) -> None:
    examples = {name: example for name, (example, _) in graph.inputs.items()}
    axes = {name: free for name, (_, free) in graph.inputs.items()}
    with _quietly(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph.module,
                (examples, {}),  # a dictionary at the end would be taken for keywords
                dynamo=True,
                input_names=list(examples),
                output_names=graph.outputs,
                dynamic_shapes=(axes,),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
            reason = next((line for line in lines if line), type(error).__name__)
            raise UserError(
                f"PyTorch's exporter does not take this model ({reason}): change that part of it"
            ) from None
        assert program is not None
        _check_free(graph, program)
        # Traces of the exporter's way through these sources, with the paths of this machine.
        program.model.graph.metadata_props.clear()
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        program.model.metadata_props["max_length"] = str(graph.max_length)
        # Where positions end; 0 where they never do.
        program.model.metadata_props["positions"] = str(graph.position.max_length or 0)
        weights = [value.const_value for value in program.model.graph.initializers.values()]
        size = sum(weight.nbytes for weight in weights if weight is not None)
        program.save(path, external_data=size > LARGEST)


def _check_free(graph: Graph, program: torch.onnx.ONNXProgram) -> None:
    """A part that asks for a size as a number makes it one, and the exporter does not complain."""
    for (name, (_, free)), value in zip(
        graph.inputs.items(), program.model.graph.inputs, strict=True
    ):
        fixed = [axis for axis in free if value.shape is None or isinstance(value.shape[axis], int)]
        if fixed:
            raise UserError(
                f"PyTorch's exporter fixes axis {fixed[0]} of {name} to the example's size: a part "
                "of the model asks for it as a number, so change that part"
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's remarks: packages it could use, axis names, graphs it gave up."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---------------------------------------------------------------------------------------------
# Parts that make good graphs


@dataclass(frozen=True)
class GraphCore(Exact):
    """Attention in few nodes, which runtimes know: the mask is a bias, the same for all layers.

    A query that sees nothing has the mean of what it must not see (no infinity, so no NaN), and
    that is multiplied by zero.
    """

    def check(self, score: Score, position: Position) -> None:
        """Honours everything."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Tensor:
        scores = self._scores(q, share_heads(k, q.shape[1]), score)
        bias = position.score(q, sight.queries, sight.keys)
        if bias is not None:
            scores = scores + bias
        mask = sight.mask()
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, UNSEEN)
        weights = scores.softmax(-1)
        mixed = weights @ share_heads(v, q.shape[1])
        spread = position.value(weights, sight.queries, sight.keys)
        if spread is not None:
            mixed = mixed + spread
        return mixed if mask is None else mixed * mask.any(-1, keepdim=True)

    def _scores(self, q: Tensor, k: Tensor, score: Score) -> Tensor:
        if not isinstance(score, InnerScore):
            return score(q, k)
        f, g = score.factors(q, k)
        # Scaled queries: they are fewer than the scores.
        return (f * score.scale) @ rearrange(g, "b h s r -> b h r s")


class ExportCache:
    """A cache whose past comes into the graph and whose present goes out, layer after layer.

    The tokens of n hypotheses stand one behind the other; each has a row of keys and values.
    """

    def __init__(self, past: list[Tensor], cross: list[Tensor], beams: int | None = None) -> None:
        self.length, self.beams = past[0].shape[2], beams
        self.past, self.cross = iter(_pairs(past)), iter(_pairs(cross))
        self.present: list[Tensor] = []

    def end(self, length: int) -> int:
        return self.length + length

    def mask(
        self, rule: Rule, length: int, padding: Tensor | None, device: torch.device
    ) -> AttentionMask:
        if self.beams is None:
            return look(rule, length, start=self.length, real=padding, device=device)
        self.row_mask = look(rule, length // self.beams, start=self.length, device=device)
        queries = self.row_mask.queries.repeat(1, self.beams)
        return AttentionMask(rule, queries, self.row_mask.keys)

    def advance(self) -> None:
        """A graph is one pass: the next one begins with its present."""

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        if self.beams is None:
            return module.attend(q, *self._append(k, v), mask, position)
        n = self.beams
        q, k, v = (rearrange(x, "b h (n t) c -> (b n) h t c", n=n) for x in (q, k, v))
        out = module.attend(q, *self._append(k, v), self.row_mask, position)
        return rearrange(out, "(b n) h t c -> b h (n t) c", n=n)

    def _append(self, keys: Tensor, values: Tensor) -> KeysAndValues:
        old_keys, old_values = next(self.past)
        pair = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self.present += pair
        return pair

    def cross_kv(self, module: nn.Module, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        return next(self.cross)


def _of(kind: str, given: Named) -> list[Tensor]:
    return [x for name, x in given.items() if name.startswith(kind)]


def _pairs(flat: list[Tensor]) -> list[KeysAndValues]:
    return list(zip(flat[::2], flat[1::2], strict=True))


# ---------------------------------------------------------------------------------------------
# The graphs


class Wrapped(nn.Module):
    """A model of ours, computing from named tensors what a graph gives."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class EncoderModule(Wrapped):
    """Hidden states of texts or images."""

    def forward(self, given: Named) -> Tensor:
        return self.model.hidden(*given.values())


class HeadModule(Wrapped):
    """What the model's head makes of hidden states."""

    def forward(self, given: Named) -> Tensor:
        return self.model.answer(given["hidden"])


def _encoder_graphs(
    model: Bert | Vit, inputs: dict[str, tuple[Tensor, Axes]], max_length: int, bare: bool
) -> dict[str, Graph]:
    position = model.encoder.position
    encoder = Graph(EncoderModule(model), inputs, ["hidden"], max_length, position)
    if bare:
        return {ENCODER: encoder}
    hidden = {"hidden": (torch.zeros(2, 3, model.config.dim), {0: BATCH, 1: NEW})}
    head = Graph(HeadModule(model), hidden, ["logits"], max_length, Position())
    return {ENCODER: encoder, HEAD: head}


def _text_graphs(model: Bert) -> dict[str, Graph]:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    axes: Axes = {0: BATCH, 1: NEW}
    inputs = {"tokens": (tokens, axes), "real": (tokens == 0, axes)}
    if model.embedding.segment is not None:
        inputs["segments"] = (tokens.clone(), axes)  # one tensor would be one input
    bare = model.config.head is None and model.config.next_sentence is None
    return _encoder_graphs(model, inputs, model.config.max_length, bare)


def _image_graphs(model: Vit) -> dict[str, Graph]:
    config = model.config
    images = torch.zeros(2, config.channels, config.image_size, config.image_size)
    inputs: dict[str, tuple[Tensor, Axes]] = {"images": (images, {0: BATCH})}
    return _encoder_graphs(model, inputs, config.positions, config.head is None)


class DecoderModule(Wrapped):
    """Logits after the wanted ones of the newest tokens, and each layer's present."""

    def forward(self, given: Named) -> list[Tensor]:
        cache = ExportCache(_of("past", given), [])
        hidden = self.model.hidden(given["tokens"], cache=cache)
        return [self.model.logits(hidden.index_select(1, given["at"])), *cache.present]


def _language_graph(model: Gpt) -> Graph:
    past = _keys_and_values(_parts(model.decoder, SelfAttention), (2,), 3)
    inputs = {
        "tokens": (torch.zeros(2, 4, dtype=torch.long), {0: BATCH, 1: NEW}),
        "at": (torch.arange(3), {0: WANTED}),
        **{f"past_{name}": (x, {0: BATCH, 2: PAST}) for name, x in past.items()},
    }
    outputs = ["logits", *(f"present_{name}" for name in past)]
    return Graph(
        DecoderModule(model), inputs, outputs, model.config.max_length, model.decoder.position
    )


class SourceModule(Wrapped):
    """What the cross-attention of each layer looks at, computed once a sentence."""

    def forward(self, given: Named) -> list[Tensor]:
        states = self.model.encode(given["source"], given["real"]).states
        layers = _parts(self.model.decoder, CrossAttention)
        return [x for layer in layers for x in layer.project_kv(states)]


def _source_graph(model: Seq2Seq) -> Graph:
    source = torch.zeros(2, 5, dtype=torch.long)
    axes: Axes = {0: BATCH, 1: SOURCE}
    inputs = {"source": (source, axes), "real": (source == 0, axes)}
    cross = _keys_and_values(_parts(model.decoder, CrossAttention), (2,), 5)
    outputs = [f"cross_{name}" for name in cross]
    return Graph(
        SourceModule(model), inputs, outputs, model.config.max_length, model.encoder.position
    )


class TargetModule(Wrapped):
    """A decoder's step over n hypotheses of each of b sentences."""

    def forward(self, given: Named) -> list[Tensor]:
        tokens, real, cross = given["tokens"], given["real"], _of("cross", given)
        past = [rearrange(x, "b n g s c -> (b n) g s c") for x in _of("past", given)]
        cache = ExportCache(past, cross, tokens.shape[1])
        # Its states are not needed: the cache has their keys and values.
        memory = Memory(cross[0], look(full, real.shape[1], real=real))
        hidden = self.model.decode(rearrange(tokens, "b n t -> b (n t)"), memory, cache=cache)
        hidden = rearrange(hidden, "b (n t) d -> b n t d", n=tokens.shape[1])
        logits = self.model.logits(hidden.index_select(2, given["at"]))
        return [logits, *(x.unflatten(0, tokens.shape[:2]) for x in cache.present)]


def _target_graph(model: Seq2Seq) -> Graph:
    cross = _keys_and_values(_parts(model.decoder, CrossAttention), (2,), 5)
    past = _keys_and_values(_parts(model.decoder, SelfAttention), (2, 3), 7)
    inputs = {
        "tokens": (torch.zeros(2, 3, 4, dtype=torch.long), {0: BATCH, 1: BEAMS, 2: NEW}),
        "at": (torch.arange(3), {0: WANTED}),
        "real": (torch.ones(2, 5, dtype=torch.bool), {0: BATCH, 1: SOURCE}),
        **{f"cross_{name}": (x, {0: BATCH, 2: SOURCE}) for name, x in cross.items()},
        **{f"past_{name}": (x, {0: BATCH, 1: BEAMS, 3: PAST}) for name, x in past.items()},
    }
    outputs = ["logits", *(f"present_{name}" for name in past)]
    return Graph(
        TargetModule(model), inputs, outputs, model.config.max_length, model.decoder.position
    )


def _parts(stack: Stack, kind: type[Attention]) -> list[Attention]:
    """The attentions of a kind, in the order of the layers."""
    return [module for module in stack.modules() if isinstance(module, kind)]


def _keys_and_values(
    attentions: Sequence[SelfAttention | CrossAttention], rows: tuple[int, ...], positions: int
) -> dict[str, Tensor]:
    """Examples by name, a pair for each layer."""
    examples = {}
    for layer, attention in enumerate(attentions):
        groups = attention.heads.kv_heads
        _, keys, values = attention.heads.sizes
        examples[f"key_{layer}"] = torch.zeros(*rows, groups, positions, keys // groups)
        examples[f"value_{layer}"] = torch.zeros(*rows, groups, positions, values // groups)
    return examples
