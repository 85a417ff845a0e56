"""Translation on a GPU: Multi30k tokenized as in the literature and raw, and Tatoeba.

    python benchmarks/translations.py prepare multi30k literature --source en --target de
    python benchmarks/translations.py literature literature --seeds 1,2,3 --device cuda > rows.jsonl
    python benchmarks/translations.py raw multi30k --pairs en-de,en-fr --device cuda >> rows.jsonl
    python benchmarks/translations.py tatoeba tatoeba_de-en --device cuda >> rows.jsonl
    python benchmarks/translations.py together kept/RUN kept/RUN --device cuda >> rows.jsonl
    python benchmarks/translations.py --table rows.jsonl --picture tatoeba.png

prepare: lower case, Moses' normalised punctuation, Moses' tokens (needs sacremoses), all files of
the two languages, under the same names.
literature, raw: each preset and seed a training, scored on the validation sentences (by which a
preset is to be chosen) and on the test sets that are there. `published` is the text-only
Transformer-Tiny of Wu et al. (2021); the others change something of it, several with + between
(ours+agreement) all that theirs do.
together: runs that --keep left, which write together, scored as each of them was.
tatoeba: each system and seed, with the validation loss and the BLEU of the first validation
sentences against the seconds.

One JSON object a line, as soon as it is measured, all in one process; no run begins after --until
seconds. Settings a.b=c come last, for all runs; --keep FOLDER keeps the runs.

BLEU is sacreBLEU's own (13a, with case); `tokenised` is that of the words between the spaces of
prepared text, lower-cased; other outputs are prepared first, if sacremoses is installed.
Seconds are those of training, validations and saves included.
"""

import argparse
import gzip
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU

from manyheads.data.files import read_lines
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import UserError
from manyheads.fileio import replace_file
from manyheads.lab.figures.plots import curves
from manyheads.loading import ensemble, load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.tasks.translation import evaluate_translation
from manyheads.train.loop import Trainer
from table_runs import Row, fitted, sizes
from tables import each, rows_of

MULTI30K = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
# Compiling takes longer than it saves where passes are recorded; decoding is left to the end.
GPU = "train.compile=no train.validate_every=500 decode.bleu_sentences=0"
# Saves are epochs of the training pairs, of which ten are averaged.
PUBLISHED = f"""{GPU} tokens.vocab_size=10000 model.dim=128 model.layers=4 model.heads=4
    model.ffn_dim=256 model.dropout=0.3 model.norm=post train.steps=8000 train.batch_tokens=8192
    train.schedule=transformer train.learning_rate=5e-3 train.warmup_steps=2000 train.eps=1e-8
    train.clip=none train.label_smoothing=0.1 train.save_every=63 train.average_checkpoints=10
    decode.beam=5
    decode.penalty=length decode.length_penalty=1.0"""
# Overrides of each system. `ours` is the best known setting; the others change one thing.
PRESETS = {
    "published": "",
    "ours": "model.norm=pre model.position=rotary model.attention_dropout=0.1 train.clip=1",
    "pre-norm": "model.norm=pre",
    "rotary": "model.position=rotary",
    "dropout-0.2": "model.dropout=0.2",
    "dropout-0.4": "model.dropout=0.4",
    "attention-dropout": "model.attention_dropout=0.1",
    "small-vocabulary": "tokens.vocab_size=5000",
    "narrow": "model.ffn_dim=128",
    "wide": "model.ffn_dim=512",
    "cosine": "train.schedule=cosine train.clip=1",
    "small-batches": "train.batch_tokens=4096 train.save_every=126",
    "longer-average": "train.save_every=200",
    "agreement": "train.rdrop_alpha=5",
    "segmentations": "train.bpe_dropout_copies=8 train.bpe_dropout=0.1",
}
TATOEBA = """train.compile=no tokens.vocab_size=10000 train.too_long=skip train.steps=4000
    train.batch_tokens=8192 train.schedule=cosine train.warmup_steps=500 train.validate_every=200
    train.save_every=4000 decode.bleu_sentences=300"""
BASE = """model.dim=512 model.layers=6 model.heads=8 model.ffn_dim=2048 model.dropout=0.3
    train.warmup_steps=1000"""
SYSTEMS = {
    "base": f"{BASE} model.norm=post train.learning_rate=7e-4",
    "base-pre-norm": f"{BASE} model.norm=pre train.learning_rate=1e-3",
    "small": """model.dim=256 model.layers=4 model.heads=4 model.ffn_dim=1024 model.dropout=0.2
        train.learning_rate=2e-3""",
    "tiny": "model.dropout=0.1 train.learning_rate=5e-3",
    "rnn": "model=rnn model.dim=260 model.dropout=0.2 train.learning_rate=5e-3",
}
COSTS = {
    "steps": ",.0f",
    "seconds": ".0f",
    "ms_a_step": ".1f",
    "valid_loss": ".3f",
}
SCORES = {"tokenised": ".2f", "bleu": ".2f", "chrf": ".1f"}


