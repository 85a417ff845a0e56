"""One forward pass of a text: its attention maps and its output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.decode.beam import SpecialTokens
from manyheads.decode.generate import Generator
from manyheads.decode.translate import Translator
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.bert import Bert
from manyheads.models.capture import Kind, attentions
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq, EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.heads import Masked
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.tasks.encode import MASKS
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.guard import check_client
from manyheads.web.heads import HeadId, Recording, knocked_out, record_attention
from manyheads.web.responses import Problem

TOP = 10  # predictions returned for a position
CONTINUED = 16  # tokens of a continuation
LogProbabilities = Float[Tensor, "t v"]


@dataclass(frozen=True)
class SizeLimit:
    """Limits on the tokens of a text and on the bytes of its attention maps."""

    tokens: int
    bytes: int

    def check(self, ids: Sequence[int], model: Any, what: str) -> None:
        most = min(self.tokens, model.config.max_length)
        if len(ids) > most:
            raise Problem(413, f"{what} has {len(ids)} tokens, more than {most}: shorten it")

    def check_maps(self, model: nn.Module, longest: int) -> None:
        """Raise if the maps could exceed the limit: all heads, `longest` queries and keys."""
        modules = (m for m in model.modules() if isinstance(m, SelfAttention | CrossAttention))
        size = 4 * longest**2 * sum(module.config.heads for module in modules)
        if size > self.bytes:
            raise Problem(
                413,
                f"the attention maps of {longest} tokens may take {size >> 20} MiB, more than "
                f"{self.bytes >> 20} MiB: shorten the text",
            )


@dataclass(frozen=True)
class ForwardPass:
    """Maps and output of a text. `sides`: row and column labels for each (stack, kind) of map."""

    record: Recording
    output: dict[str, Any]
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """`stack.kind.weights`, `.q` and `.k` of the single text, stacked over layers."""
        by_name: dict[str, list[Tensor]] = {}
        maps = {
            key: recordings[-1]
            for key, recordings in self.record.maps.by_layer.items()
            if recordings
        }
        kinds = (("weights", maps), ("q", self.record.queries), ("k", self.record.keys))
        for suffix, by_layer in kinds:
            for (stack, kind, _), tensor in sorted(by_layer.items()):
                by_name.setdefault(f"{stack}.{kind}.{suffix}", []).append(tensor[0].float().cpu())
        # Skip tensors whose shape differs between layers, as with local and global attention.
        return {
            name: torch.stack(layers)
            for name, layers in by_name.items()
            if len({layer.shape for layer in layers}) == 1
        }


def forward_text(
    opened: LoadedRun, text: str, target: str | None, off: Sequence[HeadId], limit: SizeLimit
) -> ForwardPass:
    """Run a text through the model, with some heads knocked out.

    An encoder–decoder scores `target`, or the translation of the complete model if `target` is
    None, so that log P with and without heads is that of the same tokens. `free` in the output is
    the translation that the model writes without the heads.
    """
    model = opened.model
    if not any(True for _ in attentions(model)):
        raise opened.unsupported("has attention maps", "a model with attention")
    with torch.inference_mode():
        if isinstance(model, EncoderDecoder):
            return _translated(opened, text, target, off, limit)
    with torch.inference_mode(), knocked_out(model, off):
        if isinstance(model, Gpt):
            return _continued(opened, text, limit)
        if isinstance(model, Bert):
            return _read(opened, text, limit)
    raise opened.unsupported("has an Attention page", "a model for text")


def _translated(
    opened: LoadedRun, text: str, target: str | None, off: Sequence[HeadId], limit: SizeLimit
) -> ForwardPass:
    model: Any = opened.model
    tokenizer = opened.tokenizer
    translator = Translator(model, tokenizer, opened.run.decode)
    special = translator.special_tokens
    source = special.source(tokenizer.encode(text))
    limit.check(source, model, "the text")
    target_ids = _best(translator, text) if target is None else tokenizer.target.encode(target)
    decoder_input, expected = [special.start, *target_ids], [*target_ids, special.end]
    limit.check(decoder_input, model, "the target")
    joined_length = len(source) + len(decoder_input) if isinstance(model, DecoderOnlySeq2Seq) else 0
    limit.check_maps(model, max(len(source), len(decoder_input), joined_length))
    with knocked_out(model, off):
        with record_attention(model) as record:
            logits = model(_batch(source, opened), _batch(decoder_input, opened))
        free_ids = _best(translator, text) if off else target_ids
    log_probs = logits[0].float().log_softmax(-1)
    output = {
        "kind": "text",
        "text": tokenizer.decode(target_ids),
        "free": tokenizer.decode(free_ids),
        "forced": target is not None,
        **_likelihood(log_probs, expected, tokenizer.target),
    }
    source_labels = tokenizer.subwords(source)
    target_labels = tokenizer.target.subwords(decoder_input)
    both_labels = (
        [*source_labels, *target_labels] if isinstance(model, DecoderOnlySeq2Seq) else target_labels
    )
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = {
        ("encoder", "self"): (source_labels, source_labels),
        ("decoder", "self"): (both_labels, both_labels),
        ("decoder", "cross"): (tokenizer.target.subwords(expected), source_labels),
    }
    return ForwardPass(record, output, sides)


def sweep_heads(
    opened: LoadedRun, text: str, target: str | None, limit: SizeLimit, seconds: float
) -> dict[str, Any]:
    """log P of the same text without each head: {"log_probability", "heads": {head: log P}}.

    A translator scores `target`, or the translation of the complete model; a language model the
    text. The sweep stops after `seconds`; heads that it did not reach are missing.
    """
    model: Any = opened.model
    tokenizer = opened.tokenizer
    if isinstance(model, EncoderDecoder):
        translator = Translator(model, tokenizer, opened.run.decode)
        special = translator.special_tokens
        source = special.source(tokenizer.encode(text))
        limit.check(source, model, "the text")
        with torch.inference_mode():
            ids = _best(translator, text) if target is None else tokenizer.target.encode(target)
        inputs, expected = [source, [special.start, *ids]], [*ids, special.end]
    elif isinstance(model, Gpt):
        ids = _prompt(opened, text)
        inputs, expected = [ids[:-1]], ids[1:]
    else:
        raise opened.unsupported("gives a text a probability", "a translator or language model")
    limit.check(inputs[-1], model, "the target")
    batches = [_batch(item, opened) for item in inputs]
    labels = torch.tensor(expected, device=opened.device)

    def score(off: Sequence[HeadId]) -> float:
        with torch.inference_mode(), knocked_out(model, off):
            log_probs = model(*batches)[0].float().log_softmax(-1)
        return float(log_probs.gather(-1, labels[:, None]).sum())

    heads, end = {}, monotonic() + seconds
    baseline = score([]) if expected else 0.0
    for stack, layer, attention in attentions(model):
        kind: Kind = "self" if isinstance(attention, SelfAttention) else "cross"
        for head in range(attention.config.heads if expected else 0):
            if monotonic() > end:
                break
            check_client()
            head_id = HeadId(stack, kind, layer, head)
            heads[str(head_id)] = score([head_id])
    return {"log_probability": baseline, "heads": heads}


def _best(translator: Translator, text: str) -> list[int]:
    """The tokens of the best hypothesis."""
    hypotheses = translator.search([text], n_best=1)[0]
    return hypotheses[0].tokens if hypotheses else []


def continuation(opened: LoadedRun, text: str, off: Sequence[HeadId], limit: SizeLimit) -> str:
    """The continuation that a language model generates, with some heads knocked out.

    A separate request: the attention maps of the text do not depend on it and need not wait.
    """
    model = opened.model
    if not isinstance(model, Gpt):
        raise opened.unsupported("continues a text", "a language model")
    tokenizer = opened.tokenizer
    generator = Generator(model, tokenizer, opened.run.decode)
    ids = _prompt(opened, text)
    limit.check(ids, model, "the text")
    with torch.inference_mode(), knocked_out(model, off):
        follows = list(islice(generator.stream(ids, CONTINUED), CONTINUED))
    return tokenizer.decode([*ids, *follows])[len(tokenizer.decode(ids)) :]


def _prompt(opened: LoadedRun, text: str) -> list[int]:
    """The tokens of a text; the start token if it is empty."""
    return opened.tokenizer.encode(text) or [
        SpecialTokens(opened.tokenizer, opened.run.decode).start
    ]


def _continued(opened: LoadedRun, text: str, limit: SizeLimit) -> ForwardPass:
    model: Any = opened.model
    tokenizer = opened.tokenizer
    ids = _prompt(opened, text)
    limit.check(ids, model, "the text")
    limit.check_maps(model, len(ids))
    with record_attention(model) as record:
        logits = model(_batch(ids, opened))
    log_probs = logits[0].float().log_softmax(-1)
    output = {
        "kind": "continuation",
        "top": _top(log_probs[-1], tokenizer),
        **_likelihood(log_probs[:-1], ids[1:], tokenizer),
    }
    subwords = tokenizer.subwords(ids)
    return ForwardPass(record, output, {("decoder", "self"): (subwords, subwords)})


def _read(opened: LoadedRun, text: str, limit: SizeLimit) -> ForwardPass:
    model: Any = opened.model
    encoder = opened.encoder()
    tokenizer, head = encoder.tokenizer, model.config.head
    masked = text
    if isinstance(head, Masked):
        mask = str(tokenizer.content(tokenizer.mask))
        for spelled in MASKS:
            masked = masked.replace(spelled, mask)
    first, tab, second = masked.partition("\t")
    framed = tokenizer.framed([(first, second) if tab else first], specials=masked != text)
    ids, parts = framed[0]
    limit.check(ids, model, "the text")
    limit.check_maps(model, len(ids))
    if not ids:
        raise UserError("the text is empty: enter one")
    segments = [min(part, encoder.segments - 1) for part in parts]
    with record_attention(model) as record:
        hidden = model.hidden(_batch(ids, opened), None, _batch(segments, opened))
        answer = model.head_output(hidden)[0].float()
    subwords = tokenizer.subwords(ids)
    output: dict[str, Any] = {"kind": "states"}
    if isinstance(head, Masked):
        log_probs = answer.log_softmax(-1)
        at = [i for i, token in enumerate(ids) if token == tokenizer.mask]
        filled = [
            {"position": i, "piece": subwords[i], "top": _top(log_probs[i], tokenizer)}
            for i in at or range(len(ids))
        ]
        output = {"kind": "words", "masked": bool(at), "words": filled}
    elif labels := getattr(head, "labels", None):
        rows = answer.softmax(-1) if len(labels) > 1 else answer
        output = {"kind": "labels", "labels": list(labels), "scores": rows.tolist()}
    return ForwardPass(record, output, {("encoder", "self"): (subwords, subwords)})


def _batch(ids: Sequence[int], opened: LoadedRun) -> Tensor:
    return torch.tensor([list(ids)], device=opened.device)


def _likelihood(
    log_probs: LogProbabilities, expected: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """log P of each expected token, and their sum."""
    token_log_probs = [float(row[token]) for row, token in zip(log_probs, expected, strict=True)]
    subwords = tokenizer.subwords(expected)
    return {
        "pieces": subwords,
        "log_probabilities": token_log_probs,
        "log_probability": sum(token_log_probs),
    }


def _top(log_probs: Float[Tensor, " v"], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    best, ids = log_probs.exp().topk(min(TOP, len(log_probs)))
    subwords = tokenizer.subwords(ids.tolist())
    return [
        {"piece": subword, "probability": probability}
        for subword, probability in zip(subwords, best.tolist(), strict=True)
    ]
