"""Endpoint of the Lens page: the next-token prediction of a decoder after each layer.

    P_l = softmax(W · norm(h_l)),  h_0 the embedding, h_l the residual stream after layer l

The logit lens (nostalgebraist 2020): apply the last norm and the output matrix to the state after
every layer. The last row is the output of the model.
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
from manyheads.loading import LoadedRun
from manyheads.models.gpt import Gpt
from manyheads.nn.block import Block, Stack
from manyheads.nn.layers import Residual
from manyheads.web.forward import SizeLimit
from manyheads.web.guard import Limits
from manyheads.web.library import Library
from manyheads.web.responses import Fields, json_answer

TOP = 10  # tokens returned for a cell
MOST_TOKENS = 128  # a cell returns TOP tokens, so responses are large
# The residual connections of a block.
PARTS = {
    "attention": "attention_residual",
    "cross": "cross_residual",
    "feedforward": "feedforward_residual",
}

States = Float[Tensor, "layers t d"]
Added = Float[Tensor, "blocks t d"]


@dataclass
class Stream:
    """The residual stream: before the first layer, after each layer, and the term each part adds.

    With post-norm, a state is the output of the norm, and an added term is an input of its sum.
    """

    states: list[Tensor] = field(default_factory=list)
    added: dict[str, list[Tensor]] = field(default_factory=dict)


@contextmanager
def capture_stream(stack: Stack) -> Iterator[Stream]:
    """Record the residual stream of the forward passes inside the context."""
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
            if isinstance(residual, Residual):  # the output of its dropout is added to the stream
                outputs = stream.added.setdefault(name, [])
                handles.append(residual.dropout.register_forward_hook(_keep(outputs)))
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append(output.detach())

    return hook


@dataclass(frozen=True)
class DecoderStates:
    """The states of a decoder at each input token, and the token that each position predicts."""

    states: States
    added: dict[str, Added]
    decoder_ids: list[int]
    expected: list[int | None]


def decoder_states(
    opened: LoadedRun, text: str, target: str | None, limit: SizeLimit
) -> DecoderStates:
    """Run a text through a decoder; an encoder–decoder scores `target`, or its own translation."""
    model: Any = opened.model
    if "decoder" not in model.stacks():
        raise opened.unsupported("has a Lens page", "a model with a decoder")
    tokenizer = opened.tokenizer
    decoder_limit = SizeLimit(min(MOST_TOKENS, limit.tokens), limit.bytes)
    if isinstance(model, Gpt):
        decoder_ids = tokenizer.encode(text)
        decoder_ids = decoder_ids or [
            Generator(model, tokenizer, opened.run.decode).special_tokens.start
        ]
        expected = [*decoder_ids[1:], None]
        decoder_limit.check(decoder_ids, model, "the text")
        inputs: tuple[Tensor, ...] = (torch.tensor([decoder_ids], device=opened.device),)
    else:
        translator = Translator(model, tokenizer, opened.run.decode)
        source = translator.special_tokens.source(tokenizer.encode(text))
        limit.check(source, model, "the text")
        if target is None:
            hypotheses = translator.search([text], n_best=1)[0]
            target_ids = hypotheses[0].tokens if hypotheses else []
        else:
            target_ids = tokenizer.target.encode(target)
        decoder_ids, expected = (
            [translator.special_tokens.start, *target_ids],
            [*target_ids, translator.special_tokens.end],
        )
        decoder_limit.check(decoder_ids, model, "the target")
        inputs = tuple(torch.tensor([ids], device=opened.device) for ids in (source, decoder_ids))
    with capture_stream(model.decoder) as stream:
        model(*inputs)
    last_positions = slice(-len(decoder_ids), None)  # skip the source of a decoder-only translator
    states = torch.stack([state[0, last_positions] for state in stream.states])
    added = {
        name: torch.stack([part[0, last_positions] for part in parts])
        for name, parts in stream.added.items()
    }
    return DecoderStates(states, added, decoder_ids, expected)


def lens(model: Any, states: States) -> Iterator[Float[Tensor, "t v"]]:
    """log P_l, layer by layer."""
    for state in states:
        normed = model.decoder.last_norm(state[None])
        yield model.logits(normed)[0].float().log_softmax(-1)


async def layers(request: Request) -> Response:
    """POST {run, text, target?}: the most probable tokens after each layer at each position."""
    fields = await Fields.of_body(request)
    state = request.app.state
    return await run_in_threadpool(_layers, fields, state.library, state.limits)


def _layers(fields: Fields, library: Library, limits: Limits) -> Response:
    run, text, target = fields.text("run"), fields.text("text", ""), fields.optional_text("target")
    limit = SizeLimit(limits.tokens, limits.trace_bytes)
    with library.model(run) as opened, torch.inference_mode():
        states = decoder_states(opened, text, target, limit)
        return json_answer(lens_table(opened, states))


def lens_table(opened: LoadedRun, states: DecoderStates) -> dict[str, Any]:
    """The table of the lens. Tokens are ids; `pieces` maps them to subwords."""
    tokenizer = opened.tokenizer.target
    ids, probabilities, entropies, expected_probabilities = [], [], [], []
    for rows in lens(opened.model, states.states):
        best, which = rows.topk(min(TOP, rows.shape[-1]))
        ids.append(which.tolist())
        probabilities.append(best.exp().tolist())
        entropies.append((torch.special.entr(rows.exp()).sum(-1) / math.log(2)).tolist())
        expected_probabilities.append(
            [
                None if token is None else float(row[token].exp())
                for row, token in zip(rows, states.expected, strict=True)
            ]
        )
    known = sorted({token for layer in ids for position in layer for token in position})
    return {
        "layers": len(states.states) - 1,
        "inputs": tokenizer.subwords(states.decoder_ids),
        "expected": [
            None if token is None else tokenizer.subwords([token])[0] for token in states.expected
        ],
        "pieces": dict(zip(map(str, known), tokenizer.subwords(known), strict=True)),
        "top": ids,
        "probabilities": probabilities,
        "entropy": entropies,
        "wanted": expected_probabilities,
        "norm": states.states.float().norm(dim=-1).tolist(),
        "added": {name: part.float().norm(dim=-1).tolist() for name, part in states.added.items()},
    }


ROUTES = [Route("/api/lens", layers, methods=["POST"])]
