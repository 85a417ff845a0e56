"""Import models from Hugging Face's `transformers`, and export to it.

A folder is read without that package: config.json, safetensors, tokenizer.json. Nothing is
fetched, unpickled or run. Export builds their model and copies our weights into it.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.config import nearest
from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError, import_optional
from manyheads.exchange import peft, refuse_approximations
from manyheads.exchange.ctranslate2 import unsupported
from manyheads.exchange.families import FAMILIES, KINDS, PREPROCESSOR, VIT
from manyheads.exchange.family import (
    ExportPlan,
    Family,
    Foreign,
    flatten,
    from_hf_state,
    read_settings,
    to_hf_state,
    write_settings,
)
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.block import on_meta
from manyheads.nn.positions import Sinusoidal
from manyheads.presets import ModelConfig
from manyheads.tokenizer.sentencepiece import find_sentencepiece
from manyheads.tokenizer.tokenizer import SPECIALS, Tokenizer

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
SPECIAL_IDS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Errors of settings that have other types or sizes than every library writes.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class ImportedModel:
    model: nn.Module
    tokenizer: Tokenizer | None
    settings: dict[str, Any]
    generation: dict[str, Any]

    @property
    def special(self) -> dict[str, int]:
        """The ids of special tokens by their names there; the first of several end tokens."""
        known = {**self.settings, **{k: v for k, v in self.generation.items() if v is not None}}
        ids = {name: known.get(name) for name in SPECIAL_IDS}
        firsts = {n: v[0] if isinstance(v, list) and v else v for n, v in ids.items()}
        return {name: value for name, value in firsts.items() if isinstance(value, int)}


def from_huggingface(model_or_dir: Any) -> nn.Module:
    """Our model with the weights of a `transformers` model, or of a folder with one.

    It has the folder's tokenizer.json as `tokenizer`, and the ids of special tokens as `special`.
    """
    imported = import_model(model_or_dir)
    if imported.tokenizer is not None:
        imported.model.tokenizer = imported.tokenizer  # type: ignore[assignment]
    imported.model.special = imported.special  # type: ignore[assignment]
    return imported.model


def is_huggingface(folder: Path) -> bool:
    """True if a folder has a config.json that names a type of model, or is an adapter of PEFT."""
    path = folder / CONFIG
    is_adapter = (folder / peft.CONFIG).is_file()
    return is_adapter or (path.is_file() and "model_type" in _read_json(path))


def import_model(model_or_dir: Any) -> ImportedModel:
    if isinstance(model_or_dir, str | Path):
        return _import_folder(Path(model_or_dir))
    if not hasattr(model_or_dir, "config") or not hasattr(model_or_dir, "state_dict"):
        raise UserError(f"neither a folder nor a transformers model: {type(model_or_dir).__name__}")
    settings = model_or_dir.config.to_dict()
    settings["architectures"] = [type(model_or_dir).__name__]
    tensors = {name: tensor.clone() for name, tensor in model_or_dir.state_dict().items()}
    config = getattr(model_or_dir, "generation_config", None)
    generation = {} if config is None else config.to_dict()
    return ImportedModel(_convert(settings, tensors), None, settings, generation)


def _convert(settings: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Our model of their settings and tensors; the class that fits is stored in the settings."""
    family = _family(settings)
    named = _by_canonical_name(family, tensors)
    refusals = []
    for architecture in _candidates(family, settings.get("architectures")):
        try:
            model = _assemble(family, family.foreign(architecture, settings, named), named)
        except DataError as refusal:
            refusals.append(refusal)
        else:
            settings["architectures"] = [architecture]
            return model
    raise refusals[0]


def _assemble(family: Family, foreign: Foreign, tensors: dict[str, Tensor]) -> nn.Module:
    try:
        config = read_settings(family, foreign)
        depth = max(n for path, n in flatten(config).items() if path.endswith("layers"))
        if depth > len(tensors):  # each layer has its own tensors
            raise DataError(f"{CONFIG} calls for {depth} layers, and the weights have far fewer")
        with on_meta():  # sizes are compared before memory is allocated
            model = config.build()
    except UserError:
        raise
    except MALFORMED as error:
        raise DataError(f"{CONFIG} is no {family.kind} model's ({error!r}): correct it") from None
    model.load_state_dict(from_hf_state(family, model, tensors), assign=True)
    return model.eval()


