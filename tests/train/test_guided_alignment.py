"""Guided alignment: links of files and tokens, the loss, the links that a trained run prints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.helpers import refusal
from tests.train.small_runs import trainer, write_recipe

from manyheads.data.alignment import read_alignment, token_links, word_spans
from manyheads.data.translation import Corpus, EncodedPairs, FilesData, Frame
from manyheads.decode.beam import Hypothesis
from manyheads.engines import Engine
from manyheads.errors import DataError, UserError
from manyheads.evaluate.alignment import annotate
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture
from manyheads.phrasebook import Pair
from manyheads.tasks.translation import alignment_loss, translation_losses
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters
from manyheads.train.optimizer import Train

GUIDED = ("data.alignment=links.txt", "train.guided_alignment=1.0")


def mirror_links(text: str) -> list[tuple[int, int]]:
    """The alignment of the toy language: word i of n is word n − 1 − i of the other side."""
    count = len(text.split())
    return [(i, count - 1 - i) for i in range(count)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_recipe(tmp_path / "data")
    lines = (path.parent / "pairs.source").read_text("utf-8").splitlines()
    links = [" ".join(f"{i}-{j}" for i, j in mirror_links(line)) for line in lines]
    (path.parent / "links.txt").write_text("\n".join(links) + "\n", encoding="utf-8")
    text = path.read_text("utf-8").replace("\nsource = ", f'\nfolder = "{path.parent}"\nsource = ')
    path.write_text(text.replace(f'= "{path.parent}/pairs', '= "pairs'), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Characters().train(["ab c", "x yz"])


def pair(links: Iterable[tuple[int, int]]) -> Pair:
    words = tuple(word_spans("ab c")), tuple(word_spans("x yz"))
    return Pair("ab c", "x yz", *words, frozenset(links))


def test_tokens_of_linked_words_are_linked(letters: Tokenizer) -> None:
    """a b _ c, x _ y z: every letter belongs to its word, a space to none."""
    expected = torch.zeros(4, 4)
    expected[0, 3] = 1.0  # x – c
    expected[2:, :2] = 1.0  # yz – ab
    assert torch.equal(token_links(letters, pair([(1, 0), (0, 1)])), expected)


def test_links_of_a_batch_are_where_its_tokens_are(letters: Tokenizer) -> None:
    """After a source's start token, before the ends, and nowhere in padding."""
    pairs = [pair([(1, 0), (0, 1)]), Pair("c", "x", ((0, 1),), ((0, 1),), frozenset({(0, 0)}))]
    corpus = Corpus([p.source for p in pairs], [p.target for p in pairs], pairs)
    frame = Frame(letters.start, letters.end, letters.pad, source_start=letters.start)
    data = EncodedPairs(corpus, letters, 64, frame=frame)
    digest = data.digest()
    data.add_links(corpus, letters)
    assert data.digest() != digest  # a run does not resume with other links
    links = data.batch(np.array([1, 0])).padded(4, 7).links
    expected = torch.zeros(4, 7, 7)
    expected[0, 0, 1] = 1.0
    expected[1, :4, 1:5] = token_links(letters, pairs[0])
    assert links is not None
    assert torch.equal(links, expected)


def test_a_pharaoh_file_gives_links_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "links"
    path.write_text("9-9\n1-0 0-1\n\n", encoding="utf-8")
    first, second = read_alignment(path, 3, [1, 2], ["ab c", "c"], ["x yz", "x"])
    assert first == pair([(1, 0), (0, 1)])
    assert second.alignment == frozenset()


@pytest.mark.parametrize("link", ["1-2", "2-0", "0:1", "0", "0-1-1", "-1-0", "a-b"])
def test_a_wrong_link_is_named_with_its_line(link: str, tmp_path: Path) -> None:
    path = tmp_path / "links"
    path.write_text(f"0-0\n0-0 {link}\n", encoding="utf-8")
    texts = ["ab c"] * 3, ["x yz"] * 3
    message = refusal(DataError, read_alignment, path, 2, [0, 1], *(side[:2] for side in texts))
    assert message.startswith(f"{path}:2: {link} ")
    for lines in (2, 4):  # the links of another corpus
        path.write_text("0-0\n" * lines, encoding="utf-8")
        assert f"{lines} lines" in refusal(DataError, read_alignment, path, 3, [0, 1, 2], *texts)


