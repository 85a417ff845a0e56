"""Models of ours in `transformers`: they say the same, or the reason why none can is given."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.zoo import (
    CLASSES,
    UNPOOLED,
    both,
    draw,
    exact,
    strengthen,
    without_pooler,
)
from torch import nn

from manyheads.config import override_all
from manyheads.decode.beam import Decode
from manyheads.errors import UserError
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import from_huggingface, to_huggingface
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.models.vit import VitConfig
from manyheads.nn.attention import Dense
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm, Plain
from manyheads.nn.positions import Alibi, Buckets, Learned, Relative, Rotary, Shaw, Sinusoidal
from manyheads.nn.scores import Additive, Dot
from manyheads.presets import preset
from manyheads.tokenizer.train import Bpe

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
OPENERS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "Model": "AutoModel",
}


def opened(theirs: Any, folder: Path) -> Any:
    """Saved, and opened by the class that finds the class."""
    theirs.save_pretrained(folder)
    name = type(theirs).__name__
    opener = next(OPENERS[end] for end in OPENERS if name.endswith(end))
    found = getattr(transformers, opener).from_pretrained(folder, dtype=theirs.dtype)
    assert type(found) is type(theirs)
    return found.eval()


def assert_says(theirs: Any, ours: nn.Module, seed: int = 0, bound: float = 1e-10) -> None:
    with exact(theirs), torch.no_grad():
        expected, said, real = both(theirs.config.model_type, theirs, ours, seed)
    assert said.shape == expected.shape
    torch.testing.assert_close(said[real], expected[real], rtol=bound, atol=bound)


def drawn(config: Any) -> nn.Module:
    model = config.build().double().eval()
    strengthen(model)
    if getattr(getattr(config, "output", None), "bias", "none") != "none":
        model.head.bias.data.normal_()
    return model


@pytest.mark.parametrize("family", CLASSES)
def test_what_is_written_opens_and_says_the_same(family: str, tmp_path: Path) -> None:
    for seed in range(len(CLASSES[family]) + 3):
        theirs = draw(family, seed, torch.float64)
        ours = from_huggingface(theirs)
        assert_says(opened(to_huggingface(ours), tmp_path / str(seed)), ours, seed)


SMALL = {"vocab_size": 40, "dim": 16, "layers": 2, "heads": 4, "max_length": 24}
OWN: dict[str, tuple[Any, str]] = {
    "transformer-base": (replace(preset("transformer-base"), **SMALL), "MarianMTModel"),
    "bert-base": (replace(preset("bert-base"), **SMALL), "BertForPreTraining"),
    "gpt3-small": (replace(preset("gpt3-small"), **SMALL), "GPT2LMHeadModel"),
    "phrasebook": (
        Seq2SeqConfig(**SMALL, ffn_dim=33, dropout=0.0, embed=EmbeddingConfig(scale="sqrt-dim")),
        "PegasusForConditionalGeneration",
    ),
    "odd width": (
        Seq2SeqConfig(**SMALL | {"dim": 9, "heads": 3}),
        "PegasusForConditionalGeneration",
    ),
    "two vocabularies": (
        Seq2SeqConfig(
            **SMALL, tie="none", target_vocab_size=33, norm=Norm(placement="post"), ffn_dim=8
        ),
        "MarianMTModel",
    ),
    "llama": (
        GptConfig(
            **SMALL,
            kv_heads=2,
            head_dim=6,
            position=Rotary(base=500.0),
            norm=Norm(form="rms", eps=1e-6),
            feedforward=Gated(),
            bias=False,
            tie="none",
        ),
        "LlamaForCausalLM",
    ),
    "vit": (
        VitConfig(
            dim=16,
            layers=2,
            heads=4,
            image_size=8,
            patch_size=4,
            feedforward=Plain(activation="gelu"),
            head=Classify(labels=("cat", "dog", "none")),
        ),
        "ViTForImageClassification",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_models_of_our_own_open_and_say_the_same(case: str, tmp_path: Path) -> None:
    config, name = OWN[case]
    ours = drawn(config)
    theirs = to_huggingface(ours)
    assert type(theirs).__name__ == name
    assert_says(opened(theirs, tmp_path), ours)
    assert type(from_huggingface(tmp_path).config) is type(config)


@pytest.mark.parametrize("name", UNPOOLED)
def test_a_bare_model_without_a_pooler_leaves_without_one(name: str, tmp_path: Path) -> None:
    theirs = without_pooler(name)
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert type(back) is type(theirs)
    assert back.pooler is None
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(x, back.state_dict()[n]) for n, x in theirs.state_dict().items())
    assert_says(back, ours, bound=1e-5)
    back.save_pretrained(tmp_path)
    assert from_huggingface(tmp_path).config == ours.config


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart", "bert"])
def test_a_parted_head_stands_where_the_rest_stands(family: str) -> None:
    """Whatever device our model is on; here theirs is on another than ours."""
    models = [from_huggingface(draw(family, seed)) for seed in range(24)]
    parted = next(x for x in models if getattr(output_of(x), "weight", None) is not None)
    with torch.device("meta"):
        theirs = to_huggingface(parted)
    assert {x.device.type for x in theirs.state_dict().values()} == {"meta"}


def output_of(model: nn.Module) -> Any:
    return getattr(getattr(model, "head", None), "output", getattr(model, "head", None))


POST = Norm(placement="post", eps=1e-12)
BERT = replace(preset("bert-base"), **SMALL)
GPT = replace(preset("gpt3-small"), **SMALL)
PAIR = Seq2SeqConfig(**SMALL)
HALVES = replace(PAIR, position=Sinusoidal(layout="halves"))
STRANGERS: dict[str, tuple[Any, str, str]] = {
    "Shaw": (replace(PAIR, position=Shaw(), attention=Dense()), "pegasus", "shaw"),
    "relative": (replace(GPT, position=Relative()), "gpt2", "relative"),
    "additive": (replace(BERT, score=Additive(), attention=Dense()), "bert", "additive"),
    "pre-norm BERT": (replace(BERT, norm=Norm(eps=1e-12)), "bert", "norm.placement=post"),
    "ALiBi": (replace(GPT, position=Alibi()), "gpt2", "alibi"),
    "no bias": (replace(GPT, bias=False), "gpt2", "bias"),
    "no query bias": (replace(GPT, qkv_bias=False), "gpt2", "qkv_bias=False"),
    "wide heads": (replace(GPT, head_dim=8), "gpt2", "head_dim=8"),
    "grouped": (replace(PAIR, kv_heads=2), "pegasus", "kv_heads=2"),
    "wave length": (replace(PAIR, position=Sinusoidal(base=500.0)), "pegasus", "base"),
    "one side": (
        replace(HALVES, decoder=StackOverrides(position=Learned())),
        "pegasus",
        "decoder.position",
    ),
    "one gated side": (
        replace(PAIR, encoder=StackOverrides(feedforward=Gated())),
        "pegasus",
        "encoder.feedforward",
    ),
    "a hidden group": (
        replace(PAIR, kv_heads=4, decoder=StackOverrides(heads=8)),
        "pegasus",
        "kv_heads=4",
    ),
    "three follow": (
        override_all(BERT, ["next_sentence.classes=3"]),
        "bert",
        "next_sentence.classes=3",
    ),
    "exact gated gelu": (  # "gated-gelu" means the other one there
        Seq2SeqConfig(
            **SMALL,
            norm=Norm(form="rms"),
            position=Buckets(),
            score=Dot(),
            feedforward=Gated(activation="gelu"),
            bias=False,
        ),
        "t5",
        "feedforward.activation=gelu",
    ),
    "interleaved rotary": (
        replace(OWN["llama"][0], position=Rotary(layout="interleaved")),
        "llama",
        "position.layout=halves",
    ),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_no_family_has_is_refused_with_the_reason_of_the_nearest(case: str) -> None:
    config, family, words = STRANGERS[case]
    with pytest.raises(UserError) as caught:
        to_huggingface(config.build())
    line = str(caught.value)
    assert f": {family} " in line
    assert words in line
    assert len(line.splitlines()) == 1


def test_positions_that_would_count_from_another_padding_token_are_refused() -> None:
    """RoBERTa finds a token's position by its padding token, which must be where ours is."""
    config = BertConfig(
        **SMALL,
        position=Learned(offset=3),
        norm=POST,
        embed=EmbeddingConfig(norm=POST, segments=1),
        head=Classify(),
        pooler=None,
        feedforward=Plain(activation="gelu"),
    )
    config = override_all(config, ["pooler=tanh"])
    model = config.build()
    with pytest.raises(UserError, match="pad_token_id"):
        to_huggingface(model)
    model.special = {"pad_token_id": 2}
    assert to_huggingface(model).config.pad_token_id == 2