@dataclass(frozen=True)
class Job:
    """A training and what it is scored on; `words` makes prepared text of what it writes."""

    table: str
    system: str
    seed: int
    settings: list[str]
    splits: Sequence[str]
    words: Callable[[str], str] | None


def moses(language: str) -> Callable[[str], str]:
    """A line as the literature has it: lower case, normalised punctuation, tokens, in that order.

    Moses also writes &apos; for an apostrophe and the like. Here they are unchanged, each a part
    of as many words as before, so that the BLEU of words does not change.
    """
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError:
        raise UserError("Moses' tokens need sacremoses: pip install sacremoses") from None
    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return lambda line: tokenizer.tokenize(
        normalizer.normalize(line.lower()), return_str=True, escape=False
    )


def stems(folder: Path, source: str, target: str) -> list[str]:
    """The common names of the files of both languages, without their endings."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder (seen from here): give that of the corpus")
    names = {path.name.removesuffix(".gz") for path in folder.iterdir()}
    ends = (f".{source}", f".{target}")
    firsts = {name.removesuffix(ends[0]) for name in names if name.endswith(ends[0])}
    common = sorted(stem for stem in firsts if f"{stem}{ends[1]}" in names)
    if not common:
        raise UserError(
            f"{folder} has no files NAME.{source} and NAME.{target}: give --source and --target "
            "as the files end"
        )
    return common


def prepare(folder: Path, out: Path, source: str, target: str) -> None:
    """All files of two languages as the literature has them, under the same names, gzipped."""
    names = stems(folder, source, target)
    if out.resolve() == folder.resolve():
        raise UserError(f"{out} is where the raw files are: choose another folder for the prepared")
    out.mkdir(parents=True, exist_ok=True)
    for language in (source, target):
        words = moses(language)
        for stem in names:
            lines = [words(line) + "\n" for line in read_lines(folder / f"{stem}.{language}")]
            content = gzip.compress("".join(lines).encode("utf-8"), mtime=0)
            path = out / f"{stem}.{language}.gz"
            replace_file(path, partial(_write, content))
            print(f"{path}: {len(lines):,} lines", file=sys.stderr)


def check_prepared(path: Path) -> None:
    """Refuse raw text, whose words are not those that the literature counts."""
    if any(line != line.lower() for line in read_lines(path)):
        raise UserError(f"{path} has capitals: give a folder that `prepare` has written")


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def watch(trainer: Trainer) -> list[Row]:
    """A list that every validation adds to: seconds from now on, step, scores."""
    points: list[Row] = []
    task: Any = trainer.task
    begun, validate = time.monotonic(), task.validate

    def timed(model: torch.nn.Module) -> dict[str, float]:
        scores = validate(model)
        seconds = time.monotonic() - begun
        points.append({"seconds": seconds, "step": trainer.progress.step, **scores})
        return scores

    task.validate = timed
    return points


def last_loss(folder: Path) -> float:
    """The mean loss of the last steps that were logged together, dropout on."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [row["loss"] for row in lines if row["split"] == "train"][-1]


def tokenised(
    written: list[str], expected: list[str], words: Callable[[str], str] | None
) -> tuple[float, str]:
    """BLEU of space-separated tokens, and its signature; `words` tokenizes the text first."""
    if words is not None:
        written, expected = list(map(words, written)), list(map(words, expected))
    metric = BLEU(tokenize="none", force=True)  # that it is tokenised is meant
    return metric.corpus_score(written, [expected]).score, str(metric.get_signature())


def scored(
    translator: BaseTranslator, data: Any, job: Job
) -> tuple[dict[str, Row], dict[str, str]]:
    """The scores of each split, and their signatures."""
    scores: dict[str, Row] = {}
    signature: dict[str, str] = {}
    for split in job.splits:
        done = evaluate_translation(translator, data, split)
        kinds = ("bleu", "chrf", "loss")
        scores[split] = {key: done.scores[key] for key in kinds if key in done.scores}
        signature |= done.scores["signature"]
        if job.table == "literature" or job.words is not None:
            made = tokenised(done.translations, done.corpus.targets, job.words)
            scores[split]["tokenised"], signature["tokenised"] = made
    return scores, signature


