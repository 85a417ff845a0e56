"""CTranslate2 folders: the same numbers as ours for every part, the same texts, or a refusal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyheads.decode.beam import Decode, Hypothesis
from manyheads.decode.generate import GREEDY, Generator
from manyheads.decode.translate import Translator
from manyheads.errors import DataError, UserError
from manyheads.exchange.ctranslate2 import (
    Ctranslate2Generator,
    Ctranslate2Model,
    Ctranslate2Translator,
    token_names,
    unsupported,
    write_ctranslate2,
)
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig, StackOverrides
from manyheads.nn.attention import Dense
from manyheads.nn.experts import Experts
from manyheads.nn.layers import EmbeddingConfig, Gated, HeadConfig, Norm, Plain
from manyheads.nn.local import Local
from manyheads.nn.masks import AttentionMask, Window, full, make_mask
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.scores import Additive, Bilinear, Dot, ScaledDot
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

pytest.importorskip("ctranslate2")

MAX_LENGTH = 24
TOLERANCE = 2e-5  # float32; the greatest difference in 400 random models of all parts was 3e-5
FREE = Decode(beam=3, length_penalty=1.0, penalty="length", at_limit="truncate", suppress_tokens=())
ALIBI, SHAW, T5 = Alibi(), Shaw(max_distance=3), Buckets(buckets=8, max_distance=12)

PARTS: dict[str, dict[str, Any]] = {
    "none": {"position": NoPosition()},
    "sinusoidal": {"position": Sinusoidal(), "kv_heads": 2, "head_dim": 6},
    "halves": {"position": Sinusoidal(layout="halves", base=500.0)},
    "learned": {"position": Learned(), "kv_heads": 1},
    "offset": {"position": Learned(offset=2)},
    "rotary": {"position": Rotary(), "kv_heads": 2, "head_dim": 6},
    "interleaved": {"position": Rotary(layout="interleaved", base=100.0), "kv_heads": 1},
    **{
        f"{position.kind} {kv_heads}": {"position": position, "kv_heads": kv_heads, "head_dim": 6}
        for position in (SHAW, T5, ALIBI)
        for kv_heads in (2, 4)
    },
    "t5 wide": {"position": Buckets()},
    "t5 odd": {"position": Buckets(buckets=7, max_distance=9), "heads": 6, "head_dim": 4},
    "three heads": {"position": ALIBI, "heads": 3, "head_dim": 4},
    "post": {"norm": Norm(placement="post")},
    "rms": {"norm": Norm(form="rms")},
    "rms post": {"norm": Norm(form="rms", placement="post"), "bias": False},
    "epsilon": {"norm": Norm(eps=0.3), "embed": EmbeddingConfig(norm=Norm(eps=0.3))},
    "other norm": {"embed": EmbeddingConfig(norm=Norm(form="rms"), scale="sqrt-dim")},
    "segments": {"embed": EmbeddingConfig(segments=2, scale="sqrt-dim"), "position": Rotary()},
    **{f"plain {a}": {"feedforward": Plain(activation=a)} for a in ("gelu", "gelu-tanh", "tanh")},
    **{f"gated {a}": {"feedforward": Gated(activation=a)} for a in ("silu", "gelu", "relu")},
    "no bias": {"bias": False},
    "only qkv bias": {"bias": False, "qkv_bias": True},
    "untied": {"tie": "none", "output": HeadConfig(bias="fixed")},
    "output": {"output": HeadConfig(scale="inverse-sqrt-dim", bias="trained")},
    "dot": {"score": Dot()},
    "scale": {"score": ScaledDot(scale=-0.7)},
    "dot shaw": {"score": Dot(), "position": SHAW},
}
SEQ2SEQ: dict[str, dict[str, Any]] = PARTS | {
    "unequal": {
        "encoder": StackOverrides(layers=1, heads=2, ffn_dim=8, position=ALIBI),
        "decoder": StackOverrides(layers=3, position=Rotary(), feedforward=Gated()),
    },
    "inputs": {"tie": "inputs"},
    "target": {"tie": "target", "target_vocab_size": 300},
}
GPT = {name: parts for name, parts in PARTS.items() if "t5" not in name}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Characters(vocab_size=300).train(["abcdefghijklmnop qrstuv"])


def build(kind: type[GptConfig] | type[Seq2SeqConfig], size: int, parts: dict[str, Any]) -> Any:
    """A tiny model in which no bias is zero and no norm is one."""
    sizes = {"vocab_size": size, "dim": 16, "layers": 2, "heads": 4, "ffn_dim": 24}
    sizes |= {"max_length": MAX_LENGTH, "dropout": 0.0, "attention": Dense()}
    model = kind(**{**sizes, **parts}).build().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("exponents"):
                tensor.add_(torch.randn_like(tensor) * (1.0 if "positions" in name else 0.15))
    return model


def opened(
    model: Any, tokenizer: Tokenizer, folder: Path, decode: Decode | None = None
) -> Ctranslate2Model:
    write_ctranslate2(model, tokenizer, folder, decode=decode)
    return Ctranslate2Model(folder, "Generator" if isinstance(model, Gpt) else "Translator")


def draw(size: int, *lengths: int) -> list[list[int]]:
    """Rows of ordinary tokens."""
    return [torch.randint(7, size, (length,)).tolist() for length in lengths]


def sentences(*lengths: int) -> list[str]:
    return ["".join("abcdefgh"[int(i)] for i in torch.randint(8, (n,))) for n in lengths]


@torch.no_grad()
def log_probabilities(model: nn.Module, before: list[int], texts: list[list[int]]) -> Tensor:
    """log P of each token of some texts after one source or prompt; 0 after their ends."""
    labels = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    inputs = torch.tensor([before]).expand(len(texts), -1)
    if isinstance(model, Gpt):
        logits = model(torch.cat([inputs, labels[:, :-1]], dim=1))[:, len(before) - 1 :]
    else:
        start = torch.ones_like(labels[:, :1])
        logits = model(inputs, torch.cat([start, labels[:, :-1]], dim=1))
    log_probs = logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    real = [torch.ones(len(text), dtype=torch.bool) for text in texts]
    return log_probs * pad_sequence(real, batch_first=True)


def assert_log_probabilities(
    model: nn.Module, before: list[int], hypotheses: list[Hypothesis], end: int, limit: int
) -> None:
    """log P is that of the text with its end, unless it was cut before it."""
    texts = [h.tokens if len(h.tokens) == limit else [*h.tokens, end] for h in hypotheses]
    ours = log_probabilities(model, before, texts).sum(1)
    np.testing.assert_allclose([h.log_probability for h in hypotheses], ours, atol=10 * TOLERANCE)


@pytest.mark.parametrize("parts", GPT.values(), ids=GPT)
def test_a_decoder_gives_our_numbers(
    parts: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """All at once, and token by token after prompts of several lengths."""
    size = tokenizer.vocab_size
    model = build(GptConfig, size, parts)
    folder = opened(model, tokenizer, tmp_path)
    rows = draw(size, 9, 5, MAX_LENGTH)
    theirs = np.array(folder.runner.forward_batch([[folder.target[t] for t in r] for r in rows]))
    for row, logits in zip(rows, theirs, strict=True):
        ours = model(torch.tensor([row]))[0].detach().numpy()
        np.testing.assert_allclose(logits[: len(row)], ours, atol=TOLERANCE)
    prompts = draw(size, 1, 2, 7, 7, 13)
    generator = Ctranslate2Generator(folder, tokenizer, FREE, model)
    expected = Generator(model, tokenizer, FREE).sample(prompts, 8, GREEDY)
    assert generator.sample(prompts, 8, GREEDY) == expected


@pytest.mark.parametrize("parts", SEQ2SEQ.values(), ids=SEQ2SEQ)
def test_an_encoder_decoder_gives_our_numbers(
    parts: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Given texts, all at once; and what a beam search generates, token by token."""
    size = tokenizer.vocab_size
    model = build(Seq2SeqConfig, size, parts)
    folder = opened(model, tokenizer, tmp_path)
    sources, targets = draw(size, 9, 5, MAX_LENGTH - 1), draw(size, 7, MAX_LENGTH - 1, 4)
    theirs = folder.runner.score_batch(
        [[folder.source[token] for token in row] for row in sources],
        [[folder.target[token] for token in row] for row in targets],
    )
    for source, target, scored in zip(sources, targets, theirs, strict=True):
        ours = log_probabilities(model, [*source, tokenizer.end], [[*target, tokenizer.end]])[0]
        np.testing.assert_allclose(scored.log_probs, ours, atol=TOLERANCE)
    texts = sentences(3, 8, 5, 8)
    translator = Ctranslate2Translator(folder, tokenizer, FREE, model, exact=False)
    for text, hypotheses in zip(texts, translator.search(texts), strict=True):
        source = [*tokenizer.encode(text), tokenizer.end]
        limit = FREE.limit(len(source), MAX_LENGTH)
        assert len(hypotheses) == FREE.beam
        assert_log_probabilities(model, source, hypotheses, tokenizer.end, limit)


