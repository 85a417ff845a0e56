"""Mistakes with pretraining and fine-tuning: one line each, and nothing left behind."""

import json
import random
import shutil
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.test_cli import call, mistake, result

from manyheads.models.vit import VitConfig
from manyheads.recipes import recipes
from manyheads.run import Run, read_run, save_run
from manyheads.train import metrics

WORDS = ("the", "a", "small", "big", "red", "dog", "cat", "bird", "sees", "likes", "and", "runs")
SMALL = ("model.dim=16", "model.layers=1", "model.heads=2", "model.max_length=16")
STEPS = ("train.steps=2", "train.batch_rows=4")
EPOCHS = ("train.epochs=0.2",)
TEXT = "data.folder=text"
TABLE = "data.folder=table"

# A trained run for each kind, by name.
RUNS = {
    "gpt": ("gpt-mini", TEXT, *SMALL, *STEPS),
    "rotary": ("language", TEXT, *SMALL, *STEPS),
    "words": ("language", TEXT, *SMALL, *STEPS, "tokens=words"),
    "bert": ("bert-mini", TEXT, *SMALL, *STEPS, "model.position=learned"),
    "electra": ("electra-mini", TEXT, *SMALL, *STEPS),
    "t5": ("t5-mini", TEXT, *SMALL, *STEPS),
    "labels": ("classify", TABLE, *SMALL, *EPOCHS),
    "tuned": ("classify", TABLE, *EPOCHS, "init=runs/bert", "model.dropout=0.2"),
}


def sentences(count: int, a_document: int = 5) -> str:
    """Lines of words; an empty one after every few."""
    draw = random.Random(1)
    lines = []
    for number in range(1, count + 1):
        lines.append(" ".join(draw.choices(WORDS, k=draw.randint(4, 8))))
        lines += [""] if number % a_document == 0 else []
    return "\n".join(lines) + "\n"


def table(rows: list[str], header: str = "text\tlabel") -> str:
    return "\n".join([header, *rows]) + "\n"


ROWS = [f"{line}\t{'good' if 'dog' in line else 'so so'}" for line in sentences(50, 99).split("\n")]
ROWS = [row for row in ROWS if row.split("\t")[0]]


def write(name: str, content: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def no_board(name: str, package: str | None = None) -> ModuleSpec | None:
    """Importing TensorBoard takes seconds."""
    return None if name == "tensorboard" else find_spec(name, package)


@pytest.fixture(scope="module", autouse=True)
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A folder to stand in, with a text, a table and runs; what training each of them said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        patch.setattr(metrics, "find_spec", no_board)
        write("text/corpus.txt", sentences(200))
        write("table/train.tsv", table(ROWS))
        lines = {}
        for name, words in RUNS.items():
            code, printed, lines[name] = call("train", *words, "--out", f"runs/{name}")
            assert (code, printed) == (0, ""), lines[name]
        yield lines


def refused(*words: object, code: int = 2) -> str:
    """The line of a training that is refused, which leaves no folder."""
    out = Path("runs/new")
    line = mistake("train", *words, "--out", out, code=code)
    assert not out.exists()
    return line


# --- what a command is told ---


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_shows_its_settings(name: str) -> None:
    assert result("train", name, "--print-config").startswith("task = ")


@pytest.mark.parametrize("name", sorted({*recipes()} - {"phrasebook", "translation"}))
def test_a_recipe_without_data_asks_for_them(name: str) -> None:
    sizes = [one for one in SMALL if name != "elmo-mini" or "heads" not in one]  # LSTMs have none
    assert " is needed" in refused(name, *sizes)
    assert "data.folder=nowhere is not a folder" in refused(name, *sizes, "data.folder=nowhere")
    line = refused(name, *sizes, "data.folder=table/train.tsv")
    assert "data.folder=table/train.tsv is a file: set data." in line


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            ["bert-mini", "objective=spans"],
            "model=seq2seq (not bert): try the recipe t5",
        ),
        (
            ["t5-mini", "objective=masked"],
            "model=bert (not seq2seq): try the recipe bert",
        ),
        (["gpt-mini", "objective=masked"], "objective=causal (not masked)"),
        (["bert-mini", "objective=mask"], "did you mean 'masked'?"),
        (["bert-mini", "objective=none"], "needs an objective, e.g. objective=masked"),
        (["bert-mini", "objective=replaced"], "objective=replaced-token needs model.head=detect"),
        (["electra-mini", "model.head=masked"], "objective=replaced-token needs model.head=detect"),
        (["bert-mini", "model.embed.segments=1"], "needs model.embed.segments=2"),
        (["bert-mini", "objective.rate=15"], "objective.rate=15.0 must be above 0"),
        (["classify", "objective=masked"], "objective=none"),
        (["classify", "model=gpt"], "model=bert or elmo (not gpt)"),
        (["classify", "model.head=tag"], "task=classification needs model.head=classify"),
        (["classify", "model.head=none"], "task=classification needs model.head=classify"),
        (["classify", "train.steps=9"], "add train.epochs=none"),
        (["classify", "train.warmup_steps=9"], "add train.warmup_ratio=none"),
        (["language", "train.epochs=0"], "train.epochs=0.0 must be above 0"),
        (["language", "data.lines=sentence"], "did you mean 'sentences'?"),
        (["language", "tokens=word"], "did you mean 'words'?"),
        (["classify", "data.task=sst2"], "did you mean 'sst-2'?"),
        (["classify", "data.task=imdb"], "known: cola, mnli, mrpc, own"),
        (["classify", "init=runs/nowhere"], "init=runs/nowhere is not a folder"),
        (["summaries", "model=seq2sec"], "not a kind of model: did you mean model=seq2seq?"),
        (["classify", "init=mine/bert"], "init=mine/bert is not a folder: give a run"),
    ],
)
def test_settings_that_do_not_go_together(words: list[str], advice: str) -> None:
    assert advice in refused(*words)


