"""Our models as ONNX graphs (float32, any batch and any length), and onnxruntime to run them.

- an encoder is `encoder.onnx`: tokens, real (and segments), or images → hidden; and where it has
  a head `head.onnx`: hidden → logits;
- a decoder is `decoder.onnx`: the newest tokens, `at` (the positions among them whose logits are
  wanted), and for each layer the keys and values of the past, of which there may be none →
  `logits`, and the keys and values with the newest ones;
- an encoder–decoder is `encoder.onnx`: source, real → the keys and values that each layer's
  cross-attention looks at; and a `decoder.onnx` that takes them too. Its tokens are [sentence,
  hypothesis, position]: hypotheses of a sentence look at the same keys, not at copies.

Positions, masks and cached steps are inside the graphs. A graph whose weights are larger than a
protocol buffer may be has them in a file with `.data` after its name.
"""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.dlpack import from_dlpack

from manyheads.decode.beam import Decode, DecoderSession
from manyheads.decode.generate import BaseGenerator, ignore
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError, UserError, import_optional
from manyheads.exchange import DECODER, ENCODER, HEAD
from manyheads.exchange.family import refuse_approximations
from manyheads.fileio import replace_files
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq
from manyheads.models.vit import Images, Vit, VitConfig
from manyheads.nn.attention import CrossAttention, KeysAndValues, SelfAttention
from manyheads.nn.block import Stack
from manyheads.nn.exact_attention import ExactAttention
from manyheads.nn.masks import AttentionMask, Rule, full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Hidden, Logits, Tokens
from manyheads.ops import share_heads
from manyheads.tokenizer.tokenizer import Tokenizer

OPSET = 18  # what the exporter writes without conversion; every runtime of today reads it
LARGEST = 2**30  # bytes of weights inside a graph; a protocol buffer ends at twice that
UNSEEN = torch.finfo(torch.float32).min

BATCH, BEAMS, NEW, PAST, SOURCE, WANTED = map(
    Dim, ("batch", "beams", "new", "past", "source", "wanted")
)
Axes = dict[int, Dim]
Named = dict[str, Tensor]
Given = Tensor | np.ndarray
HeadOutput = Float[Tensor, "b *n"]
Attention = TypeVar("Attention", SelfAttention, CrossAttention)


def write_onnx(model: nn.Module, folder: Path) -> None:
    """Write the graphs of a model into a folder, all of them or none."""
    import_optional("onnx", "exchange")
    import_optional("onnxscript", "exchange")
    exported = copy.deepcopy(model).cpu().float().eval()
    graphs = _graphs(exported)
    refuse_approximations(model)
    for module in exported.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.core = GraphCore()
    with replace_files(folder) as temporary:
        for name, graph in graphs.items():
            _write(graph, temporary / name)
        for name in (ENCODER, HEAD, DECODER):  # of an earlier model
            (folder / name).unlink(missing_ok=True)
            (folder / f"{name}.data").unlink(missing_ok=True)


@dataclass(frozen=True)
class Graph:
    """What one file computes: a module, examples of its inputs with their free axes, and names."""

    module: nn.Module
    inputs: dict[str, tuple[Tensor, Axes]]
    outputs: list[str]
    max_length: int
    position: Position


