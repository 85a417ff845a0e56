"""Models as CTranslate2 folders, and CTranslate2 to run them.

A folder holds model.bin, config.json and the vocabulary as CTranslate2 reads them, and our
tokenizer.json. Positions that are added to embeddings become a table of model.max_length rows
(none: zeros). A bias by distance (T5; ALiBi in an encoder) becomes a T5 table with one bucket per
distance, so that no rounding of a logarithm decides where a bucket ends.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.config import nearest
from manyheads.data.batching import batches_by_length
from manyheads.decode.beam import Decode, Hypothesis, SpecialTokens, length_penalty
from manyheads.decode.decoder import BaseDecoder
from manyheads.decode.generate import GREEDY, BaseGenerator, Generator, ignore
from manyheads.decode.sample import Sample
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.errors import DataError, UserError, import_optional
from manyheads.exchange import refuse_approximations
from manyheads.fileio import replace_files
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import ACTIVATIONS, Embedding, FeedForward, GatedFeedForward, NoResidual
from manyheads.nn.positions import (
    AlibiPosition,
    BucketPosition,
    Position,
    RotaryPosition,
    ShawPosition,
)
from manyheads.nn.scores import InnerScore
from manyheads.tokenizer.tokenizer import Tokenizer

WEIGHTS, SETTINGS, TOKENIZER = "model.bin", "config.json", "tokenizer.json"
ACTIVATION_NAMES = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu-tanh": "GELUTanh",
    "silu": "SWISH",
    "tanh": "Tanh",
}
# Linear layers and norms of a block → attributes of a layer's spec; attention is apart.
BLOCK = {
    "attention_residual.norm": "self_attention.layer_norm",
    "cross_residual.norm": "attention.layer_norm",
    "feedforward_residual.norm": "ffn.layer_norm",
    "feedforward.inner": "ffn.linear_0",
    "feedforward.outer": "ffn.linear_1",
}
RELATIVE = (RotaryPosition, ShawPosition, BucketPosition, AlibiPosition)  # supported schemes
GATED_BLOCK = BLOCK | {
    "feedforward.gate": "ffn.linear_0",
    "feedforward.inner": "ffn.linear_0_noact",
}


def library() -> Any:
    return import_optional("ctranslate2", "ctranslate2")


# ---------------------------------------------------------------------------------------------
# Conversion


def unsupported(model: nn.Module, decode: Decode) -> str | None:
    """The reason why CTranslate2 cannot express a model with these settings, or None."""
    if not isinstance(model, Seq2Seq | Gpt):
        return f"it runs encoder–decoders and language models, not a {type(model).__name__}"
    if decode.beam > 1 and decode.stopping != "early":
        return f"decode.stopping={decode.stopping} is not supported, only early"
    try:
        refuse_approximations(model)
    except UserError as error:
        return str(error)
    for stack in model.stacks().values():
        position, block = stack.position, _blocks(stack)[0]
        attention, feedforward = block.attention, block.feedforward
        if not position.is_absolute and not isinstance(position, RELATIVE):
            return f"model.position has no counterpart of {type(position).__name__}"
        if isinstance(model, Gpt) and isinstance(position, BucketPosition):
            # Seen in version 4.8: all tokens of a prompt are taken to be at its last position.
            return "model.position=t5 is read at wrong distances in a language model"
        if model.config.embed.position != "add":
            return f"model.embed.position={model.config.embed.position} is not supported, only add"
        if type(attention.score) is not InnerScore:
            kind = attention.config.score.kind
            return f"model.score={kind} is not supported, only dot and scaled-dot"
        if attention.config.qk_norm:
            return "model.qk_norm=true is not supported"
        norm = block.attention_residual.norm
        if (
            isinstance(block.attention_residual, NoResidual)
            or getattr(norm, "weight", None) is None
        ):
            return (
                "model.residual=none, model.norm=none and model.norm.affine=false are not supported"
            )
        if not isinstance(feedforward, FeedForward | GatedFeedForward):
            return f"model.feedforward has no counterpart of {type(feedforward).__name__}"
        if (name := _activation_name(feedforward)) not in ACTIVATION_NAMES:
            return f"model.feedforward.activation={name} is not supported"
    if len(epsilons := _epsilons(model)) > 1:
        return f"all norms have one epsilon (norm.eps), and this model {sorted(epsilons)}"
    return None


def _activation_name(feedforward: FeedForward | GatedFeedForward) -> str:
    return next(name for name, f in ACTIVATIONS.items() if f is feedforward.activation)


def _epsilons(model: nn.Module) -> set[float]:
    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
    return {float(norm.eps or 0.0) for norm in norms}


def write_ctranslate2(
    model: Seq2Seq | Gpt,
    tokenizer: Tokenizer,
    folder: Path,
    quantization: str = "float32",
    decode: Decode | None = None,
) -> None:
    """Write a folder that CTranslate2 opens, complete or not at all.

    Special tokens are those of `decode`, else the tokenizer's; CTranslate2 itself adds the end
    (and decode.source_start) to a source. `quantization` is how the weights are stored: float32,
    float16, bfloat16, int16, int8; int8_float32, int8_float16 and int8_bfloat16 also say how the
    other tensors are.
    """
    known = list(library().specs.model_spec.ACCEPTED_MODEL_TYPES)
    if quantization not in known:
        raise UserError(f"--quantization {quantization}: {nearest(quantization, known)}")
    if (folder / WEIGHTS).exists():
        raise UserError(f"{folder} holds a CTranslate2 model already: choose another folder")
    decode = decode or Decode()
    if reason := unsupported(model, decode):
        raise UserError(f"CTranslate2 cannot express this model: {reason}")
    with torch.no_grad():
        spec = _convert(model, SpecialTokens(tokenizer, decode))
    spec.validate()
    spec.optimize(quantization)
    with replace_files(folder, last=WEIGHTS) as temporary:  # a folder with weights is complete
        spec.save(str(temporary))
        tokenizer.save(temporary / TOKENIZER)


def _convert(model: Seq2Seq | Gpt, special: SpecialTokens) -> Any:
    specs, longest = library().specs, model.config.max_length
    table = model.target_table if isinstance(model, Seq2Seq) else model.tokens
    decoder = _stack("decoder", model, table)
    decoder.projection.weight = _copy(model.head.matrix(table))
    if model.head.bias is not None:
        decoder.projection.bias = _copy(model.head.bias)
    decoder.scale_outputs = float(model.head.scale)
    names = token_names(special.tokenizer.target, table.num_embeddings)
    special.check(len(names))
    if isinstance(model, Seq2Seq):
        spec = specs.TransformerSpec(_stack("encoder", model, model.tokens), decoder)
        sources = token_names(special.tokenizer, model.tokens.num_embeddings)
        spec.register_source_vocabulary(sources)
        spec.register_target_vocabulary(names)
        spec.config.decoder_start_token = names[special.start]
        spec.config.add_source_eos = True
        spec.config.add_source_bos = special.decode.source_start is not None
    else:
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(names)
    spec.config.eos_token = names[special.end]
    before = special.decode.source_start if isinstance(model, Seq2Seq) else None
    spec.config.bos_token = names[_special_id(special, "start") if before is None else before]
    spec.config.unk_token = names[_special_id(special, "unknown")]
    [spec.config.layer_norm_epsilon] = _epsilons(model)
    spec.config.add_attribute("max_length", longest)
    return spec


def token_names(tokenizer: Tokenizer, size: int) -> list[str]:
    """The name of each id: its token, or for an id without a token a name that no token has."""
    if tokenizer.vocab_size > size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {size}"
        )
    names = [tokenizer.content(number) for number in range(size)]
    taken = set(names)
    free = (name for name in (f"<no token {i}>" for i in count()) if name not in taken)
    return [next(free) if name is None else name for name in names]


def _special_id(special: SpecialTokens, name: str) -> int:
    """A token of the tokenizer; if it lacks it, it is never used, and any other will do."""
    try:
        return int(getattr(special.tokenizer, name))
    except UserError:
        return special.end


def _stack(side: str, model: Seq2Seq | Gpt, table: nn.Embedding) -> Any:
    """The spec of an encoder or a decoder, with its embeddings."""
    specs, longest = library().specs, model.config.max_length
    stack, embedding = model.stacks()[side], model.embeddings()[side]
    position, is_decoder = stack.position, side == "decoder"
    alibi = is_decoder and isinstance(position, AlibiPosition)  # encoders there have no ALiBi
    bias = None if alibi else _bias_table(position, longest, bidirectional=not is_decoder)
    options = _options(stack) | {
        "layernorm_embedding": not isinstance(embedding.norm, nn.Identity),
        "relative_attention_bias": bias is not None,
    }
    if is_decoder:
        options |= {"alibi": alibi, "with_encoder_attention": isinstance(model, Seq2Seq)}
        spec = specs.TransformerDecoderSpec(**options)
        _embed(spec, spec.embeddings, embedding, table)
    else:
        spec = specs.TransformerEncoderSpec(**options)
        _embed(spec, spec.embeddings[0], embedding, table)
    if position.is_absolute:
        zeros = torch.zeros(1, longest, table.embedding_dim, device=table.weight.device)
        positions = torch.arange(longest, device=table.weight.device)[None]
        spec.position_encodings.encodings = _copy(position.embed(zeros, positions)[0])
    if not isinstance(stack.last_norm, nn.Identity):
        _fill(spec.layer_norm, stack.last_norm)
    for layer, block, own in zip(spec.layer, _blocks(stack), cycle(stack.positions), strict=False):
        _block(layer, block)
        if isinstance(own, ShawPosition):
            _shaw(layer.self_attention, own, block.attention)
        if bias is not None:
            layer.self_attention.relative_attention_bias = bias
            layer.self_attention.relative_attention_max_distance = np.int32(len(bias))
    return spec


def _blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]


def _options(stack: Stack) -> dict[str, Any]:
    """The arguments of a spec that encoders and decoders have."""
    block, position = _blocks(stack)[0], stack.position
    attention, feedforward = block.attention, block.feedforward
    assert isinstance(feedforward, FeedForward | GatedFeedForward)  # see `unsupported`
    activation = _activation_name(feedforward)
    options = {
        "num_layers": len(stack.blocks),
        "num_heads": attention.config.heads,
        "num_heads_kv": attention.config.kv_heads,
        "head_dim": attention.config.head_dim,
        "pre_norm": block.attention_residual.placement == "pre",
        "rms_norm": isinstance(block.attention_residual.norm, nn.RMSNorm),
        "activation": library().specs.Activation[ACTIVATION_NAMES[activation]],
        "ffn_glu": isinstance(feedforward, GatedFeedForward),
        "relative_position": isinstance(position, ShawPosition),
    }
    if isinstance(position, RotaryPosition):
        options["rotary_dim"] = 0  # all channels
        options["rotary_interleave"] = position.layout == "interleaved"
        options["rotary_base"] = position.base
    return options


def _embed(spec: Any, table_spec: Any, embedding: Embedding, table: nn.Embedding) -> None:
    weight = table.weight
    if embedding.segment is not None:  # all tokens are in the first segment
        weight = weight + embedding.segment.weight[0] / embedding.scale
    table_spec.weight = _copy(weight)
    spec.scale_embeddings = float(embedding.scale)
    if not isinstance(embedding.norm, nn.Identity):
        rms = isinstance(embedding.norm, nn.RMSNorm)
        spec.layernorm_embedding = library().specs.common_spec.LayerNormSpec(rms_norm=rms)
        _fill(spec.layernorm_embedding, embedding.norm)


def _block(layer: Any, block: Block) -> None:
    modules = dict(block.named_modules())
    names = GATED_BLOCK if isinstance(block.feedforward, GatedFeedForward) else BLOCK
    for ours, theirs in names.items():
        if ours in modules:
            _fill(attrgetter(theirs)(layer), modules[ours])
    _attention(layer.self_attention, block.attention)
    if "cross" in modules:
        _attention(layer.attention, block.cross)


def _attention(spec: Any, attention: SelfAttention | CrossAttention) -> None:
    assert isinstance(attention.score, InnerScore)  # see `unsupported`
    spec.queries_scale = float(attention.score.scale)
    crossed = [attention.query] if isinstance(attention, CrossAttention) else []
    for linear, module in zip(
        spec.linear, [*crossed, attention.project, attention.output], strict=True
    ):
        _fill(linear, module)


def _bias_table(
    position: Position, longest: int, *, bidirectional: bool
) -> Float[Tensor, "rows h"] | None:
    """A bias by distance as a T5 table: exact buckets first, then as many logarithmic ones.

    All distances beyond the exact ones are in T5's last bucket. ALiBi has no such end: keys
    model.max_length or more away, in a longer text, are not attended to.
    """
    if isinstance(position, BucketPosition):
        device, heads = position.table.weight.device, position.table.embedding_dim
        longest = max(longest, position.max_distance + 1)
    elif isinstance(position, AlibiPosition):
        device, heads = position.exponents.device, len(position.exponents)
    else:
        return None
    query = torch.zeros(1, heads, 1, 1, device=device)
    middle = torch.tensor([[longest - 1]], device=device)
    scores = position.score(query, middle, torch.arange(2 * longest - 1, device=device)[None])
    assert scores is not None
    by_key = rearrange(scores, "1 h 1 s -> s h")
    parts = []
    for side in (by_key[:longest].flip(0), by_key[longest - 1 :]):  # keys before, keys after
        far = side[-1] if isinstance(position, BucketPosition) else side[-1] - math.inf
        parts += [side, far.expand_as(side)]
    return _copy(torch.cat(parts if bidirectional else parts[:2]))


def _shaw(spec: Any, position: ShawPosition, attention: SelfAttention) -> None:
    """CTranslate2 scales both products alike; ours has 1/√c for the relative one."""
    assert isinstance(attention.score, InnerScore)  # see `unsupported`
    ratio = attention.config.head_dim**-0.5 / attention.score.scale
    spec.relative_position_keys = _copy(position.keys * ratio)
    spec.relative_position_values = _copy(position.values)


def _fill(spec: Any, module: nn.Module) -> None:
    """The weights of a linear layer or a norm."""
    if isinstance(module, nn.Linear):
        spec.weight = _copy(module.weight)
        if module.bias is not None:
            spec.bias = _copy(module.bias)
    else:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        spec.gamma = _copy(module.weight)
        if isinstance(module, nn.LayerNorm):
            spec.beta = _copy(module.bias)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, since CTranslate2 quantizes in place."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


# ---------------------------------------------------------------------------------------------
# Running


class Ctranslate2Model:
    """A folder opened by a `kind` of runner (Translator, Generator); on a CPU with torch's threads.

    `workers` calls run at the same time, which share the threads. The device `auto` is a GPU if
    CTranslate2 sees one. Tokens go in and come out by name; `source`
    and `target` are the names by id.
    """

    def __init__(self, folder: Path, kind: str, device: str = "cpu", workers: int = 1) -> None:
        self.workers, threads = workers, torch.get_num_threads()
        runner = getattr(library(), kind)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"no {folder / WEIGHTS}: give a folder exported to ctranslate2")
        device_type, _, index = device.partition(":")
        if device_type == "cuda" and not library().get_cuda_device_count():
            raise UserError("CTranslate2 has no GPU to compute on here: use --device cpu or auto")
        try:
            self.runner = runner(
                str(folder),
                device_type,
                device_index=int(index or 0),
                inter_threads=workers,
                intra_threads=max(1, threads // workers),
            )
            self.settings: dict[str, Any] = json.loads((folder / SETTINGS).read_bytes())
            self.max_length = int(self.settings["max_length"])
            shared = [*folder.glob("shared_vocabulary.json"), *folder.glob("vocabulary.json")]
            files = 2 * shared[:1] or [
                folder / f"{x}_vocabulary.json" for x in ("source", "target")
            ]
            self.source, self.target = (json.loads(file.read_bytes()) for file in files)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{folder} is not an exported model ({reason}): export it again"
            ) from None
        self.ids = {name: number for number, name in enumerate(self.target)}


class Ctranslate2Decoder(BaseDecoder):
    """The base of translator and generator: options and hypotheses of a search.

    The search is CTranslate2's own (from its sources, and measured): like ours it extends the
    `beam` likeliest texts by log P and ranks those that have ended by log P / lp, here with the lp
    of decode.penalty. It differs from ours in this:

    - a suppressed token, or an end before decode.min_length, has no probability: the others share
      its part (ours leaves it unused);
    - with a length penalty it stops when `beam` hypotheses have ended, as ours does, and gives the
      best `beam` by |y|^α; without one it stops when the likeliest text of a step has just ended
      and there are enough, so that it may search longer than ours;
    - at the length limit a text is cut (decode.at_limit=truncate);
    - after decode.forced_bos only the likeliest text may end at once;
    - an empty source is not read: its translation is empty, with log P = 0.

    With `twin`, the PyTorch model that the folder was converted from, the best text is that of our
    search: a beam search suppresses nothing, and a text that reaches a limit or has a suppressed
    token is searched again by PyTorch, as are all if several of the best are requested.
    `manyheads.engines.why_not` refuses the other differences.
    """

    model: Ctranslate2Model
    twin: Any

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # where tokens are passed in

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def _options(self, n_best: int | None) -> dict[str, Any]:
        """The arguments of a search; settings that differ from the folder's are refused."""
        special, decode, names = self.special_tokens, self.decode, self.model.target
        special.check(len(names))
        expected: dict[str, Any] = {"eos_token": names[special.end]}
        if "decoder_start_token" in self.model.settings:
            before = decode.source_start
            expected["decoder_start_token"] = names[special.start]
            expected["add_source_bos"] = before is not None
            expected |= {} if before is None else {"bos_token": names[before]}
        for name, value in expected.items():
            stored = self.model.settings[name]
            if stored != value:
                raise UserError(
                    f"this folder has {name}={stored!r}, the settings {value!r}: export the model "
                    "again with these settings"
                )
        if decode.beam > 1 and decode.stopping != "early":
            raise UserError(f"CTranslate2 needs decode.stopping=early, not {decode.stopping}")
        # Greedy search compares tokens of one text only, whose probabilities grow alike.
        suppressed = special.suppressed if self.twin is None or decode.beam == 1 else []
        return {
            "beam_size": decode.beam,
            # With a penalty all of them: CTranslate2 ranks by |y|^α, we by decode.penalty.
            "num_hypotheses": decode.beam if decode.length_penalty else self._count(n_best),
            "length_penalty": self._alpha,
            "suppress_sequences": [[names[x]] for x in suppressed if x != special.end],
            "end_token": [special.end],
            "return_end_token": True,  # so that it counts in |y|, as ours does
            "return_scores": True,
            "max_batch_size": max(1, decode.forward_tokens // decode.beam),
            "batch_type": "tokens",
        }

    @property
    def _alpha(self) -> float:
        """α of |y|^α, by which CTranslate2 chooses `beam` hypotheses if more have ended.

        With a twin, the α nearest to lp = ((5 + |y|) / 6)^α: their slopes are equal at
        |y| = 20, since d log lp / d log |y| = α |y| / (5 + |y|).
        """
        is_gnmt = self.twin is not None and self.decode.penalty == "gnmt"
        return self.decode.length_penalty * (20 / 25 if is_gnmt else 1)

    def _count(self, n_best: int | None) -> int:
        return min(n_best or self.decode.beam, self.decode.beam)

    def _ranked(self, texts: Sequence[list[int]], scores: Sequence[float]) -> list[Hypothesis]:
        """Hypotheses, best first, with the scores that they have by our settings."""
        decode, end = self.decode, self.special_tokens.end
        hypotheses = []
        for tokens, score in zip(texts, scores, strict=True):
            length = max(1, len(tokens))  # an empty source has an empty translation, without an end
            log_probability = score * length**self._alpha
            penalty = float(length_penalty(length, decode.length_penalty, decode.penalty))
            text = tokens[:-1] if tokens[-1:] == [end] else tokens
            hypotheses.append(Hypothesis(text, log_probability, log_probability / penalty))
        return sorted(hypotheses, key=lambda h: -h.score)

    def _differs(self, hypotheses: Sequence[Hypothesis], limit: int) -> bool:
        """True if our search may give others. The longest hypothesis is as long as the search."""
        suppressed = set(self.special_tokens.suppressed)
        has_suppressed = any(not suppressed.isdisjoint(x.tokens) for x in hypotheses)
        return has_suppressed or self._reaches(hypotheses, limit)

    def _reaches(self, hypotheses: Sequence[Hypothesis], limit: int) -> bool:
        return any(len(hypothesis.tokens) + 1 >= limit for hypothesis in hypotheses)

    def _refuse_sampling(self) -> UserError:
        return UserError(
            "CTranslate2 samples all texts from one stream of random numbers, so that no seed "
            "reproduces a text: search (--temperature 0, --beam), or use the run itself"
        )


@dataclass(frozen=True)
class Ctranslate2Translator(Ctranslate2Decoder, BaseTranslator):
    """An encoder–decoder in a folder, with its tokenizer and the settings it generates with.

    `use_vmap` restricts each batch to the folder's vocabulary map (a lexical shortlist), if it has
    one: then results depend on the batch.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    twin: Seq2Seq | None = None
    use_vmap: bool = False

    @property
    def max_length(self) -> int:
        return self.model.max_length

    def in_torch(self) -> Translator | None:
        return None if self.twin is None else Translator(self.twin, self.tokenizer, self.decode)

    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        options, ours, first = self._options(n_best), self.in_torch(), self.decode.forced_bos
        if ours is not None and self._count(n_best) > 1:
            return ours.search(sentences, advance, n_best)
        encoded = self.tokenizer.encode_batch(sentences)
        lengths = np.array([len(self.special_tokens.source(ids)) for ids in encoded], dtype=int)
        limits = [self.decode.limit(int(length), self.max_length) for length in lengths]
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        again = []  # for our own search
        for row, length in enumerate(lengths):
            if ours is not None and (not encoded[row] or length > self.max_length):
                again.append(row)
            elif length > self.max_length:
                raise UserError(
                    f"a source of {length} tokens, but this folder's positions end at "
                    f"{self.max_length}: shorten it, or export a model with a larger max_length"
                )
        done = len(again)
        groups = self._groups(np.delete(np.arange(len(encoded)), again), lengths, limits)
        while groups:
            rows = groups.pop(0)
            most = max(limits[row] for row in rows)
            outputs = self.model.runner.translate_batch(
                [[self.model.source[token] for token in encoded[row]] for row in rows],
                None if first is None else [[self.model.target[first]]] * len(rows),
                **options,
                min_decoding_length=min(self.decode.min_length, most),
                max_decoding_length=most,
                max_input_length=0,
                use_vmap=self.use_vmap,
            )
            for row, output in zip(rows, outputs, strict=True):
                texts = [[self.model.ids[name] for name in names] for names in output.hypotheses]
                hypotheses = self._ranked(texts, output.scores)
                results[row] = hypotheses[: self._count(n_best)]
                if ours is not None and self._differs(hypotheses, limits[row]):
                    again.append(row)
                elif limits[row] < most and self._reaches(hypotheses, limits[row]):
                    groups.append([row])  # without a twin: by its own limit
                    done -= 1
            done += len(rows)
            advance(done)
        if ours is not None and again:
            searched = ours.search([sentences[row] for row in again], n_best=n_best)
            for row, hypotheses in zip(again, searched, strict=True):
                results[row] = hypotheses
        return results

    def _groups(self, rows: np.ndarray, lengths: np.ndarray, limits: list[int]) -> list[list[int]]:
        """Rows of one call, which has one length limit.

        A text that reaches its own limit is searched again. Without a penalty CTranslate2 returns
        only the best hypotheses, of which that cannot be seen: rows of a call have one limit then.
        """
        if self.twin is not None or self.decode.length_penalty:
            budget = max(1, self.decode.forward_tokens // self.decode.beam)
            groups = batches_by_length(lengths[rows], budget)
            return [rows[group].tolist() for group in groups]
        by_limit: dict[int, list[int]] = {}
        for row in rows.tolist():
            by_limit.setdefault(limits[row], []).append(row)
        return list(by_limit.values())

    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        if sample.temperature == 0:
            return replace(self, decode=replace(self.decode, beam=1)).translate(sentences)
        if (ours := self.in_torch()) is None:
            raise self._refuse_sampling()
        return ours.sample(sentences, sample, first)


@dataclass(frozen=True)
class Ctranslate2Generator(Ctranslate2Decoder, BaseGenerator):
    """A decoder-only model in a folder, with its tokenizer and the settings it generates with.

    Without a twin a text ends with the model's max_length at the latest. With one, CTranslate2
    generates greedily, and PyTorch searches, samples and continues texts past max_length.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = ignore
    twin: Gpt | None = None

    @property
    def supports_seed(self) -> bool:
        return self.twin is not None

    @property
    def positions(self) -> int | None:
        ours = self.in_torch()
        return self.model.max_length if ours is None else ours.positions

    @property
    def context(self) -> int | None:
        return None if self.twin is None else self.model.max_length

    def in_torch(self) -> Generator | None:
        if self.twin is None:
            return None
        return Generator(self.twin, self.tokenizer, self.decode, self.warn)

    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        ours = self.in_torch()
        return (
            self._search_all(prompts, limit, n_best)
            if ours is None
            else ours.search(prompts, limit, n_best)
        )

    def _search_all(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None
    ) -> list[list[Hypothesis]]:
        options = self._options(n_best)
        if self.decode.forced_bos is not None:
            raise UserError(
                "decode.forced_bos is for translations: put the token at the prompt's end"
            )
        results: list[list[Hypothesis]] = [[] for _ in prompts]
        # Batches of prompts of one length: in a mixed batch CTranslate2 would generate the ends of
        # longer ones under constraint, after which only the first beam may end at once.
        for rows, tokens, limits in self._batches(prompts, limit, self.decode.beam):
            most = int(limits[0])
            outputs = self.model.runner.generate_batch(
                [[self.model.target[token] for token in prompt] for prompt in tokens.tolist()],
                **options,
                min_length=min(self.decode.min_length, most),
                max_length=most,
                include_prompt_in_result=False,
            )
            for row, output in zip(rows, outputs, strict=True):
                hypotheses = self._ranked(output.sequences_ids, output.scores)
                results[row] = hypotheses[: self._count(n_best)]
        return results

    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        if (ours := self._sampler(prompts, limit, sample)) is not None:
            return ours.sample(prompts, limit, sample, first)
        greedy = replace(self, decode=replace(self.decode, beam=1))
        texts = greedy._search_all(prompts, limit, n_best=1)
        return [nbest[0].tokens[: self._most(limit)] for nbest in texts]

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        if (ours := self._sampler([prompt], limit, sample or GREEDY)) is not None:
            return ours.stream(prompt, limit, sample, first)
        [(_, tokens, limits)] = self._batches([prompt], limit, 1)
        if (most := min(int(limits[0]), self._most(limit))) < 1:
            return iter(())
        options = replace(self, decode=replace(self.decode, beam=1))._options(1)
        steps = self.model.runner.generate_tokens(
            [self.model.target[token] for token in tokens[0].tolist()],
            max_length=most,
            min_length=min(self.decode.min_length, most),
            suppress_sequences=options["suppress_sequences"],
            end_token=options["end_token"],
        )
        end = self.special_tokens.end
        return (step.token_id for step in steps if step.token_id != end)

    def _sampler(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample
    ) -> Generator | None:
        """The PyTorch generator if CTranslate2 cannot continue these prompts as it does."""
        ours = self.in_torch()
        if ours is None and sample.temperature > 0:
            raise self._refuse_sampling()
        longest = max((len(prompt) for prompt in prompts), default=0) + limit - 1
        return ours if sample.temperature > 0 or longest > self.model.max_length else None

    def _most(self, limit: int) -> int:
        """An end that is forced at the limit takes the position of the last token."""
        forces_end = self.twin is not None and self.decode.at_limit != "truncate"
        return limit - 1 if forces_end else limit
