"""`attend` and `attention_weights`: attention as functions of head tensors, with parts by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    Dense,
    Fused,
    check_combination,
)
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import AttentionMask, Causal, Full, Rule, full
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Position, PositionConfig, PositionSizes
from manyheads.nn.scores import InnerScore, ScaledDot, Score, ScoreConfig
from manyheads.nn.shapes import HeadOutput, Keys, PaddingMask, Queries, Values, Weights
from manyheads.nn.tiled import Tiled

AttentionFunctionConfig = (
    Dense | Fused | Tiled | Local | Longformer | MemoryCompressed | Linformer | Performer
)


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    score: Score | ScoreConfig | str = "scaled-dot",
    rule: Rule | str = full,
    real: PaddingMask | None = None,
    position: Position | PositionConfig | str = "none",
    implementation: AttentionFunction | AttentionFunctionConfig | str = "dense",
    scale: float | None = None,
    core: AttentionFunction | AttentionFunctionConfig | str | None = None,
) -> HeadOutput:
    """softmax(score(q, k)) · v with any score, mask rule, position and attention implementation.

    Queries are at the last positions of the keys, as in a cached step. `real` is the padding mask
    of the keys. Positions that are added to embeddings (sinusoidal, learned) change nothing here.
    Pass a part that has weights as a built module. `scale` replaces the 1/√c of the scaled dot
    product. `core` is the former name of `implementation`.
    """
    inputs = _inputs(q, k, v, score, rule, real, position, scale)
    sizes = AttentionSizes(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        key_dim=k.shape[3],
        max_length=k.shape[2],
        causal=inputs.mask.rule.is_causal,
    )
    function: AttentionFunction = _build(
        implementation if core is None else core,
        AttentionFunctionConfig,
        "implementation",
        lambda settings: settings.build(sizes),
    )
    check_combination(function, inputs.score, inputs.position)
    return function(inputs)


def attention_weights(
    q: Queries,
    k: Keys,
    *,
    score: Score | ScoreConfig | str = "scaled-dot",
    rule: Rule | str = full,
    real: PaddingMask | None = None,
    position: Position | PositionConfig | str = "none",
    scale: float | None = None,
) -> Weights:
    """The weights with which `attend` averages the values."""
    no_values = q.new_empty(*k.shape[:3], q.shape[3])
    inputs = _inputs(q, k, no_values, score, rule, real, position, scale)
    check_combination(Dense(), inputs.score, inputs.position)
    return Dense().weights(inputs)


def _inputs(
    q: Queries,
    k: Keys,
    v: Values,
    score: Score | ScoreConfig | str,
    rule: Rule | str,
    real: PaddingMask | None,
    position: Position | PositionConfig | str,
    scale: float | None,
) -> AttentionInputs:
    (_, heads, queries, head_dim), length = q.shape, k.shape[2]
    rule = parse(Full | Causal, rule, "rule") if isinstance(rule, str) else rule
    sizes = PositionSizes(
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        max_length=length,
        causal=rule.is_causal,
    )
    score_module: Score = _build(
        score, ScoreConfig, "score", lambda config: config.build(heads, head_dim).to(q)
    )
    position_module: Position = _build(
        position, PositionConfig, "position", lambda config: config.build(sizes).to(q)
    )
    if scale is not None:
        if type(score_module) is not InnerScore:
            raise UserError("scale replaces the factor of a dot product: use a dot score")
        score_module = ScaledDot(scale=scale).build(heads, head_dim)
    key_positions = torch.arange(length, device=q.device)[None]
    query_positions = torch.arange(length - queries, length, device=q.device)[None]
    mask = AttentionMask(rule, query_positions, key_positions, real, square=queries == length)
    q = position_module.rotate(q, query_positions)
    k = position_module.rotate(k, key_positions)
    return AttentionInputs(q, k, v, mask, score_module, position_module)


def _build(part: Any, settings: Any, name: str, build: Callable[[Any], Any]) -> Any:
    """A part given by name, as settings or built.

    Weights would be drawn again in each call, so parts with weights must be built by the caller;
    so must implementations that differ between layers.
    """
    if isinstance(part, str):
        part = parse(settings, part, name)
    if not isinstance(part, settings):
        return part
    built = build(part)
    stateless = isinstance(built, nn.Module) and not built.state_dict()
    if built is not part and not stateless:
        raise UserError(
            f"{name}={part.kind} has weights or differs between layers: build it once and pass "
            f"that, e.g. {name}={type(part).__name__}().build(...)"
        )
    return built
