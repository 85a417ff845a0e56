"""Attention maps come out of any model, whatever core it runs, and leave no trace in it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyheads.models.bert import BertConfig
from manyheads.models.capture import Maps, capture
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import AttentionFunction, CrossAttention, Dense, Fused, SelfAttention
from manyheads.nn.local import Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Alibi, Buckets, Learned, PositionConfig, Rotary, Shaw
from manyheads.nn.tiled import Tiled

LAYERS, HEADS, VOCAB = 2, 2, 11
CORES: dict[str, AttentionFunctionConfig] = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=3),
}
POSITIONS: dict[str, PositionConfig] = {
    "learned": Learned(),
    "rotary": Rotary(),
    "alibi": Alibi(),
    "t5": Buckets(buckets=6, max_distance=5),
    "shaw": Shaw(max_distance=2),
}
CELLS = [("learned", "dense"), ("rotary", "fused"), ("alibi", "tiled"), ("t5", "fused")]
CELLS += [("shaw", "tiled")]
MODELS: dict[str, Any] = {"seq2seq": Seq2SeqConfig, "gpt": GptConfig, "bert": BertConfig}

SOURCE = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(1))
REAL = torch.arange(7)[None] < torch.tensor([7, 4, 1])[:, None]


def built(kind: str, position: str = "rotary", core: str = "fused", **changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "dim": 8, "layers": LAYERS, "heads": HEADS, "max_length": 16}
    parts = {"position": POSITIONS[position], "attention": CORES[core], "dropout": 0.0}
    return MODELS[kind](**{**sizes, **parts, **changes}).build().double().eval()


def run(model: nn.Module) -> Tensor:
    """One pass over padded sentences (a language model: over whole ones)."""
    if isinstance(model.config, Seq2SeqConfig):
        return model(SOURCE, TARGET, REAL)
    return model(SOURCE, REAL) if isinstance(model.config, BertConfig) else model(SOURCE)


def cores(model: nn.Module) -> list[AttentionFunction]:
    return [m.core for m in model.modules() if isinstance(m, (SelfAttention, CrossAttention))]


def attention_maps(kind: str, maps: Maps) -> dict[str, list[Tensor]]:
    """Every map that a model of this kind has."""
    if kind != "seq2seq":
        return {"self": maps["self"]}
    return {
        "encoder": maps.all("self", "encoder"),
        "decoder": maps.all("self", "decoder"),
        "cross": maps["cross"],
    }


@pytest.mark.parametrize(("position", "core"), CELLS)
@pytest.mark.parametrize("kind", MODELS)
def test_maps_are_those_of_the_textbook(kind: str, position: str, core: str) -> None:
    """Every layer's map: rows sum to 1, nothing on the future or on padding, and equal to those
    of the same weights in a model that runs dense."""
    model, dense = built(kind, position, core), built(kind, position, "dense")
    dense.load_state_dict(model.state_dict())
    actual, expected = {}, {}
    for which, store in ((model, actual), (dense, expected)):
        with torch.no_grad(), capture(which) as maps:
            run(which)
        store.update(attention_maps(kind, maps))
    shapes = {
        "self": (3, HEADS, 7, 7),
        "encoder": (3, HEADS, 7, 7),
        "decoder": (3, HEADS, 5, 5),
        "cross": (3, HEADS, 5, 7),
    }
    padded = {"cross", "encoder"} | ({"self"} if kind == "bert" else set())
    causal = {"decoder"} | ({"self"} if kind == "gpt" else set())
    for name, layers in actual.items():
        assert len(layers) == LAYERS
        for weights, other in zip(layers, expected[name], strict=True):
            assert weights.shape == shapes[name]
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            assert (weights >= 0).all()
            if name in padded:
                assert (weights.masked_select(~REAL[:, None, None]) == 0).all()
                assert (weights.masked_select(REAL[:, None, None]) > 0).all()
            if name in causal:
                assert (weights.triu(1) == 0).all()
                assert (weights.tril().sum(-1) > 0.999).all()
            torch.testing.assert_close(weights, other)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", MODELS)
def test_looking_changes_nothing(kind: str, core: str) -> None:
    """The output inside the context is the output outside it, bit for bit, and so are gradients."""
    model = built(kind, core=core)
    outside = run(model)
    with capture(model):
        inside = run(model)
    assert torch.equal(inside, outside)
    grads = []
    for look in (False, True):
        model.zero_grad()
        with capture(model) if look else torch.enable_grad():
            run(model).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))
    assert grads[0]


@pytest.mark.parametrize("core", ["dense", "fused", "tiled"])
def test_looking_draws_no_random_numbers(core: str) -> None:
    """In training too: the same seed drops the same weights with and without the context."""
    model = built("gpt", core=core, dropout=0.2, attention_dropout=0.2).train()
    torch.manual_seed(1)
    outside = run(model)
    torch.manual_seed(1)
    with capture(model) as maps:
        inside = run(model)
    assert torch.equal(inside, outside)
    total = maps["self"][0].sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))  # before dropout


@pytest.mark.parametrize("kind", MODELS)
def test_cores_come_back(kind: str) -> None:
    """Afterwards every attention has its own core again, also after an error and when nested."""
    model = built(kind, core="tiled")
    before = cores(model)
    with capture(model):
        assert all(now is not was for now, was in zip(cores(model), before, strict=True))
        run(model)
    assert all(now is was for now, was in zip(cores(model), before, strict=True))
    with pytest.raises(ZeroDivisionError), capture(model):
        _ = run(model) * (1 / 0)
    assert all(now is was for now, was in zip(cores(model), before, strict=True))
    with capture(model) as outer:
        with capture(model) as inner:
            run(model)
        run(model)
    assert all(now is was for now, was in zip(cores(model), before, strict=True))
    assert torch.equal(outer["self"][0], inner["self"][0])


def test_layers_are_in_order() -> None:
    """More than ten layers: layer n is the n-th map."""
    model = built("gpt", core="dense", layers=12)
    with torch.no_grad(), capture(model) as maps:
        run(model)
    unchanged = [layer.clone() for layer in maps["self"]]
    assert len(unchanged) == 12
    for layer in (1, 10):
        changed = copy.deepcopy(model)
        changed.decoder.blocks[layer].attention.project.weight.data.mul_(2)
        with torch.no_grad(), capture(changed) as maps:
            run(changed)
        same = [torch.equal(a, b) for a, b in zip(maps["self"], unchanged, strict=True)]
        assert same == [n < layer for n in range(12)]


@pytest.mark.parametrize("core", [*CORES.values(), Longformer(window=1), Performer(features=8)])
def test_chosen_rows_and_heads_are_those_of_the_whole_map(core: AttentionFunctionConfig) -> None:
    sizes = {"vocab_size": VOCAB, "dim": 8, "layers": LAYERS, "heads": HEADS, "max_length": 16}
    model = GptConfig(**sizes, attention=core).build().double().eval()
    with torch.no_grad(), capture(model) as whole:
        run(model)
    with torch.no_grad(), capture(model, rows=[6, 2], heads=[1]) as chosen:
        run(model)
    for one, every in zip(chosen["self"], whole["self"], strict=True):
        torch.testing.assert_close(one, every[:, [1]][:, :, [6, 2]], rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):  # type: ignore
        result = function(*arguments, **(settings or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return result


def test_rows_of_a_long_text_never_hold_all_pairs() -> None:
    """16,384 tokens by the fast kernel; two rows of its map, each with the sum 1."""
    length = 16_384
    model = built("gpt", layers=1, heads=1, max_length=length).float()
    tokens = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), capture(model, rows=[5, length - 1]) as maps, Largest() as largest:
        model.hidden(tokens)
    (found,) = maps["self"]
    assert found.shape == (1, 1, 2, length)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 1, 2))
    assert (found[0, 0, 0, 6:] == 0).all()
    assert largest.elements < 64 * length