def measure_together(folders: list[Path], device: str) -> Row:
    """Runs that were kept, as one; the first says which data they are scored on."""
    opened = [load_torch_run(folder, device) for folder in folders]
    data: Any = opened[0].run.data
    there = stems(Path(data.folder), data.source, data.target)
    splits = ["valid", *(split for split in (*MULTI30K, "test") if split in there)]
    path = Path(data.folder) / f"{splits[1]}.{data.target}"
    prepared = all(line == line.lower() for line in read_lines(path))
    words = None if prepared else _words(data.target)
    # As `measure` names them: table, system, the two languages, seed.
    kinds = dict.fromkeys("-".join(folder.name.split("-")[1:-3]) for folder in folders)
    seed = opened[0].run.seed
    job = Job("literature" if prepared else "raw", " ".join(kinds), seed, [], splits, words)
    begun = time.monotonic()
    scores, signature = scored(ensemble(list(opened)).translator(), data, job)
    return {
        "table": job.table,
        "system": f"{job.system}, {len(folders)} together",
        "pair": f"{data.source}-{data.target}",
        "seed": seed,
        "parameters": sum(sizes(item.run.model)["parameters"] for item in opened),
        "scoring_seconds": time.monotonic() - begun,
        "scores": scores,
        "signature": signature,
        "curve": [],
        "command": shlex.join(
            ["manyheads", "evaluate", str(folders[0]), "--split", splits[1]]
            + [word for folder in folders[1:] for word in ("--with", str(folder))]
        ),
    }


def measure(job: Job, device: str, keep: Path | None) -> Row:
    """Train, then translate and score the test sets."""
    run = read_recipe("translation", job.settings)
    data: Any = run.data
    pair = f"{data.source}-{data.target}"
    saved = None if keep is None else keep / f"{job.table}-{job.system}-{pair}-{job.seed}"
    if saved is not None and saved.exists():  # its seconds would be those of the rest
        raise UserError(f"{saved} is there already: choose another --keep")
    with tempfile.TemporaryDirectory() if saved is None else nullcontext(saved) as at:
        folder = Path(at)
        begun = time.monotonic()
        trainer = make_trainer(run, folder, torch.device(device))
        ready = time.monotonic()
        points = watch(trainer)
        cost = fitted(trainer)
        trained = time.monotonic()
        opened = load_torch_run(folder, device)
        translator = opened.translator()
        scores, signature = scored(translator, data, job)
        train_loss = last_loss(folder)
    return {
        "table": job.table,
        "system": job.system,
        "pair": pair,
        "seed": job.seed,
        **sizes(opened.run.model),
        **cost,
        "train_loss": train_loss,
        "ms_a_step": 1000 * cost["seconds"] / cost["steps"],
        "reading_seconds": ready - begun,
        "scoring_seconds": time.monotonic() - trained,
        "scores": scores,
        "signature": signature,
        "curve": points,
        "command": shlex.join(["manyheads", "train", "translation", *job.settings]),
    }


def jobs_of(inputs: argparse.Namespace) -> list[Job]:
    """The requested jobs, seed by seed."""
    known = SYSTEMS if inputs.what == "tatoeba" else PRESETS
    first = {"literature": "published,ours", "raw": "ours", "tatoeba": ",".join(SYSTEMS)}
    systems = (inputs.systems or first[inputs.what]).split(",")
    for name in (part for system in systems for part in system.split("+")):
        if name not in known:
            raise UserError(f"there is no {name}: choose among {', '.join(known)}")
    pairs = f"{inputs.source}-{inputs.target}" if inputs.pairs is None else inputs.pairs
    jobs = []
    for seed in inputs.seeds:
        for pair in ("de-en" if inputs.what == "tatoeba" else pairs).split(","):
            source, _, target = pair.partition("-")
            there = stems(Path(inputs.folder), source, target)
            splits = [split for split in (*MULTI30K, "test") if split in there]
            if not splits:
                raise UserError(f"{inputs.folder} has no test set: name one test.{source}")
            if inputs.what == "literature":
                check_prepared(Path(inputs.folder) / f"{splits[0]}.{target}")
            words = _words(target) if inputs.what == "raw" else None
            where = [
                f"data.folder={inputs.folder}",
                f"data.source={source}",
                f"data.target={target}",
            ]
            for system in systems:
                base = TATOEBA if inputs.what == "tatoeba" else PUBLISHED
                changed = [known[name] for name in system.split("+")]
                settings = [*where, *base.split(), *" ".join(changed).split()]
                settings += [*inputs.settings, f"seed={seed}"]
                read_recipe("translation", settings)  # a wrong one is said before any is trained
                parts = ["valid", *splits]
                jobs.append(Job(inputs.what, system, seed, settings, parts, words))
    return jobs


def _words(language: str) -> Callable[[str], str] | None:
    try:
        return moses(language)
    except UserError as error:
        print(f"without tokenised BLEU: {error}", file=sys.stderr)
        return None


