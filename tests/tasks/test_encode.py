"""Encoders give the vectors, words and labels of `transformers`, line by line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.exchange.folders import LINES, fast, minilm, saved
from torch import Tensor

from manyheads.errors import UserError
from manyheads.loading import load_run
from manyheads.tasks import encode
from manyheads.tasks.encode import Guess, TextEncoder
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
LABELS = {0: "good", 1: "bad, or not", 2: "ügly"}
Loaded = tuple[Path, Any, TextEncoder]
Load = Callable[..., Loaded]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A folder with a random model of transformers, that model, and our encoder of it."""
    known: dict[str, Loaded] = {}

    def load(family: str, name: str = "", **settings: Any) -> Loaded:
        key = f"{family} {name} {settings}"
        if key not in known:
            folder, theirs = saved(tmp_path_factory.mktemp(family), family, name, **settings)
            known[key] = folder, theirs, load_run(folder).encoder()
        return known[key]

    return load


def their_input(folder: Path, family: str, line: str, longest: int) -> dict[str, Tensor]:
    """The input of their model for a line or a pair; special tokens in a text are text."""
    first, *second = line.split("\t")
    return dict(
        fast(folder)(
            first,
            *second,
            split_special_tokens=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
            return_token_type_ids=family in SEGMENTED,
        )
    )


@torch.no_grad()
def their_states(theirs: Any, folder: Path, family: str, line: str, longest: int) -> np.ndarray:
    inputs = their_input(folder, family, line, longest)
    if not inputs["input_ids"].numel():
        inputs = {"input_ids": torch.tensor([[0]])}
    base = theirs.base_model
    encoder = base.encoder if theirs.config.is_encoder_decoder else base
    return encoder(**inputs).last_hidden_state[0].numpy()


# --- embed ---


@pytest.mark.parametrize("family", [*ENCODERS, "gpt2", "llama", "t5", "bart", "marian"])
def test_vectors_are_those_of_transformers(family: str, load: Load) -> None:
    folder, theirs, ours = load(family)
    lines = TEXTS if family in ENCODERS else [line for line in TEXTS if "\t" not in line]
    states = [their_states(theirs, folder, family, line, ours.max_length) for line in lines]
    assert max(map(len, states)) == ours.max_length
    means, firsts = ours.embed(lines), ours.embed(lines, "cls")
    assert means.dtype == np.float32
    np.testing.assert_allclose(means, [each.mean(0) for each in states], atol=1e-5)
    np.testing.assert_allclose(firsts, [each[0] for each in states], atol=1e-5)
    vectors = ours.embed(lines, "tokens")
    for row, expected in zip(vectors, states, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)
        assert np.isnan(row[len(expected) :]).all()
    assert ours.embed(["a dog\tin the tree"]).shape == means[:1].shape


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "t5"])
def test_vectors_do_not_depend_on_the_rest_of_the_batch(
    family: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load(family)[2]
    together = ours.embed(TEXTS)
    single = np.concatenate([ours.embed([line]) for line in TEXTS])
    np.testing.assert_allclose(together, single, atol=1e-6)
    monkeypatch.setattr(encode, "BATCH_TOKENS", 60)
    done: list[int] = []
    np.testing.assert_allclose(ours.embed(TEXTS, "mean", done.append), together, atol=1e-6)
    assert len(done) > 3
    assert done[-1] == len(TEXTS)


def test_different_lines_have_different_vectors(load: Load) -> None:
    """With pairs; also if the tokenizer numbers texts and the model has no segments."""
    lines = ["a dog", "a cat", "a dog\ta cat", "a cat\ta dog", "a dog a cat"]
    for ours in (load("bert")[2], load("bert", type_vocab_size=1)[2]):
        vectors = ours.embed(lines)
        distances = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1)
        assert (distances + np.eye(len(lines))).min() > 0.01


def test_a_real_model_gives_the_vectors_of_transformers() -> None:
    folder = minilm()
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed")
    lines = [*LINES[:3], "", "Ein Satz auf Deutsch.", "tree " * 700, "a dog\ta cat"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours = load_run(folder).encoder()
    settings = {"truncation": True, "max_length": ours.max_length, "return_tensors": "pt"}
    for line, vector in zip(lines, ours.embed(lines), strict=True):
        with torch.no_grad():
            states = theirs(**tokenizer(*line.split("\t"), **settings)).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(0).numpy(), atol=1e-5)


def test_our_tokenizer_frames_as_bert_does() -> None:
    ours = Bpe(vocab_size=300).train(LINES)
    framed = ours.with_frame([ours.classify], [ours.separator])
    dog, cat = ours.encode("a dog"), ours.encode("a cat")
    assert (framed.frame(), ours.frame()) == (([ours.classify], [ours.separator]), ([], []))
    empty, single, pair = framed.framed(["", "a dog", ("a dog", "a cat")])
    assert empty == ([ours.classify, ours.separator], [0, 0])
    assert single[0] == [ours.classify, *dog, ours.separator]
    assert pair[0] == [ours.classify, *dog, ours.separator, *cat, ours.separator]
    assert pair[1] == [0] * (len(dog) + 2) + [1] * (len(cat) + 1)
    assert framed.encode("a dog") == dog


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_long_texts_are_truncated_as_transformers_does(family: str, load: Load) -> None:
    folder, _, ours = load(family)
    for longest in range(3, 20):
        for line in ("a dog", LINES[1], f"{LINES[0]}\ta big cat", f"a dog\t{LINES[1]}"):
            text: Any = tuple(line.split("\t")) if "\t" in line else line
            if family == "roberta" and "\t" in line and longest < 4:
                continue  # no room for four special tokens
            [(ids, _)] = ours.tokenizer.framed([text], longest)
            assert ids == their_input(folder, family, line, longest)["input_ids"][0].tolist()


