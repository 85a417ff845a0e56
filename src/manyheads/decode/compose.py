"""Music generation: words of an encoding after a prime, or after the end of another piece."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from manyheads.data.events import Encoding
from manyheads.decode.generate import BaseGenerator
from manyheads.decode.sample import Sample
from manyheads.errors import UserError


def prompt_of(
    prime: Sequence[str], encoding: Encoding, generator: BaseGenerator, limit: int | None = None
) -> list[int]:
    """The prompt: the end token of another piece, then the prime.

    Only the end of a long prime is used: as much as leaves room for `limit` more tokens, but at
    least half of the context (exactly half without a limit).
    """
    ids = [generator.special_tokens.end]
    for word in prime:
        token = generator.tokenizer.token_id(word)
        if token is None:
            raise UserError(f"the prime has '{word}', which this model has no token for: remove it")
        ids.append(token)
    context = generator.positions or generator.context
    if context is None:
        return ids
    prompt = _last(ids, max(context // 2, context - (limit or context)), encoding.unit)
    if len(prompt) < len(ids):
        generator.warn(
            f"the prime has {len(prime):,} words and the context {context:,}: the model continues "
            f"the last {len(prompt):,}"
        )
    return prompt


def _last(ids: list[int], most: int, unit: int) -> list[int]:
    """The last tokens, at most `most`, from a multiple of `unit` on, as training windows start."""
    start = max(0, len(ids) - most)
    return ids[min(start + -start % unit, len(ids) - 1) :]


def compose(
    generator: BaseGenerator,
    encoding: Encoding,
    prime: Sequence[str],
    *,
    limit: int | None,
    sample: Sample | None,
) -> list[str]:
    """The words that follow the prime: sampled, or found by beam search if `sample` is None.

    The default limit is the rest of the context, or `min_length` if that is more. Longer music is
    generated in windows: when the context is full, its last half is the prompt of the next window.
    The first `encoding.least` words are an opening without rests: a model that may not end yet
    would otherwise generate the rests that precede an end.
    """
    ids = prompt_of(prime, encoding, generator, limit)
    context = generator.positions or generator.context
    min_length = generator.decode.min_length
    most = limit or max(1, min_length, (context or len(ids)) - len(ids) + 1)
    silent = [generator.tokenizer.token_id(word) for word in encoding.silent]
    opening = min(min_length, most, encoding.least) if silent else 0
    suppressed = (
        *generator.special_tokens.suppressed,
        *(token for token in silent if token is not None),
    )
    tokens: list[int] = []
    for window in count():
        is_opening = len(tokens) < opening
        prompt, left = ids + tokens, (opening if is_opening else most) - len(tokens)
        if context is not None:
            size = context if len(prompt) <= context else context // 2
            prompt = _last(prompt, size, encoding.unit)
            left = min(left, context - len(prompt) + 1)
        if is_opening:
            changes: dict[str, Any] = {
                "min_length": left,
                "at_limit": "truncate",
                "suppress_tokens": suppressed,
            }
        else:
            changes = {"min_length": max(0, min_length - len(tokens))}
            if len(tokens) + left < most:  # an end may be forced in the last window only
                changes["at_limit"] = "truncate"
        decode = replace(generator.decode, **changes)
        windowed: BaseGenerator = replace(cast(Any, generator), decode=decode)
        if sample is not None:
            new = list(windowed.stream(prompt, left, sample, window))
        else:
            hypotheses = windowed.search([prompt], left, n_best=1)[0]
            new = hypotheses[0].tokens if hypotheses else []
        tokens += new
        if len(new) < left or len(tokens) >= most:  # the piece has ended, or is long enough
            break
    return [word for token in tokens if (word := generator.tokenizer.content(token)) is not None]
