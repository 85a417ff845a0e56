"""The output head of a model as parts: logits and probabilities."""

from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.models.heads import DetectHead, LabelHead, MaskedHead
from manyheads.nn.layers import LMHead
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web import formulas
from manyheads.web.forward import TOP
from manyheads.web.trace import Calls, Column, Labels, Part

Scores = Float[Tensor, "t v"]


def distribution(logits: Scores) -> Scores:
    """P(i) = exp(z_i) / Σ_j exp(z_j)"""
    return logits.softmax(-1)


def replaced(logits: Scores) -> Scores:
    """σ(z) = 1 / (1 + exp(−z))"""
    return logits.sigmoid()


def head_parts(model: Any, column: Column, seen: Calls, tokenizer: Tokenizer) -> list[Part]:
    """The parts of the output head; empty if the model has none."""
    head = dict(model.named_children()).get("head")
    if head is None or head not in seen:
        return []
    scores = seen[head].output[0].float().cpu()
    if isinstance(head, LMHead | MaskedHead):
        return _of_tokens(head, scores, column, seen, tokenizer)
    if isinstance(head, DetectHead):
        formula = "z = act(h W + b) w + b"
        return _of_labels(column, scores[:, None], ("replaced",), formula, head)
    if isinstance(head, LabelHead):
        labels = tuple(model.config.head.labels)
        if not head.pooled:
            return _of_labels(column, scores, labels, "z = h W + b", head)
        pooled_states = seen[head].args[0].float().cpu()
        formula = "h of the first position, or the output of the pooler"
        code = (model.pool,)
        pooled = Part(
            f"{column.name}.pooled", "Pooled", "t d", pooled_states, formula, code, ("text",)
        )
        return [pooled, *_of_labels(column, scores[None], labels, "z = h W + b", head)]
    return []


def _of_labels(
    column: Column, scores: Scores, labels: tuple[str, ...], formula: str, head: nn.Module
) -> list[Part]:
    rows: Labels = column.name if len(scores) == len(column.ids) else ("text",)
    name = f"{column.name}.logits"
    logits = Part(name, "Logits", "t v", scores, formula, (head.forward,), rows, labels)
    if isinstance(head, LabelHead) and len(labels) == 1:
        return [logits]  # regression
    activation = replaced if isinstance(head, DetectHead) else distribution
    return [logits, _as_probabilities(logits, activation(scores), activation)]


def _of_tokens(
    head: LMHead | MaskedHead, logits: Scores, column: Column, seen: Calls, tokenizer: Tokenizer
) -> list[Part]:
    """The most probable tokens of each position, best first."""
    before, last = [], head
    if isinstance(head, MaskedHead):
        entered, formula = seen[head.norm].output[0].float().cpu(), "h ← Norm(act(h W + b))"
        place, code = f"{column.name}.head", (head.enter,)
        before.append(Part(place, "Head", "t d", entered, formula, code, column.name))
        last = head.output
    assert isinstance(last, LMHead)
    probabilities, ids = distribution(logits).topk(min(TOP, logits.shape[-1]))
    best = Part(
        name=f"{column.name}.logits",
        title="Logits",
        axes="t v",
        tensor=logits.gather(-1, ids),
        formula=formulas.logits(last),
        code=(last.forward,),
        # The source positions of a decoder-only translator have no logits.
        rows=tuple(tokenizer.subwords(column.ids[-len(logits) :])),
        columns=tuple(str(rank) for rank in range(1, ids.shape[1] + 1)),
        words=tuple(tuple(tokenizer.subwords(row)) for row in ids.tolist()),
        all=logits.shape[-1],
    )
    return [*before, best, _as_probabilities(best, probabilities, distribution)]


def _as_probabilities(logits: Part, probabilities: Tensor, function: Any) -> Part:
    name = logits.name.replace(".logits", ".distribution")
    formula = str(function.__doc__)
    return replace(
        logits,
        name=name,
        title="Distribution",
        tensor=probabilities,
        formula=formula,
        code=(function,),
    )