CHANGES = """
    bias=true bias=false attention_bias=true attention_bias=false qkv_bias=true qkv_bias=false
    head_dim=3 head_dim=4 kv_heads=1 kv_heads=2 heads=1 heads=2 dim=12 layers=1 ffn_dim=5
    max_length=30 norm=pre norm=post norm.form=rms norm.form=layer norm.eps=0.1
    embed.norm.eps=0.1 embed.norm.form=rms embed.norm=none embed.norm=pre embed.scale=sqrt-dim
    embed.scale=one embed.segments=2 embed.segments=none embed.dim=5
    position=none position=sinusoidal position.layout=interleaved position.layout=halves
    position.base=300 position=learned position.offset=0 position.offset=3 position=rotary
    position=shaw position=t5 position.buckets=6 position=alibi position=relative
    score=dot score=scaled-dot score.scale=0.3 score=bilinear score=additive score=reduced-rank
    feedforward=gated feedforward=plain feedforward.activation=tanh feedforward.activation=gelu
    output.scale=one output.scale=inverse-sqrt-dim output.bias=none output.bias=fixed
    output.bias=trained tie=all tie=none tie=inputs tie=target target_vocab_size=60
    target_vocab_size=none encoder.layers=1 decoder.layers=2 encoder.heads=1 decoder.heads=2
    encoder.ffn_dim=5 decoder.hidden=9 encoder.position=learned decoder.position=rotary
    encoder.position=sinusoidal decoder.feedforward=gated encoder.feedforward=plain
    decoder.dropout=0.3 pooler=none pooler=tanh pooler.activation=relu pooler.dim=5
    next_sentence=none next_sentence.classes=2 next_sentence.classes=3
    head=none head=masked head=classify head=tag head=detect head.activation=relu
    head.activation=gelu head.tie=none head.tie=all head.dropout=0.2
    image_size=5 patch_size=1 channels=2 attention=dense dropout=0.3 attention_dropout=0.2
"""


