"""The commands on imported models and on exported folders.

A folder is made, imported or exported once for all the tests that use it.
"""

import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checks import unchecked
from tests.exchange.folders import FAMILIES, LINES, fast, saved
from tests.test_cli import call, mistake, result
from tests.train.small_runs import write_recipe

from manyheads import cli
from manyheads.exchange import onnx
from manyheads.run import read_run

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
transformers.logging.disable_progress_bar()

TEXT = "\n".join([*LINES[:3], "", "a big cat\tin the tree"]).encode()
MASKED = b"the [MASK] sees a <mask>\nno mask here\n\n[MASK] dog\n"
TRAINED = (
    *("train.steps=120", "train.warmup_steps=30", "train.learning_rate=0.01", "model.dim=32"),
    *("decode.penalty=length", "decode.length_penalty=1.0", "decode.stopping=heuristic"),
    *("decode.at_limit=truncate", "decode.max_length_ratio=100"),
)
SCORES = {"bleu": 41.5, "loss": 1.0, "sentences": 9, "signature": {"bleu": "nrefs:1|tok:13a"}}
LABELS = {0: "good", 1: "bad"}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def folder(places: Path) -> Callable[..., tuple[Path, Any]]:
    """A folder of `transformers` and its model."""
    known: dict[str, tuple[Path, Any]] = {}

    def get(family: str, name: str = "", **settings: Any) -> tuple[Path, Any]:
        key = "-".join([family, name, *map(str, settings)])
        if key not in known:
            known[key] = saved(places / key, family, name, **settings)
        return known[key]

    return get


@pytest.fixture(scope="module")
def run(folder: Callable[..., tuple[Path, Any]], places: Path) -> Make:
    """A run made of such a folder, and `trained`, a translator of our run_folder."""

    def get(family: str, name: str = "", **settings: Any) -> Path:
        out = places / "-".join(["run", family, name, *map(str, settings)])
        if out.exists():
            return out
        if family == "trained":
            result("train", write_recipe(places / "data"), *TRAINED, "--out", out)
        else:
            result("import", folder(family, name, **settings)[0], "--out", out)
        return out

    return get


@pytest.fixture(scope="module")
def exported(run: Make, places: Path) -> Make:
    def get(to: str, family: str, name: str = "", **settings: Any) -> Path:
        out = places / "-".join([to, family, name, *map(str, settings)])
        if not out.exists():
            export(run(family, name, **settings), to, out)
        return out

    return get


def export(source: Path, to: str, out: Path) -> str:
    """The log of an export. Shapes are symbols while a graph is traced, so none is checked."""
    with unchecked():
        code, printed, log = call("export", source, "--to", to, "--out", out)
    assert (code, printed) == (0, ""), log
    return log


