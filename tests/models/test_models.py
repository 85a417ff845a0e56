"""What every model promises, whatever its parts."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tiny import PARTS, POSITIONS, VOCAB, Model, tiny, words
from torch import Tensor

from manyheads.config import dump, parse
from manyheads.decode.kv_cache import KVCache
from manyheads.models.bert import BertConfig, NextSentence
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Pooler
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm, Residual
from manyheads.nn.positions import Learned, NoPosition, Rotary, Shaw
from manyheads.nn.scores import Additive, Bilinear, Dot

MODELS = [GptConfig, BertConfig, Seq2SeqConfig]
INITS = ["xavier", "normal", "normal-scaled"]
model_kinds = pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.kind)


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def run(model: Any, tokens: Tensor, real: Tensor | None = None) -> Tensor:
    """The logits for these tokens; an encoder–decoder gets them reversed as its source."""
    if isinstance(model.config, Seq2SeqConfig):
        return model(tokens.flip(1), tokens, None if real is None else real.flip(1), real)
    return model(tokens, real)


@pytest.mark.parametrize("kind", [GptConfig, Seq2SeqConfig], ids=lambda kind: kind.kind)
@pytest.mark.parametrize(("position", "core"), PARTS)
def test_no_gradient_from_the_future(kind: Model, position: str, core: str) -> None:
    """Logits at t depend on the embeddings up to t, each of them, and on none after."""
    model = tiny(kind, position, core).build().double()
    entered: list[Tensor] = []
    model.tokens.register_forward_hook(lambda module, inputs, out: entered.append(out))
    target = words(1, 7).expand(7, -1)  # the same in each row: row n shows position n
    logits = model(target) if kind is GptConfig else model(words(7, 5), target)
    local = torch.arange(7)
    read = (logits[local, local] * torch.randn(VOCAB, dtype=torch.float64)).sum()
    (gradient,) = torch.autograd.grad(read, entered[-1])
    depends = (gradient != 0).any(-1)
    assert torch.equal(depends, torch.ones(7, 7, dtype=torch.bool).tril())


def test_bert_and_the_source_are_read_both_ways() -> None:
    """An encoder's first position depends on its last one."""
    bert, tokens = tiny(BertConfig).build(), words(1, 5)
    other = torch.cat([tokens[:, :4], (tokens[:, 4:] + 1) % VOCAB], dim=1)
    assert not torch.allclose(bert(tokens)[:, 0], bert(other)[:, 0])
    seq2seq = tiny(Seq2SeqConfig).build()
    first = seq2seq.encode(tokens).states[:, 0]
    assert not torch.allclose(first, seq2seq.encode(other).states[:, 0])


@model_kinds
@pytest.mark.parametrize(("position", "core"), PARTS)
def test_padding_changes_nothing(kind: Model, position: str, core: str) -> None:
    """A text padded on the right in a batch has the logits that it has without padding."""
    model = tiny(kind, position, core).build().double()
    tokens = words(2, 7)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    if kind is Seq2SeqConfig:
        source, source_real = words(2, 6), torch.ones(2, 6, dtype=torch.bool)
        source_real[1, 3:] = False
        together = model(source, tokens, source_real, real)
        single = model(source[1:, :3], tokens[1:, :4])
        longest = model(source[:1], tokens[:1])
    else:
        together, single, longest = model(tokens, real), model(tokens[1:, :4]), model(tokens[:1])
    agree(together[1:, :4], single)
    agree(together[:1], longest)


def stored(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.state_dict().items() if x.shape == (VOCAB, 8)}


def test_tied_matrices_are_one() -> None:
    """A tied matrix is one tensor, saved once; an untied one is its own."""
    matrices = {
        "gpt all": stored(tiny(GptConfig).build()),
        "gpt none": stored(tiny(GptConfig, tie="none").build()),
        "bert": stored(tiny(BertConfig).build()),
        "seq2seq all": stored(tiny(Seq2SeqConfig).build()),
        "seq2seq target": stored(tiny(Seq2SeqConfig, tie="target").build()),
        "seq2seq none": stored(tiny(Seq2SeqConfig, tie="none").build()),
    }
    counts = {name: len(tensors) for name, tensors in matrices.items()}
    assert counts == {
        "gpt all": 1,
        "gpt none": 2,
        "bert": 1,
        "seq2seq all": 1,
        "seq2seq target": 2,
        "seq2seq none": 3,
    }


@model_kinds
def test_the_head_is_the_embedding(kind: Model) -> None:
    """Doubling the tied matrix doubles what a fixed hidden state scores."""
    model = tiny(kind).build()
    hidden = torch.randn(1, 3, 8)
    before = model.logits(hidden)
    with torch.no_grad():
        model.tokens.weight.mul_(2)
    torch.testing.assert_close(model.logits(hidden), 2 * before)