# --- fill ---


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_words_for_masks_are_those_of_transformers(family: str, load: Load) -> None:
    folder, theirs, ours = load(family)
    lines = ["the [MASK] sees the <mask>", "no mask", "", "[MASK]", "a <mask> cat\tin the [MASK]"]
    results = ours.fill(lines, 3)
    assert [len(guesses) for guesses in results] == [2, 0, 0, 1, 2]
    tokenizer, mask = fast(folder), ours.tokenizer.mask
    spelled = str(ours.tokenizer.content(mask))
    for line, guesses in zip(lines, results, strict=True):
        if not guesses:
            continue
        texts = line.replace("[MASK]", spelled).replace("<mask>", spelled).split("\t")
        inputs = tokenizer(*texts, return_tensors="pt", return_token_type_ids=family in SEGMENTED)
        with torch.no_grad():
            logits = theirs(**inputs).logits[inputs["input_ids"] == mask]
        best = logits.softmax(-1).topk(3)
        for words, tokens, values in zip(guesses, best.indices, best.values, strict=True):
            assert [word.probability for word in words] == pytest.approx(values.tolist(), abs=1e-5)
            assert [word.word for word in words] == ours.tokenizer.subwords(tokens.tolist())


def test_a_truncated_mask_is_refused_with_its_line(load: Load) -> None:
    ours = load("bert")[2]
    with pytest.raises(UserError, match=rf"line 8 .*{ours.max_length} tokens"):
        ours.fill(["a [MASK]", "[MASK] dog " * 30], first=7)
    with pytest.raises(UserError, match="line 1 "):
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
def test_words_are_filled_in_with_their_spaces(
    family: str, line: str, words: list[str], filled: str, load: Load
) -> None:
    guesses = [[Guess(word, 0.5), Guess("x", 0.1)] for word in words]
    assert load(family)[2].filled(line, guesses) == filled


# --- classify ---


@pytest.mark.parametrize("family", ENCODERS)
def test_labels_are_those_of_transformers(family: str, load: Load) -> None:
    prefix = {"bert": "Bert", "roberta": "Roberta", "electra": "Electra"}.get(family, "DistilBert")
    folder, theirs, ours = load(family, f"{prefix}ForSequenceClassification", id2label=LABELS)
    predictions = [prediction for [prediction] in ours.classify(TEXTS)]
    for line, prediction in zip(TEXTS, predictions, strict=True):
        with torch.no_grad():
            logits = theirs(**their_input(folder, family, line, ours.max_length)).logits[0]
        assert prediction.label == LABELS[int(logits.argmax())]
        expected = dict(zip(LABELS.values(), logits.softmax(-1).tolist(), strict=True))
        assert prediction.scores == pytest.approx(expected, abs=1e-5)
    assert np.std([prediction.scores["good"] for prediction in predictions]) > 1e-3


def test_a_single_label_is_a_number(load: Load) -> None:
    name = "BertForSequenceClassification"
    folder, theirs, ours = load("bert", name, id2label={0: "stars"})
    for line, [prediction] in zip(TEXTS, ours.classify(TEXTS), strict=True):
        with torch.no_grad():
            number = theirs(**their_input(folder, "bert", line, ours.max_length)).logits.item()
        assert prediction.scores == pytest.approx({"stars": number}, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "name"),
    [("bert", "BertForTokenClassification"), ("roberta", "RobertaForTokenClassification")],
)
def test_a_tagger_labels_the_tokens_of_the_text(family: str, name: str, load: Load) -> None:
    folder, theirs, ours = load(family, name, id2label=LABELS)
    special = {*ours.tokenizer.frame()[0], *ours.tokenizer.frame()[1]}
    for line, predictions in zip(TEXTS, ours.classify(TEXTS), strict=True):
        inputs = their_input(folder, family, line, ours.max_length)
        with torch.no_grad():
            best = theirs(**inputs).logits[0].argmax(-1).tolist()
        pairs = zip(inputs["input_ids"][0].tolist(), best, strict=True)
        tokens = [(token, LABELS[label]) for token, label in pairs if token not in special]
        assert [prediction.label for prediction in predictions] == [label for _, label in tokens]
        subwords = ours.tokenizer.subwords([token for token, _ in tokens])
        assert [p.piece for p in predictions] == [subword.strip() for subword in subwords]
    assert ours.classify([""]) == [[]]


# --- refusals ---


@pytest.mark.parametrize(
    ("family", "name", "missing"),
    [
        ("bert", "BertModel", "masked words"),
        ("bert", "BertForSequenceClassification", "masked words"),
        ("bert", "BertForMaskedLM", "labels"),
        ("bert", "BertForNextSentencePrediction", "labels"),
        ("electra", "ElectraForPreTraining", "labels"),
        ("gpt2", "", "labels"),
    ],
)
def test_a_missing_head_is_named(family: str, name: str, missing: str, load: Load) -> None:
    ours = load(family, name)[2]
    with pytest.raises(UserError, match=f"no head for {missing}"):
        ours.classify(["a dog"]) if missing == "labels" else ours.fill(["a [MASK]"])
