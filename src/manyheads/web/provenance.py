"""Where a number of the Flow page comes from: the terms of the sum that makes one cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.attention import CrossAttention
from manyheads.nn.block import Model
from manyheads.nn.layers import FeedForward, GatedFeedForward, NoResidual, Residual
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.web.trace import stacks
from manyheads.web.traces import Trace

MOST_TERMS = 6  # terms returned, largest first; the others come as one number
KINDS = ("self", "cross", "feedforward")


@dataclass(frozen=True)
class Cell:
    """A cell of a box: the box's name, layer and head, row and column."""

    box: str
    layer: int
    head: int
    row: int
    column: int


@dataclass(frozen=True)
class Terms:
    """Factors `left` · `right` with a label each, plus `added` numbers; `then` is applied last.

    `own` is the term of the cell itself: it is shown first, however small.
    """

    rule: str
    left: Tensor
    right: Tensor
    labels: Sequence[str]
    added: tuple[tuple[str, float], ...] = ()
    then: str = ""
    result: float | None = None
    own: int | None = None

    def json(self) -> dict[str, Any]:
        products = (self.left * self.right).double()
        order = products.abs().argsort(descending=True).tolist()
        if self.own is not None:
            order.remove(self.own)
            order.insert(0, self.own)
        shown = order[:MOST_TERMS]
        numbers = (self.left.tolist(), self.right.tolist(), products.tolist())
        total = float(products.sum()) + sum(value for _, value in self.added)
        return {
            "rule": self.rule,
            "terms": [
                {"label": self.labels[at], "index": at}
                | dict(zip(("left", "right", "value"), (n[at] for n in numbers), strict=True))
                for at in shown
            ],
            "others": {
                "count": len(order) - len(shown),
                "value": float(products[order[MOST_TERMS:]].sum()),
            },
            "added": [{"label": label, "value": value} for label, value in self.added],
            "sum": total,
            "then": self.then,
            "total": total if self.result is None else self.result,
        }


