"""From a recipe to a trainer: settings, tokenizer, first weights and task, each settled once."""

import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.config import assign, dump, nearest, override_all, read_toml
from manyheads.data.images import ImageData, Pictures
from manyheads.data.labelled import Labelled, LabelledData
from manyheads.data.language import TextData, Texts
from manyheads.data.masking import (
    BothWays,
    Causal,
    Denoising,
    Masked,
    Replaced,
    Spans,
    span_sizes,
)
from manyheads.data.music import Music, MusicData
from manyheads.data.translation import Corpus
from manyheads.decode.beam import SpecialTokens
from manyheads.errors import UserError
from manyheads.exchange.folder import in_frame
from manyheads.fileio import drop_partials, write_text
from manyheads.finetune import adapted, give_weights, refuse_changes
from manyheads.loading import TorchRun, open_any
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.electra import Electra
from manyheads.models.heads import Classify
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.block import Architecture, sizes_alone
from manyheads.nn.local import Near
from manyheads.nn.positions import Sinusoidal
from manyheads.presets import ModelConfig
from manyheads.run import (
    SETTINGS,
    TOKENIZER,
    Run,
    differences,
    make_folder,
    model_digest,
    parse_run,
    read_run,
    read_tokenizer,
    settings_text,
)
from manyheads.tasks.both_ways import BothWaysTask
from manyheads.tasks.classification import ClassificationTask
from manyheads.tasks.denoising import DenoisingTask
from manyheads.tasks.images import ImageTask, fitted
from manyheads.tasks.language import LanguageTask
from manyheads.tasks.masked import MaskedTask
from manyheads.tasks.music import MusicTask
from manyheads.tasks.summaries import SummaryTask
from manyheads.tasks.translation import TranslationTask
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train import checkpoint
from manyheads.train.loop import Task, Trainer
from manyheads.train.parallel import ALONE, World

Part = Corpus | Texts | Labelled | Pictures
# The special tokens that an objective needs.
SPECIALS = {
    "causal": ("end",),
    "masked": ("mask",),
    "replaced": ("mask",),
    "denoising": ("mask",),
}


def recipes() -> list[str]:
    """The names of the built-in recipes."""
    folder = resources.files("manyheads") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir())


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Run:
    """A recipe, by built-in name or file, with `a.b=c` settings on top.

    `model=FOLDER` begins with the model that is there: its settings, its tokenizer, its weights.
    """
    path = Path(name)
    if name in recipes():
        path = Path(str(resources.files("manyheads") / "recipes" / f"{name}.toml"))
    elif not path.is_file():
        raise UserError(f"there is no recipe '{name}': {nearest(name, recipes())}")
    table = read_toml(path)
    try:
        run = parse_run(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    settings, start = _start(overrides, run.start)
    # The settings of a run that began with another model are whole already.
    if start and (start != run.start or not _settled(run.model)):
        opened = open_start(start)
        # What is wanted decides what the model is to become; settings of it come on top.
        of_model = [one for one in settings if one.startswith("model.")]
        wanted = assign(run, [one for one in settings if one not in of_model])
        trained = adapted(opened.run.model, wanted, start)
        run = dataclasses.replace(
            wanted, start=start, tokens=None, model=trained, decode=opened.run.decode
        )
        run = override_all(
            run, [*[one for one in settings if one.startswith("decode.")], *of_model]
        )
        refuse_changes(run, trained)
    else:
        run = override_all(run, settings)
    _check_settings(settings, run)
    needs_tokens = not run.start and run.task != "images"
    if run.data is None or (run.tokens is None and needs_tokens):
        raise UserError("a run that is to be trained needs data and tokens: leave out data=none")
    # A model whose parts do not go together is refused before anything is read or written.
    try:
        with sizes_alone():
            dataclasses.replace(run.model, vocab_size=run.model.vocab_size or 1).build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"no model has such sizes ({reason}): lower them") from None
    return run


