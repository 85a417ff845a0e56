"""Writing music: words of an encoding after those of a prime, or after the end of another piece."""

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
    """What the model reads first: the end of another piece, then the prime.

    Of a long prime it is the last words alone, from a place on where training began stretches
    too: as many as leave room to write `limit` more, but at least half of what the model reads at
    once (which it is without a limit).
    """
    tokenizer = generator.tokenizer
    known = [(word, tokenizer.token_id(word)) for word in prime]
    strange = next((word for word, number in known if number is None), None)
    if strange is not None:
        raise UserError(
            f"the prime has '{strange}', which this model has no token for: leave it out"
        )
    ids = [generator.special_tokens.end, *(number for _, number in known if number is not None)]
    room = generator.positions or generator.context
    if room is None:
        return ids
    read = _last(ids, max(room // 2, room - (limit or room)), encoding.unit)
    if len(read) < len(ids):
        generator.warn(
            f"the prime has {len(prime):,} words and the model reads {room:,}: it goes on after "
            f"the last {len(read):,}"
        )
    return read


def _last(ids: list[int], most: int, unit: int) -> list[int]:
    """The last of them, `most` at most, from a place on where training began stretches too."""
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
    """The words that follow the prime, drawn, or searched for where there is no `sample`.

    Unless told, as many as the model reads at once beside what it read first, or as it has to
    write before an end. What is longer is written in stretches: where the model has read as much
    as in training, it reads the last half of that anew, and goes on. The `least` words of the
    encoding are an opening in which no voice rests: else a model that may not end yet would write
    the rests that it ends with.
    """
    ids = prompt_of(prime, encoding, generator, limit)
    room = generator.positions or generator.context
    shortest = generator.decode.min_length
    most = limit or max(1, shortest, (room or len(ids)) - len(ids) + 1)
    silent = [generator.tokenizer.token_id(word) for word in encoding.silent]
    opening = min(shortest, most, encoding.least) if silent else 0
    banned = (
        *generator.special_tokens.banned,
        *(number for number in silent if number is not None),
    )
    tokens: list[int] = []
    for part in count():
        opens = len(tokens) < opening
        read, left = ids + tokens, (opening if opens else most) - len(tokens)
        if room is not None:
            read = _last(read, room if len(read) <= room else room // 2, encoding.unit)
            left = min(left, room - len(read) + 1)
        if opens:
            writer = _with(generator, min_length=left, at_limit="truncate", suppress_tokens=banned)
        else:
            last = len(tokens) + left == most
            at_limit = generator.decode.at_limit if last else "truncate"
            least = max(0, shortest - len(tokens))
            writer = _with(generator, min_length=least, at_limit=at_limit)
        found = _written(writer, read, left, sample, part)
        tokens += found
        if len(found) < left or len(tokens) >= most:  # the piece has ended, or it is long enough
            break
    return [word for token in tokens if (word := generator.tokenizer.content(token)) is not None]


def _with(generator: BaseGenerator, **changes: Any) -> BaseGenerator:
    """The same with some settings of `decode` changed."""
    changed: BaseGenerator = replace(
        cast(Any, generator), decode=replace(generator.decode, **changes)
    )
    return changed


def _written(
    generator: BaseGenerator, ids: list[int], limit: int, sample: Sample | None, part: int
) -> list[int]:
    """What follows these tokens; each part of a piece has draws of its own."""
    if sample is not None:
        return list(generator.stream(ids, limit, sample, part))
    found = generator.search([ids], limit, n_best=1)[0]
    return found[0].tokens if found else []
