"""The command that computes the cost of a training on many devices: plan."""

from pathlib import Path
from typing import Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import check_image, print_json, say, write
from manyheads.errors import UserError

_DEVICES = "Devices"
_BATCH = "Batch"


def plan(
    name: Annotated[str, argument("MODEL", "A preset or a recipe")],
    overrides: options.Overrides = None,
    devices: Annotated[int, option("Number of devices", panel=_DEVICES)] = 1,
    device_kind: Annotated[
        str, option("a100, h100, h200 or rtx4090", metavar="NAME", panel=_DEVICES)
    ] = "h100",
    per_node: Annotated[int, option("Devices of a node", panel=_DEVICES)] = 8,
    parallel: Annotated[
        str, option("ddp, fsdp or hsdp (a copy in each node)", metavar="NAME", panel=_DEVICES)
    ] = "fsdp",
    shard: Annotated[
        int | None, option("Devices that share a copy of the weights", panel=_DEVICES)
    ] = None,
    tokens: Annotated[float | None, option("Tokens of the training", metavar="X")] = None,
    length: Annotated[
        int | None, option("Tokens of a text [default: model.max_length]", panel=_BATCH)
    ] = None,
    micro_batch: Annotated[
        int | None, option("Texts of a device's micro-batch [default: 1]", panel=_BATCH)
    ] = None,
    accumulate: Annotated[int, option("Micro-batches in a step", panel=_BATCH)] = 1,
    checkpointing: Annotated[
        bool, option("Activation checkpointing", "--checkpointing", panel=_BATCH)
    ] = False,
    plot: Annotated[Path | None, options.plot_option("Plot memory and speed by devices")] = None,
    as_json: options.Json = False,
) -> None:
    """Memory, traffic, time and cost of a training on many GPUs.

    Examples
      $ manyheads plan gpt3-13b --devices 64 --tokens 260e9 --checkpointing
      $ manyheads plan gpt3-xl --devices 8 --device-kind a100 --parallel ddp

    Nothing is trained or measured. docs/scale.md has the model, its constants and its
    error against published figures.
    """
    from manyheads.lab.plan import Setup, model_of, plan_training, plot_devices

    check_image("--plot", plot)
    config, is_checkpointed = model_of(name, overrides or [])
    layout: Any = parallel  # checked by Setup
    setup = Setup(
        device_kind=device_kind,
        devices=devices,
        per_node=per_node,
        layout=layout,
        shard=shard,
        length=length,
        micro_batch=1 if micro_batch is None else micro_batch,
        accumulate=accumulate,
        checkpointed=float(checkpointing or is_checkpointed),
    )
    result = plan_training(config, setup)
    if as_json:
        print_json({"name": name, **result.as_dict(tokens)})
    else:
        write(result.text(tokens))
    if plot is not None:
        try:
            plot_devices(config, setup, plot)
            say(f"plot: {plot}")
        except UserError as error:  # no matplotlib: the result is printed all the same
            say(str(error))