def _settled(model: ModelConfig) -> bool:
    """Whether the data of a run has decided already what it decides of a model."""
    if isinstance(model, VitConfig):
        return bool(model.pixel_mean)
    return model.vocab_size is not None


def _check_settings(settings: Sequence[str], run: Run) -> None:
    """Refuse what was set and would have no say."""
    names = {setting.partition("=")[0] for setting in settings}
    if "train.merge_dropout" in names and run.train.segmentations == 1:
        raise UserError(
            "train.merge_dropout has no say where the text is cut in one way: add "
            "train.segmentations=8"
        )
    for name, other in (("steps", "epochs"), ("warmup_steps", "warmup_share")):
        decides = getattr(run.train, other)
        if f"train.{name}" in names and decides is not None:
            raise UserError(
                f"train.{name} has no say where train.{other}={decides} decides: add "
                f"train.{other}=none"
            )


def _start(overrides: Sequence[str], start: str) -> tuple[list[str], str]:
    """The settings without `model=FOLDER` (or `start=FOLDER`), and that folder."""
    kinds = [option.kind for option in ModelConfig.__args__]
    rest = []
    for setting in overrides:
        path, equals, value = setting.partition("=")
        is_kind = path == "model" and value in kinds and not Path(value).is_dir()
        if path not in ("model", "start") or not equals or is_kind:
            rest.append(setting)
        elif Path(value).is_dir():
            start = value
        elif (
            path == "model"
            and Path(value).name == value
            and (close := get_close_matches(value, kinds, n=1))
        ):
            raise UserError(
                f"{setting} is no folder, and no kind of model: did you mean model={close[0]}?"
            )
        else:
            raise UserError(
                f"{setting} is no folder: give a run, or an imported model, to begin with (a run "
                "that has begun goes on without it: train RUN/run.toml --out RUN)"
            )
    tokens = next((one for one in rest if one.startswith("tokens")), None)
    if start and tokens:
        raise UserError(f"{start} comes with its own tokens: leave out {tokens}")
    return rest, start


def open_start(folder: str) -> TorchRun:
    """The model that a run begins with."""
    opened = open_any(Path(folder))
    if not isinstance(opened, TorchRun):
        raise UserError(f"{folder} was exported and cannot be trained: begin with the run itself")
    return opened


def prepare(run: Run, folder: Path, part: Part) -> tuple[Run, Tokenizer | None]:
    """Settle what the data decides (tokenizer, sizes, labels) and write it down, once."""
    make_folder(folder)
    if isinstance(part, Pictures):
        assert isinstance(run.model, VitConfig)  # as `run.FITTING` has it
        return _written(dataclasses.replace(run, model=fitted(run.model, part)), folder), None
    if (folder / SETTINGS).exists():
        tokenizer = read_tokenizer(folder)
    elif run.start:
        start = open_start(run.start)
        tokenizer = start.tokenizer
        if isinstance(run.model, BertConfig) and isinstance(start.run.model, Seq2SeqConfig):
            # An encoder goes on reading texts in the frame that it was trained with.
            tokenizer = in_frame(tokenizer, start.run.decode, start.run.model)
        tokenizer = _fitted(tokenizer, run)
        tokenizer.save(folder / TOKENIZER)
    else:
        assert run.tokens is not None  # a recipe has them
        tokenizer = _fitted(run.tokens.train(_strings(part)), run)
        tokenizer.save(folder / TOKENIZER)
    model: Any = run.model
    if not run.start:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    elif tokenizer.vocab_size > (model.vocab_size or 0):
        raise UserError(
            f"{run.start} has room for {model.vocab_size} tokens, and this objective needs "
            f"{tokenizer.vocab_size}: begin with a model that was trained for it"
        )
    if isinstance(run.data, LabelledData) and isinstance(part, Labelled):
        labels = run.data.label_names(part)
        if model.head.labels not in (Classify().labels, labels):
            raise UserError(
                f"model.head.labels={','.join(model.head.labels)} are not the labels of "
                f"{part.name} ({','.join(labels)}): leave them out"
            )
        model = dataclasses.replace(model, head=dataclasses.replace(model.head, labels=labels))
    return _written(dataclasses.replace(run, model=model), folder), tokenizer