def table(paths: list[Path], picture: Path | None) -> None:
    """Print tables of costs and scores; if a run was measured twice, the last row counts."""
    last = {
        tuple(row[key] for key in ("table", "pair", "system", "seed")): row
        for row in rows_of(paths)
    }
    by_table: defaultdict[tuple[str, str], defaultdict[str, list[Row]]]
    by_table = defaultdict(lambda: defaultdict(list))
    for row in sorted(last.values(), key=lambda row: row["seed"]):
        by_table[row["table"], row["pair"]][row["system"]].append(row)
    for (name, pair), systems in by_table.items():
        print(f"\n### {name}, {pair}\n")
        _costs(systems)
        _scores(systems)
    drawn = {
        system: [(point["seconds"] / 60, point["bleu"]) for point in rows[0]["curve"]]
        for (name, _), systems in by_table.items()
        if name == "tatoeba"
        for system, rows in systems.items()
        if all("bleu" in point for point in rows[0]["curve"])  # decode.bleu_sentences
    }
    if picture is not None and not drawn:
        raise UserError("there is nothing to draw: give rows of tatoeba")
    if picture is not None:
        title = "BLEU of validation sentences, greedy, against time"
        curves(drawn, title, "BLEU", picture, "minutes of training")


def _costs(systems: dict[str, list[Row]]) -> None:
    print("| system | parameters | steps | seconds | ms a step | best valid loss |")
    print("|---" * 6 + "|")
    for system, rows in systems.items():
        cells = [f"{rows[0]['parameters'] / 1e6:.2f}M"]
        for key, shape in COSTS.items():  # those that write together were trained before
            cells.append(_cell([row[key] for row in rows if key in row], shape))
        print(f"| {system} | {' | '.join(cells)} |")


def _scores(systems: dict[str, list[Row]]) -> None:
    every = [row for rows in systems.values() for row in rows]
    shown = [key for key in SCORES if key in every[0]["signature"]]
    print(f"\n| system | sentences | {' | '.join(shown)} |")
    print("|---" * (2 + len(shown)) + "|")
    for system, rows in systems.items():
        for split in rows[0]["scores"]:
            cells = []
            for key in shown:
                values = [row["scores"][split].get(key) for row in rows]
                values = [value for value in values if value is not None]
                cells.append(_cell(values, SCORES[key]))
            print(f"| {system} | {split} | {' | '.join(cells)} |")
    reported = dict.fromkeys(f"{key} `{row['signature'][key]}`" for key in shown for row in every)
    print(f"\n{'; '.join(reported)}.")


def _cell(values: list[float], shape: str) -> str:
    """Mean ± standard deviation over the seeds, and each value; one value if all are equal."""
    shown = [f"{value:{shape}}" for value in values]
    if len(set(shown)) < 2:
        return shown[0] if shown else ""
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return f"{mean:{shape}} ± {spread:{shape}} ({' '.join(shown)})"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", choices=["prepare", "literature", "raw", "together", "tatoeba"]
    )
    parser.add_argument("folder", nargs="?")
    parser.add_argument("settings", nargs="*", help="a.b=c, for all runs; for prepare, where to")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--pairs", help="several of both for `raw`: en-de,en-fr")
    known = f"of {', '.join(PRESETS)}; of tatoeba: {', '.join(SYSTEMS)}; with commas between"
    parser.add_argument("--systems", "--presets", help=known)
    parser.add_argument("--seeds", type=numbers, default=[1], help="with commas between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="with --table: BLEU against minutes")
    inputs = parser.parse_intermixed_args(arguments)
    try:
        if inputs.table:
            table(inputs.table, inputs.picture)
            return 0
        if inputs.what is None or inputs.folder is None:
            parser.error("say what is to be measured, and give the folder of its data")
        if inputs.what == "prepare":
            if len(inputs.settings) != 1:
                parser.error("prepare needs two folders: the raw files', and one to write to")
            prepare(Path(inputs.folder), Path(inputs.settings[0]), inputs.source, inputs.target)
            return 0
        if inputs.what == "together":
            folders = [Path(name) for name in (inputs.folder, *inputs.settings)]
            return (
                0 if each([partial(measure_together, folders, inputs.device)], inputs.until) else 1
            )
        jobs = jobs_of(inputs)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if inputs.picture is not None:
        parser.error("--picture goes with --table")
    if inputs.what == "tatoeba" and inputs.pairs is not None:
        parser.error("tatoeba is German to English only: leave out --pairs")
    runs: list[Callable[[], Row]] = [
        partial(measure, job, inputs.device, inputs.keep) for job in jobs
    ]
    return 0 if each(runs, inputs.until) else 1


if __name__ == "__main__":
    sys.exit(main())
