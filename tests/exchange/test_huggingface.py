"""Hugging Face models and ours: the same numbers in both directions, or a refusal with a reason."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.exchange.zoo import (
    CLASSES,
    SEEDS,
    UNPOOLED,
    both,
    draw,
    exact,
    strengthen,
    without_pooler,
)
from torch import Tensor, nn

from manyheads.config import override_all
from manyheads.decode.beam import Decode
from manyheads.errors import UserError
from manyheads.exchange import onnx
from manyheads.exchange.ctranslate2 import write_ctranslate2
from manyheads.exchange.family import from_hf_state, moves
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import KINDS, from_huggingface, in_halves, to_huggingface
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2SeqConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.models.vit import VitConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.layers import EmbeddingConfig, Gated, HeadConfig, Norm, Plain
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Buckets, Learned, Rotary, Shaw, Sinusoidal
from manyheads.nn.scores import Dot
from manyheads.presets import preset
from manyheads.recipes import read_recipe
from manyheads.summary import summarize
from manyheads.tokenizer.train import Characters

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Second names of tensors that an untied model of `transformers` 5 stores and never reads.
UNREAD = ("model.shared.weight", "cls.predictions.bias", "lm_head.bias")
every = pytest.mark.parametrize("family", CLASSES)


# --- import: numbers, gradients, parameter counts ---


def gradients(family: str, theirs: Any, ours: nn.Module) -> dict[str, Tensor]:
    """Their gradients by our names; zeros if there is none."""
    grads = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items()}
    grads |= {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    tied = {id(p): n for n, p in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        grads[name] = grads[tied[id(parameter)]]
    canonical = {KINDS[family].canonical(name): grad for name, grad in grads.items()}
    return from_hf_state(KINDS[family], ours, canonical)


@every
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_logits_and_gradients_are_theirs(family: str, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    for seed in SEEDS if dtype == torch.float32 else range(len(CLASSES[family]) + 3):
        theirs = draw(family, seed, dtype)
        with exact(theirs):
            ours = from_huggingface(theirs)
            expected, actual, real = both(family, theirs, ours, seed)
            assert actual.shape == expected.shape
            assert expected[real].numel() < 3 or expected[real].std() > 0.01
            torch.testing.assert_close(actual[real], expected[real], rtol=bound, atol=bound)
            weights = torch.randn_like(actual[real])
            ((actual[real] * weights).sum() / weights.numel()).backward()
            ((expected[real] * weights).sum() / weights.numel()).backward()
        grads = gradients(family, theirs, ours)
        for name, parameter in ours.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(
                grad, grads[name], rtol=bound, atol=bound, msg=f"{seed} {name}"
            )


@every
def test_parameter_counts_are_theirs(family: str) -> None:
    for seed in range(len(CLASSES[family])):
        theirs = draw(family, seed)
        ours = from_huggingface(theirs)
        tied = theirs.config.to_dict().get("tie_word_embeddings", True)
        sizes = [
            parameter.numel()
            for name, parameter in theirs.named_parameters()
            if parameter.requires_grad and (tied or name not in UNREAD)
        ]
        assert summarize(ours.config, 8).parameters == sum(sizes)
        assert len(moves(KINDS[family], ours)) == len(ours.state_dict())


# --- export ---


@every
def test_there_and_back_is_the_same_bit_for_bit(family: str) -> None:
    for seed in range(len(CLASSES[family]) + 2):
        theirs = draw(family, seed)
        back = to_huggingface(from_huggingface(theirs))
        assert type(back) is type(theirs)
        unread = () if theirs.config.to_dict().get("tie_word_embeddings", True) else UNREAD
        old, new = (
            {name: tensor for name, tensor in model.state_dict().items() if name not in unread}
            for model in (theirs, back)
        )
        assert old.keys() == new.keys()
        for name in old:
            assert torch.equal(old[name], new[name]), (seed, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every
def test_models_on_a_gpu(family: str) -> None:
    for seed in range(6):
        theirs = draw(family, seed)
        ours = from_huggingface(copy.deepcopy(theirs).cuda())
        assert {x.device.type for x in ours.state_dict().values()} == {"cuda"}
        back, expected = to_huggingface(ours), to_huggingface(from_huggingface(theirs))
        for name, tensor in expected.state_dict().items():
            same = torch.equal(back.state_dict()[name], tensor)
            assert same or name in UNREAD, (seed, name)


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
    model = getattr(transformers, opener).from_pretrained(folder, dtype=theirs.dtype)
    assert type(model) is type(theirs)
    return model.eval()


def assert_equal(theirs: Any, ours: nn.Module, seed: int = 0, bound: float = 1e-10) -> None:
    with exact(theirs), torch.no_grad():
        expected, actual, real = both(theirs.config.model_type, theirs, ours, seed)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual[real], expected[real], rtol=bound, atol=bound)


def drawn(config: Any) -> nn.Module:
    model = config.build().double().eval()
    strengthen(model)
    if getattr(getattr(config, "output", None), "bias", "none") != "none":
        model.head.bias.data.normal_()
    return model


@every
def test_exported_models_open_and_are_equal(family: str, tmp_path: Path) -> None:
    for seed in range(len(CLASSES[family])):
        ours = from_huggingface(draw(family, seed, torch.float64))
        assert_equal(opened(to_huggingface(ours), tmp_path / str(seed)), ours, seed)


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
    "language": (
        replace(read_recipe("language", ["data.folder=x"]).model, **SMALL),
        "Starcoder2ForCausalLM",
    ),
    "sliding window": (
        GptConfig(
            **SMALL,
            position=Rotary(),
            norm=Norm(form="rms"),
            feedforward=Gated(),
            bias=False,
            attention=Longformer(5),
        ),
        "MistralForCausalLM",
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
def test_our_own_models_open_and_are_equal(case: str, tmp_path: Path) -> None:
    config, name = OWN[case]
    ours = drawn(config)
    theirs = to_huggingface(ours)
    assert type(theirs).__name__ == name
    assert_equal(opened(theirs, tmp_path), ours)
    assert type(from_huggingface(tmp_path).config) is type(config)


@pytest.mark.parametrize("name", UNPOOLED)
def test_a_bare_model_without_a_pooler(name: str, tmp_path: Path) -> None:
    theirs = without_pooler(name)
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert type(back) is type(theirs)
    assert back.pooler is None
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(x, back.state_dict()[n]) for n, x in theirs.state_dict().items())
    assert_equal(back, ours, bound=1e-5)
    back.save_pretrained(tmp_path)
    assert from_huggingface(tmp_path).config == ours.config


POST = Norm(placement="post", eps=1e-12)
BERT = replace(preset("bert-base"), **SMALL)
GPT = replace(preset("gpt3-small"), **SMALL)
PAIR = Seq2SeqConfig(**SMALL)
HALVES = replace(PAIR, position=Sinusoidal(layout="halves"))
UNSUPPORTED: dict[str, tuple[Any, str, str]] = {
    "Shaw": (
        replace(PAIR, position=Shaw(), attention=Dense()),
        "pegasus",
        "model.position=sinusoidal (here shaw)",
    ),
    "pre-norm BERT": (replace(BERT, norm=Norm(eps=1e-12)), "bert", "norm.placement=post"),
    "no query bias": (replace(GPT, qkv_bias=False), "gpt2", "model.qkv_bias=true"),
    "grouped": (replace(PAIR, kv_heads=2), "pegasus", "model.kv_heads=4 (here 2)"),
    "one side": (
        replace(HALVES, decoder=StackOverrides(position=Learned())),
        "pegasus",
        "decoder.position",
    ),
    "a hidden group": (
        replace(PAIR, kv_heads=4, decoder=StackOverrides(heads=8)),
        "pegasus",
        "model.kv_heads=none (here 4)",
    ),
    "three follow": (
        override_all(BERT, ["next_sentence.classes=3"]),
        "bert",
        "model.next_sentence.classes=2 (here 3)",
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
        "model.feedforward.activation=gelu-tanh (here gelu)",
    ),
    "interleaved rotary": (
        replace(OWN["llama"][0], position=Rotary(layout="interleaved")),
        "llama",
        "position.layout=halves",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_no_family_has_is_refused(case: str) -> None:
    config, family, words = UNSUPPORTED[case]
    with pytest.raises(UserError) as caught:
        to_huggingface(config.build())
    line = str(caught.value)
    assert f": {family} needs " in line
    assert words in line
    assert "--to " in line
    assert len(line.splitlines()) == 1


def test_roberta_needs_its_padding_token() -> None:
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
    qk_norm=true qk_norm=false
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


def test_any_model_is_exported_exactly_or_not_at_all() -> None:
    """Models that some family can express, with one or two settings changed."""
    rng = random.Random("leaving")
    exported, refused, lines = 0, 0, []
    for number in range(120):
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
        assert_equal(theirs, ours, number, bound=1e-9)
        exported += 1
    assert exported > 20
    assert len(lines) == refused > 20


# --- the order of channels ---

PLAIN = Seq2SeqConfig(vocab_size=20, dim=12, layers=2, heads=3, ffn_dim=7, max_length=16)
REORDERED = {
    "post-norm": replace(PLAIN, norm=Norm(placement="post", form="rms")),
    "gated": replace(PLAIN, feedforward=Gated(), bias=False, attention_bias=True),
    "untied": replace(PLAIN, tie="none", target_vocab_size=17, output=HeadConfig(bias="trained")),
    "target": replace(PLAIN, tie="target", embed=EmbeddingConfig(norm=Norm(), segments=2)),
    "kv heads": replace(PLAIN, kv_heads=1, head_dim=5, position=Sinusoidal(base=300.0)),
}


@pytest.mark.parametrize("case", REORDERED)
def test_channels_in_another_order_give_the_same(case: str) -> None:
    model = drawn(REORDERED[case]).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reordered = in_halves(model)  # type: ignore[arg-type]
    assert reordered.training
    model.eval()
    reordered.eval()
    config: Any = model.config
    position = replace(config.position, layout="halves")
    assert reordered.config == replace(config, position=position)
    source, target = torch.randint(17, (3, 11)), torch.randint(17, (3, 9))
    real = torch.arange(11) < torch.tensor([[11], [4], [7]])
    expected = model(source, target, real)
    torch.testing.assert_close(reordered(source, target, real), expected, rtol=1e-12, atol=1e-12)
    # The order matters: with the other sinusoids, the same weights give something else.
    mixed = reordered.config.build().double().eval()
    mixed.load_state_dict(model.state_dict())
    assert not torch.allclose(mixed(source, target, real), expected, atol=1e-3)
    storage = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not storage & {tensor.data_ptr() for tensor in reordered.state_dict().values()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- attention implementations: exact ones are exported to every program, others to none ---

SIZES: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 8, "max_length": 16}
SIZES |= {"vocab_size": 265}  # the tokenizer's
INEXACT = [Local(4), Longformer(2), MemoryCompressed(), Linformer(4), Performer(8)]


@pytest.fixture(params=["object", "folder", "onnx", "ctranslate2"])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for package in ("ctranslate2", "onnx", "onnxscript"):
        pytest.importorskip(package)
    # Exporting a graph takes seconds, and does not depend on the attention implementation.
    monkeypatch.setattr(onnx, "_write", lambda graph, path: path.touch())
    tokenizer = Characters().train(["ab"])
    writers: dict[str, Any] = {
        "object": lambda model, folder: to_huggingface(model),
        "folder": lambda model, folder: write_huggingface(model, tokenizer, Decode(), folder),
        "onnx": onnx.write_onnx,
        "ctranslate2": lambda model, folder: write_ctranslate2(model, tokenizer, folder),
    }
    return writers[str(request.param)]


def refusal(write: Any, model: nn.Module, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        write(model, folder)
    assert len(str(caught.value).splitlines()) == 1
    assert not folder.exists()
    return str(caught.value)


def test_approximate_attention_is_refused(write: Any, tmp_path: Path) -> None:
    """By the name of the setting."""
    inexact = {kind for kind in get_args(AttentionFunctionConfig) if not kind.exact}
    assert {type(core) for core in INEXACT} == inexact
    for core in INEXACT:
        one_side = Seq2SeqConfig(**SIZES, encoder=StackOverrides(attention=core))
        line = refusal(write, one_side.build(), tmp_path / "out")
        assert f"model.encoder.attention={core.kind} " in line
        if isinstance(core, Linformer):
            continue  # no decoder has it
        both_sides = Seq2SeqConfig(
            **SIZES, attention=core, encoder=StackOverrides(attention=Dense())
        )
        for config in (both_sides, GptConfig(**SIZES, position=Learned(), attention=core)):
            line = refusal(write, config.build(), tmp_path / "out")
            assert f"model.attention={core.kind} " in line


def test_a_decoder_only_seq2seq_model_is_refused(tmp_path: Path) -> None:
    model = DecoderOnlySeq2SeqConfig(**SIZES).build()
    for writer in (lambda model, folder: to_huggingface(model), onnx.write_onnx):
        assert "decoder" in refusal(writer, model, tmp_path / "out").lower()
