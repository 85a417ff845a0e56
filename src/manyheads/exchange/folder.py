"""A model with its tokenizer and its way of writing as a folder that `transformers` opens."""

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.decode.beam import Decode, SpecialTokens
from manyheads.errors import UserError
from manyheads.exchange.families.images import PREPROCESSOR, write_spread
from manyheads.exchange.huggingface import import_transformers, to_huggingface
from manyheads.exchange.writing import changed_there, known, special_of, tell
from manyheads.fileio import PARTIAL
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import EncoderDecoderConfig
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Vit
from manyheads.tokenizer.tokenizer import Tokenizer

# Their names for the special tokens that a tokenizer may have.
NAMED = {
    "pad": "pad_token",
    "start": "bos_token",
    "end": "eos_token",
    "unknown": "unk_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "classify": "cls_token",
}


def write_huggingface(
    model: nn.Module, tokenizer: Tokenizer | None, decode: Decode, folder: Path
) -> list[str]:
    """Write config.json, safetensors, tokenizer.json and generation_config.json, all or nothing.

    A model of images has preprocessor_config.json instead of the last two.
    The settings of writing that `transformers` has otherwise are the answer.
    """
    marked = copy.copy(model)  # the same weights; the caller's model is left as it is
    marked.special = special_of(tokenizer, decode, model)  # type: ignore[assignment]
    theirs = to_huggingface(marked)
    if tokenizer is not None and isinstance(model, Seq2Seq | Gpt):
        tell(theirs, model, SpecialTokens(tokenizer, decode))
    folder.parent.mkdir(parents=True, exist_ok=True)
    import_transformers().utils.logging.disable_progress_bar()  # of a single file
    with tempfile.TemporaryDirectory(PARTIAL, f".{folder.name}.", folder.parent) as beside:
        theirs.save_pretrained(beside)
        if tokenizer is not None:
            _their_tokenizer(tokenizer, model, decode).save_pretrained(beside)
        if isinstance(model, Vit) and model.config.pixel_mean:
            table = json.dumps(write_spread(model.config), indent=2)
            (Path(beside) / PREPROCESSOR).write_text(table + "\n", encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(beside).iterdir()):
            path.chmod(folder.stat().st_mode & 0o666)
            os.replace(path, folder / path.name)
    return changed_there(decode, model) if tokenizer is not None else []


def in_frame(tokenizer: Tokenizer, decode: Decode, config: Any) -> Tokenizer:
    """With the special tokens around a text that such a model reads: its own, else ours."""
    if any(tokenizer.frame()):
        return tokenizer
    if isinstance(config, EncoderDecoderConfig):
        *before, end = SpecialTokens(tokenizer, decode).source([])
        return tokenizer.with_frame(before, [end])
    if not isinstance(config, BertConfig | ElmoConfig):
        return tokenizer
    first, last = known(tokenizer, "classify"), known(tokenizer, "separator")
    if first is None or last is None:
        raise UserError(
            "this tokenizer puts nothing around a text and has no [CLS] and [SEP] to put there, "
            "which the model reads: use the model's own tokenizer.json"
        )
    return tokenizer.with_frame([first], [last])


def _their_tokenizer(tokenizer: Tokenizer, model: nn.Module, decode: Decode) -> Any:
    ids = {theirs: known(tokenizer, ours) for ours, theirs in NAMED.items()}
    special = {name: tokenizer.content(x) for name, x in ids.items() if x is not None}
    try:
        framed = in_frame(tokenizer, decode, model.config)
    except UserError:  # nothing is read here: the tokenizer leaves as it came
        framed = tokenizer
    inner = tokenizers.Tokenizer.from_str(framed.to_json())
    kind = import_transformers().PreTrainedTokenizerFast
    config: Any = model.config
    return kind(tokenizer_object=inner, model_max_length=config.max_length, **special)
