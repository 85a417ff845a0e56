"""ELECTRA while it is pretrained: a small generator beside the encoder that is to be used."""

import dataclasses

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.heads import Detect, Masked
from manyheads.nn.positions import LearnedPosition
from manyheads.nn.shapes import Hidden, Tokens


class Electra(nn.Module):
    """A generator fills the masks, the model finds what it replaced.

    The two share the vectors of tokens and of learned positions. The generator is `share` as wide
    as the model; only the model is kept once both are trained.
    """

    def __init__(self, model: Bert, share: float) -> None:
        super().__init__()
        if not isinstance(model.config.head, Detect):
            raise UserError("objective=replaced trains a model that detects: set model.head=detect")
        self.model = model
        self.generator = Bert(generator_of(model.config, share))
        # Held without being registered: a tensor that two share is saved and updated once.
        _borrow(self.generator, "tokens", model.tokens)
        if isinstance(model.encoder.position, LearnedPosition):
            _borrow(self.generator.encoder, "positions", model.encoder.positions)

    def fill(
        self, tokens: Tokens, places: Int[Tensor, " n"], hidden: Hidden
    ) -> tuple[Tokens, Int[Tensor, " n"]]:
        """The tokens with what the generator draws at the (flat) places; and what it drew."""
        with torch.no_grad():
            logits = self.generator.logits(hidden.flatten(0, 1)[places]).float()
            drawn = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        return tokens.flatten().scatter(0, places, drawn).view_as(tokens), drawn


def generator_of(config: BertConfig, share: float) -> BertConfig:
    """A narrower masked language model over the same tables."""
    head_dim = config.head_dim or config.dim // config.heads
    heads = max(1, round(config.heads * share))
    return dataclasses.replace(
        config,
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        kv_heads=None,
        ffn_dim=max(1, round((config.ffn_dim or 4 * config.dim) * share)),
        embed=dataclasses.replace(config.embed, dim=config.embed.width(config.dim)),
        head=Masked(),
        pooler=None,
        next_sentence=None,
    )


def _borrow(owner: nn.Module, name: str, module: nn.Module) -> None:
    delattr(owner, name)
    owner.__dict__[name] = module