class Provenance:
    """The terms of a cell, from the tensors of a trace and the weights of its model."""

    def __init__(self, trace: Trace, model: Model, cell: Cell) -> None:
        self.tensors, self.cell = trace.tensors, cell
        self.stack, _, rest = cell.box.partition(".")
        self.kind, _, self.what = rest.rpartition(".")
        self.tokens = {item["name"]: item["tokens"] for item in trace.manifest["columns"]}
        embedding, stack = next((e, s) for name, e, s in stacks(model) if name == self.stack)
        self.embedding, self.modules = embedding, stack
        blocks: Any = stack.blocks
        self.layer = min(cell.layer, len(blocks) - 1)
        self.block = blocks[self.layer]

    def terms(self) -> Terms | None:
        """None if the cell is no sum of shown numbers, as a position embedding."""
        if self.kind in ("self", "cross"):
            return self._attention()
        if self.kind == "feedforward":
            return self._feedforward()
        if (self.kind, self.what) == ("", "input"):
            return self._embedded()
        if self.what == "states":
            last = self._after(self._kinds()[-1])[-1]
            return self._norm(self.modules.last_norm, last[self.cell.row])
        return None

    def _kinds(self) -> list[str]:
        return [kind for kind in KINDS if f"{self.stack}.{kind}.sum" in self.tensors]

    def _residual(self, kind: str) -> Residual:
        names = {"self": "attention_residual", "cross": "cross_residual"}
        module: Residual = getattr(self.block, names.get(kind, "feedforward_residual"))
        return module

    def _after(self, kind: str) -> Tensor:
        """The residual stream after a sub-layer, for all layers."""
        what = "sum" if self._residual(kind).placement == "pre" else "norm"
        return self.tensors[f"{self.stack}.{kind}.{what}"]

    def _before(self) -> Tensor:
        """The residual stream that enters the sub-layer of the cell."""
        kinds = self._kinds()
        at = kinds.index(self.kind)
        if at == 0:
            return self.tensors[f"{self.stack}.layer.input"][self.layer]
        return self._after(kinds[at - 1])[self.layer]

    def _entered(self) -> Tensor:
        """The input of the sub-layer: after its norm with pre-norm."""
        if self._residual(self.kind).placement == "pre":
            return self.tensors[f"{self.stack}.{self.kind}.norm"][self.layer]
        return self._before()

    def _part(self, what: str) -> Tensor | None:
        """A tensor of the same sub-layer, layer and head."""
        tensor = self.tensors.get(f"{self.stack}.{self.kind}.{what}")
        if tensor is None:
            return None
        tensor = tensor[self.layer]
        return tensor[min(self.cell.head, len(tensor) - 1)] if tensor.ndim == 3 else tensor

    def _value(self, what: str) -> float | None:
        tensor = self._part(what)
        return None if tensor is None else float(tensor[self.cell.row, self.cell.column])

    def _embedded(self) -> Terms | None:
        if not isinstance(self.embedding.norm, nn.Identity) or not isinstance(
            self.embedding.project, nn.Identity
        ):
            return None
        names = [name for name in ("embedding", "position", "segment") if self._has(name)]
        values = [
            float(self.tensors[f"{self.stack}.{n}"][self.cell.row, self.cell.column]) for n in names
        ]
        return _sum("x = " + " + ".join(names), list(zip(names, values, strict=True)))

    def _has(self, name: str) -> bool:
        return f"{self.stack}.{name}" in self.tensors

    def _shared(self) -> Terms | None:
        """Norm and residual sum, which every sub-layer has."""
        row, column = self.cell.row, self.cell.column
        residual = self._residual(self.kind)
        if self.what == "norm":
            before = self._before()
            if residual.placement == "post":
                before = self.tensors[f"{self.stack}.{self.kind}.sum"][self.layer]
            return self._norm(residual.norm, before[row])
        if isinstance(residual, NoResidual):
            return None
        output = self.tensors[f"{self.stack}.{self.kind}.output"][self.layer]
        x = float(self._before()[row, column])
        return _sum("x + output", [("x", x), ("output", float(output[row, column]))])

    def _norm(self, norm: Any, x: Tensor) -> Terms | None:
        column = self.cell.column
        if isinstance(norm, nn.LayerNorm):
            unit = (x[column] - x.mean()) / (x.var(correction=0) + norm.eps).sqrt()
            name = "(x − μ) / σ"
        elif isinstance(norm, nn.RMSNorm):
            epsilon = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
            unit, name = x[column] / (x.square().mean() + epsilon).sqrt(), "x / rms"
        else:
            return None
        if norm.weight is None:
            return None
        scale = norm.weight.detach().float().cpu()[column : column + 1]
        bias = getattr(norm, "bias", None)
        added = () if bias is None else (("β", float(bias[column])),)
        return Terms(f"γ · {name}", scale, unit[None], [f"γ · {name}"], added)

    def _attention(self) -> Terms | None:
        if self.what in ("norm", "sum"):
            return self._shared()
        attention: Any = self.block.attention if self.kind == "self" else self.block.cross
        if self.what in "qkv":
            return self._projected(attention)
        if self.what == "output":
            return self._attention_output(attention)
        if self._part("scores") is None:
            return None
        return {
            "scores": lambda: self._score(attention),
            "masked": self._masked,
            "weights": self._softmax,
            "mix": self._mix,
        }.get(self.what, lambda: None)()

    def _projected(self, attention: Any) -> Terms | None:
        position = self.modules.position if self.kind == "self" else attention.position
        changed = type(position).rotate is not Position.rotate or attention.config.qk_norm
        if self.what != "v" and changed:
            return None  # rotated or normed after the projection
        sizes, config = attention.config.sizes, attention.config
        cross = isinstance(attention, CrossAttention)
        linear = attention.query if cross and self.what == "q" else attention.project
        order = "q" if linear is not attention.project else ("kv" if cross else "qkv")
        groups = config.heads if self.what == "q" else config.kv_heads
        head = min(self.cell.head, config.heads - 1) * groups // config.heads
        channels = sizes["qkv".index(self.what)] // groups
        start = sum(sizes["qkv".index(item)] for item in order[: order.index(self.what)])
        inputs = self._memory() if cross and self.what != "q" else self._entered()
        letter = self.what.upper()
        index = start + head * channels + self.cell.column
        rule = f"row of {'H' if cross and self.what != 'q' else 'X'} · column of W^{letter}"
        return _linear(rule, inputs[self.cell.row], linear, index)

    def _memory(self) -> Tensor:
        """The encoder output."""
        states = self.tensors.get("encoder.states")
        return self.tensors["encoder.feedforward.norm"][-1] if states is None else states

    def _attention_output(self, attention: Any) -> Terms | None:
        mixed = self.tensors[f"{self.stack}.{self.kind}.mix"][self.layer][:, self.cell.row]
        heads, channels = mixed.shape
        labels = [f"head {h + 1}, channel {c + 1}" for h in range(heads) for c in range(channels)]
        rule = "row of the heads · column of W^O"
        return _linear(rule, mixed.reshape(-1), attention.output, self.cell.column, labels)

    def _score(self, attention: Any) -> Terms | None:
        q, k, score = self._part("q"), self._part("k"), attention.score
        if not isinstance(score, InnerScore) or q is None or k is None:
            return None
        left, right = q[self.cell.row], k[self.cell.column]
        total = float((left.double() * right.double()).sum()) * score.scale
        then = "" if score.scale == 1.0 else f"× {written(score.scale)}"
        return Terms("q · k", left, right, _channels(left), (), then, total)

    def _masked(self) -> Terms:
        parts = [(what, self._value(what)) for what in ("scores", "bias")]
        mask = self.tensors.get(f"{self.stack}.{self.kind}.mask")
        if mask is not None:
            parts.append(("mask", float(mask[self.layer][self.cell.row, self.cell.column])))
        addends = [(what, value) for what, value in parts if value is not None]
        return _sum(" + ".join(what for what, _ in addends), addends)

    def _softmax(self) -> Terms:
        scores = self._part("masked")
        scores = self._part("scores") if scores is None else scores
        assert scores is not None
        row = scores[self.cell.row].double()
        shares = (row - row.max()).exp()
        share = float(shares[self.cell.column])
        rule = "exp(e_ij − max) / Σ_k exp(e_ik − max)"
        labels = self._key_labels(len(row))
        total = share / float(shares.sum())
        then = f"{written(share)} ÷ the sum"
        ones = torch.ones_like(shares)
        return Terms(rule, shares, ones, labels, (), then, total, self.cell.column)

    def _mix(self) -> Terms | None:
        weights, v, extra = self._part("weights"), self._part("v"), self._value("spread")
        assert weights is not None
        assert v is not None
        added = () if extra is None else (("position on V", extra),)
        labels = self._key_labels(len(v))
        left, right = weights[self.cell.row], v[:, self.cell.column]
        return Terms("row of A · column of V", left, right, labels, added)

    def _key_labels(self, count: int) -> Sequence[str]:
        tokens: list[str] = self.tokens["encoder" if self.kind == "cross" else self.stack]
        return tokens if len(tokens) == count else [str(at + 1) for at in range(count)]

    def _feedforward(self) -> Terms | None:
        if self.what in ("norm", "sum"):
            return self._shared()
        module, row, column = self.block.feedforward, self.cell.row, self.cell.column
        if not isinstance(module, FeedForward | GatedFeedForward):
            return None
        if self.what == "output":
            hidden = self.tensors[f"{self.stack}.feedforward.hidden"][self.layer]
            return _linear("row of h · column of W₂", hidden[row], module.outer, column)
        x = self._entered()[row]
        if isinstance(module, GatedFeedForward):
            gate = module.activation(_linear("", x, module.gate, column).total())
            inner = _linear("", x, module.inner, column).total()
            return Terms("act(x W) · (x V)", gate[None], inner[None], ["gate · inner"])
        plain = _linear("row of x · column of W₁", x, module.inner, column)
        result = float(module.activation(plain.total()))
        then = f"activation ({module.activation_name})"
        return Terms(plain.rule, plain.left, plain.right, plain.labels, plain.added, then, result)


