"""What heads attend to: the weight on words that the phrasebook's syntax tree relates.

A relation is a list of (query word, key word) in a sentence. The score of a head is the mean, over
all pairs, of the weight from the tokens of the query word to those of the key word.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from einops import einsum
from torch import Tensor

from manyheads.config import Count
from manyheads.data.alignment import words_of_tokens
from manyheads.errors import UserError
from manyheads.lab.figures.drawing import Drawing
from manyheads.loading import load_torch_run
from manyheads.models.bert import Bert
from manyheads.models.capture import capture
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.phrasebook import english
from manyheads.phrasebook.grammar import Grammar
from manyheads.phrasebook.layout import Spans, write
from manyheads.phrasebook.tree import Both, Clause, Phrase, Sentence
from manyheads.view.figures import HIGHLIGHT, canvas

Pairs = set[tuple[int, int]]
RELATIONS = {
    "verb → subject": "the verb attends to the noun of its subject",
    "subject → verb": "the noun of a subject attends to its verb",
    "noun → article": "a noun attends to its determiner",
    "article → noun": "a determiner attends to its noun",
    "adjective → noun": "an adjective attends to its noun",
    "object → verb": "the noun of an object attends to its verb",
    "same word": "a word attends to the same word elsewhere (copy)",
    "previous word": "a word attends to the one before it",
    "next word": "a word attends to the one after it",
    "itself": "a word attends to itself",
}
INDUCTION = "induction"  # on repeated random tokens, not on sentences


def nodes(tree: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """A node of the syntax tree and all below it, each once: relative clauses refer back."""
    seen = set() if seen is None else seen
    seen.add(id(tree))
    yield tree
    for field in fields(tree):
        value = getattr(tree, field.name)
        for part in value if isinstance(value, list | tuple) else [value]:
            if is_dataclass(part) and id(part) not in seen:
                yield from nodes(part, seen)


def relations(tree: Sentence) -> tuple[str, Spans, dict[str, Pairs]]:
    """The English text, the span of each word, and the related pairs of words."""
    words = english.sentence(tree)
    text, spans = write(words)
    places: dict[int, list[int]] = {}
    for index, (_, concepts) in enumerate(words):
        for concept in concepts:
            places.setdefault(concept, []).append(index)
    pairs: dict[str, Pairs] = {name: set() for name in RELATIONS}

    def add(name: str, queries: int, keys: int) -> None:
        pairs[name] |= {
            (q, k) for q in places.get(queries, []) for k in places.get(keys, []) if q != k
        }

    for node in nodes(tree):
        if isinstance(node, Clause):
            for noun in _nouns(node.subject):
                add("verb → subject", node.id, noun)
                add("subject → verb", noun, node.id)
            for noun in _nouns(node.direct):
                add("object → verb", noun, node.id)
        elif isinstance(node, Phrase):
            add("noun → article", node.id, node.determiner_id)
            add("article → noun", node.determiner_id, node.id)
            for described in node.adjectives:
                add("adjective → noun", described.id, node.id)
    lower = [word.lower() for word, _ in words]
    count = range(len(words))
    pairs["same word"] = {(q, k) for q in count for k in count if q != k and lower[q] == lower[k]}
    pairs["previous word"] = {(q, q - 1) for q in count[1:]}
    pairs["next word"] = {(q, q + 1) for q in count[:-1]}
    pairs["itself"] = {(q, q) for q in count}
    return text, spans, pairs


def _nouns(nominal: Any) -> list[int]:
    if nominal is None:
        return []
    return [nominal.first.id, nominal.second.id] if isinstance(nominal, Both) else [nominal.id]


@dataclass
class Scores:
    """Sums of weights by relation, [layers, heads]; with the number of pairs and uniform's sum."""

    sums: dict[str, Tensor]
    counts: dict[str, int]
    uniform: dict[str, float]

    def share(self, name: str) -> Tensor:
        return self.sums[name] / self.counts[name]

    def baseline(self, name: str) -> float:
        """The score of a head that attends to all visible tokens alike."""
        return self.uniform[name] / self.counts[name]

    def best(self, name: str) -> tuple[int, int, float]:
        """(layer, head) from 1, and the share."""
        shares = self.share(name)
        layer, head = divmod(int(shares.argmax()), shares.shape[1])
        return layer + 1, head + 1, float(shares.max())


@torch.no_grad()
def score(loaded: Any, sentences: int, seed: int) -> Scores:
    """Self-attention of the encoder, or of a decoder-only model, over phrasebook sentences."""
    model: Any = loaded.model.eval()
    if not isinstance(model, Seq2Seq | Gpt | Bert):
        raise loaded.unsupported("has roles of heads", "a Transformer that reads text")
    causal = isinstance(model, Gpt)
    scores = Scores({}, {}, {})
    grammar = Grammar(f"head roles {seed}")
    for _ in range(sentences):
        text, spans, pairs = relations(grammar.sentence())
        ids, first = _encode(loaded, model, text)
        if len(ids) > model.config.max_length:
            continue
        maps = _maps(loaded, model, [ids])[:, 0]
        belongs = words_of_tokens(loaded.tokenizer.offsets(text), spans)
        last = first + belongs.shape[1]
        rows = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
        inner = maps[..., first:last, first:last]
        words = einsum(rows, inner, belongs, "w t, l h t s, v s -> l h w v")
        uniform = _uniform(len(ids), causal)[first:last, first:last]
        even = einsum(rows, uniform, belongs, "w t, t s, v s -> w v")
        for name, related in pairs.items():
            for query, key in related:
                if causal and key > query:
                    continue
                _add(scores, name, words[:, :, query, key], float(even[query, key]))
    _induction(scores, loaded, model, causal, seed)
    return scores


