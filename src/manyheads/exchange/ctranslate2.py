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

WEIGHTS, TOKENIZER = "model.bin", "tokenizer.json"
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
    """A folder opened by a `kind` of runner (Translator, Generator), with torch's CPU threads.

    `workers` calls run at the same time, which share the threads. Tokens go in and come out by
    name; `source` and `target` are the names by id.
    """

    def __init__(self, folder: Path, kind: str, workers: int = 1) -> None:
        self.workers, threads = workers, torch.get_num_threads()
        try:
            self.runner = getattr(library(), kind)(
                str(folder),
                inter_threads=workers,
                intra_threads=max(1, threads // workers),
            )
            shared = [*folder.glob("shared_vocabulary.json"), *folder.glob("vocabulary.json")]
            files = 2 * shared[:1] or [
                folder / f"{x}_vocabulary.json" for x in ("source", "target")
            ]
            self.source, self.target = (json.loads(file.read_bytes()) for file in files)
        except (RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{folder} is not a conversion ({reason}): delete it") from None
        self.ids = {name: number for number, name in enumerate(self.target)}


class Ctranslate2Decoder(BaseDecoder):
    """The base of translator and generator: the options of a search.

    The search is CTranslate2's own (from its sources, and measured): like ours it extends the
    `beam` likeliest texts by log P and ranks those that have ended by log P / lp, here with the lp
    of decode.penalty. It differs from ours in this:

    - a suppressed token, or an end before decode.min_length, has no probability: the others share
      its part (ours leaves it unused);
    - it gives the best `beam` hypotheses by |y|^α;
    - at the length limit a text is cut.

    `twin` is the PyTorch model that the folder was converted from. The best text is that of our
    search: a beam search suppresses nothing, and a text that reaches a limit or has a suppressed
    token is searched again by PyTorch. `manyheads.engines.why_not` refuses the other differences.
    """

    model: Ctranslate2Model
    twin: Any

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # where tokens are passed in

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def _suppressed(self, beam: int) -> list[list[str]]:
        """Greedy search compares tokens of one text only, whose probabilities grow alike."""
        special = self.special_tokens
        tokens = special.suppressed if beam == 1 else []
        return [[self.model.target[token]] for token in tokens if token != special.end]


@dataclass(frozen=True)
class Ctranslate2Translator(Ctranslate2Decoder, BaseTranslator):
    """An encoder–decoder in a folder, with its tokenizer and the settings it generates with.

    `exact` is False for quantized weights, whose probabilities PyTorch does not compute. `use_vmap`
    restricts each batch to the folder's vocabulary map (a lexical shortlist), if it has one: then
    results depend on the batch.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    twin: Seq2Seq
    exact: bool = True
    use_vmap: bool = False
    is_guided: bool = False

    @property
    def max_length(self) -> int:
        return self.twin.config.max_length

    def in_torch(self) -> Translator | None:
        return self._ours if self.exact else None

    @property
    def _ours(self) -> Translator:
        return Translator(self.twin, self.tokenizer, self.decode, is_guided=self.is_guided)

    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        decode, end = self.decode, self.special_tokens.end
        count = min(n_best or decode.beam, decode.beam)
        if self.exact and count > 1:
            return self._ours.search(sentences, advance, n_best)
        encoded = self.tokenizer.encode_batch(sentences)
        lengths = np.array([len(self.special_tokens.source(ids)) for ids in encoded], dtype=int)
        limits = [decode.limit(int(length), self.max_length) for length in lengths]
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        is_ours = (lengths > self.max_length) | np.array([not ids for ids in encoded], dtype=bool)
        again, others = (np.flatnonzero(rows).tolist() for rows in (is_ours, ~is_ours))
        done = len(again)
        budget = max(1, decode.forward_tokens // decode.beam)
        for group in batches_by_length(lengths[others], budget):
            rows = [others[index] for index in group]
            most = max(limits[row] for row in rows)
            outputs = self.model.runner.translate_batch(
                [[self.model.source[token] for token in encoded[row]] for row in rows],
                beam_size=decode.beam,
                # With a penalty all of them: CTranslate2 ranks by |y|^α, we by decode.penalty.
                num_hypotheses=decode.beam if decode.length_penalty else count,
                length_penalty=self._alpha,
                suppress_sequences=self._suppressed(decode.beam),
                end_token=[end],
                return_end_token=True,  # so that it counts in |y|, as ours does
                return_scores=True,
                max_batch_size=budget,
                batch_type="tokens",
                min_decoding_length=min(decode.min_length, most),
                max_decoding_length=most,
                max_input_length=0,
                use_vmap=self.use_vmap,
            )
            for row, output in zip(rows, outputs, strict=True):
                texts = [[self.model.ids[name] for name in names] for names in output.hypotheses]
                hypotheses = self._ranked(texts, output.scores)
                results[row] = hypotheses[:count]
                if self._differs(hypotheses, limits[row]):
                    again.append(row)
            done += len(rows)
            advance(done)
        if again:
            searched = self._ours.search([sentences[row] for row in again], n_best=n_best)
            for row, hypotheses in zip(again, searched, strict=True):
                results[row] = hypotheses
        return results

    @property
    def _alpha(self) -> float:
        """α of |y|^α, by which CTranslate2 chooses `beam` hypotheses if more have ended.

        The α nearest to lp = ((5 + |y|) / 6)^α: their slopes are equal at |y| = 20, since
        d log lp / d log |y| = α |y| / (5 + |y|).
        """
        return self.decode.length_penalty * (20 / 25 if self.decode.penalty == "gnmt" else 1)

    def _ranked(self, texts: Sequence[list[int]], scores: Sequence[float]) -> list[Hypothesis]:
        """Hypotheses, best first, with the scores that they have by our settings."""
        decode, end = self.decode, self.special_tokens.end
        hypotheses = []
        for tokens, score in zip(texts, scores, strict=True):
            log_probability = score * len(tokens) ** self._alpha
            penalty = float(length_penalty(len(tokens), decode.length_penalty, decode.penalty))
            text = tokens[:-1] if tokens[-1:] == [end] else tokens
            hypotheses.append(Hypothesis(text, log_probability, log_probability / penalty))
        return sorted(hypotheses, key=lambda h: -h.score)

    def _differs(self, hypotheses: Sequence[Hypothesis], limit: int) -> bool:
        """True if our search may give others. The longest hypothesis is as long as the search."""
        suppressed = set(self.special_tokens.suppressed)
        return any(
            not suppressed.isdisjoint(hypothesis.tokens) or len(hypothesis.tokens) + 1 >= limit
            for hypothesis in hypotheses
        )

    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        if sample.temperature == 0:
            return replace(self, decode=replace(self.decode, beam=1)).translate(sentences)
        if not self.exact:
            raise UserError("PyTorch samples, in float32: leave out --dtype int8")
        return self._ours.sample(sentences, sample, first)


@dataclass(frozen=True)
class Ctranslate2Generator(Ctranslate2Decoder, BaseGenerator):
    """A decoder-only model in a folder, with its tokenizer and the settings it generates with.

    CTranslate2 generates greedily; PyTorch searches, samples (CTranslate2 has one stream of random
    numbers for all texts), and continues texts past max_length.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    twin: Gpt
    warn: Callable[[str], None] = ignore

    @property
    def positions(self) -> int | None:
        return self._ours.positions

    @property
    def context(self) -> int:
        return self._ours.context

    @property
    def _ours(self) -> Generator:
        return Generator(self.twin, self.tokenizer, self.decode, self.warn)

    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        return self._ours.search(prompts, limit, n_best)

    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        if not self._supports(prompts, limit, sample):
            return self._ours.sample(prompts, limit, sample, first)
        results: list[list[int]] = [[] for _ in prompts]
        for rows, tokens, limits in self._batches(prompts, limit, 1):
            # Prompts of one length: CTranslate2 would generate the ends of longer ones.
            outputs = self.model.runner.generate_batch(
                [self._names(prompt) for prompt in tokens],
                include_prompt_in_result=False,
                **self._options(int(limits[0])),
            )
            for row, output in zip(rows, outputs, strict=True):
                results[row] = output.sequences_ids[0][: self._most(limit)]
        return results

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        if not self._supports([prompt], limit, sample or GREEDY):
            return self._ours.stream(prompt, limit, sample, first)
        [(_, tokens, limits)] = self._batches([prompt], limit, 1)
        if (most := min(int(limits[0]), self._most(limit))) < 1:
            return iter(())
        steps = self.model.runner.generate_tokens(self._names(tokens[0]), **self._options(most))
        end = self.special_tokens.end
        return (step.token_id for step in steps if step.token_id != end)

    def _supports(self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample) -> bool:
        longest = max((len(prompt) for prompt in prompts), default=0) + limit - 1
        return sample.temperature == 0 and longest <= self.context

    def _names(self, tokens: Tensor) -> list[str]:
        return [self.model.target[token] for token in tokens.tolist()]

    def _options(self, most: int) -> dict[str, Any]:
        return {
            "max_length": most,
            "min_length": min(self.decode.min_length, most),
            "suppress_sequences": self._suppressed(beam=1),
            "end_token": [self.special_tokens.end],
        }

    def _most(self, limit: int) -> int:
        """An end that is forced at the limit takes the position of the last token."""
        return limit if self.decode.at_limit == "truncate" else limit - 1
