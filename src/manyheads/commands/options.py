"""Options and arguments with the same meaning in every command that has them."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(help: str, *names: str, metavar: str = "N", panel: str = "Options", **more: Any) -> Any:
    """An option; `panel` is its heading in --help."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


def out_option(help: str, metavar: str = "FILE") -> Any:
    """The result of a command."""
    return option(help, "--out", "-o", metavar=metavar, panel="Output")


def plot_option(help: str) -> Any:
    """A plot in addition to the result."""
    return option(help, "--plot", metavar="FILE", panel="Output")


_RUN = "A run folder, a Hugging Face or an exported folder"
_SETTINGS = "Settings, e.g. model.dim=256 (manyheads settings)"
_LINES = "Lines to read in place of standard input"
RunFolder = Annotated[Path, argument("RUN", _RUN)]
Overrides = Annotated[list[str] | None, argument("KEY=VALUE", _SETTINGS)]
InputFile = Annotated[Path | None, argument("FILE", _LINES)]
InputAndDecode = Annotated[
    list[str] | None, argument("[FILE] [KEY=VALUE]...", f"{_LINES}; settings of decode.*")
]

Out = Annotated[Path, out_option("Run folder", "FOLDER")]
Json = Annotated[bool, option("Print one JSON object", "--json", panel="Output")]
JsonLines = Annotated[bool, option("Print one JSON object a line", "--json", panel="Output")]
Seed = Annotated[int | None, option("Random seed, the same as seed=N [default: the recipe's]")]

_PLUGIN = "Python file with parts of your own (repeatable)"
Plugins = Annotated[list[Path] | None, option(_PLUGIN, "--plugin", metavar="FILE")]

_SPLIT = "train, valid, test or the name of a test set"
_BEAM = "Beam width; 1 is greedy search [default: the run's decode.beam]"
_ENSEMBLE = "Average the probabilities with this run (repeatable)"
Split = Annotated[str, option(_SPLIT, metavar="NAME", panel="Data")]
Beam = Annotated[int | None, option(_BEAM, panel="Search")]
Ensemble = Annotated[
    list[Path] | None, option(_ENSEMBLE, "--ensemble", metavar="RUN", panel="Search")
]

_ENGINE = "auto, torch or ctranslate2; auto: CTranslate2 on a CPU if it gives the same"
_DTYPE = "Weights in float32, bfloat16 (for a GPU) or int8 (CTranslate2)"
Device = Annotated[str, option("auto, cpu, cuda, cuda:N or mps", metavar="NAME", panel="Speed")]
Threads = Annotated[int | None, option("CPU threads [default: all cores]", panel="Speed")]
Dtype = Annotated[str, option(_DTYPE, metavar="NAME", panel="Speed")]
Engine = Annotated[str, option(_ENGINE, metavar="NAME", panel="Speed")]

_TOP_P = "Nucleus sampling: the most probable tokens of mass P; 1 is off"
_MIN_P = "Drop tokens below P times the highest probability; 0 is off"
Temperature = Annotated[
    float, option("0 takes the most probable token", metavar="X", panel="Sampling")
]
TopK = Annotated[int, option("Sample from the N most probable; 0 is off", panel="Sampling")]
TopP = Annotated[float, option(_TOP_P, metavar="P", panel="Sampling")]
MinP = Annotated[float, option(_MIN_P, metavar="P", panel="Sampling")]
SampleSeed = Annotated[int, option("Seed of the samples", panel="Sampling")]
