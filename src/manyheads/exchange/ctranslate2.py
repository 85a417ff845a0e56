"""Our models as CTranslate2 folders, and CTranslate2 to run them.

A folder holds model.bin, config.json and the vocabulary as CTranslate2 reads them, and our
tokenizer.json. What CTranslate2 lacks is expressed by other parts where that is exact, and
refused where it is not:

- a position that is added is written out as a table up to model.max_length, none as zeros;
- a bias by distance (T5, ALiBi) is a table of T5's kind with a bucket of its own for each
  distance, so that no rounding of a logarithm decides where a bucket ends;
- a matrix between query and key (bilinear, reduced-rank) is multiplied into the projections.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import nearest
from manyheads.decode.beam import Decode, Hypothesis, SpecialTokens, length_penalty
from manyheads.decode.generate import GREEDY, BaseGenerator
from manyheads.decode.sample import Sample
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError, UserError, import_optional
from manyheads.exchange.family import refuse_approximations
from manyheads.fileio import replace_files
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import ACTIVATIONS, Embedding, FeedForward, GatedFeedForward, LMHead
from manyheads.nn.positions import (
    AlibiPosition,
    BucketPosition,
    LearnedPosition,
    Position,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
)
from manyheads.nn.scores import InnerScore
from manyheads.ops import share_heads
from manyheads.tokenizer.tokenizer import Tokenizer

WEIGHTS, SETTINGS, TOKENIZER = "model.bin", "config.json", "tokenizer.json"
ACTIVATION_NAMES = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu-tanh": "GELUTanh",
    "silu": "SWISH",
    "tanh": "Tanh",
}
KNOWN_POSITIONS = (RotaryPosition, ShawPosition, BucketPosition, AlibiPosition)
Affine = Float[Tensor, "n d"]  # a projection, its bias as the last column


def library() -> Any:
    return import_optional("ctranslate2", "exchange")


def _refuse(reason: str) -> UserError:
    return UserError(f"CTranslate2 cannot express this model: {reason}")


def write_ctranslate2(
    model: Seq2Seq | Gpt,
    tokenizer: Tokenizer,
    folder: Path,
    quantization: str = "float32",
    decode: Decode | None = None,
) -> None:
    """A folder that CTranslate2 opens, whole or not at all.

    The start and the end of a text are those of `decode` where it names them, else the
    tokenizer's; the end (and decode.source_start) is put around a source by CTranslate2 itself.

    `quantization` is how the weights are stored: float32, float16, bfloat16, int16, int8, and
    int8_float32, int8_float16, int8_bfloat16, which also say how the rest is.
    """
    known = list(library().specs.model_spec.ACCEPTED_MODEL_TYPES)
    if quantization not in known:
        raise UserError(f"--quantization {quantization}: {nearest(quantization, known)}")
    if (folder / WEIGHTS).exists():
        raise UserError(f"{folder} holds a CTranslate2 model already: choose another folder")
    refuse_approximations(model)
    marks = SpecialTokens(tokenizer, decode or Decode())
    with torch.no_grad():
        spec = _gpt(model, marks) if isinstance(model, Gpt) else _seq2seq(model, marks)
    spec.config.layer_norm_epsilon = _epsilon(model)
    spec.config.add_attribute("max_length", model.config.max_length)
    spec.validate()
    spec.optimize(quantization)
    with replace_files(folder, last=WEIGHTS) as temporary:  # a folder with weights is complete
        spec.save(str(temporary))
        tokenizer.save(temporary / TOKENIZER)


def _seq2seq(model: Seq2Seq, marks: SpecialTokens) -> Any:
    specs, longest = library().specs, model.config.max_length
    bias = _by_distance(model.encoder.position, longest, both_ways=True)
    encoder = specs.TransformerEncoderSpec(
        **_options(model.encoder, model.encoder_embedding, biased=bias is not None)
    )
    _embed(encoder, encoder.embeddings[0], model.encoder_embedding, model.tokens)
    _stack(encoder, model.encoder, longest, bias)
    decoder = _decoder(model.decoder, model.decoder_embedding, longest, crossed=True)
    _embed(decoder, decoder.embeddings, model.decoder_embedding, model.target_table)
    _head(decoder, model.head, model.target_table)
    spec = specs.TransformerSpec(encoder, decoder)
    spec.register_source_vocabulary(vocabulary(marks.tokenizer, model.tokens.num_embeddings))
    names = vocabulary(marks.tokenizer, model.target_table.num_embeddings)
    spec.register_target_vocabulary(names)
    _name_specials(spec.config, marks, names)
    spec.config.decoder_start_token = names[marks.start]
    spec.config.add_source_eos = True
    if marks.decode.source_start is not None:
        spec.config.bos_token = names[marks.decode.source_start]
        spec.config.add_source_bos = True
    return spec


def _gpt(model: Gpt, marks: SpecialTokens) -> Any:
    if isinstance(model.decoder.position, BucketPosition):
        # Seen in version 4.8: all tokens of a prompt are taken to stand at its end.
        raise _refuse("it reads a prompt at wrong T5 distances; train with another model.position")
    decoder = _decoder(model.decoder, model.embedding, model.config.max_length, crossed=False)
    _embed(decoder, decoder.embeddings, model.embedding, model.tokens)
    _head(decoder, model.head, model.tokens)
    spec = library().specs.TransformerDecoderModelSpec(decoder)
    names = vocabulary(marks.tokenizer, model.tokens.num_embeddings)
    spec.register_vocabulary(names)
    _name_specials(spec.config, marks, names)
    return spec


def _decoder(stack: Stack, embedding: Embedding, longest: int, *, crossed: bool) -> Any:
    alibi = isinstance(stack.position, AlibiPosition)  # a decoder has it, an encoder has not
    bias = None if alibi else _by_distance(stack.position, longest, both_ways=False)
    spec = library().specs.TransformerDecoderSpec(
        **_options(stack, embedding, biased=bias is not None),
        alibi=alibi,
        with_encoder_attention=crossed,
    )
    _stack(spec, stack, longest, bias)
    return spec


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """A name for each id: a token's own, and for an id without a token one that no token has."""
    if tokenizer.vocab_size > size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {size}"
        )
    names = [tokenizer.content(number) for number in range(size)]
    taken = set(names)
    free = (name for name in (f"<no token {i}>" for i in count()) if name not in taken)
    return [next(free) if name is None else name for name in names]


