"""Engines: the program that decodes. PyTorch runs every model, CTranslate2 many, faster on a CPU.

`auto` takes CTranslate2 on a CPU if it is installed and gives the output of the run's own settings.
The model is converted once, into RUN/engines/ctranslate2-DTYPE-CHECKSUM. The checksum is that of
weights, tokenizer, special tokens and shortlist, so a run that has changed is converted again.

A run with a lexical shortlist (`manyheads.distill`) is restricted to it where CTranslate2 was
chosen, by name or by int8: `auto` promises the output of PyTorch, which has none.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from manyheads import __version__
from manyheads.config import dump, nearest
from manyheads.decode.beam import Decode
from manyheads.decode.decoder import all_modules
from manyheads.decode.generate import BaseGenerator, Generator, ignore
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.errors import DataError, UserError
from manyheads.exchange.ctranslate2 import (
    WEIGHTS,
    Ctranslate2Generator,
    Ctranslate2Model,
    Ctranslate2Translator,
    write_ctranslate2,
)
from manyheads.fileio import (
    PARTIAL,
    check_sound,
    check_sum,
    check_sum_of,
    make_subfolder,
    replace_files,
)
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.run import SETTINGS, SHORTLIST
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.checkpoint import checksum

ENGINES, DTYPES = ("auto", "torch", "ctranslate2"), ("float32", "bfloat16", "int8")
FOLDER, PREFIX, SUMS = "engines", "ctranslate2-", "checksums.json"
VOCABULARY_MAP = "vmap.txt"  # the name that CTranslate2 looks for
ABANDONED = 3600  # seconds after which a conversion that was not finished is removed

_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []  # for runs in read-only folders
# The opened conversion of a model, and what it depends on.
_OPENED: WeakKeyDictionary[nn.Module, tuple[object, Ctranslate2Model]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Engine:
    """The choice of an engine, and how weights are stored; `report` gets the result of `auto`.

    `workers` is how many calls CTranslate2 computes at the same time; they share its threads.
    """

    name: str = "torch"
    dtype: str = "float32"
    report: Callable[[str], None] = ignore
    workers: int = 1

    def __post_init__(self) -> None:
        for option, value, known in (
            ("engine", self.name, ENGINES),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in known:
                raise UserError(f"--{option} {value}: {nearest(value, known)}")
        if self.name == "torch" and self.dtype == "int8":
            raise UserError("--dtype int8 needs CTranslate2: leave out --engine torch")
        if self.name == "ctranslate2" and self.dtype == "bfloat16":
            raise UserError("--dtype bfloat16 needs PyTorch: leave out --engine ctranslate2")

    @property
    def is_ctranslate2(self) -> bool:
        """True if only CTranslate2 will do."""
        return self.name == "ctranslate2" or self.dtype == "int8"

    def only_torch(self, reason: str, device: torch.device) -> "Engine":
        """PyTorch on a device, for this reason."""
        if self.is_ctranslate2:
            raise UserError(f"{reason}: leave out --engine ctranslate2 and --dtype int8")
        if self.name == "auto":
            self._report_torch(reason, device)
        return replace(self, name="torch")

    def _report_torch(self, reason: object, device: torch.device) -> None:
        """With the reason only where CTranslate2 could have run."""
        is_usual = find_spec("ctranslate2") is None or device.type != "cpu"
        self.report("engine: torch" if is_usual else f"engine: torch ({reason})")

    def translator(self, folder: Path, translator: Translator) -> BaseTranslator:
        """A translator that gives what `translator` gives, for the run in `folder`."""
        model = self._converted(folder, translator, "Translator")
        if model is None:
            return translator
        twin: Any = translator.model
        settings = translator.tokenizer, translator.decode, twin, self.dtype == "float32"
        return Ctranslate2Translator(
            model, *settings, use_vmap=self.is_ctranslate2, is_guided=translator.is_guided
        )

    def generator(self, folder: Path, generator: Generator) -> BaseGenerator:
        if self.dtype == "int8":
            raise UserError("--dtype int8 works only with translators: leave it out")
        model = self._converted(folder, generator, "Generator")
        if model is None:
            return generator
        twin: Any = generator.model
        return Ctranslate2Generator(
            model, generator.tokenizer, generator.decode, twin, generator.warn
        )

    def _converted(
        self, folder: Path, decoder: Translator | Generator, kind: str
    ) -> Ctranslate2Model | None:
        """The model for CTranslate2; None if PyTorch is the engine."""
        if self.name == "torch":
            return None
        try:
            if reason := why_not(decoder.model, decoder.decode):
                raise UserError(reason)
            if self.name == "auto" and not (folder / SETTINGS).is_file():
                raise UserError("another program's folder is left unchanged: import it")
            model = _open(folder, decoder, kind, self.dtype, self.workers)
        except (UserError, DataError) as error:
            if self.is_ctranslate2:
                raise UserError(f"the engine CTranslate2 cannot run {folder}: {error}") from None
            self._report_torch(error, decoder.device)
            return None
        if self.name == "auto":
            self.report(f"engine: ctranslate2, {self.dtype}")
        return model


def why_not(model: nn.Module, decode: Decode) -> str:
    """Why CTranslate2 would not give what PyTorch gives; "" if it does."""
    parameters = list(model.parameters())
    is_search = isinstance(model, Seq2Seq) and decode.beam > 1
    reasons = {
        "ctranslate2 is not installed: pip install 'manyheads[ctranslate2]'": (
            find_spec("ctranslate2") is None
        ),
        f"the model is on {parameters[0].device}: use --device cpu": (
            parameters[0].device.type != "cpu"
        ),
        "CTranslate2 has no such model": not isinstance(model, Gpt | Seq2Seq),
        f"the weights are in {parameters[0].dtype}": (
            any(parameter.dtype != torch.float32 for parameter in parameters)
        ),
        "the model has hooks": any(
            module._forward_hooks or module._forward_pre_hooks for module in all_modules(model)
        ),
        f"CTranslate2 has no decode.stopping={decode.stopping}": (
            is_search and decode.stopping != "early"
        ),
        "CTranslate2 stops otherwise with decode.length_penalty=0": (
            is_search and decode.length_penalty == 0
        ),
        "CTranslate2 treats decode.min_length differently": is_search and decode.min_length > 0,
        "CTranslate2 treats decode.forced_bos differently": decode.forced_bos is not None,
        "CTranslate2 treats decode.suppress_tokens differently": decode.suppress_tokens is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# --- Conversions in the run folder ----------------------------------------------------------------


def _open(
    folder: Path, decoder: Translator | Generator, kind: str, dtype: str, workers: int
) -> Ctranslate2Model:
    """The conversion of a model, opened once."""
    model, decode = decoder.model, decoder.decode
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    special = decode.start, decode.end, decode.source_start
    threads = torch.get_num_threads(), workers
    key = folder, dtype, special, threads, weights, read_shortlist(folder)
    if model not in _OPENED or _OPENED[model][0] != key:
        path = convert(folder, model, decoder.tokenizer, decode, dtype)
        _OPENED[model] = key, Ctranslate2Model(path, kind, workers=workers)
    return _OPENED[model][1]


def convert(
    folder: Path, model: Any, tokenizer: Tokenizer, decode: Decode, dtype: str = "float32"
) -> Path:
    """The model as a CTranslate2 folder inside the run folder, made if it is not there."""
    shortlist = read_shortlist(folder)
    key = _checksum(model, tokenizer, decode, shortlist)
    path = _home(folder) / f"{PREFIX}{dtype}-{key}"
    if not is_intact(path):
        try:
            with replace_files(path, last=SUMS) as partial:
                write_ctranslate2(model, tokenizer, partial, dtype, decode)
                if shortlist:
                    map_path = partial / VOCABULARY_MAP
                    map_path.write_text(shortlist, encoding="utf-8", newline="\n")
                sums = {file.name: check_sum_of(file) for file in partial.iterdir()}
                (partial / SUMS).write_text(json.dumps(sums), encoding="utf-8")
        except DataError:
            if not is_intact(path):  # else another process was faster
                raise
        _remove_others(path, key)
    return path


def _home(folder: Path) -> Path:
    """The folder of the conversions of a run: in the run folder, if that can be written."""
    home = folder / FOLDER
    try:
        if not (folder / SETTINGS).is_file():
            return _temporary(folder)
        make_subfolder(home)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError:
        return _temporary(folder)


@cache
def _temporary(folder: Path) -> Path:
    """A folder that is removed when the process ends."""
    _TEMPORARY.append(tempfile.TemporaryDirectory())
    return Path(_TEMPORARY[-1].name)


def read_shortlist(folder: Path) -> str:
    """The shortlist of a run as CTranslate2 reads it, without its checksum; "" if it has none."""
    path = folder / SHORTLIST
    if not path.is_file():
        return ""
    check_sound(path, SHORTLIST)
    return path.read_text("utf-8").partition("\n")[2]


def is_intact(folder: Path) -> bool:
    """True if all files of a conversion match their checksums."""
    try:
        sums = json.loads((folder / SUMS).read_bytes())
        is_same = (check_sum_of(folder / name) == value for name, value in sums.items())
        return WEIGHTS in sums and all(is_same)
    except (OSError, ValueError, AttributeError):
        return False


def _remove_others(path: Path, key: str) -> None:
    """Remove conversions of other weights, and those that a kill has left unfinished."""
    for other in path.parent.glob(f"{PREFIX}*"):
        if not other.name.endswith(key):
            shutil.rmtree(other, ignore_errors=True)
    for partial in path.parent.glob(f".{PREFIX}*{PARTIAL}"):
        with suppress(OSError):  # another process has just removed it
            if time.time() - partial.stat().st_mtime >= ABANDONED:  # else one may be writing it
                shutil.rmtree(partial, ignore_errors=True)


def _checksum(model: nn.Module, tokenizer: Tokenizer, decode: Decode, shortlist: str) -> str:
    """Of all that a conversion depends on: weights, then settings, tokenizer and version."""
    special = decode.start, decode.end, decode.source_start
    settings = [__version__, dump(model.config), tokenizer.to_json(), special]
    settings += [shortlist] if shortlist else []
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return checksum(weights) + check_sum(json.dumps(settings, sort_keys=True).encode())
