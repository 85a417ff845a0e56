"""The channels of the residual stream in another order: the same model in other numbers.

Nothing in a Transformer knows the order of the stream's channels but the sinusoids that are
added to it. Interleaved they are sin, cos, sin, cos, …; in halves all sines come before all
cosines. What reads the stream takes its columns in the new order, what writes to it its rows.
"""

import dataclasses
import re

import torch
from torch import Tensor

from manyheads.errors import UserError
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.nn.block import on_meta
from manyheads.nn.positions import Sinusoidal

READS = re.compile(
    r"(^|\.)((target_)?tokens|segment|(attention|cross)\.(project|query)"
    r"|feedforward\.(inner|gate))\.weight$|norm\.(weight|bias)$|^head\.weight$"
)
WRITES = re.compile(r"\.((attention|cross)\.output|feedforward\.outer)\.(weight|bias)$")


def is_interleaved(config: Seq2SeqConfig) -> bool:
    """Whether all positions of a model are interleaved sinusoids, added at its full width."""
    position = config.position
    alone = config.encoder.position is None and config.decoder.position is None
    waves = isinstance(position, Sinusoidal) and position.layout == "interleaved"
    return waves and alone and config.embed.width(config.dim) == config.dim


def with_halves(config: Seq2SeqConfig) -> Seq2SeqConfig:
    """The same settings, the sines before the cosines."""
    if not isinstance(config.position, Sinusoidal):
        raise UserError(f"model.position={config.position.kind} has no sines and cosines to part")
    return dataclasses.replace(
        config, position=dataclasses.replace(config.position, layout="halves")
    )


def in_halves(model: Seq2Seq) -> Seq2Seq:
    """A model that says the same, with sinusoids in halves instead of interleaved."""
    if not is_interleaved(model.config):
        raise UserError("only a model whose one position is interleaved sinusoids has halves")
    channels = torch.arange(model.config.dim)
    order = torch.cat([channels[0::2], channels[1::2]])
    with on_meta():
        turned = with_halves(model.config).build()
    state = {name: _turn(name, tensor, order) for name, tensor in model.state_dict().items()}
    turned.load_state_dict(state, assign=True)
    return turned.train(model.training)


def _turn(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    order = order.to(tensor.device)
    if WRITES.search(name):
        return tensor.index_select(0, order)
    return tensor.index_select(-1, order) if READS.search(name) else tensor.clone()