def written(number: float) -> str:
    """Three digits, as the page writes its numbers: 0.0774, 2.06e−8."""
    mantissa, _, exponent = f"{number:.3g}".partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "")).replace("-", "−")


def _channels(vector: Tensor) -> list[str]:
    return [f"channel {at + 1}" for at in range(len(vector))]


def _sum(rule: str, addends: list[tuple[str, float]]) -> Terms:
    empty = torch.zeros(0)
    return Terms(rule, empty, empty, [], tuple(addends))


@dataclass(frozen=True)
class LinearTerms(Terms):
    """One output of a linear layer."""

    def total(self) -> Tensor:
        return (self.left * self.right).sum() + sum(value for _, value in self.added)


def _linear(
    rule: str, row: Tensor, linear: nn.Linear, column: int, labels: Sequence[str] | None = None
) -> LinearTerms:
    """Row of the input times a row of the weight (a column of W in the lectures), plus bias."""
    weight = linear.weight.detach()[column].float().cpu()
    added = () if linear.bias is None else (("b", float(linear.bias[column])),)
    return LinearTerms(rule, row, weight, labels or _channels(row), added)


def provenance(trace: Trace, model: Model, cell: Cell) -> dict[str, Any]:
    """The terms of a cell as JSON, and the value that the trace holds."""
    terms = Provenance(trace, model, cell).terms()
    return {"terms": []} if terms is None else terms.json()
