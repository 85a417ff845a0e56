"""Load a model from a folder, whichever program wrote it.

A run folder and a Hugging Face folder offer the same methods, as far as the model supports them.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from manyheads.baselines.rnn import LanguageModel
from manyheads.config import dump, override_all, parse
from manyheads.decode.beam import Decode, SpecialTokens
from manyheads.decode.ensemble import ensemble as ensemble_of
from manyheads.decode.generate import BaseGenerator, Generator, as_text, ignore
from manyheads.decode.sample import Sample
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.engines import Engine
from manyheads.errors import DataError, UserError
from manyheads.evaluate.scores import Scores
from manyheads.exchange import DECODER, ENCODER, peft
from manyheads.exchange.ctranslate2 import WEIGHTS as CTRANSLATE2
from manyheads.exchange.folder import (
    decode_from_hf,
    frame_for_model,
    special_token_ids,
    unsupported_generation,
)
from manyheads.exchange.huggingface import CONFIG, ImportedModel, import_model, is_huggingface
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.models.vit import Vit
from manyheads.nn.block import Model, SkipInit
from manyheads.optimize import optimize
from manyheads.presets import PRESETS, ModelConfig, preset
from manyheads.run import (
    SETTINGS,
    TOKENIZER,
    Run,
    choose_device,
    model_digest,
    read_run,
    read_tokenizer,
)
from manyheads.tasks.encode import Guess, Pool, Prediction, TextEncoder, segments_of
from manyheads.tasks.spec import Ability, LoadedModel
from manyheads.tasks.table import TASKS, Data
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train import checkpoint

IN_TORCH = Engine()
FRAME = ("start", "end", "source_start")
EXPORTS = {"ctranslate2": [CTRANSLATE2], "onnxruntime": [ENCODER, DECODER]}

# Abilities in words, and the models that have them.
NEEDS: dict[Ability, tuple[str, str]] = {
    "translate": ("translates", "an encoder–decoder"),
    "generate": ("continues texts", "a decoder-only model"),
    "label": ("labels pictures", "a vit model"),
}


@dataclass(frozen=True, repr=False)
class LoadedRun(LoadedModel):
    """A model in a folder, trained here or imported; with `others` an ensemble of translators.

    `translate`, `generate`, `embed`, `classify` and `fill_mask` take lists of texts. A method that
    the model does not support raises a `UserError`. Calls and attributes that a run does not have
    are the model's: release 0.1 loaded a model.
    """

    folder: Path
    run: Run
    own_tokenizer: Tokenizer | None
    device: torch.device
    model: Model
    engine: Engine = IN_TORCH
    others: tuple["LoadedRun", ...] = ()

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        kind = f"task={self.run.task}, model={self.run.model.kind}"
        return f"<LoadedRun {self.folder}: {kind}, {size:,} parameters on {self.device}>"

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("_"):  # while a copy is made, it has none yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.own_tokenizer is None:
            raise UserError(f"{self.folder} has no {TOKENIZER}: put the model's own there")
        return self.own_tokenizer

    # --- lists of texts in, results out ---

    def translate(self, texts: Sequence[str], **decode: Any) -> list[str]:
        """Translations by beam search; `decode` are settings: `translate(texts, beam=5)`."""
        return self.translator(**decode).translate(_check_texts(texts))

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 1,
    ) -> list[str]:
        """The text after each prompt: the likeliest tokens, or sampled at a temperature above 0.

        The command `generate` samples by default, with temperature=0.8.
        """
        loaded = self
        if temperature > 0:  # no engine to start for sampling
            loaded = self.with_engine(IN_TORCH)
        generator = loaded.generator(at_limit="truncate")  # else the last token is an end
        tokenizer, start = self.tokenizer, self.tokenizer.frame()[0]
        sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        ids = [[*start, *tokenizer.encode(prompt)] for prompt in _check_texts(prompts)]
        results = generator.sample(ids, max_new_tokens, sample)
        return [
            "".join(as_text(tokenizer, before, iter(tokens)))
            for before, tokens in zip(ids, results, strict=True)
        ]

    def embed(self, texts: Sequence[str], pool: Pool = "mean") -> np.ndarray:
        """A vector for each text, float32 [texts, dim]: the mean of its tokens, or the first.

        With `pool="tokens"` [texts, longest, dim], and NaN after the end of a shorter text.
        """
        return self.encoder().embed(_check_texts(texts), pool)

    def classify(self, texts: Sequence[str]) -> list[list[Prediction]]:
        """The label and the probabilities of all labels for each text; a tagger has one per token.

        A tab separates the two texts of a pair.
        """
        return self.encoder().classify(_check_texts(texts))

    def fill_mask(self, texts: Sequence[str], top: int = 1) -> list[list[list[Guess]]]:
        """The `top` likeliest words for each [MASK] of each text."""
        return self.encoder().fill(_check_texts(texts), top)

    # --- what computes them ---

    def decode(self, **changes: Any) -> Decode:
        return parse(Decode, dump(self.run.decode) | changes, "decode")

    def translator(self, **changes: Any) -> BaseTranslator:
        """Translates, with some settings of `decode` changed."""
        self.require("translate")
        return self._translator(self.decode(**changes))

    def _translator(self, decode: Decode) -> BaseTranslator:
        model, is_guided = cast(EncoderDecoder, self.model), self.run.train.guided_alignment > 0
        translator = Translator(model, self.tokenizer, decode, is_guided=is_guided)
        if not self.others:
            return self.engine.translator(self.folder, translator)
        members = []
        for run in self.others:  # with the tokens that the texts of each begin and end with
            frame = {name: getattr(run.run.decode, name) for name in FRAME}
            members.append(run._translator(dataclasses.replace(decode, **frame)))
        return ensemble_of([translator, *members])

    def generator(self, warn: Callable[[str], None] = ignore, **changes: Any) -> BaseGenerator:
        """Continues texts."""
        self.require("generate")
        model, decode = cast(LanguageModel, self.model), self.decode(**changes)
        return self.engine.generator(self.folder, Generator(model, self.tokenizer, decode, warn))

    def encoder(self) -> TextEncoder:
        """Encodes texts: vectors, labels, words for masks."""
        self.require("encode")
        config: Any = self.run.model
        try:
            empty = SpecialTokens(self.tokenizer, self.run.decode).start
        except UserError:  # an imported tokenizer may lack a start token
            empty = None
        return TextEncoder(
            cast(Any, self.model),
            frame_for_model(self.tokenizer, self.run.decode, config),
            max_length=config.max_length,
            segments=segments_of(config),
            empty=empty,
            head=getattr(config, "head", None),
            device=self.device,
        )

    def labeller(self) -> Vit:
        """Classifies pictures."""
        self.require("label")
        if getattr(self.run.model, "head", None) is None:
            raise UserError(
                f"{self.folder} has no head for labels: train one on it, init={self.folder}"
            )
        return cast(Vit, self.model)

    def evaluate(self, data: Data, split: str, **options: Any) -> Scores:
        """The scores of the task on a split, each with its signature."""
        spec = TASKS.find(self.run.task, data, self.run.objective)
        refuse_unscored(self.run, str(self.folder))
        assert spec.evaluate is not None
        spec.check_scoring(options)
        return spec.evaluate(self, data, split, **options)

    def with_engine(self, engine: Engine) -> "LoadedRun":
        """The same, decoding with an engine."""
        model = self.model
        if engine.dtype == "bfloat16":
            model = copy.deepcopy(model).to(torch.bfloat16)
        return dataclasses.replace(self, model=model, engine=engine)

    def require(self, ability: Ability) -> None:
        """Refuse what the run's task does not offer."""
        if ability in self.run.spec.offers:
            return
        if ability == "encode":
            raise UserError(f"{self.folder} holds an image model, which reads no text: classify it")
        raise self.unsupported(*NEEDS[ability])

    def unsupported(self, does: str, needed: str) -> UserError:
        run, kind = self.run, self.run.model.kind
        trained = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} model"
        if run.task == "pretraining" and run.objective is not None:
            trained += f" that was pretrained (objective={run.objective.kind})"
            needed += " trained for it"
        return UserError(
            f"{self.folder} holds {trained}, but only {needed} {does}: choose another run"
        )


