"""Write the golden record: what release 0.1 computes, in bits.

    OMP_NUM_THREADS=1 python -m tests.golden.record [--out DIR] [NAME...]

The record is made from release 0.1 (commit 431ca86) and never edited by hand. It is not made
again when a test fails: a difference means that the code computes something else. It is driven
by interfaces that users have: the command line, files of a run folder, public names of the
package. `run-0.1/` is a run folder that 0.1 wrote and that SIGTERM stopped in training;
`language-0.1/` is a language model of 0.1. Both are written only if they do not exist.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.golden.harness import (
    RECORD,
    Workspace,
    call,
    checked,
    fingerprint,
    hash_weights,
    read_metrics,
    run_command,
    schema,
)
from tests.golden.runs import (
    BEAM,
    ENSEMBLE,
    EVALUATE,
    GENERATE,
    GREEDY,
    PHRASEBOOK,
    RUNS,
    SAMPLE,
    SCHEMA_COMMANDS,
    SIZES,
    GoldenRun,
    by_name,
)

RUN_FOLDER = Path(__file__).parent / "run-0.1"
RUN_SETTINGS = (
    *(*SIZES, *PHRASEBOOK, "data.train_pairs=1500", "model.dim=24", "model.hidden=48"),
    *("model.layers=1", "tokens.vocab_size=450", "train.batch_tokens=1500"),
    *("train.steps=630", "train.warmup_steps=60", "train.learning_rate=1e-2"),
    *("train.save_every=600", "train.validate_every=300", "model.dropout=0.05"),
)
RUN_COMMANDS = (GREEDY, BEAM, SAMPLE, ENSEMBLE, EVALUATE)
LANGUAGE_FOLDER = Path(__file__).parent / "language-0.1"
LANGUAGE_SETTINGS = (
    *(*SIZES, "data.folder=data/texts", "model.dim=24", "model.hidden=48", "train.steps=300"),
    *("train.learning_rate=1e-2", "train.batch_tokens=1024", "train.validate_every=150"),
    "train.save_every=300",
)
QUIET = ("train.log_every=50",)
LANGUAGE_COMMANDS = GENERATE[:2]
PLACE = ("--threads", "1", "--device", "cpu")
STOPPED_AT = 601


def record_run(run: GoldenRun, space: Workspace) -> dict[str, Any]:
    folder = space.train(run)
    result: dict[str, Any] = read_metrics(folder)
    result["weights"] = hash_weights(folder / "model.safetensors")
    result["outputs"] = {one.key: space.output(run, one) for one in run.commands}
    return result


def collapse(shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Names with `{i}` for a layer's number, each with how many layers have it and its shape."""
    found: dict[str, list[list[int]]] = {}
    for name, shape in shapes.items():
        found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name), []).append(shape)
    collapsed: dict[str, Any] = {}
    for pattern, all_shapes in found.items():
        if all(shape == all_shapes[0] for shape in all_shapes):
            collapsed[pattern] = [len(all_shapes), all_shapes[0]]
        else:
            collapsed[pattern] = [len(all_shapes), all_shapes]
    return collapsed


def record_preset(name: str) -> dict[str, Any]:
    """Names and shapes of a preset's state dict, and what `info` computes for it."""
    import manyheads

    with torch.device("meta"):
        model = manyheads.build(name)
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    info = json.loads(checked("info", name, "--json"))
    return {"state_dict": collapse(shapes), "info": info}


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def build_small(name: str) -> torch.nn.Module:
    """A preset with seeded weights and small sizes."""
    import manyheads

    sizes: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "hidden": 64}
    if name == "vit-tiny":
        sizes |= {"image_size": 32}
    else:
        sizes |= {"vocab_size": 100, "max_length": 32}
    torch.manual_seed(1)
    return manyheads.build(name, **sizes).eval()