TRAINED = {"output": HeadConfig(bias="trained")}
SEARCHES = {
    f"beam {beam}, {penalty} {alpha}": Decode(
        beam=beam,
        length_penalty=alpha,
        penalty=penalty,
        at_limit="truncate",
        # Limits that are reached, for each length its own. All hypotheses end there, and those
        # that are too many are dropped by |y|^α: only with that penalty are they the worst.
        max_length_ratio=1.0 if penalty == "length" else 2.0,
        max_length_extra=2 if penalty == "length" else 20,
        suppress_tokens=(),
    )
    for beam, penalty, alpha in (
        *((beam, "length", alpha) for beam in (1, 2, 5) for alpha in (1.0, -0.5)),
        *((5, "gnmt", 0.6), (2, "gnmt", 2.0), (1, "gnmt", 0.6)),
    )
}


def ending(model: Any, end: int) -> Any:
    """The same model with a more probable end, so that its texts have many lengths."""
    with torch.no_grad():
        model.head.bias[end] += 4.0
    return model


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for expected, actual in zip(ours, theirs, strict=True):
        assert [h.tokens for h in expected] == [h.tokens for h in actual]
        scores = [h.score for h in expected]
        np.testing.assert_allclose([h.score for h in actual], scores, rtol=1e-4, atol=2e-4)