def _by_canonical_name(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = family.canonical(name)
        if tensor.dtype not in FLOATS:
            if family.ignores(canonical):
                continue
            raise DataError(f"{name} is stored as {tensor.dtype}: save the weights as floats")
        if not torch.equal(named.setdefault(canonical, tensor), tensor):
            raise DataError(f"the weights hold {name} in two spellings that differ")
    return named


def _candidates(family: Family, architectures: Any) -> list[str]:
    """The classes that a file may be of: the one it names, and one with more heads."""
    if not architectures:
        return list(family.architectures)
    if not isinstance(architectures, list):
        raise DataError(f"architectures={architectures} is not a list: copy {CONFIG} again")
    name = str(architectures[0])
    if name not in family.architectures:
        advice = nearest(name, family.architectures)
        raise UserError(f"{name} is not a supported {family.kind} model: {advice}")
    return [name, family.superset_of[name]] if name in family.superset_of else [name]


def _family(settings: dict[str, Any]) -> Family:
    if settings.get("model_type") is None:
        raise DataError(f"{CONFIG} has no model_type: copy it again")
    kind = str(settings["model_type"])
    if kind not in KINDS:
        raise UserError(f"model_type={kind} is not supported: {nearest(kind, KINDS)}")
    for name in ("quantization_config", "per_layer_config"):
        if settings.get(name):
            raise UserError(f"a {kind} model with {name} is not supported: save it without")
    return KINDS[kind]


def _import_folder(folder: Path) -> ImportedModel:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give one with {CONFIG} and {WEIGHTS}")
    adapter = _read_json(folder / peft.CONFIG) if (folder / peft.CONFIG).is_file() else None
    adapter_folder, folder = folder, peft.base_folder(folder, adapter) if adapter else folder
    if not (folder / CONFIG).is_file():
        if (folder / "run.toml").is_file():
            raise UserError(f"{folder} is a run, not a Hugging Face folder: use or export it")
        raise DataError(f"{folder} is not a model folder: it has no {CONFIG}")
    settings = _read_json(folder / CONFIG)
    code = sorted(folder.glob("*.py"))
    if code or settings.get("auto_map"):
        source = code[0].name if code else "auto_map in config.json"
        raise UserError(f"{folder} comes with code ({source}), which is never run: remove it")
    if settings.get("model_type") == VIT.kind and (folder / PREPROCESSOR).is_file():
        settings[PREPROCESSOR] = _read_json(folder / PREPROCESSOR)
    tensors = _read_tensors(_weight_files(folder))
    try:
        if adapter:
            updates = _read_tensors([adapter_folder / peft.WEIGHTS])
            family = _family(settings)
            tensors = peft.merge_adapter(family, settings, tensors, adapter, updates)
        model = _convert(settings, tensors)
    except UserError as error:
        raise type(error)(f"{folder}: {' '.join(str(error).split())}") from None
    if (folder / TOKENIZER).is_file():
        tokenizer: Tokenizer | None = Tokenizer.load(folder / TOKENIZER)
    else:
        config: Any = model.config
        tokenizer = find_sentencepiece(folder, settings["model_type"], config.vocab_size)
    generation = _read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    return ImportedModel(model, tokenizer, settings, generation)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}): copy it again") from None
    if not isinstance(table, dict):
        raise DataError(f"{path} is not a table of settings: copy it again")
    return table


def _read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of some files; float16 and bfloat16 become float32, without loss."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(f"{file} is damaged or cut off ({error}): copy it again") from None
    is_double = any(x.dtype == torch.float64 for x in tensors.values())
    dtype = torch.float64 if is_double else torch.float32
    return {name: x.to(dtype) if x.dtype in FLOATS else x for name, x in tensors.items()}


def _weight_files(folder: Path) -> Iterator[Path]:
    if (folder / WEIGHTS).is_file():
        yield folder / WEIGHTS
        return
    if not (folder / SHARDS).is_file():
        pickled = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
        if pickled:
            raise UserError(f"{folder}: {pickled[0]} could run code: save safetensors instead")
        raise DataError(f"{folder} has no {WEIGHTS}: copy it again")
    files = _read_json(folder / SHARDS).get("weight_map")
    for name in sorted({str(file) for file in files.values()} if isinstance(files, dict) else []):
        if Path(name).name != name:
            raise DataError(f"{folder / SHARDS} names a file outside of its folder: {name}")
        yield folder / name


def to_huggingface(model: Any) -> Any:
    """A `transformers` model with the weights of a model or a loaded run.

    It is of the first family that has all its parts.
    """
    model = model if isinstance(model, nn.Module) else model.model
    special = special_tokens(model)
    model, plan = plan_export(model)
    family = plan.family
    kind = getattr(import_transformers(), plan.architecture)
    # Their default padding token may be beyond the end of a small table.
    no_padding = {"pad_token_id": None} if hasattr(model, "tokens") else {}
    settings = {**no_padding, **special, **plan.settings}
    padding = settings.get("pad_token_id")
    if padding != special.get("pad_token_id", padding):
        raise UserError(
            f"cannot export to {family.kind}: its positions need pad_token_id={padding}, and this "
            f"model has {special['pad_token_id']}"
        )
    lacks_pooler = plan.architecture == family.unpooled and not plan.has_pooler
    arguments = {"add_pooling_layer": False} if lacks_pooler else {}
    theirs = kind(kind.config_class(**settings), **arguments)
    theirs = theirs.to(next(model.parameters()).dtype).eval()
    tensors = theirs.state_dict()
    actual = {family.canonical(name): name for name in tensors}
    state = to_hf_state(family, model, {n: tensors[name].shape for n, name in actual.items()})
    _untie(theirs, family, state, actual)
    loaded = theirs.load_state_dict({actual[n]: t for n, t in state.items()}, strict=False)
    missing = {family.canonical(name) for name in loaded.missing_keys}
    missing -= {*family.aliases.values()}  # a table that is stored twice
    assert all(family.ignores(name) for name in missing), missing
    return theirs