def record_built(name: str) -> dict[str, Any]:
    """Initial weights, output and captured attention maps of a small variant of a preset."""
    import manyheads

    model = build_small(name)
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(4, 100, (2, length), generator=generator) for length in (9, 7)]
    inputs = tokens[: 2 if name.startswith("transformer") else 1]
    if name.startswith("vit"):
        inputs = [torch.randn(2, 3, 32, 32, generator=generator)]
    with torch.no_grad():
        output = model(*inputs)
        with manyheads.capture(model) as maps:
            model(*inputs)
    attention = {f"self {i}": one for i, one in enumerate(maps["self"])}
    if name.startswith("transformer"):
        attention |= {f"cross {i}": one for i, one in enumerate(maps["cross"])}
    return {
        "weights": hash_tensors(model.state_dict()),
        "output": {
            "shape": list(output.shape),
            "sha256": hash_tensors({"output": output}),
            "first": [float(x) for x in output.flatten()[:4]],
        },
        "maps": {
            "shapes": {key: list(one.shape) for key, one in attention.items()},
            "sha256": hash_tensors(attention),
        },
    }


BUILT = ("transformer-base", "bert-base", "gpt3-small", "vit-tiny", "music-transformer")
EXPORTED = ("transformer-base", "bert-base", "gpt3-small")


def record_huggingface(name: str) -> dict[str, Any]:
    """Names and weights after `to_huggingface`, and after the way back."""
    import transformers

    import manyheads

    theirs = manyheads.to_huggingface(build_small(name))
    ours = manyheads.from_huggingface(theirs)
    return {
        "transformers": transformers.__version__,
        "class": type(theirs).__name__,
        "theirs": hash_tensors(theirs.state_dict()),
        "ours": hash_tensors(ours.state_dict()),
    }


def record_attention() -> dict[str, Any]:
    """`attend` and `attention_weights` on seeded tensors, by score, rule, position and core."""
    import manyheads

    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, 3, 6, 8, generator=generator) for _ in range(3))
    ways: list[dict[str, Any]] = [{}, {"rule": "causal"}, {"scale": 0.5}]
    ways += [{"score": "dot"}]
    ways += [{"position": one, "rule": "causal"} for one in ("rotary", "alibi")]
    result = {}
    for way in ways:
        torch.manual_seed(3)
        result[f"attention_weights {way}"] = manyheads.attention_weights(q, k, **way)
        torch.manual_seed(3)
        result[f"attend {way}"] = manyheads.attend(q, k, v, **way)
    for core in ("fused", "tiled", "local"):
        torch.manual_seed(3)
        result[f"attend core={core}"] = manyheads.attend(q, k, v, core=core, rule="causal")
    return {
        key: {
            "shape": list(tensor.shape),
            "sha256": hash_tensors({"": tensor}),
            "first": [float(x) for x in tensor.flatten()[:4]],
        }
        for key, tensor in result.items()
    }


def record_public() -> dict[str, Any]:
    """The public names of the package, its presets and the recipes used here."""
    import manyheads

    return {
        "all": sorted(manyheads.__all__),
        "accessible": sorted(name for name in manyheads.__all__ if hasattr(manyheads, name)),
        "presets": preset_names(),
        "recipes": sorted({run.recipe for run in RUNS}),
    }


def preset_names() -> list[str]:
    """`manyheads.presets()`, also where importing the module of that name has hidden it (0.1)."""
    import manyheads

    found: Any = manyheads.presets
    return list(found() if callable(found) else found.presets())


def record_schema(name: str, space: Workspace) -> Any:
    words = []
    for word in SCHEMA_COMMANDS[name]:
        out = space.folder / f"schema-{name}"
        words.append(space.fill_in(word.replace("{out}", str(out))))
    return schema(json.loads(checked(*words)))


