"""A text through a model, once: how it is read, every map on the way, and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.decode.beam import SpecialTokens
from manyheads.decode.generate import Generator
from manyheads.decode.translate import Translator
from manyheads.errors import UserError
from manyheads.loading import TorchRun
from manyheads.models.bert import Bert
from manyheads.models.capture import Kind, attentions
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq, EncoderDecoder
from manyheads.models.gpt import Gpt
from manyheads.models.heads import Masked
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.tasks.encode import MASKS
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.heads import Place, Recorded, knocked_out, recorded
from manyheads.web.responses import Problem

TOP = 10  # alternatives that are told of a position
CONTINUED = 16  # tokens that a language model goes on by
LogProbabilities = Float[Tensor, "t v"]


@dataclass(frozen=True)
class Room:
    """How long a text may be, and how many bytes of maps it may have."""

    tokens: int
    bytes: int

    def check(self, ids: Sequence[int], model: Any, what: str) -> None:
        most = min(self.tokens, model.config.max_length)
        if len(ids) > most:
            raise Problem(
                413, f"{what} has {len(ids)} tokens, at most {most} are shown: shorten it"
            )

    def check_maps(self, model: nn.Module, longest: int) -> None:
        """Before they are computed: every head with the longest of the sequences on both sides."""
        parts = (m for m in model.modules() if isinstance(m, SelfAttention | CrossAttention))
        size = 4 * longest**2 * sum(part.config.heads for part in parts)
        if size > self.bytes:
            raise Problem(
                413,
                f"the maps of {longest} tokens may take {size >> 20} MiB, and {self.bytes >> 20} "
                "MiB are kept at most: shorten the text",
            )


@dataclass(frozen=True)
class Pass:
    """What a text became. `sides` are the labels of the rows and columns of each kind of map."""

    record: Recorded
    output: dict[str, Any]
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """`stack.kind.weights`, `.q` and `.k`, layers and heads first, of the one text there is."""
        found: dict[str, list[Tensor]] = {}
        maps = {key: kept[-1] for key, kept in self.record.maps.by_layer.items() if kept}
        kinds = (("weights", maps), ("q", self.record.queries), ("k", self.record.keys))
        for what, by_place in kinds:
            for (stack, kind, _), tensor in sorted(by_place.items()):
                found.setdefault(f"{stack}.{kind}.{what}", []).append(tensor[0].float().cpu())
        # Layers that compute differently (one attends to fewer keys) have no common shape.
        return {
            name: torch.stack(layers)
            for name, layers in found.items()
            if len({layer.shape for layer in layers}) == 1
        }


def look(opened: TorchRun, text: str, target: str | None, off: Sequence[Place], room: Room) -> Pass:
    """A text through the model of a run, with some heads knocked out.

    An encoder–decoder reads `text` and writes `target`, or what it would write itself.
    """
    model = opened.model
    if not any(True for _ in attentions(model)):
        raise opened.unsupported("is shown here", "a model with attention")
    with torch.inference_mode(), knocked_out(model, off):
        if isinstance(model, EncoderDecoder):
            return _translated(opened, text, target, room)
        if isinstance(model, Gpt):
            return _continued(opened, text, room)
        if isinstance(model, Bert):
            return _read(opened, text, room)
    raise opened.unsupported("is shown here", "a model of text")


def _translated(opened: TorchRun, text: str, target: str | None, room: Room) -> Pass:
    model: Any = opened.model
    tokenizer = opened.tokenizer
    translator = Translator(model, tokenizer, opened.run.decode)
    marks = translator.special_tokens
    source = marks.source(tokenizer.encode(text))
    room.check(source, model, "the text")
    if target is None:
        found = translator.search([text], n_best=1)[0]
        written = found[0].tokens if found else []
    else:
        written = tokenizer.encode(target)
    given, expected = [marks.start, *written], [*written, marks.end]
    room.check(given, model, "the target")
    both = len(source) + len(given) if isinstance(model, DecoderOnlySeq2Seq) else 0
    room.check_maps(model, max(len(source), len(given), both))
    with recorded(model) as record:
        logits = model(_batch(source, opened), _batch(given, opened))
    chances = logits[0].float().log_softmax(-1)
    output = {
        "kind": "text",
        "text": tokenizer.decode(written),
        "forced": target is not None,
        **_likelihood(chances, expected, tokenizer),
    }
    read, steps = tokenizer.subwords(source), tokenizer.subwords(given)
    whole = [*read, *steps] if isinstance(model, DecoderOnlySeq2Seq) else steps
    sides: dict[tuple[str, Kind], tuple[list[str], list[str]]] = {
        ("encoder", "self"): (read, read),
        ("decoder", "self"): (whole, whole),
        ("decoder", "cross"): (tokenizer.subwords(expected), read),
    }
    return Pass(record, output, sides)


def continuation(opened: TorchRun, text: str, off: Sequence[Place], room: Room) -> str:
    """What a language model writes after a text, with some heads knocked out.

    A question of its own: what is written after the text changes nothing in the text's maps, which
    need not wait for it.
    """
    model = opened.model
    if not isinstance(model, Gpt):
        raise opened.unsupported("goes on with a text", "a language model")
    tokenizer = opened.tokenizer
    generator = Generator(model, tokenizer, opened.run.decode)
    ids = _prompt(opened, text)
    room.check(ids, model, "the text")
    with torch.inference_mode(), knocked_out(model, off):
        follows = list(islice(generator.stream(ids, CONTINUED), CONTINUED))
    return tokenizer.decode([*ids, *follows])[len(tokenizer.decode(ids)) :]


def _prompt(opened: TorchRun, text: str) -> list[int]:
    """The tokens of a text; an empty one is the start token."""
    return opened.tokenizer.encode(text) or [
        SpecialTokens(opened.tokenizer, opened.run.decode).start
    ]


def _continued(opened: TorchRun, text: str, room: Room) -> Pass:
    model: Any = opened.model
    tokenizer = opened.tokenizer
    ids = _prompt(opened, text)
    room.check(ids, model, "the text")
    room.check_maps(model, len(ids))
    with recorded(model) as record:
        logits = model(_batch(ids, opened))
    chances = logits[0].float().log_softmax(-1)
    output = {
        "kind": "continuation",
        "top": _top(chances[-1], tokenizer),
        **_likelihood(chances[:-1], ids[1:], tokenizer),
    }
    pieces = tokenizer.subwords(ids)
    return Pass(record, output, {("decoder", "self"): (pieces, pieces)})


def _read(opened: TorchRun, text: str, room: Room) -> Pass:
    model: Any = opened.model
    encoder = opened.encoder()
    tokenizer, head = encoder.tokenizer, model.config.head
    masked = text
    if isinstance(head, Masked):
        own = str(tokenizer.content(tokenizer.mask))
        for spelled in MASKS:
            masked = masked.replace(spelled, own)
    one, tab, two = masked.partition("\t")
    framed = tokenizer.framed([(one, two) if tab else one], specials=masked != text)
    ids, parts = framed[0]
    room.check(ids, model, "the text")
    room.check_maps(model, len(ids))
    if not ids:
        raise UserError("there is nothing to read: write a text")
    segments = [min(part, encoder.segments - 1) for part in parts]
    with recorded(model) as record:
        hidden = model.hidden(_batch(ids, opened), None, _batch(segments, opened))
        answer = model.head_output(hidden)[0].float()
    pieces = tokenizer.subwords(ids)
    output: dict[str, Any] = {"kind": "states"}
    if isinstance(head, Masked):
        chances = answer.log_softmax(-1)
        at = [i for i, token in enumerate(ids) if token == tokenizer.mask]
        filled = [
            {"position": i, "piece": pieces[i], "top": _top(chances[i], tokenizer)}
            for i in at or range(len(ids))
        ]
        output = {"kind": "words", "masked": bool(at), "words": filled}
    elif labels := getattr(head, "labels", None):
        rows = answer.softmax(-1) if len(labels) > 1 else answer
        output = {"kind": "labels", "labels": list(labels), "scores": rows.tolist()}
    return Pass(record, output, {("encoder", "self"): (pieces, pieces)})


def _batch(ids: Sequence[int], opened: TorchRun) -> Tensor:
    return torch.tensor([list(ids)], device=opened.device)


def _likelihood(
    chances: LogProbabilities, expected: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """log P of each expected token, and of all of them."""
    each = [float(row[token]) for row, token in zip(chances, expected, strict=True)]
    pieces = tokenizer.subwords(expected)
    return {"pieces": pieces, "log_probabilities": each, "log_probability": sum(each)}


def _top(chances: Float[Tensor, " v"], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    best, ids = chances.exp().topk(min(TOP, len(chances)))
    pieces = tokenizer.subwords(ids.tolist())
    return [
        {"piece": piece, "probability": chance}
        for piece, chance in zip(pieces, best.tolist(), strict=True)
    ]