def vectors(*words: object, stdin: bytes) -> np.ndarray:
    """The output of `embed`."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    before = sys.argv, sys.stdin
    sys.argv = ["manyheads", "embed", *map(str, words)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        sys.argv, sys.stdin = before
    assert not end.value.code
    return np.load(io.BytesIO(out.buffer.getvalue()), allow_pickle=False)  # type: ignore[attr-defined]


# --- import and info ---


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_run_is_complete_and_has_the_right_counts(
    family: str, folder: Callable[..., tuple[Path, Any]], run: Make
) -> None:
    source, theirs = folder(family)
    out = run(family)
    files = {"run.toml", "model.safetensors"} | (set() if family == "vit" else {"tokenizer.json"})
    assert {path.name for path in out.iterdir()} == files
    counts = json.loads(result("info", out, "--json"))
    assert counts["parameters"] == theirs.num_parameters(only_trainable=True)
    assert sum(counts["parts"].values()) == counts["parameters"]
    assert {**json.loads(result("info", source, "--json")), "name": 0} == {**counts, "name": 0}
    assert (counts["parts"]["cross-attention"] > 0) == theirs.config.is_encoder_decoder


def test_a_full_folder_is_not_overwritten(
    folder: Callable[..., tuple[Path, Any]], run: Make, tmp_path: Path
) -> None:
    out = run("bert")
    before = {path: path.read_bytes() for path in out.iterdir()}
    mistake("import", folder("bert")[0], "--out", out)
    mistake("export", run("t5"), "--to", "huggingface", "--out", out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "empty").mkdir()
    result("import", folder("bert")[0], "--out", tmp_path / "empty")
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "inside"):
        assert str(file) in mistake("import", folder("bert")[0], "--out", path)


@pytest.mark.parametrize(
    ("break_it", "code", "named"),
    [
        (lambda f: (f / "config.json").unlink(), 3, "config.json"),
        (lambda f: (f / "config.json").write_text("{}"), 3, "model_type"),
        (lambda f: (f / "config.json").write_text('{"model_type": "brt"}'), 2, "'bert'?"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), 3, "model.safetensors"),
        (lambda f: (f / "modeling.py").write_text("1/0"), 2, "modeling.py"),
        (lambda f: (f / "tokenizer.json").write_text("{"), 3, "tokenizer.json"),
        (shutil.rmtree, 2, "source"),
    ],
)
def test_a_broken_folder_is_refused_and_leaves_nothing(
    break_it: Callable[[Path], object],
    code: int,
    named: str,
    folder: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    source = shutil.copytree(folder("bert")[0], tmp_path / "in" / "source")
    break_it(source)
    assert named in mistake("import", source, "--out", tmp_path / "out" / "run", code=code)
    assert not (tmp_path / "out").exists()
    if (source / "config.json").exists():
        assert named in mistake("embed", source, stdin=b"a dog", code=code)


def test_tokenizers_that_do_not_fit(
    folder: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """Another model's is refused; a model without one is imported, for what needs no text."""
    source = shutil.copytree(folder("bert")[0], tmp_path / "bert")
    shutil.copy(folder("roberta")[0] / "tokenizer.json", source)
    assert "tokenizer.json" in mistake("import", source, "--out", tmp_path / "run", code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
    source, run = shutil.copytree(folder("gpt2")[0], tmp_path / "gpt2"), tmp_path / "run"
    (source / "tokenizer.json").unlink()
    code, _, log = call("import", source, "--out", run)
    assert code == 0
    assert "tokenizer.json" in log
    for words in (
        ("generate", run, "--prompt", "a"),
        ("embed", run, "--out", tmp_path / "x"),
        ("export", run, "--to", "ctranslate2", "--out", source / "x"),
    ):
        assert "tokenizer.json" in mistake(*words, stdin=b"a")
    result("export", run, "--to", "huggingface", "--out", tmp_path / "back")
    assert not (tmp_path / "back" / "tokenizer.json").exists()


# --- export: the same from every folder ---


def test_our_translator_gives_the_same_lines_everywhere(run: Make, exported: Make) -> None:
    run_folder = run("trained")
    text = (run_folder.parent / "data" / "pairs.source").read_bytes().splitlines()[:25]
    stdin = b"\n".join([*text, b"", b"red"])
    expected = result("translate", run_folder, stdin=stdin)
    assert len(set(expected.splitlines())) > 5
    greedy = result("translate", run_folder, "--beam", "1", stdin=stdin)
    scores = json.loads(result("evaluate", run_folder, "--split", "valid", "--json"))
    info = json.loads(result("info", run_folder, "--json"))
    sampled = result("translate", run_folder, "--sample", "--seed", "4", stdin=stdin)
    out = exported("huggingface", "trained")
    assert result("translate", out, stdin=stdin) == expected
    assert result("translate", out, "--beam", "1", stdin=stdin) == greedy
    theirs = json.loads(result("evaluate", out, "--split", "valid", "--json"))
    assert theirs["bleu"] == pytest.approx(scores["bleu"])
    assert json.loads((out / "scores.json").read_text()) == theirs
    assert {**json.loads(result("info", out, "--json")), "name": 0} == {**info, "name": 0}
    assert result("translate", out, "--sample", "--seed", "4", stdin=stdin) == sampled


def test_transformers_generates_the_same_translations(run: Make, exported: Make) -> None:
    out = exported("huggingface", "trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    assert theirs.generation_config.num_beams == read_run(out).decode.beam == 2
    lines = (run("trained").parent / "data" / "pairs.source").read_text().splitlines()[:12]
    texts = []
    for line in lines:
        inputs = tokenizer(line, return_tensors="pt")
        texts.append(tokenizer.decode(theirs.generate(**inputs)[0], skip_special_tokens=True))
    assert result("translate", out, stdin="\n".join(lines).encode()).splitlines() == texts


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "vit"])
def test_commands_give_the_same_for_an_exported_model(
    family: str, run: Make, exported: Make, tmp_path: Path
) -> None:
    out = exported("huggingface", family)
    run_folder = shutil.copytree(run(family), tmp_path / "own")
    shutil.copy(out / "run.toml", run_folder)  # its decoding settings may have changed
    for words in (
        ["translate"],
        ["translate", "--beam", "2"],
        ["generate", "--temperature", "0", "--max-new-tokens", "6"],
        ["generate", "--beam", "2", "--max-new-tokens", "6"],
        ["generate", "--seed", "3", "--max-new-tokens", "6"],
        ["fill", "--top", "3"],
        ["classify", "--scores"],
    ):
        stdin = MASKED if words[0] == "fill" else TEXT
        code, printed, _ = call(words[0], run_folder, *words[1:], stdin=stdin)
        if code:
            assert call(words[0], out, *words[1:], stdin=stdin)[:2] == (2, "")
        else:
            assert result(words[0], out, *words[1:], stdin=stdin) == printed, words
    if family != "vit":
        np.testing.assert_array_equal(vectors(out, stdin=TEXT), vectors(run_folder, stdin=TEXT))


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("gpt2", "AutoModelForCausalLM"),
        ("llama", "AutoModelForCausalLM"),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("bart", "AutoModelForSeq2SeqLM"),
        ("vit", "AutoModelForImageClassification"),
    ],
)
def test_transformers_opens_what_is_exported(
    family: str, auto: str, folder: Callable[..., tuple[Path, Any]], exported: Make
) -> None:
    source, theirs = folder(family)
    out = exported("huggingface", family)
    back = getattr(transformers, auto).from_pretrained(out)
    assert type(back) is type(theirs)
    old, new = theirs.state_dict(), back.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in old)
    if family == "vit":
        assert back.config.id2label == theirs.config.id2label
        return
    special = ("pad_token_id", "eos_token_id", "bos_token_id")
    for name in special if family != "bert" else special[:1]:
        assert getattr(back.config, name, None) == getattr(theirs.config, name, None), name
    ids = transformers.AutoTokenizer.from_pretrained(out)(LINES)["input_ids"]
    assert ids == fast(source)(LINES)["input_ids"]