def _name_specials(config: Any, marks: SpecialTokens, names: list[str]) -> None:
    marks.check(len(names))
    config.eos_token = names[marks.end]
    for name, special in (("bos_token", "start"), ("unk_token", "unknown")):
        try:
            token = getattr(marks.tokenizer, special)
        except UserError:  # files from elsewhere do not have them all; nothing is done with them
            token = marks.end
        setattr(config, name, names[token])


def _epsilon(model: nn.Module) -> float:
    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
    found = sorted({float(norm.eps or 0.0) for norm in norms})
    if len(found) > 1:
        raise _refuse(f"it has one epsilon for all norms, and here are {found}")
    return found[0]


def _options(stack: Stack, embedding: Embedding, *, biased: bool) -> dict[str, Any]:
    block = _blocks(stack)[0]
    placement = block.attention_residual.placement
    bare = isinstance(stack.last_norm, nn.Identity)
    if placement not in ("pre", "post") or (placement == "post" and not bare):
        raise _refuse(f"it has no norms that stand {placement}, with this end of a stack")
    if not isinstance(embedding.project, nn.Identity):
        raise _refuse("its token table is as wide as the model; leave out model.embed.dim")
    if not isinstance(block.attention.score, InnerScore):
        raise _refuse("its scores are inner products, and the additive one is not")
    heads, position = block.attention.config, stack.position
    channels = [len(part) for part in _projections(block.attention)[:2]]
    width = channels[0] // heads.heads
    options = {
        "num_layers": len(stack.blocks),
        "num_heads": heads.heads,
        "num_heads_kv": channels[1] // width,
        "head_dim": width,
        "pre_norm": placement == "pre",
        "no_final_norm": bare,
        "rms_norm": isinstance(block.attention_residual.norm, nn.RMSNorm),
        "layernorm_embedding": not isinstance(embedding.norm, nn.Identity),
        "activation": _activation(block.feedforward),
        "ffn_glu": isinstance(block.feedforward, GatedFeedForward),
        "relative_position": isinstance(position, ShawPosition),
        "relative_attention_bias": biased,
    }
    if isinstance(position, RotaryPosition):
        options["rotary_dim"] = 0  # all channels
        options["rotary_interleave"] = position.layout == "interleaved"
        options["rotary_base"] = position.base
    return options


