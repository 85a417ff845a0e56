"""The commands on models that came from elsewhere, and on folders written for other programs.

A folder is made, imported or exported once for all the tests that look at it.
"""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checks import unchecked
from tests.exchange.folders import FAMILIES, LINES, fast, minilm, saved
from tests.test_cli import call, mistake, result
from tests.train.small_runs import write_recipe

from manyheads import cli
from manyheads.decode.generate import as_text
from manyheads.run import read_run
from manyheads.tokenizer.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

TEXT = "\n".join([*LINES[:3], "", "a big cat\tin the tree"]).encode()
MASKED = b"the [MASK] sees a <mask>\nno mask here\n\n[MASK] dog\n"
TRAINED = (
    *("train.steps=120", "train.warmup_steps=30", "train.learning_rate=0.01", "model.dim=32"),
    *("decode.penalty=length", "decode.length_penalty=1.0", "decode.stopping=heuristic"),
    *("decode.at_limit=truncate", "decode.max_length_ratio=100"),
)
LABELS = {0: "good", 1: "bad"}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def folder(places: Path) -> Callable[..., tuple[Path, Any]]:
    """A folder of `transformers` and its model."""
    known: dict[str, tuple[Path, Any]] = {}

    def find(family: str, name: str = "", **settings: Any) -> tuple[Path, Any]:
        key = "-".join([family, name, *map(str, settings)])
        if key not in known:
            known[key] = saved(places / key, family, name, **settings)
        return known[key]

    return find


@pytest.fixture(scope="module")
def run(folder: Callable[..., tuple[Path, Any]], places: Path) -> Make:
    """A run made of such a folder, and `trained`, a translator of our own."""

    def find(family: str, name: str = "", **settings: Any) -> Path:
        out = places / "-".join(["run", family, name, *map(str, settings)])
        if out.exists():
            return out
        if family == "trained":
            result("train", write_recipe(places / "data"), *TRAINED, "--out", out)
        else:
            result("import", folder(family, name, **settings)[0], "--out", out)
        return out

    return find


@pytest.fixture(scope="module")
def exported(run: Make, places: Path) -> Make:
    def find(to: str, family: str, name: str = "", **settings: Any) -> Path:
        out = places / "-".join([to, family, name, *map(str, settings)])
        if not out.exists():
            export(run(family, name, **settings), to, out)
        return out

    return find


def export(source: Path, to: str, out: Path) -> str:
    """What an export says. Shapes are symbols while a graph is traced, so none is checked."""
    with unchecked():
        code, printed, said = call("export", source, "--to", to, "--out", out)
    assert (code, printed) == (0, ""), said
    return said


def vectors(*words: object, stdin: bytes) -> np.ndarray:
    """What `embed` writes to stdout."""
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
def test_an_imported_run_is_whole_and_counts_as_transformers_does(
    family: str, folder: Callable[..., tuple[Path, Any]], run: Make
) -> None:
    source, theirs = folder(family)
    out = run(family)
    tokenizer = {"tokenizer.json"} - ({"tokenizer.json"} if family == "vit" else set())
    assert {path.name for path in out.iterdir()} == {"run.toml", "model.safetensors", *tokenizer}
    found = json.loads(result("info", out, "--json"))
    assert found["parameters"] == theirs.num_parameters(only_trainable=True)
    assert sum(found["parts"].values()) == found["parameters"]
    there = json.loads(result("info", source, "--json"))
    assert {**there, "name": 0} == {**found, "name": 0}
    table = theirs.get_input_embeddings()
    if family != "vit":
        assert found["parts"]["embedding"] >= table.weight.numel()
    crossed = found["parts"]["cross-attention"]
    assert (crossed > 0) == theirs.config.is_encoder_decoder


