"""One run of a reader in the GLUE table of `tables.py`: pretrained, then fine-tuned."""

import json
import shlex
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.data.labelled import LabelledData
from manyheads.data.masking import Masked
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.models.bert import Bert, BertConfig
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.masks import causal, make_mask
from manyheads.recipes import read_recipe
from manyheads.run import Run, make_trainer, save_run
from manyheads.summary import BACKWARD, summarize
from table_runs import Asked, Row, fitted, lengths_seen, sizes, training_flops

UNLABELLED = """data.lines=sentences tokens=wordpiece tokens.vocab_size=8000
    model.max_length=128 train.batch_tokens=16384 train.schedule=linear train.warmup_steps=500
    train.validate_every=100000 train.save_every=100000 train.compile=no"""
MASKED = "objective.pairs=none model.pooler=none model.next_sentence=none"
PRETRAINED = {  # a recipe and its settings
    "elmo": ("elmo-mini", "train.learning_rate=3e-3"),
    "gpt": ("gpt-mini", "model.position=rotary train.learning_rate=1e-3"),
    "bert": ("bert-mini", f"{MASKED} train.learning_rate=1e-3"),
    "bert-large": (
        "bert-mini",
        f"{MASKED} model.dim=384 model.layers=8 model.heads=6 train.learning_rate=7e-4",
    ),
}
SCRATCH = "-scratch"
LSTM, STACK = "train.learning_rate=1e-3", "train.learning_rate=3e-4"
READERS = {  # which of them it is, and how it is fine-tuned
    "bilstm": (f"elmo{SCRATCH}", LSTM),
    "elmo": ("elmo", f"{LSTM} model.frozen=true"),  # as its paper does
    "elmo-tuned": ("elmo", LSTM),
    **{
        name: (name, STACK)
        for kind in ("gpt", "bert", "bert-large")
        for name in (f"{kind}{SCRATCH}", kind)
    },
}
TASKS = {
    "sst-2": "train.epochs=2 train.batch_rows=128",
    "mrpc": "train.epochs=5 train.batch_rows=32",
    "cola": "train.epochs=5 train.batch_rows=64",
}
QUIET = "train.validate_every=100000 train.save_every=100000 train.compile=no"