def _activation(feedforward: nn.Module) -> Any:
    if not isinstance(feedforward, FeedForward | GatedFeedForward):
        raise _refuse(f"it has no feed-forward of the kind {type(feedforward).__name__}")
    known = library().specs.Activation
    for name, function in ACTIVATIONS.items():
        if function is feedforward.activation and name in ACTIVATION_NAMES:
            return known[ACTIVATION_NAMES[name]]
    raise _refuse("it does not have the activation of the feed-forward")


def _embed(spec: Any, table_spec: Any, embedding: Embedding, table: nn.Embedding) -> None:
    weight = table.weight
    if embedding.segment is not None:  # a model of one text is always in its first segment
        weight = weight + embedding.segment.weight[0] / embedding.scale
    table_spec.weight = _copy(weight)
    spec.scale_embeddings = float(embedding.scale)
    if not isinstance(embedding.norm, nn.Identity):
        rms = isinstance(embedding.norm, nn.RMSNorm)
        spec.layernorm_embedding = library().specs.common_spec.LayerNormSpec(rms_norm=rms)
        _norm(spec.layernorm_embedding, embedding.norm)


def _stack(spec: Any, stack: Stack, longest: int, bias: Tensor | None) -> None:
    if type(stack.position) in (Position, SinusoidalPosition, LearnedPosition):
        spec.position_encodings.encodings = _added(stack, longest)
    elif not isinstance(stack.position, KNOWN_POSITIONS):
        raise _refuse(f"it has no {type(stack.position).__name__}")
    if not isinstance(stack.last_norm, nn.Identity):
        _norm(spec.layer_norm, stack.last_norm)
    for layer, block, own in zip(spec.layer, _blocks(stack), cycle(stack.positions), strict=False):
        _attention(layer.self_attention, block.attention, block.attention_residual.norm)
        if isinstance(own, ShawPosition):
            _shaw(layer.self_attention, own, block.attention)
        if bias is not None:
            layer.self_attention.relative_attention_bias = bias
            layer.self_attention.relative_attention_max_distance = np.int32(len(bias))
        if hasattr(layer, "attention"):
            _attention(layer.attention, block.cross, block.cross_residual.norm)
        _norm(layer.ffn.layer_norm, block.feedforward_residual.norm)
        _feedforward(layer.ffn, block.feedforward)


def _blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]


def _added(stack: Stack, longest: int) -> Float[Tensor, "s d"]:
    """What a position adds to the embeddings, for each of the first `longest` places."""
    weight = _blocks(stack)[0].attention.project.weight
    nothing = weight.new_zeros(1, longest, weight.shape[1], dtype=torch.float32)
    places = torch.arange(longest, device=weight.device)
    return _copy(stack.position.embed(nothing, places[None])[0])


