"""The command that continues texts: generate."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import (
    dtype_of,
    input_lines,
    open_model,
    say,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import LoadedRun

TEMPERATURE = 0.8
NEW_TOKENS = 200

_MAX_NEW = f"Most tokens to add [default: {NEW_TOKENS}; music: the context]"
_MIN_NEW = "Fewest tokens before an end [default: 0; music: 64]"
MaxNewTokens = Annotated[int | None, option(_MAX_NEW, panel="Length")]
MinNewTokens = Annotated[int | None, option(_MIN_NEW, panel="Length")]
SearchBeam = Annotated[int | None, option("Beam search of width N, no sampling", panel="Search")]


def generate(
    run: options.RunFolder,
    words: Annotated[
        list[str] | None, argument("[FILE]", "Prompts, one a line, in place of standard input")
    ] = None,
    prompt: Annotated[
        str | None, option("Continue this; no input is read", "--prompt", "-p", metavar="TEXT")
    ] = None,
    stop: Annotated[
        list[str] | None,
        option("End before this text (repeatable)", metavar="TEXT", panel="Length"),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: MinNewTokens = None,
    temperature: options.Temperature = TEMPERATURE,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.SampleSeed = 1,
    beam: SearchBeam = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", hidden=True)] = None,
    prime: Annotated[Path | None, typer.Option(hidden=True)] = None,
    plot: Annotated[Path | None, typer.Option("--plot", "--picture", hidden=True)] = None,
    engine: options.Engine = "auto",
    dtype: options.Dtype = "float32",
    half: options.Half = False,
    int8: options.Int8 = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Continue texts with a language model.

    Examples
      $ manyheads generate runs/lm --prompt "Once upon a time"
      $ manyheads generate runs/lm prompts.txt --temperature 0
      $ manyheads generate runs/lm -p "ROMEO:" --top-p 0.9 --max-new-tokens 400

    Without --prompt and FILE, each line of standard input is continued. Tokens are
    printed during sampling; --temperature 0 takes the likeliest ones, as generate()
    does in Python by default. For music see manyheads compose.
    """
    from manyheads.commands.compose import Music, compose_run
    from manyheads.data.music import MusicData
    from manyheads.decode.sample import Sample

    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    lengths = (min_new_tokens, max_new_tokens)
    check_options(lengths, sample, beam)
    if stop and "" in stop:
        raise UserError("--stop is empty: name the text to end before, or leave it out")
    dtype = dtype_of(dtype, half=half, int8=int8)
    reason = "beam search for language models here" if beam else ""
    reason = reason or ("sampling with a seed" if temperature > 0 else "")
    loaded = open_model(run, device, threads, say, engine=engine, dtype=dtype, only_torch=reason)
    if isinstance(loaded.run.data, MusicData):
        if prompt is not None or stop:
            raise UserError("--prompt and --stop work with text; this run is music: use --prime")
        music = Music(out=out, prime=prime, plot=plot)
        compose_run(loaded, words or [], music, lengths, sample, beam)
        return
    if out or prime or plot:
        raise UserError("--out, --prime and --plot work only with music runs: leave them out")
    file = _prompt_file(words or [], loaded)
    generator, sampling = make_generator(
        loaded, decoding_options(beam, min_new_tokens), sample, beam
    )
    limit = max_new_tokens or max(NEW_TOKENS, min_new_tokens or 0)
    _continue_texts(generator, prompt, file, limit, sampling, stop or [])


def check_options(
    lengths: tuple[int | None, int | None], sample: "Sample", beam: int | None
) -> None:
    """Refuse lengths that cannot be met, and sampling next to beam search."""
    fewest, most = lengths
    check_at_least("--min-new-tokens", fewest, 0)
    check_at_least("--max-new-tokens", most, max(1, fewest or 1))
    if beam is not None and sample != type(sample)(temperature=TEMPERATURE):
        raise UserError("options of sampling do not work with beam search: leave out --beam")


def _prompt_file(words: list[str], loaded: "LoadedRun") -> Path | None:
    for word in words:
        if not Path(word).is_file():
            if word.startswith("data."):
                raise UserError(f"{word} works only with music, not {loaded.folder}: leave it out")
            raise UserError(f"{word} is not a file: name one with prompts, or use --prompt TEXT")
    if len(words) > 1:
        raise UserError(f"one FILE at a time: leave out {words[1]}")
    return Path(words[0]) if words else None


def decoding_options(beam: int | None, fewest: int | None) -> dict[str, Any]:
    """Settings of `decode` that the options change."""
    options: dict[str, Any] = {} if beam is None else {"beam": beam}
    if fewest is not None:
        # An end that is forced at the limit would leave one token fewer.
        options |= {"min_length": fewest, "at_limit": "truncate"}
    return options


def make_generator(
    loaded: "LoadedRun",
    options: dict[str, Any],
    sample: "Sample",
    beam: int | None,
) -> "tuple[BaseGenerator, Sample | None]":
    """A generator, and how it samples; None if it searches."""
    generator = loaded.generator(cache(say), **options)  # each warning once
    if not generator.supports_seed and sample == type(sample)(temperature=TEMPERATURE):
        sample = replace(sample, temperature=0.0)
        if beam is None:
            say("CTranslate2 cannot sample by a seed: the most probable token is taken")
    return generator, sample if beam is None else None


def _continue_texts(
    generator: "BaseGenerator",
    prompt: str | None,
    file: Path | None,
    limit: int,
    sample: "Sample | None",
    stops: list[str],
) -> None:
    """Continue the prompt, or each line of the input."""
    from manyheads.data.files import decode_lines
    from manyheads.decode.generate import as_text

    def continue_text(number: int, text: str) -> None:
        ids = [*generator.tokenizer.frame()[0], *generator.tokenizer.encode(text)]
        if sample is None:
            best = generator.search([ids], limit, n_best=1)[0]
            tokens = iter(best[0].tokens if best else [])
        else:
            tokens = generator.stream(ids, limit, sample, number)
        write(text)
        for part in as_text(generator.tokenizer, ids, tokens, stops):
            write(part)
        write("\n")

    if prompt is not None:
        continue_text(0, prompt)
        return
    with input_lines(file) as lines:
        for number, text in enumerate(decode_lines(lines)):
            continue_text(number, text)