def test_any_model_leaves_as_it_is_or_not_at_all() -> None:
    """Models that some family can express, with one or two settings changed."""
    rng = random.Random("leaving")
    left, refused, lines = 0, 0, []
    for number in range(200):
        known = from_huggingface(draw(rng.choice(list(CLASSES)), number)).config
        changes = rng.sample(CHANGES.split(), rng.choice([1, 1, 2]))
        try:
            ours = drawn(override_all(known, changes))
        except UserError:
            continue  # no model of ours either
        try:
            theirs = to_huggingface(ours)
        except UserError as error:
            lines += str(error).splitlines()
            refused += 1
            continue
        assert_says(theirs, ours, number, bound=1e-9)
        left += 1
    assert left > 30
    assert len(lines) == refused > 30


def test_labels_and_lengths_leave_both_ways(tmp_path: Path) -> None:
    """A tokenizer there cuts where the model ends, and labels are found by name too."""
    theirs = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=400,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=12,
            id2label={0: "no", 1: "yes"},
        )
    )
    tokenizer = Bpe(vocab_size=300).train(["a small dog sees a tree"])
    write_huggingface(from_huggingface(theirs), tokenizer, Decode(), tmp_path / "out")
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert opened.config.label2id == {"no": 0, "yes": 1}
    cut = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(cut("a small dog " * 20, truncation=True)["input_ids"]) == 12
