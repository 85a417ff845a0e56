"""The Python interface: public names, training, and what a loaded run can do."""

import inspect
import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyheads
from manyheads.decode.sample import Sample
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Masked
from manyheads.run import Run, save_run
from manyheads.tasks.table import TASKS
from manyheads.tokenizer.train import Bpe, WordPiece

PUBLIC = "attend attention_weights build capture from_huggingface load presets to_huggingface train"
TINY = """data.train_pairs=30 data.valid_pairs=2 data.test_pairs=2 tokens.vocab_size=300
    model.dim=16 model.layers=1 model.heads=2 model.ffn_dim=32 train.steps=2 train.warmup_steps=2
    train.validate_every=2 decode.bleu_sentences=0"""
TEXTS = ["The dog sees the tree.", "A cat."]
SIZES: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 16, "max_length": 40}
METHODS = ("translate", "generate", "embed", "classify", "fill_mask")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedRun]:
    """One untrained run of each kind, and a translator that `train` made."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {"translator": manyheads.train("phrasebook", TINY.split(), folder / "translator", "cpu")}
    torch.manual_seed(0)
    bpe, words = Bpe(vocab_size=300).train(TEXTS), WordPiece(vocab_size=560).train(TEXTS)
    encoder = {"vocab_size": words.vocab_size, **SIZES}
    for name, tokenizer, config in (
        ("writer", bpe, GptConfig(vocab_size=bpe.vocab_size, **SIZES)),
        ("masked", words, BertConfig(**encoder, head=Masked())),
        ("classifier", words, BertConfig(**encoder, head=Classify(labels=("a", "b")))),
    ):
        run = Run(task=TASKS.default(config), data=None, tokens=None, model=config)
        save_run(run, tokenizer, config.build(), folder / name)
        runs[name] = manyheads.load(folder / name)
    return runs


def test_public_names_are_listed_and_work_after_their_modules_are_imported() -> None:
    assert set(manyheads.__all__) <= set(dir(manyheads))
    assert sorted(manyheads.__all__) == PUBLIC.split()
    text = pydoc.plain(pydoc.render_doc(manyheads))
    assert all(name in text for name in manyheads.__all__)
    before = manyheads.presets()
    import_module("manyheads.presets")
    import_module("manyheads.train.loop")
    assert manyheads.presets() == before
    assert callable(manyheads.train)
    assert manyheads.train.loop.Trainer  # type: ignore[attr-defined]
    for name in manyheads.__all__:
        assert callable(getattr(manyheads, name)), name
    with pytest.raises(UserError, match="no recipe 'nowhere'"):
        manyheads.train("nowhere")
    with pytest.raises(AttributeError, match="nothing"):
        manyheads.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, manyheads; dir(manyheads); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_train_trains_and_loads(runs: dict[str, LoadedRun], tmp_path: Path) -> None:
    run = runs["translator"]
    assert run.run.train.steps == 2
    folder = run.folder
    before = (folder / "model.safetensors").read_bytes()
    again = manyheads.train("phrasebook", TINY.split(), str(folder), "cpu")  # trained already
    assert (folder / "model.safetensors").read_bytes() == before
    assert again.translate(TEXTS) == run.translate(TEXTS)
    with pytest.raises(UserError, match=r"train\.stepz"):
        manyheads.train("phrasebook", ["train.stepz=1"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loaded_run_is_used_like_its_model(runs: dict[str, LoadedRun]) -> None:
    """As release 0.1, where `load` gave the model."""
    run: Any = runs["translator"]
    assert isinstance(run.model, nn.Module)
    assert run.tokenizer.vocab_size == run.config.vocab_size
    assert run.state_dict().keys() == run.model.state_dict().keys()
    ids = torch.tensor([[*run.tokenizer.encode(TEXTS[0]), run.tokenizer.end]])
    start = torch.tensor([[run.tokenizer.start]])
    with torch.no_grad():
        assert torch.equal(run(ids, start), run.model(ids, start))
        with manyheads.capture(run.model):
            run(ids, start)
    assert not hasattr(run, "no_such_attribute")
    assert "task=translation, model=seq2seq" in repr(run)
    assert len(repr(run)) < 300  # not the settings and the modules


def test_texts_in_results_out(runs: dict[str, LoadedRun]) -> None:
    translator, writer, classifier = (runs[n] for n in ("translator", "writer", "classifier"))
    translations = translator.translate(TEXTS, beam=2)
    assert len(translations) == 2
    assert translations == translator.translator(beam=2).translate(TEXTS)
    greedy = writer.generate(TEXTS, 5)
    assert greedy == [writer.generate([text], 5)[0] for text in TEXTS]
    sampled = writer.generate(TEXTS, 5, temperature=1.0, seed=3)
    assert sampled == writer.generate(TEXTS, 5, temperature=1.0, seed=3) != greedy
    assert writer.generate(TEXTS, 5, temperature=1.0) == writer.generate(
        TEXTS, 5, temperature=1.0, seed=Sample().seed
    )
    vectors = classifier.embed(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((2, 16), np.float32)
    for [answer] in classifier.classify(TEXTS):
        assert answer.label in ("a", "b")
        assert sum(answer.scores.values()) == pytest.approx(1)
    [[first], [second]] = runs["masked"].fill_mask(["The [MASK] sees.", "[MASK] cat"], top=2)
    assert len(first) == len(second) == 2
    assert first[0].probability >= first[1].probability > 0


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("translator", ("translate", "embed")),
        ("writer", ("generate", "embed")),
        ("masked", ("embed", "fill_mask")),
        ("classifier", ("embed", "classify")),
    ],
)
def test_what_a_task_does_not_allow_is_refused(
    name: str, able: tuple[str, ...], runs: dict[str, LoadedRun]
) -> None:
    for method in METHODS:
        function = getattr(runs[name], method)
        assert inspect.getdoc(function)
        with pytest.raises(UserError, match="pass a list" if method in able else ".") as caught:
            function("one text") if method in able else function(TEXTS)
        assert "\n" not in str(caught.value)