@pytest.fixture(scope="module")
def pair(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Seq2Seq, Ctranslate2Model]:
    torch.manual_seed(1)
    model = ending(build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED), tokenizer.end)
    return model, opened(model, tokenizer, tmp_path_factory.mktemp("seq2seq"))


@pytest.mark.parametrize("decode", SEARCHES.values(), ids=SEARCHES)
def test_a_search_gives_what_ours_gives(
    decode: Decode, pair: tuple[Seq2Seq, Ctranslate2Model], tokenizer: Tokenizer
) -> None:
    """With a length penalty the stopping rules agree; without suppressed tokens log P does."""
    texts = sentences(*range(1, 16, 2), 4)
    ours = Translator(pair[0], tokenizer, decode)
    theirs = Ctranslate2Translator(pair[1], tokenizer, decode, pair[0], exact=False)
    assert ours.translate(texts) == theirs.translate(texts)
    shown = decode.beam if decode.penalty == "length" else 1
    assert_same([x[:shown] for x in ours.search(texts)], [x[:shown] for x in theirs.search(texts)])
    assert all(len(hypotheses) == 1 for hypotheses in theirs.search(texts, n_best=1))


def test_texts_with_suppressed_tokens_are_those_of_our_search(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """CTranslate2 generates special tokens, which are likely here; then our search is repeated."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED)
    with torch.no_grad():
        model.head.bias[:7] += 6.0
    decode, texts = Decode(beam=3, at_limit="truncate"), sentences(2, 5, 8)
    folder = opened(model, tokenizer, tmp_path)
    expected = Translator(model, tokenizer, decode).search(texts, n_best=1)
    theirs = Ctranslate2Translator(folder, tokenizer, decode, model)
    assert_same(expected, theirs.search(texts, n_best=1))


def test_special_tokens_of_an_imported_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Another start, another end, a token before the source."""
    decode = replace(FREE, start=0, end=5, source_start=6)
    model = ending(build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED), 5)
    folder = opened(model, tokenizer, tmp_path, decode)
    texts = sentences(1, 4, 4, 9)
    ours = Translator(model, tokenizer, decode).search(texts)
    theirs = Ctranslate2Translator(folder, tokenizer, decode, model, exact=False)
    assert_same(ours, theirs.search(texts))


