"""User errors: exit code 2 or 3, one line that names the setting, nothing left behind."""

import json
import random
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_cli import TINY, call, mistake, result

from manyheads.models.vit import VitConfig
from manyheads.recipes import recipes
from manyheads.run import Run, read_run, save_run

WORDS = ("the", "a", "small", "big", "red", "dog", "cat", "bird", "sees", "likes", "and", "runs")
SMALL = ("model.dim=16", "model.layers=1", "model.heads=2", "model.max_length=16")
STEPS = ("train.steps=2", "train.batch_rows=4")
EPOCHS = ("train.epochs=0.2",)
TEXT = "data.folder=text"
TABLE = "data.folder=table"

# A trained run for each kind, by name.
RUNS = {
    "translator": ("phrasebook", *TINY, "train.steps=1"),
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
    generator = random.Random(1)
    lines = []
    for number in range(1, count + 1):
        lines.append(" ".join(generator.choices(WORDS, k=generator.randint(4, 8))))
        lines += [""] if number % a_document == 0 else []
    return "\n".join(lines) + "\n"


def table(rows: list[str], header: str = "text\tlabel") -> str:
    return "\n".join([header, *rows]) + "\n"


LONG = sentences(200)
LINES = [line for line in sentences(50, 99).split("\n") if line]
ROWS = [f"{line}\t{'good' if 'dog' in line else 'so so'}" for line in LINES]
PAIR = "".join(
    f"sentence number {word}\n" for word in ("one", "two", "three", "four", "five", "six")
)
TOO_LONG = PAIR + "word " * 300 + "\n"

FILES: dict[str, str | bytes] = {
    "text/corpus.txt": LONG,
    "table/train.tsv": table(ROWS),
    "empty/keep/nothing": "",
    # Texts
    "hollow/a.txt": "",
    "latin/a.txt": "fine\ncafé".encode("latin-1"),
    "line/a.txt": "one line",
    "short/a.txt": sentences(2),
    "only-valid/a.valid.txt": LONG,
    "empty-test/a.txt": LONG,
    "empty-test/a.test.txt": "",
    # Tables
    "t4/train.tsv": table(ROWS).replace("\t", ","),
    "unseen/train.tsv": table(ROWS),
    "unseen/valid.tsv": table([ROWS[0], "a cat\tugly"]),
    # Pairs of files
    "pairs/a.en": PAIR,
    "pairs/b.en": PAIR + "more\n",
    "pairs/d.en": b"caf\xe9\n" * 6,
    "pairs/e.en": PAIR.replace("sentence number two", ""),
    "pairs/f.en": TOO_LONG,
    # Recipes
    "broken.toml": "seed = ",
    "partial.toml": "seed = 1",
    "typo.toml": "sede = 1",
    "novel.txt": "It was a dark night.",
}

_PAIRS = "train phrasebook data=files data.held_out=0.2 tokens.vocab_size=300"

# Command, exit code, what the line names. RUN/ stands for runs/, words in capitals for settings.
ERRORS = [
    # The command line
    ("trian", 2, "trian"),
    ("train phrasebook --outt x", 2, "--outt"),
    ("evaluate", 2, "RUN"),
    ("translate RUN/translator --beam five", 2, "--beam"),
    ("train phrasebok", 2, "'phrasebook'"),
    ("settings phrasebook nonsense", 2, "nonsense"),
    ("train nothing/like/it.toml", 2, "nothing/like/it.toml"),
    ("train novel.txt", 2, "data.file=novel.txt"),
    ("train language novel.txt", 2, "data.folder=corpus"),
    ("train classify finetune.lora=true", 2, "finetune.lora.rank"),
    ("train phrasebook --device gpu", 2, "gpu"),
    ("train phrasebook --seed -1", 2, "seed=-1"),
    ("train broken.toml", 2, "broken.toml"),
    ("train partial.toml", 2, "'data'"),
    ("train typo.toml", 2, "'seed'"),
    # Settings
    ("train phrasebook model.dimm=3", 2, "'model.dim'"),
    ("train phrasebook model.position=rotery", 2, "'rotary'"),
    ("train phrasebook model.dim=wide", 2, "model.dim"),
    ("train phrasebook model.dim", 2, "name=value"),
    ("train phrasebook model.heads=3", 2, "3 heads"),
    ("train phrasebook train.steps=0", 2, "train.steps=0"),
    ("train bert-mini objective.rate=15", 2, "objective.rate"),
    ("train classify data.task=sst2", 2, "'sst-2'"),
    # Settings that exclude each other
    ("train bert-mini objective=spans", 2, "model=seq2seq"),
    ("train bert-mini objective=replaced", 2, "model.head=detect"),
    ("train bert-mini model.embed.segments=1", 2, "model.embed.segments=2"),
    ("train classify model=gpt", 2, "model=bert"),
    ("train classify model.head=none", 2, "model.head=classify"),
    ("train classify train.steps=9 train.epochs=2", 2, "train.epochs=2"),
    ("train phrasebook train.batch_rows=9", 2, "train.batch_tokens"),
    ("train phrasebook data=files data.folder=none data.source=a data.target=b", 2, "data.folder"),
    ("train phrasebook data=files", 2, "data.source"),
    # Models without room for text
    ("train bert-mini data.folder=text LARGE model.max_length=4", 2, "model.max_length=4"),
    # Trained models to start from
    ("train classify init=runs/nowhere", 2, "init=runs/nowhere"),
    ("train classify data.folder=table init=empty", 3, "empty"),
    ("train bert-mini data.folder=text init=RUN/gpt", 2, "bert"),
    ("train language data.folder=text init=exported", 2, "exported"),
    ("train classify data.folder=table init=RUN/bert model.dim=32", 2, "model.dim"),
    ("train classify data.folder=table init=RUN/bert model.position=rotary", 2, "model.position"),
    ("train bert-mini data.folder=text init=RUN/maskless", 2, "tokenizer.json"),
    # Texts
    ("train language data.folder=empty SMALL", 2, "empty"),
    ("train language data.folder=only-valid SMALL", 2, "a.valid.txt"),
    ("train language data.folder=hollow SMALL", 3, "hollow/a.txt"),
    ("train bert-mini data.folder=latin SMALL", 3, ":2: not UTF-8"),
    ("train language data.folder=line SMALL", 3, "line/a.txt"),
    ("train gpt-mini data.folder=short LARGE model.max_length=128", 3, "128"),
    ("train bert-mini data.folder=text data.lines=text SMALL", 3, "objective.pairs=none"),
    ("evaluate RUN/rotary data.folder=empty-test", 3, "empty-test/a.test.txt"),
    # Tables
    ("train classify data.folder=t4 SMALL", 3, "tab"),
    ("train classify data.folder=table SMALL data.pair=another", 3, "'another'"),
    ("train classify data.folder=unseen SMALL", 3, "unseen/valid.tsv:3"),
    ("train classify data.folder=table SMALL 'model.head.labels=so so,good'", 2, "table/train.tsv"),
    # Pairs of files
    (f"{_PAIRS} data.source=pairs/a.en data.target=pairs/b.en", 3, "pairs/a.en"),
    (f"{_PAIRS} data.source=pairs/a.en data.target=pairs/d.en", 3, ":1: not UTF-8"),
    (f"{_PAIRS} data.source=pairs/a.en data.target=pairs/e.en", 3, "pairs/e.en:2"),
    (f"{_PAIRS} data.source=pairs/f.en data.target=pairs/f.en", 3, "train.too_long=skip"),
    (f"{_PAIRS} data.source=pairs/none.en data.target=pairs/a.en", 2, "pairs/none.en"),
    # Other settings are another run
    (
        "train bert-mini data.folder=text LEARNED objective.rate=0.3 -o RUN/bert",
        2,
        "objective.rate",
    ),
    # Comparing
    ("compare phrasebook model.dim=16", 2, "--sweep"),
    ("compare phrasebook --sweep seed=1,2 --split vald", 2, "'valid'"),
    ("compare electra-mini data.folder=text SMALL --sweep seed=1,2 -o RUN/new", 2, "generator"),
    # Evaluating
    ("evaluate no/such/run", 2, "no/such/run"),
    ("evaluate RUN/labels --source a --reference b", 2, "data.test"),
    ("summarize RUN/translator", 2, "translate"),
    ("evaluate RUN/translator --split tset", 2, "'test'"),
    ("evaluate RUN/translator --beam 0", 2, "decode.beam=0"),
    ("evaluate RUN/translator train.steps=9", 2, "train.steps=9"),
    ("evaluate RUN/translator --bleu-tokenize 13b", 2, "13a"),
    ("evaluate RUN/translator --plot x.png", 2, "--plot"),
    ("evaluate RUN/rotary", 2, "'test'"),
    ("evaluate RUN/electra --split valid", 2, "generator"),
    ("evaluate RUN/rotary --split valid --stride 0", 2, "--stride=0"),
    ("evaluate RUN/rotary --split valid --beam 4", 2, "--beam"),
    ("evaluate RUN/rotary data.folder=nowhere", 2, "data.folder=nowhere"),
    # Using
    ("translate no/such/run", 2, "no/such/run"),
    ("translate RUN/translator none.txt", 2, "none.txt"),
    ("translate RUN/translator data.pair=en-fr", 2, "decode."),
    ("translate RUN/translator --beam 100000", 2, "decode.beam=100000"),
    ("translate RUN/translator --sample --top-p 0", 2, "top_p"),
    ("translate RUN/translator --sample --beam 2", 2, "--sample"),
    ("translate RUN/translator --engine onnx", 2, "--engine onnx"),
    ("translate RUN/translator --engine ctranslate2 --sample", 2, "sampling"),
    ("translate RUN/translator --ensemble RUN/translator --int8", 2, "ensembles"),
    ("translate RUN/translator pairs/d.en", 3, ":1: not UTF-8"),
    ("generate RUN/bert --prompt a", 2, "bert"),
    ("generate RUN/rotary --prompt a --stop ''", 2, "--stop"),
    ("generate RUN/rotary --prompt a --beam 2 --top-k 3", 2, "--beam"),
    ("generate RUN/rotary --prompt a --out x.mid", 2, "--out"),
    ("fill-mask RUN/gpt", 2, "masked words"),
    ("fill-mask RUN/maskless", 2, "mask"),
    ("classify RUN/bert", 2, "labels"),
    ("embed RUN/bert --pool men -o x.npy", 2, "'mean'"),
    # Inspecting, exchanging, serving
    ("info transformer-bas", 2, "'transformer-base'"),
    ("info transformer-base model.layer=3", 2, "'layers'"),
    ("figure RUN/bert hed", 2, "'head'"),
    ("export RUN/bert --to ctranslate2 --out x", 2, "bert"),
    ("export RUN/bert --to huggingface --out x", 2, "norm.placement=post"),
    (
        "train phrasebook model.position=rotary --exportable-to huggingface",
        2,
        "model.position=sinusoidal",
    ),
    ("import RUN/bert --out x", 2, "RUN/bert"),
    ("serve RUN/bert --port 99999", 2, "--port"),
    ("serve RUN/bert --token-file none", 2, "--token-file"),
    ("scaling-laws language data.folder=text --budget 3", 2, "--budget"),
    ("claims --all --seeds 1,1", 2, "--seeds"),
]


def write(name: str, content: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module", autouse=True)
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A working folder with files and runs; the stderr of training each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        for name, content in FILES.items():
            write(name, content)
        lines = {}
        for name, words in RUNS.items():
            code, printed, lines[name] = call("train", *words, "--out", f"runs/{name}")
            assert (code, printed) == (0, ""), lines[name]
        images = VitConfig(dim=8, layers=1, heads=1, image_size=8, patch_size=4)
        run = Run(task="images", data=None, tokens=None, model=images)
        save_run(run, None, images.build(), Path("runs/images"))
        for name in ("run.toml", "tokenizer.json"):
            write(f"exported/{name}", Path("runs/gpt", name).read_bytes())
        write("exported/model.bin", b"CTranslate2")
        shutil.copytree("runs/bert", "runs/maskless")
        path = Path("runs/maskless/tokenizer.json")
        path.write_text(path.read_text().replace("<mask>", "<musk>"))
        settings = Path("runs/maskless/run.toml")
        settings.write_text(settings.read_text().partition("\n")[2])  # without its check sum
        yield lines


@pytest.mark.parametrize(("command", "code", "named"), ERRORS, ids=[row[0] for row in ERRORS])
def test_a_user_error(command: str, code: int, named: str) -> None:
    settings = {
        "LEARNED": "SMALL model.position=learned",
        "SMALL": " ".join(SMALL),
        "LARGE": " ".join(SMALL[:3]),
        "RUN/": "runs/",
    }
    for name, value in settings.items():
        command, named = command.replace(name, value), named.replace(name, value)
    words = shlex.split(command)
    if words[0] == "train" and "-o" not in words and words[1] in recipes():
        words += ["-o", "runs/new"]
    before = files()
    assert named in mistake(*words, code=code, stdin=b"the [MASK] dog\n")
    assert files() == before


def files() -> list[Path]:
    """All files but conversions, which a command may make before it reads its input."""
    return sorted(path for path in Path().rglob("*") if "engines" not in path.parts)


@pytest.mark.parametrize("name", sorted({*recipes()} - {"phrasebook", "translation"}))
def test_a_recipe_without_data_asks_for_them(name: str) -> None:
    sizes = [one for one in SMALL if name != "elmo-mini" or "heads" not in one]  # LSTMs have none
    for setting in ("seed=1", "data.folder=nowhere", "data.folder=table/train.tsv"):
        line = mistake("train", name, *sizes, setting, "-o", "runs/new")
        assert "data." in line
        assert not Path("runs/new").exists()


# --- no errors ---


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


def test_windows_line_ends_change_nothing() -> None:
    write("windows/corpus.txt", LONG.replace("\n", "\r\n"))
    for recipe, position in (("language", "rotary"), ("bert-mini", "learned")):
        out = Path(f"runs/windows-{recipe}")
        words = (recipe, "data.folder=windows", *SMALL, *STEPS, f"model.position={position}")
        assert call("train", *words, "--out", out)[0] == 0
        twin = Path("runs", "rotary" if recipe == "language" else "bert")
        assert (out / "tokenizer.json").read_bytes() == (twin / "tokenizer.json").read_bytes()
        assert _losses(out) == _losses(twin)
    write("windows/train.tsv", table(ROWS).replace("\n", "\r\n"))
    words = ("classify", "data.folder=windows", *SMALL, *EPOCHS)
    assert call("train", *words, "--out", "runs/cr")[0] == 0
    assert read_run(Path("runs/cr")).model == read_run(Path("runs/labels")).model
    assert result("classify", "runs/cr", stdin=b"a dog\n").strip() in ("good", "so so")


def test_a_refused_training_can_be_repeated_in_the_same_folder() -> None:
    out = Path("runs/repeated")
    out.mkdir()
    words = ("train", "gpt-mini", TEXT, *SMALL[:3], *STEPS, "--out", out)
    mistake(*words, "model.max_length=100000", code=3)
    assert not any(out.iterdir())
    assert call(*words, "model.max_length=16")[0] == 0


def test_a_run_resumes_without_the_model_that_it_started_from() -> None:
    shutil.copytree("runs/bert", "runs/start")
    first = ("train.epochs=2", "train.save_every=1")
    words = ("train", "classify", TABLE, *first, "init=runs/start", "--out", "runs/resumed")
    assert call(*words)[0] == 0
    shutil.rmtree("runs/start")
    assert "train RUN/run.toml --out RUN" in mistake(*words)
    code, _, said = call("train", "runs/resumed/run.toml", "--out", "runs/resumed")
    assert code == 0, said
    assert "from step" in said


def test_the_next_command_works_as_printed(said: dict[str, str]) -> None:
    for name, lines in said.items():
        last = lines.splitlines()[-1]
        if name == "electra":
            assert last.endswith("train classify data.train=FILE init=runs/electra")
            continue
        words = last.split(" evaluate ")[1].split()
        assert words[0] == f"runs/{name}"
        assert result("evaluate", *words)


def test_a_prompt_longer_than_the_context() -> None:
    long = ("--prompt", "the dog sees " * 20, "--max-new-tokens", "3")
    assert "16" in mistake("generate", "runs/gpt", *long)  # learned positions end there
    code, printed, said = call("generate", "runs/rotary", *long)
    assert code == 0
    assert printed.startswith(long[1])
    assert "16" in said


def test_another_text_replaces_the_one_that_was_trained_on() -> None:
    """A file in place of the run's folder is not looked for inside it, nor the other way."""
    write("other-text/more.txt", LONG)
    for setting in ("data.file=other-text/more.txt", "data.folder=other-text"):
        assert "bits_per_character" in result("evaluate", "runs/gpt", setting, "--split", "valid")
