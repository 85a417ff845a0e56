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
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator
from manyheads.errors import DataError, UserError
from manyheads.exchange.ctranslate2 import (
    Ctranslate2Generator,
    Ctranslate2Model,
    Ctranslate2Translator,
    token_names,
    write_ctranslate2,
)
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.models.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig, StackOverrides
from manyheads.nn.embedding import EmbeddingConfig, HeadConfig
from manyheads.nn.exact_attention import Dense
from manyheads.nn.feedforward import Gated, Plain
from manyheads.nn.masks import AttentionMask, Window, full, make_mask
from manyheads.nn.positions import Alibi, Buckets, Learned, NoPosition, Rotary, Shaw, Sinusoidal
from manyheads.nn.relative import Relative
from manyheads.nn.residual import Norm
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

pytest.importorskip("ctranslate2")

LONGEST = 24
NOISE = 2e-5  # float32; the greatest difference in 400 random models of all parts was 3e-5
FREE = Decode(beam=3, length_penalty=1.0, penalty="length", at_limit="truncate", suppress_tokens=())

POSITIONS: dict[str, Any] = {
    "none": NoPosition(),
    "sinusoidal": Sinusoidal(),
    "halves": Sinusoidal(layout="halves", base=500.0),
    "learned": Learned(),
    "offset": Learned(offset=2),
    "rotary": Rotary(),
    "interleaved": Rotary(layout="interleaved", base=100.0),
    "shaw": Shaw(max_distance=3),
    "t5": Buckets(buckets=8, max_distance=12),
    "alibi": Alibi(),
}
PARTS: dict[str, dict[str, Any]] = {
    **{name: {"position": position} for name, position in POSITIONS.items()},
    **{
        f"{name} shared": {"position": POSITIONS[name], "kv_heads": 2, "head_dim": 6}
        for name in ("sinusoidal", "rotary", "shaw", "t5", "alibi")
    },
    **{
        f"{name} one": {"position": POSITIONS[name], "kv_heads": 1}
        for name in ("learned", "interleaved", "shaw", "t5", "alibi")
    },
    "t5 wide": {"position": Buckets()},
    "t5 odd": {"position": Buckets(buckets=7, max_distance=9), "heads": 6, "head_dim": 4},
    "three heads": {"position": Alibi(), "heads": 3, "head_dim": 4},
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
    "dot shaw": {"score": Dot(), "position": Shaw(max_distance=3)},
    "bilinear": {"score": Bilinear(), "kv_heads": 2},
    "bilinear wide": {"score": Bilinear(key_size=7)},
    "bilinear narrow": {"score": Bilinear(key_size=3), "position": Alibi(), "bias": False},
    "reduced rank": {"score": ReducedRank(rank=2, key_size=5), "kv_heads": 2},
}
# What has a way of its own there: the reading of a prompt, and what follows the last block.
DECODER_ONLY = {
    name: parts
    for name, parts in PARTS.items()
    if ({"position", "tie", "output", "score"} & parts.keys()) and "t5" not in name
}
SIDES: dict[str, dict[str, Any]] = {
    "unequal": {
        "encoder": StackOverrides(layers=1, heads=2, ffn_dim=8, position=Alibi()),
        "decoder": StackOverrides(layers=3, position=Rotary(), feedforward=Gated()),
    },
    "inputs": {"tie": "inputs"},
    "target": {"tie": "target", "target_vocab_size": 300},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Characters(vocab_size=300).train(["abcdefghijklmnop qrstuv"])


def build(kind: type[GptConfig] | type[Seq2SeqConfig], size: int, parts: dict[str, Any]) -> Any:
    """A tiny model whose every number is its own: no bias is zero, no norm is one."""
    sizes = {"vocab_size": size, "dim": 16, "layers": 2, "heads": 4, "ffn_dim": 24}
    sizes |= {"max_length": LONGEST, "dropout": 0.0, "attention": Dense()}
    model = kind(**{**sizes, **parts}).build().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("exponents"):
                tensor.add_(torch.randn_like(tensor) * (1.0 if "positions" in name else 0.15))
    return model


def draw(size: int, *lengths: int) -> list[list[int]]:
    """Rows of ordinary tokens."""
    return [torch.randint(7, size, (length,)).tolist() for length in lengths]


def sentences(*lengths: int) -> list[str]:
    return ["".join("abcdefgh"[int(i)] for i in torch.randint(8, (n,))) for n in lengths]


@torch.no_grad()
def log_probabilities(model: nn.Module, before: list[int], texts: list[list[int]]) -> Tensor:
    """log P of each token of some texts after one source or prompt; nothing behind their ends."""
    wanted = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    given = torch.tensor([before]).expand(len(texts), -1)
    if isinstance(model, Gpt):
        logits = model(torch.cat([given, wanted[:, :-1]], dim=1))[:, len(before) - 1 :]
    else:
        start = torch.ones_like(wanted[:, :1])
        logits = model(given, torch.cat([start, wanted[:, :-1]], dim=1))
    found = logits.log_softmax(-1).gather(2, wanted[..., None])[..., 0]
    real = [torch.ones(len(text), dtype=torch.bool) for text in texts]
    return found * pad_sequence(real, batch_first=True)


def assert_our_numbers(
    model: nn.Module, before: list[int], found: list[Hypothesis], end: int, limit: int
) -> None:
    """log P is that of the text with its end, unless it was cut before it."""
    texts = [h.tokens if len(h.tokens) == limit else [*h.tokens, end] for h in found]
    ours = log_probabilities(model, before, texts).sum(1)
    np.testing.assert_allclose([h.log_probability for h in found], ours, atol=10 * NOISE)


@pytest.mark.parametrize("parts", DECODER_ONLY.values(), ids=DECODER_ONLY)
def test_a_decoder_gives_our_numbers(
    parts: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """All at once, and token by token after prompts of several lengths."""
    model = build(GptConfig, tokenizer.vocab_size, parts)
    write_ctranslate2(model, tokenizer, tmp_path)
    opened = Ctranslate2Model(tmp_path, "Generator")
    rows = draw(tokenizer.vocab_size, 9, 5, LONGEST)
    theirs = np.array(opened.runner.forward_batch([[opened.target[t] for t in r] for r in rows]))
    for row, logits in zip(rows, theirs, strict=True):
        ours = model(torch.tensor([row]))[0].detach().numpy()
        np.testing.assert_allclose(logits[: len(row)], ours, atol=NOISE)
    prompts, limit = draw(tokenizer.vocab_size, 1, 2, 7, 7, 13), 8
    found = Ctranslate2Generator(opened, tokenizer, FREE).search(prompts, limit)
    for prompt, hypotheses in zip(prompts, found, strict=True):
        assert len(hypotheses) == FREE.beam
        assert_our_numbers(model, prompt, hypotheses, tokenizer.end, limit)


@pytest.mark.parametrize("parts", (PARTS | SIDES).values(), ids=PARTS | SIDES)
def test_an_encoder_decoder_gives_our_numbers(
    parts: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Given texts, all at once; and what a beam writes, token by token."""
    size = tokenizer.vocab_size
    model = build(Seq2SeqConfig, size, parts)
    write_ctranslate2(model, tokenizer, tmp_path)
    opened = Ctranslate2Model(tmp_path, "Translator")
    sources, targets = draw(size, 9, 5, LONGEST - 1), draw(size, 7, LONGEST - 1, 4)
    theirs = opened.runner.score_batch(
        [[opened.source[token] for token in row] for row in sources],
        [[opened.target[token] for token in row] for row in targets],
    )
    for source, target, result in zip(sources, targets, theirs, strict=True):
        source, target = [*source, tokenizer.end], [*target, tokenizer.end]
        ours = log_probabilities(model, source, [target])[0]
        np.testing.assert_allclose(result.log_probs, ours, atol=NOISE)
    texts = sentences(3, 8, 5, 8)
    translator = Ctranslate2Translator(opened, tokenizer, FREE)
    for text, hypotheses in zip(texts, translator.search(texts), strict=True):
        source = [*tokenizer.encode(text), tokenizer.end]
        limit = FREE.limit(len(source), LONGEST)
        assert len(hypotheses) == FREE.beam
        assert_our_numbers(model, source, hypotheses, tokenizer.end, limit)


def ending(model: Any, end: int) -> Any:
    """The same model, fonder of ending: its texts are of many lengths."""
    with torch.no_grad():
        model.head.bias[end] += 4.0
    return model


TRAINED = {"output": HeadConfig(bias="trained")}
SEARCHES = {
    f"beam {beam}, {penalty} {alpha}": Decode(
        beam=beam,
        length_penalty=alpha,
        penalty=penalty,
        at_limit="truncate",
        # Limits that are met, for each length its own. All hypotheses end there, and those that
        # are too many are dropped by |y|^α: only with that penalty are they the worst.
        max_length_ratio=1.0 if penalty == "length" else 2.0,
        max_length_extra=2 if penalty == "length" else 20,
        suppress_tokens=(),
    )
    for beam, penalty, alpha in (
        *((beam, "length", alpha) for beam in (1, 2, 5) for alpha in (1.0, -0.5)),
        *((5, "gnmt", 0.6), (2, "gnmt", 2.0), (1, "gnmt", 0.6)),
    )
}


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        scores = [h.score for h in other]
        np.testing.assert_allclose([h.score for h in one], scores, rtol=1e-4, atol=10 * NOISE)


@pytest.fixture(scope="module")
def pair(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Seq2Seq, Ctranslate2Model]:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("seq2seq")
    model = ending(build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED), tokenizer.end)
    write_ctranslate2(model, tokenizer, folder)
    return model, Ctranslate2Model(folder, "Translator")


@pytest.mark.parametrize("decode", SEARCHES.values(), ids=SEARCHES)
def test_a_search_finds_what_ours_finds(
    decode: Decode, pair: tuple[Seq2Seq, Ctranslate2Model], tokenizer: Tokenizer
) -> None:
    """With a length penalty the stopping rules are one; without a ban log P is one."""
    texts = sentences(*range(1, 16, 2), 4)
    ours = Translator(pair[0], tokenizer, decode)
    theirs = Ctranslate2Translator(pair[1], tokenizer, decode)
    assert ours.translate(texts) == theirs.translate(texts)
    shown = decode.beam if decode.penalty == "length" else 1
    found = [one[:shown] for one in ours.search(texts)]
    assert_same(found, [one[:shown] for one in theirs.search(texts)])
    assert all(len(one) == 1 for one in theirs.search(texts, n_best=1))


def test_without_a_penalty_it_finds_no_worse(
    pair: tuple[Seq2Seq, Ctranslate2Model], tokenizer: Tokenizer
) -> None:
    decode = Decode(beam=4, length_penalty=0.0, at_limit="truncate", suppress_tokens=())
    texts = sentences(*range(1, 16))
    ours = Translator(pair[0], tokenizer, decode).search(texts, n_best=1)
    theirs = Ctranslate2Translator(pair[1], tokenizer, decode).search(texts, n_best=1)
    for one, other in zip(ours, theirs, strict=True):
        assert other[0].score >= one[0].score - 10 * NOISE


@pytest.mark.parametrize("decode", list(SEARCHES.values())[::2], ids=list(SEARCHES)[::2])
def test_a_decoder_continues_as_ours_does(
    decode: Decode, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = ending(build(GptConfig, tokenizer.vocab_size, TRAINED), tokenizer.end)
    write_ctranslate2(model, tokenizer, tmp_path)
    opened = Ctranslate2Model(tmp_path, "Generator")
    prompts = [[], *draw(tokenizer.vocab_size, 1, 2, 2, 9, 14)]
    ours = Generator(model, tokenizer, decode).search(prompts, 10, n_best=1)
    theirs = Ctranslate2Generator(opened, tokenizer, decode)
    assert_same([one[:1] for one in ours], theirs.search(prompts, 10, n_best=1))
    assert theirs.generate(prompts, 10) == [one[0].tokens for one in ours]


@pytest.mark.parametrize(
    "changes",
    [
        {"forced_bos": 61, "min_length": 2},
        {"forced_bos": 61, "beam": 1},
        {"min_length": 4},
        {"min_length": 4, "beam": 1},
    ],
    ids=str,
)
def test_first_and_shortest_are_honoured(
    changes: dict[str, int], pair: tuple[Seq2Seq, Ctranslate2Model], tokenizer: Tokenizer
) -> None:
    """Where the end is forbidden it has no probability there, so that only texts are compared."""
    decode = replace(FREE, **changes)
    texts = sentences(1, 4, 4, 9)
    ours = Translator(pair[0], tokenizer, decode).search(texts, n_best=1)
    theirs = Ctranslate2Translator(pair[1], tokenizer, decode).search(texts, n_best=1)
    for one, other in zip(ours, theirs, strict=True):
        assert other[0].tokens == one[0].tokens
        assert len(other[0].tokens) >= decode.min_length
        assert decode.forced_bos is None or other[0].tokens[0] == decode.forced_bos


def test_special_tokens_are_never_written(
    pair: tuple[Seq2Seq, Ctranslate2Model], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """log P is then that of a text without any: the tokens that are left share the whole."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED)
    with torch.no_grad():
        model.head.bias[:7] += 6.0
    write_ctranslate2(model, tokenizer, tmp_path)
    opened = Ctranslate2Model(tmp_path, "Translator")
    decode = Decode(beam=3, at_limit="truncate")
    texts = sentences(2, 5, 8)
    found = Ctranslate2Translator(opened, tokenizer, decode).search(texts)
    banned = set(range(7)) - {tokenizer.end}
    assert not banned & {token for one in found for h in one for token in h.tokens}
    with torch.no_grad():
        model.head.bias[list(banned)] = -1e9
    for text, hypotheses in zip(texts, found, strict=True):
        source = [*tokenizer.encode(text), tokenizer.end]
        limit = decode.limit(len(source), LONGEST)
        assert_our_numbers(model, source, hypotheses, tokenizer.end, limit)


def test_settings_of_an_imported_model_go_into_the_folder(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Another start, another end, a token before the source: as ours, or refused."""
    decode = replace(FREE, start=0, end=5, source_start=6)
    model = build(Seq2SeqConfig, tokenizer.vocab_size, TRAINED)
    ending(model, 5)
    write_ctranslate2(model, tokenizer, tmp_path, decode=decode)
    opened = Ctranslate2Model(tmp_path, "Translator")
    texts = sentences(1, 4, 4, 9)
    ours = Translator(model, tokenizer, decode).search(texts)
    assert_same(ours, Ctranslate2Translator(opened, tokenizer, decode).search(texts))
    for name in ("start", "end", "source_start"):
        other = Ctranslate2Translator(opened, tokenizer, replace(decode, **{name: None}))
        with pytest.raises(UserError, match="export the model again"):
            other.translate(texts)


@pytest.mark.parametrize(
    "quantization",
    ["int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"],
)
def test_small_weights_give_nearly_our_numbers(
    quantization: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """And the writer, which quantizes in place, leaves the model as it is."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, {"position": Learned()})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_ctranslate2(model, tokenizer, tmp_path / quantization, quantization)
    write_ctranslate2(model, tokenizer, tmp_path / "float32")
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    size = [(tmp_path / n / "model.bin").stat().st_size for n in (quantization, "float32")]
    assert size[0] < 0.75 * size[1]
    opened = Ctranslate2Model(tmp_path / quantization, "Translator")
    text = sentences(8)[0]
    source = [*tokenizer.encode(text), tokenizer.end]
    [found] = Ctranslate2Translator(opened, tokenizer, FREE).search([text])
    wanted = [h.tokens for h in found if len(h.tokens) == FREE.limit(len(source), LONGEST)]
    ours = log_probabilities(model, source, wanted).sum(1)
    theirs = [h.log_probability for h in found if h.tokens in wanted]
    np.testing.assert_allclose(theirs, ours, rtol=0.05)


def test_ids_without_a_token_have_names_of_their_own() -> None:
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
    "additive": (Seq2SeqConfig, {"score": Additive()}, "inner products"),
    "epsilons": (
        GptConfig,
        {"embed": EmbeddingConfig(norm=Norm(eps=0.1))},
        r"epsilon.*1e-05, 0\.1",
    ),
    "t5 prompt": (GptConfig, {"position": Buckets()}, "wrong T5 distances"),
    "shaw": (GptConfig, {"position": Shaw(), "score": Bilinear()}, "score=scaled-dot"),
    "relative": (GptConfig, {"position": Relative()}, "no RelativePosition"),
    "nothing": (GptConfig, {"position": Shaw(), "score": ScaledDot(scale=0.0)}, "scaled-dot"),
}


@pytest.mark.parametrize(("kind", "parts", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_express_is_refused(
    kind: type[GptConfig] | type[Seq2SeqConfig],
    parts: dict[str, Any],
    reason: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    model = build(kind, tokenizer.vocab_size, parts)
    with pytest.raises(UserError, match=reason):
        write_ctranslate2(model, tokenizer, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_an_encoder_with_alibi_sees_as_far_as_the_longest_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """There it is a table, and a text longer than the model's goes past its end."""
    model = build(Seq2SeqConfig, tokenizer.vocab_size, {"position": Alibi()})
    write_ctranslate2(model, tokenizer, tmp_path)
    opened = Ctranslate2Model(tmp_path, "Translator")
    [source] = draw(tokenizer.vocab_size, 2 * LONGEST)
    [theirs] = opened.runner.score_batch([[opened.source[token] for token in source]], [["b"]])
    tokens = torch.tensor([[*source, tokenizer.end]])
    sight = make_mask(Window(LONGEST - 1), tokens.shape[1])
    wanted = [[tokenizer.encode("b")[0], tokenizer.end]]
    with torch.no_grad():
        place = model.encoder.position
        x = model.encoder_embedding(model.tokens, tokens, place, sight.query_positions)
        memory = EncoderOutput(
            model.encoder(x, sight), AttentionMask(full, sight.query_positions, sight.key_positions)
        )
        hidden = model.decode(torch.tensor([[tokenizer.start, wanted[0][0]]]), memory)
        ours = model.logits(hidden).log_softmax(-1)[0]
    np.testing.assert_allclose(
        theirs.log_probs, ours.gather(1, torch.tensor(wanted).T)[:, 0], atol=NOISE
    )


def test_a_folder_is_whole_or_not_there(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(GptConfig, tokenizer.vocab_size, {})
    with pytest.raises(UserError, match=r"quantization int9.*int8"):
        write_ctranslate2(model, tokenizer, tmp_path / "folder", "int9")

    def no_room(self: Tokenizer, path: Path) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", no_room)
        with pytest.raises(DataError, match="no room"):
            write_ctranslate2(model, tokenizer, tmp_path / "folder")
    assert not list(tmp_path.iterdir())
    write_ctranslate2(model, tokenizer, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(UserError, match="already"):
        write_ctranslate2(model, tokenizer, tmp_path / "folder")


def test_a_folder_that_is_none_is_said_in_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no .*model\.bin"):
        Ctranslate2Model(tmp_path, "Translator")
    write_ctranslate2(build(Seq2SeqConfig, tokenizer.vocab_size, {}), tokenizer, tmp_path)
    weights, settings = tmp_path / "model.bin", tmp_path / "config.json"
    with pytest.raises(DataError, match="export it again"):
        Ctranslate2Model(tmp_path, "Generator")  # the other kind
    whole = settings.read_text()
    for broken in ("{", "{}", "[]"):
        settings.write_text(broken)
        with pytest.raises(DataError, match="export it again"):
            Ctranslate2Model(tmp_path, "Translator")
    settings.write_text(whole)
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(DataError, match="export it again"):
        Ctranslate2Model(tmp_path, "Translator")


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({}, "a" * LONGEST, "positions end at 24"),
        ({"stopping": "heuristic"}, "a", "decode.stopping=early"),
    ],
)
def test_what_it_cannot_translate_is_refused(
    changes: dict[str, Any],
    text: str,
    reason: str,
    pair: tuple[Seq2Seq, Ctranslate2Model],
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(UserError, match=reason):
        Ctranslate2Translator(pair[1], tokenizer, replace(FREE, **changes)).translate([text])


def test_what_it_cannot_continue_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    size = tokenizer.vocab_size
    model = build(GptConfig, size, {"position": Learned()})
    write_ctranslate2(model, tokenizer, tmp_path)
    generator = Ctranslate2Generator(Ctranslate2Model(tmp_path, "Generator"), tokenizer, FREE)
    for prompt, reason in (([size], f"token {size}"), ([9] * (LONGEST + 1), "end at 24")):
        with pytest.raises(UserError, match=reason):
            generator.generate([prompt], 1)
    with pytest.raises(UserError, match="limit=0"):
        generator.generate([[9]], 0)
    with pytest.raises(UserError, match="seed"):
        generator.stream([9], 4, Sample())
    greedy = replace(generator, decode=replace(FREE, beam=1)).generate([[9]], 4)
    assert list(generator.stream([9], 4)) == greedy[0]
    # The last token is written, and never read: there is a place for one more than are left.
    assert len(generator.generate([[9] * (LONGEST - 1)], 10)[0]) <= 2
    assert len(generator.generate([[9] * LONGEST], 10)[0]) <= 1
