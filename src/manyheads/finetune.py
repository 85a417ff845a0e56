"""Beginning with a model that is trained already: its stack stays, what stands on it may change."""

import dataclasses
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from manyheads.baselines.elmo import Elmo, ElmoConfig
from manyheads.config import dump
from manyheads.data import masking
from manyheads.errors import UserError
from manyheads.loading import TorchRun
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.heads import Classify, Detect, Masked, Pooler, Tag
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import Vit, VitConfig, resized_weights
from manyheads.nn.block import Architecture
from manyheads.nn.positions import Learned
from manyheads.presets import ModelConfig
from manyheads.run import Run, differences

# What may be new on a model that was trained for something else.
ON_TOP = ("head.", "pooler.", "next_sentence.")
# Settings that change nothing of what trained weights mean.
SET_ANEW = {
    *("head", "pooler", "next_sentence", "max_length", "image_size", "initial", "core"),
    *("dropout", "attention_dropout", "frozen"),
}


def adapted(config: ModelConfig, run: Run, folder: str) -> ModelConfig:
    """The settings of a trained model, for what the run wants of it."""
    wanted = run.model
    if isinstance(config, ElmoConfig) and run.task == "classification":
        return dataclasses.replace(config, head=Classify())
    if isinstance(wanted, BertConfig) and isinstance(config, Seq2SeqConfig):
        config = encoder_alone(config)
    if config.kind != wanted.kind:
        raise UserError(
            f"{folder} holds a {config.kind} model, and task={run.task} begins with a "
            f"{wanted.kind} one" + (" or an encoder–decoder" if wanted.kind == "bert" else "")
        )
    if isinstance(config, VitConfig):
        return dataclasses.replace(config, head=Classify())
    if not isinstance(config, BertConfig) or not isinstance(wanted, BertConfig):
        return config
    fresh: dict[str, Any] = {"initial": "normal"}  # small numbers for what is new on top
    if run.task == "classification":
        pooler = config.pooler or Pooler(over="first")
        return dataclasses.replace(
            config, head=Classify(), pooler=pooler, next_sentence=None, **fresh
        )
    kind = Detect if isinstance(run.objective, masking.Replaced) else Masked
    head = config.head if isinstance(config.head, kind) else kind()
    paired = isinstance(run.objective, masking.Masked) and run.objective.pairs == "next-sentence"
    fresh["pooler"] = config.pooler or (wanted.pooler if paired else None)
    fresh["next_sentence"] = wanted.next_sentence if paired else None
    return dataclasses.replace(config, head=head, **fresh)


def refuse_changes(run: Run, trained: ModelConfig) -> None:
    """Refuse settings by which the weights that the run begins with would mean something else."""
    for change in differences(dump(run.model), dump(trained), "model."):
        name = change.partition(" ")[0]
        position = getattr(trained, "position", None)  # a recurrent model has none
        table = name.endswith("max_length") and isinstance(position, Learned)
        if table or not SET_ANEW & {*name.split(".")}:
            raise UserError(
                f"{run.start} stays as it was trained ({change}): leave out "
                f"{name.removesuffix('.kind')}"
            )


def encoder_alone(config: Seq2SeqConfig) -> BertConfig:
    """The encoder of an encoder–decoder; nothing in its training made one position a summary."""
    shared = config.encoder.of(config)
    own = {field.name: getattr(shared, field.name) for field in fields(Architecture)}
    return BertConfig(**own, head=None, pooler=Pooler(over="mean"))


def give_weights(model: nn.Module, start: TorchRun) -> None:
    """Put the trained weights into a new model; what is new on top keeps its first ones.

    A head comes along where it answers the same question: of its kind, with the same labels.
    Learned positions of images are interpolated where theirs have another size.
    """
    tensors = dict(start.model.state_dict())
    if isinstance(model, Vit) and isinstance(start.run.model, VitConfig):
        tensors = resized_weights(tensors, start.run.model, model.config)
    if isinstance(model, Bert | Vit | Elmo) and _question(model.config) != _question(
        start.run.model
    ):
        tensors = {name: tensors[name] for name in tensors if not name.startswith("head.")}
    if isinstance(model, Bert) and isinstance(start.run.model, Seq2SeqConfig):
        tensors = _of_encoder(tensors)
    wanted = model.state_dict()
    for name, tensor in wanted.items():
        given = tensors.get(name)
        if given is not None and given.shape == tensor.shape:
            wanted[name] = given.to(tensor.dtype)
        elif not name.startswith(ON_TOP):
            was = "missing" if given is None else f"of {list(given.shape)}"
            raise UserError(
                f"{start.folder} does not fit this model: {name} is {was}, not of "
                f"{list(tensor.shape)}; leave the sizes of the model as they are there"
            )
    model.load_state_dict(wanted)


def _question(config: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    """The kind of the head and what it may answer."""
    if not isinstance(config, BertConfig | VitConfig | ElmoConfig) or config.head is None:
        return None
    return config.head.kind, config.head.labels if isinstance(config.head, Classify | Tag) else ()


def _of_encoder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {"tokens.": "tokens.", "encoder_embedding.": "embedding.", "encoder.": "encoder."}
    return {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in tensors.items()
        for theirs, ours in renamed.items()
        if name.startswith(theirs)
    }