def test_the_real_model_is_imported(tmp_path: Path) -> None:
    source = minilm()
    if source is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed")
    code, printed, said = call("import", source, "--out", tmp_path / "run")
    assert (code, printed) == (0, ""), said
    assert said.splitlines()[-1] == f"next: manyheads info {tmp_path / 'run'}"
    found = json.loads(result("info", tmp_path / "run", "--json"))
    theirs = transformers.AutoModel.from_pretrained(source)
    assert found["parameters"] == theirs.num_parameters(only_trainable=True)
    text = b"A dog runs.\nThe cat sleeps.\n"
    assert (vectors(tmp_path / "run", stdin=text) == vectors(source, stdin=text)).all()


def test_a_full_folder_is_not_written_to(
    folder: Callable[..., tuple[Path, Any]], run: Make, tmp_path: Path
) -> None:
    out = run("bert")
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert "not empty" in mistake("import", folder("bert")[0], "--out", out)
    assert "not empty" in mistake("export", run("t5"), "--to", "huggingface", "--out", out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "empty").mkdir()
    result("import", folder("bert")[0], "--out", tmp_path / "empty")
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in mistake("import", folder("bert")[0], "--out", file)
    assert str(file) in mistake("import", folder("bert")[0], "--out", file / "inside")


def test_files_are_as_open_as_their_folder(run: Make, exported: Make) -> None:
    for out in (run("bert"), exported("huggingface", "bert"), exported("ctranslate2", "gpt2")):
        for path in out.iterdir():
            assert path.stat().st_mode & 0o777 == out.stat().st_mode & 0o666, path