@pytest.mark.parametrize(
    ("recipe", "length"),
    [("bert-mini", 4), ("electra-mini", 3), ("t5-mini", 2), ("classify", 2)],
)
def test_a_model_that_would_read_nothing_but_its_frame(recipe: str, length: int) -> None:
    data = TABLE if recipe == "classify" else TEXT
    small = [one for one in SMALL if "max_length" not in one]
    line = refused(recipe, data, *small, f"model.max_length={length}")
    assert f"model.max_length={length} leaves no room for text" in line


# --- texts ---

LONG = sentences(200)


@pytest.mark.parametrize(
    ("recipe", "files", "settings", "says"),
    [
        ("language", {"a.txt": ""}, (), "bad/a.txt: the file is empty"),
        ("language", {"a.txt": "\n \n"}, (), "bad/a.txt: every line is empty"),
        ("language", {"a.bin": bytes(range(256))}, (), "bad/a.bin: line 2 is not UTF-8"),
        ("bert-mini", {"a.txt": "fine\ncaf\xe9".encode("latin-1")}, (), "line 2 is not UTF-8"),
        ("language", {"a.txt": "one line"}, (), "bad/a.txt, the first part: "),
        ("bert-mini", {"a.txt": "one line"}, (), "bad/a.txt:1: one sentence"),
        ("gpt-mini", {"a.txt": sentences(2)}, (), "too few to train on windows of 128"),
        ("t5-mini", {"a.txt": sentences(40)}, (), "bad/a.txt, the last part: "),
        ("electra-mini", {"a.txt": LONG, "valid.txt": "two words"}, (), "bad/valid.txt: "),
        ("bert-mini", {"a.txt": LONG}, ("data.lines=text",), "objective.pairs=none"),
        ("bert-mini", {"a.txt": f"alone\n\n{LONG}"}, (), "bad/a.txt:1: this document"),
        ("bert-mini", {"a.txt": sentences(20, 10)}, (), "bad/a.txt, the first part: next-sentence"),
    ],
)
def test_texts_that_cannot_be_trained_on(
    recipe: str, files: dict[str, str | bytes], settings: tuple[str, ...], says: str
) -> None:
    shutil.rmtree("bad", ignore_errors=True)
    for name, content in files.items():
        write(f"bad/{name}", content)
    small = (*SMALL[:3], "model.max_length=128")
    assert says in refused(recipe, "data.folder=bad", *small, *settings, code=3)


def test_a_folder_without_text_and_one_that_only_validates() -> None:
    Path("hollow").mkdir()
    assert "has no text file" in refused("language", "data.folder=hollow")
    write("hollow/a.valid.txt", LONG)
    assert "only a.valid.txt" in refused("language", "data.folder=hollow")


def test_windows_line_ends_change_nothing() -> None:
    write("windows/corpus.txt", LONG.replace("\n", "\r\n"))
    for recipe, position in (("language", "rotary"), ("bert-mini", "learned")):
        out = Path(f"runs/windows-{recipe}")
        words = (recipe, "data.folder=windows", *SMALL, *STEPS, f"model.position={position}")
        assert call("train", *words, "--out", out)[0] == 0
        twin = Path("runs", "rotary" if recipe == "language" else "bert")
        assert (out / "tokenizer.json").read_bytes() == (twin / "tokenizer.json").read_bytes()
        assert _losses(out) == _losses(twin)


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