def _by_distance(
    position: Position, longest: int, *, both_ways: bool
) -> Float[Tensor, "rows h"] | None:
    """A bias by distance as a table of T5's form, exact buckets first, then logarithmic ones.

    All distances past the exact ones are in T5's last bucket. ALiBi has no such end: what is
    model.max_length or more away, in a text longer than that, is not seen.
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
    return _copy(torch.cat(parts if both_ways else parts[:2]))


def _shaw(spec: Any, position: ShawPosition, attention: SelfAttention) -> None:
    """The foreign form scales both products alike; ours has 1/√c for the relative one."""
    score = attention.score
    if type(score) is not InnerScore or score.scale == 0:
        raise _refuse("Shaw's positions need a dot score there: set model.score=scaled-dot")
    ratio = attention.config.head_dim**-0.5 / score.scale
    spec.relative_position_keys = _copy(position.keys * ratio)
    spec.relative_position_values = _copy(position.values)


def _attention(spec: Any, attention: SelfAttention | CrossAttention, norm: nn.Module) -> None:
    _norm(spec.layer_norm, norm)
    assert isinstance(attention.score, InnerScore)  # seen to in `_options`
    spec.queries_scale = float(attention.score.scale)
    query, keys, values, output = _projections(attention)
    if isinstance(attention, SelfAttention):
        _linear(spec.linear[0], torch.cat([query, keys, values]))
    else:
        _linear(spec.linear[0], query)
        _linear(spec.linear[1], torch.cat([keys, values]))
    _linear(spec.linear[-1], output)


def _projections(attention: SelfAttention | CrossAttention) -> list[Affine]:
    """To queries, keys, values and back; a matrix between query and key is multiplied in.

    A score is ⟨f(q), g(k)⟩ with f and g linear in each head, so that the columns of the
    projections can go through them. All heads must then be equally wide: zeros fill them up.
    """
    sizes, output = attention.config.sizes, _affine(attention.output)
    if isinstance(attention, SelfAttention):
        query, keys, values = _affine(attention.project).split(sizes)
    else:
        query = _affine(attention.query)
        keys, values = _affine(attention.project).split(sizes[1:])
    if type(attention.score) is InnerScore:  # a dot product, of any scale
        return [query, keys, values, output]
    heads, groups = attention.config.heads, attention.config.kv_heads
    k, v = (rearrange(x, "(g c) d -> 1 g d c", g=groups) for x in (keys, values))
    q = rearrange(query, "(h c) d -> 1 h d c", h=heads)
    assert isinstance(attention.score, InnerScore)
    f, g = attention.score.factors(q, share_heads(k, heads))
    width = max(f.shape[-1], v.shape[-1])
    wide = [F.pad(x, (0, width - x.shape[-1])) for x in (f, g, share_heads(v, heads))]
    back = rearrange(attention.output.weight, "d (h c) -> d h c", h=heads)
    back = rearrange(F.pad(back, (0, width - back.shape[-1])), "d h c -> d (h c)")
    output = torch.cat([back, output[:, -1:]], dim=1)
    return [*(rearrange(x, "1 h d c -> (h c) d") for x in wide), output]


def _feedforward(spec: Any, feedforward: nn.Module) -> None:
    assert isinstance(feedforward, FeedForward | GatedFeedForward)  # seen to in `_activation`
    if isinstance(feedforward, GatedFeedForward):
        _linear(spec.linear_0, _affine(feedforward.gate))
        _linear(spec.linear_0_noact, _affine(feedforward.inner))
    else:
        _linear(spec.linear_0, _affine(feedforward.inner))
    _linear(spec.linear_1, _affine(feedforward.outer))


def _head(spec: Any, head: LMHead, table: nn.Embedding) -> None:
    spec.projection.weight = _copy(head.matrix(table))
    if head.bias is not None:
        spec.projection.bias = _copy(head.bias)
    spec.scale_outputs = float(head.scale)


def _norm(spec: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    spec.gamma = _copy(norm.weight)
    if isinstance(norm, nn.LayerNorm):
        spec.beta = _copy(norm.bias)


def _affine(linear: nn.Linear) -> Affine:
    """A projection as one matrix, its bias (zeros where it has none) as the last column."""
    bias = torch.zeros_like(linear.weight[:, 0]) if linear.bias is None else linear.bias
    return torch.cat([linear.weight, bias[:, None]], dim=1)


def _linear(spec: Any, affine: Affine) -> None:
    spec.weight = _copy(affine[:, :-1])
    if bool(affine[:, -1].any()):
        spec.bias = _copy(affine[:, -1])


def _copy(tensor: Tensor) -> Tensor:
    """The writer quantizes in place: it must not get hold of the model's own numbers."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


# ---------------------------------------------------------------------------------------------
# Running


