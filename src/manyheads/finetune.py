"""Start from a trained model: its stacks stay, the heads on top may change."""

from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from manyheads.config import dump
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Pooler
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import resize_weights
from manyheads.nn.block import Architecture
from manyheads.nn.positions import Learned
from manyheads.presets import ModelConfig
from manyheads.run import Run, differences

# Parts that may be new on a model that was trained for something else.
ON_TOP = ("head.", "pooler.", "next_sentence.")
# Settings that do not change what trained weights mean.
FREE_SETTINGS = {
    *("head", "pooler", "next_sentence", "max_length", "image_size", "init", "attention"),
    *("dropout", "attention_dropout", "frozen"),
}
# The encoder of an encoder–decoder, or a decoder, as an encoder-only model names its parts.
STACK_NAMES = {
    Seq2SeqConfig: {
        "tokens.": "tokens.",
        "encoder_embedding.": "embedding.",
        "encoder.": "encoder.",
    },
    GptConfig: {"tokens.": "tokens.", "embedding.": "embedding.", "decoder.": "encoder."},
}


def finetune_config(config: ModelConfig, run: Run, folder: str) -> ModelConfig:
    """The settings of a trained model, with the heads that the run's task needs."""
    is_decoder = isinstance(run.model, BertConfig) and isinstance(config, GptConfig)
    if starts_from_encoder_decoder(run.model, config) or (
        is_decoder and GptConfig in run.spec.finetunes
    ):
        config = encoder_only(config)
    if type(config) is not type(run.model) and not isinstance(config, run.spec.finetunes):
        kind = run.model.kind
        raise UserError(
            f"{folder} holds a {config.kind} model, and task={run.task} begins with a "
            f"{kind} one" + (" or an encoder–decoder" if kind == "bert" else "")
        )
    adapted: ModelConfig = run.spec.finetune(config, run)
    return adapted


def starts_from_encoder_decoder(model: ModelConfig, start: ModelConfig) -> bool:
    """True if an encoder-only model takes the encoder of an encoder–decoder."""
    return isinstance(model, BertConfig) and isinstance(start, Seq2SeqConfig)


def refuse_changes(run: Run, trained: ModelConfig) -> None:
    """Refuse settings that would change what the trained weights mean."""
    for change in differences(dump(run.model), dump(trained), "model."):
        name = change.partition(" ")[0]
        position = getattr(trained, "position", None)  # a recurrent model has none
        table = name.endswith("max_length") and isinstance(position, Learned)
        if table or not FREE_SETTINGS & {*name.split(".")}:
            raise UserError(
                f"{run.init} stays as it was trained ({change}): leave out "
                f"{name.removesuffix('.kind')}"
            )


def encoder_only(config: Any) -> BertConfig:
    """The encoder of an encoder–decoder, or a decoder.

    No position of an encoder was trained as a summary: pool the mean. The last position of a
    decoder has seen the text.
    """
    is_decoder = isinstance(config, GptConfig)
    stack = config if is_decoder else config.encoder.of(config)
    settings = {field.name: getattr(stack, field.name) for field in fields(Architecture)}
    pooler = None if is_decoder else Pooler(over="mean")
    return BertConfig(**settings, head=None, pooler=pooler, causal=is_decoder)


def load_pretrained(model: nn.Module, start: LoadedRun) -> None:
    """Copy the trained weights into a new model; new parts on top keep their initial weights.

    A head comes along if it has the same kind and the same labels. Learned positions of images
    are interpolated to another size.
    """
    config: Any = model.config
    before: Any = start.run.model
    tensors = dict(start.model.state_dict())
    if hasattr(config, "image_size"):
        tensors = resize_weights(tensors, before, config)
    if _question(config) != _question(before):
        tensors = {name: tensors[name] for name in tensors if not name.startswith("head.")}
    if isinstance(config, BertConfig) and type(before) in STACK_NAMES:
        tensors = _stack_weights(tensors, STACK_NAMES[type(before)])
    weights = model.state_dict()
    for name, tensor in weights.items():
        trained = tensors.get(name)
        if trained is not None and trained.shape == tensor.shape:
            weights[name] = trained.to(tensor.dtype)
        elif not name.startswith(ON_TOP):
            was = "missing" if trained is None else f"of {list(trained.shape)}"
            raise UserError(
                f"{start.folder} does not fit this model: {name} is {was}, not of "
                f"{list(tensor.shape)}: leave out settings of its sizes"
            )
    model.load_state_dict(weights)


def _question(config: Any) -> tuple[str, tuple[str, ...]] | None:
    """The kind of a head and its labels; a language model's output layer is not one."""
    head = getattr(config, "head", None)
    return None if head is None else (head.kind, getattr(head, "labels", ()))


def _stack_weights(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in tensors.items()
        for theirs, ours in names.items()
        if name.startswith(theirs)
    }