def _add(scores: Scores, name: str, weights: Tensor, uniform: float) -> None:
    scores.sums[name] = scores.sums.get(name, torch.zeros_like(weights)) + weights
    scores.counts[name] = scores.counts.get(name, 0) + 1
    scores.uniform[name] = scores.uniform.get(name, 0.0) + uniform


def _uniform(length: int, causal: bool) -> Tensor:
    even = torch.ones(length, length)
    even = even.tril() if causal else even
    return even / even.sum(1, keepdim=True)


def _encode(loaded: Any, model: Any, text: str) -> tuple[list[int], int]:
    """Token ids as the model reads them, and the place of the first token of the text."""
    if isinstance(model, Bert):
        [(ids, _)] = loaded.encoder().tokenizer.framed([text])
        return list(ids), 1
    ids = loaded.tokenizer.encode(text)
    if isinstance(model, Seq2Seq):
        return list(loaded.translator().special_tokens.source(ids)), 0
    return list(ids), 0


def _maps(loaded: Any, model: Any, rows: list[list[int]]) -> Tensor:
    """Self-attention, [layers, rows, heads, t, s]."""
    tokens = torch.tensor(rows, device=loaded.device)
    with capture(model) as maps:
        model.encode(tokens) if isinstance(model, Seq2Seq) else model.hidden(tokens)
    return torch.stack(maps["self"]).float().cpu()


def _induction(scores: Scores, loaded: Any, model: Any, causal: bool, seed: int) -> None:
    """x₁ … xₙ x₁ … xₙ: the second xᵢ attends to the token after the first one, xᵢ₊₁."""
    half = min(24, model.config.max_length // 2)
    random = torch.Generator().manual_seed(seed)
    vocabulary = loaded.tokenizer.vocab_size
    rows = torch.randint(vocabulary // 2, vocabulary, (8, half), generator=random)
    maps = _maps(loaded, model, torch.cat([rows, rows], 1).tolist())
    uniform = _uniform(2 * half, causal)
    for query in range(half, 2 * half - 1):
        key = query - half + 1
        _add(scores, INDUCTION, maps[:, :, :, query, key].mean(1), float(uniform[query, key]))


@dataclass(frozen=True, kw_only=True)
class HeadRoles:
    """Shares of weight by relation and head, with the best head of each."""

    run: Annotated[str, "Run folder: a translator from English, a GPT or a BERT"] = ""
    sentences: Annotated[Count, "Sentences of the phrasebook"] = 150
    seed: Annotated[Count, "Seed of the sentences"] = 1

    def make(self) -> Drawing:
        if not self.run:
            raise UserError("head-roles needs a run: manyheads figure RUN head-roles")
        loaded = load_torch_run(Path(self.run))
        scores = score(loaded, self.sentences, self.seed)
        names = [name for name in (*RELATIONS, INDUCTION) if scores.counts.get(name)]
        shares = torch.stack([scores.share(name).flatten() for name in names])
        layers, heads = scores.share(names[0]).shape
        labels = [f"{layer + 1}.{head + 1}" for layer in range(layers) for head in range(heads)]

        def draw(path: Path) -> None:
            from matplotlib.patches import Rectangle

            size = (3.6 + 0.62 * (len(labels) + 1), 1.8 + 0.42 * len(names))
            with canvas(size, path) as (figure, [axes]):
                even = torch.tensor([[scores.baseline(name)] for name in names])
                shown = torch.cat([shares, even], 1)
                top = max(0.4, float(shown.max()))
                image = axes.imshow(shown.numpy(), cmap="viridis", vmin=0, vmax=top, aspect="auto")
                for row, values in enumerate(shown.tolist()):
                    for column, value in enumerate(values):
                        colour = "black" if value > 0.6 * top else "white"
                        text = f"{value:.2f}"
                        centred = {"ha": "center", "va": "center", "fontsize": 8}
                        axes.text(column, row, text, color=colour, **centred)
                    best = int(shares[row].argmax())
                    frame = Rectangle(
                        (best - 0.5, row - 0.5),
                        1,
                        1,
                        fill=False,
                        edgecolor=HIGHLIGHT,
                        linewidth=2.4,
                    )
                    axes.add_patch(frame).set_zorder(3)
                axes.axvline(len(labels) - 0.5, color="white", linewidth=3, zorder=1)
                axes.set_xticks(range(len(labels) + 1), [*labels, "even"])
                axes.set_yticks(range(len(names)), names)
                axes.set(xlabel="layer.head; even: equal weight on every visible token")
                axes.set_title(f"share of attention, {self.sentences} sentences; best head framed")
                figure.colorbar(image, ax=axes, label="share of the weight", fraction=0.05)

        lines = []
        for name in names:
            layer, head, share = scores.best(name)
            lines.append(
                f"{name:17} layer {layer}, head {head}: {share:.2f} "
                f"(even {scores.baseline(name):.2f}, {scores.counts[name]:,} pairs)"
            )
        rows = [
            (
                *(name, layer + 1, head + 1, float(scores.share(name)[layer, head])),
                *(scores.baseline(name), scores.counts[name]),
            )
            for name in names
            for layer in range(layers)
            for head in range(heads)
        ]
        columns = ("relation", "layer", "head", "share", "even", "pairs")
        return Drawing(columns=columns, rows=rows, draw=draw, lines=tuple(lines))
