"""ELECTRA pretraining: a small generator and the discriminator, which is the model to keep."""

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
    """The generator fills masked tokens; the model detects which tokens were replaced.

    The two share token and learned position embeddings. The generator's width is `size` times the
    model's.
    """

    def __init__(self, model: Bert, size: float) -> None:
        super().__init__()
        if not isinstance(model.config.head, Detect):
            raise UserError("objective=replaced-token needs model.head=detect: set it")
        self.model = model
        self.generator = Bert(generator_config(model.config, size))
        # Not registered as submodules: shared tensors are saved and updated once.
        _borrow(self.generator, "tokens", model.tokens)
        if isinstance(model.encoder.position, LearnedPosition):
            _borrow(self.generator.encoder, "positions", model.encoder.positions)

    def fill(
        self, tokens: Tokens, positions: Int[Tensor, " n"], hidden: Hidden
    ) -> tuple[Tokens, Int[Tensor, " n"]]:
        """The tokens with the generator's samples at these (flat) positions, and the samples."""
        with torch.no_grad():
            logits = self.generator.logits(hidden.flatten(0, 1)[positions]).float()
            samples = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        return tokens.flatten().scatter(0, positions, samples).view_as(tokens), samples


def generator_config(config: BertConfig, size: float) -> BertConfig:
    """A narrower masked language model over the same embeddings."""
    head_dim = config.head_dim or config.dim // config.heads
    heads = max(1, round(config.heads * size))
    return dataclasses.replace(
        config,
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        kv_heads=None,
        ffn_dim=max(1, round((config.ffn_dim or 4 * config.dim) * size)),
        embed=dataclasses.replace(config.embed, dim=config.embed.width(config.dim)),
        head=Masked(),
        pooler=None,
        next_sentence=None,
    )


def _borrow(owner: nn.Module, name: str, module: nn.Module) -> None:
    delattr(owner, name)
    owner.__dict__[name] = module