def special_tokens(model: nn.Module) -> dict[str, Any]:
    """Ids of the special tokens by their `transformers` names: as loaded, or our usual ones."""
    loaded = getattr(model, "special", None)
    if isinstance(loaded, dict):
        return loaded
    pad, start, end = (SPECIALS.index(name) for name in ("<pad>", "<s>", "</s>"))
    if isinstance(model.config, VitConfig):
        return {}
    named = {"pad_token_id": pad, "bos_token_id": start, "eos_token_id": end}
    if isinstance(model.config, Seq2SeqConfig):
        named |= {"decoder_start_token_id": start, "forced_eos_token_id": end}
    return named


def _untie(theirs: Any, family: Family, state: dict[str, Tensor], actual: dict[str, str]) -> None:
    """Separate tensors that their class ties and our model does not."""
    for second, first in family.aliases.items():
        if second in state and first in state and not torch.equal(state[second], state[first]):
            module, _, leaf = actual[second].rpartition(".")
            parameter = nn.Parameter(state[second].clone().to(theirs.device))
            setattr(theirs.get_submodule(module), leaf, parameter)
            theirs.all_tied_weights_keys.pop(actual[second], None)


def plan_export(model: nn.Module) -> tuple[nn.Module, ExportPlan]:
    """How to export a model, its channels reordered if only their order is in the way.

    A model that no class has is refused, with the settings that would make it one.
    """
    plan = _best_plan(model.config)  # type: ignore[arg-type]
    if plan.obstacles:
        refuse_approximations(model)
    if plan.obstacles and isinstance(model, Seq2Seq) and is_interleaved(model.config):
        model = in_halves(model)
        plan = _best_plan(model.config)
    if plan.obstacles:
        others = "onnx" if unsupported(model, Decode()) else "ctranslate2 or onnx"
        raise UserError(
            f"transformers lacks this model: {plan.family.kind} needs {', '.join(plan.obstacles)}: "
            f"train with these settings, or export --to {others}"
        )
    return model, plan


def _best_plan(config: ModelConfig) -> ExportPlan:
    """The class with the fewest obstacles, the first of several."""
    plans = [
        write_settings(family, architecture, config)
        for family in FAMILIES
        if type(config) is family.model
        for architecture in family.architectures
    ]
    if not plans:
        raise UserError(f"transformers has no {config.kind} model: export a Transformer")
    return min(plans, key=lambda plan: len(plan.obstacles))


def import_transformers() -> Any:
    return import_optional("transformers", "exchange")


# ---------------------------------------------------------------------------------------------
# Interleaved sinusoids (sin, cos, sin, cos, …) become halves (all sines, then all cosines). Only
# the sinusoids depend on the order of the residual stream's channels: permute the columns of
# matrices that read the stream and the rows of those that write to it, and the model is the same.

READS = re.compile(
    r"(^|\.)((target_)?tokens|segment|(attention|cross)\.(project|query)"
    r"|feedforward\.(inner|gate))\.weight$|norm\.(weight|bias)$|^head\.weight$"
)
WRITES = re.compile(r"\.((attention|cross)\.output|feedforward\.outer)\.(weight|bias)$")


def is_interleaved(config: Seq2SeqConfig) -> bool:
    """True if all positions of a model are interleaved sinusoids."""
    position = config.position
    shared = config.encoder.position is None and config.decoder.position is None
    return shared and isinstance(position, Sinusoidal) and position.layout == "interleaved"


def in_halves(model: Seq2Seq) -> Seq2Seq:
    """An equal model with sinusoids in halves instead of interleaved."""
    position: Any = model.config.position
    halves = dataclasses.replace(position, layout="halves")
    channels = torch.arange(model.config.dim)
    order = torch.cat([channels[0::2], channels[1::2]])
    with on_meta():
        reordered = dataclasses.replace(model.config, position=halves).build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if WRITES.search(name):
            state[name] = tensor[order]
        elif READS.search(name):
            state[name] = tensor[..., order]
    reordered.load_state_dict(state, assign=True)
    return reordered.train(model.training)
