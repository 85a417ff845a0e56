"""Commands to discover what can be trained and set: recipes, settings; and --version.

The list of recipes comes from the comments at the top of their files, so that --help and shell
completion need neither torch nor the settings classes.
"""

import platform
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyheads.commands import options
from manyheads.commands.help import two_columns
from manyheads.commands.options import argument
from manyheads.commands.shared import print_json, say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.config import Setting
    from manyheads.run import Run

FACT = re.compile(r"(Data|Time|Score): (.+)")
EXTRAS = {  # and a package that each installs
    "figures": "matplotlib",
    "tensorboard": "tensorboard",
    "ctranslate2": "ctranslate2",
    "exchange": "transformers",
    "summaries": "rouge_score",
    "images": "PIL",
    "music": "mido",
    "parquet": "pyarrow",
    "web": "starlette",
    "lab": "scipy",
}


@dataclass(frozen=True)
class RecipeHeader:
    """A built-in recipe as the comment at the top of its file describes it.

    Its first sentence is the summary. Lines that begin with `Data:`, `Time:` or `Score:` name
    the data it needs, how long it trains and the score to expect.
    """

    name: str
    lines: list[str]
    task: str

    @property
    def summary(self) -> str:
        text = " ".join(line for line in self.lines if not line.startswith(" "))
        return re.split(r"(?<=[^.])\. |\.$|: (?=manyheads)", text)[0]

    @property
    def facts(self) -> dict[str, str]:
        matches = (FACT.fullmatch(line) for line in self.lines)
        return {match[1].lower(): match[2] for match in matches if match}


def headers() -> Iterator[RecipeHeader]:
    """The built-in recipes, by name."""
    folder = resources.files("manyheads") / "recipes"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            text = file.read_text("utf-8")
            comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
            lines = [line.removeprefix("#").removeprefix(" ") for line in comment]
            task = tomllib.loads(text)["task"]
            yield RecipeHeader(file.name.removesuffix(".toml"), lines, task)


def complete_recipe(incomplete: str) -> list[str]:
    """For shell completion."""
    return [header.name for header in headers() if header.name.startswith(incomplete)]


_RECIPE = "A built-in recipe (manyheads recipes) or a TOML file"
_RECIPE_OR_RUN = "A built-in recipe, a TOML file or a run folder"
_PREFIX = "The beginning of a name, or a word to search for; settings to apply first"
Recipe = Annotated[str, argument("RECIPE", _RECIPE, autocompletion=complete_recipe)]


def recipes(
    name: Annotated[
        str | None, argument("NAME", "Describe one", autocompletion=complete_recipe)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the built-in recipes: task, data, time, expected score.

    Examples
      $ manyheads recipes
      $ manyheads recipes phrasebook
    """
    known = {header.name: header for header in headers()}
    if name is not None and name not in known:
        from manyheads.config import nearest

        raise UserError(f"there is no recipe '{name}': {nearest(name, known)}")
    chosen = list(known.values()) if name is None else [known[name]]
    if as_json:
        rows = [
            {"name": recipe.name, "task": recipe.task, "summary": recipe.summary, **recipe.facts}
            for recipe in chosen
        ]
        print_json({"recipes": rows})
    elif name is not None:
        text = "\n".join(chosen[0].lines)
        write(f"{text}\n\nTrain     manyheads train {name}\n")
        write(f"Settings  manyheads settings {name}\n")
    else:
        for recipe in chosen:
            facts = {"About": recipe.summary} | {k.capitalize(): v for k, v in recipe.facts.items()}
            write(f"{recipe.name}  ({recipe.task})\n{two_columns(facts.items())}\n")
        write("\nTrain one: manyheads train NAME. Its settings: manyheads settings NAME\n")


def settings(
    recipe: Annotated[str, argument("RECIPE", _RECIPE_OR_RUN, autocompletion=complete_recipe)],
    words: Annotated[list[str] | None, argument("[PREFIX] [KEY=VALUE]...", _PREFIX)] = None,
    as_json: options.Json = False,
) -> None:
    """List the settings of a recipe: name, value, meaning, type or choices.

    Examples
      $ manyheads settings phrasebook train
      $ manyheads settings phrasebook "learning rate"
      $ manyheads settings language model.attention model.attention=performer
    """
    from manyheads.config import OTHER_NAMES, describe
    from manyheads.recipes import read_recipe

    overrides = [word for word in words or [] if "=" in word]
    prefix = " ".join(word for word in words or [] if "=" not in word)
    run_file = Path(recipe) / "run.toml"
    run = read_recipe(str(run_file) if run_file.is_file() else recipe, overrides)
    every = list(describe(run))
    chosen = [setting for setting in every if _is_below(setting.name, prefix)]
    if not chosen and (name := OTHER_NAMES.get(re.sub("[ -]", "_", prefix.lower()))):
        say(f"{prefix}: see {name}")
        chosen = [setting for setting in every if name in setting.name.split(".")]
    chosen = chosen or [setting for setting in every if _mentions(setting, prefix)]
    if not chosen:
        raise UserError(
            f"no setting of {recipe} begins with or mentions '{prefix}': leave it out to list all"
        )
    if as_json:
        rows = [{**setting._asdict(), "default": setting.text} for setting in chosen]
        print_json({"settings": rows})
    else:
        write(_settings_text(chosen, sys.stdout.isatty()))


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix.rstrip('.')}.")


def _mentions(setting: "Setting", words: str) -> bool:
    texts = (words, f"{setting.name} {setting.meaning}")
    wanted, text = (re.sub("[_-]", " ", text.lower()) for text in texts)
    return wanted in text


def _explained(setting: "Setting") -> str:
    type_text = re.sub(r"\|none$", " or none", setting.type).replace("|", " | ")
    return f"{setting.meaning} ({type_text})".lstrip()


def _settings_text(chosen: "list[Setting]", wrapped: bool) -> str:
    """`name=value  meaning (type)`; on a terminal wrapped, in a pipe one line each."""
    rows = [(f"{setting.name}={setting.text}", _explained(setting)) for setting in chosen]
    if wrapped:
        return two_columns(rows, widest_name=34) + "\n"
    width = max(len(name) for name, _ in rows if len(name) <= 40 or len(rows) == 1)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def commented_toml(run: "Run") -> str:
    """The settings of a run as TOML, each after a comment with its meaning and type."""
    from manyheads.config import describe, to_toml

    lines: list[str] = []
    settings = list(describe(run, other_kinds=False))
    parts = {setting.name.rpartition(".")[0] for setting in settings}
    for setting in settings:
        lines += textwrap.wrap(
            _explained(setting), 96, initial_indent="# ", subsequent_indent="#   "
        )
        name = f"{setting.name}.kind" if setting.name in parts else setting.name
        lines.append(name + to_toml({"": setting.default}).removeprefix('""').rstrip())
    return "\n".join(lines) + "\n"


def version_text() -> str:
    """Version, Python, torch, device and the optional extras."""
    import torch

    from manyheads import __version__
    from manyheads.run import choose_device

    device = choose_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    extras = [extra for extra, package in EXTRAS.items() if find_spec(package)]
    rows = {
        "manyheads": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": f"{device.type} ({name})",
        "extras": ", ".join(extras) or "none",
        "not installed": ", ".join(extra for extra in EXTRAS if extra not in extras) or "none",
    }
    return "\n".join(f"{title:<13}  {value}" for title, value in rows.items()) + "\n"
