"""Writing music: words of an encoding after those of a prime, or after the end of another piece."""

from collections.abc import Sequence

from manyheads.data.events import Encoding
from manyheads.decode.generate import AnyGenerator
from manyheads.decode.sample import Sample
from manyheads.errors import Mistake


def prompt_of(
    prime: Sequence[str], encoding: Encoding, generator: AnyGenerator, limit: int | None = None
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
        raise Mistake(f"the prime has '{strange}', which this model has no token for: leave it out")
    ids = [generator.marks.end, *(number for _, number in known if number is not None)]
    room = generator.positions or generator.context
    if room is None:
        return ids
    most = max(room // 2, room - (limit or room))
    if len(ids) <= most:
        return ids
    kept = (most - 1) // encoding.unit * encoding.unit
    generator.warn(
        f"the prime has {len(prime):,} words and the model reads {room:,}: it goes on after the "
        f"last {kept:,}"
    )
    return ids[-kept - 1 :]


def compose(
    generator: AnyGenerator,
    encoding: Encoding,
    prime: Sequence[str],
    *,
    limit: int | None,
    sample: Sample | None,
) -> list[str]:
    """The words that follow the prime, drawn, or searched for where there is no `sample`.

    Unless told, as many as the model reads at once beside what it read first.
    """
    ids = prompt_of(prime, encoding, generator, limit)
    room = generator.positions or generator.context
    most = limit or max(1, (room or len(ids)) - len(ids) + 1)
    if sample is None:
        found = generator.search([ids], most, n_best=1)[0]
        tokens = found[0].tokens if found else []
    else:
        tokens = list(generator.stream(ids, most, sample))
    return [word for token in tokens if (word := generator.tokenizer.content(token)) is not None]