@pytest.mark.parametrize(("position", "kind"), list(zip(POSITIONS, cycle(MODELS), strict=False)))
def test_weights_can_be_saved(kind: Model, position: str) -> None:
    """All tensors have their own storage, and a fresh model with them is the same model."""
    config = tiny(kind, position, "dense")
    model, fresh = config.build(), config.build()
    state = model.state_dict()
    assert len({x.untyped_storage().data_ptr() for x in state.values()}) == len(state)
    tokens = words(2, 5)
    assert not torch.allclose(run(model, tokens), run(fresh, tokens))
    fresh.load_state_dict(load(save(state)))
    assert torch.equal(run(model, tokens), run(fresh, tokens))


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_cached_is_full(position: str, core: str) -> None:
    """Token by token or in chunks, a cached pass gives the logits of the full one."""
    gpt = tiny(GptConfig, position, core).build().double()
    seq2seq = tiny(Seq2SeqConfig, position, core).build().double()
    tokens, source, chunks = words(2, 18), words(2, 5), [4, 1, 1, 6, 1, 5]
    source_real = torch.tensor([[True] * 5, [True, True, True, False, False]])
    with torch.no_grad():
        cache, actual = KVCache(), []
        for chunk in tokens.split(chunks, dim=1):
            actual.append(gpt(chunk, cache=cache))
        agree(torch.cat(actual, dim=1), gpt(tokens))
        assert cache.length == 18
        cache, actual, memory = KVCache(), [], seq2seq.encode(source, source_real)
        for chunk in tokens.split(chunks, dim=1):
            actual.append(seq2seq.logits(seq2seq.decode(chunk, memory, cache=cache)))
        agree(torch.cat(actual, dim=1), seq2seq(source, tokens, source_real))


def test_cache_counts_its_bytes() -> None:
    """The cache of grouped key/value heads is smaller by the size of the groups."""
    sizes = []
    for kv_heads in (2, 1):
        cache = KVCache()
        with torch.no_grad():
            tiny(GptConfig, kv_heads=kv_heads).build()(words(1, 8), cache=cache)
        sizes.append(cache.bytes())
    assert sizes == [2 * 2 * 8 * 8 * 4, 2 * 2 * 8 * 4 * 4]  # layers · (k, v) · length · width


def test_settings_survive_a_file() -> None:
    """Dumped settings parse to the same settings."""
    for config in (
        *(tiny(kind, position, "tiled") for kind in MODELS for position in POSITIONS),
        GptConfig(vocab_size=9, tie="none", score=Dot(), norm=Norm(placement="post", form="rms")),
        GptConfig(score=Bilinear(key_size=3), kv_heads=2, bias=False, init="normal-scaled"),
        BertConfig(head=None, embed=EmbeddingConfig(norm=Norm(), segments=2)),
        BertConfig(
            next_sentence=NextSentence(classes=3),
            pooler=Pooler(),
            feedforward=Gated(activation="gelu"),
        ),
        Seq2SeqConfig(
            encoder=StackOverrides(layers=1, position=NoPosition(), dropout=0.3),
            decoder=StackOverrides(heads=2, feedforward=Gated(), position=Shaw(max_distance=4)),
            score=Additive(width=3),
            tie="target",
        ),
    ):
        assert parse(type(config), dump(config)) == config


def test_each_side_has_its_own() -> None:
    """Overrides of encoder or decoder apply to that stack only."""
    model = tiny(
        Seq2SeqConfig,
        encoder=StackOverrides(layers=1, ffn_dim=20, position=Learned()),
        decoder=StackOverrides(heads=4, dropout=0.25, feedforward=Gated(), position=Rotary()),
    ).build()
    assert (len(model.encoder.blocks), len(model.decoder.blocks)) == (1, 2)
    assert model.encoder.blocks[0].feedforward.inner.out_features == 20
    assert model.decoder.blocks[0].feedforward.inner.out_features == 12
    assert hasattr(model.decoder.blocks[0].feedforward, "gate")
    assert not hasattr(model.encoder.blocks[0].feedforward, "gate")
    heads = [stack.blocks[0].attention.config.heads for stack in (model.encoder, model.decoder)]
    assert heads == [2, 4]
    kinds = [type(stack.position).__name__ for stack in (model.encoder, model.decoder)]
    assert kinds == ["LearnedPosition", "RotaryPosition"]
    drops = [
        {m.p for m in stack.modules() if isinstance(m, torch.nn.Dropout)}
        for stack in (model.encoder_embedding, model.decoder_embedding)
    ]
    assert drops == [{0.0}, {0.25}]
    assert model(words(2, 4), words(2, 6)).shape == (2, 6, VOCAB)