def make_run_folder(out: Path) -> None:
    """Train on the phrasebook and stop by SIGTERM after step 601 of 630, one step after a save.

    The signal is raised while the state of step 600 is saved, so the trainer sees it at the end
    of step 601, saves again and exits with code 143.
    """
    replace = os.replace

    def replace_and_stop(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if "state" in Path(target).parts and not stopped:
            stopped.append(True)
            signal.raise_signal(signal.SIGTERM)

    stopped: list[bool] = []
    os.replace = replace_and_stop  # type: ignore[assignment]
    try:
        code, _, err = call("train", "phrasebook", *RUN_SETTINGS, *QUIET, "--out", out, *PLACE)
    finally:
        os.replace = replace
    assert code == 128 + signal.SIGTERM, err
    assert f"step {STOPPED_AT}" in err, err
    (out / "state" / "lock").unlink(missing_ok=True)


def make_language_folder(out: Path) -> None:
    """A tiny language model of characters; its data are named by a relative path."""
    with tempfile.TemporaryDirectory() as folder:
        Workspace(Path(folder)).data("texts")
        before = Path.cwd()
        os.chdir(folder)
        try:
            checked("train", "shakespeare-char", *LANGUAGE_SETTINGS, *QUIET, "--out", out, *PLACE)
        finally:
            os.chdir(before)
    shutil.rmtree(out / "state")


def record_language(root: Path) -> dict[str, Any]:
    """What the language model of 0.1 generates."""
    folder = root / "language-0.1"
    shutil.copytree(LANGUAGE_FOLDER, folder)
    return {one.key: run_command(folder, one, PLACE, root) for one in LANGUAGE_COMMANDS}


def record_old_run(root: Path) -> dict[str, Any]:
    """What the folder of 0.1 translates and scores, and how its training ends."""
    folder = root / "run-0.1"
    shutil.copytree(RUN_FOLDER, folder)
    result: dict[str, Any] = {
        "stopped": hash_weights(folder / "model.safetensors"),
        "outputs": {one.key: run_command(folder, one, PLACE, root) for one in RUN_COMMANDS},
    }
    resumed = root / "resumed"
    shutil.copytree(RUN_FOLDER, resumed)
    checked("train", "phrasebook", *RUN_SETTINGS, "--out", resumed, *PLACE)
    result["resumed"] = read_metrics(resumed, after=STOPPED_AT)
    result["resumed"]["weights"] = hash_weights(resumed / "model.safetensors")
    result["resumed"]["outputs"] = {
        one.key: run_command(resumed, one, PLACE, root) for one in (BEAM, EVALUATE)
    }
    return result


def dumps(value: Any) -> str:
    """Indented JSON in which a list or an object that fits on a line stands on one line."""

    def write(one: Any, indent: str) -> str:
        short = json.dumps(one, ensure_ascii=False)
        if not isinstance(one, dict | list) or len(short) + len(indent) <= 96:
            return short
        inner = indent + " "
        if isinstance(one, list):
            if all(isinstance(item, str) and len(item) < 30 for item in one):
                items = [json.dumps(item) for item in one]
                rows = [", ".join(items[at : at + 4]) for at in range(0, len(items), 4)]
            else:
                rows = [write(item, inner) for item in one]
            return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
        rows = [f"{json.dumps(k, ensure_ascii=False)}: {write(v, inner)}" for k, v in one.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"

    return write(value, "") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("names", nargs="*", help="runs; all and everything else if none is given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)

    def save(name: str, value: Any) -> None:
        (options.out / f"{name}.json").write_text(dumps(value), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        space = Workspace(root / "work")
        for run in [by_name()[name] for name in options.names] or RUNS:
            save(run.name, record_run(run, space))
            print(run.name, flush=True)
        if options.names:
            return
        save("presets", {name: record_preset(name) for name in preset_names()})
        save("built", {name: record_built(name) for name in BUILT})
        save("huggingface", {name: record_huggingface(name) for name in EXPORTED})
        save("attention", record_attention())
        save("public", record_public())
        save("schemas", {name: record_schema(name, space) for name in SCHEMA_COMMANDS})
        if not RUN_FOLDER.exists():
            make_run_folder(RUN_FOLDER)
        save("run-0.1", record_old_run(root))
        if not LANGUAGE_FOLDER.exists():
            make_language_folder(LANGUAGE_FOLDER)
        save("language-0.1", record_language(root))
        save("fingerprint", fingerprint())


if __name__ == "__main__":
    main()
