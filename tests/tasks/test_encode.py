"""What encoders say of lines: the vectors, words and labels of `transformers`, line by line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tests.exchange.folders import LINES, fast, minilm, saved
from torch import Tensor

from manyheads.errors import UserError
from manyheads.loading import load_run
from manyheads.models.bert import BertConfig
from manyheads.tasks import encode
from manyheads.tasks.encode import Guess, TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe

transformers = pytest.importorskip("transformers")

ENCODERS = ["bert", "roberta", "electra", "distilbert"]
SEGMENTED = ("bert", "electra")
TEXTS = [
    *LINES,
    "",
    "dog",
    "where is the dog?\tin the green house",
    "unknown ☃ signs, <s> and [SEP] spelled out",
    " ".join(LINES),  # too long
    f"a tree\t{' '.join(LINES)}",
    f"{' '.join(LINES[:2])} {LINES[1]}\t{' '.join(LINES[2:])} {LINES[1]}",
]
Open = Callable[..., tuple[Path, Any, TextEncoder]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A folder with a random model, the model itself, and ours that reads."""
    known: dict[str, tuple[Path, Any, TextEncoder]] = {}

    def find(family: str, name: str = "", **settings: Any) -> tuple[Path, Any, TextEncoder]:
        key = f"{family} {name} {settings}"
        if key not in known:
            folder, theirs = saved(tmp_path_factory.mktemp(family), family, name, **settings)
            known[key] = folder, theirs, load_run(folder).encoder()
        return known[key]

    return find


def their_input(folder: Path, family: str, line: str, longest: int) -> dict[str, Tensor]:
    """What their tokenizer makes of a line or a pair; text that looks special is text."""
    one, *two = line.split("\t")
    return dict(
        fast(folder)(
            one,
            *two,
            split_special_tokens=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
            return_token_type_ids=family in SEGMENTED,
        )
    )


@torch.no_grad()
def their_states(
    theirs: Any, folder: Path, family: str, line: str, longest: int, empty: int = 0
) -> np.ndarray:
    given = their_input(folder, family, line, longest)
    if not given["input_ids"].numel():
        given = {"input_ids": torch.tensor([[empty]])}
    base = theirs.base_model
    reader = base.encoder if theirs.config.is_encoder_decoder else base
    return reader(**given).last_hidden_state[0].numpy()


# --- embed ---


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_transformers(family: str, opened: Open) -> None:
    folder, theirs, ours = opened(family)
    states = [their_states(theirs, folder, family, line, ours.max_length) for line in TEXTS]
    assert max(map(len, states)) == ours.max_length
    wanted = {
        "mean": np.stack([each.mean(0) for each in states]),
        "cls": np.stack([each[0] for each in states]),
    }
    for pool, vectors in wanted.items():
        found = ours.embed(TEXTS, pool)  # type: ignore[arg-type]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, vectors, atol=1e-5)
    found = ours.embed(TEXTS, "tokens")
    assert found.shape == (len(TEXTS), ours.max_length, theirs.base_model.config.hidden_size)
    for row, each in zip(found, states, strict=True):
        np.testing.assert_allclose(row[: len(each)], each, atol=1e-5)
        assert np.isnan(row[len(each) :]).all()


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart", "marian"])
def test_models_that_write_give_vectors_of_what_they_read(family: str, opened: Open) -> None:
    folder, theirs, ours = opened(family)
    lines = [line for line in TEXTS if "\t" not in line]
    states = [their_states(theirs, folder, family, line, ours.max_length) for line in lines]
    for pool, vectors in {
        "mean": [each.mean(0) for each in states],
        "cls": [each[0] for each in states],
    }.items():
        found = ours.embed(lines, pool)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, np.stack(vectors), atol=1e-5)
    assert ours.embed(["a dog\tin the tree"]).shape == (1, 24)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "t5"])
