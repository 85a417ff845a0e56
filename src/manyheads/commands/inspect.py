"""Commands that describe a model, its activations or a tokenizer: info, capture, tokenize."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import Compute, print_json, say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.tokenizer.tokenizer import Tokenizer

_COST = "Cost of a training"
_LEARN = "Learn a vocabulary"
ACTIVATIONS = ("*.layer.input", "*.states", "*.weights")  # captured unless --only names others
_ONLY = "Names, e.g. '*.self.q' or '*' for all (repeatable) [default: residual stream and weights]"


def info(
    name: Annotated[str, argument("MODEL", "A preset, a run or a Hugging Face folder")],
    overrides: options.Overrides = None,
    steps: Annotated[int | None, option("Cost of a training of N steps", panel=_COST)] = None,
    batch_tokens: Annotated[
        int | None, option("Tokens in a step; as many of source and target", panel=_COST)
    ] = None,
    length: Annotated[
        int | None, option("Tokens of a text [default: model.max_length]", panel=_COST)
    ] = None,
    device_kind: Annotated[
        str,
        option(
            "p100, v100, a100, h100, h200, rtx4090, tpu-v2 or tpu-v3", metavar="NAME", panel=_COST
        ),
    ] = "h200",
    utilization: Annotated[
        float, option("Share of the device's peak", metavar="X", panel=_COST)
    ] = 0.4,
    as_json: options.Json = False,
) -> None:
    """Count parameters, FLOPs per token and memory of a model.

    Examples
      $ manyheads info runs/demo
      $ manyheads info gpt3-175b model.layers=24
      $ manyheads info transformer-base --steps 100000 --batch-tokens 25000

    Nothing is loaded: the model is built on the meta device. An unknown name lists
    the presets.
    """
    from rich.console import Console

    from manyheads.lab.training_cost import training_cost
    from manyheads.loading import read_model
    from manyheads.summary import summarize, table

    config = read_model(name, overrides or [])
    summary = summarize(config, length)
    cost = None
    if steps is not None or batch_tokens is not None:
        cost = training_cost(config, steps, batch_tokens, length, device_kind, utilization)
    if as_json:
        print_json(
            {"name": name, **summary.as_dict(), **({"cost": cost.as_dict()} if cost else {})}
        )
    else:
        Console().print(table(summary))
        if cost is not None:
            write(cost.text())


def capture(
    run: options.RunFolder,
    text: Annotated[list[str], argument("TEXT", "A text, or a file with one text a line")],
    out: Annotated[Path, options.out_option("Tensors by name, as safetensors", "FILE")],
    target: Annotated[
        str | None,
        option("Encoder–decoders: its target [default: the translation]", metavar="TEXT"),
    ] = None,
    only: Annotated[list[str] | None, option(_ONLY, metavar="NAME", panel="Output")] = None,
    threads: options.Threads = None,
) -> None:
    """Save the activations of a forward pass, by name, to a safetensors file.

    Examples
      $ manyheads capture runs/demo "The dog sleeps." --out acts.safetensors
      $ manyheads capture runs/lm texts.txt --only "*.self.q" -o acts.safetensors

    Names are those of the Flow page: STACK.layer.input is the residual stream before
    each layer, STACK.states the output of the stack, STACK.self.weights and
    decoder.cross.weights the attention. The first index is the layer, the second the
    head. Texts of a file have their line number before the name: 1/encoder.states.
    """
    from manyheads.data.files import stream_lines
    from manyheads.loading import load_run

    if find_spec("starlette") is None:
        raise UserError("capture needs starlette: pip install 'manyheads[web]'")
    from manyheads.web.flow import save_activations

    Compute("cpu", threads).choose()
    loaded, joined = load_run(run), " ".join(text)
    is_file = False
    with suppress(OSError):  # a long text is no name of a file
        is_file = len(text) == 1 and Path(joined).is_file()
    texts = [*stream_lines(Path(joined))] if is_file else [joined]
    patterns = only or ACTIVATIONS
    tensors = save_activations(loaded, texts, target, patterns, out, numbered=is_file)
    for name, tensor in tensors.items():
        write(f"{name}  {' × '.join(map(str, tensor.shape))}\n")


def tokenize(
    words: Annotated[
        list[str], argument("RUN TEXT", "A run folder or a tokenizer.json, and a text")
    ],
    learn: Annotated[
        list[Path] | None,
        option(
            "Learn a vocabulary from this file (repeatable); no RUN", metavar="FILE", panel=_LEARN
        ),
    ] = None,
    kind: Annotated[
        str, option("bpe, wordpiece, bigrams, characters or words", metavar="NAME", panel=_LEARN)
    ] = "bpe",
    size: Annotated[int, option("Most tokens of the vocabulary", panel=_LEARN)] = 8000,
    out: Annotated[
        Path | None, options.out_option("Save the learned vocabulary as a tokenizer.json")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show how a text is split into tokens, merge by merge.

    Examples
      $ manyheads tokenize runs/demo unbelievable
      $ manyheads tokenize --learn corpus.txt --kind words --size 4000 unbelievable
      $ manyheads tokenize --learn a.en --learn a.de -o tokenizer.json unbelievable
    """
    from manyheads.run import read_tokenizer
    from manyheads.tokenizer.tokenizer import Tokenizer
    from manyheads.tokenizer.trace import Step

    if learn:
        tokenizer, joined = _learned(learn, kind, size), " ".join(words)
        if out is not None:
            tokenizer.save(out)
        say(f"{tokenizer.kind}, {tokenizer.vocab_size} tokens" + (f": {out}" if out else ""))
    elif len(words) < 2 or out is not None:
        raise UserError(
            "tokenize needs RUN and TEXT, or --learn FILE: see manyheads tokenize --help"
        )
    else:
        run, joined = Path(words[0]), " ".join(words[1:])
        if not run.exists():
            raise UserError(f"no folder or file {run}: check the path")
        tokenizer = read_tokenizer(run) if run.is_dir() else Tokenizer.load(run)
    ids = tokenizer.encode(joined)
    try:
        steps = tokenizer.trace(joined)
    except UserError as reason:  # an imported tokenizer: its result can be shown
        say(f"{reason}; the tokens are:")
        steps = [Step(subwords=tuple(tokenizer.subwords(ids)))]
    if as_json:
        states = [{"pieces": s.subwords, "merged": s.merged, "rank": s.rank} for s in steps]
        print_json({"text": joined, "ids": ids, "pieces": tokenizer.subwords(ids), "steps": states})
        return
    for step in steps:
        merge = f"{step.merged}" + ("" if step.rank is None else f"  (merge {step.rank + 1})")
        write("  " + "|".join(step.subwords) + (f"    ← {merge}" if step.merged else "") + "\n")
    write(f"{len(ids)} tokens: {' '.join(map(str, ids))}\n")


def _learned(files: list[Path], kind: str, size: int) -> "Tokenizer":
    """A vocabulary of all lines of some files."""
    from manyheads.config import parse
    from manyheads.data.files import stream_lines
    from manyheads.tokenizer.train import Tokens

    tokens = parse(Tokens, {"kind": kind, "vocab_size": size}, "--kind")
    return tokens.train(line for file in files for line in stream_lines(file))
