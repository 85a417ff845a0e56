"""`info` on a model from elsewhere: the parts and counts that `transformers` has."""

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="the models to count are those of transformers")

from tests.exchange.zoo import CLASSES, draw

from manyheads.exchange.family import moves
from manyheads.exchange.huggingface import KINDS, from_huggingface
from manyheads.summary import summarize

# Where a word of their names tells what a tensor is a part of.
THEIRS = {
    "norms": ("norm", "ln_"),
    "positions": ("position", "wpe", "relative_attention_bias"),
    "cross-attention": ("encoder_attn", "EncDecAttention"),
    "attention": ("attn", "attention.", "SelfAttention"),
    "feed-forward": ("fc1", "fc2", "mlp", "ffn", "Dense", "intermediate", "output.dense"),
}


@pytest.mark.parametrize("family", CLASSES)
def test_parts_and_counts_are_theirs(family: str) -> None:
    for seed in range(6):
        theirs = draw(family, seed)
        ours = from_huggingface(theirs)
        counted = summarize(ours.config, 8)
        unread = ("model.shared.weight", "cls.predictions.bias", "lm_head.bias")
        tied = theirs.config.to_dict().get("tie_word_embeddings", True)
        own = {
            name: parameter.numel()
            for name, parameter in theirs.named_parameters()
            if parameter.requires_grad and (tied or name not in unread)
        }
        assert counted.parameters == sum(own.values())
        if tied:
            assert counted.parameters == theirs.num_parameters(only_trainable=True)
        by_word: Counter[str] = Counter()
        for name, size in own.items():
            inner = name.removeprefix(KINDS[family].prefix)
            layered = any(part.isdigit() for part in inner.split("."))
            found = (
                part
                for part, words in THEIRS.items()
                if any(word.lower() in inner.lower() for word in words)
            )
            part = next(found, "rest")
            if not layered and part not in ("norms", "positions"):
                part = "rest"
            by_word[part] += size
        for part in ("positions", "attention", "cross-attention", "feed-forward", "norms"):
            assert counted.parts[part] == by_word[part], (seed, part)
        assert len(moves(KINDS[family], ours)) == len(ours.state_dict())