def _check_texts(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise UserError(f"pass a list of texts, [{texts!r}], not one text")
    return texts


def refuse_unscored(run: Run, name: str) -> None:
    """Refuse a run whose task has no evaluation."""
    if run.spec.evaluate is None:
        raise UserError(f"{name} {run.spec.no_scores}")


def ensemble(runs: Sequence[LoadedRun]) -> LoadedRun:
    """One model, or translators that decode together, with the settings of the first."""
    if len(runs) == 1:
        return runs[0]
    for run in runs:
        run.require("translate")
    first, *others = (run.with_engine(IN_TORCH) for run in runs)
    return dataclasses.replace(first, others=tuple(others))


def load_run(
    folder: Path,
    device: torch.device | str = "cpu",
    warn: Callable[[str], None] = ignore,
) -> LoadedRun:
    """The model in a folder; `warn` gets what an imported model does differently here.

    The device `auto` is a GPU if there is one that the folder's program can use.
    """
    exported = (folder / SETTINGS).is_file()
    has_config = any((folder / name).is_file() for name in (CONFIG, peft.CONFIG))
    if has_config and is_huggingface(folder):
        return _load_huggingface(folder, device, warn)
    for program, files in EXPORTS.items():
        if any((folder / file).is_file() for file in files):
            raise UserError(f"{folder} is an export: run it with {program}, or load its run")
    if has_config and not exported:
        import_model(folder)  # reports what its settings lack
    return load_torch_run(folder, device)


def read_model(name: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """The settings of a preset's model, or of that in a run folder or Hugging Face folder."""
    folder = Path(name)
    config: Any
    if (folder / SETTINGS).is_file():
        config = read_run(folder).model
    elif (folder / CONFIG).is_file():
        config = import_model(folder).model.config
    elif name in PRESETS or not folder.is_dir():
        config = preset(name)
    else:
        config = read_run(folder).model  # reports what is missing
    settings = [setting.removeprefix("model.") for setting in overrides]
    return cast(ModelConfig, override_all(config, settings))


def _load_huggingface(
    folder: Path, device: torch.device | str, warn: Callable[[str], None]
) -> LoadedRun:
    imported = import_model(folder)
    config: Any = imported.model.config
    check_vocabulary(folder, imported.tokenizer, config)
    if (folder / SETTINGS).is_file():
        # Weights may leave in another order of channels: the folder's own settings describe them.
        run = dataclasses.replace(read_run(folder), model=config)
    else:
        run = run_of(imported)
        for note in unsupported_generation(imported):
            warn(note)
    chosen = choose_device(str(device))
    model = cast(Model, imported.model)
    return LoadedRun(folder, run, imported.tokenizer, chosen, _on_device(model, chosen))


def load_torch_run(folder: Path, device: torch.device | str = "cpu") -> LoadedRun:
    """Rebuild the model of a run folder with its trained weights."""
    run = read_run(folder)
    weights = folder / checkpoint.WEIGHTS
    if not weights.exists() and (folder / checkpoint.STATE).exists():
        raise UserError(f"{folder} has no {checkpoint.WEIGHTS} yet: let it train to a validation")
    tensors, about = checkpoint.read_tensors(weights)
    if about.get("model") != model_digest(run.model):
        raise DataError(
            f"{weights} belongs to another model than {folder / SETTINGS} describes, or was "
            "written by an older version: run its train command again"
        )
    is_trained_here = run.tokens is not None
    tokenizer = read_tokenizer(folder) if is_trained_here else _tokenizer(folder)
    check_vocabulary(folder, tokenizer, run.model, own=is_trained_here)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    with SkipInit():
        model = run.model.build()
    model.to(torch.float64 if torch.float64 in dtypes else torch.float32)
    checkpoint.load_weights(model, tensors, weights)
    chosen = choose_device(str(device))
    return LoadedRun(folder, run, tokenizer, chosen, _on_device(model.eval(), chosen))


def _on_device(model: Model, device: torch.device) -> Model:
    """The model on a device, with fused modules on a GPU."""
    optimize(model.to(device))
    return model


def check_vocabulary(
    folder: Path, tokenizer: Tokenizer | None, model: ModelConfig, *, own: bool = False
) -> None:
    """Refuse a tokenizer of another model; an imported one may have fewer tokens."""
    size, rows = tokenizer.vocab_size if tokenizer else 0, model.vocab_size or 0
    if size > rows or (own and size < rows):
        raise DataError(
            f"{folder / TOKENIZER} has {size} tokens, the model {rows}: they do not belong together"
        )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return read_tokenizer(folder) if (folder / TOKENIZER).is_file() else None


def load(run: str | Path, device: str = "cpu", engine: str = "auto") -> LoadedRun:
    """Load a run or a Hugging Face folder.

    On a CPU the engine `auto` translates and generates with CTranslate2 if that gives the same.

    The result has `.model` (PyTorch), `.tokenizer`, `.run` (its settings) and, as its task allows,
    `.translate(texts)`, `.generate(prompts)`, `.embed(texts)`, `.classify(texts)` and
    `.fill_mask(texts)`.
    """
    loaded = load_run(Path(run), device).with_engine(Engine(engine))
    model: Any = loaded.model  # `to_huggingface` reads these
    model.tokenizer, model.run = loaded.own_tokenizer, loaded.run
    model.special = special_token_ids(loaded.own_tokenizer, loaded.run.decode, model)
    return loaded


def run_of(imported: ImportedModel) -> Run:
    """The settings of a run for an imported model, which decodes as it did elsewhere."""
    config: Any = imported.model.config
    return Run(
        task=TASKS.default(config),
        data=None,
        tokens=None,
        model=config,
        decode=decode_from_hf(imported),
    )


def import_notes(imported: ImportedModel) -> list[str]:
    """Remarks for the user on an imported model."""
    notes = unsupported_generation(imported)
    if imported.tokenizer is None and run_of(imported).spec.reads_text:
        notes.append(f"the folder has no {TOKENIZER}: put one next to the weights to use texts")
    return notes