def test_a_refused_training_can_be_mended_in_the_same_folder() -> None:
    """Also in a folder that was there, empty, before."""
    out = Path("runs/mended")
    out.mkdir()
    words = ("train", "gpt-mini", TEXT, *SMALL[:3], *STEPS, "--out", out)
    mistake(*words, "model.max_length=100000", code=3)
    assert not any(out.iterdir())
    assert call(*words, "model.max_length=16")[0] == 0


# --- tables ---

PAIRS = table([f"{row.split(chr(9))[0]}\ta cat\tyes" for row in ROWS], "text\tother\tlabel")
NUMBERS = [f"dog {number}\t{number / 4}" for number in range(30)]


WRONG = [
    (
        table(ROWS, "sentence\tlabel"),
        (),
        ":1: no column 'text' in the header (sentence, label)",
    ),
    (table(ROWS, "text\tlable"), (), ":1: no column 'label' in the header (text, lable): did"),
    ("\n".join(ROWS), (), ":1: no column 'label' in the header"),
    ("\n".join(ROWS), ("data.text=1", "data.label=3"), ":1: 2 columns where 3 are needed"),
    (table(ROWS).replace("\t", ","), (), ": put tabs between the columns"),
    (table([*ROWS[:2], "no label"]), (), ":4: one column where 2 are needed"),
    (table([*ROWS[:2], "no label\t"]), (), ":4: an empty label (column label)"),
    (table([*ROWS[:2], "a\ttab\tgood"]), (), ":4: 3 columns where the header has 2"),
    (table(["a dog\tgood"] * 9), (), ": every label is 'good', and a classifier needs two"),
    (table([]), (), ": nothing but a header"),
    (table(NUMBERS), (), "data.answer=number"),
    (table([*NUMBERS, "dog\t3,5"]), ("data.answer=number",), ":32: '3,5' is not a number"),
    (PAIRS, ("data.pair=another",), ":1: no column 'another'"),
]


@pytest.mark.parametrize(("content", "settings", "says"), WRONG, ids=range(len(WRONG)))
def test_tables_that_cannot_be_trained_on(
    content: str, settings: tuple[str, ...], says: str
) -> None:
    write("wrong/train.tsv", content)
    line = refused("classify", "data.folder=wrong", *SMALL, *settings, code=3)
    assert line.startswith("manyheads: wrong/train.tsv:")
    assert says in line


def test_labels_that_training_has_not_seen() -> None:
    write("strange/train.tsv", table(ROWS))
    write("strange/valid.tsv", table([ROWS[0], "a cat\tugly"]))
    line = refused("classify", "data.folder=strange", *SMALL, code=3)
    assert "strange/valid.tsv:3: the label 'ugly' is none of (good, so so)" in line
    assert line.endswith("train with rows of this label\n")
    words = ("evaluate", "runs/labels", "data.folder=strange", "--split", "valid")
    assert mistake(*words, code=3) == line
    line = refused("classify", TABLE, *SMALL, "model.head.labels=so so,good")
    assert "are not the labels of table/train.tsv (good,so so): leave them out" in line


def test_carriage_returns_and_labels_with_spaces_are_read() -> None:
    write("other/train.tsv", table(ROWS).replace("\n", "\r\n"))
    assert (
        call("train", "classify", "data.folder=other", *SMALL, *EPOCHS, "--out", "runs/cr")[0] == 0
    )
    assert read_run(Path("runs/cr")).model == read_run(Path("runs/labels")).model
    assert result("classify", "runs/cr", stdin=b"a dog\n").strip() in ("good", "so so")


# --- beginning with a model ---


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (("model.dim=32",), "(model.dim is 16 there and 32 here): leave out model.dim\n"),
        (("model.heads=4",), "(model.heads is 2 there and 4 here)"),
        (("model.position=rotary",), "leave out model.position\n"),
        (("model.max_length=64",), "(model.max_length is 16 there and 64 here)"),
        (("tokens=characters",), "comes with its own tokens: leave out tokens=characters"),
        (("tokens.vocab_size=900",), "comes with its own tokens"),
    ],
)
def test_a_trained_model_stays_as_it_is(settings: tuple[str, ...], advice: str) -> None:
    line = refused("classify", TABLE, "init=runs/bert", *settings)
    assert line.startswith("manyheads: runs/bert ")
    assert advice in line