def checked(make: Callable[[], Any]) -> Any:
    """The settings, checked as those of a recipe are."""
    config = make()
    return parse(type(config), config, "model")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"dim": 9}, "dim"),
        ({"heads": 3}, "heads"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"dropout": 1.5}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"layers": 0}, "layers"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"position": "rotary", "head_dim": 3}, "head_dim"),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_wrong_sizes_are_refused(wrong: dict[str, Any], named: str) -> None:
    """A size that cannot be is a ValueError that names it, before anything runs."""
    for kind in MODELS:
        with pytest.raises(ValueError, match=named):
            checked(lambda kind=kind: tiny(kind, **wrong)).build()


def test_head_size_is_free() -> None:
    """heads × head_dim need not equal dim: the projections carry it."""
    for kind in MODELS:
        model = tiny(kind, head_dim=6).build()
        assert run(model, words(2, 5)).shape == (2, 5, VOCAB)


def test_bert_without_heads_gives_hidden_states() -> None:
    """A bare stack gives hidden states, and its segments tell two texts apart."""
    bert = tiny(BertConfig, head=None, embed=EmbeddingConfig(segments=2)).build()
    tokens, segments = words(2, 5), torch.tensor([[0, 0, 1, 1, 1]]).expand(2, -1)
    assert bert(tokens).shape == (2, 5, 8)
    torch.testing.assert_close(bert(tokens), bert(tokens, segments=torch.zeros_like(tokens)))
    assert not torch.allclose(bert(tokens), bert(tokens, segments=segments))


@pytest.mark.parametrize("over", ["first", "mean"])
def test_a_pooler_is_its_formula(over: Any) -> None:
    """act(W h + b) of the first position, or of the mean over all that are not padding."""
    model = tiny(BertConfig, pooler=Pooler(over=over)).build()
    hidden, real = torch.randn(2, 5, 8), torch.arange(5) < torch.tensor([[5], [3]])
    for row, length in enumerate((5, 3)):
        h = hidden[row, 0] if over == "first" else hidden[row, :length].mean(0)
        expected = torch.tanh(model.pooler.project(h))
        torch.testing.assert_close(model.pool(hidden, real)[row], expected)


def test_a_mean_pooler_ignores_padding() -> None:
    head = Classify(labels=("a", "b", "c"))
    model = tiny(BertConfig, pooler=Pooler(over="mean"), head=head).build().double().eval()
    tokens = words(1, 5)
    padded = torch.cat([tokens, words(1, 3)], dim=1)
    real = torch.arange(8)[None] < 5
    torch.testing.assert_close(model(padded, real), model(tokens), rtol=0, atol=1e-6)


def test_dropout_is_on_every_part() -> None:
    """The residuals of a side all have that side's dropout, the attention weights their own."""
    model = tiny(
        Seq2SeqConfig, dropout=0.5, attention_dropout=0.125, decoder=StackOverrides(dropout=0.25)
    ).build()
    for stack, rate in ((model.encoder, 0.5), (model.decoder, 0.25)):
        residuals = [part for part in stack.modules() if isinstance(part, Residual)]
        assert [part.dropout.p for part in residuals] == [rate] * len(residuals)
        assert stack.blocks[0].attention.config.dropout == 0.125


@model_kinds
def test_dropout_is_for_training(kind: Model) -> None:
    """Two passes differ in training and are equal in evaluation."""
    model, tokens = tiny(kind, dropout=0.3, attention_dropout=0.3).build(), words(2, 5)
    assert not torch.equal(run(model, tokens), run(model, tokens))
    model.eval()
    assert torch.equal(run(model, tokens), run(model, tokens))


@pytest.mark.parametrize(("position", "initial"), list(zip(POSITIONS, cycle(INITS), strict=False)))
def test_every_parameter_learns(initial: str, position: str) -> None:
    """No parameter is left out of the computation, and none starts as garbage."""
    for kind in MODELS:
        local = {"next_sentence": NextSentence(), "pooler": Pooler()} if kind is BertConfig else {}
        model = tiny(kind, position, "dense", init=initial, **local).build()
        loss = run(model, words(3, 9)).square().sum()
        if kind is BertConfig:
            loss = loss + model.next_sentence_logits(model.hidden(words(3, 9))).square().sum()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
            assert parameter.grad is not None, name
            assert (parameter.grad != 0).any(), name
