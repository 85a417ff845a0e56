"""The command that scores a run: evaluate."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import (
    Decoding,
    check_image,
    is_main_process,
    print_json,
    refuse_torchrun,
    say,
    write,
)
from manyheads.errors import DataError, UserError

if TYPE_CHECKING:
    from manyheads.run import Run

TOKENIZERS = ("auto", "13a", "zh", "ja-mecab", "ko-mecab", "char")

_METRIC = "Metric of translations: bleu, chrf, chrf++, ter (repeatable) [default: bleu, chrf]"
_CONFIDENCE = "Bootstrap 95 % intervals of the metrics"
_AGAINST = "Baseline of a paired bootstrap test (p of each difference)"
_STRIDE = "Language models: tokens that the window moves [default: its length; music: ½]"
_TOKENIZE = f"Tokenizer of BLEU: {', '.join(TOKENIZERS)}; auto: by target language, or script"


def evaluate(
    run: options.RunFolder,
    overrides: Annotated[
        list[str] | None, argument("KEY=VALUE", "Settings of data.* and decode.*")
    ] = None,
    split: options.Split = "test",
    source: Annotated[
        Path | None,
        option(
            "Lines to translate, in place of a split (- for stdin)", metavar="FILE", panel="Data"
        ),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        option("Their references (repeatable)", metavar="FILE", panel="Data"),
    ] = None,
    beam: options.Beam = None,
    others: options.Ensemble = None,
    stride: Annotated[int | None, option(_STRIDE, panel="Scores")] = None,
    tokenize: Annotated[
        str, option(_TOKENIZE, "--bleu-tokenize", "--tokenize", metavar="NAME", panel="Scores")
    ] = "auto",
    metric: Annotated[list[str] | None, option(_METRIC, metavar="NAME", panel="Scores")] = None,
    confidence: Annotated[bool, option(_CONFIDENCE, "--confidence", panel="Scores")] = False,
    by_class: Annotated[
        bool, option("Precision, recall, F1 of each class", "--by-class", panel="Scores")
    ] = False,
    against: Annotated[Path | None, option(_AGAINST, metavar="RUN", panel="Scores")] = None,
    decoding: Decoding = Decoding(),
    as_json: options.Json = False,
    plot: Annotated[
        Path | None, options.plot_option("Image models: save a confusion matrix (.png, .svg, .pdf)")
    ] = None,
) -> None:
    """Score a run on one split of its data, each score with its signature.

    Examples
      $ manyheads evaluate runs/demo --split compositional
      $ manyheads evaluate runs/demo --beam 8 --json
      $ manyheads evaluate runs/lm --stride 32
      $ manyheads evaluate runs/mine data.folder=newstest
      $ manyheads evaluate runs/mine --source in.en --reference out.de
      $ manyheads evaluate runs/reviews data.test=new.csv --by-class
      $ manyheads evaluate runs/mine --against runs/old --metric ter

    The scores of the run itself are saved as scores.json. Scores of other data,
    another search, precision or BLEU tokenizer, and of ensembles, are only printed.
    """
    from manyheads.config import override_all
    from manyheads.run import SETTINGS, SHORTLIST, save_scores
    from manyheads.view.figures import confusion

    settings = [*(overrides or []), *([] if beam is None else [f"decode.beam={beam}"])]
    for setting in settings:
        if not setting.startswith(("data", "decode.")):
            raise UserError(f"'{setting}' cannot change after training: only data and decode can")
    if tokenize not in TOKENIZERS:
        raise UserError(f"--bleu-tokenize {tokenize} must be one of {', '.join(TOKENIZERS)}")
    check_image("--plot", plot)
    loaded = decoding.open(run, say, others or ())
    trained, is_int8 = loaded.run, decoding.dtype == "int8"
    if "translate" not in trained.spec.offers:
        refuse_torchrun(f"evaluate of task={trained.task}")
    options: dict[str, Any] = {
        "stride": stride,
        "bleu_tokenize": None if tokenize == "auto" else tokenize,
        "metric": metric or None,
        "confidence": confidence or None,
        "by_class": by_class or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    used = {"against": against, "beam": beam, "plot": plot, "int8": is_int8 or None}
    trained.spec.check_scoring([*options, *(n for n, x in used.items() if x is not None)])
    changed = _with_overrides(trained, settings)
    test_set: Any = changed.data
    if source is not None or reference:
        test_set = _test_files(trained, source, reference or [], split)
    if test_set is None:
        raise UserError(f"{run} came without data: add data.folder=... or other data.*")
    variant = {} if decoding.dtype == "float32" else {"computed_in": decoding.dtype}
    variant |= {"written_with": " ".join(map(str, others))} if others else {}
    if (decoding.engine == "ctranslate2" or is_int8) and (run / SHORTLIST).is_file():
        variant["restricted_to"] = SHORTLIST
    variant |= _changes("decoded_with", "decode", trained.decode, changed.decode)
    if test_set is not changed.data:
        variant |= {"evaluated_on": " ".join([test_set.source, *test_set.references])}
    elif trained.data is not None:
        variant |= _changes("evaluated_on", "data", trained.data, changed.data)
    # Another program's folder is left unchanged.
    saves = (
        is_main_process()
        and not variant
        and not options.keys() - {"stride"}
        and (run / SETTINGS).is_file()
    )
    if against is not None:
        other = decoding.open(against, say)
        changed_decode = override_all(other.run, [f"decode.beam={changed.decode.beam}"])
        options["against"] = dataclasses.replace(other, run=changed_decode)
    scores = dataclasses.replace(loaded, run=changed).evaluate(test_set, split, **options)
    if note := scores.pop("note", None):
        say(note)
    _show_scores(scores | variant, as_json)
    if "loss" not in scores and changed.task == "translation":
        reason = "an ensemble" if others else "an exported model"
        say(f"loss and perplexity are not computed with {'int8' if is_int8 else reason}")
    if saves:
        try:
            save_scores(run, scores)
        except DataError as error:
            say(f"the scores are only printed: {error}")
    if plot is not None:
        matrix = scores["confusion"]
        confusion(matrix["counts"], matrix["classes"], f"{run}, {split}", plot)
        say(f"plot: {plot}")


def _test_files(run: "Run", source: Path | None, references: list[Path], split: str) -> Any:
    from manyheads.data.files import STDIN
    from manyheads.data.translation import TestFiles

    if "translate" not in run.spec.offers:
        raise UserError("--source works only with translators: set data.test=FILE instead")
    if source is None or not references:
        raise UserError("--source and --reference go together: give both")
    if [source, *references].count(STDIN) > 1:
        raise UserError("standard input (-) can be read only once: name a file")
    if split != "test":
        raise UserError(f"--source is a test set itself: leave out --split {split}")
    return TestFiles(
        source=str(source), target=str(references[0]), references=tuple(map(str, references))
    )


def _with_overrides(run: "Run", overrides: Sequence[str]) -> "Run":
    """The run on other data or with another search."""
    from manyheads.config import change, override_all
    from manyheads.data.corpus import read_index
    from manyheads.data.files import is_here
    from manyheads.data.language import TextData

    if not overrides:
        return run
    if run.data is None:
        run = dataclasses.replace(run, data=run.spec.data_for(run.model))
    names = {setting.partition("=")[0] for setting in overrides}
    for name, other in (("data.folder", "data.file"), ("data.file", "data.folder")):
        if isinstance(run.data, TextData) and name in names and other not in names:
            # Another text; the run's file is not looked for in the new folder.
            run = override_all(run, [f"{other}="])
    values = dict(setting.split("=", 1) for setting in overrides if "=" in setting)
    folder, test = getattr(run.data, "folder", ""), Path(values.get("data.test", ""))
    is_inside = not test.is_absolute() and is_here(folder / test)
    if folder and test.name and not is_inside and "data.folder" not in names:
        run = override_all(run, ["data.folder="])  # a test set elsewhere, without the training data
    if index := read_index(values.get("data.folder", "")):
        run = change(dataclasses.replace(run, data=None), {"data": index.data})
    return override_all(run, overrides)


def _changes(key: str, section: str, old: object, new: object) -> dict[str, str]:
    if type(old) is not type(new):
        return {key: f"{section}={getattr(new, 'kind', '')}"}
    names = [name for name, value in vars(new).items() if getattr(old, name) != value]
    text = " ".join(f"{section}.{name}={getattr(new, name)}" for name in names)
    return {key: text} if text else {}


def _show_scores(scores: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(scores)
        return
    rows = [(name, _text(x)) for name, x in scores.items() if isinstance(x, float | str | int)]
    for name, pair in scores.get("paired", {}).items():
        difference = scores[name] - pair["against"]
        rows.append(
            (f"{name} against", f"{pair['against']:.4f}  {difference:+.4f}, p {pair['p']:.4f}")
        )
    for label, values in scores.get("classes", {}).items():
        rows.append((label, "  ".join(f"{name} {_text(x)}" for name, x in values.items())))
    for layer, rates in enumerate(scores.get("alignment_error_by_head", []), start=1):
        rows.append((f"AER by head, layer {layer}", "  ".join(f"{rate:.3f}" for rate in rates)))
    rows += [(f"{name} signature", text) for name, text in scores["signature"].items()]
    width = max(len(name) for name, _ in rows)
    write("".join(f"{name:>{width}}  {value}\n" for name, value in rows))


def _text(value: float | str | int) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