def _written(run: Run, folder: Path) -> Run:
    """The run with its settings in its folder, where none or the same were."""
    if (folder / SETTINGS).exists():
        found = differences(dump(run), dump(read_run(folder)))
        if found:
            raise UserError(
                f"{folder} holds another run ({found[0]}): keep that, or choose another --out"
            )
    text = settings_text(run, folder)
    if not (folder / SETTINGS).exists() or (folder / SETTINGS).read_text("utf-8") != text:
        write_text(folder / SETTINGS, text)
    return run


def _strings(part: Part) -> list[str]:
    """What a tokenizer is trained on."""
    if isinstance(part, Corpus):
        return [*part.sources, *part.targets]
    if isinstance(part, Texts):
        return part.strings()
    assert isinstance(part, Labelled)
    return [text for one in part.texts for text in (one if isinstance(one, tuple) else (one,))]


def _fitted(tokenizer: Tokenizer, run: Run) -> Tokenizer:
    """With what the model and the objective need beside the text: a frame, sentinels."""
    try:
        for name in SPECIALS.get(run.objective.kind, ()) if run.objective else ():
            getattr(tokenizer, name)
        if isinstance(run.model, Seq2SeqConfig):
            frame = SpecialTokens(tokenizer, run.decode).frame  # says what it lacks
        if isinstance(run.model, BertConfig | ElmoConfig):
            return in_frame(tokenizer, run.decode, run.model)
    except UserError as error:  # one that came with a model
        raise UserError(f"{Path(run.start) / TOKENIZER}: {error}") from None
    if isinstance(run.objective, Spans):
        wanted = run.objective
        length = run.model.max_length - len(frame.source([]))
        if length < 2:
            raise UserError(
                f"model.max_length={run.model.max_length} leaves no room for text: raise it"
            )
        _, spans = span_sizes(length, rate=wanted.rate, mean_length=wanted.mean_length)
        missing = range(len(tokenizer.sentinels()), spans + 1)
        return tokenizer.with_specials([f"<extra_id_{number}>" for number in missing])
    return tokenizer


def train(run: Run, folder: Path, device: torch.device, world: World = ALONE) -> Trainer:
    """A trainer for the run, at the step where its folder stands."""
    if run.data is None:
        raise UserError(f"there is no training for task={run.task} yet")
    if world.first:
        drop_partials(folder)
    part, valid = run.data.read("train"), run.data.read("valid")
    with world.in_turn():  # the others read what the first has written
        run, tokenizer = prepare(run, folder, part)
    task = task_of(run, part, valid, tokenizer, device)
    task.notes = [*task.notes, *_drowned(run), *_all_near(run)]
    torch.manual_seed(run.seed)
    model = run.model.build()
    if run.start and not checkpoint.is_begun(folder):
        give_weights(model, open_start(run.start))
    trained: nn.Module = model
    if isinstance(run.objective, Replaced) and isinstance(model, Bert):
        trained = Electra(model, run.objective.generator_share)
    trained.to(device)
    return Trainer(
        trained,
        task,
        run.train.settled(task.per_epoch),
        dim=run.model.dim,
        seed=run.seed,
        folder=folder,
        about={"model": model_digest(run.model)},
        kept=model,
        world=world,
    )


def _drowned(run: Run) -> list[str]:
    """A word on token vectors that positions would drown."""
    model = run.model
    if not isinstance(model, Architecture) or not isinstance(model.position, Sinusoidal):
        return []
    if run.start or model.embed.scale != "one" or model.vocab_size is None:
        return []
    return [
        "sinusoidal positions are waves of height 1, and token vectors begin far smaller, so that "
        "little is learned of the words: add model.embed.scale=sqrt-dim"
    ]