def _graphs(model: nn.Module) -> dict[str, Graph]:
    if isinstance(model, Seq2Seq):
        return {ENCODER: _source_graph(model), DECODER: _target_graph(model)}
    if isinstance(model, Gpt):
        return {DECODER: _language_graph(model)}
    if isinstance(model, Bert):
        return _text_graphs(model)
    if isinstance(model, Vit):
        return _image_graphs(model)
    raise UserError(
        f"no ONNX graph for a {type(model).__name__}: export a seq2seq, gpt, bert or vit"
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
            raise UserError(f"PyTorch's exporter refuses this model: {reason}") from None
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
class GraphCore(ExactAttention):
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
        mask: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Tensor:
        scores = self._scores(q, share_heads(k, q.shape[1]), score)
        bias = position.score(q, mask.query_positions, mask.key_positions)
        if bias is not None:
            scores = scores + bias
        allowed = mask.as_bool()
        if allowed is not None:
            scores = scores + torch.where(allowed, 0.0, UNSEEN)
        weights = scores.softmax(-1)
        mixed = weights @ share_heads(v, q.shape[1])
        spread = position.value(weights, mask.query_positions, mask.key_positions)
        if spread is not None:
            mixed = mixed + spread
        return mixed if allowed is None else mixed * allowed.any(-1, keepdim=True)

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
            return make_mask(rule, length, start=self.length, padding_mask=padding, device=device)
        self.row_mask = make_mask(rule, length // self.beams, start=self.length, device=device)
        queries = self.row_mask.query_positions.repeat(1, self.beams)
        return AttentionMask(rule, queries, self.row_mask.key_positions)

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
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class EncoderModule(Wrapped):
    def forward(self, given: Named) -> Tensor:
        return self.model.hidden(*given.values())


class HeadModule(Wrapped):
    def forward(self, given: Named) -> Tensor:
        return self.model.head_output(given["hidden"])


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
    past = _project_kv(_parts(model.decoder, SelfAttention), (2,), 3)
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
    cross = _project_kv(_parts(model.decoder, CrossAttention), (2,), 5)
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
        memory = EncoderOutput(cross[0], make_mask(full, real.shape[1], padding_mask=real))
        hidden = self.model.decode(rearrange(tokens, "b n t -> b (n t)"), memory, cache=cache)
        hidden = rearrange(hidden, "b (n t) d -> b n t d", n=tokens.shape[1])
        logits = self.model.logits(hidden.index_select(2, given["at"]))
        return [logits, *(x.unflatten(0, tokens.shape[:2]) for x in cache.present)]


def _target_graph(model: Seq2Seq) -> Graph:
    cross = _project_kv(_parts(model.decoder, CrossAttention), (2,), 5)
    past = _project_kv(_parts(model.decoder, SelfAttention), (2, 3), 7)
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
    return [module for module in stack.modules() if isinstance(module, kind)]


def _project_kv(
    attentions: Sequence[SelfAttention | CrossAttention], rows: tuple[int, ...], positions: int
) -> dict[str, Tensor]:
    examples = {}
    for layer, attention in enumerate(attentions):
        groups = attention.config.kv_heads
        _, keys, values = attention.config.sizes
        examples[f"key_{layer}"] = torch.zeros(*rows, groups, positions, keys // groups)
        examples[f"value_{layer}"] = torch.zeros(*rows, groups, positions, values // groups)
    return examples


# ---------------------------------------------------------------------------------------------
# onnxruntime


class OnnxGraph:
    """One file: named tensors in, tensors out, none of them copied on the way."""

    def __init__(self, path: Path) -> None:
        onnxruntime = import_optional("onnxruntime", "exchange")
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
        [shape] = [value.shape for value in self.session.get_outputs() if value.name == "logits"]
        return int(shape[-1])

    def nothing(self, kind: str, *rows: int) -> list[Tensor]:
        """The past of so many rows before there is any."""
        shapes = [shape for name, shape in self.inputs.items() if name.startswith(kind)]
        return [torch.zeros(*rows, shape[-3], 0, shape[-1]) for shape in shapes]

    def named(self, kind: str, tensors: list[Tensor]) -> dict[str, Tensor]:
        names = [name for name in self.inputs if name.startswith(kind)]
        return dict(zip(names, tensors, strict=True))

    def step(
        self, tokens: Tensor, at: Tensor, past: list[Tensor], **others: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits at the positions `at` among the newest, and keys and values after them."""
        self.position.refuse_past(past[0].shape[-2] + tokens.shape[-1])
        logits, *present = self({"tokens": tokens, "at": at, **others, **self.named("past", past)})
        return logits, present


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

    def head_output(self, hidden: Hidden) -> HeadOutput:
        """What the model gives for hidden states, e.g. for those of the masked positions alone."""
        return hidden if self.head is None else self.head({"hidden": hidden})[0]

    def __call__(
        self, tokens: Given, real: Given | None = None, segments: Given | None = None
    ) -> HeadOutput:
        return self.head_output(self.hidden(tokens, real, segments))


class OnnxVit:
    def __init__(self, folder: Path, config: VitConfig) -> None:
        self.config = config
        self.encoder = OnnxEncoder(folder)
        wanted = [config.channels, config.image_size, config.image_size]
        if self.encoder.graph.inputs.get("images", [])[1:] != wanted:
            raise DataError(
                f"{folder / ENCODER} does not take the images of {wanted} (channels, height, "
                "width) that the settings beside it name: export it again"
            )

    def __call__(self, images: Images) -> HeadOutput:
        return self.encoder(images)


class OnnxGpt:
    """An exported decoder: called like ours, or a step at a time."""

    def __init__(self, folder: Path) -> None:
        self.graph = OnnxGraph(folder / DECODER)
        self.max_length = self.graph.max_length

    def __call__(self, tokens: Tokens) -> Logits:
        past = self.graph.nothing("past", tokens.shape[0])
        return self.graph.step(tokens, torch.arange(tokens.shape[1]), past)[0]


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
        self.graph = model.graph
        past = self.graph.nothing("past", prompts.shape[0])
        if prompts.shape[1] > 1:
            nowhere = torch.arange(0)
            _, past = self.graph.step(prompts[:, :-1], nowhere, past)
        self.past = [x[:, None] for x in past]

    def read(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        past = [x.flatten(0, 1) for x in self.past]
        logits, past = self.graph.step(tokens.reshape(-1, 1), torch.tensor([0]), past)
        self.past = [x.unflatten(0, tokens.shape) for x in past]
        return logits.view(*tokens.shape, -1)


@dataclass(frozen=True)
class OnnxGenerator(BaseGenerator):
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
        self.encoder.position.refuse_past(source.shape[1])
        return self.encoder({"source": source, "real": real})

    def __call__(
        self, source: Tokens, target: Int[Tensor, "b u"], source_real: Tensor | None = None
    ) -> Float[Tensor, "b u v"]:
        """Teacher forcing: logits at t predict the token after target[t]."""
        real = torch.ones_like(source, dtype=torch.bool) if source_real is None else source_real
        past = self.decoder.nothing("past", target.shape[0], 1)
        cross = self.decoder.named("cross", self.encode(source, real))
        everywhere = torch.arange(target.shape[1])
        return self.decoder.step(target[:, None], everywhere, past, real=real, **cross)[0][:, 0]


class OnnxSeq2SeqSession(OnnxSession):
    """An encoder–decoder; the keys and values of a source are held once a sentence."""

    def __init__(self, model: OnnxSeq2Seq, source: Tokens, real: Bool[Tensor, "b t"]) -> None:
        self.graph, self.real = model.decoder, real
        self.cross = model.encode(source, real)
        self.past = self.graph.nothing("past", source.shape[0], 1)

    def read(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        cross = self.graph.named("cross", self.cross)
        logits, self.past = self.graph.step(
            tokens[..., None], torch.tensor([0]), self.past, real=self.real, **cross
        )
        return logits[:, :, 0]

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        super().keep_sentences(sentences)
        self.real = self.real[sentences]
        self.cross = [x.index_select(0, sentences) for x in self.cross]


@dataclass(frozen=True)
class OnnxTranslator(BaseTranslator):
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