def test_folders_that_hold_nothing_to_begin_with() -> None:
    Path("empty").mkdir()
    assert "empty is not a run folder" in refused("classify", TABLE, "init=empty", code=3)
    line = refused("classify", TABLE, "init=runs/gpt")
    assert "runs/gpt holds a gpt model, and task=classification begins with a bert one" in line
    assert "holds a bert model" in refused("language", TEXT, "init=runs/bert")
    images = VitConfig(dim=8, layers=1, heads=1, image_size=8, patch_size=4)
    run = Run(task="images", data=None, tokens=None, model=images)
    save_run(run, None, images.build(), Path("runs/images"))
    assert "holds a vit model" in refused("classify", TABLE, "init=runs/images")
    for name in ("run.toml", "tokenizer.json"):
        write(f"exported/{name}", Path("runs/gpt", name).read_bytes())
    write("exported/model.bin", b"of CTranslate2")
    assert "exported was exported" in refused("language", TEXT, "init=exported")


def test_a_vocabulary_without_a_mask() -> None:
    shutil.copytree("runs/bert", "runs/maskless")
    path = Path("runs/maskless/tokenizer.json")
    path.write_text(path.read_text().replace("<mask>", "<musk>"))
    settings = Path("runs/maskless/run.toml")
    settings.write_text(settings.read_text().partition("\n")[2])  # accepts the change
    for recipe in ("bert-mini", "electra-mini"):
        line = refused(recipe, TEXT, *STEPS, "init=runs/maskless")
        assert "runs/maskless/tokenizer.json: this tokenizer has no mask token (<mask>" in line
    assert "no mask token" in mistake("fill", "runs/maskless", stdin=b"a [MASK]\n")


def test_a_run_goes_on_when_what_it_began_with_is_gone() -> None:
    shutil.copytree("runs/bert", "runs/start")
    first = ("train.epochs=2", "train.save_every=1")
    words = ("train", "classify", TABLE, *first, "init=runs/start", "--out", "runs/goes-on")
    assert call(*words)[0] == 0
    shutil.rmtree("runs/start")
    assert "train RUN/run.toml --out RUN" in mistake(*words)
    again = ("train", "runs/goes-on/run.toml", "--out", "runs/goes-on")
    code, _, said = call(*again)
    assert code == 0, said
    assert "resuming from step" in said


# --- going on with other settings ---


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (RUNS["bert"] + ("objective.rate=0.3",), "objective.rate is 0.15 there and 0.3 here"),
        (RUNS["rotary"] + ("data.lines=sentences",), "data.lines is text there and sentences here"),
        (RUNS["electra"], "model.head.kind is masked there and detect here"),
        (RUNS["gpt"], "task is pretraining there and language here"),
    ],
)
def test_other_settings_are_another_run(words: tuple[str, ...], changed: str) -> None:
    folder = Path("runs/rotary" if "data.lines" in changed else "runs/bert")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert f"holds another run ({changed}): keep that" in mistake("train", *words, "--out", folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- using what was trained ---


def test_the_next_command_works_as_printed(said: dict[str, str]) -> None:
    for name, lines in said.items():
        last = lines.splitlines()[-1]
        if name == "electra":
            assert "fine-tune it: " in last
            assert last.endswith("train classify data.train=FILE init=runs/electra")
            continue
        words = last.split(" evaluate ")[1].split()
        assert words[0] == f"runs/{name}"
        assert result("evaluate", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generate", "bert", "--prompt", "a"), "holds a bert model"),
        (("generate", "t5", "--prompt", "a"), "holds a seq2seq model"),
        (("generate", "rotary", "--prompt", "a", "--stop", ""), "--stop is empty"),
        (("generate", "rotary", "--max-new-tokens", "0"), "--max-new-tokens=0 must be at least 1"),
        (("fill", "gpt"), "no head for masked words"),
        (("fill", "labels"), "no head for masked words"),
        (("fill", "electra"), "no head for masked words"),
        (("fill", "bert", "--top", "0"), "--top=0 must be at least 1"),
        (("classify", "bert"), "no head for labels"),
        (("classify", "t5"), "no head for labels"),
        (("evaluate", "rotary"), "there is no split 'test'"),
        (("evaluate", "bert"), "there is no split 'test'"),
        (("evaluate", "t5", "--split", "vlid"), "did you mean 'valid'?"),
        (("evaluate", "labels"), "there is no split 'test'"),
        (("evaluate", "electra", "--split", "valid"), "a generator that is not kept"),
        (("evaluate", "rotary", "--split", "valid", "--stride", "0"), "--stride=0 must be at"),
        (("evaluate", "rotary", "--split", "valid", "--stride", "-3"), "--stride=-3 must be at"),
        (("evaluate", "rotary", "--split", "valid", "--stride", "17"), "choose at most that"),
        (
            ("evaluate", "bert", "--split", "valid", "--stride", "4"),
            "--stride works only with language",
        ),
        (
            ("evaluate", "labels", "--split", "valid", "--stride", "4"),
            "--stride works only with language",
        ),
        (("evaluate", "rotary", "--split", "valid", "--beam", "4"), "--beam is for translators"),
        (("evaluate", "rotary", "--split", "valid", "--int8"), "--int8"),
        (("evaluate", "rotary", "--with", "runs/rotary"), "what translates is an encoder–decoder"),
        (("evaluate", "rotary", "objective.packing=documents"), "objective.packing"),
        (("evaluate", "rotary", "data.folder=nowhere"), "data.folder=nowhere is not a folder"),
        (("export", "bert", "--to", "ctranslate2", "--out", "x"), "holds a bert model"),
        (("export", "bert", "--to", "huggingface", "--out", "x"), "norm.placement=post"),
        (("import", "bert", "--out", "x"), "is a run already"),
    ],
)
def test_a_run_is_asked_for_what_it_does_not_do(words: tuple[str, ...], says: str) -> None:
    command, name, *options = words
    assert says in mistake(command, f"runs/{name}", *options, stdin=b"the [MASK] dog\n")


