"""Attention maps of a text, by layer and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.decode.translate import Translator
from manyheads.errors import UserError
from manyheads.evaluate.alignment import word_maps
from manyheads.loading import LoadedRun
from manyheads.models.bert import Bert
from manyheads.models.capture import attentions, capture
from manyheads.models.decoder_only_seq2seq import Baseline
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.phrasebook import Pair


@dataclass(frozen=True)
class TextMaps:
    """All heads of one kind of attention; row t is the attention of the token `rows[t]`."""

    weights: Float[Tensor, "layers heads t s"]
    rows: list[str]
    columns: list[str]

    def head(self, layer: int, head: int | None) -> Float[Tensor, "t s"]:
        """A head of a layer, or the mean of its heads; both count from 1."""
        layers, heads = self.weights.shape[:2]
        for name, value, last in (("layer", layer, layers), ("head", head, heads)):
            if value is not None and not 1 <= value <= last:
                raise UserError(f"--{name} {value}: choose among 1 to {last}")
        weights = self.weights[layer - 1]
        return weights.mean(0) if head is None else weights[head - 1]


@torch.no_grad()
def attention_maps(loaded: LoadedRun, text: str, target: str | None = None) -> dict[str, TextMaps]:
    """Maps by name: encoder.self, decoder.self, decoder.cross.

    The target of an encoder–decoder is `target`, or the model's own translation. A row of
    cross-attention is named by the token that is predicted there, one of self-attention by the
    token that is read.
    """
    model: Any = loaded.model.eval()
    if not any(True for _ in attentions(model)):
        raise loaded.unsupported("has maps of a text", "a model with attention")
    tokenizer, max_length = loaded.tokenizer, model.config.max_length

    def batch(ids: Sequence[int]) -> Tensor:
        if not ids:
            raise UserError("the text is empty: give a text with --text")
        if len(ids) > max_length:
            raise UserError(f"the text has {len(ids)} tokens, the model {max_length}: shorten it")
        return torch.tensor([list(ids)], device=loaded.device)

    if isinstance(model, Seq2Seq | Baseline):
        translator = Translator(model, tokenizer, loaded.run.decode)
        special = translator.special_tokens
        source = special.source(tokenizer.encode(text))
        if target is None:
            batch(source)  # refuses a text that is too long
            output = next((h.tokens for h in translator.search([text], n_best=1)[0]), [])
        else:
            output = tokenizer.target.encode(target)
        with capture(model) as maps:
            model(batch(source), batch([special.start, *output]))
        keys = tokenizer.subwords(source)
        queries, predicted = map(
            tokenizer.target.subwords, ([special.start, *output], [*output, special.end])
        )
        labels = {
            ("encoder", "self"): (keys, keys),
            ("decoder", "self"): (queries, queries),
            ("decoder", "cross"): (predicted, keys),
        }
    elif isinstance(model, Gpt | Bert):
        if target is not None:
            raise UserError("--target works only with encoder–decoders: leave it out")
        ids = tokenizer.encode(text)
        if isinstance(model, Bert):
            tokenizer = loaded.encoder().tokenizer
            [(ids, _)] = tokenizer.framed([text])
        with capture(model) as maps:
            model.hidden(batch(ids))
        words = tokenizer.subwords(ids)
        labels = {(stack, "self"): (words, words) for stack in ("encoder", "decoder")}
    else:
        raise loaded.unsupported("has maps of a text", "a model that reads one")
    result = {}
    captured = {(stack, kind) for stack, kind, _ in maps.by_layer}
    for stack, kind in [key for key in labels if key in captured]:
        layers = [layer[0].float().cpu() for layer in maps.all(kind, stack)]
        if len({layer.shape for layer in layers}) > 1:
            raise UserError(f"the maps of {stack}.{kind} differ in size: none is drawn")
        result[f"{stack}.{kind}"] = TextMaps(torch.stack(layers), *labels[stack, kind])
    return result


def word_alignment(loaded: LoadedRun, pair: Pair) -> TextMaps:
    """Cross-attention between the words of a sentence of the phrasebook."""
    model: Any = loaded.model
    [(_, weights)] = word_maps(model, loaded.tokenizer, [pair])
    rows = [pair.target[a:b] for a, b in pair.target_words]
    columns = [pair.source[a:b] for a, b in pair.source_words]
    return TextMaps(torch.as_tensor(weights), rows, columns)