def test_a_line_has_the_same_vector_in_any_company(
    family: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = opened(family)[2]
    together = ours.embed(TEXTS)
    alone = np.concatenate([ours.embed([line]) for line in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(ours.embed(TEXTS[::-1])[::-1], together, atol=1e-6)
    monkeypatch.setattr(encode, "BATCH_TOKENS", 60)
    done: list[int] = []
    np.testing.assert_allclose(ours.embed(TEXTS, "mean", done.append), together, atol=1e-6)
    assert len(done) > 3
    assert done[-1] == len(TEXTS)


def test_different_lines_have_different_vectors(opened: Open) -> None:
    ours = opened("bert")[2]
    lines = ["a dog", "a cat", "a dog\ta cat", "a cat\ta dog", "a dog a cat"]
    vectors = ours.embed(lines)
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1) + np.eye(len(lines))
    assert apart.min() > 0.01


def test_a_real_model_gives_the_vectors_of_transformers() -> None:
    folder = minilm()
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed")
    lines = [*LINES[:3], "", "Ein Satz auf Deutsch.", "tree " * 700, "a dog\ta cat"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours = load_run(folder).encoder()
    wanted = []
    for line in lines:
        given = tokenizer(
            *line.split("\t"), truncation=True, max_length=ours.max_length, return_tensors="pt"
        )
        with torch.no_grad():
            wanted.append(theirs(**given).last_hidden_state[0].mean(0).numpy())
    np.testing.assert_allclose(ours.embed(lines), np.stack(wanted), atol=1e-5)


def test_a_tokenizer_that_counts_texts_may_serve_a_model_that_does_not(opened: Open) -> None:
    ours = opened("bert", type_vocab_size=1)[2]
    pair, joined = ours.embed(["a dog\ta cat", "a dog a cat"])
    assert np.isfinite(pair).all()
    assert not np.allclose(pair, joined)  # a separator stands between the two


def test_our_tokenizer_frames_as_bert_does() -> None:
    ours = Bpe(vocab_size=300).train(LINES)
    framed = ours.with_frame([ours.classify], [ours.separator])
    dog, cat = ours.encode("a dog"), ours.encode("a cat")
    assert framed.frame() == ([ours.classify], [ours.separator])
    assert ours.frame() == ([], [])
    found = framed.framed(["", "a dog", ("a dog", "a cat")])
    assert found[0] == ([ours.classify, ours.separator], [0, 0])
    assert found[1][0] == [ours.classify, *dog, ours.separator]
    assert found[2] == (
        [ours.classify, *dog, ours.separator, *cat, ours.separator],
        [0] * (len(dog) + 2) + [1] * (len(cat) + 1),
    )
    assert framed.encode("a dog") == dog  # no frame where none is asked for


@pytest.mark.parametrize("longest", range(3, 20))
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_what_is_too_long_is_cut_as_transformers_cuts_it(
    family: str, longest: int, opened: Open
) -> None:
    folder, _, ours = opened(family)
    for line in ("a dog", LINES[1], f"{LINES[0]}\ta big cat", f"a dog\t{LINES[1]}"):
        text: Any = tuple(line.split("\t")) if "\t" in line else line
        if family == "roberta" and "\t" in line and longest < 4:
            continue  # no room for four special tokens
        [(ids, _)] = ours.tokenizer.framed([text], longest)
        theirs = their_input(folder, family, line, longest)["input_ids"][0].tolist()
        assert ids == theirs
        assert len(ids) <= longest


# --- fill ---


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_words_for_masks_are_those_of_transformers(family: str, opened: Open) -> None:
    folder, theirs, ours = opened(family)
    lines = ["the [MASK] sees the <mask>", "no mask", "", "[MASK]", "a <mask> cat\tin the [MASK]"]
    found = ours.fill(lines, 3)
    assert [len(guesses) for guesses in found] == [2, 0, 0, 1, 2]
    tokenizer = fast(folder)
    mask = ours.tokenizer.mask
    own = str(ours.tokenizer.content(mask))
    for line, guesses in zip(lines, found, strict=True):
        if not guesses:
            continue
        texts = line.replace("[MASK]", own).replace("<mask>", own).split("\t")
        given = tokenizer(*texts, return_tensors="pt", return_token_type_ids=family in SEGMENTED)
        with torch.no_grad():
            chances = theirs(**given).logits[given["input_ids"] == mask].softmax(-1)
        best = chances.topk(3)
        for words, tokens, wanted in zip(guesses, best.indices, best.values, strict=True):
            assert [word.probability for word in words] == pytest.approx(wanted.tolist(), abs=1e-5)
            assert [word.word for word in words] == ours.tokenizer.subwords(tokens.tolist())


def test_a_mask_may_be_spelled_as_the_tokenizer_has_it(opened: Open, tmp_path: Path) -> None:
    folder = opened("bert")[0]
    shutil.copytree(folder, tmp_path / "own")
    path = tmp_path / "own" / "tokenizer.json"
    path.write_text(path.read_text().replace("[MASK]", "<|mask|>"))
    ours = load_run(tmp_path / "own").encoder()
    lines = ["a [MASK] and <mask>", "a <|mask|> and <|MASK|>", "a <|mask|> and [mask]"]
    found = ours.fill(lines)
    assert found == opened("bert")[2].fill(lines[:1] * 3)
    assert ours.filled(lines[0], found[0]) == ours.filled(lines[1], found[0])
    assert "mask" not in ours.filled(lines[1], found[0])
    assert opened("bert")[2].fill(["<|mask|>"]) == [[]]  # which is text to another model


def test_a_mask_beyond_what_is_read_is_named(opened: Open) -> None:
    ours = opened("bert")[2]
    with pytest.raises(UserError, match=f"line 8 has a mask beyond the {ours.max_length} tokens"):
        ours.fill(["a [MASK]", "[MASK] dog " * 30], first=7)
    with pytest.raises(UserError, match="line 1 has a mask beyond"):
        ours.fill(["dog " * 100 + "[MASK]"])


@pytest.mark.parametrize(
    ("family", "line", "words", "filled"),
    [
        ("bert", "The [MASK] sees.", ["dog"], "The dog sees."),
        ("bert", "The dog [MASK] on.", ["##s"], "The dogs on."),
        ("bert", "[MASK] dog", ["##s"], "s dog"),
        ("bert", "A  <mask> [mask]", ["big", "cat"], "A  big cat"),
        ("roberta", "The <mask> sees.", [" dog"], "The dog sees."),
        ("roberta", "The dog <mask> on.", ["s"], "The dogs on."),
        ("roberta", "<mask> dog", [" The"], "The dog"),
        ("roberta", "<mask> dog", ["The"], "The dog"),
        ("roberta", "see(<mask>)", [" dog"], "see( dog)"),
        ("roberta", "a [MASK]<mask>", [" b", " c"], "a b c"),
    ],
)
def test_words_come_in_with_their_own_spaces(
    family: str, line: str, words: list[str], filled: str, opened: Open
) -> None:
    ours = opened(family)[2]
    assert ours.filled(line, [[Guess(word, 0.5), Guess("x", 0.1)] for word in words]) == filled


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
def test_a_model_without_a_head_for_masks_says_so(name: str, opened: Open) -> None:
    with pytest.raises(UserError, match="no head for masked words"):
        opened("bert", name)[2].fill(["a [MASK]"])


# --- classify ---

LABELS = {0: "good", 1: "bad, or not", 2: "ügly"}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForSequenceClassification"),
        ("roberta", "RobertaForSequenceClassification"),
        ("electra", "ElectraForSequenceClassification"),
        ("distilbert", "DistilBertForSequenceClassification"),
    ],
)
def test_labels_are_those_of_transformers(family: str, name: str, opened: Open) -> None:
    folder, theirs, ours = opened(family, name, id2label=LABELS)
    found = ours.classify(TEXTS)
    for line, answers in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            logits = theirs(**their_input(folder, family, line, ours.max_length)).logits[0]
        [answer] = answers
        assert answer.label == theirs.config.id2label[int(logits.argmax())]
        wanted = dict(zip(LABELS.values(), logits.softmax(-1).tolist(), strict=True))
        assert answer.scores == pytest.approx(wanted, abs=1e-5)
        assert answer.piece == ""
    assert np.std([answers[0].scores["good"] for answers in found]) > 1e-3


def test_a_single_label_is_a_number(opened: Open) -> None:
    name = "BertForSequenceClassification"
    folder, theirs, ours = opened("bert", name, id2label={0: "stars"})
    for line, answers in zip(TEXTS, ours.classify(TEXTS), strict=True):
        with torch.no_grad():
            wanted = theirs(**their_input(folder, "bert", line, ours.max_length)).logits.item()
        assert answers[0].scores == pytest.approx({"stars": wanted}, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "name"),
    [("bert", "BertForTokenClassification"), ("roberta", "RobertaForTokenClassification")],
)
def test_a_tagger_labels_the_tokens_of_the_text(family: str, name: str, opened: Open) -> None:
    folder, theirs, ours = opened(family, name, id2label=LABELS)
    for line, answers in zip(TEXTS, ours.classify(TEXTS), strict=True):
        given = their_input(folder, family, line, ours.max_length)
        with torch.no_grad():
            logits = theirs(**given).logits[0]
        before, after = ours.tokenizer.frame()
        text = [token not in (*before, *after) for token in given["input_ids"][0].tolist()]
        wanted = [theirs.config.id2label[int(label)] for label in logits[text].argmax(-1)]
        assert [answer.label for answer in answers] == wanted
        ids = given["input_ids"][0][text].tolist()
        pieces = [piece.strip() for piece in ours.tokenizer.subwords(ids)]
        assert [answer.piece for answer in answers] == pieces
    assert ours.classify([""]) == [[]]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForMaskedLM"),
        ("bert", "BertModel"),
        ("bert", "BertForNextSentencePrediction"),
        ("electra", "ElectraForPreTraining"),
        ("gpt2", ""),
    ],
)
def test_a_model_without_labels_says_so(family: str, name: str, opened: Open) -> None:
    with pytest.raises(UserError, match="no head for labels"):
        opened(family, name)[2].classify(["a dog"])


# --- what cannot be read ---


def test_text_that_is_no_unicode_is_refused(opened: Open) -> None:
    with pytest.raises(UserError, match="not valid Unicode"):
        opened("bert")[2].embed(["half of a pair: \ud800"])


def test_an_empty_line_without_any_token_to_stand_for_it_is_refused() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"dog": 0}, unk_token="dog"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model = BertConfig(vocab_size=1, dim=8, layers=1, heads=2).build()
    ours = TextEncoder(model, Tokenizer(inner), max_length=8)
    assert ours.embed(["dog"]).shape == (1, 8)
    with pytest.raises(UserError, match="empty line"):
        ours.embed(["dog", ""])