def test_the_loss_is_the_formula(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", *GUIDED)
    model: Any = actual.model.double().eval()
    (batch,) = actual.task.batches(0)
    assert batch.links is not None
    train = Train(guided_alignment=0.3)
    losses = translation_losses(model, batch, train)
    plain = translation_losses(model, batch, Train())["tokens"]
    torch.testing.assert_close(losses["tokens"].objective, plain.objective)
    assert {name: loss.count for name, loss in losses.items()} == actual.task.counts(batch)
    with capture(model) as maps:
        model(batch.source, batch.target, batch.source_real)
    weights, total = maps["cross"][0][:, 0], 0.0
    for row, links in enumerate(batch.links):
        for t, linked in enumerate(links):
            sources = linked.nonzero().flatten().tolist()
            total -= sum(float(weights[row, t, s].log()) / len(sources) for s in sources)
    assert losses["alignment"].weight == 0.3
    assert float(losses["alignment"].nll) == pytest.approx(total, rel=1e-6)
    losses["alignment"].objective.backward()
    gradient = model.decoder.blocks[0].cross.query.weight.grad
    first, second = gradient.chunk(2)  # one for each head
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0
    assert float(alignment_loss(weights, batch, train).nll) == pytest.approx(total, rel=1e-6)


def aligned_wrongly(out: Path, sources: list[str]) -> float:
    """The share of target words that a run links to the wrong source word."""
    loaded = load_torch_run(out)
    translator = loaded.with_engine(Engine("auto")).translator().in_torch()
    assert translator is not None
    assert translator.is_guided == (loaded.run.train.guided_alignment > 0)
    encode = translator.tokenizer.encode
    targets = [Hypothesis(encode(" ".join(x.split()[::-1])), 0.0, 0.0) for x in sources]
    annotations = annotate(translator, sources, targets, alignment=True)
    gold = [link for text in sources for link in mirror_links(text)]
    links = [link for annotation in annotations for link in annotation.links]
    wrong = sum(
        len(set(mirror_links(text)) - set(annotation.links))
        for text, annotation in zip(sources, annotations, strict=True)
    )
    assert len(links) == len(gold)
    return wrong / len(gold)


def test_links_of_a_guided_run_are_better(recipe: Path, tmp_path: Path) -> None:
    sources = (recipe.parent / "pairs.source").read_text("utf-8").splitlines()[:50]
    settings = ("train.steps=150", "train.validate_every=150", "train.save_every=150")
    rates = {}
    for name, extra in {"plain": (), "guided": GUIDED}.items():
        trainer(recipe, tmp_path / name, *settings, *extra).run()
        rates[name] = aligned_wrongly(tmp_path / name, sources)
    assert rates["guided"] < rates["plain"] / 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("data.alignment=",), "data.alignment"),
        (("train.rdrop_alpha=1",), "train.rdrop_alpha"),
        (("train.bpe_dropout_copies=2",), "train.bpe_dropout_copies"),
        (("train.compile=yes",), "train.compile"),
        (("train.activation_checkpointing=true",), "train.activation_checkpointing"),
    ],
)
def test_what_excludes_guided_alignment(
    settings: tuple[str, ...], words: str, recipe: Path, tmp_path: Path
) -> None:
    message = refusal(UserError, trainer, recipe, tmp_path / "run", *GUIDED, *settings)
    assert words in message


def test_a_model_without_cross_attention_is_refused(recipe: Path, tmp_path: Path) -> None:
    run = trainer(recipe, tmp_path / "run", *GUIDED, "model=decoder-only-seq2seq")
    assert "cross-attention" in refusal(UserError, run.run)


def test_a_table_has_no_alignment_file() -> None:
    assert "data.source" in refusal(UserError, lambda: FilesData(train="a.tsv", alignment="b"))
