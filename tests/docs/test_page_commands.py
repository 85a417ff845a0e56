"""Commands on the pages: all parse; those that need little run; pages with others say the needs."""

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.checks import unchecked
from tests.docs.test_docs import COMMAND_LINE, PAGES, ROOT, commands
from tests.test_cli import call

PARSED = [page for page in PAGES if page != COMMAND_LINE]  # that one shows errors
RUN_HERE = [ROOT / "README.md", *sorted(ROOT.glob("docs/how-to/*.md"))]
# Commands that need no files and take seconds.
CHEAP = re.compile(r"(recipes|settings \S+|tables \w+|info [a-z]|quiz \w+|claims$|figure schedule)")
NEEDS = re.compile(r"^Needs: \S", flags=re.M)


def lines(page: Path) -> list[list[str]]:
    """The commands of a page; those with placeholders (RUN, …), and bare names, are left out."""
    texts = [" ".join(words).rstrip("\\") for words in commands(page)]  # its first line
    plain = [shlex.split(text) for text in texts if "…" not in text and text.count("'") % 2 == 0]
    return [
        words
        for words in plain
        if not any(word.isupper() or word.startswith("[") for word in words)
    ]


def test_commands_on_pages_parse() -> None:
    """Every option exists and every argument has the right type."""
    from typer.main import get_command

    from manyheads.cli import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    wrong = []
    for page in PARSED:
        for name, *words in lines(page):
            if words and name in known:  # names are checked elsewhere
                try:
                    known[name].make_context(name, words)
                except Exception as error:
                    wrong.append(f"{page.name}: {name} {' '.join(words)}: {error}")
    assert not wrong


def test_commands_that_need_nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {shlex.join(words) for page in PARSED for words in lines(page)}
    cheap = sorted(text for text in texts if CHEAP.match(text) and "runs/" not in text)
    assert len(cheap) > 20
    with unchecked():
        for text in cheap:
            code, _, error = call(*shlex.split(text))
            assert code == 0, f"{text}: {error}"


def test_pages_whose_commands_do_not_run_here_say_what_they_need() -> None:
    """A line `Needs: …` on each page with a command that no test runs.

    On the page of results each experiment has its data and machine.
    """
    silent = []
    for page in PARSED:
        if page == ROOT / "docs" / "results.md":
            continue
        texts = [shlex.join(words) for words in lines(page) if len(words) > 1]
        others = [text for text in texts if not CHEAP.match(text) or "runs/" in text]
        if others and page not in RUN_HERE and not NEEDS.search(page.read_text("utf-8")):
            silent.append(f"{page.relative_to(ROOT)}: {others[0]}")
    assert not silent


# --- the commands of the README and of docs/how-to, made small, in one folder ---

# Servers, a browser, the trainings of all claims, and the demo (tests/test_demo.py).
NOT_RUN = ("view ", "serve ", "demo", "claims --all")
TINY = ("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn_dim=32")
SHORT = ("train.steps=2", "train.batch_tokens=200", "train.validate_every=2", "train.save_every=2")
BY_ROWS = ("images", "classify")  # trained for epochs, in batches of rows
WITHOUT_BPE = ("images", "jsb-chorales", "midi", "shakespeare-char")
PHRASEBOOK = ("data.train_pairs=60", "data.valid_pairs=5", "data.test_pairs=5")


def small(words: list[str]) -> list[str]:
    """A command as the page has it, with a small model and few steps in addition."""
    command, *rest = words
    if command not in ("train", "compare"):
        return words
    recipe = rest[0]
    names = {word.partition("=")[0] for word in words}
    added = ["train.epochs=1"] if recipe in BY_ROWS else list(SHORT)
    if "init" not in names:
        added += [setting for setting in TINY if setting.partition("=")[0] not in names]
        if recipe not in WITHOUT_BPE and "data.folder=prepared" not in words:
            added.append("tokens.vocab_size=600")
    added += PHRASEBOOK if recipe == "phrasebook" else ()
    return [*words, *added]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages name, small."""
    from tests.data.small_music import write_chorales, write_performances
    from tests.data.test_images import class_numbers, write_mnist
    from tests.exchange.folders import saved

    from manyheads.phrasebook import sentences

    folder = tmp_path_factory.mktemp("reader")
    pairs = sentences("en-de", "train", 120)
    english, german = ([getattr(p, side) for p in pairs] for side in ("source", "target"))
    both = [{"en": p.source, "ja": p.target} for p in pairs]
    reviews = ["review,sentiment", *(f'"{text}",{len(text) % 2}' for text in english)]
    table = [{"text": text, "abstract": text.split()[0]} for text in english]
    talks = [{"dialogue": text, "summary": text.split()[0]} for text in english]
    files = {
        "corpus/train.en": english[:100],
        "corpus/train.de": german[:100],
        "corpus/valid.en": english[100:110],
        "corpus/valid.de": german[100:110],
        "corpus/test.en": english[110:],
        "corpus/test.de": german[110:],
        "corpus/text.txt": english,
        "books/a.txt": english,
        "in.txt": english[:3],
        "english.txt": english,
        "french.txt": german,
        "pairs.jsonl": map(json.dumps, both),
        "new.de": german[:5],
        "essay.txt": english * 2,
        "other.txt": english,
        "reviews.csv": reviews,
        "new.csv": reviews[:20],
        **{f"papers/{split}.jsonl": map(json.dumps, table) for split in ("train", "valid", "test")},
        **{f"dialogsum/{s}.jsonl": map(json.dumps, talks) for s in ("train", "valid", "test")},
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "new.en.gz").write_bytes(gzip.compress("\n".join(english[:5]).encode()))
    (folder / "mnist").mkdir()
    write_mnist(folder / "mnist", class_numbers(30), size=(28, 28))
    (write_chorales(folder / "jsb", pieces=60) / "chorales.json").rename(
        folder / "jsb" / "Jsb16thSeparated.json"
    )
    write_performances(folder / "pieces", files=100)
    saved(folder / "bert-folder", "bert", "BertForMaskedLM")
    return folder


def stdin(words: list[str]) -> bytes:
    """A table of labelled texts for `data.train=-`, else a sentence."""
    table = "text\tlabel\n" + "".join(f"sentence {n}\t{n % 2}\n" for n in range(40))
    return table.encode() if "data.train=-" in words else b"The dog sees the tree.\n"


@pytest.mark.slow
def test_commands_of_the_readme_and_the_guides_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the pages: a command may use a run that one before it has trained."""
    monkeypatch.chdir(workspace)
    texts = dict.fromkeys(shlex.join(words) for page in RUN_HERE for words in lines(page))
    count = 0
    for text in texts:
        if CHEAP.match(text) or text.startswith(NOT_RUN) or text in known_names(texts):
            continue
        words = small(shlex.split(text))
        code, _, error = call(*words, stdin=stdin(words))
        assert code == 0, f"{shlex.join(words)}: {error}"
        count += 1
    assert count > 15


