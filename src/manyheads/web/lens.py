"""The Lens page's question: what a decoder would say after each layer.

    P_l = softmax(W · norm(h_l)),  h_0 the embedding, h_l the residual stream after layer l

The logit lens (nostalgebraist 2020): the last norm and the output matrix on every state, not on
the last alone. The last row is the model's own output.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor, nn

from manyheads.decode.generate import Generator
from manyheads.decode.translate import Translator
from manyheads.loading import TorchRun
from manyheads.models.gpt import Gpt
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import Residual
from manyheads.web.forward import Room
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, json_answer

TOP = 10  # tokens that are told of a cell
MOST_TOKENS = 128  # every cell is told with its tokens
# The parts of a block, as they add to the residual stream.
PARTS = {
    "attention": "attention_residual",
    "cross": "cross_residual",
    "feedforward": "feedforward_residual",
}

States = Float[Tensor, "layers t d"]
Added = Float[Tensor, "blocks t d"]


@dataclass
class Stream:
    """The residual stream of a pass: before the first layer, after each, and what each part adds.

    With the norm after the sum, a state is what the norm leaves, and what a part adds is what went
    into that sum.
    """

    states: list[Tensor] = field(default_factory=list)
    added: dict[str, list[Tensor]] = field(default_factory=dict)


@contextmanager
def watched(stack: Stack) -> Iterator[Stream]:
    """While open, a pass through the stack leaves its residual stream in what is yielded."""
    stream = Stream()
    first = stack.blocks[0]
    handles = [
        first.register_forward_pre_hook(lambda module, args: stream.states.append(args[0].detach()))
    ]
    for block in stack.blocks:
        assert isinstance(block, Block)
        handles.append(block.register_forward_hook(_keep(stream.states)))
        for name, attribute in PARTS.items():
            residual = getattr(block, attribute, None)
            if isinstance(residual, Residual):  # its dropout gives what is added to the stream
                kept = stream.added.setdefault(name, [])
                handles.append(residual.dropout.register_forward_hook(_keep(kept)))
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


def _keep(kept: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        kept.append(output.detach())

    return hook


@dataclass(frozen=True)
class Read:
    """A text as a decoder reads it: states at its own places, and what each place is to predict."""

    states: States
    added: dict[str, Added]
    given: list[int]
    expected: list[int | None]


def read(opened: TorchRun, text: str, target: str | None, room: Room) -> Read:
    """A text through a decoder, once; an encoder–decoder writes `target`, or its own."""
    model: Any = opened.model
    if "decoder" not in model.stacks():
        raise opened.unsupported("is seen through the lens", "a language model or a decoder")
    tokenizer = opened.tokenizer
    shown = Room(min(MOST_TOKENS, room.tokens), room.bytes)
    if isinstance(model, Gpt):
        given = tokenizer.encode(text)
        given = given or [Generator(model, tokenizer, opened.run.decode).special_tokens.start]
        expected = [*given[1:], None]
        shown.check(given, model, "the text")
        inputs: tuple[Tensor, ...] = (torch.tensor([given], device=opened.device),)
    else:
        translator = Translator(model, tokenizer, opened.run.decode)
        source = translator.special_tokens.source(tokenizer.encode(text))
        room.check(source, model, "the text")
        if target is None:
            found = translator.search([text], n_best=1)[0]
            written = found[0].tokens if found else []
        else:
            written = tokenizer.encode(target)
        given, expected = (
            [translator.special_tokens.start, *written],
            [*written, translator.special_tokens.end],
        )
        shown.check(given, model, "the target")
        inputs = tuple(torch.tensor([ids], device=opened.device) for ids in (source, given))
    with watched(model.decoder) as stream:
        model(*inputs)
    own = slice(-len(given), None)  # a joined source stands before the target
    states = torch.stack([state[0, own] for state in stream.states])
    added = {
        name: torch.stack([part[0, own] for part in parts]) for name, parts in stream.added.items()
    }
    return Read(states, added, given, expected)


def lens(model: Any, states: States) -> Iterator[Float[Tensor, "t v"]]:
    """log P_l of each layer, one layer at a time."""
    for state in states:
        normed = model.decoder.last_norm(state[None])
        yield model.logits(normed)[0].float().log_softmax(-1)


async def layers(request: Request) -> Response:
    """POST {run, text, target?}: the likeliest tokens after each layer at each position."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_layers, fields, state.library, state.limits)


def _layers(fields: Fields, library: Library, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    room = Room(limits.tokens, limits.trace_bytes)
    with library.model(run) as opened, torch.inference_mode():
        found = read(opened, text, target, room)
        return json_answer(told(opened, found))


def told(opened: TorchRun, found: Read) -> dict[str, Any]:
    """The table of the lens. Tokens are ids; `pieces` has what each is to people."""
    tokenizer = opened.tokenizer
    ids, chances, entropies, wanted = [], [], [], []
    for rows in lens(opened.model, found.states):
        best, which = rows.topk(min(TOP, rows.shape[-1]))
        ids.append(which.tolist())
        chances.append(best.exp().tolist())
        entropies.append((torch.special.entr(rows.exp()).sum(-1) / math.log(2)).tolist())
        wanted.append(
            [
                None if token is None else float(row[token].exp())
                for row, token in zip(rows, found.expected, strict=True)
            ]
        )
    known = sorted({one for layer in ids for place in layer for one in place})
    return {
        "layers": len(found.states) - 1,
        "given": tokenizer.subwords(found.given),
        "expected": [
            None if token is None else tokenizer.subwords([token])[0] for token in found.expected
        ],
        "pieces": dict(zip(map(str, known), tokenizer.subwords(known), strict=True)),
        "top": ids,
        "probabilities": chances,
        "entropy": entropies,
        "wanted": wanted,
        "norm": found.states.float().norm(dim=-1).tolist(),
        "added": {name: part.float().norm(dim=-1).tolist() for name, part in found.added.items()},
    }


ROUTES = [Route("/api/lens", layers, methods=["POST"])]