def test_graphs_are_exported_with_tokenizer_and_settings(
    run: Make, exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "_write", lambda graph, path: path.touch())  # takes seconds
    export(run("gpt2"), "onnx", out := tmp_path / "out")
    names = {"decoder.onnx", "run.toml", "tokenizer.json", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    counts = json.loads(result("info", out, "--json"))
    summary = json.loads(result("info", run("gpt2"), "--json"))
    assert {**counts, "name": 0} == {**summary, "name": 0}
    assert "onnxruntime" in mistake("generate", out, "--prompt", "a")
    translator = exported("ctranslate2", "bart")
    assert "run it with ctranslate2" in mistake("translate", translator, stdin=TEXT)


def test_every_export_has_a_card_that_the_hub_reads(
    run: Make, exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "_write", lambda graph, path: path.touch())  # takes seconds
    trained = run("trained")
    (trained / "scores.json").write_text(json.dumps(SCORES))
    for to, library in (("huggingface", "transformers"), ("ctranslate2",) * 2, ("onnx",) * 2):
        export(trained, to, tmp_path / to)
        card = huggingface_hub.ModelCard.load(tmp_path / to / "README.md")
        assert card.data.library_name == library
        assert card.data.pipeline_tag == "translation"
        assert card.data.metrics == ["bleu"]
        assert card.data.license is None
        assert r"| bleu | 41.5 | nrefs:1\|tok:13a |" in card.text
        assert "manyheads train run.toml" in card.text
        assert "/" not in card.text.partition("```toml")[2].partition("```")[0]
    (trained / "scores.json").unlink()
    card = huggingface_hub.ModelCard.load(exported("huggingface", "bert") / "README.md")
    assert card.data.pipeline_tag == "fill-mask"
    assert "original model" in card.text


def test_impossible_exports_are_refused(run: Make, exported: Make, tmp_path: Path) -> None:
    for source, *options in (
        (run("gpt2"), "--to", "onx"),
        (run("gpt2"), "--to", "onnx", "--quantization", "int8"),
        (run("gpt2"), "--to", "ctranslate2", "--quantization", "int9"),
        (exported("ctranslate2", "gpt2"), "--to", "onnx"),
        (run("vit"), "--to", "ctranslate2"),
    ):
        mistake("export", source, *options, "--out", tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[1]", '{"signature": {"bleu": 3}}'])
def test_an_export_with_damaged_scores_is_refused(run: Make, tmp_path: Path, content: str) -> None:
    source = shutil.copytree(run("gpt2"), tmp_path / "run")
    (source / "scores.json").write_text(content)
    options = ("--to", "huggingface", "--out", tmp_path / "out")
    assert "scores.json is damaged" in mistake("export", source, *options, code=3)
    assert not (tmp_path / "out").exists()


def test_an_export_reports_changed_settings(run: Make, tmp_path: Path) -> None:
    log = export(run("marian"), "ctranslate2", tmp_path / "out")
    assert "decode.stopping=early in place of heuristic" in log
    assert "decode.at_limit=truncate in place of force-eos-free" in log
    decode = read_run(tmp_path / "out").decode
    assert (decode.stopping, decode.at_limit) == ("early", "truncate")
    assert "in place of" not in export(run("bert"), "huggingface", tmp_path / "other")


# --- embed ---


def test_vectors_go_to_stdout_or_a_file(run: Make, tmp_path: Path) -> None:
    array = vectors(run("bert"), stdin=TEXT)
    assert (array.shape, array.dtype) == ((5, 24), np.float32)
    for name in ("given.npy", "given"):
        assert result("embed", run("bert"), "--out", tmp_path / name, stdin=TEXT) == ""
        saved_ = np.load(tmp_path / "given.npy", allow_pickle=False)
        np.testing.assert_array_equal(saved_, array)
        (tmp_path / "given.npy").unlink()
    assert vectors(run("bert"), "--pool", "tokens", stdin=TEXT).ndim == 3
    assert vectors(run("bert"), stdin=b"no end of line").shape == (1, 24)
    np.testing.assert_array_equal(vectors(run("bert"), stdin=TEXT.replace(b"\n", b"\r\n")), array)


# --- fill, classify ---


def test_fill_gives_one_line_per_line(run: Make) -> None:
    for family in ("bert", "roberta"):
        lines = result("fill", run(family), stdin=MASKED).split("\n")
        assert len(lines) == 5
        assert lines[1:3] == ["no mask here", ""]
        assert "ask" not in lines[0] + lines[3]
        listed = result("fill", run(family), "--top", "3", stdin=MASKED).split("\n")
        rows = [line.split("\t") for line in listed if line.startswith("  mask ")]
        assert [row[0] for row in rows] == ["  mask 1"] * 3 + ["  mask 2"] * 3 + ["  mask 1"] * 3
        assert [line for line in listed if not line.startswith("  mask ")] == lines
    printed = result("fill", run("bert"), "--top", "2", "--json", stdin=MASKED)
    rows = list(map(json.loads, printed.splitlines()))
    assert [(row["line"], len(row["masks"])) for row in rows] == [(1, 2), (2, 0), (3, 0), (4, 1)]
    assert [row["text"] for row in rows] == result("fill", run("bert"), stdin=MASKED).splitlines()
    for words in rows[0]["masks"]:
        assert words[0]["probability"] >= words[1]["probability"] > 0
    mistake("fill", run("gpt2"), stdin=MASKED)


def test_labels_of_texts(run: Make) -> None:
    run_folder = run("bert", "BertForSequenceClassification", id2label=LABELS)
    labels = result("classify", run_folder, stdin=TEXT).splitlines()
    assert len(labels) == 5
    assert set(labels) <= set(LABELS.values())
    scored = result("classify", run_folder, "--scores", stdin=TEXT).splitlines()
    rows = list(map(json.loads, result("classify", run_folder, "--json", stdin=TEXT).splitlines()))
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5]
    for line, row, label in zip(scored, rows, labels, strict=True):
        best, *scores = line.split("\t")
        chances = {score.split("=")[0]: float(score.split("=")[1]) for score in scores}
        assert list(chances) == list(row["scores"]) == list(LABELS.values())
        assert sum(chances.values()) == pytest.approx(1, abs=1e-3)
        assert best == label == row["label"] == max(chances, key=lambda name: chances[name])
    number = run("electra", "ElectraForSequenceClassification", num_labels=1)
    assert all(map(float, result("classify", number, stdin=TEXT).splitlines()))
    for family, kind in (("bert", "BertForNextSentencePrediction"), ("gpt2", ""), ("vit", "")):
        mistake("classify", run(family, kind), stdin=TEXT)


def test_labels_of_tokens(run: Make) -> None:
    """With scores: a token with its label and scores a line, an empty line after each text."""
    tagger = run("distilbert", "DistilBertForTokenClassification", id2label=LABELS)
    plain = [line.split() for line in result("classify", tagger, stdin=TEXT).split("\n")[:-1]]
    assert [pair.split("/")[0] for pair in plain[0]][:2] == ["the", "small"]
    assert plain[3] == []
    *texts, last = result("classify", tagger, "--scores", stdin=TEXT).split("\n\n")
    assert last == ""
    rows = [row.split("\t") for text in texts for row in text.strip("\n").split("\n") if row]
    assert [f"{row[0]}/{row[1]}" for row in rows] == [pair for line in plain for pair in line]
    for row in rows:
        scores = dict(score.split("=") for score in row[2:])
        assert row[1] == max(scores, key=lambda name: float(scores[name]))
    printed = result("classify", tagger, "--json", stdin=TEXT)
    lines = list(map(json.loads, printed.splitlines()))
    assert [[f"{x['token']}/{x['label']}" for x in line["tokens"]] for line in lines] == plain
    assert sum(lines[0]["tokens"][0]["scores"].values()) == pytest.approx(1)


# --- generate ---


def test_a_seed_reproduces_a_text(run: Make) -> None:
    words = ("generate", run("gpt2"), "--max-new-tokens", "8")
    text = b"the dog\nthe dog\n\na cat"
    sampled = [result(*words, "--seed", seed, stdin=text) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    first = result(*words, "--seed", "1", "--prompt", "the dog")
    assert sampled[0].startswith(first)
    assert not sampled[0].removeprefix(first).startswith(first)  # each line is sampled separately
    assert (
        sampled[0].splitlines()[1] != sampled[2].splitlines()[0]
    )  # nor like the next seed's first
    assert result(*words, stdin=b"") == ""


# --- evaluate ---


def test_an_imported_translator_is_scored_on_given_data(run: Make, tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / f"test.{side}").write_text(f"a {side} dog\nthe cat\n")
        (tmp_path / f"train.{side}").write_text("a\nb\n")
    data = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    mistake("evaluate", run("bart"))
    scores = json.loads(result("evaluate", run("bart"), *data, "--json"))
    assert (scores["examples"], scores["split"]) == (2, "test")
    assert scores["loss"] > 0  # of texts in the frame that the model reads
    assert "alignment_error" not in scores
    mistake("evaluate", run("bert"), "data=phrasebook")


# --- odd input ---


@pytest.mark.parametrize(("family", "command"), [("bert", "fill"), ("t5", "translate")])
def test_odd_input(family: str, command: str, run: Make) -> None:
    for stdin, number in ((b"\xff\xfe\x00", 1), (b"good\n" + "ä".encode("latin-1"), 2)):
        code, printed, log = call(command, run(family), stdin=stdin)
        assert (code, printed) == (3, "")
        assert f":{number}: " in log
    for stdin in (b"\x00\x01 [MASK]\n", b"\t\n\n", "\ufeffdog\r\n".encode(), "\u2028\n".encode()):
        assert result(command, run(family), stdin=stdin).count("\n") >= 1
    assert result(command, run(family), stdin=b"") == ""