def pretrain(requested: Asked, name: str) -> Row:
    """Pretrain an encoder on unlabelled text in the folder --keep, and save its cost next to it."""
    earlier = saved(requested, name)
    if earlier is not None:
        return earlier
    settings = _pretraining(requested, name)
    reported: Row = {"table": "pretraining", "system": name, "command": _command(settings)}
    folder = requested.keep / name
    trainer = make_trainer(
        read_recipe(settings[0], settings[1:]), folder, torch.device(requested.device)
    )
    reported |= fitted(trainer)
    run = load_torch_run(folder).run
    length, seen = run.model.max_length, requested.steps * run.train.batch_tokens
    flops = training_flops(run.model, {"token": np.full(seen // length, float(length))})
    if isinstance(run.objective, Masked):  # the output layer is computed at masked positions only
        head = (1 + BACKWARD) * summarize(run.model, length).flops["token"]["head"]
        flops -= (1 - run.objective.rate) * head * seen
    reported |= {"flops": flops, **sizes(run.model)}
    (requested.keep / f"{name}.json").write_text(json.dumps(reported), "utf-8")
    return reported


def saved(requested: Asked, name: str) -> Row | None:
    """The cost of a finished pretraining, or None; an error if it had other settings."""
    beside = requested.keep / f"{name}.json"
    if not beside.is_file():
        return None
    reported: Row = json.loads(beside.read_text("utf-8"))
    if reported["command"] != _command(_pretraining(requested, name)):
        raise UserError(f"{beside} tells of another pretraining: choose another --keep")
    return reported


def _pretraining(requested: Asked, name: str) -> list[str]:
    """A recipe and its settings; from scratch is one step of it, which is as good as none."""
    kind = name.removesuffix(SCRATCH)
    recipe, local = PRETRAINED[kind]
    steps = requested.steps if name == kind else 1
    chosen = [f"data.folder={requested.text}", f"train.steps={steps}"]
    return [recipe, *UNLABELLED.split(), *local.split(), *chosen]


def _command(settings: list[str]) -> str:
    return shlex.join(["manyheads", "train", *settings])


def sentences(requested: Asked) -> str:
    """A folder with the training sentences of SST-2, as a text to pretrain on."""
    folder = requested.keep / "text"
    if not folder.is_dir():
        part = LabelledData(task="sst-2", folder=requested.folder).read("train")
        folder.mkdir(parents=True)
        (folder / "sst-2.txt").write_text("\n".join(map(str, part.texts)) + "\n", "utf-8")
    return str(folder)


class CausalReader(Bert):
    """A decoder that gives labels, as GPT is fine-tuned: the state of the last token has them."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.encoder = Stack(config, causal=True)
        initialise(self, config.init, config.layers)

    def hidden(
        self, tokens: Tensor, real: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        sight = make_mask(causal, tokens.shape[1], padding_mask=real, device=tokens.device)
        x = self.embedding(self.tokens, tokens, self.encoder.position, sight.query_positions)
        return self.encoder(x, sight)

    def pool(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        rows = torch.arange(len(hidden), device=hidden.device)
        last = hidden[:, -1] if real is None else hidden[rows, real.sum(1) - 1]
        return super().pool(last[:, None])  # the pooler reads the first of what it is given


class CausalConfig(BertConfig):
    """An encoder's settings, of a decoder."""

    def build(self) -> Bert:
        return CausalReader(self)


def begin(requested: Asked, name: str, seed: int, out: Path) -> Path:
    """The folder of the model to fine-tune; from scratch, with new random weights.

    `manyheads train classify` begins with no decoder: its weights go into a folder of an encoder.
    """
    kind = name.removesuffix(SCRATCH)
    if saved(requested, kind) is None:
        raise UserError(f"{requested.keep} has no {kind}: it could not be pretrained")
    opened = load_torch_run(requested.keep / kind)
    if name == kind != "gpt":
        return opened.folder
    run, model = opened.run, opened.model
    if name != kind:
        torch.manual_seed(seed)
        model = run.model.build()
    if kind == "gpt":
        run, model = _as_encoder(run, model)
    save_run(run, opened.tokenizer, model, out)
    return out


def _as_encoder(run: Run, decoder: nn.Module) -> tuple[Run, nn.Module]:
    """The weights of a decoder under an encoder's names, to be read by a `CausalReader`."""
    sized = {field.name: getattr(run.model, field.name) for field in fields(Architecture)}
    config = BertConfig(**sized, head=None)
    model, weights = config.build(), decoder.state_dict()
    renamed = {name.replace("decoder.", "encoder.", 1): weights[name] for name in weights}
    model.load_state_dict({name: renamed[name] for name in model.state_dict()})
    return Run(task="text", data=None, tokens=None, model=config), model


def classify(requested: Asked, system: str, task: str, seed: int) -> Row:
    """Fine-tune a reader on a task, and score it on the validation rows."""
    name, local = READERS[system]
    kind = name.removesuffix(SCRATCH)
    settings = [*TASKS[task].split(), *QUIET.split(), *local.split(), f"data.task={task}"]
    settings += [f"data.folder={requested.folder}", *requested.more, f"seed={seed}"]
    with tempfile.TemporaryDirectory() as scratch:
        start, folder = begin(requested, name, seed, Path(scratch) / name), Path(scratch) / "run"
        run = read_recipe("classify", [f"model={start}", *settings])
        if kind == "gpt":
            run = replace(run, model=CausalConfig(**vars(run.model)))
        trainer = make_trainer(run, folder, torch.device(requested.device))
        cost = fitted(trainer)
        opened = replace(load_torch_run(folder, requested.device), model=trainer.saved_model.eval())
        data: Any = run.data
        scores = opened.evaluate(data, "valid")
    del cost["valid_loss"]  # the best, and the scores are of the last weights
    reads: Any = trainer.task
    texts = lengths_seen(reads.order, cost["steps"], {"token": reads.data.tokens})
    named = {"table": "glue", "system": system, "task": task, "seed": seed}
    return {
        **named,
        **sizes(opened.run.model),
        "flops": training_flops(opened.run.model, texts),
        **cost,
        "scores": {metric: value for metric, value in scores.items() if isinstance(value, float)},
        "signature": scores["signature"],
        "begins_with": name,
        "commands": _commands(requested, name, settings),
    }


def _commands(requested: Asked, name: str, settings: list[str]) -> list[str]:
    """The equivalent commands: a pretraining and, except for a decoder, its fine-tuning."""
    folder = str(requested.keep / name)
    before = [*_pretraining(requested, name), "--out", folder]
    if name.startswith("gpt"):
        return [_command(before)]
    return [_command(before), _command(["classify", f"model={folder}", *settings])]