LECTURES = [ROOT / "docs" / "lectures.md", *sorted(ROOT.glob("docs/lectures/*.md"))]
# Claims, figures and quizzes have tests with small settings (tests/lab); the rest takes long.
TRIED_ELSEWHERE = ("claims", "figure", "quiz", "view", "demo", "scaling-laws shakespeare", "cost")


def lecture_files(folder: Path) -> None:
    """More files that the pages of the lectures name: GLUE, runs to start from, a picture."""
    from PIL import Image
    from tests.data.test_labelled import OFFICIAL

    for task in ("RTE", "SST-2"):
        (folder / "glue" / task).mkdir(parents=True)
        for split in ("train", "dev"):
            header, *rows = OFFICIAL[task][0].splitlines()
            text = "\n".join([header, *rows * 8]) + "\n"
            (folder / "glue" / task / f"{split}.tsv").write_text(text, encoding="utf-8")
    for old, new in (("jsb", "jsb_chorales"), ("pieces", "piano"), ("in.txt", "sentences.txt")):
        (folder / new).symlink_to(folder / old)
    for name in ("corpus.txt", "shakespeare.txt"):
        (folder / name).symlink_to(folder / "english.txt")
    table = (folder / "reviews.csv").read_text("utf-8").replace("review,sentiment", "text,label")
    (folder / "reviews.csv").write_text(table, encoding="utf-8")
    Image.new("L", (28, 28)).save(folder / "seven.png")
    for words in (
        ["train", "phrasebook", "--out", "runs/demo"],
        ["train", "language", "data.folder=books", "--out", "runs/gpt"],
        ["train", "phrasebook", "--out", "runs/theirs"],
    ):
        assert call(*small(words))[0] == 0
    code, *_ = call("tokenize", "--learn", "english.txt", "-o", "tokenizer.json", "dog")
    assert code == 0


def small_lecture(words: list[str]) -> list[str]:
    """`small`, and sizes that fit all kinds of a sweep over models."""
    words = [word.replace("reviews.tsv", "reviews.csv") for word in words]
    kinds = ("model=rnn", "model=seq2seq,rnn", "model=gpt,rnn", "model=elmo", "elmo-mini")
    if not any(word.startswith(kinds) for word in words):
        return small(words)
    dropped = ("model.heads", "model.ffn_dim")
    if "--match" in words:
        dropped = ("model.",)
    return [word for word in small(words) if not word.startswith(dropped)]


@pytest.mark.slow
def test_commands_of_the_lectures_run(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings first: other commands use their runs."""
    monkeypatch.chdir(workspace)
    shutil.rmtree("runs", ignore_errors=True)  # those of the README have other tasks
    lecture_files(workspace)
    texts = dict.fromkeys(shlex.join(words) for page in LECTURES for words in lines(page))
    chosen = [text for text in texts if " " in text and not text.startswith(TRIED_ELSEWHERE)]
    failures = []
    for text in sorted(chosen, key=lambda text: not text.startswith("train")):
        words = small_lecture(shlex.split(text))
        code, _, error = call(*words, stdin=b"The dog sees the tree.\n")
        print(code, shlex.join(words))
        failures += [f"{shlex.join(words)}: {error[-400:]}"] if code else []
    assert len(chosen) > 50
    assert not failures, "\n".join(failures)


def known_names(texts: dict[str, None]) -> set[str]:
    """Bare names of commands in prose, as in `manyheads train`."""
    return {text for text in texts if " " not in text}
