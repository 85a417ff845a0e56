"""Import and export: Hugging Face, CTranslate2, ONNX. Only here are names of other projects."""

from torch import nn

from manyheads.errors import UserError
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import SelfAttention

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"  # files of exchange/onnx.py


def refuse_approximations(model: nn.Module) -> None:
    """Refuse attention implementations that approximate: no other program has them."""
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention) and not module.config.core.exact:
            config, side = model.config, name.split(".")[0]
            overridden = isinstance(config, Seq2SeqConfig) and getattr(config, side).attention
            raise UserError(
                f"model.{f'{side}.' if overridden else ''}attention={module.config.core.kind} "
                "cannot be exported: export a model trained with exact attention "
                "(model.attention=fused)"
            )