class Ctranslate2Model:
    """A folder, opened by the `kind` of runner that its model needs; on a CPU with torch's threads.

    The device `auto` is a GPU where CTranslate2 sees one. Tokens go in and come out by name;
    `source` and `target` are the names by id.
    """

    def __init__(self, folder: Path, kind: str, device: str = "cpu") -> None:
        runner = getattr(library(), kind)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"no {folder / WEIGHTS}: give a folder exported to ctranslate2")
        place, _, number = device.partition(":")
        if place == "cuda" and not library().get_cuda_device_count():
            raise UserError("CTranslate2 has no GPU to compute on here: use --device cpu or auto")
        try:
            self.runner = runner(
                str(folder),
                place,
                device_index=int(number or 0),
                intra_threads=torch.get_num_threads(),
            )
            self.settings: dict[str, Any] = json.loads((folder / SETTINGS).read_bytes())
            self.max_length = int(self.settings["max_length"])
            self.source, self.target = _vocabularies(folder)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{folder} is no model of ours ({reason}): export it again") from None
        self.ids = {name: number for number, name in enumerate(self.target)}

    def check(self, marks: SpecialTokens) -> None:
        """Refuse settings that this folder was not written with, or that cannot be honoured."""
        marks.check(len(self.target))
        wanted: dict[str, Any] = {"eos_token": self.target[marks.end]}
        if "decoder_start_token" in self.settings:
            before = marks.decode.source_start
            wanted["decoder_start_token"] = self.target[marks.start]
            wanted["add_source_bos"] = before is not None
            wanted |= {} if before is None else {"bos_token": self.target[before]}
        for name, value in wanted.items():
            if self.settings[name] != value:
                raise UserError(
                    f"this folder has {name} {self.settings[name]!r}, the settings {value!r}: "
                    "export the model again with these settings"
                )
        if marks.decode.beam > 1 and marks.decode.stopping != "early":
            raise UserError("CTranslate2 needs decode.stopping=early: set it")

    def options(self, marks: SpecialTokens, wanted: int) -> dict[str, Any]:
        decode = marks.decode
        return {
            "beam_size": decode.beam,
            # All of them where there is a penalty: ranking them is ours.
            "num_hypotheses": decode.beam if decode.length_penalty else wanted,
            "length_penalty": decode.length_penalty,
            "suppress_sequences": [[self.target[x]] for x in marks.suppressed if x != marks.end],
            "end_token": [marks.end],
            "return_end_token": True,  # so that it counts in |y|, as ours does
            "return_scores": True,
            "max_batch_size": max(1, decode.forward_tokens // decode.beam),
            "batch_type": "tokens",
        }

    def hypothesis(self, tokens: list[int], score: float, marks: SpecialTokens) -> Hypothesis:
        """A hypothesis of theirs, with the score that it has by our settings."""
        decode, length = marks.decode, max(1, len(tokens))  # nothing for an empty source
        log_probability = score * length**decode.length_penalty
        penalty = float(length_penalty(length, decode.length_penalty, decode.penalty))
        text = tokens[:-1] if tokens[-1:] == [marks.end] else tokens
        return Hypothesis(text, log_probability, log_probability / penalty)


def _vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    for one in ("shared_vocabulary.json", "vocabulary.json"):
        if (folder / one).is_file():
            names = json.loads((folder / one).read_bytes())
            return names, names
    source, target = (folder / f"{side}_vocabulary.json" for side in ("source", "target"))
    return json.loads(source.read_bytes()), json.loads(target.read_bytes())


def _no_draws() -> UserError:
    return UserError(
        "CTranslate2 draws all texts from one stream of random numbers, seeded once, so that no "
        "seed gives a text again: search (--temperature 0, --beam), or use the run itself"
    )


def _best(found: list[Hypothesis], wanted: int) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: -hypothesis.score)[:wanted]