@pytest.mark.parametrize(
    "quantization",
    ["int8", "int8_bfloat16", "int16", "float16"],
)
def test_quantized_weights_give_nearly_our_numbers(
    quantization: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """And the model is unchanged, although CTranslate2 quantizes in place."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, {"position": Learned()})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_ctranslate2(model, tokenizer, tmp_path / quantization, quantization)
    write_ctranslate2(model, tokenizer, tmp_path / "float32")
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    size = [(tmp_path / n / "model.bin").stat().st_size for n in (quantization, "float32")]
    assert size[0] < 0.75 * size[1]
    folder = Ctranslate2Model(tmp_path / quantization, "Translator")
    text = sentences(8)[0]
    source = [*tokenizer.encode(text), tokenizer.end]
    [scored] = folder.runner.score_batch([[folder.source[t] for t in source[:-1]]], [["b", "c"]])
    target = [*tokenizer.encode("bc"), tokenizer.end]
    ours = log_probabilities(model, source, [target])[0]
    np.testing.assert_allclose(scored.log_probs, ours, rtol=0.1)


def test_ids_without_a_token_have_unique_names() -> None:
    """A hole, a model larger than its tokenizer, and a token that has the name of a hole."""
    holes = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<no token 1>": 2, "</s>": 3, "<s>": 6}, "a")
    )
    names = token_names(Tokenizer(holes), 9)
    assert len(set(names)) == len(names) == 9
    assert [names[i] for i in (0, 2, 3, 6)] == ["a", "<no token 1>", "</s>", "<s>"]
    with pytest.raises(UserError, match=r"7 tokens, .* 6"):
        token_names(Tokenizer(holes), 6)


REFUSED: dict[str, tuple[type[GptConfig] | type[Seq2SeqConfig], dict[str, Any], str]] = {
    "additive": (Seq2SeqConfig, {"score": Additive()}, "model.score=additive"),
    "bilinear": (GptConfig, {"score": Bilinear()}, "model.score=bilinear"),
    "epsilons": (GptConfig, {"embed": EmbeddingConfig(norm=Norm(eps=0.1))}, r"1e-05, 0\.1"),
    "t5 prompt": (GptConfig, {"position": Buckets()}, "model.position=t5"),
    "relative": (GptConfig, {"position": Relative()}, "RelativePosition"),
    "experts": (Seq2SeqConfig, {"feedforward": Experts()}, "ExpertFeedForward"),
    "local": (GptConfig, {"attention": Local(4)}, "model.attention=local"),
}


@pytest.mark.parametrize(("kind", "parts", "reason"), REFUSED.values(), ids=REFUSED)
def test_unsupported_parts_are_refused(
    kind: Any, parts: dict[str, Any], reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = build(kind, tokenizer.vocab_size, parts)
    with pytest.raises(UserError, match=reason) as refusal:
        write_ctranslate2(model, tokenizer, tmp_path / "folder")
    assert not list(tmp_path.iterdir())
    assert str(unsupported(model, Decode())) in str(refusal.value)


def test_settings_of_the_search_and_other_models_are_unsupported(tokenizer: Tokenizer) -> None:
    model = build(GptConfig, tokenizer.vocab_size, {})
    assert unsupported(model, FREE) is None
    assert "decode.stopping=exact" in str(unsupported(model, replace(FREE, stopping="exact")))
    assert unsupported(model, replace(FREE, stopping="exact", beam=1)) is None
    assert "Linear" in str(unsupported(nn.Linear(1, 1), FREE))


def test_an_encoder_with_alibi_attends_as_far_as_max_length(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """There it is a table, and a longer text goes beyond its end."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, {"position": ALIBI})
    folder = opened(model, tokenizer, tmp_path)
    [source] = draw(tokenizer.vocab_size, 2 * MAX_LENGTH)
    [scored] = folder.runner.score_batch([[folder.source[token] for token in source]], [["b"]])
    tokens = torch.tensor([[*source, tokenizer.end]])
    mask = make_mask(Window(MAX_LENGTH - 1), tokens.shape[1])
    target = [tokenizer.encode("b")[0], tokenizer.end]
    with torch.no_grad():
        position = model.encoder.position
        x = model.encoder_embedding(model.tokens, tokens, position, mask.query_positions)
        everywhere = AttentionMask(full, mask.query_positions, mask.key_positions)
        memory = EncoderOutput(model.encoder(x, mask), everywhere)
        hidden = model.decode(torch.tensor([[tokenizer.start, target[0]]]), memory)
        ours = model.logits(hidden).log_softmax(-1)[0].gather(1, torch.tensor([target]).T)[:, 0]
    np.testing.assert_allclose(scored.log_probs, ours, atol=TOLERANCE)


def test_a_folder_is_complete_or_not_there(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(GptConfig, tokenizer.vocab_size, {})
    folder = tmp_path / "folder"
    with pytest.raises(UserError, match=r"quantization int9.*int8"):
        write_ctranslate2(model, tokenizer, folder, "int9")

    def disk_full(self: Tokenizer, path: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", disk_full)
        with pytest.raises(DataError, match="disk full"):
            write_ctranslate2(model, tokenizer, folder)
    assert not list(tmp_path.iterdir())
    write_ctranslate2(model, tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_broken_conversion_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = build(Seq2SeqConfig, tokenizer.vocab_size, {})
    write_ctranslate2(model, tokenizer, tmp_path / "out")
    for name in ("model.bin", "shared_vocabulary.json"):
        content = (tmp_path / "out" / name).read_bytes()
        (tmp_path / "out" / name).write_bytes(content[:50])
        with pytest.raises(DataError, match="is not a conversion"):
            Ctranslate2Model(tmp_path / "out", "Translator")
        (tmp_path / "out" / name).write_bytes(content)
    with pytest.raises(DataError, match="is not a conversion"):
        Ctranslate2Model(tmp_path / "out", "Generator")
