"""A stream of lines through a translator: as many lines out as came in, in order."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from manyheads.decode.sample import Sample
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError

LINES_AT_ONCE = 512
BYTE_ORDER_MARK = "\ufeff"
BREAKS = str.maketrans("\r\n", "  ")  # a translation that holds one is still one line


def read_lines(stream: Iterable[bytes]) -> Iterator[str]:
    """Lines of a UTF-8 stream, as they come."""
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of the input is not UTF-8 (byte {error.start + 1}): convert it"
            ) from None
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        yield line.removesuffix("\n").removesuffix("\r")


def pieces(translator: BaseTranslator, line: str) -> list[str]:
    """A line in parts that fit the model: cut after sentences, else words, else anywhere."""
    longest = translator.max_length - len(translator.special_tokens.source([]))
    fits: Callable[[str], bool] = lambda text: len(translator.tokenizer.encode(text)) <= longest  # noqa: E731
    if fits(line):
        return [line]
    for pattern in (r"(?<=[.!?;])\s+", r"\s+", r"(?=.)"):
        units = [unit for unit in re.split(pattern, line) if unit]
        if len(units) > 1:
            break
    joint = "" if pattern == r"(?=.)" else " "
    parts: list[str] = []
    for unit in units:
        for part in pieces(translator, unit) if len(unit) < len(line) else [unit]:
            if parts and fits(parts[-1] + joint + part):
                parts[-1] += joint + part
            else:
                parts.append(part)
    return parts


def translate_whole(
    translator: BaseTranslator,
    sentences: Sequence[str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The best translation of each sentence; a too long one is put together from its pieces."""
    parts = [pieces(translator, sentence) for sentence in sentences]
    found = translator.search([part for whole in parts for part in whole], advance, n_best=1)
    best = iter(translator.tokenizer.decode_batch([h[0].tokens if h else [] for h in found]))
    return [" ".join(next(best) for _ in whole) for whole in parts]


def translate_lines(
    translator: BaseTranslator,
    stream: Iterable[bytes],
    n_best: int = 1,
    sample: Sample | None = None,
    warn: Callable[[str], None] = lambda line: None,
    at_once: int | None = None,
) -> Iterator[str]:
    """Translations of a stream. An empty line stays empty, a too long one goes in pieces."""
    lines = read_lines(stream)
    before = drawn = 0
    while chunk := list(islice(lines, at_once or LINES_AT_ONCE)):
        parts = [pieces(translator, line) if line.strip() else [] for line in chunk]
        for number, found in enumerate(parts, start=before + 1):
            if len(found) > 1:
                warn(
                    f"line {number} is longer than the model's "
                    f"{translator.max_length} tokens: translated in "
                    f"{len(found)} pieces"
                )
        flat = [part for found in parts for part in found]
        if n_best > 1:
            yield from _n_best(translator, parts, flat, n_best, before)
        else:
            written = iter(
                translator.sample(flat, sample, drawn) if sample else translator.translate(flat)
            )
            for found in parts:
                yield " ".join(next(written).translate(BREAKS) for _ in found)
        before += len(chunk)
        drawn += len(flat)


def _n_best(
    translator: BaseTranslator, parts: list[list[str]], flat: list[str], n_best: int, before: int
) -> Iterator[str]:
    """`number ||| text ||| score` lines; a line in pieces has the n-th best of each piece."""
    found = iter(translator.search(flat, n_best=n_best))
    for number, line in enumerate(parts, start=before):
        hypotheses = [next(found) for _ in line]
        for rank in range(n_best if hypotheses else 1):
            chosen = [h[min(rank, len(h) - 1)] for h in hypotheses if h]
            text = " ".join(translator.tokenizer.decode(h.tokens) for h in chosen)
            text = text.translate(BREAKS)
            score = sum(h.score for h in chosen)
            yield f"{number} ||| {text} ||| {score:.4f}"