@dataclass(frozen=True)
class Ctranslate2Translator(BaseTranslator):
    """An encoder–decoder in a folder, with its tokenizer and the settings it writes with.

    The search is CTranslate2's own (read in its sources, and measured): like ours it extends
    the `beam` likeliest texts by log P alone, and ranks those that have ended by log P / lp,
    here with the lp of decode.penalty. It differs from ours in this:

    - a banned token has no probability: the others share its part, so that log P is the one
      given that none of them is written (ours leaves their part unused);
    - with a length penalty it stops when `beam` hypotheses have ended, as ours does, and gives
      the best `beam` by |y|^α; without one when the likeliest of a step's texts has just ended
      and there are as many as are wanted, so that it may look on where ours has stopped;
    - at the length limit a text is cut as it stands (decode.at_limit=truncate);
    - after decode.forced_bos only the likeliest text may end at once;
    - an empty source is not read: its translation is empty, and certain.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence (the whole beam unless told), best first."""
        marks, first = self.special_tokens, self.decode.forced_bos
        self.model.check(marks)
        wanted = min(n_best or self.decode.beam, self.decode.beam)
        options = self.model.options(marks, wanted)
        encoded = self.tokenizer.encode_batch(sentences)
        limits = [self._limit(len(marks.source(ids))) for ids in encoded]
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        done = 0
        # A limit belongs to a whole call: one for each, so that no neighbour changes it.
        for limit in sorted(set(limits)):
            rows = [row for row, own in enumerate(limits) if own == limit]
            found = self.model.runner.translate_batch(
                [[self.model.source[token] for token in encoded[row]] for row in rows],
                None if first is None else [[self.model.target[first]]] * len(rows),
                **options,
                min_decoding_length=min(self.decode.min_length, limit),
                max_decoding_length=limit,
                max_input_length=0,
            )
            for row, result in zip(rows, found, strict=True):
                tokens = ([self.model.ids[name] for name in names] for names in result.hypotheses)
                pairs = zip(tokens, result.scores, strict=True)
                results[row] = _best(
                    [self.model.hypothesis(*pair, marks) for pair in pairs], wanted
                )
            done += len(rows)
            advance(done)
        return results

    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        if sample.temperature > 0:
            raise _no_draws()
        return replace(self, decode=replace(self.decode, beam=1)).translate(sentences)

    def _limit(self, length: int) -> int:
        if length > self.max_length:
            raise UserError(
                f"a source of {length} tokens, but this folder's positions end at "
                f"{self.max_length}: shorten it, or export a model with a larger max_length"
            )
        return self.decode.limit(length, self.max_length)


@dataclass(frozen=True)
class Ctranslate2Generator(BaseGenerator):
    """A decoder-only model in a folder, with its tokenizer and the settings it writes with.

    The search is that of the translator. A text ends with the model's max_length at the latest.
    """

    supports_seed: ClassVar[bool] = False
    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = lambda line: None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # of the tokens that go in

    @property
    def positions(self) -> int:
        return self.model.max_length

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def generate(self, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        return [found[0].tokens for found in self.search(prompts, limit, n_best=1)]

    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        """The n best continuations of each prompt (the whole beam unless told), best first."""
        marks, wanted = self.special_tokens, min(n_best or self.decode.beam, self.decode.beam)
        self.model.check(marks)
        if self.decode.forced_bos is not None:
            raise UserError(
                "decode.forced_bos is for translations: put the token at the prompt's end"
            )
        results: list[list[Hypothesis]] = [[] for _ in prompts]
        # Prompts of one length are read at once; in a mixed batch the ends of longer ones would
        # be written under constraint, and then only the first beam may end at once.
        for rows, read, limits in self._batches(prompts, limit, self.decode.beam):
            room = int(limits[0])
            found = self.model.runner.generate_batch(
                [[self.model.target[token] for token in prompt] for prompt in read.tolist()],
                **self.model.options(marks, wanted),
                min_length=min(self.decode.min_length, room),
                max_length=room,
                include_prompt_in_result=False,
            )
            for row, result in zip(rows, found, strict=True):
                pairs = zip(result.sequences_ids, result.scores, strict=True)
                results[row] = _best(
                    [self.model.hypothesis(*pair, marks) for pair in pairs], wanted
                )
        return results

    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        if sample.temperature > 0:
            raise _no_draws()
        return replace(self, decode=replace(self.decode, beam=1)).generate(prompts, limit)

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        return iter(self.sample([prompt], limit, sample or GREEDY, first)[0])