@pytest.mark.parametrize(
    ("break_it", "code", "part"),
    [
        (lambda f: (f / "config.json").unlink(), 3, "it has no config.json"),
        (lambda f: (f / "config.json").write_text("{}"), 3, "no model_type"),
        (lambda f: (f / "config.json").write_text('{"model_type": "brt"}'), 2, "'bert'?"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), 3, "damaged or cut off"),
        (lambda f: (f / "modeling.py").write_text("1/0"), 2, "comes with code"),
        (lambda f: (f / "tokenizer.json").write_text("{"), 3, "tokenizer.json"),
        (shutil.rmtree, 2, "there is no folder"),
    ],
)
def test_a_folder_that_is_wrong_is_one_line_and_leaves_nothing(
    break_it: Callable[[Path], object],
    code: int,
    part: str,
    folder: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    source = shutil.copytree(folder("bert")[0], tmp_path / "in" / "source")
    break_it(source)
    assert part in mistake("import", source, "--out", tmp_path / "out" / "run", code=code)
    assert not (tmp_path / "out").exists()
    if (source / "config.json").exists():
        assert part in mistake("embed", source, stdin=b"a dog", code=code)


def test_a_tokenizer_of_another_model_is_not_imported(
    folder: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    source = shutil.copytree(folder("bert")[0], tmp_path / "source")
    shutil.copy(folder("roberta")[0] / "tokenizer.json", source)
    assert "do not belong together" in mistake("import", source, "--out", tmp_path / "r", code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_model_without_a_tokenizer_is_imported_and_says_so(
    folder: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    source = shutil.copytree(folder("gpt2")[0], tmp_path / "source")
    (source / "tokenizer.json").unlink()
    code, _, said = call("import", source, "--out", tmp_path / "run")
    assert code == 0
    assert "has no tokenizer.json" in said
    line = "has no tokenizer.json: put the model's own there"
    assert line in mistake("generate", tmp_path / "run", "--prompt", "a")
    assert line in mistake("embed", tmp_path / "run", "--out", tmp_path / "x", stdin=b"a")
    assert line in mistake("export", tmp_path / "run", "--to", "ctranslate2", "--out", source / "x")
    result("export", tmp_path / "run", "--to", "huggingface", "--out", tmp_path / "back")
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_info_tells_folders_from_presets(
    folder: Callable[..., tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bert-base").mkdir()
    assert json.loads(result("info", "bert-base", "--json"))["parameters"] > 1e8
    assert "no run.toml" in mistake("info", tmp_path, code=3)
    source = shutil.copytree(folder("bert")[0], tmp_path / "source")
    (source / "config.json").write_text("{}")
    assert "no model_type" in mistake("info", source, code=3)


def test_tokens_of_a_tokenizer_that_cannot_be_replayed(run: Make, tmp_path: Path) -> None:
    layout = json.loads((run("bert") / "tokenizer.json").read_text())
    words = {word: number for word, number in layout["model"]["vocab"].items() if "##" not in word}
    layout["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(layout))
    code, printed, said = call("tokens", file, "the dog")
    assert code == 0
    assert said.startswith("no replay for a WordLevel tokenizer")
    assert printed.splitlines()[0] == "  the|dog"


# --- export: the same from every folder ---


def test_a_translator_of_ours_gives_the_same_lines_everywhere(run: Make, exported: Make) -> None:
    own = run("trained")
    text = (own.parent / "data" / "pairs.source").read_bytes().splitlines()[:25]
    stdin = b"\n".join([*text, b"", b"red"])
    wanted = result("translate", own, stdin=stdin)
    assert len(set(wanted.splitlines())) > 5
    greedy = result("translate", own, "--beam", "1", stdin=stdin)
    scores = json.loads(result("evaluate", own, "--split", "valid", "--json"))
    for to in ("huggingface", "ctranslate2", "onnx"):
        out = exported(to, "trained")
        assert result("translate", out, stdin=stdin) == wanted, to
        assert result("translate", out, "--beam", "1", stdin=stdin) == greedy, to
        found = json.loads(result("evaluate", out, "--split", "valid", "--json"))
        assert found["bleu"] == pytest.approx(scores["bleu"])
        assert json.loads((out / "scores.json").read_text()) == found
        there, here = (json.loads(result("info", x, "--json")) for x in (out, own))
        assert {**there, "name": 0} == {**here, "name": 0}
    drawn = [
        result("translate", x, "--sample", "--seed", "4", stdin=stdin)
        for x in (own, exported("huggingface", "trained"), exported("onnx", "trained"))
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    line = mistake("translate", exported("ctranslate2", "trained"), "--sample", stdin=stdin)
    assert "one stream of random numbers" in line


@pytest.mark.parametrize("beam", [1, 2])
def test_transformers_writes_the_same_translations(beam: int, run: Make, exported: Make) -> None:
    out = exported("huggingface", "trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    assert theirs.generation_config.num_beams == read_run(out).decode.beam == 2
    lines = (run("trained").parent / "data" / "pairs.source").read_text().splitlines()[:12]
    found = []
    for line in lines:
        given = tokenizer(line, return_tensors="pt")
        ids = given["input_ids"][0].tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == line
        told = {"num_beams": 1, "length_penalty": None, "early_stopping": None}
        written = theirs.generate(**given, **(told if beam == 1 else {}))
        found.append(tokenizer.decode(written[0], skip_special_tokens=True))
    text = "\n".join(lines).encode()
    assert result("translate", out, "--beam", beam, stdin=text).splitlines() == found


@pytest.mark.parametrize(
    ("to", "family"),
    [
        *(("huggingface", family) for family in ("bert", "gpt2", "t5", "vit")),
        *(("ctranslate2", family) for family in ("gpt2", "bart")),
        ("onnx", "gpt2"),
        *(
            pytest.param(to, family, marks=pytest.mark.slow)
            for to, family in (
                *(("huggingface", "llama"), ("huggingface", "bart")),
                *(("ctranslate2", "llama"), ("ctranslate2", "t5")),
            )
        ),
    ],
)
def test_the_commands_say_the_same_of_an_exported_model(
    to: str, family: str, run: Make, exported: Make, tmp_path: Path
) -> None:
    settings = {"n_layer": 1} if to == "onnx" else {}
    out = exported(to, family, **settings)
    own = shutil.copytree(run(family, **settings), tmp_path / "own")
    shutil.copy(out / "run.toml", own)  # an export says where it cannot write by the same rules
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
        code, printed, _ = call(words[0], own, *words[1:], stdin=stdin)
        if code:
            assert call(words[0], out, *words[1:], stdin=stdin)[:2] == (2, "")
        elif to == "ctranslate2" and words[1:2] == ["--seed"]:
            code, greedy, said = call(words[0], out, *words[3:], stdin=stdin)
            likeliest = result(words[0], out, "--temperature", "0", *words[3:], stdin=stdin)
            assert (code, greedy) == (0, likeliest)
            assert "the most probable token is taken" in said
            assert "one stream of random numbers" in mistake(words[0], out, *words[1:], stdin=stdin)
        else:
            assert result(words[0], out, *words[1:], stdin=stdin) == printed, words
    if family == "vit":
        return
    if to == "huggingface":
        np.testing.assert_array_equal(vectors(out, stdin=TEXT), vectors(own, stdin=TEXT))
    else:
        assert "use the run" in mistake("embed", out, stdin=TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_out_and_in_and_out_again_gives_the_same_tensors(
    family: str, exported: Make, tmp_path: Path
) -> None:
    once = exported("huggingface", family)
    result("import", once, "--out", tmp_path / "run")
    export(tmp_path / "run", "huggingface", tmp_path / "twice")
    one, two = (load_file(x / "model.safetensors") for x in (once, tmp_path / "twice"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for name in ("config.json", "generation_config.json"):
        if (once / name).exists():
            assert (once / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


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
    given = transformers.AutoTokenizer.from_pretrained(out)(LINES)["input_ids"]
    assert given == fast(source)(LINES)["input_ids"]


def test_what_cannot_be_exported_is_one_line(run: Make, exported: Make, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "new" / "out")
    assert "'onnx'?" in mistake("export", run("gpt2"), "--to", "onx", *out)
    line = mistake("export", run("gpt2"), "--to", "onnx", "--quantization", "int8", *out)
    assert "--quantization works only with --to ctranslate2" in line
    line = mistake("export", run("gpt2"), "--to", "ctranslate2", "--quantization", "int9", *out)
    assert "'int8'?" in line
    line = mistake("export", exported("ctranslate2", "gpt2"), "--to", "onnx", *out)
    assert "was exported already" in line
    assert "holds a vit model" in mistake("export", run("vit"), "--to", "ctranslate2", *out)
    assert list(tmp_path.iterdir()) == []


def test_an_export_says_what_changes(run: Make, tmp_path: Path) -> None:
    said = export(run("marian"), "ctranslate2", tmp_path / "out")
    assert "decode.stopping=early in place of heuristic" in said
    assert "decode.at_limit=truncate in place of force-eos-free" in said
    decode = read_run(tmp_path / "out").decode
    assert (decode.stopping, decode.at_limit) == ("early", "truncate")
    said = export(run("bert"), "huggingface", tmp_path / "other")
    assert said == f"exported: {tmp_path / 'other'}\n"


def test_the_order_of_search_of_older_runs_is_dropped(run: Make, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(run("marian"), old)
    settings = old / "run.toml"
    unsealed = [x for x in settings.read_text("utf-8").splitlines() if "# check sum" not in x]
    text = "\n".join(unsealed).replace("[decode]\n", '[decode]\norder = "best-first"\n')
    assert "best-first" in text
    settings.write_text(text, "utf-8")
    assert read_run(old) == read_run(run("marian"))


# --- embed ---


def test_vectors_go_to_stdout_or_a_file(run: Make, tmp_path: Path) -> None:
    found = vectors(run("bert"), stdin=TEXT)
    assert (found.shape, found.dtype) == ((5, 24), np.float32)
    for name in ("given.npy", "given"):
        assert result("embed", run("bert"), "--out", tmp_path / name, stdin=TEXT) == ""
        saved_ = np.load(tmp_path / "given.npy", allow_pickle=False)
        np.testing.assert_array_equal(saved_, found)
        (tmp_path / "given.npy").unlink()
    assert vectors(run("bert"), "--pool", "tokens", stdin=TEXT).ndim == 3
    assert vectors(run("bert"), stdin=b"no end of line").shape == (1, 24)
    np.testing.assert_array_equal(vectors(run("bert"), stdin=TEXT.replace(b"\n", b"\r\n")), found)


# --- fill, classify ---


def test_fill_gives_as_many_lines_as_it_gets(run: Make) -> None:
    for family in ("bert", "roberta"):
        lines = result("fill", run(family), stdin=MASKED).split("\n")
        assert len(lines) == 5
        assert lines[1:3] == ["no mask here", ""]
        assert "ask" not in lines[0] + lines[3]
        listed = result("fill", run(family), "--top", "3", stdin=MASKED).split("\n")
        rows = [line.split("\t") for line in listed if line.startswith("  mask ")]
        assert [row[0] for row in rows] == ["  mask 1"] * 3 + ["  mask 2"] * 3 + ["  mask 1"] * 3
        chances = [float(row[1]) for row in rows]
        assert all(chances[i : i + 3] == sorted(chances[i : i + 3])[::-1] for i in (0, 3, 6))
        assert [line for line in listed if not line.startswith("  mask ")] == lines
    line = mistake("fill", run("gpt2"), stdin=MASKED)
    assert "no head for masked words" in line
    assert "no head" in mistake("fill", run("t5"), stdin=MASKED)


def test_labels_as_text(run: Make) -> None:
    name = "BertForSequenceClassification"
    own = run("bert", name, id2label=LABELS)
    found = result("classify", own, stdin=TEXT).splitlines()
    assert len(found) == 5
    assert set(found) <= set(LABELS.values())
    for line, label in zip(
        result("classify", own, "--scores", stdin=TEXT).splitlines(), found, strict=True
    ):
        best, *scores = line.split("\t")
        chances = {one.split("=")[0]: float(one.split("=")[1]) for one in scores}
        assert list(chances) == list(LABELS.values())
        assert sum(chances.values()) == pytest.approx(1, abs=1e-3)
        assert best == label == max(chances, key=lambda one: chances[one])
    number = run("electra", "ElectraForSequenceClassification", num_labels=1)
    assert all(map(float, result("classify", number, stdin=TEXT).splitlines()))
    tagger = run("distilbert", "DistilBertForTokenClassification", id2label=LABELS)
    first, *_, empty, _ = result("classify", tagger, stdin=TEXT).splitlines()
    assert [one.split("/")[0] for one in first.split()][:2] == ["the", "small"]
    assert {one.split("/")[1] for one in first.split()} <= set(LABELS.values())
    assert empty == ""
    for family, kind in (("bert", "BertForNextSentencePrediction"), ("gpt2", "")):
        assert "no head for labels" in mistake("classify", run(family, kind), stdin=TEXT)
    assert "classifies images" in mistake("classify", run("vit"), stdin=TEXT)


def test_words_and_labels_as_json(run: Make) -> None:
    printed = result("fill", run("bert"), "--top", "2", "--json", stdin=MASKED)
    found = list(map(json.loads, printed.splitlines()))
    plain = result("fill", run("bert"), stdin=MASKED).splitlines()
    assert [one["line"] for one in found] == [1, 2, 3, 4]
    assert [one["text"] for one in found] == plain
    assert [len(one["masks"]) for one in found] == [2, 0, 0, 1]
    for words in found[0]["masks"]:
        assert len(words) == 2
        assert words[0]["probability"] >= words[1]["probability"] > 0
        assert words[0]["word"].removeprefix("##") in plain[0]
    own = run("bert", "BertForSequenceClassification", id2label=LABELS)
    printed = result("classify", own, "--json", stdin=TEXT)
    found = list(map(json.loads, printed.splitlines()))
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5]
    assert [one["label"] for one in found] == result("classify", own, stdin=TEXT).splitlines()
    for one in found:
        assert list(one["scores"]) == list(LABELS.values())
        assert one["label"] == max(one["scores"], key=lambda name: one["scores"][name])


def test_scores_of_a_tagger_can_be_read_back(run: Make) -> None:
    """One token a line with its label and scores, and an empty line behind each text."""
    tagger = run("distilbert", "DistilBertForTokenClassification", id2label=LABELS)
    plain = [line.split() for line in result("classify", tagger, stdin=TEXT).split("\n")[:-1]]
    *texts, last = result("classify", tagger, "--scores", stdin=TEXT).split("\n\n")
    assert last == ""
    rows = [[row.split("\t") for row in text.strip("\n").split("\n") if row] for text in texts]
    # The fourth text has no token: its empty line comes right behind that of the third.
    flat = [f"{row[0]}/{row[1]}" for text in rows for row in text]
    assert flat == [one for line in plain for one in line]
    for row in (row for text in rows for row in text):
        scores = dict(one.split("=") for one in row[2:])
        assert row[1] == max(scores, key=lambda name: float(scores[name]))
    printed = result("classify", tagger, "--json", stdin=TEXT)
    found = list(map(json.loads, printed.splitlines()))
    assert [one["line"] for one in found] == [1, 2, 3, 4, 5]
    listed = [[f"{a['token']}/{a['label']}" for a in one["tokens"]] for one in found]
    assert listed == plain
    assert sum(found[0]["tokens"][0]["scores"].values()) == pytest.approx(1)


# --- generate ---


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("beam", [1, 3])
def test_texts_go_on_as_transformers_goes_on(
    family: str, beam: int, folder: Callable[..., tuple[Path, Any]], run: Make
) -> None:
    source, theirs = folder(family)
    tokenizer = fast(source)
    search = ["--temperature", "0"] if beam == 1 else ["--beam", str(beam)]
    for prompt in ("the small dog", "where"):
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        written = theirs.generate(
            **given, do_sample=False, num_beams=beam, max_new_tokens=9, pad_token_id=0
        )
        new = written[0, given["input_ids"].shape[1] :].tolist()
        ours = Tokenizer.load(source / "tokenizer.json")
        stream = as_text(ours, given["input_ids"][0].tolist(), iter(new))
        words = ("generate", run(family), *search, "--max-new-tokens", "9")
        found = result(*words, "--prompt", prompt)
        assert found == prompt + "".join(stream) + "\n"
        assert result(*words, stdin=prompt.encode()) == found


def test_a_seed_gives_a_text_again(run: Make) -> None:
    words = ("generate", run("gpt2"), "--max-new-tokens", "8")
    text = b"the dog\nthe dog\n\na cat"
    drawn = [result(*words, "--seed", seed, stdin=text) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    one = result(*words, "--seed", "1", "--prompt", "the dog")
    assert drawn[0].startswith(one)
    assert not drawn[0].removeprefix(one).startswith(one)  # each line is drawn by itself
    assert drawn[0].splitlines()[1] != drawn[2].splitlines()[0]  # nor as the next seed's first
    assert result(*words, stdin=b"") == ""


def test_what_is_written_is_whole_characters(run: Make) -> None:
    """Each write is read by itself, as a terminal would."""

    class Pieces(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def write(self, text: str) -> int:
            self.seen.append(text)
            return len(text)

    tokenizer = Tokenizer.load(run("gpt2") / "tokenizer.json")
    snow = tokenizer.encode("ä☃🙂")
    assert len(snow) > 8
    pieces = list(as_text(tokenizer, [], iter(snow)))
    assert [piece for piece in pieces if piece] == ["ä", "☃", "🙂"]
    out, before = Pieces(), sys.argv
    sys.argv = ["manyheads", "generate", str(run("gpt2")), "--prompt", "a", "--max-new-tokens", "9"]
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
            cli.main()
    finally:
        sys.argv = before
    assert out.seen[0] == "a"
    assert len([piece for piece in out.seen if piece]) > 3


def test_a_prompt_past_learned_positions(run: Make) -> None:
    long = "the dog " * 60
    assert "shorten it" in mistake("generate", run("gpt2"), "--prompt", long)
    code, printed, said = call("generate", run("gpt2"), "--prompt", "the dog", "--temperature", "0")
    assert code == 0
    assert "positions to write, not 200" in said
    assert printed.startswith("the dog")
    assert result("generate", run("llama"), "--prompt", long, "--max-new-tokens", "2")


def test_options_of_generate_that_would_do_nothing(run: Make) -> None:
    words = ("generate", run("gpt2"), "--prompt", "a")
    for option in (["--top-k", "3"], ["--temperature", "0.5"], ["--seed", "2"]):
        assert "leave out --beam" in mistake(*words, "--beam", "2", *option)
    assert "decode.beam=0" in mistake(*words, "--beam", "0")
    assert "temperature=nan" in mistake(*words, "--temperature", "nan")
    assert "top_p=0.0" in mistake(*words, "--top-p", "0")
    assert "holds a bert model" in mistake("generate", run("bert"), "--prompt", "a")
    assert "holds a seq2seq model" in mistake("generate", run("t5"), "--prompt", "a")


# --- evaluate ---


def test_an_imported_translator_is_scored_on_data_that_are_named(run: Make, tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / f"test.{side}").write_text(f"a {side} dog\nthe cat\n")
        (tmp_path / f"train.{side}").write_text("a\nb\n")
    own = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    for family in ("t5", "bart", "marian"):
        assert "came without data" in mistake("evaluate", run(family))
        scores = json.loads(result("evaluate", run(family), *own, "--json"))
        assert (scores["examples"], scores["split"]) == (2, "test")
        assert 0 <= scores["chrf"] <= 100
        assert scores["loss"] > 0  # of texts in the frame that the model reads
    scores = json.loads(
        result("evaluate", run("t5"), "data=phrasebook", "data.test_pairs=2", "--json")
    )
    assert scores["examples"] == 2
    assert "alignment_error" not in scores
    assert "data=text or labelled" in mistake("evaluate", run("bert"), "data=phrasebook")


# --- odd input ---


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("bert", ["fill"]),
        ("bert", ["embed"]),
        ("gpt2", ["generate", "--max-new-tokens", "2", "--temperature", "0"]),
        ("t5", ["translate"]),
    ],
)
def test_odd_input_is_read_or_refused(family: str, words: list[str], run: Make) -> None:
    for stdin, number in ((b"\xff\xfe\x00", 1), (b"good\n" + "ä".encode("latin-1"), 2)):
        code, printed, said = call(words[0], run(family), *words[1:], stdin=stdin)
        assert code == 3
        assert said == f"manyheads: line {number} of the input is not UTF-8 (byte 1): convert it\n"
        assert printed == "" or words[0] == "generate"  # which writes as it reads
    if words[0] == "embed":
        return
    for stdin in (b"\x00\x01 [MASK]\n", b"\t\n\n", "\ufeffdog\r\n".encode(), "\u2028\n".encode()):
        assert result(words[0], run(family), *words[1:], stdin=stdin).count("\n") >= 1
    assert result(words[0], run(family), *words[1:], stdin=b"") == ""


def test_a_reader_of_vectors_that_goes_away_is_no_error(run: Make) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "manyheads", "embed", str(run("bert")), "--pool", "tokens"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(b"the dog\n" * 2000, timeout=60)
    assert process.returncode == 0
    assert b"manyheads:" not in said