def test_an_empty_text_has_no_perplexity() -> None:
    write("void/a.txt", LONG)
    for content, says in (("", "the file is empty"), ("\n\n", "every line is empty")):
        write("void/a.test.txt", content)
        line = mistake("evaluate", "runs/rotary", "data.folder=void", code=3)
        assert f"void/a.test.txt: {says}" in line


def test_a_prompt_longer_than_the_context() -> None:
    long = ("--prompt", "the dog sees " * 20, "--max-new-tokens", "3")
    line = mistake("generate", "runs/gpt", *long)
    assert "but the model's learned positions end at 16: shorten it" in line
    code, printed, said = call("generate", "runs/rotary", *long)
    assert code == 0
    assert printed.startswith(long[1])
    assert "past the 16 that the model was trained to read" in said


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_embedded_counted_and_split(name: str) -> None:
    folder = f"runs/{name}"
    assert call("embed", folder, "--out", "vectors.npy", stdin=b"a dog\n\n")[0] == 0
    assert json.loads(result("info", folder, "--json"))["parameters"] > 0
    assert "tokens: " in result("tokens", folder, "the dog")


# --- side by side ---


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ((*RUNS["labels"], "train.learning_rate=1e-4,1e-3"), ("accuracy", "f1")),
        ((*RUNS["rotary"], "model.position=rotary,learned"), ("perplexity", "bits_per_character")),
    ],
)
def test_comparing_shows_the_scores_of_the_task(
    words: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    shown = result("compare", *words, "--out", f"runs/compared-{words[0]}")
    assert shown.count(words[-1].split("=")[0]) == 2
    assert all(column in shown for column in columns)
    assert "bleu" not in shown


def test_comparing_what_has_no_scores_is_refused_before_it_trains() -> None:
    words = ("compare", *RUNS["electra"], "objective.rate=0.1,0.2", "--out", "runs/vain")
    assert "a generator that is not kept" in mistake(*words)
    assert not Path("runs/vain").exists()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "init=FOLDER"),
        ("evaluate", "--stride"),
        ("generate", "--stop"),
        ("fill", "--top"),
    ],
)
def test_help_tells_of_it(command: str, option: str) -> None:
    assert option in result(command, "--help")


def test_a_pair_where_single_texts_were_trained_on_is_said() -> None:
    code, printed, said = call("classify", "runs/labels", stdin=b"a dog\na dog\ta cat\n")
    assert (code, len(printed.splitlines())) == (0, 2)
    assert "line 2: the run was trained on single texts, without a tab" in said
    assert "trained on" not in call("classify", "runs/labels", stdin=b"a dog\n")[2]


def test_another_text_replaces_the_one_that_was_trained_on() -> None:
    """A file in place of the run's folder is not looked for inside it, nor the other way."""
    write("other-text/more.txt", LONG)
    for words in (["data.file=other-text/more.txt"], ["data.folder=other-text"]):
        assert "bits_per_character" in result("evaluate", "runs/gpt", *words, "--split", "valid")