def _all_near(run: Run) -> list[str]:
    """A word on windows and blocks that hide nothing of what a model reads."""
    model: Any = run.model
    length = getattr(model, "positions", model.max_length)
    cores: dict[str, Any] = {"model.core": getattr(model, "core", None)}
    if isinstance(model, Seq2SeqConfig):
        sides = {"encoder": model.encoder.core, "decoder": model.decoder.core}
        own = {f"model.{name}.core": core for name, core in sides.items() if core is not None}
        cores = own if len(own) == len(sides) else {**cores, **own}
    return [
        f"{name}={core.kind} hides nothing, as exact attention does: the model reads up to "
        f"{length} positions, and all of them are near; lower {name}.{core.measure}="
        f"{getattr(core, core.measure)}"
        for name, core in cores.items()
        if isinstance(core, Near) and core.reach >= length
    ]


def task_of(
    run: Run, part: Part, valid: Part, tokenizer: Tokenizer | None, device: torch.device
) -> Task[Any]:
    """The task of a run over its data."""
    model: Any = run.model
    if isinstance(part, Pictures) and isinstance(valid, Pictures):
        assert isinstance(run.data, ImageData)
        return ImageTask(run.data, part, valid, model, run.train, seed=run.seed, device=device)
    assert tokenizer is not None
    shared: dict[str, Any] = {
        "max_length": model.max_length,
        "seed": run.seed,
        "device": device,
    }
    if isinstance(part, Corpus) and isinstance(valid, Corpus):
        kind = SummaryTask if run.task == "summaries" else TranslationTask
        return kind(part, valid, tokenizer, run.train, run.decode, **shared)
    if isinstance(part, Labelled) and isinstance(valid, Labelled):
        assert isinstance(run.data, LabelledData)
        assert isinstance(model.head, Classify)
        _check_room(part, tokenizer, model.max_length)
        segments = 1 if isinstance(model, ElmoConfig) else model.embed.segments or 1
        names = model.head.labels
        return ClassificationTask(
            run.data, part, valid, names, tokenizer, run.train, segments=segments, **shared
        )
    if isinstance(part, Music) and isinstance(valid, Music):
        assert isinstance(run.data, MusicData)
        return MusicTask(part, valid, tokenizer, run.data, run.train, **shared)
    assert isinstance(part, Texts)
    assert isinstance(valid, Texts)
    assert isinstance(run.data, TextData)
    objective = run.objective or Causal()
    if isinstance(objective, BothWays):
        both_ways = BothWaysTask(part, valid, tokenizer, run.train, **shared)
        both_ways.valid.text.stretches(both_ways.valid.room)  # too few are said now
        return both_ways
    if isinstance(objective, Causal):
        return LanguageTask(part, valid, tokenizer, objective, run.train, **shared)
    if isinstance(objective, (Masked, Replaced)):
        short = run.data.short
        masked = MaskedTask(part, valid, tokenizer, objective, run.train, short=short, **shared)
        masked.valid.text.stretches(masked.valid.room)  # too few are said now, not after hours
        return masked
    assert isinstance(objective, (Spans, Denoising))
    denoising = DenoisingTask(part, valid, tokenizer, objective, run.train, run.decode, **shared)
    denoising.valid.text.stretches(denoising.valid.length)
    return denoising


def _check_room(part: Labelled, tokenizer: Tokenizer, max_length: int) -> None:
    """Refuse a model that would read nothing but special tokens."""
    pairs = isinstance(part.texts[0], tuple)
    frame = len(tokenizer.framed([("", "") if pairs else ""])[0][0])
    if max_length < frame + (2 if pairs else 1):
        raise UserError(
            f"model.max_length={max_length} leaves no room for text beside {frame} special "
            "tokens: raise it"
        )
