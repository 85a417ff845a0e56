"""Commands that exchange weights with other programs: import, export."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import command_name, say
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.decode.beam import Decode
    from manyheads.run import Run

Folder = Annotated[Path, out_option("Folder to write; new or empty", "FOLDER")]
FORMATS = ("huggingface", "ctranslate2", "onnx", "peft")


def import_folder(
    folder: Annotated[Path, argument("DIR", "Folder with config.json, model.safetensors")],
    out: Folder,
) -> None:
    """Import a Hugging Face folder as a run: weights, tokenizer, settings.

    Examples
      $ manyheads import bert-base-uncased/ --out runs/bert-base
      $ manyheads train classify data.train=reviews.tsv init=runs/bert-base

    Nothing is downloaded, unpickled or executed. All commands also accept DIR itself.
    """
    from manyheads.exchange.huggingface import import_model
    from manyheads.fileio import replace_files
    from manyheads.loading import check_vocabulary, import_notes, run_of
    from manyheads.run import SETTINGS, save_run

    _refuse_full(out)
    imported = import_model(folder)
    run = run_of(imported)
    check_vocabulary(folder, imported.tokenizer, run.model)
    with replace_files(out, last=SETTINGS) as beside:
        save_run(run, imported.tokenizer, imported.model, beside)
    for note in import_notes(imported):
        say(note)
    count = sum(p.numel() for p in imported.model.parameters())
    say(f"imported: {out} ({run.model.kind}, {count:,} parameters)")
    say(f"next: {command_name()} info {out}")


def export(
    run: Annotated[Path, argument("RUN", "A run folder")],
    out: Folder,
    to: Annotated[str, option(", ".join(FORMATS), metavar="FORMAT")],
    quantization: Annotated[
        str | None, option("ctranslate2: int8, float16, ... [default: float32]", metavar="NAME")
    ] = None,
) -> None:
    """Export a run for Hugging Face, CTranslate2, ONNX Runtime or PEFT.

    Examples
      $ manyheads export runs/demo --to huggingface --out demo-hf
      $ manyheads export runs/demo --to ctranslate2 --quantization int8 -o demo-ct2

    huggingface writes a folder for AutoModel and AutoTokenizer; ctranslate2 supports
    encoder–decoders and language models; onnx writes graphs for ONNX Runtime;
    peft writes the LoRA adapter of a run trained with finetune.lora.
    """
    from manyheads.exchange.card import model_card
    from manyheads.exchange.ctranslate2 import write_ctranslate2
    from manyheads.exchange.folder import their_decoding, write_huggingface, write_peft
    from manyheads.exchange.onnx import write_onnx
    from manyheads.fileio import replace_files, write_text
    from manyheads.finetune import load_pretrained
    from manyheads.loading import load_run
    from manyheads.models.gpt import Gpt
    from manyheads.models.seq2seq import Seq2Seq
    from manyheads.run import SETTINGS, TOKENIZER, read_scores, settings_text

    _check_format(to)
    if quantization is not None and to != "ctranslate2":
        raise UserError("--quantization works only with --to ctranslate2: leave it out")
    _refuse_full(out)
    loaded = load_run(run)
    model, settings, note = loaded.model, loaded.run, ""
    with replace_files(out, last=SETTINGS) as beside:
        if to == "huggingface":
            write_huggingface(model, loaded.own_tokenizer, settings.decode, beside)
            if isinstance(model, Seq2Seq | Gpt) and loaded.own_tokenizer is not None:
                fixed = their_decoding(settings.decode, model)
                note = _changes(settings.decode, "transformers", fixed)
        elif to == "onnx":
            write_onnx(model, beside)
        elif to == "peft":
            lora = settings.finetune and settings.finetune.lora
            if not lora:
                raise UserError(f"{run} was trained without finetune.lora: --to huggingface")
            base = settings.model.build()
            start = _base_of_adapter(Path(settings.init))
            load_pretrained(base, load_run(start))
            write_peft(model, base, loaded.own_tokenizer, settings.decode, lora, start, beside)
        elif isinstance(model, Seq2Seq | Gpt):
            fixed = {"stopping": "early", "at_limit": "truncate"}
            note = _changes(settings.decode, "CTranslate2", fixed)
            decode = dataclasses.replace(settings.decode, **fixed)
            settings = dataclasses.replace(settings, decode=decode)
            precision = quantization or "float32"
            write_ctranslate2(model, loaded.tokenizer, beside, precision, decode)
        else:
            raise loaded.unsupported("runs in CTranslate2", "a seq2seq or a gpt model")
        if to != "huggingface" and loaded.own_tokenizer is not None:
            loaded.own_tokenizer.save(beside / TOKENIZER)
        # transformers writes the tokenizer of a Hugging Face folder.
        sealed = None if to == "huggingface" else beside
        write_text(beside / SETTINGS, settings_text(settings, sealed))
        scores = read_scores(run)
        count = sum(p.numel() for p in model.parameters())
        write_text(beside / "README.md", model_card(out.name, settings, scores, to, count))
    say(f"exported: {out}{note}")


def check_exportable(run: "Run", to: str) -> None:
    """Refuse, before training, a model that a format cannot express."""
    from manyheads.exchange import refuse_approximations
    from manyheads.exchange.ctranslate2 import unsupported
    from manyheads.exchange.huggingface import plan_export
    from manyheads.nn.block import on_meta

    _check_format(to)
    config: Any = run.model
    if run.spec.reads_text and config.vocab_size is None:  # the tokenizer decides it later
        config = dataclasses.replace(config, vocab_size=1)
    with on_meta():
        model = config.build()
    if to in ("huggingface", "peft"):
        plan_export(model)
    elif to == "onnx":
        refuse_approximations(model)
    elif reason := unsupported(model, run.decode):
        raise UserError(f"CTranslate2 cannot express this model: {reason}")


def _check_format(to: str) -> None:
    from manyheads.config import nearest

    if to not in FORMATS:
        raise UserError(f"{to} is not a format of export: {nearest(to, FORMATS)}")


def _base_of_adapter(start: Path) -> Path:
    """The folder that PEFT opens as the base model: `start`, or the export of that run next to it.

    The adapter is the difference from the weights in this folder.
    """
    from manyheads.exchange.huggingface import CONFIG

    exported = Path(f"{start}-hf")
    for folder in (start, exported):
        if (folder / CONFIG).is_file():
            return folder
    raise UserError(
        f"PEFT cannot open {start}, the base model of the adapter: first run {command_name()} "
        f"export {start} --to huggingface --out {exported}"
    )


def _changes(decode: "Decode", program: str, fixed: dict[str, Any]) -> str:
    """A note on the decoding settings that a program does not let us choose."""
    changed = [
        f"decode.{name}={value} in place of {getattr(decode, name)}"
        for name, value in fixed.items()
        if getattr(decode, name) != value
    ]
    return f", where {program} has {', '.join(changed)}" if changed else ""


def _refuse_full(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: choose another folder with --out")
    if any(parent.is_file() for parent in out.parents):
        raise UserError(f"{out} cannot be made, it is inside a file: choose another --out")
